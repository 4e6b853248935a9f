"""The tokenizer of the quickstart's policy, trained from scratch; needs no torch."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from agl.trainer.quickstart.demos import MIXED, demonstrate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that stay in decoded text, as in Qwen's tokenizers."""

WORDS = r" [-+*/] |[-+*/]|[0-9]| ?[A-Za-z]+|[^A-Za-z0-9*/+-]+"
"""Each digit is a separate token, so that numbers are copied digit by digit."""
NAMES = r" [-+*/] |[-+*/]|[0-9]| ?[a-z]+|[A-Z][a-z]*|[^A-Za-z0-9*/+-]+"
"""The same, and what begins with a capital is the same token behind a space and without one."""

MAX_CONTEXT = 2048


def build_tokenizer(
    corpus: Iterable[str] | None = None, vocabulary: int = 512, words: str = WORDS
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the chat template next to this module.

    Args:
        corpus: texts to train it on; None for the quickstart's demonstrations.
        vocabulary: tokens at most, the special ones aside; 256 of them are the bytes.
        words: a regular expression of what no token is larger than.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    single = re.compile("|".join(re.escape(text) for text in SPECIAL_TOKENS + MARKERS))
    rng = random.Random(0)
    corpus = corpus or (turn.prompt + turn.answer for _ in range(400) for turn in demonstrate(rng, MIXED))
    pieces = [piece for text in corpus for piece in single.split(text)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        pieces, trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=MAX_CONTEXT,
    )
    tokenizer.chat_template = Path(__file__).with_name("template.jinja").read_text(encoding="utf-8")
    return tokenizer
