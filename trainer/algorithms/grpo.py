"""GRPO on one machine: sample a group of rollouts per task, compare them with each other, update the policy.

Source of the algorithm: DeepSeekMath (arXiv 2402.03300), section 4; clipping and loss reduction as in verl.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agl.errors import ConfigError, NoTrainableDataError, StalePolicyError, checked_options
from agl.mdp import Trajectory
from agl.selection import DEFAULT_POLICY
from agl.sequence import Sequence, merge, merge_report
from agl.trainer.algorithms import checkpoints
from agl.trainer.algorithms.advantages import Scored, score
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.rendering import Rendering
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.process import LocalPolicy, PolicySpec
from agl.trainer.run import Batches, Run, require_positive, require_some, require_tasks
from agl.trainer.runners.local import RolloutResult
from agl.trainer.store.base import TrainedCall

PROBE_TOKENS = 64
SMALL_MODEL = 20_000_000
"""Parameters below which a checkpoint at every step costs next to nothing."""
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of log-probs, in nats, that rounding explains, by the dtype that is computed in."""


@checked_options
@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    """Group relative policy optimisation with the embedded engine and learner.

    Attributes:
        model: a Hugging Face directory or hub id.
        group_size: rollouts per task. batch_size: tasks per step.
        steps: updates; or `epochs`: passes over the training tasks. One of the two.
        minibatches: optimiser steps per pass over a step's rows. passes: over them.
        learning_rate, warmup_steps, schedule, betas, weight_decay, grad_clip: of AdamW; the schedule is "constant" or
            "linear" (down to 0 at the last step).
        clip_low, clip_high: of the importance ratio. kl_coef, kl_kind: penalty towards the initial policy ("k1", "k2",
            "k3"). entropy_coef: bonus.
        loss_agg: "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", or "seq-mean-token-sum-norm" (divided by
            `max_response_tokens`).
        normalize_std: divide advantages by the group's standard deviation (False: Dr.GRPO's form).
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
    minibatches: int = 1
    passes: int = 1
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "linear"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    loss_agg: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    normalize_std: bool = True
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
        require_positive(
            group_size=self.group_size, batch_size=self.batch_size, steps=self.steps, epochs=self.epochs,
            learning_rate=self.learning_rate, temperature=self.temperature, val_every=self.val_every,
            max_response_tokens=self.max_response_tokens, checkpoint_every=self.checkpoint_every,
            minibatches=self.minibatches, passes=self.passes,
        )  # fmt: skip
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError("GRPO needs either steps= or epochs=", hint="for example steps=200")
        if self.group_size < 2:
            raise ConfigError(
                "group_size is 1, so no rollout has another to be compared with", hint="use at least 2; 8 is usual"
            )

    # -- phases -------------------------------------------------------------------------------------------------------

    async def run(self, run: Run) -> None:
        require_tasks(run.train, "the training dataset")
        batches = Batches(run.train, self.batch_size, run.seed)
        steps = self.steps or batches.steps_per_epoch() * (self.epochs or 1)
        policy, rendering = await self._load(run, steps)
        try:
            state = await checkpoints.restore(run, policy, self._identity(steps)) if run.resume else None
            start = state.step if state else 0
            gateway = self._gateway(run, policy, rendering)
            await run.start(self._rules, DEFAULT_POLICY)
            run.progress.start(steps, start)
            await run.store.add_policy_version(run.run_id, DEFAULT_POLICY, policy.version, start)
            if start == 0 and self.val_before_train and run.val and not run.history:
                run.history.append(await self._validate(run, 0, {"step": 0}))
            await self._steps(run, policy, gateway, batches, start, steps)
            run.policy_path = run.directory / "policy"
            await policy.save_model(run.policy_path)
        finally:
            try:
                await run.stop()
            finally:
                await policy.close()
                run.progress.stop()

    async def _steps(
        self, run: Run, policy: LocalPolicy, gateway: Gateway, batches: Batches, start: int, steps: int
    ) -> None:
        """Sample, learn, validate, save; when cancelled between updates, the last completed step is saved first."""
        completed = saved = start
        updating = False
        every = self.checkpoint_every or (1 if policy.info.parameters < SMALL_MODEL else 10)
        try:
            for step in range(start, steps):
                began = time.monotonic()
                tasks = [(i, run.train[i]) for i in batches.indices(step)]
                results = await run.rollouts(
                    tasks, mode="train", step=step, group_size=self.group_size, metadata=self._metadata()
                )
                sampled = time.monotonic()
                updating = True
                entry = await self._learn(run, policy, gateway, results, step)
                entry |= {
                    "seconds": time.monotonic() - began,
                    "rollouts_per_second": len(results) / max(1e-9, sampled - began),
                }
                if run.val and ((step + 1) % self.val_every == 0 or step + 1 == steps):
                    entry = await self._validate(run, step + 1, entry)
                run.history.append(entry)
                run.progress.step(entry)
                completed, updating = step + 1, False
                if completed % every == 0 or completed == steps:
                    await checkpoints.save(run, policy, completed, self._identity(steps))
                    saved = completed
        except asyncio.CancelledError:
            if completed > saved and not updating:
                await checkpoints.save(run, policy, completed, self._identity(steps))
            raise

    async def dev(self, run: Run, n_tasks: int) -> None:
        from rich.console import Console

        from agl.trainer.explain import describe, renderable

        require_tasks(run.train, "the dataset")
        policy, rendering = await self._load(run, 1)
        try:
            self._gateway(run, policy, rendering)
            await run.start(self._rules, DEFAULT_POLICY)
            tasks = list(enumerate(run.train))[:n_tasks]
            results = await run.rollouts(tasks, mode="dev", step=0, metadata=self._metadata())
            for result in results:
                report = await describe(run.store, result.rollout.rollout_id, credit=run.credit)
                Console(highlight=False).print(renderable(report))
            good = require_some(results, "the dry run")
            rewards = [r.built.reward for r in good if r.built is not None and r.built.reward is not None]
            run.history.append({"step": 0, "train/reward": float(np.mean(rewards)), "train/rollouts": len(results)})
        finally:
            await run.stop()
            await policy.close()

    async def _load(self, run: Run, steps: int) -> tuple[LocalPolicy, Rendering]:
        spec = PolicySpec(
            model=self.model,
            name=DEFAULT_POLICY,
            device=self.device,
            dtype=self.dtype,
            lora=self.lora,
            seed=run.seed,
            max_context=self.max_context,
            threads=self.threads,
            max_batch=self.max_batch,
            learner=LearnerConfig(
                epochs=self.passes,
                minibatches=self.minibatches,
                learning_rate=self.learning_rate,
                betas=self.betas,
                weight_decay=self.weight_decay,
                grad_clip=self.grad_clip,
                warmup_steps=self.warmup_steps,
                schedule=self.schedule,
                total_steps=steps if self.schedule == "linear" else None,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                kl_coef=self.kl_coef,
                kl_kind=self.kl_kind,
                entropy_coef=self.entropy_coef,
                loss_agg=self.loss_agg,
                loss_scale_factor=float(self.max_response_tokens) if self.loss_agg.endswith("-norm") else None,
                seed=run.seed,
                max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            ),
        )
        policy = await LocalPolicy.start(spec)
        try:
            return policy, await asyncio.to_thread(self._rendering)
        except BaseException:
            await policy.close()
            raise

    def _rendering(self) -> Rendering:
        from agl.trainer.local.model import load_tokenizer

        return Rendering(load_tokenizer(self.model), renderer=self.renderer)

    def _gateway(self, run: Run, policy: LocalPolicy, rendering: Rendering) -> Gateway:
        run.gateway = Gateway(run.store, capture_content=run.capture_content)
        for name in run.selection.policies:
            if name != DEFAULT_POLICY:
                raise ConfigError(
                    f"agents= names the policy {name!r}, but GRPO trains one policy, {DEFAULT_POLICY!r}",
                    hint="give agents= as names or patterns",
                )
        run.gateway.serve(DEFAULT_POLICY, policy, rendering, policy.info.stop_token_ids)
        return run.gateway

    def _rules(self, mode: str) -> SamplingRules:
        if mode == "train":
            return SamplingRules(self.temperature, 1.0, 0, self.max_response_tokens)
        return SamplingRules(temperature=self.val_temperature, max_tokens=self.max_response_tokens)

    async def _learn(
        self, run: Run, policy: LocalPolicy, gateway: Gateway, results: Seq[RolloutResult], step: int
    ) -> dict[str, Any]:
        """Trajectories -> returns -> advantages -> rows -> one update, and the record of it."""
        good = require_some(results, f"step {step + 1}")
        trajectories = [t for r in good if r.built is not None for t in r.built.trajectories.values()]
        scored = score(trajectories, run.credit, normalize_std=self.normalize_std)
        rows = [row for s in scored.kept for row in merge(s, scored.advantages)]
        if not any(row.n_actions for row in rows) and not scored.kept:
            raise NoTrainableDataError(
                f"step {step + 1} has nothing to train on: {len(good)} of {len(results)} rollouts succeeded, and "
                f"no group kept two ({scored.dropped_groups} dropped)",
                hint="see why rollouts fail with agl explain, or raise max_attempts",
                step=step + 1,
            )
        _check_versions(scored.kept, policy.version, step)
        before = policy.version
        metrics: dict[str, float] = {}
        if any(np.any(row.advantages) for row in rows) or self.kl_coef or self.entropy_coef:
            async with gateway.hold():
                metrics = await policy.train(rows)
                await self._probe(policy, rows, step)
        await self._record(run, scored, rows, step, policy.version)
        if policy.version != before:
            await run.store.add_policy_version(run.run_id, DEFAULT_POLICY, policy.version, step + 1)
        merged = merge_report(scored.kept, rows)
        rewards = [r.built.reward for r in good if r.built is not None and r.built.reward is not None]
        return {
            "step": step + 1,
            "train/reward": float(np.mean(rewards)),
            "train/rollouts": len(results),
            "train/failed_rollouts": len(results) - len(good),
            "train/dropped_groups": scored.dropped_groups,
            "train/zero_variance_groups": scored.zero_variance_groups,
            "train/calls": merged.calls,
            "train/rows": merged.rows,
            "train/tokens": merged.tokens,
            "train/tokens_unmerged": merged.tokens_unmerged,
            "train/forks": sum(merged.forks.values()),
            "policy_version": policy.version,
            **{f"learner/{k}": v for k, v in metrics.items()},
        }

    async def _probe(self, policy: LocalPolicy, rows: Seq[Sequence], step: int) -> None:
        """The engine must serve what was just trained: both sides' log-probs of one fixed sequence agree."""
        row = next(r for r in rows if len(r) > 1)
        path = row.token_ids[:PROBE_TOKENS] if row.is_chain else row.token_ids[row.positions == np.arange(len(row))]
        ids = path[:PROBE_TOKENS]
        trained = await policy.logprobs(ids)
        served = await policy.engine_logprobs(ids)
        worst = float(np.max(np.abs(trained - served))) if ids.size > 1 else 0.0
        if not worst <= PROBE_TOLERANCE[policy.info.dtype]:
            raise StalePolicyError(
                f"after the update of step {step + 1} the engine's log-probs differ from the learner's by {worst:.3g}",
                hint="the engine does not serve the policy just trained; please report this with your model's config",
                step=step + 1,
                policy_version=policy.version,
            )

    async def _record(self, run: Run, scored: Scored, rows: Seq[Sequence], step: int, version: int) -> None:
        row_of = {call_id: i for i, row in enumerate(rows) for call_id in row.call_ids}
        tokens = {
            call_id: int(np.sum(row.action_mask & (row.calls == k)))
            for row in rows
            for k, call_id in enumerate(row.call_ids)
        }
        await run.store.add_trained_calls(
            run.run_id,
            [
                TrainedCall(
                    call_id=c.call_id,
                    rollout_id=c.rollout_id,
                    step=step + 1,
                    policy_version=version,
                    sequence=row_of.get(c.call_id),
                    reward=c.reward,
                    return_=c.return_,
                    advantage=c.advantage,
                    tokens=tokens.get(c.call_id, 0),
                    dropped=c.dropped,
                )
                for c in scored.calls
            ],
        )

    async def _validate(self, run: Run, step: int, entry: dict[str, Any]) -> dict[str, Any]:
        results = await run.rollouts(list(enumerate(run.val)), mode="val", step=step, metadata=self._metadata())
        good = require_some(results, f"the validation after step {step}")
        rewards = [r.built.reward for r in good if r.built is not None and r.built.reward is not None]
        return {**entry, "val/reward": float(np.mean(rewards)), "val/failed_rollouts": len(results) - len(good)}

    def _metadata(self) -> dict[str, Any]:
        return {"model": str(Path(self.model).resolve()) if Path(self.model).exists() else self.model}

    def _identity(self, steps: int) -> dict[str, Any]:
        """What a resumed run must have in common with the one it goes on from."""
        fields = replace(self, steps=steps, epochs=None)
        skip = {"checkpoint_every", "threads", "device", "val_every"}
        return json.loads(
            json.dumps({f: getattr(fields, f) for f in self.__dataclass_fields__ if f not in skip}, default=str)
        )


def _check_versions(trajectories: Seq[Trajectory], version: int, step: int) -> None:
    for trajectory in trajectories:
        for transition in trajectory.transitions:
            call = transition.call
            if call.policy_version != version:
                raise StalePolicyError(
                    f"call {call.id} was sampled by policy version {call.policy_version}, but version {version} is "
                    "being trained",
                    rollout=call.rollout_id,
                    attempt=call.attempt,
                    agent=call.agent,
                    step=step + 1,
                )
