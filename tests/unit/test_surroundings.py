"""What a program sets up before `fit` is there in all user code that agl runs; a rollout changes it for itself."""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import sniffio
from opentelemetry import context as otel
from running import say
from scripted import ScriptedRollouts

import agl
from agl import semconv, tracing
from agl.surroundings import start_thread
from agl.trainer.http.aio import LoopThread

TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")
TASKS = ["a", "b"]


@contextlib.contextmanager
def _variable() -> Iterator[None]:
    token = TENANT.set("acme")
    try:
        yield
    finally:
        TENANT.reset(token)


@contextlib.contextmanager
def _precision() -> Iterator[None]:
    before = decimal.getcontext().copy()
    decimal.getcontext().prec = 50
    try:
        yield
    finally:
        decimal.setcontext(before)


@contextlib.contextmanager
def _seterr() -> Iterator[None]:
    before = np.seterr(divide="raise")
    try:
        yield
    finally:
        np.seterr(**before)


@contextlib.contextmanager
def _telemetry() -> Iterator[None]:
    token = otel.attach(otel.set_value("tenant", "acme"))
    try:
        yield
    finally:
        otel.detach(token)


SURROUNDINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any]] = {
    "a context variable": (_variable, TENANT.get, "acme"),
    "decimal's precision": (_precision, lambda: decimal.getcontext().prec, 50),
    "decimal's rounding, in a block": (
        lambda: decimal.localcontext(rounding=decimal.ROUND_DOWN),
        lambda: decimal.getcontext().rounding,
        decimal.ROUND_DOWN,
    ),
    "numpy's errors": (_seterr, lambda: np.geterr()["divide"], "raise"),
    "numpy's errors, in a block": (lambda: np.errstate(over="raise"), lambda: np.geterr()["over"], "raise"),
    "numpy's printing, in a block": (
        lambda: np.printoptions(precision=3),
        lambda: np.get_printoptions()["precision"],
        3,
    ),
    "OpenTelemetry's context": (_telemetry, lambda: otel.get_value("tenant"), "acme"),
}
"""What a program sets up -> how, how user code reads it, and what it must read."""

See = Callable[[str], float]
"""User code reports where it runs."""


class Look(agl.Callback):
    def __init__(self, see: See) -> None:
        self.see = see

    def on_start(self, run: Any) -> None:
        self.see("callback on_start")

    def on_step(self, run: Any, entry: Any) -> None:
        self.see("callback on_step")

    def on_end(self, run: Any, status: str) -> None:
        self.see("callback on_end")


class LookAround(agl.Hook):
    def __init__(self, see: See) -> None:
        self.see = see

    async def on_rollout_start(self, **_: Any) -> None:
        self.see("hook on_rollout_start")

    async def on_trace_start(self, **_: Any) -> None:
        self.see("hook on_trace_start")

    async def on_trace_end(self, **_: Any) -> None:
        self.see("hook on_trace_end")

    async def on_rollout_end(self, **_: Any) -> None:
        self.see("hook on_rollout_end")


class Log:
    samples = 0

    def __init__(self, see: See) -> None:
        self.see = see

    def start(self, run_id: str, config: Any, resumed_from: int | None) -> None:
        self.see("logger start")

    def step(self, step: int, metrics: Any, samples: Any) -> None:
        self.see("logger step")

    def end(self, status: str, summary: Any) -> None:
        self.see("logger end")


def sync_agent(see: See) -> Any:
    def solver(task: Any) -> str:
        see("agent")
        with tracing.span(semconv.EXECUTE_TOOL, "lookup", attributes={semconv.TOOL_NAME: "lookup"}):
            see("tool")
        return "x"

    return agl.wrap(solver, reward=lambda task, output: see("reward"))


def async_agent(see: See) -> Any:
    async def solver(task: Any) -> str:
        see("agent")
        await asyncio.to_thread(see, "the agent's thread")
        return "x"

    async def reward(task: Any, output: Any) -> float:
        await asyncio.sleep(0)
        return see("reward")

    return agl.wrap(solver, reward=reward)


def function_agent(see: See) -> Any:
    @agl.rollout
    def solver(task: Any) -> float:
        return see("agent")

    return solver


def class_agent(see: See) -> Any:
    class Solver(agl.LitAgent):
        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return see("agent")

        def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return see("validation")

    return Solver()


def async_class_agent(see: See) -> Any:
    class Solver(agl.LitAgent):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            return see("agent")

    return Solver()


AGENTS = {
    "sync": sync_agent,
    "async": async_agent,
    "function": function_agent,
    "class": class_agent,
    "async class": async_class_agent,
}


def trainer(directory: Path, see: See, algorithm: Any = None, **options: Any) -> agl.Trainer:
    rules = agl.AIR()
    rules.on_tool_success(name="looked up")(lambda tool_name, output: see("AIR rule"))
    settings: dict[str, Any] = {"directory": directory, "progress": False, "n_workers": 2, "max_attempts": 1}
    return agl.Trainer(
        algorithm or agl.Baseline(),
        callbacks=Look(see),
        hooks=[LookAround(see)],
        log=[Log(see)],
        air=rules,
        **settings,
        **options,
    )


def fit(agent: Any, see: See, directory: Path) -> None:
    trainer(directory, see).fit(agent, TASKS, TASKS)


def grouped(agent: Any, see: See, directory: Path) -> None:
    class Ranks:
        label = "rank"

        async def score(self, task: Any, traces: Any) -> list[float]:
            return [see("group reward") for _ in traces]

    @agl.rollout
    def asks(task: Any, llm: agl.LLM) -> None:
        say(llm, task)

    algorithm = ScriptedRollouts(["one", "two"], group_size=2)
    trainer(directory, see, algorithm, group_reward=Ranks()).fit(asks, TASKS)


def dev(agent: Any, see: See, directory: Path) -> None:
    trainer(directory, see).dev(agent, TASKS)


def evaluate(agent: Any, see: See, directory: Path) -> None:
    agl.evaluate(agent, TASKS, {"now": None}, directory=directory, progress=False, n_workers=2)


def in_a_notebook(agent: Any, see: See, directory: Path) -> None:
    async def cell() -> None:
        fit(agent, see, directory)

    asyncio.run(cell())


WAYS = {"fit": fit, "group_reward": grouped, "dev": dev, "evaluate": evaluate, "a notebook": in_a_notebook}


def run(way: str, agent: str, directory: Path) -> dict[str, dict[str, Any]]:
    """Run it in all surroundings at once; where user code ran -> what it read there."""
    seen: dict[str, dict[str, Any]] = {}

    def see(where: str) -> float:
        seen[where] = {name: read() for name, (_, read, _) in SURROUNDINGS.items()}
        return 1.0

    with contextlib.ExitStack() as stack:
        for name, (enter, read, expected) in SURROUNDINGS.items():
            assert read() != expected, name
            stack.enter_context(enter())
        WAYS[way](AGENTS[agent](see), see, directory)
    return seen


PLACES = {
    "fit": {"callback on_start", "callback on_step", "callback on_end", "logger start", "logger step", "logger end"},
    "group_reward": {"group reward"},
    "dev": {"agent"},
    "evaluate": {"agent"},
    "a notebook": {"agent", "callback on_step", "logger step"},
}
OF_AGENTS = {
    "sync": {"agent", "tool", "reward", "AIR rule"},
    "async": {"agent", "the agent's thread", "reward"},
    "function": {"agent"},
    "class": {"agent", "validation"},
    "async class": {"agent"},
}
HOOKS = {"hook on_rollout_start", "hook on_trace_start", "hook on_trace_end", "hook on_rollout_end"}


@pytest.mark.parametrize(
    ("way", "agent"), [*(("fit", agent) for agent in AGENTS), *((way, "sync") for way in WAYS if way != "fit")]
)
def test_user_code_sees_what_its_program_has_set_up(way: str, agent: str, tmp_path: Path) -> None:
    seen = run(way, agent, tmp_path)
    expected = {name: value for name, (_, _, value) in SURROUNDINGS.items()}
    assert {where: read for where, read in seen.items() if read != expected} == {}
    wanted = PLACES[way] | (OF_AGENTS[agent] | HOOKS if way == "fit" else set())
    assert wanted - seen.keys() == set()


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_rollout_sets_no_other_one_sees(is_async: bool, tmp_path: Path) -> None:
    """Nor does the program: two rollouts at once, and two one after another, each begin as the program was."""
    seen: list[tuple[str, int]] = []

    def change(task: str) -> float:
        seen.append((TENANT.get(), decimal.getcontext().prec))
        TENANT.set(task)
        decimal.getcontext().prec = 7
        return 1.0

    async def change_async(task: str) -> float:
        return change(task)

    agent = agl.rollout(change_async if is_async else change)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_variable())
        stack.enter_context(_precision())
        trainer(tmp_path, lambda where: 1.0).fit(agent, ["a", "b", "c", "d"])
        assert (TENANT.get(), decimal.getcontext().prec) == ("acme", 50)
    assert seen == [("acme", 50)] * 4


def test_a_thread_and_a_task_on_another_loop_begin_in_a_copy() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append((TENANT.get(), decimal.getcontext().prec, threading.current_thread().daemon))
        TENANT.set("another")
        decimal.getcontext().prec = 3

    async def look_async() -> None:
        look()

    loop = LoopThread("test")
    with _variable(), _precision():
        start_thread(look, "test").join()
        loop.submit(look_async()).result(10)
        loop.submit(look_async()).result(10)
        assert (TENANT.get(), decimal.getcontext().prec) == ("acme", 50)
    loop.stop()
    assert seen == [("acme", 50, True)] * 3


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_which_loop_runs_is_no_part_of_them(kind: str, tmp_path: Path) -> None:
    """anyio notes it in a context variable."""

    async def one() -> float:
        await anyio.sleep(0)
        return 1.0

    def answered(task: str) -> str:
        return task

    async def answered_async(task: str) -> str:
        async with anyio.create_task_group() as group:
            group.start_soon(one)
        return task

    async def main() -> float:
        sniffio.current_async_library_cvar.set("trio" if kind == "async" else "asyncio")
        agent = agl.wrap(answered if kind == "sync" else answered_async, lambda task, output: anyio.run(one), name="a")
        trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False)
        [entry] = trainer.fit(agent, TASKS).history
        return entry["train/reward"]

    assert asyncio.run(main()) == 1.0
