"""Log-probs, entropies and values of chosen tokens by one forward pass.

Invariant: the output layer runs only where one of the N wanted tokens is predicted, in chunks that are dropped before
the next one: no tensor of [N, V] is made where N * V is above `CHUNK_ELEMENTS`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agl.errors import ConfigError
from agl.trainer.local.architecture import backbone
from agl.trainer.local.attention import attention
from agl.trainer.local.grammar import hidden
from agl.trainer.local.learner.microbatches import MicroBatch
from agl.trainer.local.learner.tree_attention import TREE
from agl.trainer.objectives.losses import entropy

CHUNK_ELEMENTS = 1 << 27
"""Logits are computed and dropped in chunks of at most this many: half a gigabyte each in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """What the model computes for N wanted tokens.

    Attributes:
        logprobs: float32 [N]; float64 of a model in float64, entropies, too.
        entropies: float32 [N], of the distributions that they were drawn from; None unless requested.
        values: float32 [N], the value head's, of the states before the tokens; None without a value head.
    """

    logprobs: Tensor
    entropies: Tensor | None
    values: Tensor | None = None


class LogProbModel:
    """A causal language model that computes log-probs. The model is only read.

    Args:
        model: a `PreTrainedModel` or a peft model.
        device: where it is.
        autocast: dtype to compute in; None for the weights' own.
        value_head: hidden state [.., H] -> value [.., 1], if there is one.
        activation_checkpointing: keep only each layer's input for the backward pass, which computes the layer again.

    Raises:
        ModelLoadError: the model has no output layer.
        ConfigError: activation checkpointing of a model whose layers transformers does not mark.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        autocast: torch.dtype | None,
        value_head: nn.Module | None = None,
        *,
        activation_checkpointing: bool = False,
    ) -> None:
        # peft's wrapper adds a layer of calls; the adapters are modules inside the base model.
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._backbone = backbone(self.model)
        self._head = self.model.get_output_embeddings()
        self._device = device
        self._autocast = autocast
        self._value_head = value_head
        self._checkpointed: list[nn.Module] = []
        if activation_checkpointing:
            self._checkpointed = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
            if not self._checkpointed:
                raise ConfigError(
                    f"activation_checkpointing, but transformers marks no layers of {type(self.model).__name__}",
                    hint="train it without, with a smaller max_tokens_per_microbatch",
                )
        self.mask_dtype = autocast or next(self.model.parameters()).dtype

    def computing(self, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """The attention that the batch needs. Around its backward pass, too: checkpoints are computed again there."""
        return attention(self.model.config, TREE) if batch.trees else contextlib.nullcontext()

    def __call__(self, batch: MicroBatch, *, with_entropy: bool = False) -> LogProbs:
        """Log-probs of the batch's wanted tokens, each under the distribution that it was drawn from."""
        seen: dict[str, Any] = {}

        def no_states(_module: nn.Module, _args: Any, output: Any) -> None:
            seen["output"] = type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:1, :0].detach()})

        def select(states_BTH: Tensor) -> Tensor:
            if (kept := getattr(batch.attention_mask, "kept", None)) is not None:
                (states_BTH,) = kept(self._head, states_BTH)
            seen["states"] = states_BTH.flatten(0, 1).index_select(0, batch.sources_N)
            return states_BTH[:1, :0]

        keeping = self._backbone.register_forward_hook(no_states)
        try:
            with (
                self.computing(batch),
                self._autocasting(),
                _head_input(self._head, select),
                _checkpointed_layers(self._checkpointed),
            ):
                self.model(
                    input_ids=batch.tokens_BT,
                    attention_mask=batch.attention_mask,
                    position_ids=batch.positions_BT,
                    use_cache=False,
                )
        finally:
            keeping.remove()
        hidden_NH = seen["states"]
        values_N = None if self._value_head is None else self._value_head(hidden_NH.float())[..., 0]
        distribution = functools.partial(self._distribution, seen["output"], with_entropy)
        size = max(1, CHUNK_ELEMENTS // self._head.weight.shape[0])
        inputs = [hidden_NH, batch.targets_N, batch.temperatures_N, batch.bits_NW]
        parts = [itertools.repeat(None) if x is None else x.split(size) for x in inputs]
        chunks = list(zip(*parts, strict=False))
        if len(chunks) == 1:
            return LogProbs(*distribution(*chunks[0]), values_N)
        parts = [checkpoint(distribution, *chunk, use_reentrant=False) for chunk in chunks]
        return LogProbs(
            torch.cat([logprobs for logprobs, _ in parts]),
            torch.cat([entropies for _, entropies in parts]) if with_entropy else None,
            values_N,
        )

    def _distribution(
        self,
        backbone_output: Any,
        with_entropy: bool,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor,
        bits_NW: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies [N] of the tokens after these hidden states; in float32, or the model's float64."""
        logits_NV = self._logits(backbone_output, hidden_NH)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperatures_N[:, None]
        if bits_NW is not None:
            logits_NV.masked_fill_(hidden(bits_NW, logits_NV.shape[1]), torch.finfo(logits_NV.dtype).min)
        logprobs_N = -functional.cross_entropy(logits_NV, targets_N, reduction="none")
        return logprobs_N, entropy(logits_NV) if with_entropy else None

    def _logits(self, backbone_output: Any, hidden_NH: Tensor) -> Tensor:
        """[N, V]: the output layer, and what the model does to its logits afterwards (a scale, a soft cap).

        The model itself computes them, around a backbone that computes nothing and returns `backbone_output`.
        """
        self._backbone.forward = lambda *_, **__: backbone_output
        try:
            with self._autocasting(), _head_input(self._head, lambda _: hidden_NH[None]):
                return self.model(input_ids=hidden_NH.new_zeros(1, 0, dtype=torch.long), use_cache=False).logits[0]
        finally:
            del self._backbone.forward

    def _autocasting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device.type, self._autocast) if self._autocast else contextlib.nullcontext()


@contextlib.contextmanager
def _head_input(head: nn.Module, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The output layer is applied to what `replace` makes of its input [B, T, H]."""
    handle = head.register_forward_pre_hook(lambda _, args: (replace(args[0]),))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _checkpointed_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Where gradients are computed, the layers keep only their inputs.

    transformers' own switch works in training mode alone, and with it come a model's dropouts.
    """
    layers = layers if torch.is_grad_enabled() else ()
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
