"""Policy gradients on one machine: sample rollouts of each task, credit their calls, update the policies, again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from agl.credit import PerCall
from agl.errors import ConfigError, NoTrainableDataError, nearest
from agl.trainer.algorithms import checkpoints
from agl.trainer.algorithms.shaping import Overlong
from agl.trainer.algorithms.step import Sampled, learn
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.policy import PolicySpec
from agl.trainer.objectives import Estimator, KLKind, LossAgg, PolicyLossKind, RolloutIS
from agl.trainer.objectives.advantages import GROUPED, Scored, score
from agl.trainer.run.policies import Policies
from agl.trainer.run.run import Batches, Run, mean_rewards, require_positive, require_some, require_tasks
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
        dynamic_sampling: sample further tasks in place of those whose rollouts all came to the same, so that
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
            group_size=self.group_size, batch_size=self.batch_size, steps=self.steps, epochs=self.epochs,
            learning_rate=self.learning_rate, temperature=self.temperature, val_every=self.val_every,
            max_response_tokens=self.max_response_tokens, checkpoint_every=self.checkpoint_every,
            max_gen_batches=self.max_gen_batches, update_epochs=self.update_epochs, minibatches=self.minibatches,
        )  # fmt: skip
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

    # -- phases -------------------------------------------------------------------------------------------------------

    async def run(self, run: Run) -> None:
        require_tasks(run.train, "the training dataset")
        batches = Batches(run.train, self.batch_size, run.seed)
        steps = self.steps or batches.steps_per_epoch() * (self.epochs or 1)
        policies = await self._load(run, steps)
        try:
            state = await checkpoints.restore(run, policies, self._identity(run, steps)) if run.resume else None
            start = state.step if state else 0
            if run.resume:
                await run.take_up(start, policies.versions)
            self._gateway(run, policies)
            await run.start(self._rules, policies.names[0])
            run.progress.start(steps, start)
            for name, policy in policies:
                await run.store.add_policy_version(run.run_id, name, policy.version, start)
            if start == 0 and self.val_before_train and run.val and not run.history:
                run.history.append(await self._validate(run, 0, {"step": 0}))
            await self._steps(run, policies, batches, start, steps)
            run.policy_paths = await policies.save_models(run.directory)
            _require_trained(run, policies)
        finally:
            try:
                await run.stop()
            finally:
                await policies.close()
                run.progress.stop()

    async def _steps(self, run: Run, policies: Policies, batches: Batches, start: int, steps: int) -> None:
        """Sample, learn, validate, save; when cancelled between updates, the last completed step is saved first."""
        completed = saved = start
        updating = False
        parameters = sum(policy.info.trainable_parameters for _, policy in policies)
        every = self.checkpoint_every or (1 if parameters < SMALL_MODEL else 10)
        # A value head and penalties learn from rollouts that are all alike, too.
        always = bool(self.kl_coef or self.entropy_coef) or self.adv_estimator == "gae"
        try:
            for step in range(start, steps):
                began = time.monotonic()
                sampled = await self._sample(run, batches, step)
                took = time.monotonic() - began
                _note_absent(run, policies, sampled, step)
                updating = True
                entry = await learn(run, policies, sampled, step, always=always)
                entry |= {
                    "seconds": time.monotonic() - began,
                    "rollouts_per_second": len(sampled.results) / max(1e-9, took),
                }
                if run.val and ((step + 1) % self.val_every == 0 or step + 1 == steps):
                    entry = await self._validate(run, step + 1, entry)
                run.history.append(entry)
                run.progress.step(entry)
                completed, updating = step + 1, False
                if completed % every == 0 or completed == steps:
                    await checkpoints.save(run, policies, completed, self._identity(run, steps))
                    saved = completed
        except asyncio.CancelledError:
            if completed > saved and not updating:
                await checkpoints.save(run, policies, completed, self._identity(run, steps))
            raise

    async def dev(self, run: Run, n_tasks: int) -> None:
        from rich.console import Console

        from agl.trainer.report.explain import describe, renderable

        require_tasks(run.train, "the dataset")
        policies = await self._load(run, 1)
        try:
            self._gateway(run, policies)
            await run.start(self._rules, policies.names[0])
            tasks = list(enumerate(run.train))[:n_tasks]
            results = await run.rollouts(tasks, mode="dev", step=0, metadata=self._metadata(run))
            for result in results:
                report = await describe(run.store, result.rollout.rollout_id, credit=run.credit)
                Console(highlight=False).print(renderable(report))
            good = require_some(results, "the dry run")
            run.history.append({"step": 0, **mean_rewards(good, "train"), "train/rollouts": len(results)})
        finally:
            await run.stop()
            await policies.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _load(self, run: Run, steps: int) -> Policies:
        return await Policies.start(self._template(run, steps), run.selection.policies, run.policies, self.renderer)

    def _template(self, run: Run, steps: int) -> PolicySpec:
        return PolicySpec(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            lora=self.lora,
            seed=run.seed,
            max_context=self.max_context,
            threads=self.threads,
            max_batch=self.max_batch,
            learner=LearnerConfig(
                learning_rate=self.learning_rate,
                betas=self.betas,
                weight_decay=self.weight_decay,
                grad_clip=self.grad_clip,
                warmup_steps=self.warmup_steps,
                schedule=self.schedule,
                total_steps=steps if self.schedule == "linear" else None,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                policy_loss=self.policy_loss,
                rollout_is=self.rollout_is,
                rollout_is_threshold=self.rollout_is_threshold,
                critic=self.adv_estimator == "gae",
                gamma=self.gamma,
                lam=self.lam,
                value_coef=self.value_coef,
                value_clip=self.value_clip,
                value_learning_rate=self.value_learning_rate,
                kl_coef=self.kl_coef,
                kl_kind=self.kl_kind,
                entropy_coef=self.entropy_coef,
                epochs=self.update_epochs,
                minibatches=self.minibatches,
                loss_agg=self.loss_agg,
                loss_scale_factor=float(self.max_response_tokens) if self.loss_agg.endswith("-norm") else None,
                seed=run.seed,
                max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            ),
        )

    def _gateway(self, run: Run, policies: Policies) -> None:
        run.gateway = Gateway(run.store, capture_content=run.capture_content)
        policies.serve(run.gateway)

    def _rules(self, mode: str) -> SamplingRules:
        if mode == "train":
            return SamplingRules(self.temperature, 1.0, 0, self.max_response_tokens)
        return SamplingRules(temperature=self.val_temperature, max_tokens=self.max_response_tokens)

    async def _sample(self, run: Run, batches: Batches, step: int) -> Sampled:
        """The step's rollouts; with dynamic sampling, further tasks take the place of groups that are all alike."""
        indices = batches.indices(step)
        results = await self._rollouts(run, indices, step)
        resampled = 0
        rounds = batches.further(step)
        for _ in range(self.max_gen_batches - 1 if self.dynamic_sampling else 0):
            useless = len(self._score(run, results, step).flat) + _lost_groups(results)
            missing = self.batch_size - (len(indices) - useless)
            more = [next(rounds) for _ in range(missing)]
            if not more:
                break
            results += await self._rollouts(run, more, step, first=len(indices))
            indices += more
            resampled += len(more)
        good = require_some(results, f"step {step + 1}")
        scored = self._score(run, results, step)
        return Sampled(results, good, scored.without_flat() if self.dynamic_sampling else scored, resampled)

    async def _rollouts(self, run: Run, indices: Seq[int], step: int, first: int = 0) -> list[RolloutResult]:
        tasks = [(i, run.train[i]) for i in indices]
        return await run.rollouts(
            tasks, mode="train", step=step, group_size=self.group_size, metadata=self._metadata(run), first=first
        )

    def _score(self, run: Run, results: Seq[RolloutResult], step: int) -> Scored:
        trajectories = [r.built.trajectory for r in results if r.built is not None]
        scored = score(
            trajectories,
            run.credit,
            estimator=self.adv_estimator,
            normalize_std=self.normalize_std,
            shaping=None if self.overlong is None else self.overlong.of(self.max_response_tokens),
        )
        own = any(x.rewards for t in trajectories for x in t.transitions)
        if trajectories and not own and isinstance(run.credit, PerCall) and not run.credit.shared:
            raise NoTrainableDataError(
                f"credit {run.credit!r} counts the calls' own rewards alone, and no call of step {step + 1} earned one",
                hint="emit rewards where calls earn them (agl.emit_reward in a tool, agl.air), or use Uniform()",
                step=step + 1,
            )
        return scored

    async def _validate(self, run: Run, step: int, entry: dict[str, Any]) -> dict[str, Any]:
        results = await run.rollouts(list(enumerate(run.val)), mode="val", step=step, metadata=self._metadata(run))
        good = require_some(results, f"the validation after step {step}")
        return {**entry, **mean_rewards(good, "val"), "val/failed_rollouts": len(results) - len(good)}

    def _metadata(self, run: Run) -> dict[str, Any]:
        """What explains a rollout later: the models, whose tokenizers turn ids into text."""
        models = {name: (own.model if (own := run.policies.get(name)) else None) or self.model
                  for name in run.selection.policies}  # fmt: skip
        paths = {n: str(Path(m).resolve()) if Path(m).exists() else m for n, m in models.items()}
        return {"model": next(iter(paths.values())), **({"models": paths} if len(paths) > 1 else {})}

    def _identity(self, run: Run, steps: int) -> dict[str, Any]:
        """What a resumed run must have in common with the one it goes on from."""
        fields = replace(self, steps=steps, epochs=None)
        skip = {"checkpoint_every", "threads", "device", "val_every"}
        own = {f: getattr(fields, f) for f in self.__dataclass_fields__ if f not in skip}
        facts = {
            "algorithm": type(self).__name__,
            **own,
            "policies": {n: run.policies.get(n) for n in run.selection.policies},
        }
        return json.loads(json.dumps(facts, default=str))


def _lost_groups(results: Seq[RolloutResult]) -> int:
    """Tasks of which no rollout succeeded."""
    groups = {r.rollout.group for r in results}
    return len(groups - {r.rollout.group for r in results if r.built is not None})


def _note_absent(run: Run, policies: Policies, sampled: Sampled, step: int) -> None:
    """Say which policies this step has no call of: an agent's name that matches nobody, or an agent seldom called."""
    present = {c.policy for c in sampled.scored.calls}
    seen = dict.fromkeys(a for r in sampled.good if r.built is not None for a in r.built.agents)
    for name in policies.names:
        if name not in present:
            run.progress.note(
                f"step {step + 1}: no agent of policy {name!r} was called; agents seen: {', '.join(seen)}"
            )


def _require_trained(run: Run, policies: Policies) -> None:
    never = [name for name, version in policies.versions.items() if version == 0]
    if never and len(policies) > 1:
        raise NoTrainableDataError(
            f"training ended, and policy {', '.join(map(repr, never))} was never updated",
            hint=f"agents={run.selection} gave it no call with anything to learn from; the other policies are saved",
            directory=run.directory,
        )
