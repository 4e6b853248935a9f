"""An extension of vLLM's workers with which a CPU build can load new weights repeatedly."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils as layers  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.utils import WeightsMapper  # pyright: ignore[reportMissingImports]


def _plain_linear(layer: Any, remove_weight: bool = False) -> None:
    """Multiply by the weight itself: vLLM would pack it and drop the original, and then nothing could reload it."""
    layer.cpu_linear = torch.nn.functional.linear


layers.dispatch_cpu_unquantized_gemm = _plain_linear

if not hasattr(WeightsMapper, "get_unstacked_mapper"):  # what verl 0.9 calls it for LoRA; vLLM 0.30 has renamed it
    WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's own extension, under a name that makes vLLM import this module in its worker."""
