"""The learner's and the adapter's settings, as plain data: importing them loads no torch.

Invariant: a value that could not be used is refused here, when the settings are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from agl.errors import ConfigError, nearest
from agl.trainer.objectives import KLKind, LossAgg, LossKind, PolicyLossFunction, RolloutIS
from agl.trainer.objectives.reduction import check_scale_factor

Schedule = Literal["constant", "linear"]
Autocast = Literal["bfloat16", "float32"]
Attention = Literal["eager", "sdpa"]
EngineName = Literal["torch", "vllm"]
Quantize = Literal["4bit", "8bit"]
_CHOICES = {
    "schedule": Schedule,
    "kl_kind": KLKind,
    "loss_agg": LossAgg,
    "autocast": Autocast,
    "policy_loss": LossKind,
    "rollout_is": RolloutIS,
}


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The fields of `agl.Optimizer`, which describes them."""

    warmup_steps: int = 0
    schedule: Schedule = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The fields of `agl.Loss` that the learner reads; it describes them."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    max_kl: float | None = 0.5
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    entropy_coef: float = 0.0
    update_epochs: int = 1
    minibatches: int = 1
    rollout_is: RolloutIS | None = None
    rollout_is_threshold: float | tuple[float, float] = 2.0
    gamma: float = 1.0
    lam: float = 1.0
    value_coef: float = 0.5
    value_clip: float | None = 0.5
    value_learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """The fields of `agl.Device` that the learner's passes read; it describes them."""

    max_tokens_per_microbatch: int | None = None
    autocast: Autocast | None = None
    activation_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """The fields of `agl.Device` that the policy process reads; it describes them."""

    device: str = "auto"
    dtype: str = "auto"
    quantize: Quantize | None = None
    engine: EngineName = "torch"
    gpu_memory: float | None = None
    data_parallel: int = 1
    max_context: int | None = None
    threads: int | None = None
    attention: Attention | None = None
    load_timeout: float | None = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig(OptimizerSettings, LossSettings, PassSettings):
    """How to update the policy: an algorithm's settings of optimizer, loss and passes, and these.

    Attributes:
        learning_rate: the peak.
        total_steps: updates after which a "linear" schedule ends at 0; only for that one.
        policy_loss: "vanilla" (PPO's clipped ratio of each token), "gspo", "cispo", "sapo", "vespo", "geo_mean" or a
            function; see `agl.trainer.objectives.losses`. "nll" is supervised fine-tuning: minus the log-prob of each
            trained token at temperature 1, times its advantage; behaviour log-probs and temperatures of the rows are
            not used. "dpo" compares pairs of rollouts by the log-probs of all their trained tokens, at temperature 1,
            with the weights that training began with as reference; its loss is the mean over pairs.
        dual_clip: `clip_c` of `agl.trainer.objectives.losses.policy_loss`; None for none.
        beta: weight of the reference in "dpo".
        critic: train a value head on the policy's last hidden states, and turn each call's return, passed as its
            advantage, into advantages token by token with `gamma` and `lam`; see `agl.trainer.objectives.gae`.
        share_prefixes: compute tokens that several rollouts begin with once (`learner.prefix_trees`), where the model's
            attention can be reproduced: not with sliding windows, soft caps or sinks. Adapter dropout draws once for
            them, too.
        loss_agg: how tokens are averaged; see `agl.trainer.objectives.reduction.token_weights`.
        loss_scale_factor: divisor of "seq-mean-token-sum-norm"; None with any other.
        seed: of the division into mini-batches and of adapter dropout.

    A rollout is never divided between mini-batches. A row that is longer than `max_tokens_per_microbatch` goes alone;
    None is 16384 on cuda and 4096 on a CPU, where larger passes fall out of the caches. `kl_coef=0` keeps no reference
    model. A CPU with bfloat16 instructions is about twice as fast with `autocast="bfloat16"`, at importance ratios that
    are off by half a percent.
    """

    learning_rate: float = 1e-6
    total_steps: int | None = None
    policy_loss: LossKind | PolicyLossFunction = "vanilla"
    dual_clip: float | None = 3.0
    beta: float = 0.1
    critic: bool = False
    share_prefixes: bool = True
    loss_agg: LossAgg = "token-mean"
    loss_scale_factor: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            value = getattr(self, name)
            if name == "policy_loss" and callable(value):
                continue
            if value not in get_args(kind) and not (name in ("autocast", "rollout_is") and value is None):
                raise ConfigError(f"{name}={value!r} is not known", hint=nearest(str(value), get_args(kind)))
        for name in ("update_epochs", "minibatches", "max_tokens_per_microbatch"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        for name in ("learning_rate", "weight_decay", "warmup_steps", "clip_low", "clip_high", "kl_coef", "seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        bounds = self.rollout_is_threshold
        low, high = (bounds, bounds) if isinstance(bounds, (int, float)) else bounds
        _require(0 < low <= high, "rollout_is_threshold", bounds, "above 0, or (lowest, largest); 2 is usual")
        for name in ("gamma", "lam"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")
        _require(self.value_coef > 0, "value_coef", self.value_coef, "above 0")
        _require(self.value_clip is None or self.value_clip > 0, "value_clip", self.value_clip, "above 0, or None")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "in [0, 1)")
        _require(self.clip_low <= 1, "clip_low", self.clip_low, "at most 1, because a ratio is never negative")
        _require(self.grad_clip is None or self.grad_clip > 0, "grad_clip", self.grad_clip, "above 0, or None")
        _require(self.max_kl is None or self.max_kl > 0, "max_kl", self.max_kl, "above 0, or None")
        _require(self.dual_clip is None or self.dual_clip > 1, "dual_clip", self.dual_clip, "above 1, or None")
        if (self.schedule == "linear") != (self.total_steps is not None):
            raise ConfigError(
                f"total_steps={self.total_steps} with schedule={self.schedule!r}",
                hint="give total_steps with schedule='linear', and with no other",
            )
        if self.total_steps is not None:
            _require(self.total_steps > self.warmup_steps, "total_steps", self.total_steps, "above warmup_steps")
        check_scale_factor(self.loss_agg, self.loss_scale_factor)
        _require(self.beta > 0, "beta", self.beta, "above 0; 0.1 is usual")
        if self.policy_loss == "dpo" and (self.kl_coef or self.entropy_coef):
            raise ConfigError(
                f"kl_coef={self.kl_coef} and entropy_coef={self.entropy_coef} with policy_loss='dpo'",
                hint="leave both at 0: beta holds the policy to its reference",
            )
        if self.policy_loss == "vespo" and self.rollout_is is not None:
            raise ConfigError(
                f"rollout_is={self.rollout_is!r} with policy_loss='vespo'",
                hint="leave it out: the weight of 'vespo' is that of the whole ratio to the sampler",
            )
        if self.policy_loss in ("nll", "dpo") and (self.rollout_is is not None or self.critic):
            raise ConfigError(
                f"policy_loss={self.policy_loss!r} with rollout_is={self.rollout_is!r} and critic={self.critic}",
                hint="leave both out: it takes no ratio to a sampler, and learns from no returns",
            )

    def rate(self, update: int) -> float:
        """The learning rate of an update, counted from 0."""
        if update < self.warmup_steps:
            return self.learning_rate * (update + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.learning_rate
        left = max(self.total_steps - update, 0)
        return self.learning_rate * left / (self.total_steps - self.warmup_steps)


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A low-rank adapter to train instead of all weights (arXiv 2106.09685).

    Attributes:
        rank: of the update matrices.
        alpha: their scale is alpha / rank.
        dropout: on the adapter's input while training; the engine samples without it.
        target_modules: names of the linear layers and embeddings that get one, a regular expression of whole names, or
            "all-linear" (all but the output layer). One on the input or output embedding of a model in which these
            share their weights leaves them apart in what is saved.

    Rows of tokens that `chat_template=` added to the model are trained, too.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        _require(self.rank >= 1, "rank", self.rank, "at least 1")
        _require(self.alpha > 0, "alpha", self.alpha, "above 0")
        _require(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy in training, where it differs from the algorithm's settings.

    Attributes:
        model: a Hugging Face directory or hub id.
        lora: train an adapter of this shape.
        lr: peak learning rate.
            None: as the algorithm has it.

    Policies with LoRA on the same model share one base, one engine and one batch; any other has separate weights.
    """

    model: str | None = None
    lora: LoraSpec | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        _require(self.lr is None or self.lr > 0, "lr", self.lr, "above 0")


def require_dtype(name: str) -> None:
    """Raise `ConfigError` for a dtype that weights cannot have."""
    if name not in ("auto", "bfloat16", "float32"):
        raise ConfigError(f"dtype={name!r} is not supported", hint="choose auto, float32 or bfloat16")


def _require(holds: bool, name: str, value: Any, what: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value!r} must be {what}", hint=f"choose another {name}")


def policy_directory(model: str) -> str:
    """The directory of the weights: that of a checkpoint or of a whole run holds it as `policy`."""
    path = Path(model)
    return str(path / "policy") if (path / "policy" / "config.json").is_file() else model
