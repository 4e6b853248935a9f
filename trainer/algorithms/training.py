"""Training on this machine: load, resume, step by step, validate, save. What a step does is the algorithm's."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from agl.errors import NoTrainableDataError, StalePolicyError
from agl.mdp.sequence import TrainingRow
from agl.trainer.algorithms import checkpoints
from agl.trainer.algorithms.settings import TrainingSettings
from agl.trainer.algorithms.trained_calls import Rows
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.local.policy import LocalPolicy
from agl.trainer.policies.policies import Policies
from agl.trainer.run.run import Run, measurement, require_tasks
from agl.trainer.runners.protocol import RolloutResult

P = TypeVar("P")

PrepareNext = Callable[[], "asyncio.Task[P] | None"]
"""Begins to prepare the next step; None, and nothing done, where this step is the last."""

SMALL_MODEL = 20_000_000
"""Parameters below which a checkpoint at every step costs next to nothing."""

PROBE_TOKENS = 64
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of log-probs, in nats, that rounding explains, by the dtype of the weights: the probe computes
without autocast."""


class Steps(Generic[P]):
    """The steps of one run.

    Args:
        settings: of the algorithm. run: the run. total: its steps.

    Attributes:
        samples: whether each step has rollouts.
        ahead: whether the next step's rollouts may come from the weights before this one's update.
        updating: set by `update` from when weights change: until the step is over, they are those of no step.
    """

    samples = True
    ahead = False
    updating = False

    def __init__(self, settings: LocalTraining, run: Run, total: int) -> None:
        self.settings, self.run, self.total = settings, run, total

    async def begin(self, policies: Policies) -> None:
        """Called once before the first step, when the policies are loaded and nothing was sampled yet."""

    async def close(self) -> None:
        """End what `begin` has begun; called however the run ends."""

    async def learn(self, policies: Policies, rows: Rows, prepared: P) -> dict[str, Mapping[str, float]]:
        """Update the policies that have rows; the learner's metrics by policy."""
        return await train(policies, rows)

    @abstractmethod
    async def prepare(self, policies: Policies, step: int) -> P:
        """What step `step` (from 0) learns from. Changes nothing."""

    @abstractmethod
    async def update(self, policies: Policies, prepared: P, step: int, prepare_next: PrepareNext[P]) -> dict[str, Any]:
        """Learn, record what became of each call, and serve the new weights.

        Args:
            prepare_next: may be called once, to have the next step prepared meanwhile.

        Returns:
            The step's entry for `run.history`.
        """

    def is_validated(self, step: int) -> bool:
        """Whether a validation follows step `step` (from 0)."""
        done = step + 1
        return bool(self.run.val) and (done % self.settings.val_every == 0 or done == self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining(TrainingSettings):
    """An algorithm with the embedded engine and learner."""

    rewarded: ClassVar[bool] = True
    """Whether a rollout without a reward has failed."""

    @abstractmethod
    async def make_steps(self, run: Run) -> Steps[Any]:
        """The run's steps; nothing is loaded yet."""

    async def run(self, run: Run) -> None:
        steps = await self.make_steps(run)
        identity = self.identity(run, steps.total)
        policies = await self._load(run, steps.total)
        try:
            await steps.begin(policies)
            state = await checkpoints.restore(run, policies, identity, self) if run.resume else None
            start = state.step if state else 0
            if run.resume:
                await run.resume_from(start, policies.versions, int(steps.ahead), sampled=steps.samples)
            if run.train or run.val:
                await run.start(self._rules, policies.names[0], register=policies.serve, rewarded=self.rewarded)
            policies.on_death(run.fail)
            await run.begin(steps.total, start)
            for name, policy in policies:
                await run.store.add_policy_version(run.run_id, name, policy.version, start)
            if start == 0 and self.val_before_train and run.val and not run.history:
                await run.record({"step": 0, **await self._validate(run, 0)})
            await self._train(run, policies, steps, start, identity)
            run.policy_paths = await policies.save_models(run.directory)
            never = [name for name, version in policies.versions.items() if version == 0]
            if never and len(policies) > 1 and run.stop_reason is None:
                raise NoTrainableDataError(
                    f"training ended, and policy {', '.join(map(repr, never))} was never updated",
                    hint=f"agents={run.selection} gave it no call with anything to learn from; the other policies are "
                    "saved",
                    directory=run.directory,
                )
        finally:
            try:
                await run.stop()
            finally:
                await asyncio.gather(steps.close(), policies.close())
                run.progress.stop()

    async def _train(
        self, run: Run, policies: Policies, steps: Steps[Any], start: int, identity: dict[str, Any]
    ) -> None:
        """Prepare, update, validate, record, save; when cancelled between updates, the last completed step is saved.

        A callback may end training after a step, which is saved then.
        """
        parameters = sum(policy.info.trainable_parameters for _, policy in policies)
        checkpoint_every = self.checkpoint_every or (1 if steps.samples and parameters < SMALL_MODEL else 10)
        completed = saved = start
        ahead: asyncio.Task[Any] | None = None

        def prepare_next() -> asyncio.Task[Any] | None:
            nonlocal ahead
            if step + 1 < steps.total:
                ahead = asyncio.create_task(steps.prepare(policies, step + 1))
            return ahead

        try:
            for step in range(start, steps.total):
                if run.stop_reason is not None:
                    break
                began = time.monotonic()
                prepared = await (ahead or steps.prepare(policies, step))
                ahead = None
                entry = {"step": step + 1, **await steps.update(policies, prepared, step, prepare_next)}
                entry["seconds"] = time.monotonic() - began
                if steps.is_validated(step):
                    entry |= await self._validate(run, step + 1)
                completed, steps.updating = step + 1, False
                await run.record(entry)

                if completed % checkpoint_every == 0 or completed == steps.total or run.stop_reason is not None:
                    await checkpoints.save(run, policies, completed, identity)
                    saved = completed
        except asyncio.CancelledError:
            if completed > saved and not steps.updating:
                await checkpoints.save(run, policies, completed, identity)
            raise
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _validate(self, run: Run, step: int) -> dict[str, Any]:
        results = await run.rollouts(list(enumerate(run.val)), mode="val", step=step, metadata=self.metadata(run))
        return measurement(results, "val", f"the validation after step {step}")

    async def dev(self, run: Run, n_tasks: int) -> list[RolloutResult]:
        require_tasks(run.train, "the dataset")
        policies = await self._load(run, 1)
        try:
            await run.start(self._rules, policies.names[0], register=policies.serve, rewarded=self.rewarded)
            tasks = list(enumerate(run.train))[:n_tasks]
            return await run.rollouts(tasks, mode="dev", step=0, metadata=self.metadata(run))
        finally:
            await run.stop()
            await policies.close()

    def _rules(self, mode: str) -> SamplingRules:
        if mode == "train":
            return SamplingRules(self.temperature, 1.0, 0, self.max_response_tokens)
        return SamplingRules(temperature=self.val_temperature, max_tokens=self.max_response_tokens)

    def models(self, run: Run) -> dict[str, str]:
        """The model that each policy of the run begins with; a directory's path is whole."""
        models: dict[str, str] = {}
        for name in run.selection.policies:
            policy = run.policies.get(name)
            model = (policy.model if policy else None) or self.model
            models[name] = str(Path(model).resolve()) if Path(model).exists() else model
        return models

    def metadata(self, run: Run) -> dict[str, Any]:
        """Of the run's rollouts. The models by policy: `explain` needs their tokenizers to turn ids into text."""
        models = self.models(run)
        return {"model": next(iter(models.values())), **({"models": models} if len(models) > 1 else {})}

    async def _load(self, run: Run, steps: int) -> Policies:
        spec = self.policy_spec(run.seed, steps)
        try:
            return await Policies.start(
                spec, run.selection.policies, run.policies, self.renderer, on_progress=run.progress.loading
            )
        finally:
            run.progress.stop()


async def train(
    policies: Policies, rows: Rows, pairs: Mapping[str, Seq[tuple[str, str]]] | None = None
) -> dict[str, Mapping[str, float]]:
    """Update the policies that have rows; the learner's metrics by policy.

    Args:
        pairs: by policy, the rollouts to compare, (chosen, rejected), where the loss is "dpo".

    Raises:
        TrainingError: an update that is not finite.
    """
    metrics = await asyncio.gather(
        *(policies[name].train(r, pairs=(pairs or {}).get(name, ())) for name, r in rows.items())
    )
    return dict(zip(rows, metrics, strict=True))


async def publish(policy: LocalPolicy, rows: Seq[TrainingRow], step: int) -> None:
    """Serve the weights that were trained on these rows, and prove it: learner and engine agree on the log-probs of one
    fixed sequence.

    Raises:
        StalePolicyError: they do not.
    """
    await policy.publish()
    row = next(r for r in rows if len(r) > 1)
    path = row.token_ids if row.is_chain else row.token_ids[row.positions == np.arange(len(row))]
    ids = path[:PROBE_TOKENS]
    trained = await policy.logprobs(ids)
    served = await policy.engine_logprobs(ids)
    difference = float(np.max(np.abs(trained - served))) if ids.size > 1 else 0.0
    if not difference <= PROBE_TOLERANCE[policy.info.dtype]:
        raise StalePolicyError(
            f"after the update of step {step + 1} the engine's log-probs differ from the learner's by {difference:.3g}",
            hint="the engine does not serve the policy just trained; please report this with your model's config",
            step=step + 1,
            policy=policy.spec.name,
            policy_version=policy.version,
        )
