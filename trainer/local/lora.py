"""The adapters on one base model: which of them each row of a forward pass goes through.

Invariant: outside of `mixed`, the whole model is one policy's: the one that `use` was last called with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Adapters:
    """A peft model's adapters by policy.

    Args:
        model: a peft model.
        names: policy -> its adapter in the model; one that trains no adapter is not in it.
    """

    def __init__(self, model: Any, names: Mapping[str, str]) -> None:
        from peft.tuners.lora import LoraLayer
        from peft.utils import TrainableTokensWrapper

        self._model = model
        self._names = dict(names)
        self._used: str | None = None
        self._rows: list[str] | None = None
        if len(self._names) > 1:
            for module in model.modules():
                if isinstance(module, (LoraLayer, TrainableTokensWrapper)):
                    module.register_forward_pre_hook(self._with_rows, with_kwargs=True)  # type: ignore[attr-defined]

    def use(self, policy: str) -> None:
        """Make the whole model this policy's, and only its weights trainable."""
        if policy != self._used:
            self._model.set_adapter(self._names[policy])
            self._used = policy

    @contextlib.contextmanager
    def mixed(self, policies: Sequence[str]) -> Iterator[None]:
        """Forward passes inside have one row for each entry, which goes through that policy's adapter."""
        if len(set(policies)) == 1:
            self.use(policies[0])
            yield
            return
        self._rows = [self._names[p] for p in policies]
        try:
            yield
        finally:
            self._rows = None

    def _with_rows(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return None if self._rows is None else (args, kwargs | {"adapter_names": self._rows})


def adapter_weights(model: Any) -> set[int]:
    """The `id` of each weight of a peft model's adapters, also of those that are frozen for now."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    parts = [getattr(layer, name) for layer in layers for name in layer.adapter_layer_names if hasattr(layer, name)]
    return {id(weight) for part in parts for weight in part.parameters()}
