"""A worker's side of `workers`, within limits: a JSON line in, a JSON line out.

Limits are in processor time, so that a busy machine changes no grade: after `limit` seconds a job is given up, after
twice that, where a library does not return to Python, the process dies. The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2 << 30
_NICE = 5
"""Of what is not urgent. Much more, and it would stand still on a busy machine."""


class Expired(BaseException):
    """The processor time is used up; not an `Exception`, which libraries would swallow."""


def serve(
    answer: Callable[[dict[str, Any]], dict[str, Any]], given_up: dict[str, Any], more_memory: int | None = None
) -> None:
    """Answer jobs until standard input ends; those that exceed a limit by `given_up`.

    A job's "limit" is in seconds of processor time. `more_memory` is how many bytes the jobs may take in addition to
    what the process has by now; None: all of it has `MEMORY_BYTES`.
    """
    logging.disable()
    sys.set_int_max_str_digits(0)
    if more_memory is None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    else:
        limit_memory(more_memory)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _expire)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # it is not read from here on
    for line in sys.stdin:
        print(json.dumps(_limited(answer, given_up, json.loads(line))), flush=True)


def limit_memory(size: int) -> None:
    """Allow this process `size` bytes of address space more than it has."""
    used = 0
    with contextlib.suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (used + size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def lower_priority() -> None:
    """Have this thread, or this process if it has no other, take less of the processors than what is urgent."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _limited(
    answer: Callable[[dict[str, Any]], dict[str, Any]], given_up: dict[str, Any], job: dict[str, Any]
) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, job["limit"])
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * job["limit"])
    try:
        return answer(job)
    except (Expired, MemoryError, RecursionError):
        return given_up
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _expire(*_: object) -> None:
    raise Expired
