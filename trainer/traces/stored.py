"""`agl.traces`: which calls of which stores are imitated, and reading them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from agl.errors import ConfigError, NoTrainableDataError, nearest
from agl.mdp.conditions import Where, condition
from agl.mdp.selection import DEFAULT_POLICY, AgentFilter, Selection, select
from agl.options import checked_options
from agl.trainer.http.aio import run_in_thread
from agl.trainer.local.tokenizer import load_renderings
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.report.export.rows import Record, RolloutFilter, records
from agl.trainer.store import open_store
from agl.trainer.store.location import find_store
from agl.trainer.store.types import Mode
from agl.trainer.traces.choice import Candidate, Choice, Chosen, Weight, check_per_task
from agl.trainer.traces.student import RecordedAttempt

READ_MODES: tuple[Mode, ...] = ("train", "collect", "dev")
"""Rollouts that are read where no mode is named: all but "val", on whose tasks policies are measured."""


@checked_options
@dataclass(frozen=True, slots=True)
class Traces:
    """Rollouts and calls of stores that are to be imitated.

    Any store works: of trainings, `agl run` or evaluations. Calls whose tokens are the student's own are
    trained as they were sampled; those of other models are rendered with its chat template. Which calls of the
    rollouts are trained, and which are only context of others, is said at `agl.trainer.traces.choose`.

    Attributes:
        stores: one or several directories of runs, database files or URLs of stores; None for the newest run's.
        where: which rollouts: `agl.reward() >= 1`, its text "reward>=1", or a function of an `AttemptTrajectory`.
        agents: whose calls: a name, a glob, a pattern, a function, or several; None for every agent's.
        per_task: maximum number of rollouts of one task, the best and then the oldest; None for all.
        weight: of a rollout's calls in the loss, >= 0, such as `agl.reward()`; 1 if None.
        run: the id of the only run to read.
        mode: "train", "val", "dev" or "collect" alone; None for all but "val",
            so that no policy is trained on the tasks that it is measured with.
        since: enqueued at that time or later, in seconds since the epoch.

    Raises:
        ConfigError: an unknown option, or an impossible value.
        StoreError: there is no such store.
    """

    written: ClassVar[str] = 'agl.traces("runs/a", where=agl.reward() >= 1)'

    stores: str | Path | Sequence[str | Path] | None = None
    where: Where = None
    agents: AgentFilter = None
    per_task: int | None = None
    weight: Weight | None = None
    run: str | None = None
    mode: Mode | None = None
    since: float | None = None

    def __post_init__(self) -> None:
        if not self._stores or not all(isinstance(store, str | Path | None) for store in self._stores):
            raise ConfigError(f"stores= is {self.stores!r}", hint='for example agl.traces("runs/a") or ["a", "b.db"]')
        for store in self._stores:
            find_store(store)
        condition(self.where)
        if self.agents is not None:
            select(self.agents)
        check_per_task(self.per_task)
        if self.weight is not None and not callable(self.weight):
            raise ConfigError(f"weight= is {self.weight!r}", hint="a function of an attempt, such as agl.reward()")
        if self.mode is not None and self.mode not in get_args(Mode):
            raise ConfigError(f"there is no mode {self.mode!r}", hint=nearest(str(self.mode), get_args(Mode)))

    @property
    def _stores(self) -> list[Any]:
        return list(self.stores) if isinstance(self.stores, list | tuple) else [self.stores]

    async def choose(
        self, models: Mapping[str, str], selection: Selection | None = None, *, renderer: str | None = None
    ) -> Chosen:
        """What is imitated, with the tokens of the students.

        Args:
            models: policy -> a Hugging Face directory or hub id with its tokenizer and chat template.
            selection: agent -> policy; None for the default policy alone.
            renderer: a name from the `renderers` package; None chooses by the model.

        Raises:
            NoTrainableDataError: the stores have no rollout that fits. `Chosen.require` says why none was chosen.
            ModelLoadError, StoreError, ConfigError: as they say.
        """
        renderings = await asyncio.to_thread(load_renderings, models, renderer)
        choice = Choice(where=self.where, agents=self.agents, per_task=self.per_task, weight=self.weight)
        async for record in self.records():
            await asyncio.to_thread(self._add, choice, record, selection, renderings)
        return choice.chosen()

    def load(self, model: str, *, renderer: str | None = None) -> Chosen:
        """As `choose` for one policy, for callers outside an event loop. `str` of the result says what was chosen.

        Args:
            model: a Hugging Face directory or hub id, or the directory of a run or checkpoint.
        """
        return run_in_thread(self.choose({DEFAULT_POLICY: model}, renderer=renderer))

    async def candidates(self, selection: Selection | None = None) -> AsyncIterator[Candidate]:
        """The rollouts that succeeded, with the texts of their calls in place of the students' tokens.

        Args:
            selection: agent -> policy; None for the default policy alone.
        """
        async for record in self.records():
            attempt = self.recorded(record, selection)
            if attempt is not None:
                yield attempt.with_texts()

    async def records(self) -> AsyncIterator[Record]:
        """The rollouts of all stores, page by page, the oldest of each first.

        Raises:
            NoTrainableDataError: there is none.
        """
        seen = others = 0
        for store in self._stores:
            opened = await open_store(find_store(store))
            try:
                for mode in READ_MODES if self.mode is None else (self.mode,):
                    filter = RolloutFilter(self.run, mode, self.since)
                    async for record in records(opened, filter, await filter.count(opened)):
                        seen += 1
                        yield record
                if not seen:
                    others += await RolloutFilter(self.run, None, self.since).count(opened)
            finally:
                await opened.close()
        if not seen:
            raise NoTrainableDataError(
                f"no rollout of {self.stores or 'the newest run'} fits, of {others} of other kinds",
                hint="rollouts of validations and evaluations are read with mode='val' only: do not train on the tasks "
                "that you measure with"
                if others
                else "agl trace ls lists the rollouts of a store",
            )

    def recorded(self, record: Record, selection: Selection | None) -> RecordedAttempt | None:
        """The attempt of a rollout that succeeded, if one did.

        Args:
            selection: agent -> policy, of every agent; None for the default policy alone.
        """
        if record.rollout.status != "succeeded":
            return None
        attempt = max(a.attempt for a in record.attempts if a.status == "succeeded")
        names = {s.agent for s in record.spans} | {call.agent for call in record.calls}
        return RecordedAttempt(record, attempt, self._students((selection or select()).knowing(names), names))

    def _students(self, every: Selection, names: Collection[str | None]) -> Selection:
        """Agent -> the policy that imitates it, of the agents that are imitated.

        Args:
            every: agent -> policy, of every agent.
            names: of the rollout's agents.
        """
        if self.agents is None:
            return every
        imitated = select(self.agents).knowing(names)

        def learns(policy: str) -> Callable[[str], bool]:
            return lambda agent: imitated.policy_for(agent) is not None and every.policy_for(agent) == policy

        return Selection(tuple((learns(policy), policy) for policy in every.policies))

    def _add(
        self, choice: Choice, record: Record, selection: Selection | None, renderings: Mapping[str, Rendering]
    ) -> None:
        attempt = self.recorded(record, selection)
        if attempt is None:
            choice.skip(len(record.calls), record.rollout.status)
        # Most of the time goes into tokens, and most rollouts may not be wanted.
        elif reason := choice.refusal(attempt.candidate):
            choice.leave_out(attempt.candidate, reason)
        else:
            choice.add(attempt.with_tokens(renderings))


traces = Traces
"""`agl.traces(...)`"""
