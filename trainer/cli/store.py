"""`agl store`: what is done to a store as a whole."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look after a store: delete what is old.")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.callback(invoke_without_command=True)
def store(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def prune(
    older_than: Annotated[str, typer.Option(help="Of rollouts that ended so long ago: 30d, 12h, 90m, 2w.")],
    store: Annotated[
        str | None, typer.Option(help="A run's directory or a store's URL; the newest one if left out.")
    ] = None,
    run: Annotated[list[str] | None, typer.Option(help="Of these training runs alone (repeatable).")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the same facts to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Delete attempts, calls and spans of old rollouts; the rollouts and what was trained stay."""
    from agl.trainer.explain import find_store
    from agl.trainer.store import open_store

    before = time.time() - seconds(older_than)

    async def work() -> dict[str, int]:
        opened = await open_store(find_store(store))
        try:
            return dataclasses.asdict(await opened.prune(before, run_ids=run))
        finally:
            await opened.close()

    facts = asyncio.run(work())
    if json_file is not None:
        json_file.write_text(json.dumps(facts, indent=2) + "\n")
    typer.echo("deleted {attempts} attempts, {calls} calls and {spans} spans of {rollouts} rollouts".format(**facts))


def seconds(text: str) -> float:
    """How long "30d" is. Raises typer.BadParameter for what is no length of time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no length of time; say it like 30d, 12h or 90m")
    return float(match[1]) * _UNITS[match[2]]
