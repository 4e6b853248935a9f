"""`agl serve`: options from environment, file and command line, and the server until Ctrl-C or another stop signal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agl.trainer.algorithms.options import Settings
from agl.trainer.dashboard.server import link
from agl.trainer.http import local_key
from agl.trainer.http.auth import Keys
from agl.trainer.processes.environment import keep_secrets
from agl.trainer.report import terminal
from agl_service.server import serve
from agl_service.service import Service, Split

DEFAULTS = Settings.of({"port": 8000, "directory": "agl-serve"}, "agl serve")


def run_serve(
    options: Mapping[str, Any],
    assignments: list[str],
    *,
    config: Path | None,
    data: dict[Split, Path],
    key_file: Path | None,
    start: bool,
    quiet: bool,
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Serve until Ctrl-C.

    Args:
        options: of the command line; None where one was left out.
        assignments: further ones, as `option=value`.
        config: a YAML file, which both take precedence over.
        data: task files.
        key_file: holds the operator's key and a runner's.
        start: begin a run without a client's request.
        write: called with the address and other facts.

    Raises:
        AglError: it cannot serve.
    """
    from agl.trainer.http.aio import run_in_thread

    settings = Settings.of_command_line(
        options, assignments, config, DEFAULTS.under(Settings.of_environment(os.environ))
    )
    console = terminal.console(stderr=True)

    def on_start(service: Service) -> None:
        url = service.mount.url
        model = settings.get("model") or settings.get("engine")
        write({"url": url, "out": str(service.out), "model": model, "process": os.getpid()})
        if not quiet:
            what = settings.get("algorithm") or "serving without training"
            console.print(f"agl serve listens on {url} ({model}, {what}); Ctrl-C ends it")
            if not settings.get("algorithm"):
                console.print("it answers rollouts of the store; for applications: agl serve DIR, without --model")
            if (key := service.mount.keys.minted) is not None:
                console.print(f"your programs on this machine find its key; for others: {local_key.with_key(url, key)}")
            console.print(f"the page: {link(f'{url}/ui', service.mount.keys.minted)}")
            if (current := service.current) is not None:
                console.print(f"run {current.run_id} resumes after step {current.step}")

    keys = Keys.find(key_file)
    keep_secrets()
    try:
        run_in_thread(serve(settings, keys, on_start, data=data, start=start, progress=not quiet))
    except KeyboardInterrupt:
        if not quiet:
            console.print("stopped; start it again with the same --directory to resume its run")
