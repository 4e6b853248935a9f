"""The numbers of a verl config under agl's names. The cluster and this machine both train from them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_type_hints

from agl.errors import ConfigError, nearest

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
MODES = ("sync", "colocate_async", "separate_async")

MISSING: Any = object()
UNSET = "???"
"""Hydra's own sign for a value that is not set."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where verl's config has a number of the plan.

    Attributes:
        key: dotted.
        default: verl's own, except where `_combine` computes it.
        read: checks and converts a value; None takes the reader of the field's type. Raises TypeError or ValueError.
    """

    key: str
    default: Any
    read: Callable[[Any], Any] | None = None


# -- readers of one value ---------------------------------------------------------------------------------------------


def integer(value: Any) -> int:
    """`value` if it is a whole number; TypeError otherwise, also for text, truth values and 8.0, as in verl."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("is not a whole number")
    return value


def number(value: Any) -> float:
    """`value` if it is a finite number; TypeError otherwise, also for text and truth values."""
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


def one_of(*names: str) -> Callable[[Any], str]:
    """A reader of a choice among `names`."""

    def read_choice(value: Any) -> str:
        if value not in names:
            raise ValueError(f"is not known; {nearest(str(value), names)}")
        return value

    return read_choice


def _interval(value: Any) -> int | None:
    """-1, 0 and None all mean never in verl."""
    return None if integer(value) <= 0 else int(value)


def _betas(value: Any) -> tuple[float, float]:
    first, second = value
    return number(first), number(second)


def _targets(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(map(text, value))


def _kl_kind(value: Any) -> str:
    kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    # "abs", "full" and the straight-through ones ("k3+") are verl's alone.
    names = (*kinds, "abs", "full")
    name = one_of(*names, *(f"{n}+" for n in names))(value)
    return kinds.get(name, name)


_READERS: Mapping[Any, Callable[[Any], Any]] = {int: integer, float: number, bool: flag, str: text}


# -- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of a verl config, verl's own defaults filled in, each with the key that it is read from.

    Attributes:
        settings: dotted key -> value, as the user wrote them, in verl 0.9's names.
        model: directory or hub id.
        lora_rank: 0 trains all weights.
        lora_alpha, lora_targets: of the adapters.
        adv_estimator: verl's name.
        normalize_std, gamma, lam: its options.
        batch_size: tasks per step.
        group_size: rollouts per task.
        mini_batch_size: tasks per optimiser step.
        update_epochs: passes over a batch.
        max_prompt_tokens, max_response_tokens: limits of one call.
        max_context: limit of a whole conversation; by default the sum of those two.
        seed: fixes the order of tasks; None leaves it to the run.
        epochs, steps: length of the training; steps, where set, take precedence.
        val_every, checkpoint_every: in steps; None for never.
        mode: one of `MODES`.
        device: "cuda", or another one.
        gpus: per node that trains.
        nodes: that train.
        kl_coef: 0 without a KL loss.
        clip_low, clip_high: bounds of the importance ratio.
        temperature: in training.
        val_temperature: in validation, 0 where it is greedy.
        val_do_sample: what the config says of it; None if nothing.
    """

    settings: Mapping[str, Any]
    model: Annotated[str, Source(f"{MODEL}.path", MISSING)]
    lora_rank: Annotated[int, Source(f"{MODEL}.lora_rank", 0)]
    lora_alpha: Annotated[float, Source(f"{MODEL}.lora_alpha", 16)]
    lora_targets: Annotated[str | tuple[str, ...], Source(f"{MODEL}.target_modules", "all-linear", _targets)]
    adv_estimator: Annotated[str, Source("algorithm.adv_estimator", "gae")]
    normalize_std: Annotated[bool, Source("algorithm.norm_adv_by_std_in_grpo", True)]
    gamma: Annotated[float, Source("algorithm.gamma", 1.0)]
    lam: Annotated[float, Source("algorithm.lam", 1.0)]
    batch_size: Annotated[int, Source("data.train_batch_size", 1024)]
    group_size: Annotated[int, Source(f"{ROLLOUT}.n", 1)]
    mini_batch_size: Annotated[int, Source(f"{ACTOR}.ppo_mini_batch_size", None)]
    update_epochs: Annotated[int, Source(f"{ACTOR}.ppo_epochs", 1)]
    max_prompt_tokens: Annotated[int, Source("data.max_prompt_length", 512)]
    max_response_tokens: Annotated[int, Source("data.max_response_length", 512)]
    max_context: Annotated[int, Source(f"{ROLLOUT}.max_model_len", None)]
    seed: Annotated[int | None, Source("data.seed", None, integer)]
    epochs: Annotated[int, Source("trainer.total_epochs", 30)]
    steps: Annotated[int | None, Source("trainer.total_training_steps", None, integer)]
    val_every: Annotated[int | None, Source("trainer.test_freq", -1, _interval)]
    val_before_train: Annotated[bool, Source("trainer.val_before_train", True)]
    checkpoint_every: Annotated[int | None, Source("trainer.save_freq", -1, _interval)]
    mode: Annotated[str, Source("trainer.v1.trainer_mode", "sync", one_of(*MODES))]
    device: Annotated[str, Source("trainer.device", "cuda")]
    gpus: Annotated[int, Source("trainer.n_gpus_per_node", 8)]
    nodes: Annotated[int, Source("trainer.nnodes", 1)]
    learning_rate: Annotated[float, Source(f"{ACTOR}.optim.lr", 1e-6)]
    betas: Annotated[tuple[float, float], Source(f"{ACTOR}.optim.betas", (0.9, 0.999), _betas)]
    weight_decay: Annotated[float, Source(f"{ACTOR}.optim.weight_decay", 0.01)]
    warmup_steps: Annotated[int, Source(f"{ACTOR}.optim.lr_warmup_steps", -1)]
    warmup_ratio: Annotated[float, Source(f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.0)]
    grad_clip: Annotated[float, Source(f"{ACTOR}.optim.clip_grad", 1.0)]
    clip_low: Annotated[float, Source(f"{ACTOR}.clip_ratio_low", 0.2)]
    clip_high: Annotated[float, Source(f"{ACTOR}.clip_ratio_high", 0.2)]
    policy_loss: Annotated[str, Source(f"{ACTOR}.policy_loss.loss_mode", "vanilla")]
    use_kl_loss: Annotated[bool, Source(f"{ACTOR}.use_kl_loss", False)]
    kl_coef: Annotated[float, Source(f"{ACTOR}.kl_loss_coef", 0.001)]
    kl_kind: Annotated[str, Source(f"{ACTOR}.kl_loss_type", "low_var_kl", _kl_kind)]
    entropy_coef: Annotated[float, Source(f"{ACTOR}.entropy_coeff", 0.0)]
    loss_agg: Annotated[str, Source(f"{ACTOR}.loss_agg_mode", "token-mean")]
    temperature: Annotated[float, Source(f"{ROLLOUT}.temperature", 1.0)]
    val_temperature: Annotated[float, Source(f"{ROLLOUT}.val_kwargs.temperature", 0.0)]
    val_do_sample: Annotated[bool | None, Source(f"{ROLLOUT}.val_kwargs.do_sample", None, flag)]

    @property
    def minibatches(self) -> int:
        """Optimiser steps per pass over a batch."""
        return self.batch_size // self.mini_batch_size

    def total_steps(self, n_tasks: int) -> int:
        """Steps in all: verl drops an epoch's incomplete last batch. At least one, for a dataset below one batch."""
        return self.steps or max(1, n_tasks // self.batch_size * self.epochs)


_SOURCES: Mapping[str, Source] = {
    field: replace(source, read=source.read or _READERS[hint.__origin__])
    for field, hint in get_type_hints(Plan, include_extras=True).items()
    for source in getattr(hint, "__metadata__", ())
}
"""Field of `Plan` -> where it is read from."""

NUMBERS: Mapping[str, Source] = {source.key: source for source in _SOURCES.values()}
"""Dotted key -> the source that it is."""


# -- reading ----------------------------------------------------------------------------------------------------------


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of every leaf, in order, without hydra's `+` and `++`.

    Args:
        config: nested, dotted or both, such as `{"data": {"train_batch_size": 8}, "+trainer.nnodes": 1}`; also a whole
            config that hydra composed.

    Raises:
        ConfigError: a key that is not text, or one that occurs twice.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(config):
        config = omegaconf.OmegaConf.to_container(config, resolve=True)
    settings: dict[str, Any] = {}
    for key, value in _leaves(config, ""):
        if value == UNSET:
            continue
        if key in settings:
            raise ConfigError(f"the verl config has {key!r} twice", hint="write it nested or dotted, not both")
        settings[key] = value
    return settings


def read(settings: Mapping[str, Any]) -> Plan:
    """The plan of a flat config; keys that are none of its numbers stay in `Plan.settings` alone.

    Raises:
        ConfigError: a value of the wrong type, no model, or batches that cannot be divided.
    """
    values: dict[str, Any] = {}
    for field, source in _SOURCES.items():
        value = settings.get(source.key)
        value = source.default if value is None else value  # null is how YAML leaves a value out
        if value is MISSING:
            raise ConfigError(f"the verl config has no {source.key}", hint="name a model directory or a hub id")
        try:
            values[field] = value if value is None or source.read is None else source.read(value)
        except (TypeError, ValueError) as error:
            missing = source.default is MISSING
            hint = "name a model directory or a hub id" if missing else f"verl's default is {source.default!r}"
            raise ConfigError(f"{source.key}={value!r} {error}", hint=hint) from error
    return _combine(values, dict(settings))


def _combine(values: dict[str, Any], settings: dict[str, Any]) -> Plan:
    """Make one number of several keys that together determine it."""
    if not values["use_kl_loss"]:
        values["kl_coef"] = 0.0
    if values["val_do_sample"] is False:
        values["val_temperature"] = 0.0
    values["max_context"] = values["max_context"] or values["max_prompt_tokens"] + values["max_response_tokens"]
    batch = values["batch_size"]
    mini = values["mini_batch_size"]
    if mini is None and values["mode"] == "separate_async":
        # There a batch is trained as it comes in, in mini-batches; verl's own number of them is 4.
        parts = settings.get("trainer.v1.separate_async.parameter_sync_step", 4 if batch % 4 == 0 else 1)
        mini = batch // parts if isinstance(parts, int) and parts > 0 and batch % parts == 0 else batch
    values["mini_batch_size"] = mini = min(batch, mini or 256)
    if batch <= 0 or mini <= 0 or batch % mini:
        raise ConfigError(
            f"data.train_batch_size={batch} is not a multiple of {ACTOR}.ppo_mini_batch_size={mini}",
            hint="choose both so that a batch is a whole number of mini-batches",
        )
    return Plan(settings=settings, **values)


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
