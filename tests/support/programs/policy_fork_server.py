"""Imports what a policy process does, and forks such processes: `prefork.ForkServer` is the other end of the socket."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import socket
import sys

WORKER = "agl.trainer.local.worker"
IMPORTED = (
    WORKER,
    "agl.trainer.local.engine.engine",
    "agl.trainer.local.learner.learner",
    "agl.trainer.local.lora",
    "agl.trainer.local.model",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_fast",
    "peft",
)


def serve(link: socket.socket) -> tuple[int, int]:
    """Fork as asked, until the other end closes. Returns in the forked processes, with their socket and log.

    A directory with these two is a request to fork there; a pid is one for its exit code.
    """
    ended: dict[int, int] = {}
    while True:
        request, fds, _, _ = socket.recv_fds(link, 4096, 2)
        if not request:
            os._exit(0)
        if not fds:
            if (pid := int(request)) not in ended and (status := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(status[1])
            link.send(str(ended.get(pid, "runs")).encode())
        elif pid := os.fork():
            link.send(str(pid).encode())
            for fd in fds:
                os.close(fd)
        else:
            link.close()
            os.chdir(request)
            return fds[0], fds[1]


if __name__ == "__main__":
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # the processes will say what is missing
            importlib.import_module(name)
    gc.freeze()  # what all of them share is not copied by the collector
    connection, log = serve(socket.socket(fileno=int(sys.argv[1])))
    for output in (1, 2):
        os.dup2(log, output)
    sys.argv = [WORKER, str(connection)]
    runpy.run_module(WORKER, run_name="__main__")
