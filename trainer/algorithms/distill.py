"""On-policy distillation: the student samples, and a teacher scores each token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agl.errors import ConfigError
from agl.trainer.algorithms.groups import grouped_options
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.source import Rows, Sample, Source
from agl.trainer.algorithms.training import Training
from agl.trainer.algorithms.worth import worth_of_chosen
from agl.trainer.engines.base import require_served_model
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.policy import PolicySpec
from agl.trainer.objectives.advantages import StepAdvantages
from agl.trainer.policies.policies import by_policy
from agl.trainer.policies.teacher import Teacher
from agl.trainer.run.config import require_positive
from agl.trainer.run.run import Run
from agl.trainer.traces import Chosen


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(LocalTraining):
    """On-policy distillation: the student samples its own rollouts, and each token's advantage is the teacher's
    log-prob of it less the student's when it was sampled. That is a policy gradient on the reverse KL divergence,
    KL(student || teacher), of each token. Rewards are recorded and reported as usual, but not needed.

    Sources: Agarwal et al., arXiv 2306.13649; "On-Policy Distillation" (Thinking Machines Lab, 2025), with its
    advantage (tinker-cookbook's `distillation/train_on_policy.py`, discount 0).

    Attributes:
        teacher: a Hugging Face directory or hub id, the directory of a run or checkpoint, which is loaded next to the
            student; or what holds it, such as `agl.VLLMEngine(url)`. With several policies one for all, or one each
            by name. Its tokenizer has to be the student's.
        on_policy: the student samples. Imitating what a teacher has sampled is `agl.SFT`.
        group_size: rollouts per task.
        batch_size: tasks per step.
        minibatches: optimiser steps per step.
        max_staleness: 1 samples the next step's rollouts while a step is learned; see `agl.GRPO`.
        teacher_dtype: of the teacher's weights where it is loaded here: "float32", "bfloat16" or "auto" (float32).
    """

    rewarded: ClassVar[bool] = False
    why_flat: ClassVar[str] = "the teacher finds all that was sampled as likely as the student does"

    teacher: Any
    on_policy: bool = True
    group_size: int = 4
    batch_size: int = 16
    minibatches: int = 1
    max_staleness: int = 0
    teacher_dtype: str = "auto"

    def __post_init__(self) -> None:
        require_positive(group_size=self.group_size, batch_size=self.batch_size, minibatches=self.minibatches)
        if not self.on_policy:
            raise ConfigError(
                "Distill(on_policy=False) has nothing to sample",
                hint="record the teacher on your tasks (agl run, agl.Baseline), then agl.SFT(data=agl.traces(...))",
            )
        if self.max_staleness not in (0, 1):
            raise ConfigError(
                f"max_staleness={self.max_staleness} is not 0 or 1",
                hint="1 samples the next step while one is learned",
            )
        for teacher in self.teacher.values() if isinstance(self.teacher, Mapping) else [self.teacher]:
            if isinstance(teacher, str | Path):
                continue
            require_served_model("teacher", teacher)
            if self.temperature != 1.0:
                raise ConfigError(
                    f"temperature={self.temperature:g} with the teacher {teacher!r}",
                    hint="leave it at 1: a server reports a text's log-probs only there",
                )
        LocalTraining.__post_init__(self)

    def _loss_settings(self) -> dict[str, Any]:
        return {"minibatches": self.minibatches}

    def _max_staleness(self) -> int:
        return self.max_staleness

    def identity(self, run: Run, steps: int) -> dict[str, Any]:
        # A server may move, and its name is known only when it was asked.
        teachers = by_policy("teacher", self.teacher, run.config.selection.policies)
        names = {name: str(t) if isinstance(t, str | Path) else "vllm" for name, t in teachers.items()}
        return LocalTraining.identity(replace(self, teacher=names), run, steps)

    async def source(self, run: Run) -> Source:
        return Source.of_tasks(run, self, self.batch_size, self.group_size, max_staleness=self.max_staleness)

    async def begin(self, training: Training) -> None:
        """Load the teachers, or connect to them.

        Raises:
            ConfigError: a teacher has another tokenizer than its student, or a shorter context.
            ModelLoadError, EngineError: one cannot be loaded or reached.
        """
        learner = LearnerConfig(max_tokens_per_microbatch=self.max_tokens_per_microbatch)
        spec = PolicySpec(
            "",
            device=str(self.device),
            dtype=self.teacher_dtype,
            threads=self.threads,
            learner=learner,
            load_timeout=self.load_timeout,
        )
        policies = training.policies
        loaded = dict[Any, Teacher]()
        for name, teacher in by_policy("teacher", self.teacher, policies.names).items():
            key = str(teacher) if isinstance(teacher, str | Path) else id(teacher), policies[name].spec.model
            if key not in loaded:
                loaded[key] = await Teacher.start(teacher, policies[name], spec, training.run.progress.loading)
            training.teachers[name] = loaded[key]

    async def worth(self, training: Training, sample: Sample, step: int) -> StepAdvantages:
        """Of every token the teacher's log-prob less the sampler's; of a call the mean of its tokens."""
        attempts = [r.attempt_trajectory for r in sample.results if r.attempt_trajectory is not None]
        parts = tuple(part for attempt in attempts for part in attempt.trajectories.values())
        everything = Chosen(parts, {t.call.id: 0.0 for part in parts for t in part.transitions}, {}, {})
        worth = worth_of_chosen(sample.results, everything, "its agent is not trained")
        rows = await LocalTraining.rows(self, training, worth, step)
        names = list(rows)
        of_teachers = await asyncio.gather(*(training.teachers[name].logprobs(rows[name]) for name in names))
        judged = {
            name: [
                replace(row, advantages=np.where(row.action_mask, x - row.logprobs, np.float32(0)))
                for row, x in zip(rows[name], logprobs, strict=True)
            ]
            for name, logprobs in zip(names, of_teachers, strict=True)
        }
        of_calls = dict[str, float]()
        facts = dict[str, float]()
        for name, policy_rows in judged.items():
            for row in policy_rows:
                for k, call_id in enumerate(row.call_ids):
                    if (trained_T := row.action_mask & (row.calls == k)).any():
                        of_calls[call_id] = float(row.advantages[trained_T].mean())
            if any(row.n_actions for row in policy_rows):
                prefix = "" if len(names) == 1 else f"{name}/"
                advantages_N = np.concatenate([row.advantages[row.action_mask] for row in policy_rows])
                facts[f"{prefix}train/reverse_kl"] = -float(advantages_N.mean())
        calls = tuple(replace(c, advantage=of_calls.get(c.call_id, 0.0)) for c in worth.calls)
        kept = {f.name: getattr(worth, f.name) for f in fields(worth)}
        return _Judged(**{**kept, "calls": calls, "facts": facts}, rows=judged)

    async def rows(self, training: Training, worth: StepAdvantages, step: int) -> Rows:
        assert isinstance(worth, _Judged)
        return worth.rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Judged(StepAdvantages):
    """Also holds the step's rows, with one advantage per token."""

    rows: Rows
