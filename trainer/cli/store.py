"""`agl store`: serve a store over HTTP, delete what is old in one."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from pathlib import Path
from typing import Annotated

import typer

from agl.stop_signals import stop_event
from agl.texts import printable
from agl.trainer.cli.options import Host, Json, KeyFile, Port, StoreOption, duration, write_json

app = typer.Typer(help="Serve a store over HTTP, or prune one.")


@app.callback(invoke_without_command=True, epilog="Example: agl store --db sqlite:///agl.db --port 4747")
def store(
    context: typer.Context,
    db: Annotated[str, typer.Option("--db", envvar="AGL_DATABASE_URL", help="Database to serve.")] = "sqlite:///agl.db",
    host: Host = "127.0.0.1",
    port: Port = 4747,
    key_file: KeyFile = None,
    json_file: Json = None,
) -> None:
    """Serve a store to runners and trainers on other machines, and take spans of any OTLP exporter at /v1/traces."""
    if context.invoked_subcommand is not None:
        return
    asyncio.run(_serve(db, host, port, key_file, json_file))


async def _serve(db: str, host: str, port: int, key_file: Path | None, json_file: Path | None) -> None:
    from agl.trainer.dashboard.app import ui_routes
    from agl.trainer.dashboard.server import link
    from agl.trainer.http.auth import Keys
    from agl.trainer.http.local_key import split_key, with_key
    from agl.trainer.processes.environment import keep_secrets
    from agl.trainer.runners.store_coordinator import StoreCoordinator
    from agl.trainer.store import open_store
    from agl.trainer.store.http.server import StoreServer

    keys = Keys.find(key_file)
    keys.check_host(host)
    keep_secrets()
    with stop_event() as stop:
        opened = await open_store(db)
        coordinator = StoreCoordinator.of_store(opened)
        routes = [*coordinator.routes(keys), *ui_routes(opened, split_key(db)[0], keys)]
        server = StoreServer(opened, host=host, port=port, keys=keys, extra_routes=routes)
        try:
            url = await server.start()
            facts = {"url": url, "traces": f"{url}/v1/traces", "db": split_key(db)[0], "keys": keys.minted is None}
            write_json(json_file, facts)
            typer.echo(printable(f"store   {facts['db']}"))
            typer.echo(f"listens {url}")
            if keys.minted is not None:
                typer.echo(
                    f"key     {keys.minted}  (yours on this machine find it; elsewhere: {with_key(url, keys.minted)})"
                )
            typer.echo(f"spans   {facts['traces']}")
            typer.echo(f"page    {link(f'{url}/ui', keys.minted)}")
            # Else every full collection visits the libraries' objects, which stops all requests for 50 ms.
            gc.freeze()
            waits = [asyncio.ensure_future(wait) for wait in (stop.wait(), coordinator.gone())]
            ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            for wait in ended:
                wait.result()
        finally:
            await coordinator.stop()
            await server.stop()
            await opened.close()


@app.command(epilog="Example: agl store prune --older-than 30d")
def prune(
    older_than: Annotated[str, typer.Option(help="Prune rollouts that finished longer ago than this: 30d, 12h, 90m.")],
    store: StoreOption = None,
    run: Annotated[list[str] | None, typer.Option(help="Limit to these training runs (repeatable).")] = None,
    json_file: Json = None,
) -> None:
    """Delete attempts, calls and spans of old rollouts; the rollouts and what was trained stay."""
    from agl.trainer.store.location import read_store

    if (age := duration(older_than)) is None:
        raise typer.BadParameter(f"{older_than!r} is not a duration; write it like 30d, 12h or 90m")
    before = time.time() - age
    facts = dataclasses.asdict(read_store(store, lambda opened: opened.prune(before, run_ids=run)))
    write_json(json_file, facts)
    typer.echo("deleted {attempts} attempts, {calls} calls and {spans} spans of {rollouts} rollouts".format(**facts))
