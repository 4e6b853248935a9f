"""The first process of a container: has one attempt executed by a worker, and ends with it whatever it left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable

from agl._version import __version__
from agl.agents.agent import Agent
from agl.agents.frameworks import switched_on
from agl.trainer.http.aio import LoopThread
from agl.trainer.processes.environment import hide_process
from agl.trainer.processes.frames import FrameReader
from agl.trainer.runners.process.fork_server import supervise
from agl.trainer.runners.process.payload import unpack
from agl.trainer.runners.process.worker import read_journal, run_worker

SOCKETS = "/run/agl"
"""Folder of the socket that leads to the coordinator."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def main() -> None:
    """Entry point. A frame comes in on stdin, then what `supervise` reads; JSON goes out on stdout.

    The frame has the `payload`, the `release` and the Python that packed it, and variables (`env`). With the name of a
    `worker` it also has `url` and `key` of the coordinator, and `port`, where the agent expects it; out comes
    {"status", "spans"}. Without, out comes {}, or {"failed": why the agent cannot be imported}.
    """
    hide_process()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what agents print
    reader = FrameReader()
    frames = []
    while not frames:
        if not (data := os.read(0, 1 << 16)):
            return
        frames = reader.feed(data)
    start = frames[0]
    os.environ.update(start["env"])
    ours = __version__, list(sys.version_info[:2])
    if (start["release"], start["python"]) != ours:
        theirs = f"agl {start['release']} on Python {start['python']}"
        json.dump({"failed": f"the image has agl {ours[0]} on Python {ours[1]}, this program {theirs}"}, answer)
    elif "worker" not in start:
        json.dump(_failure(start["payload"]), answer)
    else:
        with tempfile.TemporaryFile() as journal:

            def work() -> int:
                payload = unpack(start["payload"])
                assert isinstance(payload.agent, Agent)
                if start["port"] is not None:
                    to_host = relay(lambda: asyncio.open_unix_connection(f"{SOCKETS}/coordinator"))
                    LoopThread("agl-relay").submit(asyncio.start_server(to_host, "127.0.0.1", start["port"])).result()
                with switched_on((*payload.tracers, *payload.agent.tracers)):
                    return run_worker(payload, start["worker"], start["url"], start["key"], journal.fileno(), once=True)

            status = supervise(open(0, "rb", buffering=0), work)  # noqa: SIM115
            json.dump({"status": status, "spans": read_journal(journal.fileno())}, answer)
    answer.flush()


def _failure(payload: bytes) -> dict[str, str]:
    try:
        unpack(payload)
    except BaseException:
        return {"failed": traceback.format_exc()}
    return {}


def relay(connect: Callable[[], Awaitable[Streams]]) -> Callable[..., Awaitable[None]]:
    """A server's callback that passes each connection on to the one that `connect` opens."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await connect()
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    return accept
