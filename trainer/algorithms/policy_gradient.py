"""Policy gradients on one machine: sample rollouts of each task, credit their calls, update the policies, again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from agl.credit import PerCall
from agl.errors import ConfigError, NoTrainableDataError, nearest
from agl.trainer.algorithms import checkpoints
from agl.trainer.algorithms.shaping import Overlong
from agl.trainer.algorithms.step import Sample, facts, has_signal, make_rows, record, update
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.policy import PolicySpec
from agl.trainer.objectives import Estimator, KLKind, LossAgg, PolicyLossKind, RolloutIS
from agl.trainer.objectives.advantages import GROUPED, StepAdvantages, compute_advantages
from agl.trainer.run.batches import Batches
from agl.trainer.run.config import require_positive
from agl.trainer.run.policies import Policies
from agl.trainer.run.run import Run, mean_rewards, require_some, require_tasks
from agl.trainer.runners.protocol import RolloutResult

SMALL_MODEL = 20_000_000
"""Parameters below which a checkpoint at every step costs next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """A policy-gradient algorithm with the embedded engine and learner; `agl.GRPO` and the others are settings of it.

    Attributes:
        model: a Hugging Face directory or hub id.
        group_size: rollouts per task. batch_size: tasks per step.
        steps: updates; or `epochs`: passes over the training tasks. One of the two.
        learning_rate, warmup_steps, schedule, betas, weight_decay, grad_clip: of AdamW; the schedule is "constant" or
            "linear" (down to 0 at the last step).
        adv_estimator: how returns become advantages: "grpo", "rloo", "reinforce_plus_plus",
            "reinforce_plus_plus_baseline" or, with a value head, "gae".
        gamma, lam, value_coef, value_clip, value_learning_rate: of "gae" and its value head.
        policy_loss: "vanilla" clips the ratio of each token, "gspo" that of each answer.
        rollout_is, rollout_is_threshold: truncated importance sampling by "token" or "sequence", for behaviour
            log-probs that are not quite the learner's; None takes them as they are.
        clip_low, clip_high: of the importance ratio. kl_coef, kl_kind: penalty towards the initial policy ("k1", "k2",
            "k3"). entropy_coef: bonus.
        loss_agg: "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", or "seq-mean-token-sum-norm" (divided by
            `max_response_tokens`).
        normalize_std: divide advantages by the group's standard deviation.
        dynamic_sampling: sample further tasks in place of those whose rollouts all had the same return, so that
            `batch_size` tasks have something to learn from; at most `max_gen_batches` rounds of sampling a step.
        overlong: a penalty for answers near their limit.
        update_epochs: passes over a step's rows. minibatches: optimiser steps per pass.
        temperature, max_response_tokens: of training's sampling, whatever the agent asks for.
        val_temperature: of validation; None leaves the agent's own. val_every: steps between validations.
        val_before_train: whether there is one before the first step.
        lora: train adapters of this shape instead of the full weights.
        device, dtype, max_context, threads: of the policy process; "auto"/None choose by the machine.
        renderer: a name from the `renderers` package; None chooses by the model.
        max_tokens_per_microbatch, max_batch: of learner and engine; None chooses by the device.
        checkpoint_every: steps between checkpoints; None: each step for small models, else every 10; also at the end
            and on Ctrl-C.
    """

    model: str
    group_size: int = 8
    batch_size: int = 16
    steps: int | None = None
    epochs: int | None = None
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "linear"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    entropy_coef: float = 0.0
    loss_agg: LossAgg = "token-mean"
    adv_estimator: Estimator = "grpo"
    normalize_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    value_coef: float = 0.5
    value_clip: float | None = 0.5
    value_learning_rate: float | None = None
    policy_loss: PolicyLossKind = "vanilla"
    rollout_is: RolloutIS | None = None
    rollout_is_threshold: float = 2.0
    dynamic_sampling: bool = False
    max_gen_batches: int = 4
    overlong: Overlong | None = None
    update_epochs: int = 1
    minibatches: int = 1
    temperature: float = 1.0
    max_response_tokens: int = 1024
    val_temperature: float | None = None
    val_every: int = 10
    val_before_train: bool = True
    lora: LoraSpec | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_context: int | None = None
    threads: int | None = None
    renderer: str | None = None
    max_tokens_per_microbatch: int | None = None
    max_batch: int = 64
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_positive(
            group_size=self.group_size,
            batch_size=self.batch_size,
            steps=self.steps,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            temperature=self.temperature,
            val_every=self.val_every,
            max_response_tokens=self.max_response_tokens,
            checkpoint_every=self.checkpoint_every,
            max_gen_batches=self.max_gen_batches,
            update_epochs=self.update_epochs,
            minibatches=self.minibatches,
        )
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"{name} needs either steps= or epochs=", hint="for example steps=200")
        if self.adv_estimator not in get_args(Estimator):
            raise ConfigError(
                f"adv_estimator={self.adv_estimator!r} is not known",
                hint=nearest(self.adv_estimator, get_args(Estimator)),
            )
        if self.group_size < 2 and (self.adv_estimator in GROUPED or self.dynamic_sampling):
            raise ConfigError(
                "group_size is 1, so no rollout has another to be compared with", hint="use at least 2; 8 is usual"
            )
        if self.overlong is not None and self.overlong.buffer > self.max_response_tokens:
            raise ConfigError(
                f"overlong.buffer={self.overlong.buffer} is longer than max_response_tokens={self.max_response_tokens}",
                hint="choose a shorter buffer: it is the last part of the longest answer",
            )

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self, run: Run) -> None:
        require_tasks(run.train, "the training dataset")
        batches = Batches(run.train, self.batch_size, run.seed)
        steps = self.steps or batches.steps_per_epoch() * (self.epochs or 1)
        identity = self._identity(run, steps)
        policies = await self._load(run, steps)
        try:
            state = await checkpoints.restore(run, policies, identity) if run.resume else None
            start = state.step if state else 0
            if run.resume:
                await run.resume_from(start, policies.versions)
            await run.start(self._rules, policies.names[0], register=policies.serve)
            run.progress.start(steps, start)
            for name, policy in policies:
                await run.store.add_policy_version(run.run_id, name, policy.version, start)
            if start == 0 and self.val_before_train and run.val and not run.history:
                run.history.append({"step": 0, **await self._validate(run, 0)})
            await self._train(run, policies, batches, start, steps, identity)
            run.policy_paths = await policies.save_models(run.directory)
            never = [name for name, version in policies.versions.items() if version == 0]
            if never and len(policies) > 1:
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
        """Sample, update, record, validate, save; when cancelled between updates, the last completed step is saved."""
        assert run.gateway is not None
        parameters = sum(policy.info.trainable_parameters for _, policy in policies)
        checkpoint_every = self.checkpoint_every or (1 if parameters < SMALL_MODEL else 10)
        # A value head and penalties learn from rollouts that are all alike, too.
        flat_learns = bool(self.kl_coef or self.entropy_coef) or self.adv_estimator == "gae"
        completed = saved = start
        updating = False
        try:
            for step in range(start, steps):
                began = time.monotonic()
                sample = await self._sample(run, batches, step)
                sampling_seconds = time.monotonic() - began

                # Each policy learns from its own calls alone, and every sampled token is in one row.
                updating = True
                rows = make_rows(sample, policies, step)
                due = {name: r for name, r in rows.items() if has_signal(r, flat_learns)}
                metrics: dict[str, Mapping[str, float]] = {}
                if due:
                    # Requests are held, so that no answer is sampled from two versions of the weights.
                    async with run.gateway.hold():
                        updates = await asyncio.gather(*(update(policies[name], r, step) for name, r in due.items()))
                    metrics = dict(zip(due, updates, strict=True))
                else:
                    run.progress.note(f"step {step + 1}: no update: all rollouts of each task had the same return")

                await record(run, policies, sample.advantages, rows, step)
                for name in due:
                    await run.store.add_policy_version(run.run_id, name, policies[name].version, step + 1)
                entry = facts(sample, policies, rows, metrics, step) | {
                    "seconds": time.monotonic() - began,
                    "rollouts_per_second": len(sample.results) / max(1e-9, sampling_seconds),
                }
                if run.val and ((step + 1) % self.val_every == 0 or step + 1 == steps):
                    entry |= await self._validate(run, step + 1)
                run.history.append(entry)
                run.progress.step(entry)

                completed, updating = step + 1, False
                if completed % checkpoint_every == 0 or completed == steps:
                    await checkpoints.save(run, policies, completed, identity)
                    saved = completed
        except asyncio.CancelledError:
            if completed > saved and not updating:
                await checkpoints.save(run, policies, completed, identity)
            raise

    async def _sample(self, run: Run, batches: Batches, step: int) -> Sample:
        """The step's rollouts; with dynamic sampling, further tasks take the place of groups that are all alike."""
        indices = batches.indices(step)
        results = await self._rollouts(run, indices, step)
        replacements = batches.further(step)
        resampled = 0
        for _ in range(self.max_gen_batches - 1 if self.dynamic_sampling else 0):
            groups = {r.rollout.group for r in results}
            lost_groups = groups - {r.rollout.group for r in results if r.built is not None}
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
        agents = dict.fromkeys(a for r in succeeded if r.built is not None for a in r.built.agents)
        for name in run.selection.policies:
            if all(c.policy != name for c in advantages.calls):
                run.progress.note(
                    f"step {step + 1}: no agent of policy {name!r} was called; agents seen: {', '.join(agents)}"
                )
        advantages = advantages.without_flat() if self.dynamic_sampling else advantages
        return Sample(results, succeeded, advantages, resampled)

    def _advantages(self, run: Run, results: Seq[RolloutResult], step: int) -> StepAdvantages:
        trajectories = [r.built.trajectory for r in results if r.built is not None]
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
        succeeded = require_some(results, f"the validation after step {step}")
        return {**mean_rewards(succeeded, "val"), "val/failed_rollouts": len(results) - len(succeeded)}

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

    # -- settings -----------------------------------------------------------------------------------------------------

    async def _load(self, run: Run, steps: int) -> Policies:
        spec = self.policy_spec(run.seed, steps)
        return await Policies.start(spec, run.selection.policies, run.policies, self.renderer)

    def policy_spec(self, seed: int, steps: int) -> PolicySpec:
        """The settings of the policy process: fields of the same name are passed on, the others are derived."""
        learner = _common(self, LearnerConfig) | {
            "epochs": self.update_epochs,  # here `epochs` counts passes over the tasks
            "critic": self.adv_estimator == "gae",
            "total_steps": steps if self.schedule == "linear" else None,
            "loss_scale_factor": float(self.max_response_tokens) if self.loss_agg.endswith("-norm") else None,
            "seed": seed,
        }
        return PolicySpec(**_common(self, PolicySpec) | {"seed": seed, "learner": LearnerConfig(**learner)})

    def _identity(self, run: Run, steps: int) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it continues."""
        settings = replace(self, steps=steps, epochs=None)
        changeable = {"checkpoint_every", "threads", "device", "val_every"}
        identity = {
            "algorithm": type(self).__name__,
            **{f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in changeable},
            "policies": {n: run.policies.get(n) for n in run.selection.policies},
        }
        return json.loads(json.dumps(identity, default=str))


def _common(source: PolicyGradient, target: type[LearnerConfig | PolicySpec]) -> dict[str, Any]:
    """The values of the fields that both have."""
    names = {f.name for f in fields(source)} & {f.name for f in fields(target)}
    return {name: getattr(source, name) for name in names}
