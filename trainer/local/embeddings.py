"""A model's input and output embedding under adapters: which of them an adapter changes, rows of added tokens that are
trained next to it, and what becomes of weights that the two share.

Invariant: what an adapter computes is what is left after it has been merged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional

from agl.errors import ConfigError, ModelLoadError
from agl.trainer.local.config import LoraSpec

ADDED_TOKENS = "agl_added_tokens"
"""Key of config.json: ids of the tokens that a chat template added, whose rows no model has learned."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The input and the output embedding of a model.

    Attributes:
        names: of the two modules.
        tied: they share their weights.
        added: ids of the tokens that a chat template added.
    """

    names: tuple[str, str]
    tied: bool
    added: tuple[int, ...]

    @classmethod
    def of(cls, model: Any) -> Embeddings:
        """Those of a `PreTrainedModel`, its weights on any device, or of what a peft model wraps.

        Raises:
            ModelLoadError: it has no output layer.
        """
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if head is None:
            raise ModelLoadError(f"{type(model).__name__} has no output layer", hint="train a causal language model")
        names = {id(module): name for name, module in model.named_modules()}
        tied = _base_layer(embedding).weight is _base_layer(head).weight
        added = tuple(getattr(model.config, ADDED_TOKENS, None) or ())
        return cls((names[id(embedding)], names[id(head)]), tied, added)

    def targeted(self, lora: LoraSpec) -> tuple[str, ...]:
        """Those that LoRA adapts."""
        if lora.target_modules == "all-linear":  # all but the output layer
            return ()
        config = LoraConfig(target_modules=_targets(lora))
        return tuple(name for name in self.names if check_target_module_exists(config, name))

    def trained_rows(self, lora: LoraSpec) -> dict[str, list[int]] | None:
        """Embedding -> rows to train next to `lora`. LoRA on one trains all of its rows; peft trains the rows of tied
        ones together, or those of the output layer alone."""
        targeted = self.targeted(lora)
        if not self.added or (self.tied and self.names[1] in targeted):
            return None
        return {name: list(self.added) for name in self.names if name not in targeted} or None

    def obstacle(self, loras: Sequence[LoraSpec]) -> str:
        """Why a vLLM cannot serve these adapters on the model; "" if it can."""
        for lora in loras:
            targeted = self.targeted(lora)
            if targeted and self.tied:
                return (
                    f"LoRA on {' and '.join(targeted)}: the model's input and output embedding share their weights, "
                    "and vLLM has no adapters for one of the two"
                )
            changed = targeted or tuple(self.trained_rows(lora) or ())
            if changed and len(loras) > 1:
                return (
                    f"adapters that change {' and '.join(changed)}"
                    f"{'' if targeted else ', where rows of the tokens that chat_template= added are trained'}: "
                    f"vLLM takes all weights of such a policy, and here {len(loras)} share a model"
                )
        return ""


def lora_config(lora: LoraSpec, embeddings: Embeddings) -> LoraConfig:
    """peft's, for a model with these embeddings."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=_targets(lora),
        trainable_token_indices=embeddings.trained_rows(lora),
        task_type="CAUSAL_LM",
    )


def require_adapters(model: Any, loras: Sequence[LoraSpec], *, vllm: bool) -> None:
    """Refuse adapters that one model cannot have together, or that vLLM cannot serve.

    Args:
        model: the base, its weights on any device.
        vllm: whether that is to sample.

    Raises:
        ConfigError: with the modules.
    """
    embeddings = Embeddings.of(model)
    rows = [embeddings.trained_rows(lora) for lora in loras]
    if any(other != rows[0] for other in rows):
        raise ConfigError(
            f"policies on one model whose LoRA target_modules name different ones of {' and '.join(embeddings.names)}, "
            "where each trains the rows of tokens that chat_template= added",
            hint="have all of them name these modules, or none",
        )
    if vllm and (why := embeddings.obstacle(loras)):
        raise ConfigError(
            f"engine='vllm' cannot serve {why}",
            hint="leave engine at 'torch', or train other layers: target_modules='all-linear', and a chat template "
            "whose tokens the model has",
        )


class TokenRows(TrainableTokensLayer):
    """peft's layer, which would copy the whole embedding in each pass, and drop the output layer's bias."""

    ids_K: Tensor
    """The rows, the same of each adapter."""

    def forward_adapters(self, x: Tensor, active_adapters: list[str], *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or not active_adapters:
            return super().forward_adapters(x, active_adapters, *args, **kwargs)
        (adapter,) = active_adapters
        rows_KH = self.trainable_tokens_delta[adapter]
        layer: Any = self.base_layer
        output = layer(x, *args, **kwargs)
        if isinstance(layer, nn.Linear):
            bias_K = None if layer.bias is None else layer.bias[self.ids_K]
            logits_K = functional.linear(x, rows_KH.to(x.dtype), bias_K)
            return output.index_copy(-1, self.ids_K, logits_K.to(output.dtype))
        matches = x[..., None] == self.ids_K
        rows = functional.embedding(matches.int().argmax(-1), rows_KH)
        scale = getattr(layer, "embed_scale", 1.0)  # Gemma's is a tensor
        rows = rows * (scale.to(layer.weight.dtype) if isinstance(scale, Tensor) else scale)
        return torch.where(matches.any(-1, keepdim=True), rows.to(output.dtype), output)


def prepare_rows(model: Any) -> None:
    """Have a peft model compute its trained rows by `TokenRows`."""
    for layer in model.modules():
        if isinstance(layer, TrainableTokensLayer):
            layer.__class__ = TokenRows
            (ids,) = {tuple(ids) for ids in layer.token_indices.values()}
            weight: Any = layer.get_base_layer().weight
            layer.ids_K = torch.tensor(ids, device=weight.device)


def changes_embeddings(model: Any) -> bool:
    """Whether the adapters of a peft model change its embedding or its output layer."""
    base = model.get_base_model()
    return any(_is_adapted(module) for module in (base.get_input_embeddings(), base.get_output_embeddings()))


def untie(model: Any) -> None:
    """Give the output layer of a peft model weights of its own, where an adapter changes it in another way than the
    embedding that it shares them with."""
    base = model.get_base_model()
    embedding = base.get_input_embeddings()
    head = base.get_output_embeddings()
    layer = _base_layer(head)
    if layer.weight is not _base_layer(embedding).weight:
        return
    by_lora = any(isinstance(module, BaseTunerLayer) for module in (embedding, head))
    by_rows = isinstance(head, TrainableTokensWrapper) and head.token_adapter.tied_adapter is None
    if not (by_lora or by_rows):
        return  # not adapted, or rows that are tied, too
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    for config in {id(c): c for c in (base.config, base.config.get_text_config())}.values():
        config.tie_word_embeddings = False


def _is_adapted(module: Any) -> bool:
    return isinstance(module, (BaseTunerLayer, TrainableTokensWrapper))


def _base_layer(module: Any) -> Any:
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter.get_base_layer()
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _targets(lora: LoraSpec) -> str | list[str]:
    targets = lora.target_modules
    if not isinstance(targets, str):
        return list(targets)
    if targets != "all-linear":
        try:
            re.compile(targets)
        except re.error as error:
            raise ConfigError(
                f"LoRA target_modules={targets!r} is no regular expression: {error}", hint="or give a tuple of names"
            ) from error
    return targets
