"""Policy gradients on one machine: sample rollouts of each task, credit their calls, update the policies, again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agl.credit import PerCall
from agl.errors import NoTrainableDataError, StalePolicyError
from agl.mdp.sequence import TrainingRow, merge
from agl.trainer.algorithms import checkpoints
from agl.trainer.algorithms.record import Rows, Sample, facts, record
from agl.trainer.algorithms.settings import PolicyGradientSettings
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.local.policy import LocalPolicy
from agl.trainer.objectives.advantages import FLAT, StepAdvantages, compute_advantages
from agl.trainer.run.batches import Batches
from agl.trainer.run.policies import Policies
from agl.trainer.run.run import Run, measurement, require_some, require_tasks
from agl.trainer.runners.protocol import RolloutResult

SMALL_MODEL = 20_000_000
"""Parameters below which a checkpoint at every step costs next to nothing."""

PROBE_TOKENS = 64
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of log-probs, in nats, that rounding explains, by the dtype of the weights: the probe computes
without autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient(PolicyGradientSettings):
    """A policy-gradient algorithm with the embedded engine and learner; `agl.GRPO` and others are settings of it."""

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self, run: Run) -> None:
        require_tasks(run.train, "the training dataset")
        batches = Batches(run.train, self.batch_size, run.seed)
        steps = self.steps or batches.steps_per_epoch() * (self.epochs or 1)
        identity = self.identity(run, steps)
        policies = await self._load(run, steps)
        try:
            state = await checkpoints.restore(run, policies, identity) if run.resume else None
            start = state.step if state else 0
            if run.resume:
                await run.resume_from(start, policies.versions, self.max_staleness)
            await run.start(self._rules, policies.names[0], register=policies.serve)
            policies.on_death(run.fail)
            await run.begin(steps, start)
            for name, policy in policies:
                await run.store.add_policy_version(run.run_id, name, policy.version, start)
            if start == 0 and self.val_before_train and run.val and not run.history:
                await run.record({"step": 0, **await self._validate(run, 0)})
            await self._train(run, policies, batches, start, steps, identity)
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
                await policies.close()
                run.progress.stop()

    async def _train(
        self, run: Run, policies: Policies, batches: Batches, start: int, steps: int, identity: dict[str, Any]
    ) -> None:
        """Sample, update, record, validate, save; when cancelled between updates, the last completed step is saved.

        A callback may end training after a step, which is saved then.
        """
        assert run.gateway is not None
        parameters = sum(policy.info.trainable_parameters for _, policy in policies)
        checkpoint_every = self.checkpoint_every or (1 if parameters < SMALL_MODEL else 10)
        # A value head and penalties learn from rollouts that are all alike, too.
        flat_learns = bool(self.kl_coef or self.entropy_coef) or self.adv_estimator == "gae"
        completed = saved = start
        updating = False
        ahead: asyncio.Task[Sample] | None = None
        try:
            for step in range(start, steps):
                if run.stop_reason is not None:
                    break
                began = time.monotonic()
                sample = await (ahead or self._sample(run, policies, batches, step))
                ahead = None
                if self.max_staleness and step + 1 < steps:
                    ahead = asyncio.create_task(self._sample(run, policies, batches, step + 1))

                # Each policy learns from its own calls alone, and every sampled token is in one row.
                # Off the event loop: long rollouts take seconds.
                rows = await asyncio.to_thread(make_rows, sample, policies, step, self.max_staleness)
                updating = True
                due = {name: r for name, r in rows.items() if has_signal(r, flat_learns)}
                metrics: dict[str, Mapping[str, float]] = {}
                if due:
                    if self.max_staleness:
                        metrics = await train(policies, due)
                        if ahead is not None:
                            # All of its calls are of the weights before this update, so that a resumed run, which
                            # finds these rollouts in the store, equals one that was never stopped.
                            await asyncio.wait([ahead])
                    # Requests are held, so that no answer is sampled from two versions of the weights.
                    async with run.gateway.hold():
                        metrics = metrics or await train(policies, due)
                        await asyncio.gather(*(publish(policies[name], r, step) for name, r in due.items()))
                else:
                    run.progress.note(f"step {step + 1}: no update: all rollouts of each task had the same return")

                await record(run, policies, sample.advantages, rows, step)
                for name in due:
                    await run.store.add_policy_version(run.run_id, name, policies[name].version, step + 1)
                entry = facts(sample, policies, rows, metrics, step) | {
                    "seconds": time.monotonic() - began,
                    "rollouts_per_second": len(sample.results) / max(1e-9, sample.seconds),
                    "engine/prompt_tokens_computed": sample.prompt_tokens["computed"],
                    "engine/prompt_tokens_reused": sample.prompt_tokens["reused"],
                }
                if run.val and ((step + 1) % self.val_every == 0 or step + 1 == steps):
                    entry |= await self._validate(run, step + 1)
                completed, updating = step + 1, False
                await run.record(entry)

                if completed % checkpoint_every == 0 or completed == steps or run.stop_reason is not None:
                    await checkpoints.save(run, policies, completed, identity)
                    saved = completed
        except asyncio.CancelledError:
            if completed > saved and not updating:
                await checkpoints.save(run, policies, completed, identity)
            raise
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _sample(self, run: Run, policies: Policies, batches: Batches, step: int) -> Sample:
        """The step's rollouts; with dynamic sampling, further tasks take the place of groups that are all alike."""
        began, earlier = time.monotonic(), policies.prompt_tokens
        indices = batches.indices(step)
        results = await self._rollouts(run, indices, step)
        replacements = batches.further(step)
        resampled = 0
        for _ in range(self.max_gen_batches - 1 if self.dynamic_sampling else 0):
            groups = {r.rollout.group for r in results}
            lost_groups = groups - {r.rollout.group for r in results if r.attempt_trajectory is not None}
            useless = len(self._advantages(run, results, step).flat_groups) + len(lost_groups)
            missing = self.batch_size - (len(indices) - useless)
            more = [next(replacements) for _ in range(missing)]
            if not more:
                break
            results += await self._rollouts(run, more, step, first=len(indices))
            indices += more
            resampled += len(more)
        succeeded = require_some(results, f"step {step + 1}")
        advantages = self._advantages(run, results, step)
        # A policy without a call: its pattern matches no agent's name, or its agent is seldom called.
        agents = dict.fromkeys(
            a for r in succeeded if r.attempt_trajectory is not None for a in r.attempt_trajectory.agents
        )
        for name in run.selection.policies:
            if all(c.policy != name for c in advantages.calls):
                run.progress.note(
                    f"step {step + 1}: no agent of policy {name!r} was called; agents seen: {', '.join(agents)}"
                )
        advantages = advantages.without_flat() if self.dynamic_sampling else advantages
        prompt_tokens = policies.prompt_tokens - earlier
        return Sample(results, succeeded, advantages, resampled, time.monotonic() - began, prompt_tokens)

    def _advantages(self, run: Run, results: Seq[RolloutResult], step: int) -> StepAdvantages:
        trajectories = [r.attempt_trajectory.trajectory for r in results if r.attempt_trajectory is not None]
        own_rewards = any(x.rewards for t in trajectories for x in t.transitions)
        advantages = compute_advantages(
            trajectories,
            run.credit,
            estimator=self.adv_estimator,
            normalize_std=self.normalize_std,
            shaping=None if self.overlong is None else self.overlong.of(self.max_response_tokens),
        )
        if trajectories and not own_rewards and isinstance(run.credit, PerCall) and not run.credit.shared:
            raise NoTrainableDataError(
                f"credit {run.credit!r} counts the calls' own rewards alone, and no call of step {step + 1} earned one",
                hint="emit rewards where calls earn them (agl.emit_reward in a tool, agl.air), or use Uniform()",
                step=step + 1,
            )
        return advantages

    async def _validate(self, run: Run, step: int) -> dict[str, Any]:
        results = await run.rollouts(list(enumerate(run.val)), mode="val", step=step, metadata=self._metadata(run))
        return measurement(results, "val", f"the validation after step {step}")

    async def dev(self, run: Run, n_tasks: int) -> list[RolloutResult]:
        require_tasks(run.train, "the dataset")
        policies = await self._load(run, 1)
        try:
            await run.start(self._rules, policies.names[0], register=policies.serve)
            tasks = list(enumerate(run.train))[:n_tasks]
            return await run.rollouts(tasks, mode="dev", step=0, metadata=self._metadata(run))
        finally:
            await run.stop()
            await policies.close()

    # -- rollouts -----------------------------------------------------------------------------------------------------

    async def _rollouts(self, run: Run, indices: Seq[int], step: int, first: int = 0) -> list[RolloutResult]:
        tasks = [(i, run.train[i]) for i in indices]
        return await run.rollouts(
            tasks, mode="train", step=step, group_size=self.group_size, metadata=self._metadata(run), first=first
        )

    def _rules(self, mode: str) -> SamplingRules:
        if mode == "train":
            return SamplingRules(self.temperature, 1.0, 0, self.max_response_tokens)
        return SamplingRules(temperature=self.val_temperature, max_tokens=self.max_response_tokens)

    def _metadata(self, run: Run) -> dict[str, Any]:
        """The models by policy: `explain` needs their tokenizers to turn ids into text."""
        models: dict[str, str] = {}
        for name in run.selection.policies:
            policy = run.policies.get(name)
            model = (policy.model if policy else None) or self.model
            models[name] = str(Path(model).resolve()) if Path(model).exists() else model
        return {"model": next(iter(models.values())), **({"models": models} if len(models) > 1 else {})}

    async def _load(self, run: Run, steps: int) -> Policies:
        spec = self.policy_spec(run.seed, steps)
        return await Policies.start(spec, run.selection.policies, run.policies, self.renderer)


def make_rows(sample: Sample, policies: Policies, step: int, max_staleness: int = 0) -> Rows:
    """Merge each policy's calls into training rows.

    Raises:
        NoTrainableDataError: no row of any policy holds a token to train, although no group was left out as flat.
        StalePolicyError: a call was sampled by weights that are more than `max_staleness` updates older than those in
            training, or by later ones.
    """
    advantages = sample.advantages
    trajectories = {name: advantages.of(name) for name in policies.names}
    rows = {name: [row for t in ts for row in merge(t, advantages.advantages)] for name, ts in trajectories.items()}
    flat = any(c.dropped == FLAT and c.policy in rows for c in advantages.calls)
    if not flat and not any(row.n_actions for policy_rows in rows.values() for row in policy_rows):
        if advantages.dropped_groups:
            why = f"{advantages.dropped_groups} group(s) kept no two to compare"
        else:
            why = "none of their answers is whole" if advantages.calls else "they made no call"
        raise NoTrainableDataError(
            f"step {step + 1} has nothing to train on: {len(sample.succeeded)} of {len(sample.results)} rollouts "
            f"succeeded, and {why}",
            hint="see why rollouts fail with agl explain, or raise max_attempts",
            step=step + 1,
        )
    for name, version in policies.versions.items():
        for call in (transition.call for t in trajectories[name] for transition in t.transitions):
            if not 0 <= version - call.policy_version <= max_staleness:
                raise StalePolicyError(
                    f"call {call.id} was sampled by version {call.policy_version} of policy {call.policy!r}, but "
                    f"version {version} is being trained and max_staleness is {max_staleness}",
                    rollout=call.rollout_id,
                    attempt=call.attempt,
                    agent=call.agent,
                    step=step + 1,
                )
    return rows


def has_signal(rows: Seq[TrainingRow], flat_learns: bool) -> bool:
    """Whether an update on these rows would change the policy.

    Args:
        flat_learns: whether it does even where all advantages are 0 (a penalty, a value head).
    """
    if not any(row.n_actions for row in rows):
        return False
    return flat_learns or any(np.any(row.advantages) for row in rows)


async def train(policies: Policies, rows: Rows) -> dict[str, Mapping[str, float]]:
    """Update the policies that have rows; the learner's metrics by policy.

    Raises:
        TrainingError: an update that is not finite.
    """
    metrics = await asyncio.gather(*(policies[name].train(r) for name, r in rows.items()))
    return dict(zip(rows, metrics, strict=True))


async def publish(policy: LocalPolicy, rows: list[TrainingRow], step: int) -> None:
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
