"""How much memory training takes, by formula: what stays between updates, and what an update adds at its peak.

Invariant: the formula reads shapes alone, so a model on torch's "meta" device answers for one that fits nowhere yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.learner.logprobs import CHUNK_ELEMENTS

FLOAT32, BFLOAT16 = 4, 2
LOGITS_KEPT = 3
"""Float32 matrices of a chunk of logits that exist at once: divided by temperature, log-softmax, and its gradient."""


def training_bytes(*models: Any) -> int:
    """Bytes of the weights and, for those in training, of their float32 gradient and AdamW's two moments."""
    weights = {id(p): p for model in models for p in model.parameters()}
    return sum(p.nbytes + (3 * FLOAT32 * p.numel() if p.requires_grad else 0) for p in weights.values())


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes at the peak of an update.

    Attributes:
        resident: weights, gradient and AdamW's moments (`training_bytes`).
        weight_copies: bfloat16 copies of the linear layers' weights under autocast, which the backward pass reads.
        activations: what the layers keep of one forward pass for its backward pass.
        logits: a chunk of logits with its gradient, and the gradient of the output layer's weights before it is added
            to what earlier passes gave.
    """

    resident: int
    weight_copies: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.resident + self.weight_copies + self.activations + self.logits


def update_memory(
    model: Any, config: LearnerConfig, tokens: int, *, row_tokens: int, trained: int, autocast: bool
) -> UpdateMemory:
    """What an update of all weights needs, for layers of RMSNorm, grouped attention and a gated MLP (Llama, Qwen).

    With H hidden, I intermediate, Q = heads x head size and K = key heads x head size, such a layer of transformers
    keeps for each token, in elements: 6 H + 2 Q + 2 K + 4 I in float32; under autocast 4 H in float32 and
    5 H + 2 Q + 2 K + 4 I in bfloat16, as each linear layer casts its input for itself. Eager attention, where rows
    share no prefixes, keeps keys and values repeated for each head (4 Q in place of 2 Q + 2 K) and the scores: heads x
    row tokens in float32, and in bfloat16 once more; the masks of branching rows are not counted. With activation
    checkpointing, H in float32 for each layer, and one whole layer.

    Args:
        model: a `PreTrainedModel` of float32 weights, on any device.
        config: `activation_checkpointing` and `share_prefixes` are read.
        tokens: of one forward pass, each shared one counted once, or padding included: `max_tokens_per_microbatch`.
        row_tokens: of its longest row.
        trained: tokens of the pass whose log-prob is wanted.
        autocast: whether it computes in bfloat16.
    """
    shape = model.config.get_text_config()
    heads, layers, hidden, inner = (
        shape.num_attention_heads, shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
    )  # fmt: skip
    size = getattr(shape, "head_dim", None) or hidden // heads
    queries, keys = heads * size, shape.num_key_value_heads * size
    eager = shape._attn_implementation == "eager" and not config.share_prefixes
    width = BFLOAT16 if autocast else FLOAT32

    attended = 4 * queries if eager else 2 * queries + 2 * keys
    layer = FLOAT32 * 4 * hidden + width * ((5 if autocast else 2) * hidden + attended + 4 * inner)
    if eager:
        layer += heads * row_tokens * (FLOAT32 + (BFLOAT16 if autocast else 0))
    if hasattr(next(m for n, m in model.named_modules() if n.endswith("self_attn")), "q_norm"):
        layer += (queries + keys) * (FLOAT32 + width)
    activations = tokens * (layers * FLOAT32 * hidden + layer if config.activation_checkpointing else layers * layer)

    linear = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    head = model.get_output_embeddings().weight
    wanted = trained * head.shape[0]
    gradients = 2 if wanted > CHUNK_ELEMENTS else 1  # those of two chunks, to be added up
    copied = linear // layers if config.activation_checkpointing else linear
    return UpdateMemory(
        resident=training_bytes(model),
        weight_copies=BFLOAT16 * copied if autocast else 0,
        activations=activations,
        logits=FLOAT32 * (LOGITS_KEPT * min(wanted, CHUNK_ELEMENTS) + gradients * head.numel()),
    )
