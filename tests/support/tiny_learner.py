"""A tiny random model and a learner of it."""

from __future__ import annotations

from typing import Any

import torch
from device import DEVICE
from transformers import LlamaConfig, LlamaForCausalLM

from agl.mdp.sequence import TrainingRow
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.learner.learner import Learner

CPU = torch.device("cpu")
VOCABULARY = 24
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
    attn_implementation="eager",
) | ({} if DEVICE == CPU else {"head_dim": 16})  # The smallest that FlexAttention computes.


def tiny_model(seed: int = 0, attention: str = "eager") -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "attn_implementation": attention}, initializer_range=0.3))


def learner(model: Any = None, **config: Any) -> Learner:
    """A learner on the tests' device, which it moves the model to; in float32 on any, unless `autocast` is given."""
    settings = LearnerConfig(**{"learning_rate": 1e-2, "autocast": "float32", **config})
    subject: Any = model or tiny_model()
    return Learner(subject.to(DEVICE), settings, DEVICE)


def gradients(subject: Learner, rows: list[TrainingRow]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradient of one update that leaves the weights alone."""
    metrics = subject.update(rows, lr_scale=0.0)
    return metrics, {n: p.grad.cpu().clone() for n, p in subject._model.named_parameters() if p.grad is not None}
