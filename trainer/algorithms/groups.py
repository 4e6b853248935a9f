"""Rare settings in groups: `agl.GRPO(loss=agl.Loss(clip_low=0.1))` is `agl.GRPO(clip_low=0.1)`.

Algorithms inherit the fields of their groups and may change the defaults. A group sets only what was written in it.
"""

from __future__ import annotations

import functools
import inspect
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from agl.errors import ConfigError
from agl.mdp.types import Transition
from agl.options import reject_unknown, require_types
from agl.trainer.local.config import LossSettings, OptimizerSettings, PassSettings, ProcessSettings
from agl.trainer.objectives import Estimator, EstimatorFunction, PolicyLossFunction, PolicyLossKind
from agl.trainer.objectives.advantages import Shaping
from agl.trainer.run.config import RunConfig

T = TypeVar("T", bound=type)
GROUPS: dict[str, type] = {}
"""The groups, by the argument of an algorithm that takes them."""


def group(cls: T) -> T:
    """Class decorator of a group: an instance's `__dict__` holds only what was written."""
    signature = inspect.signature(cls.__init__)

    def __init__(self: Any, **written: Any) -> None:
        reject_unknown(written, [f.name for f in fields(cls)], cls.__name__)
        vars(self).update(written)

    def __repr__(self: Any) -> str:
        return f"agl.{cls.__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    cls.__init__, cls.__repr__ = __init__, __repr__  # type: ignore[misc]
    GROUPS[cls.__name__.lower()] = cls
    return cls


@group
@dataclass(frozen=True, kw_only=True)
class Optimizer(OptimizerSettings):
    """Settings of AdamW and its learning rate.

    Attributes:
        warmup_steps: steps of linear warm-up of the learning rate.
        schedule: learning rate after the warm-up: "constant", or "linear" (down to 0 at the last step).
        betas: AdamW's decay rates of its two moments.
        weight_decay: AdamW's weight decay.
        grad_clip: largest norm of the gradient; None = no limit.
    """


@group
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of how the policy answers.

    Attributes:
        val_temperature: sampling temperature of validation; None = what the agent requests.
        val_before_train: validate before the first step.
        renderer: name of a renderer of the package `renderers`; None = chosen by the model.
        chat_template: chat template to give the model: "hermes", "llama3", "mistral", "qwen3" or a Jinja file; None =
            its own. The trained policy keeps it.
        max_batch: requests that the engine samples at once.
        prompts: directory of prompts that the agents get: what `agl.GEPA` or `agl.APO` found.
    """

    val_temperature: float | None = None
    val_before_train: bool = True
    renderer: str | None = None
    chat_template: str | None = None
    max_batch: int = 64
    prompts: str | Path | None = None


@group
@dataclass(frozen=True, kw_only=True)
class Device(ProcessSettings, PassSettings):
    """Settings of the hardware and its memory.

    Attributes:
        device: device of the policy: "cpu", "cuda", "mps" or "auto" (cuda where there is a GPU, else the CPU).
        dtype: dtype of the weights: "float32", "bfloat16" or "auto" (by the device).
        quantize: hold the frozen model of LoRA in "4bit" or "8bit"; None = in `dtype`.
        engine: what samples: "torch", in the learner's process, or "vllm", in a separate one on the same device.
        gpu_memory: share of the GPU's memory that "vllm" takes; None = 0.4. While the learner works it is the
            learner's.
        data_parallel: processes that each hold the weights, sample some of the answers and compute some of each update,
            on a GPU each, from the first on. Not with "vllm".
        max_context: token limit of a prompt with its answer; None = the model's.
        threads: CPU threads of the policy process; None = as torch chooses.
        max_tokens_per_microbatch: tokens of one forward pass of the learner; None = by the device.
        attention: attention of the learner where rows share no prefixes: "eager" or "sdpa"; None = by the device.
        autocast: dtype that the learner computes in: "float32" or "bfloat16"; None = by the device.
        activation_checkpointing: keep only each layer's input for the backward pass: a third more computation, a
            fraction of the memory.
        load_timeout: time limit for loading the model without any progress, in seconds: no byte of a download, no
            tensor, nothing read from the disk, and with "vllm" no new line of its log. None = no limit.
    """


@dataclass(frozen=True, slots=True)
class Overlong:
    """A penalty that grows linearly over the last `buffer` tokens before the longest answer allowed.

    Attributes:
        buffer: tokens, at least 1.
        penalty: of an answer of the longest length, above 0.

    Source: DAPO, arXiv 2503.14476, eq. 13; verl's `DAPORewardManager`.
    """

    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.buffer < 1 or not self.penalty > 0:
            raise ConfigError(f"overlong: buffer={self.buffer}, penalty={self.penalty}", hint="both must be above 0")

    def of(self, max_response_tokens: int) -> Shaping:
        """The penalty as a function of a call: -penalty * (tokens in the buffer) / buffer, at most 0."""
        free = max_response_tokens - self.buffer

        def shape(transition: Transition) -> float:
            over = transition.call.response_ids.size - free
            return -self.penalty * max(0, over) / self.buffer

        return shape


@group
@dataclass(frozen=True, kw_only=True)
class Loss(LossSettings):
    """Settings of a policy gradient's advantages and loss. Defaults are those of `agl.GRPO`.

    Attributes:
        adv_estimator: how returns become advantages: "grpo", "rloo", "reinforce_plus_plus",
            "reinforce_plus_plus_baseline", "running_baseline" or, with a value head, "gae"; or your own function.
        baseline_decay: share of its old value that an agent's "running_baseline" keeps in a step.
        normalize_std: divide advantages by the group's standard deviation.
        policy_loss: "vanilla" clips the importance ratio of each token, "gspo" that of each answer; also "cispo",
            "sapo", "vespo", "geo_mean" or your own function.
        clip_low: how far below 1 the importance ratio may be; not used by "sapo" and "vespo".
        clip_high: how far above 1 the importance ratio may be; 4 is usual with "cispo".
        max_kl: how far one optimiser step may change the policy, as KL in nats per token: a step that goes further is
            shortened; None = no limit.
        kl_coef: weight of the KL penalty towards the initial policy.
        kl_kind: estimator of the KL divergence: "k1", "k2" or "k3".
        entropy_coef: weight of the entropy bonus.
        update_epochs: passes over a step's rows.
        minibatches: optimiser steps per pass.
        rollout_is: importance sampling by "token", "sequence" or "geometric" (mean of an answer), for behaviour
            log-probs that are not quite the learner's, or of older weights; None = as they are.
        rollout_is_threshold: largest weight of `rollout_is`; or (lowest, largest), outside of which tokens are not
            trained.
        overlong: penalty for answers near their limit.
        gamma: discount per token of "gae".
        lam: lambda of "gae".
        value_coef: weight of the value head's loss, of "gae".
        value_clip: how far a value may move in one update, of "gae"; None = no limit.
        value_learning_rate: learning rate of the value head, of "gae"; None = `learning_rate`.
    """

    adv_estimator: Estimator | EstimatorFunction = "grpo"
    baseline_decay: float = 0.9
    normalize_std: bool = True
    policy_loss: PolicyLossKind | PolicyLossFunction = "vanilla"
    overlong: Overlong | None = None


_OF_TRAINER = {f.name: "agl.Trainer" for f in fields(RunConfig)}


def grouped_options(cls: T) -> T:
    """Class decorator of an algorithm: as `checked_options`, and the settings of groups may come in these.

    `inspect.signature` shows the groups in place of their fields.
    """
    original, signature = cls.__init__, inspect.signature(cls.__init__)
    groups = {name: kind for name, kind in GROUPS.items() if issubclass(cls, kind)}
    flat = signature.parameters.keys() - {"self"}
    rare = {f.name for kind in groups.values() for f in fields(kind)}

    @functools.wraps(original)
    def __init__(self: Any, **options: Any) -> None:
        reject_unknown(options, {*flat, *groups}, cls.__name__, _OF_TRAINER)
        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        for name, value in options.items():
            if name not in groups or (name in flat and not isinstance(value, tuple(GROUPS.values()))):
                written = {name: value}
            elif value is None or isinstance(value, groups[name]):
                written = {} if value is None else vars(value)
            else:
                raise ConfigError(f"{cls.__name__}: {name}={value!r}", hint=f"use agl.{groups[name].__name__}(...)")
            for option in written:
                if option in values:
                    raise ConfigError(
                        f"{cls.__name__}: {option} is set twice: {places[option]} and {name}={value!r}",
                        hint="leave one of them out",
                    )
                places[option] = f"{name}={value!r}"
            values |= written
        if isinstance(values.get("model"), os.PathLike):
            values["model"] = os.fspath(values["model"])
        require_types(values, cls)
        original(self, **values)

    shown = [p for name, p in signature.parameters.items() if name not in rare]
    for name, kind in groups.items():
        annotation = f"str | {kind.__name__}" if name in flat else f"{kind.__name__} | None"
        default = signature.parameters[name].default if name in flat else None
        shown.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    __init__.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls
