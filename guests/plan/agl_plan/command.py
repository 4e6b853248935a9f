"""`agl plan`: its options, and what it prints."""

from __future__ import annotations

from typing import Annotated

import typer

from agl.trainer.cli.options import Json, Quiet, write_json

LEFT_OUT = (
    "failed rollouts, validation, checkpoints, rewards that take time, the price of sandboxes, networks, pipelines of "
    "devices, prefill in chunks, room that shared prompts save, lost room in batches, lengths that change in training"
)


def plan(
    model: Annotated[str, typer.Option(help="Directory or hub id, of which config.json is read; or a size.")] = "7B",
    machine: Annotated[str, typer.Option(help="Kind of GPU: a100, h100 or h200.")] = "h100",
    run: Annotated[
        str, typer.Option("--from", help="Synchronous run whose rollouts and speed to take.", metavar="RUN_DIR")
    ] = "",
    layout: Annotated[list[str] | None, typer.Option(help="local, vllm or verl (repeatable; default: all).")] = None,
    max_staleness: Annotated[list[int] | None, typer.Option(help="Repeatable (default: 0, 1, 2, 4).", min=0)] = None,
    tool: Annotated[str, typer.Option(help="Seconds of tools; 0.05,5:0.02 is 5 s in 2 % of the calls.")] = "0.5",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any number that the output names.", metavar="NAME=VALUE")
    ] = None,
    quiet: Quiet = False,
    json_file: Json = None,
) -> None:
    """Estimate memory, seconds per step, idle share and cost of a run before you rent the machines."""
    from rich.table import Table

    from agl.options import reject_unknown
    from agl.trainer.report.explain import PIPED_WIDTH
    from agl.trainer.report.progress import Progress
    from agl.trainer.report.terminal import console
    from agl_plan import plan as planning

    staleness = max_staleness or [0, 1, 2, 4]
    progress = Progress(not quiet)
    if run:
        reject_unknown(values := planning.numbers(settings or []), ("steps",), "--set with --from")
        facts, rows = planning.measured(run, staleness, progress, **values)
    else:
        of = planning.model(model), *planning.parts(machine, tool, settings or [])
        facts, rows = planning.plan(*of, layout or ["local", "vllm", "verl"], staleness, progress)
    write_json(json_file, {"computed_from": facts, "left_out": LEFT_OUT, "layouts": rows})
    columns = ("layout", "staleness", "devices", "GiB learning", "sampling", "s a step", "idle", "hours", "USD", "")
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        sizes = ("" if (size := row[name]) is None else f"{size / 2**30:.1f}" for name in ("learning", "sampling"))
        times = (
            [f"{row['seconds']:.3g}", f"{row['idle']:.0%}", f"{row['hours']:.3g}", f"{row['usd']:.0f}"]
            if ("seconds" in row)
            else [""] * 4
        )
        table.add_row(row["layout"], str(row["staleness"]), str(row["devices"]), *sizes, *times, row["note"])
    out = console()
    out.width = out.width if out.is_terminal else PIPED_WIDTH
    out.print(table)
    texts = (f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in facts.items())
    out.print(f"computed from {', '.join(texts)}")
    out.print(f"left out: {LEFT_OUT}")
