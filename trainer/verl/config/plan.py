"""What a verl config asks for, as numbers under our own names: the one thing that both ways to train it read."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl.errors import ConfigError, nearest

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
MODES = ("sync", "colocate_async", "separate_async")

MISSING: Any = object()
UNSET = "???"
"""Hydra's own sign for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of a verl config, verl's own defaults filled in.

    Attributes:
        given: dotted key -> value, as the user wrote them, in verl 0.9's names.
        model: directory or hub id. lora_*: 0 trains all weights.
        estimator: verl's `adv_estimator`; `normalize_std`, gamma, lam: of it.
        batch_size: tasks per step. group_size: rollouts per task. mini_batch_size: tasks per optimiser step.
        passes: over a batch.
        max_prompt_tokens, max_response_tokens: of one call; max_context: of a whole conversation, by default both.
        seed: of the order of tasks; None leaves it to the run.
        epochs, steps: how long; steps, where given, count.
        val_every, checkpoint_every: in steps; None for never. val_before_train: whether there is a validation first.
        mode: "sync", "colocate_async" or "separate_async". device: "cuda" or "cpu". gpus_per_node, nodes: that train.
        kl_coef: 0 without a KL loss. clip_low, clip_high: of the importance ratio.
        temperature: of training. val_temperature: of validation, 0 where it is greedy.
    """

    given: Mapping[str, Any]
    model: str
    lora_rank: int
    lora_alpha: float
    lora_targets: str | tuple[str, ...]
    estimator: str
    normalize_std: bool
    gamma: float
    lam: float
    batch_size: int
    group_size: int
    mini_batch_size: int
    passes: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_context: int
    seed: int | None
    epochs: int
    steps: int | None
    val_every: int | None
    val_before_train: bool
    checkpoint_every: int | None
    mode: str
    device: str
    gpus_per_node: int
    nodes: int
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    warmup_ratio: float
    grad_clip: float
    clip_low: float
    clip_high: float
    policy_loss: str
    kl_coef: float
    kl_kind: str
    entropy_coef: float
    loss_agg: str
    temperature: float
    val_temperature: float

    @property
    def minibatches(self) -> int:
        """Optimiser steps per pass over a batch."""
        return self.batch_size // self.mini_batch_size

    def total_steps(self, n_tasks: int) -> int:
        """Steps in all: verl drops an epoch's incomplete last batch. At least one, for a dataset below one batch."""
        return self.steps or max(1, n_tasks // self.batch_size * self.epochs)


# -- reading ----------------------------------------------------------------------------------------------------------


def integer(value: Any) -> int:
    """`value` if it is a whole number; TypeError otherwise, for text, truth values and 8.0 too, as verl has it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("is not a whole number")
    return value


def number(value: Any) -> float:
    """`value` if it is a finite number; TypeError otherwise, for text and truth values too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        # YAML 1.1 reads 1e-6, without a point, as text.
        text = isinstance(value, str) and value.replace("-", "").replace("e", "").replace(".", "").isdigit()
        raise TypeError(f"is text; write {float(value)!r}" if text else "is not a number")
    return float(value)


def flag(value: Any) -> bool:
    """`value` if it is true or false; TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError("is neither true nor false")
    return value


def text(value: Any) -> str:
    """`value` if it is text; TypeError otherwise."""
    if not isinstance(value, str):
        raise TypeError("is not text")
    return value


def _steps(value: Any) -> int | None:
    """-1, 0 and None all mean never in verl."""
    return None if integer(value) <= 0 else int(value)


def _betas(value: Any) -> tuple[float, float]:
    first, second = value
    return number(first), number(second)


def _targets(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(map(text, value))


def one_of(*names: str) -> Callable[[Any], str]:
    """A reader of a choice among `names`."""

    def read_choice(value: Any) -> str:
        if value not in names:
            raise ValueError(f"is not known; {nearest(str(value), names)}")
        return value

    return read_choice


def _kl_kind(value: Any) -> str:
    kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    # "abs", "full" and the straight-through ones ("k3+") are verl's alone.
    names = (*kinds, "abs", "full")
    name = one_of(*names, *(f"{n}+" for n in names))(value)
    return kinds.get(name, name)


@dataclass(frozen=True, slots=True)
class Number:
    """Where a number stands in a verl config.

    Attributes:
        field: of `Plan`, or a name that `_settle` makes one of.
        default: verl's. read: value -> the field's; TypeError or ValueError where it cannot be.
    """

    field: str
    default: Any
    read: Callable[[Any], Any]


NUMBERS: Mapping[str, Number] = {
    "algorithm.adv_estimator": Number("estimator", "gae", text),
    "algorithm.norm_adv_by_std_in_grpo": Number("normalize_std", True, flag),
    "algorithm.gamma": Number("gamma", 1.0, number),
    "algorithm.lam": Number("lam", 1.0, number),
    "data.train_batch_size": Number("batch_size", 1024, integer),
    "data.max_prompt_length": Number("max_prompt_tokens", 512, integer),
    "data.max_response_length": Number("max_response_tokens", 512, integer),
    "data.seed": Number("seed", None, integer),
    f"{MODEL}.path": Number("model", MISSING, text),
    f"{MODEL}.lora_rank": Number("lora_rank", 0, integer),
    f"{MODEL}.lora_alpha": Number("lora_alpha", 16, number),
    f"{MODEL}.target_modules": Number("lora_targets", "all-linear", _targets),
    f"{ACTOR}.ppo_mini_batch_size": Number("mini_batch_size", None, integer),
    f"{ACTOR}.ppo_epochs": Number("passes", 1, integer),
    f"{ACTOR}.optim.lr": Number("learning_rate", 1e-6, number),
    f"{ACTOR}.optim.betas": Number("betas", (0.9, 0.999), _betas),
    f"{ACTOR}.optim.weight_decay": Number("weight_decay", 0.01, number),
    f"{ACTOR}.optim.lr_warmup_steps": Number("warmup_steps", -1, integer),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": Number("warmup_ratio", 0.0, number),
    f"{ACTOR}.optim.clip_grad": Number("grad_clip", 1.0, number),
    f"{ACTOR}.use_kl_loss": Number("use_kl_loss", False, flag),
    f"{ACTOR}.kl_loss_coef": Number("kl_coef", 0.001, number),
    f"{ACTOR}.kl_loss_type": Number("kl_kind", "low_var_kl", _kl_kind),
    f"{ACTOR}.entropy_coeff": Number("entropy_coef", 0.0, number),
    f"{ACTOR}.clip_ratio_low": Number("clip_low", 0.2, number),
    f"{ACTOR}.clip_ratio_high": Number("clip_high", 0.2, number),
    f"{ACTOR}.policy_loss.loss_mode": Number("policy_loss", "vanilla", text),
    f"{ACTOR}.loss_agg_mode": Number("loss_agg", "token-mean", text),
    f"{ROLLOUT}.n": Number("group_size", 1, integer),
    f"{ROLLOUT}.temperature": Number("temperature", 1.0, number),
    f"{ROLLOUT}.max_model_len": Number("max_context", None, integer),
    f"{ROLLOUT}.val_kwargs.temperature": Number("val_temperature", 0.0, number),
    f"{ROLLOUT}.val_kwargs.do_sample": Number("val_sampled", None, flag),
    "trainer.total_epochs": Number("epochs", 30, integer),
    "trainer.total_training_steps": Number("steps", None, integer),
    "trainer.test_freq": Number("val_every", -1, _steps),
    "trainer.save_freq": Number("checkpoint_every", -1, _steps),
    "trainer.val_before_train": Number("val_before_train", True, flag),
    "trainer.device": Number("device", "cuda", text),
    "trainer.n_gpus_per_node": Number("gpus_per_node", 8, integer),
    "trainer.nnodes": Number("nodes", 1, integer),
    "trainer.v1.trainer_mode": Number("mode", "sync", one_of(*MODES)),
}
"""Dotted key -> the number it is. Defaults are verl 0.9's, but for those that `_settle` makes."""


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of every leaf, in order; hydra's `+` and `++` are left off.

    Args:
        config: nested, dotted or both, such as `{"data": {"train_batch_size": 8}, "+trainer.nnodes": 1}`; a whole
            config that hydra composed is one too.

    Raises:
        ConfigError: a key that is not text, or one that is given twice.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(config):
        config = omegaconf.OmegaConf.to_container(config, resolve=True)
    found: dict[str, Any] = {}
    for key, value in _leaves(config, ""):
        if value == UNSET:
            continue
        if key in found:
            raise ConfigError(f"the verl config has {key!r} twice", hint="write it nested or dotted, not both")
        found[key] = value
    return found


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if not isinstance(name, str):
            raise ConfigError(f"the verl config has the key {name!r} in {prefix[:-1] or 'it'}, which is not text")
        key = f"{prefix}{name.lstrip('+')}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            yield key, list(value)
        else:
            yield key, os.fspath(value) if isinstance(value, os.PathLike) else value


def read(given: Mapping[str, Any]) -> Plan:
    """The numbers of a flat config; other keys stay in `Plan.given` alone.

    Raises:
        ConfigError: a value of the wrong type, no model, or batches that cannot be divided.
    """
    values: dict[str, Any] = {}
    for key, known in NUMBERS.items():
        value = given.get(key)
        value = known.default if value is None else value  # null is how YAML leaves a value out
        if value is MISSING:
            raise ConfigError(f"the verl config has no {key}", hint="name a model directory or a hub id")
        try:
            values[known.field] = None if value is None else known.read(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}={value!r} {error}", hint=_hint(known.default)) from error
    return _settle(values, dict(given))


def _hint(default: Any) -> str:
    return "name a model directory or a hub id" if default is MISSING else f"verl's default is {default!r}"


def _settle(values: dict[str, Any], given: dict[str, Any]) -> Plan:
    """Where several keys say one thing, what they come to."""
    if not values.pop("use_kl_loss"):
        values["kl_coef"] = 0.0
    if values.pop("val_sampled") is False:
        values["val_temperature"] = 0.0
    values["max_context"] = values["max_context"] or values["max_prompt_tokens"] + values["max_response_tokens"]
    batch, mini = values["batch_size"], values["mini_batch_size"]
    if mini is None and values["mode"] == "separate_async":
        # There a batch is trained as it comes in, in mini-batches; verl's own number of them is 4.
        parts = given.get("trainer.v1.separate_async.parameter_sync_step", 4 if batch % 4 == 0 else 1)
        mini = batch // parts if isinstance(parts, int) and parts > 0 and batch % parts == 0 else batch
    values["mini_batch_size"] = mini = min(batch, mini or 256)
    if batch <= 0 or mini <= 0 or batch % mini:
        raise ConfigError(
            f"data.train_batch_size={batch} is not a multiple of {ACTOR}.ppo_mini_batch_size={mini}",
            hint="choose both so that a batch is a whole number of mini-batches",
        )
    return Plan(**values, given=given)
