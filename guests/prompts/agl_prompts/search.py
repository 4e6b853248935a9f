"""Shared by every prompt search: texts, tasks, the evaluation of candidates, and the end.

Invariants: a candidate is a version of the resources in the store, and its rollouts run like any others. A resumed
search repeats everything in the same order, with the stored rollouts and replies. The held-out tasks are used only at
the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from agl.agents.prompts import save_prompts
from agl.agents.resources import Dataset, SystemPrompt, as_tasks, resource_to_json
from agl.errors import AglError, ConfigError, DatasetError, UserCodeError
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.report.statistics import reward_interval, sign_flip_test
from agl.trainer.run.candidates import Evaluation, record
from agl.trainer.run.failures import failure_counts, require_sound
from agl.trainer.run.results import mean_rewards, require_some, reward_label
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.types import Mode
from agl_prompts.components import Component, difference, known_prompts, observed_prompts
from agl_prompts.feedback import describe
from agl_prompts.reflection import Reflections

FIRST_LOOK_TASKS = 3
"""Tasks that are run to see the system prompts that agents send."""

Split = Literal["train", "val", "held_out/start", "held_out"]
Candidate = Mapping[str, str]
"""Component -> its text."""
IndexedTask = tuple[int, Any]
"""A task, and its index in its dataset."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """One rollout of a candidate.

    Attributes:
        result: of the rollout.
        score: its total reward; the lowest so far, at most 0, if it failed.
        rewards: each reward by name; none if it failed.
    """

    result: RolloutResult
    score: float
    rewards: Mapping[str, float]


class PromptSearch(Algorithm):
    """An algorithm that changes texts and trains nothing. Every agent keeps its own model.

    The texts are the `PromptTemplate`s of `Trainer(initial_resources=)`, and the system prompt of each agent that
    `Trainer(agents=)` selects, which is replaced in its requests; without either, those of all agents.
    """

    needs_held_out: ClassVar[bool] = True
    held_out: Dataset[Any] | Iterable[Any] | float | None

    @abstractmethod
    async def search(self, work: Search) -> Candidate:
        """The best candidate by the validation tasks."""

    @abstractmethod
    def planned(self, train: int, val: int, components: int) -> int:
        """About how many rollouts a search over so many tasks takes."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a resumed search must have in common with the one that was stopped, as JSON values."""

    def recorded_settings(self) -> Mapping[str, Any]:
        return super().recorded_settings() or self.settings()

    async def run(self, run: Run) -> None:
        """See `agl.trainer.run.run.Algorithm`. Fills `run.prompts`, too."""
        if not run.config.capture_content:
            raise ConfigError(
                "a prompt search reads what agents say, and capture_content=False records no texts",
                hint="leave capture_content= out",
            )
        held_out = self._split(run)
        path = run.directory / "reflections.jsonl"
        if path.exists() and not run.resume:
            raise ConfigError(
                f"{run.directory} already has a prompt search",
                hint="resume it (resume=True or --resume), or choose another directory",
            )
        recorded = await run.store.query_metrics([run.run_id], ends=True) if run.resume else []
        done = max((metric.step for metric in recorded), default=0)
        await run.begin(None, done)
        workplace = Workplace(run)
        try:
            if run.resume:
                await workplace.replay(done)
            await workplace.start(lambda mode: SamplingRules(), "", routed=False)
            work = Search(workplace, done)
            await work.find_components()
            settings = {
                **self.settings(),
                "seed": run.seed,
                "tasks": _digest([list(run.train), list(run.val), list(held_out)]),
                "prompts": dict(work.start),
            }
            work.reflections = Reflections(path, settings, resume=run.resume)
            planned = self.planned(len(run.train), len(run.val), len(work.components))
            run.progress.start(planned + 2 * len(held_out), unit="rollout")
            best = dict(await self.search(work))
            await work.finish(best, held_out)
        except asyncio.CancelledError:
            run.progress.note(f"stopped; the work so far is in {run.directory}. Resume it with resume=True / --resume")
            raise
        finally:
            await workplace.stop()
            run.progress.stop()

    async def dev(self, run: Run, n_tasks: int) -> list[RolloutResult]:
        """A dry run with the starting prompts, which are then shown."""
        await run.begin(0)
        workplace = Workplace(run)
        try:
            await workplace.start(lambda mode: SamplingRules(), "", routed=False)
            work = Search(workplace, 0)
            await work.find_components()
            for component in work.components.values():
                run.progress.note(f"prompt {component.name!r}:\n{component.text}")
            return await work.rollouts(work.start, list(enumerate(run.train[:n_tasks])), "train")
        finally:
            await workplace.stop()
            run.progress.stop()

    def _split(self, run: Run) -> Sequence[Any]:
        """The held-out tasks, which are put aside from the training tasks where `held_out` is a share."""
        if not len(run.val):
            raise DatasetError(
                f"{type(self).__name__} has no validation tasks, by which it chooses among prompts",
                hint="fit(agent, train, val_dataset=...)",
            )
        if self.held_out is None:
            if not self.needs_held_out:
                run.progress.note(
                    "no held-out tasks: the scores are of the tasks that prompts were chosen by, so the result's "
                    "looks too good. held_out= takes tasks that are used only at the end"
                )
                return []
            raise DatasetError(
                f"{type(self).__name__} has no held-out tasks: training tasks show what to change, validation tasks "
                "choose among the changed prompts, so only tasks of a third kind can say how good the chosen one is",
                hint="give held_out= such tasks, or a share of the training tasks to put aside, as in held_out=0.3",
            )
        if isinstance(self.held_out, int | float):
            share = self.held_out
            n = len(run.train)
            size = round(share * n) if 0 < share < 1 else 0
            if not 0 < size < n:
                raise DatasetError(
                    f"held_out={share!r} of {n} training tasks leaves no task on one side",
                    hint="use a share between 0 and 1, or more tasks",
                )
            chosen = set(random.Random(run.seed).sample(range(n), size))
            held_out = [run.train[i] for i in sorted(chosen)]
            run.train = [task for i, task in enumerate(run.train) if i not in chosen]
        else:
            held_out = list(as_tasks(self.held_out))
            if not held_out:
                raise DatasetError("held_out= is empty", hint="give at least one task; intervals need about 30")
        seen = {_digest(task) for task in [*run.train, *run.val]}
        if n := sum(_digest(task) in seen for task in held_out):
            run.progress.note(f"{n} of {len(held_out)} held-out tasks are also training or validation tasks")
        return held_out


class Search:
    """The work of one search, on the run's event loop.

    Args:
        workplace: of the run.
        done: how many evaluations a stopped run has recorded.

    Attributes:
        components: what is changed.
        start: their texts at the start.
        reflections: what the models replied.
        best: the best mean score on all validation tasks so far.
    """

    reflections: Reflections | None = None

    def __init__(self, workplace: Workplace, done: int) -> None:
        self.workplace = workplace
        self.run = workplace.run
        self.best = -math.inf
        self.components: dict[str, Component] = {}
        self.start: dict[str, str] = {}
        self._done = done
        self._step = self._rollouts = self._executed = 0
        self._lowest = 0.0
        self._candidates: set[str] = set()
        self._parents: dict[str, str] = {}
        self._began = time.monotonic()

    async def find_components(self) -> None:
        """Find the texts to change: prompts among the resources, and system prompts by a first look at some tasks."""
        run = self.run
        found = known_prompts(self.run.config.initial_resources)
        everyone = all(pattern == "*" for pattern, _ in run.config.selection.rules)
        if not (found and everyone):
            results = await self.rollouts({}, list(enumerate(run.train[:FIRST_LOOK_TASKS])), "train")
            require_some(results, "the first look at the agent's prompts")
            spans = [await run.store.query_spans(r.rollout.rollout_id, r.attempt) for r in results]
            known = {c.resource.agent for c in found if isinstance(c.resource, SystemPrompt)}
            found += observed_prompts(spans, run.config.selection, known)
        self.components = {component.name: component for component in found}
        if len(self.components) < len(found):
            names = [component.name for component in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"an agent and a template are both called {twice!r}", hint="rename the template")
        self.start = {name: component.text for name, component in self.components.items()}

    async def evaluate(
        self, pairs: Sequence[tuple[Candidate, Sequence[IndexedTask]]], split: Split
    ) -> list[list[Scored]]:
        """Run candidates on tasks, all at once, and record one entry of the history for each pair; none for held-out
        tasks.

        Raises:
            AglError: most rollouts failed, not because of the candidate; the error of the first one.
            UserCodeError: one fault of the user's code has ended more than a quarter of a candidate's rollouts, and not
                because of the candidate.
        """
        first = self._step
        before = self._rollouts
        self._step += len(pairs)
        batches = await asyncio.gather(
            *(self._run_step(first + i, candidate, tasks, split) for i, (candidate, tasks) in enumerate(pairs))
        )
        for (candidate, tasks), results in zip(pairs, batches, strict=True):
            if (error := _fault(results, split)) is not None:
                failed = next(task for r, task in zip(results, tasks, strict=True) if r.failures or r.error)
                if not await self._is_candidates(candidate, failed):
                    raise error
        scored = []
        for i, ((candidate, _), results) in enumerate(zip(pairs, batches, strict=True)):
            scored.append(self._scored(results))
            before += len(results)
            self._candidates.add(_digest(dict(candidate)))
            low, high = _interval(scored[-1])
            version = self._id(candidate)
            evaluation = Evaluation(
                first + i + 1, version, self._parents.get(version), split, len(results), _mean(scored[-1]), low, high
            )
            await record(self.run.store, self.run.run_id, evaluation)
            if split in ("train", "val"):
                mean = _mean(scored[-1])
                if split == "val" and len(results) == len(self.run.val):
                    self.best = max(self.best, mean)
                await self._record(first + i + 1, _facts(split, scored[-1]), f"{split} {mean:.3f}", before)
        return scored

    def derive(self, child: Candidate, parent: Candidate) -> None:
        """Note what a new candidate was rewritten from; of one that was there before, nothing."""
        if _digest(dict(child)) not in self._candidates and dict(child) != self.start:
            self._parents.setdefault(self._id(child), self._id(parent))

    async def rollouts(self, candidate: Candidate, tasks: Sequence[IndexedTask], split: Split) -> list[RolloutResult]:
        """Run a candidate without recording it in the history."""
        self._step += 1
        return await self._run_step(self._step - 1, candidate, tasks, split)

    async def feedback(self, scored: Sequence[Scored], candidate: Candidate) -> list[dict[str, str]]:
        """What happened in each rollout, by heading, for the model that rewrites prompts."""
        store = self.run.store
        return [await describe(store, s.result, s.score, candidate.values()) for s in scored]

    async def finish(self, best: Candidate, held_out: Sequence[Any]) -> None:
        """Save the prompts, and measure the start and the best candidate on the held-out tasks."""
        run = self.run
        tasks = list(enumerate(held_out))
        resources = {name: component.with_text(best[name]) for name, component in self.components.items()}
        folder = run.directory / "prompts"
        save_prompts(folder, resources)
        await self._version(best, "best")
        run.prompts = dict(best)
        if tasks:
            [start] = await self.evaluate([(self.start, tasks)], "held_out/start")
            result = start if dict(best) == self.start else (await self.evaluate([(best, tasks)], "held_out"))[0]
            facts = _facts("held_out/start", start) | _facts("held_out", result)
            facts["held_out/p_value"] = sign_flip_test([a.score - b.score for a, b in zip(result, start, strict=True)])
            await self._record(self._step, facts, f"held out {_mean(result):.3f}", self._rollouts)
            run.progress.note(
                f"held out, {len(tasks)} tasks: start {_shown(start)} -> result {_shown(result)}, "
                f"p = {facts['held_out/p_value']:.3g}"
            )
        if self.reflections is not None and (rejected := self.reflections.rejected):
            lines = [f"  {n}x {why}" for why, n in rejected.most_common()]
            run.progress.note("\n".join([f"{rejected.total()} texts were rejected before they were run:", *lines]))
        if best == self.start:
            run.progress.note("no better prompt was found; the result is the start")
        for name, text in best.items():
            if text != self.start[name]:
                run.progress.note(difference(name, self.start[name], text))
        run.progress.note(f"the prompts are in {folder}")

    async def _run_step(
        self, step: int, candidate: Candidate, tasks: Sequence[IndexedTask], split: Split
    ) -> list[RolloutResult]:
        mode: Mode = "train" if split == "train" else "val"
        results = await self.workplace.rollouts(
            tasks,
            mode=mode,
            # As in training: a validation has the number of the steps that are done, its own entry's.
            step=step if mode == "train" else step + 1,
            metadata={"split": split},
            resources_id=await self._version(candidate) if candidate else None,
        )
        self._rollouts += len(results)
        self._executed += len(results) if step >= self._done else 0
        return results

    async def _version(self, candidate: Candidate, label: str | None = None) -> str:
        """The id of the version of the resources that holds the candidate."""
        resources_id = self._id(candidate, label)
        return await self.run.store.update_resources(self._resources(candidate), resources_id=resources_id)

    def _id(self, candidate: Candidate, label: str | None = None) -> str:
        return f"{self.run.run_id}-{label or _digest(self._resources(candidate))}"

    def _resources(self, candidate: Candidate) -> dict[str, Any]:
        return {n: resource_to_json(c.with_text(candidate[n])) for n, c in self.components.items()}

    async def _is_candidates(self, candidate: Candidate, failed: IndexedTask) -> bool:
        """Whether a failure is of the candidate's making: the prompts of the start succeed on that task."""
        if dict(candidate) == self.start:
            return False
        [again] = await self.rollouts(self.start, [failed], "train")
        return again.error is None

    def _scored(self, results: Sequence[RolloutResult]) -> list[Scored]:
        totals = [r.attempt_trajectory.reward for r in results if r.attempt_trajectory is not None]
        self._lowest = min([self._lowest, *(total for total in totals if total is not None)])
        scored = []
        for r in results:
            trajectory = r.attempt_trajectory
            if r.error is not None or trajectory is None or trajectory.reward is None:
                scored.append(Scored(r, self._lowest, {}))
                continue
            rewards: dict[str, float] = {}
            for reward, _ in trajectory.credited:
                rewards[reward_label(reward)] = rewards.get(reward_label(reward), 0.0) + reward.value
            scored.append(Scored(r, trajectory.reward, rewards))
        return scored

    async def _record(self, step: int, facts: Mapping[str, float], shown: str, total: int) -> None:
        """Add an entry to the history, after `total` rollouts; of one that a stopped run has recorded, here alone."""
        run = self.run
        entry: dict[str, Any] = {"step": step, **facts}
        entry |= {"prompts/rollouts": total, "prompts/candidates": len(self._candidates)}
        parts = [shown]
        if math.isfinite(self.best):
            entry["prompts/best"] = self.best
            parts.append(f"best {self.best:.3f}")
        if self.reflections is not None:
            entry["prompts/rejected"] = self.reflections.rejected.total()
        if step <= self._done:
            run.history.append(entry)
        else:
            rate = self._executed / max(1e-9, time.monotonic() - self._began)
            parts.append(f"{rate:.1f} rollouts/s")
            await run.record(entry | {"prompts/rollouts_per_second": rate})
        run.progress.advance(total, parts, important="train/score" not in facts)


def _fault(results: Sequence[RolloutResult], split: Split) -> BaseException | None:
    """Why the rollouts that are left of an evaluation say nothing; None if they do."""
    failed = [r.error for r in results if r.error is not None]
    most_failed = 2 * len(failed) > len(results)
    how_many = f"{len(failed)} of {len(results)} rollouts failed; " if most_failed else ""
    try:
        require_sound(results, f"an evaluation on {len(results)} {split} tasks")
    except UserCodeError as fault:
        return UserCodeError(how_many + fault.message, hint=fault.hint, **fault.where)
    if not most_failed:
        return None
    first = failed[0]
    if not isinstance(first, AglError):
        return first
    error = type(first)(f"{how_many}the first: {first.message}", hint=first.hint, **first.where)
    error.__cause__ = first
    return error


def _facts(split: Split, scored: Sequence[Scored]) -> dict[str, float]:
    """What an evaluation adds to the history: rewards by name, of the rollouts that did not fail; how many failed; the
    mean score and its 95 % interval."""
    succeeded = [s.result for s in scored if s.result.error is None]
    facts = {**mean_rewards(succeeded, split), f"{split}/failed_rollouts": len(scored) - len(succeeded)}
    facts |= failure_counts([s.result for s in scored], split)
    low, high = _interval(scored)
    return facts | {f"{split}/score": _mean(scored), f"{split}/score_low": low, f"{split}/score_high": high}


def _mean(scored: Sequence[Scored]) -> float:
    return math.fsum(s.score for s in scored) / len(scored)


def _interval(scored: Sequence[Scored]) -> tuple[float, float]:
    return reward_interval([[s.score] for s in scored])


def _shown(scored: Sequence[Scored]) -> str:
    low, high = _interval(scored)
    failed = sum(s.result.error is not None for s in scored)
    return f"{_mean(scored):.3f} [{low:.3f}, {high:.3f}]" + (f" ({failed} failed)" if failed else "")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
