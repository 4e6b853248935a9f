"""`agl runner`: executes an agent's rollouts for a server, and shows how many ended with which status."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl.errors import ConfigError
from agl.trainer.cli.options import AgentFile, Json, NWorkers, Quiet, RewardFile, write_json

if TYPE_CHECKING:
    from agl.trainer.runners.protocol import Lease, Report

LINE_SECONDS = 5.0


def runner(
    agent: Annotated[str, typer.Option(help=AgentFile)],
    store: Annotated[
        str | None, typer.Option(help="Server to get rollouts from (default: AGL_STORE).", metavar="URL")
    ] = None,
    reward: Annotated[str | None, typer.Option(help=RewardFile)] = None,
    n_workers: NWorkers = 1,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the runner's key, also /dev/stdin (default: AGL_RUNNER_KEY).")
    ] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Execute rollouts here for a trainer or a store elsewhere, until Ctrl-C."""
    from agl.trainer.http.aio import run_in_thread
    from agl.trainer.processes.environment import keep_secrets
    from agl.trainer.report import terminal
    from agl.trainer.runners.loading import load_agent
    from agl.trainer.runners.remote.worker import run_worker

    server, key = find_server(store, key_file)
    keep_secrets()
    loaded = load_agent(agent, reward)
    console = terminal.console(stderr=True)
    counts: Counter[str] = Counter()
    started = last = time.monotonic()

    def on_report(lease: Lease, report: Report) -> None:
        nonlocal last
        counts[report.status] += 1
        if report.error is not None and not quiet:
            rollout_id, attempt = lease.id
            console.print(f"{rollout_id} attempt {attempt} {report.status}: {report.error}", style="red")
        now = time.monotonic()
        if not quiet and now - last > LINE_SECONDS:
            last = now
            console.print(_line(counts, now - started))

    if not quiet:
        console.print(f"{loaded.name}: {n_workers} at once for {server}; Ctrl-C ends it")
    try:
        run_in_thread(run_worker(loaded, server, key=key, n_workers=n_workers, on_report=on_report))
    except KeyboardInterrupt:
        pass
    if not quiet:
        console.print(f"stopped; {_line(counts, time.monotonic() - started)}")
    facts = {"server": server, "agent": loaded.name, "attempts": dict(counts), "seconds": time.monotonic() - started}
    write_json(json_file, facts)


def find_server(url: str | None, key_file: Path | None) -> tuple[str, str | None]:
    """The server's address, by default that of AGL_STORE, and a runner's key, by default AGL_RUNNER_KEY.

    Raises:
        ConfigError: no server is named, or the key's file cannot be read.
    """
    server = url or os.environ.get("AGL_STORE")
    if server is None or not server.startswith(("http://", "https://")):
        raise ConfigError(
            f"--store is {server!r}, not a server's address",
            hint="give that of `agl store`, `agl serve` or a trainer: --store http://127.0.0.1:4747",
        )
    if key_file is None:
        return server, os.environ.get("AGL_RUNNER_KEY")
    try:
        return server, key_file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"the key's file cannot be read: {error}", hint="name a readable file") from None


def _line(counts: Counter[str], seconds: float) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    return f"{total} attempts ({parts or 'none yet'}), {total / max(seconds, 1e-9):.2f}/s"
