"""What a model's directory says about its tokens, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agl.trainer.rendering.rendering import Rendering

_CHECK_TEXT = "One fixed sentence tells whether the servers have the weights that were just trained: 0123456789."
"""Text of the weight check; its tokens are compared after every update."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What a model's directory says about its tokens, without its weights.

    Attributes:
        tokenizer: as loaded.
        rendering: messages to tokens and back.
        stop_token_ids: end an answer, in addition to the rendering's own.
        check_ids: tokens of the weight check.
        vocabulary: how many ids the model knows; None if it does not say.
    """

    tokenizer: Any
    rendering: Rendering
    stop_token_ids: tuple[int, ...]
    check_ids: list[int]
    vocabulary: int | None


def tokens_of(model: str) -> Tokens:
    """Load them.

    Args:
        model: directory or hub id.
    """
    from transformers import AutoConfig

    from agl.trainer.local.tokenizer import load_tokenizer, stop_token_ids

    tokenizer = load_tokenizer(model)
    vocabulary = getattr(AutoConfig.from_pretrained(model).get_text_config(), "vocab_size", None)
    return Tokens(
        tokenizer,
        Rendering(tokenizer),
        stop_token_ids(model, tokenizer),
        list(tokenizer.encode(_CHECK_TEXT)),
        vocabulary,
    )
