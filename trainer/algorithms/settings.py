"""The settings of algorithms that train on this machine, and how engine and learner get theirs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from agl.agents.prompts import load_prompts, prompts_digest
from agl.errors import ConfigError, nearest
from agl.extras import TRAINING, require
from agl.trainer.algorithms.groups import Device, Loss, Optimizer, Sampling
from agl.trainer.local.config import (
    Attention,
    EngineName,
    LearnerConfig,
    LoraSpec,
    LossSettings,
    OptimizerSettings,
    PassSettings,
    ProcessSettings,
    require_dtype,
)
from agl.trainer.local.policy import PolicySpec
from agl.trainer.local.prepared import template_text
from agl.trainer.objectives import Estimator, LossAgg, PolicyLossKind
from agl.trainer.objectives.advantages import GROUPED, try_estimator
from agl.trainer.processes.functions import Portable, function_name
from agl.trainer.run.batches import TaskSampling
from agl.trainer.run.config import require_positive
from agl.trainer.run.run import Run

OTHER_NAMES = {"nworkers": "n_workers", "gpus": "device", "air_enabled": "air"}
"""Names that published guides use for options -> the options, in files, command lines and clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings:
    """The settings of every algorithm that trains on this machine, apart from the rare ones in `groups`.

    Attributes:
        model: Hugging Face directory or hub id of the model to train, or a GGUF file.
        steps: updates of the policy; give this or `epochs`.
        epochs: passes over the training data, instead of `steps`. Each pass has each task or recorded rollout once;
            the last step of the run may have fewer of them than `batch_size`. With `task_sampling="learnability"`,
            it is the number of steps alone: that draws tasks unevenly.
        learning_rate: peak learning rate of AdamW; None = the usual one for the model's size, for LoRA or all weights,
            and for what is learned (`agl.trainer.local.rates`), which the run prints.
        loss_agg: mean of the loss: "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", or
            "seq-mean-token-sum-norm" (divided by `max_response_tokens`).
        temperature: sampling temperature during training, whatever the agent requests.
        max_response_tokens: token limit of an answer, during training and validation.
        val_every: steps between validations.
        lora: train a LoRA adapter of this rank instead of the full weights. In Python an `agl.LoraSpec`.
        checkpoint_every: steps between checkpoints; None = each step where a small model samples, else every 10. One
            is also written at the end and on Ctrl-C.
        optimizer: an `agl.Optimizer`: warm-up, schedule, AdamW.
        sampling: an `agl.Sampling`: validation, renderer, chat template, prompts.
    """

    model: str
    steps: int | None = None
    epochs: int | None = None
    learning_rate: float | None = None
    loss_agg: LossAgg = "token-mean"
    temperature: float = 1.0
    max_response_tokens: int = 1024
    val_every: int = 10
    lora: LoraSpec | None = None
    checkpoint_every: int | None = None
    if TYPE_CHECKING:  # `grouped_options` takes them.
        optimizer: Optimizer | None = None
        sampling: Sampling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings(Optimizer, Sampling, Device, CommonSettings):
    """All settings of an algorithm that trains on this machine, checked."""

    timed: ClassVar[bool] = True
    """Whether `steps` or `epochs` say how long it trains."""
    if TYPE_CHECKING:
        device: str | Device = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        require(f"agl.{type(self).__name__}", "local", TRAINING)
        require_positive(
            steps=self.steps,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            temperature=self.temperature,
            val_every=self.val_every,
            max_response_tokens=self.max_response_tokens,
            checkpoint_every=self.checkpoint_every,
            load_timeout=self.load_timeout,
        )
        if self.timed and (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"{type(self).__name__} needs either steps= or epochs=", hint="for example steps=200")
        if self.attention is not None:
            _require_known("attention", self.attention, Attention)
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device={self.device!r} is not known", hint="use auto, cpu, cuda, cuda:1 or mps")
        require_dtype(self.dtype)
        if self.chat_template is not None:
            template_text(self.chat_template)
        self._check_engine()
        # Checks the learner's settings.
        self.policy_spec(seed=0, steps=self.steps or self.warmup_steps + 1)

    def _check_engine(self) -> None:
        if self.engine not in get_args(EngineName):
            raise ConfigError(
                f"engine={self.engine!r} is not known",
                hint=nearest(self.engine, get_args(EngineName))
                if isinstance(self.engine, str)
                else "a server elsewhere cannot be trained: engine='vllm' starts one, agl.Baseline(engine=) measures",
            )
        if self.gpu_memory is not None and (self.engine != "vllm" or not 0 < self.gpu_memory < 1):
            raise ConfigError(
                f"gpu_memory={self.gpu_memory} with engine={self.engine!r}",
                hint="it is vLLM's share of the GPU's memory, between 0 and 1, with engine='vllm'",
            )
        if self.engine == "vllm":
            require("engine='vllm'", "vllm")

    def policy_spec(self, seed: int, steps: int) -> PolicySpec:
        """The settings of the policy process and of its learner."""
        learner = LearnerConfig(
            **_values(self, OptimizerSettings),
            **_values(self, PassSettings),
            **self._loss_settings(),
            total_steps=steps if self.schedule == "linear" else None,
            loss_agg=self.loss_agg,
            loss_scale_factor=float(self.max_response_tokens) if self.loss_agg.endswith("-norm") else None,
            seed=seed,
        )
        if self.learning_rate is not None:
            learner = replace(learner, learning_rate=self.learning_rate)
        return PolicySpec(
            **_values(self, ProcessSettings),
            model=self.model,
            lora=self.lora,
            seed=seed,
            learner=learner,
            max_batch=self.max_batch,
            max_staleness=self._max_staleness(),
            usual_rate=self.learning_rate is None,
        )

    def _loss_settings(self) -> dict[str, Any]:
        """The algorithm's settings of the loss, as fields of `LearnerConfig`."""
        return {}

    def _max_staleness(self) -> int:
        """By how many updates the weights that sample may be older than those that learn."""
        return 0

    def identity(self, run: Run, steps: int) -> dict[str, Any]:
        """The settings that a run must keep when it is resumed."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"steps": steps, "epochs": None}
        changeable = {
            "checkpoint_every",
            "threads",
            "device",
            "val_every",
            "activation_checkpointing",
            "engine",
            "gpu_memory",
            "prompts",
            "load_timeout",
            "data_parallel",
        }
        identity = {
            "algorithm": type(self).__name__,
            **{name: value for name, value in values.items() if name not in changeable},
            "policies": {n: run.config.policies.get(n) for n in run.config.selection.policies},
            "prompts": None if self.prompts is None else prompts_digest(load_prompts(self.prompts)),
        }
        return json.loads(json.dumps(identity, default=lambda v: function_name(v) if isfunction(v) else str(v)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientSettings(Loss, TrainingSettings):
    """The settings of a policy-gradient algorithm, in addition to those of any training.

    Attributes:
        group_size: rollouts per task.
        batch_size: tasks per step.
        dynamic_sampling: sample further tasks in place of those whose rollouts all had the same return, so that
            `batch_size` tasks have something to learn from.
        max_gen_batches: rounds of sampling in a step, with `dynamic_sampling`.
        task_sampling: "uniform" goes through the tasks in a random order; "learnability" draws those more often whose
            rollouts differed most in reward when they were last sampled, so that tasks which are always or never
            solved cost little.
        max_staleness: updates by which the weights that sample may be older than those that learn. With 1, the next
            step's rollouts are sampled while a step is learned, whole, by one version. Above 1, sampling never waits:
            new weights are served in the middle of a rollout or an answer, which goes on under them, and a step learns
            from the groups that have ended, while slow ones count in a later step, within the bound. The clipped ratio
            is taken against the log-probs of the sampler, each token's own, and `rollout_is` weighs tokens by the
            difference. It takes memory for a second copy of the trained weights. Validation is of the newest weights.
        loss: an `agl.Loss`: advantages, clipping, KL, entropy, passes, value head.
    """

    group_size: int = 8
    batch_size: int = 16
    dynamic_sampling: bool = False
    max_gen_batches: int = 4
    task_sampling: TaskSampling = "uniform"
    max_staleness: int = 0
    if TYPE_CHECKING:
        loss: Loss | None = None

    def __post_init__(self) -> None:
        require_positive(
            group_size=self.group_size,
            batch_size=self.batch_size,
            max_gen_batches=self.max_gen_batches,
            update_epochs=self.update_epochs,
            minibatches=self.minibatches,
        )
        if callable(self.adv_estimator):
            try_estimator(self.adv_estimator)
        else:
            _require_known("adv_estimator", self.adv_estimator, Estimator)
        if callable(self.policy_loss):
            # torch takes seconds to import, which only such a function needs here.
            from agl.trainer.objectives.losses import try_loss

            try_loss(self.policy_loss)
        else:
            _require_known("policy_loss", self.policy_loss, PolicyLossKind)
        if self.group_size < 2 and (self.adv_estimator in GROUPED or self.dynamic_sampling):
            raise ConfigError(
                "group_size is 1, so no rollout has another to be compared with", hint="use at least 2; 8 is usual"
            )
        if not 0 <= self.baseline_decay < 1:
            raise ConfigError(
                f"baseline_decay={self.baseline_decay} is not in [0, 1)",
                hint="0 uses only the previous step's mean; 0.9 that of about the last ten",
            )
        _require_known("task_sampling", self.task_sampling, TaskSampling)
        if self.task_sampling == "learnability" and self.group_size < 2:
            raise ConfigError(
                "task_sampling='learnability' with group_size=1: one rollout has no spread", hint="use at least 4"
            )
        if self.max_staleness < 0:
            raise ConfigError(
                f"max_staleness={self.max_staleness} is below 0",
                hint="0 is on-policy, 1 samples a step while another is learned, 2 to 4 never wait for slow rollouts",
            )
        if self.overlong is not None and self.overlong.buffer > self.max_response_tokens:
            raise ConfigError(
                f"overlong.buffer={self.overlong.buffer} is longer than max_response_tokens={self.max_response_tokens}",
                hint="choose a shorter buffer: it is the last part of the longest answer",
            )
        TrainingSettings.__post_init__(self)

    def _loss_settings(self) -> dict[str, Any]:
        loss = self.policy_loss
        return {
            **_values(self, LossSettings),
            "policy_loss": Portable("policy_loss", loss) if callable(loss) else loss,
            "critic": self.adv_estimator == "gae",
        }

    def _max_staleness(self) -> int:
        return self.max_staleness


def _values(settings: object, kind: type) -> dict[str, Any]:
    """The fields of one of the bases of `settings`, with their values."""
    return {f.name: getattr(settings, f.name) for f in fields(kind)}


def _require_known(name: str, value: Any, kind: Any) -> None:
    if value not in get_args(kind):
        raise ConfigError(f"{name}={value!r} is not known", hint=nearest(str(value), get_args(kind)))
