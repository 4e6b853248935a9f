"""`agl dashboard`: runs in the browser, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from agl.stop_signals import stop_event
from agl.texts import printable
from agl.trainer.cli.options import Host, Json, KeyFile, Places, Port, Quiet, write_json


def dashboard(
    places: Places = None,
    port: Port = 8001,
    host: Host = "127.0.0.1",
    key_file: KeyFile = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """See runs in the browser: curves, steps, groups, rollouts, and every trained token."""
    from agl.trainer.dashboard.server import link, serving
    from agl.trainer.dashboard.sources import find_sources
    from agl.trainer.http.auth import Keys
    from agl.trainer.processes.environment import keep_secrets

    sources = find_sources(places or [])
    keys = Keys.find(key_file)
    keep_secrets()

    def show(url: str) -> None:
        page = link(url, keys.minted)
        write_json(json_file, {"url": url, "link": page, "stores": [source.name for source in sources]})
        if not quiet:
            for source in sources:
                typer.echo(printable(f"shows   {source.name}"))
            typer.echo(f"open    {page}")
            if keys.minted is None:
                typer.echo("key     the operator's; the page asks for it, or takes it from the link: /#key=KEY")
        if open_browser:
            webbrowser.open(page)

    async def serve() -> None:
        with stop_event() as stop:
            async with serving(sources, keys, host=host, port=port) as url:
                show(url)
                await stop.wait()

    asyncio.run(serve())


@contextlib.contextmanager
def dashboard_beside(store: str, directory: Path) -> Iterator[None]:
    """A dashboard next to a training in this directory, whose store will be at this URL; prints its link.

    Raises:
        AglError: it cannot listen.
    """
    from agl.trainer.dashboard.server import link, serving_beside
    from agl.trainer.dashboard.sources import Source
    from agl.trainer.http.auth import Keys

    keys = Keys.mint()
    with serving_beside([Source(str(directory), store)], keys) as url:
        typer.echo(f"dashboard  {link(url, keys.minted)}", err=True)
        yield
