"""Loads a critic with the attention that its config asks for, where verl's own loader wants flash attention (CUDA)."""

from __future__ import annotations

import torch
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from verl.utils import model as verl_model


def load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """A model with one output per token, with a new head unless the checkpoint has one. Parameters as verl's loader."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def install() -> None:
    """Replace verl's loader, in this process."""
    verl_model.load_valuehead_model = load_value_model
