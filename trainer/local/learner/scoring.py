"""Log-probs of chosen tokens by one forward pass: what the learner trains on, what the probe compares.

Invariant: the output layer runs only where a wanted token is predicted, so that the largest matrix is [n wanted, V].
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
from agl.trainer.local.learner.packing import MicroBatch
from agl.trainer.objectives.losses import entropy

CHUNK_ELEMENTS = 1 << 27
"""Float32 logits are computed and dropped in chunks of about this many: half a gigabyte each."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Of n wanted tokens.

    Attributes:
        logprobs: float32 [n].
        entropies: float32 [n], of the distributions that they were drawn from; None unless asked for.
        values: float32 [n], of the states before them; None without a value head.
    """

    logprobs: Tensor
    entropies: Tensor | None
    values: Tensor | None = None


class Scorer:
    """A causal language model that gives log-probs. The model is only read.

    Args:
        model: a `PreTrainedModel` or a peft model.
        device: where it is.
        autocast: dtype to compute in; None for the weights' own.
        value_head: hidden state [.., H] -> value [.., 1], if there is one.

    Raises:
        ModelLoadError: the model has no output layer of its own.
    """

    def __init__(
        self, model: Any, device: torch.device, autocast: torch.dtype | None, value_head: nn.Module | None = None
    ) -> None:
        # peft's wrapper adds a layer of calls; the adapters are modules inside the base model.
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._head = self._model.get_output_embeddings()
        if self._head is None:
            raise ModelLoadError(
                f"{type(self._model).__name__} has no output layer", hint="train a causal language model"
            )
        self._device = device
        self._autocast = autocast
        self._value_head = value_head
        self.mask_dtype = autocast or next(self._model.parameters()).dtype

    def score(self, batch: MicroBatch, *, with_entropy: bool = False) -> Scores:
        """Log-probs of the batch's wanted tokens, each under the distribution that it was drawn from."""
        with _output_rows(self._head, batch.sources) as hidden, self._computing():
            logits = self._model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids,
                use_cache=False,
            ).logits[0]
        values = None if self._value_head is None else self._value_head(hidden[0].float())[..., 0]
        size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
        parts = list(zip(logits.split(size), batch.targets.split(size), batch.temperatures.split(size), strict=True))
        if len(parts) == 1:
            return Scores(*_distribution(*parts[0], with_entropy), values)
        scored = [checkpoint(_distribution, *part, with_entropy, use_reentrant=False) for part in parts]
        return Scores(
            torch.cat([logprobs for logprobs, _ in scored]),
            torch.cat([entropies for _, entropies in scored]) if with_entropy else None,
            values,
        )

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)


@contextlib.contextmanager
def _output_rows(head: nn.Module, rows: Tensor) -> Iterator[list[Tensor]]:
    """The output layer sees only `rows` of the flattened hidden states, as [1, n, H]; what the model does to its logits
    afterwards (a scale, a soft cap) still happens. What it saw is in the list afterwards, as [n, H]."""
    seen: list[Tensor] = []

    def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(args[0].flatten(0, 1).index_select(0, rows))
        return (seen[-1][None],)

    handle = head.register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        handle.remove()


def _distribution(
    logits: Tensor, targets: Tensor, temperatures: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = logits.float() / temperatures[:, None]
    logprobs = -functional.cross_entropy(logits, targets, reduction="none")
    return logprobs, entropy(logits) if with_entropy else None
