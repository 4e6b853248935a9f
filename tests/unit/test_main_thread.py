"""What only a main thread may do works in a rollout, or ends the run by name; it is never a reward of 0."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import agl
from agl import tracing
from agl.errors import MainThreadError
from agl.mdp.selection import select
from agl.rewards.function import RewardCaller
from agl.tracing import main_thread

TASKS = [{"question": "what is 1 + 1?", "answer": "$2$"}, {"question": "and 2 + 2?", "answer": "$4$"}]


def answered(task: Any) -> str:
    return task["answer"]


async def answered_async(task: Any) -> str:
    return task["answer"]


AGENTS = {"sync": answered, "async": answered_async}


def by_math_verify(task: Any, output: str) -> float:
    """The reward of open-r1 and verl."""
    from math_verify import parse, verify

    try:
        return float(verify(parse(task["answer"]), parse(output)))
    except Exception:
        return 0.0


def by_alarm(task: Any, output: str) -> float:
    try:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(5)
        return 1.0
    except Exception:
        return 0.0


def by_timer(task: Any, output: str) -> float:
    try:
        signal.setitimer(signal.ITIMER_REAL, 5.0)
        return 1.0
    except Exception:
        return 0.0


def by_alarm_unhandled(task: Any, output: str) -> float:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    return 1.0


def by_wakeup(task: Any, output: str) -> float:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        signal.set_wakeup_fd(writer)
        return 1.0
    except Exception:
        return 0.0
    finally:
        os.close(reader)
        os.close(writer)


def by_loop_signal(number: int) -> Any:
    """A reward that waits for a signal in its loop."""

    async def judge() -> float:
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
        return 1.0

    def by_loop_signal(task: Any, output: str) -> float:
        try:
            return asyncio.run(judge())
        except Exception:
            return 0.0

    return by_loop_signal


by_loop_alarm = by_loop_signal(signal.SIGALRM)
by_loop_user = by_loop_signal(signal.SIGUSR1)
by_loop_child = by_loop_signal(signal.SIGCHLD)
"""What waits for children by a signal, as asyncio's older child watchers do."""


def by_user_signal(task: Any, output: str) -> float:
    """A reward that a program of its own tells by a signal that it is done."""
    try:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        return 1.0
    except Exception:
        return 0.0


def by_real_time_signal(task: Any, output: str) -> float:
    try:
        signal.signal(signal.SIGRTMIN + 3, lambda *_: None)
        return 1.0
    except Exception:
        return 0.0


def by_loop(task: Any, output: str) -> float:
    async def judge() -> float:
        await asyncio.sleep(0)
        return 1.0

    try:
        return asyncio.run(judge())
    except Exception:
        return 0.0


def by_found_loop(task: Any, output: str) -> float:
    """The way of older programs, which works in a main thread."""

    async def judge() -> float:
        await asyncio.sleep(0)
        return 1.0

    try:
        return asyncio.get_event_loop().run_until_complete(judge())
    except Exception:
        return 0.0


def by_processes(task: Any, output: str) -> float:
    try:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return float(pool.apply(len, (["one"],)))
    except Exception:
        return 0.0


def by_child(task: Any, output: str) -> float:
    """A child that is ended by a signal, as a pool ends its own, while the reward goes on."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    time.sleep(0.5)
    return 1.0


def by_sigterm(task: Any, output: str) -> float:
    """What libraries do, which go without where they may not."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except ValueError:
        return 1.0
    return 0.0


def by_sigterm_of_a_loop(task: Any, output: str) -> float:
    """What servers and bots do, which go without where they may not."""

    async def serve() -> float:
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
        except RuntimeError:
            return 1.0
        return 0.0

    return asyncio.run(serve())


def reward_of(agent: Any, reward: Any, directory: Path, **options: Any) -> float:
    trainer = agl.Trainer(agl.Baseline(), directory=directory, n_workers=2, progress=False, **options)
    [entry] = trainer.fit(agl.wrap(agent, reward, name="solver"), TASKS).history
    return entry["train/reward"]


@pytest.mark.parametrize("runners", ["local", pytest.param("process", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "reward",
    [
        by_math_verify,
        by_loop,
        by_found_loop,
        by_processes,
        by_child,
        by_sigterm,
        by_sigterm_of_a_loop,
    ],
)
@pytest.mark.parametrize("kind", AGENTS)
def test_it_works(kind: str, reward: Any, runners: Any, tmp_path: Path) -> None:
    if reward is by_math_verify:
        pytest.importorskip("math_verify")
    assert reward_of(AGENTS[kind], reward, tmp_path, runners=runners) == 1.0


@pytest.mark.parametrize("runners", ["local", pytest.param("process", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("reward", "what"),
    [
        (by_alarm, r"signal\.signal\(SIGALRM\)"),
        (by_timer, r"signal\.setitimer"),
        (by_alarm_unhandled, r"signal\.signal\(SIGPROF\)"),
        (by_wakeup, r"signal\.set_wakeup_fd"),
        (by_loop_alarm, r"loop\.add_signal_handler\(SIGALRM\)"),
        (by_loop_user, r"loop\.add_signal_handler\(SIGUSR1\)"),
        (by_user_signal, r"signal\.signal\(SIGUSR1\)"),
        (by_real_time_signal, r"signal\.signal\(37\)"),
        (by_loop_child, r"loop\.add_signal_handler\(SIGCHLD\)"),
    ],
    ids=["alarm", "timer", "profile", "wakeup", "loop_alarm", "loop_user", "user", "real_time", "loop_child"],
)
@pytest.mark.parametrize("kind", AGENTS)
def test_or_ends_the_run_with_the_reward_the_signal_and_the_remedy(
    kind: str, reward: Any, what: str, runners: Any, tmp_path: Path
) -> None:
    with pytest.raises(MainThreadError) as raised:
        reward_of(AGENTS[kind], reward, tmp_path, runners=runners)
    assert raised.match(rf"the reward '{reward.__name__}' needs {what}.* at .*test_main_thread\.py:\d+")
    assert raised.match("subprocess with timeout=")


def test_an_agent_that_scores_itself_is_named_too(tmp_path: Path) -> None:
    @agl.rollout
    def solver(task: Any) -> float:
        return by_alarm(task, "")

    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False)
    with pytest.raises(MainThreadError, match=r"agent 'solver' needs signal\.signal\(SIGALRM\)"):
        trainer.fit(solver, TASKS)


async def listens(task: Any) -> str:
    """An agent that goes without what it needs."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)
    return task["answer"]


def test_an_agent_is_named_and_not_its_reward(tmp_path: Path) -> None:
    with pytest.raises(MainThreadError, match=r"agent 'solver' needs loop\.add_signal_handler\(SIGUSR2\)"):
        reward_of(listens, lambda task, output: 1.0, tmp_path)


def test_an_evaluation_ends_too(tmp_path: Path) -> None:
    with pytest.raises(MainThreadError, match="the reward 'by_alarm'"):
        agl.evaluate(agl.wrap(answered, by_alarm), TASKS, {"now": None}, directory=tmp_path, progress=False)


class ByAlarm:
    """A group reward; a rollout's end is not where it runs."""

    label = "by_alarm"

    def __init__(self, swallows: bool) -> None:
        self.swallows = swallows

    async def score(self, task: Any, traces: Any) -> list[float]:
        try:
            signal.signal(signal.SIGALRM, lambda *_: None)
        except ValueError:
            if not self.swallows:
                raise
        return [0.0 for _ in traces]


@pytest.mark.parametrize("swallows", [True, False])
def test_a_group_reward_is_named_too(swallows: bool, tmp_path: Path) -> None:
    with pytest.raises(MainThreadError, match=r"group_reward=by_alarm needs signal\.signal\(SIGALRM\) at .*:\d+"):
        reward_of(answered, lambda task, output: 0.0, tmp_path, group_reward=ByAlarm(swallows))


def in_rollout(function: Any) -> Any:
    """The result of a function in a thread of a rollout."""
    results: list[Any] = []

    def body() -> None:
        with main_thread.watched(), tracing.running(tracing.RolloutContext("ro-1", 1, "a", select(None))):
            try:
                results.append(function())
            except BaseException as error:
                results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return results[0]


def test_a_limit_of_math_verify_holds_and_leaves_nothing_pending() -> None:
    utils = pytest.importorskip("math_verify.utils")

    def endless() -> None:
        while True:
            time.sleep(0.01)

    def limited() -> tuple[str, int]:
        try:
            utils.timeout(timeout_seconds=1)(endless)()
        except sys.modules["math_verify.errors"].TimeoutException as error:
            return type(error).__name__, sum(range(100_000))
        return "", 0

    assert in_rollout(limited) == ("TimeoutException", sum(range(100_000)))


def patched() -> tuple[Any, ...]:
    """What is replaced while rollouts run."""
    loops: Any = asyncio.SelectorEventLoop
    handler = sys.modules["_signal"].signal
    return signal.alarm, signal.setitimer, signal.set_wakeup_fd, handler, loops.add_signal_handler


def test_outside_a_rollout_nothing_is_changed() -> None:
    before = patched()
    with main_thread.watched():
        assert all(now is not then for now, then in zip(patched(), before, strict=True))
        assert signal.setitimer(signal.ITIMER_PROF, 0.0) == (0.0, 0.0)
        handler = signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, handler)
    assert patched() == before


def test_a_threads_loop_is_closed_with_it_and_outside_a_rollout_there_is_none() -> None:
    loop = in_rollout(asyncio.get_event_loop)
    assert isinstance(loop, asyncio.AbstractEventLoop)
    assert loop.is_closed()
    with main_thread.watched(), ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="no current event"):
        pool.submit(asyncio.get_event_loop).result()


def test_math_verify_is_as_it_was_afterwards() -> None:
    pytest.importorskip("math_verify")
    names = [name for name in sys.modules if name.startswith("math_verify")]
    for name in names:
        del sys.modules[name]
    with main_thread.watched():
        import math_verify.metric

        places = [sys.modules[f"math_verify.{part}"] for part in ("utils", "parser", "grader", "metric")]
        assert all(hasattr(place.timeout, "_agl_original") for place in places)
    assert [place.timeout for place in places] == [math_verify.utils.timeout] * 4
    assert not hasattr(math_verify.utils.timeout, "_agl_original")


def test_a_refusal_is_asked_for_once() -> None:
    def twice() -> str:
        caller = RewardCaller(by_alarm)
        with pytest.raises(MainThreadError):
            caller({}, "")
        main_thread.require_none_refused("nobody")
        return "done"

    assert in_rollout(twice) == "done"


PROFILED = """
import sys
from agl.tracing.main_thread import _raised_after

for seconds, work in ((60.0, 0), (0.01, 10**9)):
    try:
        with _raised_after(seconds, TimeoutError):
            for _ in range(work):
                pass
    except TimeoutError:
        print("limited")
sys.setprofile(lambda *_: None)
print(sum(n for n in range(10)))
"""


def test_a_limit_leaves_an_interpreter_in_which_profilers_and_debuggers_work() -> None:
    """A withdrawn exception leaves a mark that one waits, under which a profiler makes Python 3.11 turn for ever."""
    ran = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["limited", "45"]


class TooLateToCancel(threading.Timer):
    """A timer that has woken already when it is cancelled."""

    def cancel(self) -> None:
        pass


def test_a_limit_that_fires_as_its_block_ends_raises_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Timer", TooLateToCancel)
        with main_thread._raised_after(0.05, TimeoutError):
            pass
    [timer] = [thread for thread in threading.enumerate() if isinstance(thread, TooLateToCancel)]
    while timer.is_alive():
        pass
