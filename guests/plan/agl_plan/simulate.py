"""A training run on virtual time. `max_staleness` above 1 is scheduled by `agl.trainer.algorithms.ahead.Ahead` itself;
the order within a step is that of `agl.trainer.algorithms.loop.train`.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from agl.errors import ConfigError
from agl.trainer.algorithms.ahead import Ahead
from agl.trainer.algorithms.source import Source
from agl.trainer.run.batches import Batches
from agl_plan.engine import Engine, Pace
from agl_plan.workload import Turn, Workload

LONGEST = 2.0**22
"""Seconds (48 days) that the steps of a simulation may take; beyond it doubles lose asyncio's resolution, 1e-9 s."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Who computes where: `engines` of one `pace` and `room` on `sampling` devices, a learner on `learning` of them.
    They have these in "turns"; or "shared", each half while both work; or "separate" ones. An update takes `update`
    seconds, and some for each token, and pair of tokens, of a rollout; then `publish`, until engines have its weights.
    `staleness` is `max_staleness`; with `verl`, how many batches more than a step's own are in flight, of which a step
    takes the groups that end first, and what runs while weights change is prefilled again. `workers`: rollouts at once.
    `shares`: an update computes a group's prompt once.
    """

    staleness: int
    pace: Pace
    engines: int = 1
    room: float = math.inf
    update: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    publish: float = 0.0
    sharing: Literal["turns", "shared", "separate"] = "shared"
    sampling: int = 1
    learning: int = 1
    verl: bool = False
    workers: float = math.inf
    shares: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of each simulated step; share of the devices' time without work; tokens of answers, and of prompts that
    were not cached; numbers of the groups that each step learned from."""

    seconds: list[float]
    idle: float
    sampled: int
    computed: int
    groups: list[list[int]]


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (ready := super().select(0)):
            assert timeout is not None, "the simulation waits for something that never happens"
            if timeout and self.now > LONGEST:
                raise ConfigError("a few steps take more than 48 days", hint="check --set and --tool")
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time begins at 0, and moves when nothing is left to do, at once to the next timer."""

    def __init__(self) -> None:
        self._virtual: Any = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class _Training:
    """Rollouts on engines; what `Ahead` needs of a training."""

    def __init__(self, layout: Layout, workload: Workload, steps: int, seed: int) -> None:
        batches = Batches(range(workload.batch_size), workload.batch_size, seed)
        self.source = Source(batches, steps, workload.group_size, layout.staleness)
        self.run = SimpleNamespace(progress=SimpleNamespace(began=lambda *_: None))
        self.engines = [Engine(layout.pace, layout.room) for _ in range(layout.engines)]
        self._workload = workload
        self._seed = seed
        self._workers = asyncio.Semaphore(int(min(layout.workers, 1e9)))

    async def rollouts(self, indices: Sequence[int], step: int, first: int = 0, *, announce: bool = True) -> list[Any]:
        """(number of the group, turns) of each rollout, when all have ended."""
        numbers = [step * self.source.batches.batch_size + first + i for i in range(len(indices))]
        members = range(self.source.group_size)
        return await asyncio.gather(*(self._rollout(number, member) for number in numbers for member in members))

    async def _rollout(self, group: int, member: int) -> tuple[int, Sequence[Turn]]:
        async with self._workers:
            number = group * self.source.group_size + member
            context = 0
            turns = self._workload.rollout(self._seed, group, member)
            engine = self.engines[number % len(self.engines)]
            shared = turns[0].new
            for turn in turns:
                await engine.sample(number, context + turn.new, turn.sampled, group, shared)
                context += turn.new + turn.sampled
                await asyncio.sleep(turn.tool)
        return group, turns


def run(
    layout: Layout, workload: Workload, steps: int, seed: int = 0, stepped: Callable[[], object] = lambda: None
) -> Outcome:
    """Simulate a run of some steps; `stepped` is called after each."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_run(layout, workload, steps, seed, stepped))


async def _run(layout: Layout, workload: Workload, steps: int, seed: int, stepped: Callable[[], object]) -> Outcome:
    training: Any = _Training(layout, workload, steps, seed)
    engines = training.engines
    loop = asyncio.get_running_loop()
    size = workload.batch_size
    in_flight = Ahead(training, {"next": 0}) if layout.staleness > 1 and not layout.verl else None
    begun: list[asyncio.Task[list[Any]]] = []
    ended: asyncio.Queue[asyncio.Task[list[Any]]] = asyncio.Queue()

    async def sampled(step: int) -> list[Any]:
        if not layout.verl:
            return await (in_flight.take(step) if in_flight else training.rollouts(range(size), step))
        for number in range(len(begun), min(step + 1 + layout.staleness, steps) * size):
            begun.append(asyncio.create_task(training.rollouts([0], *divmod(number, size))))
            begun[-1].add_done_callback(ended.put_nowait)
        return [rollout for _ in range(size) for rollout in (await ended.get()).result()]

    seconds = []
    taken = []
    busy = 0.0
    ahead: asyncio.Task[list[Any]] | None = None
    for step in range(steps):
        began = loop.time()
        rollouts = await (ahead or sampled(step))
        ahead = asyncio.create_task(sampled(step + 1)) if layout.staleness and step + 1 < steps else None
        lengths = [sum(turn.new + turn.sampled for turn in turns) for _, turns in rollouts]
        prompts = [(group, turns[0].new) for group, turns in rollouts]
        work = layout.update + _forwarded(layout, lengths)
        if layout.shares:
            work -= _forwarded(layout, [n for _, n in prompts]) - _forwarded(layout, dict(prompts).values())
        busy += work * layout.learning
        await _learn(layout, engines, work)
        if ahead is not None and not layout.verl and in_flight is None:
            # All of its calls are of the weights before this update.
            await asyncio.wait([ahead])
        for engine in engines:
            engine.share(0.0)
        await asyncio.sleep(layout.publish)
        for engine in engines:
            engine.updated(rebuild=layout.verl)
            engine.share(1.0)
        taken.append(sorted({group for group, _ in rollouts}))
        seconds.append(loop.time() - began)
        stepped()
    busy += sum(engine.busy for engine in engines) / layout.engines * layout.sampling
    devices = layout.sampling + layout.learning * (layout.sharing == "separate")
    idle = max(0.0, 1.0 - busy / (sum(seconds) * devices or 1.0))  # but for rounding
    return Outcome(seconds, idle, sum(e.sampled for e in engines), sum(e.computed for e in engines), taken)


def _forwarded(layout: Layout, lengths: Collection[int]) -> float:
    """Seconds of an update for the tokens of rows, and their pairs."""
    return layout.token * sum(lengths) + layout.pair * sum(n * n / 2 for n in lengths)


async def _learn(layout: Layout, engines: Sequence[Engine], work: float) -> None:
    """Wait for an update of `work` seconds, which takes from the engines what it needs."""
    for engine in engines:
        engine.share({"turns": 0.0, "shared": 0.5, "separate": 1.0}[layout.sharing])
    while work > 1e-9:
        before = sum(engine.busy for engine in engines)
        await asyncio.sleep(work)
        for engine in engines:
            engine.advance()
        # What the engines of a shared device have done meanwhile, the learner has not.
        work = (sum(engine.busy for engine in engines) - before) * (layout.sharing == "shared") / len(engines)
    for engine in engines:
        engine.share(1.0)
