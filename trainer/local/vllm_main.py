"""`vllm serve` as a child of a run: `python -m agl.trainer.local.vllm_main FD FOLDER OPTION ...`.

Invariant: it and all its processes live no longer than the parent at the other end of the socket FD, and leave no
FOLDER behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys

from agl.trainer.processes.child import exit_with_parent


def main() -> None:
    """Entry point."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    folder = sys.argv[2]

    def end() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        # vLLM's engine would outlive its server; both are in the group that this process leads.
        os.killpg(0, signal.SIGKILL)

    exit_with_parent(connection, end)
    from vllm.entrypoints.cli.main import main as vllm  # pyright: ignore[reportMissingImports]

    sys.argv = ["vllm", "serve", *sys.argv[3:]]
    vllm()


if __name__ == "__main__":
    main()
