"""The first process of an attempt's sandbox: it lays out the working copy, runs the coding agent in it, ends all that
this has started, and hands the copy back. Only the standard library.

A job comes on standard input; a report goes to standard output, and after it the archive of the copy's files. The one
address that can be reached is passed on to a socket of the machine's, in `GATEWAY`.
"""

from __future__ import annotations

import asyncio
import collections
import os
import socket
import sys
import tarfile
import threading
import urllib.parse
from typing import Any

from agl.trainer.graders.programs.inside import copies, plain, supervisor

HOME = "/tmp/home"
CONFIG = "/tmp/home/.attempt"
WORK = "/tmp/work"
SCRATCH = "/tmp/tmp"
GATEWAY = "/agl/gateway"
PORT = 4747
SHOWN_BYTES = 4000
"""Bytes from the end of the agent's output that a report has."""
_LONGEST_LINE = 1 << 16


def main() -> None:
    """Run one job. The argument is a uid to become if this is root."""
    supervisor.begin(int(sys.argv[1]))
    job = plain.parse(plain.receive(0))
    for folder in (HOME, CONFIG, WORK, SCRATCH):
        os.mkdir(folder)
    for path, text in job["files"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(path, 0o755 if text.startswith("#!") else 0o644)
    output = os.open(f"{SCRATCH}/output", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.unlink(f"{SCRATCH}/output")
    network = socket.create_server(("127.0.0.1", PORT))
    refused: collections.Counter[str] = collections.Counter()
    threading.Thread(target=lambda: asyncio.run(_serve(network, refused)), daemon=True).start()

    def exceeded() -> str | None:
        return "printed too much" if os.fstat(output).st_size > job["output_mb"] << 20 else None

    ended = supervisor.watched(lambda: _run(job, output), job, exceeded)
    said = os.pread(output, SHOWN_BYTES, max(0, os.fstat(output).st_size - SHOWN_BYTES))
    if ended.get("status") and _killed_for_memory():
        ended = {"reason": "used too much memory"}
    report = {**ended, "said": said.decode(errors="replace"), "refused": refused}
    parent, name = os.path.split(WORK)
    files = list[tarfile.TarInfo]()
    if "reason" not in report:
        try:
            files = copies.found(parent, [name], job["disk_mb"] << 20)
        except (OSError, copies.Refused) as error:
            report["reason"] = f"left files that cannot be read: {error}"
    plain.send(1, report)
    copies.send(1, parent, files)


def _run(job: dict[str, Any], output: int) -> None:
    os.chdir(WORK)
    supervisor.confine(job)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1 << 10)
    try:
        os.execvpe(job["words"][0], job["words"], job["environment"])
    except OSError as error:
        os.write(2, f"{job['words'][0]} cannot be run: {error.strerror}\n".encode())
        os._exit(127)


def _killed_for_memory() -> bool:
    """Whether the kernel has ended a process of this container because of its memory: faster than who looks at it."""
    for counts in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(counts, encoding="ascii") as lines:
                return any(line.startswith("oom_kill ") and int(line.split()[1]) for line in lines)
        except OSError:
            pass
    return False


async def _serve(network: socket.socket, refused: collections.Counter[str]) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readuntil(b"\n")
            target = line.split(b" ")[1].decode("ascii", "replace")
            if target == f"127.0.0.1:{PORT}":  # some use a proxy for whatever they call
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                line = b""
                target = "/"
            if target.startswith("/"):
                theirs, to_them = await asyncio.open_unix_connection(f"{GATEWAY}/socket")
                to_them.write(line)
                await asyncio.gather(_pump(reader, to_them), _pump(theirs, writer))
            else:  # it takes this address for a proxy, by which it would reach another host
                host = urllib.parse.urlsplit(target if "://" in target else f"//{target}").netloc
                refused[host[:200] if len(refused) < 100 else "others"] += 1
                why = f"agl: {host} cannot be reached from here\n".encode("ascii", "replace")
                head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(why)}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode() + why)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError, ValueError):
            pass
        finally:
            writer.close()

    await (await asyncio.start_server(relay, sock=network, limit=_LONGEST_LINE)).serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
