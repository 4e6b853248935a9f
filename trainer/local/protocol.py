"""What a policy is made of, what was loaded for it, and the events of its engine.

Invariant: importing this module loads no torch, so the parent never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from agl.errors import AglError, ConfigError, nearest
from agl.extras import require
from agl.trainer.engines.base import Completion
from agl.trainer.local.config import LearnerConfig, LoraSpec, ProcessSettings, Quantize


@dataclass(frozen=True, slots=True)
class PolicySpec(ProcessSettings):
    """A policy to load, serve and train, in a process with these settings.

    Attributes:
        model: a local Hugging Face directory or a hub id.
        name: the policy's name.
        lora: train an adapter instead of all weights.
        seed: of the adapter's start.
        learner: how to train.
        max_batch: at most this many answers are sampled at once.
        max_staleness: above 0, answers are sampled from a copy of the weights, also while these are trained;
            `LocalPolicy.publish` renews the copy.
        trained: False for one that only answers, or scores.
        usual_rate: whether the learning rate is the usual one (`agl.trainer.local.rates`) instead of the learner's.

    Raises:
        ConfigError: `quantize` or `data_parallel` cannot be honoured.
    """

    model: str
    name: str = "policy"
    lora: LoraSpec | None = None
    seed: int = 0
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    max_batch: int = 64
    max_staleness: int = 0
    trained: bool = True
    usual_rate: bool = False

    def __post_init__(self) -> None:
        if self.data_parallel < 1:
            raise ConfigError(f"data_parallel={self.data_parallel}", hint="a number of processes, 1 or more")
        if self.data_parallel > 1 and (self.engine == "vllm" or self.device not in ("auto", "cuda", "cpu")):
            raise ConfigError(
                f"data_parallel={self.data_parallel} with engine={self.engine!r}, device={self.device!r}",
                hint="it takes the first GPUs of this machine and engine='torch'; agl.VERL trains on many with vLLM",
            )
        if self.quantize is None:
            return
        what = f"quantize={self.quantize!r}"
        if self.quantize not in get_args(Quantize):
            raise ConfigError(f"{what} is not known", hint=nearest(str(self.quantize), get_args(Quantize)))
        if self.lora is None:
            raise ConfigError(
                f"{what} without lora: rounded weights cannot be trained",
                hint="train an adapter on them, lora=agl.LoraSpec(rank=16), or leave quantize out",
            )
        if self.engine == "vllm":
            raise ConfigError(
                f"{what} with engine='vllm', which would not sample from the weights that the learner trains on",
                hint="leave engine out: the learner's own process samples from the weights that it trains on",
            )
        if self.device.startswith("mps"):
            raise ConfigError(f"{what} with device={self.device!r}", hint="use device='cuda' or 'cpu', or no quantize")
        require(what, "quantize")

    @property
    def base(self) -> tuple[object, ...]:
        """What policies must have in common to be adapters on one base model, in one process."""
        return (
            self.model,
            self.device,
            self.dtype,
            self.quantize,
            self.attention,
            self.max_context,
            self.threads,
            self.max_batch,
            self.max_staleness,
            self.data_parallel,
        )


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """What was loaded for a policy.

    Attributes:
        parameters: of the base model and the policy's own adapter.
        trainable_parameters: those of the policy.
        learning_rate: the peak.
        vocab_size: rows of the model's output.
        max_context: longest prompt + answer, in tokens.
        shortened: why that is less than the model's positions or what
            was asked for; "" if it is not.
        stop_token_ids: tokens that end an answer, as the model and its tokenizer declare them.
        changes_embeddings: its adapter changes the embedding or the output layer, so that `export_weights` writes all
            weights.
    """

    parameters: int
    trainable_parameters: int
    learning_rate: float
    device: str
    dtype: str
    max_context: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    shortened: str = ""
    changes_embeddings: bool = False


# -- engine events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a streaming request, as they come; `top` as in `Completion.top_logprobs`."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float]
    top: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's answer."""

    request_id: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ended with an error."""

    request_id: int
    error: AglError


EngineEvent = Tokens | Finished | Failed
