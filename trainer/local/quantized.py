"""The frozen base of LoRA policies in few bits, by bitsandbytes: NF4 with double quantisation (QLoRA, arXiv 2305.14314)
or int8.

Invariant: only weights are rounded, and a row's output depends on that row alone, so engine and learner compute the
same policy.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from torch import Tensor
from torch.nn import functional

from agl.trainer.local.config import Quantize


def loading_options(quantize: Quantize, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs to round each linear layer as it is read, but the output layer.

    Args:
        dtype: to compute in.
        device: where the model will be.
    """
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=quantize == "4bit",
        load_in_8bit=quantize == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def make_exact(model: Any) -> None:
    """Replace what bitsandbytes computes in another way while sampling, or in a batch, than in an update."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # On CPUs with bfloat16 instructions it would repack the weights at the first pass without gradients, and
            # pass no gradient on from then on.
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, Linear8bitLt):
            module.__class__ = _Int8Linear


class _Int8Linear(Linear8bitLt):
    """Without LLM.int8()'s rounding of activations, which depends on the other rows of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return _Int8Product.apply(x, self.weight.data, self.weight.SCB, self.bias)  # type: ignore[return-value]


class _Int8Product(torch.autograd.Function):
    """A linear layer whose weights are made wide for each product and not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scales)
        return functional.linear(x, _wide(weight, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, scales = ctx.saved_tensors
        return grad @ _wide(weight, scales, grad.dtype), None, None, None


def _wide(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).mul_((scales / 127)[:, None])
