"""Ctrl-C, SIGTERM and SIGHUP: one way to stop a coroutine, which finishes what must not be left halfway."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import agl
from agl.stop_signals import STOP_SIGNALS
from agl.trainer.http import aio


def sent(number: signal.Signals, times: int = 1) -> None:
    """To this process, from another thread of it."""

    def send() -> None:
        for _ in range(times):
            # On a slow machine the one that handled it may be gone.
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
                os.kill(os.getpid(), number)
            threading.Event().wait(0.2)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_coroutine_is_cancelled_by_each_of_them_and_ends_whatever_else_comes(number: signal.Signals) -> None:
    ended: list[str] = []

    async def work() -> None:
        sent(number, times=2)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.6)
            ended.append("cleanly")

    assert number in STOP_SIGNALS, "it would end the tests"
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match=number.name):
        aio.run_in_thread(work())
    assert ended == ["cleanly"]
    assert signal.getsignal(number) == before


def test_what_is_being_finished_is_waited_for_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "STOP_SECONDS", 0.1)
    saved: list[str] = []

    async def save() -> None:
        await asyncio.sleep(1)
        saved.append("saved")

    async def work() -> None:
        sent(signal.SIGTERM, times=3)
        await aio.finish(save(), lambda: saved.append("waits"))
        saved.append("went on")

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        aio.run_in_thread(work())
    assert saved == ["waits", "saved"]


def test_what_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "STOP_SECONDS", 0.1)
    over = threading.Event()

    async def work() -> None:
        sent(signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.to_thread(over.wait, 60)

    with pytest.raises(KeyboardInterrupt):
        aio.run_in_thread(work())
    over.set()


def test_the_third_ctrl_c_ends_the_wait() -> None:
    over = threading.Event()

    async def work() -> None:
        sent(signal.SIGINT, times=3)
        await aio.finish(asyncio.to_thread(over.wait, 60))

    with pytest.raises(KeyboardInterrupt):
        aio.run_in_thread(work())
    assert not over.is_set()
    over.set()


def test_an_error_on_the_way_out_is_the_cause() -> None:
    async def save() -> None:
        await asyncio.sleep(0.3)
        raise OSError("no space left")

    async def work() -> None:
        sent(signal.SIGTERM)
        await aio.finish(save())

    with pytest.raises(KeyboardInterrupt) as stopped:
        aio.run_in_thread(work())
    assert str(stopped.value.__cause__) == "no space left"


def test_handlers_of_the_users_and_signals_that_are_ignored_stay() -> None:
    got: list[int] = []
    term = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup

    async def work() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.3)
        return "done"

    try:
        assert aio.run_in_thread(work()) == "done"
    finally:
        signal.signal(signal.SIGTERM, term)
        signal.signal(signal.SIGHUP, hup)
    assert got == [signal.SIGTERM]


def status_after_sigterm(child: int) -> int | None:
    """What a child's end says, once it was sent SIGTERM; None if that did not end it."""
    os.kill(child, signal.SIGTERM)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return signal.SIGTERM
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_a_child_that_user_code_forks_ends_by_sigterm() -> None:
    """As a pool of multiprocessing ends its own, and waits for that."""

    def forks() -> int | None:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(read, 1)
        return status_after_sigterm(child)

    async def work() -> int | None:
        return await asyncio.to_thread(forks)

    assert aio.run_in_thread(work()) == signal.SIGTERM


IGNORES = """
import os, signal, subprocess, sys
from agl.stop_signals import ignore_stop_signals

ignore_stop_signals()
os.kill(os.getpid(), signal.SIGTERM)
program = subprocess.Popen([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"],
                           stdout=subprocess.PIPE)
program.stdout.readline()
program.terminate()
print(program.wait())
"""


def test_a_process_that_does_not_heed_them_executes_programs_that_do() -> None:
    ran = subprocess.run([sys.executable, "-c", IGNORES], capture_output=True, text=True, timeout=120, check=True)
    assert int(ran.stdout) == -signal.SIGTERM


def test_a_handler_of_the_users_that_exits_does_so_when_all_has_ended() -> None:
    """`signal.signal(SIGTERM, lambda *_: sys.exit(0))`, as programs in containers have it."""
    ended: list[str] = []

    async def work() -> None:
        sent(signal.SIGTERM, times=2)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.6)
            ended.append("cleanly")

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    try:
        with pytest.raises(SystemExit) as exited:
            aio.run_in_thread(work())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (exited.value.code, ended) == (7, ["cleanly"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_on_the_users_own_loop_ends_too(number: signal.Signals, tmp_path: Path) -> None:
    async def waits(task: str) -> float:
        sent(number)
        await asyncio.sleep(60)
        return 1.0

    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False)
    with pytest.raises(KeyboardInterrupt, match=number.name):
        asyncio.run(trainer.fit_async(agl.rollout(waits), ["a"]))
    with sqlite3.connect(tmp_path / "run.db") as database:
        assert database.execute("SELECT status FROM runs").fetchall() == [("stopped",)]


AGAIN = """
import os, signal, sys
from agl.stop_signals import end_when_stopped, stop_signals_to

number = signal.Signals(int(sys.argv[1]))
if sys.argv[2] == "ends":
    end_when_stopped()
received = []
with stop_signals_to(received.append):
    os.kill(os.getpid(), number)
assert received == [number]
os.kill(os.getpid(), number)
print("ended")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("kind", ["ends", "goes on"])
def test_a_command_that_is_stopped_twice_ends_as_if_it_was_stopped_once(number: signal.Signals, kind: str) -> None:
    """A second SIGTERM a moment after the end of a runner ended it by the signal, -15. Other programs go on."""
    words = [sys.executable, "-c", AGAIN, str(int(number)), kind]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == (0 if kind == "ends" else -number), ran.stderr
    assert ran.stdout == ("ended\n" if kind == "ends" else "")
