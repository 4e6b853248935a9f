"""`agl runner`: executes an agent's rollouts for a server, and shows how many ended with which status."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agl.agents.agent import Agent
from agl.errors import ConfigError
from agl.trainer.report import terminal
from agl.trainer.runners.protocol import Lease, Report
from agl.trainer.runners.remote.worker import run_worker

LINE_SECONDS = 5.0


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


def run_runner(agent: Agent, server: str, key: str | None, workers: int, *, quiet: bool) -> dict[str, Any]:
    """Work until Ctrl-C. Returns how many attempts ended, by status.

    Raises:
        RolloutError: the server was unreachable for too long, or refuses this runner.
    """
    from agl.trainer.http.aio import run_in_thread

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
        console.print(f"{agent.name}: {workers} at once for {server}; Ctrl-C ends it")
    try:
        run_in_thread(run_worker(agent, server, key=key, n_workers=workers, on_report=on_report))
    except KeyboardInterrupt:
        pass
    if not quiet:
        console.print(f"stopped; {_line(counts, time.monotonic() - started)}")
    return {"server": server, "agent": agent.name, "attempts": dict(counts), "seconds": time.monotonic() - started}


def _line(counts: Counter[str], seconds: float) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    return f"{total} attempts ({parts or 'none yet'}), {total / max(seconds, 1e-9):.2f}/s"
