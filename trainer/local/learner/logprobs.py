"""Log-probs, entropies and values of chosen tokens by one forward pass.

Invariant: the output layer runs only where one of the N wanted tokens is predicted, so the largest matrix is [N, V].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from agl.errors import ModelLoadError
from agl.trainer.local.engine.attention import attention
from agl.trainer.local.learner.microbatches import MicroBatch
from agl.trainer.local.learner.tree_attention import TREE
from agl.trainer.objectives.losses import entropy

CHUNK_ELEMENTS = 1 << 27
"""Float32 logits are computed and dropped in chunks of about this many: half a gigabyte each."""


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """What the model computes for N wanted tokens.

    Attributes:
        logprobs: float32 [N].
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

    Raises:
        ModelLoadError: the model has no output layer.
    """

    def __init__(
        self, model: Any, device: torch.device, autocast: torch.dtype | None, value_head: nn.Module | None = None
    ) -> None:
        # peft's wrapper adds a layer of calls; the adapters are modules inside the base model.
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._head = self.model.get_output_embeddings()
        if self._head is None:
            raise ModelLoadError(
                f"{type(self.model).__name__} has no output layer", hint="train a causal language model"
            )
        self._device = device
        self._autocast = autocast
        self._value_head = value_head
        self.mask_dtype = autocast or next(self.model.parameters()).dtype

    def computing(self, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """The attention that the batch needs. Around its backward pass, too: checkpoints are computed again there."""
        return attention(self.model.config, TREE) if batch.trees else contextlib.nullcontext()

    def __call__(self, batch: MicroBatch, *, with_entropy: bool = False) -> LogProbs:
        """Log-probs of the batch's wanted tokens, each under the distribution that it was drawn from."""
        enabled = self._autocast is not None
        autocast = torch.autocast(self._device.type, dtype=self._autocast) if enabled else contextlib.nullcontext()
        with self.computing(batch), _output_rows(self._head, batch.sources_N) as hidden, autocast:
            logits_NV = self.model(
                input_ids=batch.tokens_BT,
                attention_mask=batch.attention_mask,
                position_ids=batch.positions_BT,
                use_cache=False,
            ).logits[0]
        values_N = None if self._value_head is None else self._value_head(hidden[0].float())[..., 0]
        size = max(1, CHUNK_ELEMENTS // logits_NV.shape[-1])
        chunks = list(
            zip(logits_NV.split(size), batch.targets_N.split(size), batch.temperatures_N.split(size), strict=True)
        )
        if len(chunks) == 1:
            return LogProbs(*_distribution(*chunks[0], with_entropy), values_N)
        parts = [checkpoint(_distribution, *chunk, with_entropy, use_reentrant=False) for chunk in chunks]
        return LogProbs(
            torch.cat([logprobs for logprobs, _ in parts]),
            torch.cat([entropies for _, entropies in parts]) if with_entropy else None,
            values_N,
        )


@contextlib.contextmanager
def _output_rows(head: nn.Module, rows: Tensor) -> Iterator[list[Tensor]]:
    """The output layer sees only `rows` of the flattened hidden states, as [1, N, H]; what the model does to its logits
    afterwards (a scale, a soft cap) still happens. After the forward pass the list holds these states, as [N, H]."""
    hidden: list[Tensor] = []

    def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        hidden.append(args[0].flatten(0, 1).index_select(0, rows))
        return (hidden[-1][None],)

    handle = head.register_forward_pre_hook(select)
    try:
        yield hidden
    finally:
        handle.remove()


def _distribution(
    logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits_NV = logits_NV.float() / temperatures_N[:, None]
    logprobs_N = -functional.cross_entropy(logits_NV, targets_N, reduction="none")
    return logprobs_N, entropy(logits_NV) if with_entropy else None
