"""What a model's class and configuration say of it before any weight is loaded: whether it can be sampled and trained
at all, and how long a conversation may be for engine and learner to compute the same.

Invariant: a row's log-probs depend on that row alone; a model, or a length, of which that does not hold is refused
here, with the reason.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agl.errors import ModelLoadError
from agl.trainer.local.config import Attention

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION_KINDS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local"}
)
"""Kinds of layers that keep keys and values of each token, and nothing else."""
CHOOSE = "choose a model that has only attention layers (Llama, Qwen, Mistral, Gemma, Phi, OLMo, ...)"


@dataclass(frozen=True, slots=True)
class Context:
    """How long prompt and answer may be together.

    Attributes:
        tokens: at most.
        positions: that the model was made for.
        why: what allows fewer tokens than positions; "" if
            nothing does.
    """

    tokens: int
    positions: int
    why: str = ""

    def __str__(self) -> str:
        if not self.why:
            return f"{self.tokens:,} tokens"
        return f"{self.tokens:,} tokens of {self.positions:,}: {self.why}"


def model_class(config: Any, name: str) -> Any:
    """transformers' class of the causal language model with this configuration.

    Args:
        config: a `PreTrainedConfig`.
        name: directory or hub id, for the error.

    Raises:
        ModelLoadError: there is none, or it cannot be sampled and trained exactly.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"a {config.model_type} model is no causal language model that transformers knows",
            hint="give a model that writes text from left to right (Llama, Qwen, Mistral, ...)",
            path=name,
        )
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if (fault := _fault(found, config.get_text_config())) is not None:
        raise ModelLoadError(f"{found.__name__} {fault}", hint=CHOOSE, path=name)
    return found


def _fault(model: Any, config: Any) -> str | None:
    """Why models of this class and configuration are refused."""
    if getattr(model, "_is_stateful", False):
        return "carries a recurrent state, and calls that share a prefix cannot be merged on it"
    if others := sorted({*_layer_kinds(config)} - ATTENTION_KINDS):
        kinds = ", ".join(others)
        return f"has {kinds} layers, which keep a state of the whole row, so calls that share a prefix cannot be merged"
    if "local" in _layer_kinds(config):
        return (
            "looks back so many columns, whatever their positions, so calls that share a prefix cannot be merged on it"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no positions, so calls that share a prefix cannot be merged on it"
    rope, nope, value = (getattr(config, f"{part}_head_dim", None) for part in ("qk_rope", "qk_nope", "v"))
    if rope and nope and value and rope + nope != value:
        return f"keeps keys of {rope + nope} numbers and values of {value}, and the engine's cache holds equal ones"
    sliding, full = (getattr(config, name, None) for name in ("head_dim", "global_head_dim"))
    if sliding and full and sliding != full:
        return f"keeps keys of {sliding} and of {full} numbers in its layers, and the engine's cache holds equal ones"
    if getattr(config, "alibi", False):
        return "weighs tokens by how many columns they are apart (ALiBi), so calls that share a prefix cannot be merged"
    return None


def _layer_kinds(config: Any) -> Iterator[str]:
    """The kinds of a model's layers, under the names that configurations give the list."""
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        yield from getattr(config, name, None) or ()


def exact_context(config: Any, name: str = "") -> Context:
    """The longest row on which engine and learner compute the same, whatever is beside it.

    Args:
        config: a `PreTrainedConfig`.
        name: directory or hub id, for the error.

    Raises:
        ModelLoadError: the configuration does not say how many positions the model has.
    """
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        raise ModelLoadError(
            "the configuration gives no max_position_embeddings",
            hint="add the longest context that the model was made for to config.json",
            path=name,
        )
    borders = [*_rope_borders(config), *_chunks(config)]
    tokens, why = min(borders, default=(positions, ""))
    return Context(tokens, positions, why) if tokens < positions else Context(positions, positions)


def _rope_borders(config: Any) -> Iterator[tuple[int, str]]:
    """Lengths beyond which every token of a row turns by other angles: transformers takes the table by the longest row
    of a batch, and keys in the engine's cache would be of the wrong one. (Dynamic NTK's is the last position.)"""
    parameters = getattr(config, "rope_parameters", None) or {}
    for one in [parameters] if "rope_type" in parameters else parameters.values():
        if isinstance(one, Mapping) and one.get("rope_type") == "longrope":
            border = one.get("original_max_position_embeddings") or config.original_max_position_embeddings
            yield int(border), "in a longer conversation long rope would turn all earlier tokens by other angles"


def _chunks(config: Any) -> Iterator[tuple[int, str]]:
    """Lengths beyond which a token sees only those of its own piece of the row."""
    size = getattr(config, "attention_chunk_size", None)
    if size and "chunked_attention" in _layer_kinds(config):
        yield int(size), "its chunked attention ends there (attention_chunk_size)"


@dataclass(frozen=True, slots=True)
class Window:
    """A window that slides over the conversation.

    Attributes:
        size: how many tokens a token sees, itself included.
        everywhere: in all layers; else in those of the kind
            "sliding_attention".
    """

    size: int
    everywhere: bool

    def masks(self, seen: Tensor, distances: Tensor, hidden: float) -> Tensor | dict[str, Tensor]:
        """What the model takes as its attention mask.

        Args:
            seen: additive, [B, 1, q, columns], without the window.
            distances: by how many positions a query is after a
                key, of the same shape. hidden: what hides a key.
        """
        sliding = seen.masked_fill(distances >= self.size, hidden)
        return sliding if self.everywhere else {"full_attention": seen, "sliding_attention": sliding}


def sliding_window(config: Any, context: int = sys.maxsize) -> Window | None:
    """The window of a model with this configuration; None if it has none, or none that slides.

    Args:
        context: tokens of the longest row.
    """
    config = config.get_text_config()
    size = getattr(config, "sliding_window", None)
    kinds = {*_layer_kinds(config)}
    if not size or size >= context or (kinds and "sliding_attention" not in kinds):
        return None
    return Window(int(size), everywhere=not kinds)


def backbone(model: Any) -> Any:
    """The module that gives a model its last hidden states, which the model itself calls.

    Args:
        model: a `PreTrainedModel`, on any device.

    Raises:
        ModelLoadError: it has none, or no output layer after it.
    """
    found = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if found is None or model.get_output_embeddings() is None:
        raise ModelLoadError(
            f"{type(model).__name__} has no output layer on a backbone", hint="train a causal language model"
        )
    # OPT calls its base model's decoder, not its base model.
    return getattr(found, "decoder", found)


def default_attention(model: Any, device: str) -> Attention:
    """The attention that the learner computes with where rows share no prefixes: "eager", or "sdpa" on a GPU.

    Args:
        model: of `model_class`.
        device: its type, such as "cpu".
    """
    return "sdpa" if device != "cpu" and getattr(model, "_supports_sdpa", False) else "eager"
