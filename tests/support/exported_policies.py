"""Small policies that are exported as GGUF: random models of each family, and tokenizers for each way to cut a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from architectures import make_model
from tiny_engine import VOCABULARY
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agl.trainer.local import gguf_tokenizer
from agl.trainer.local.gguf_tokenizer import QWEN2

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = (
    "It's 1692, isn't it? WE'VE 12345 apples; it'll do.",
    "def f(x):\n\treturn {\"a\": [1, 2.50, -3]}  # 100%\r\n\r\n\n   three   spaces \n",
    "Größe naïve café 你好世界 こんにちは привет ЁЖ مرحبا ٣٤ ½ ² Ⅷ",
    "ÉCOLE éCOLE ÉlanVital ñandúÑ ßẞ ǅ e\u0301a e̊ HTTPServer iPhone McDonald",
    "👋🏽 HTTPServer2024 __init__ --flag=+7 a/b/c {{x}} «quoted» e.g.\u00a0x \u2028 y",
    "  12  34  ", "\n\n", " ", "", "1 2  3   4", "'s 's'S 'Twas they'd've",
    "<tool_call>\n{\"name\": 1}</tool_call><|im_end|>\n",
)  # fmt: skip
"""Texts on which pre-tokenizers differ."""

WRITTEN: dict[str, dict[str, Any]] = {
    "Llama 3.1": {},
    "Llama 2": {}, "Llama 3": {}, "Llama, linear rope": {}, "Llama, YaRN": {}, "Mistral": {}, "Qwen 2.5": {},
    "Qwen 3": {}, "Phi-3": {}, "Phi-3, long rope": {},
    # What llama.cpp has by the number of layers, and not from a file.
    "Gemma 2": {"query_pre_attn_scalar": 8},
    "Gemma 3": {"layer_types": None, "num_hidden_layers": 6, "query_pre_attn_scalar": 8},
    "StarCoder 2": {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}},
}  # fmt: skip
"""Families of `architectures` -> changes of their configuration."""
CUTS: dict[str, Sequence[str | Any]] = {
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True), gguf_tokenizer._GPT2),
    "llama-bpe": (gguf_tokenizer._LLAMA3,),
    "dbrx": (gguf_tokenizer._LLAMA3,),
    "qwen2": (QWEN2,),
}
"""llama.cpp's pre-tokenizer -> what tokenizers have for it."""


def merging_tokenizer(
    cuts: Sequence[str | Any] = (), vocabulary: int = 272, *, whole_words: bool = False
) -> PreTrainedTokenizerFast:
    """Tokens of bytes and frequent pairs, after `<|im_end|>` (id 0) and `<|im_start|>`; the last is `<tool_call>`.

    Args:
        cuts: regular expressions or pre-tokenizers, one applied after another; none for GPT-2's. vocabulary: tokens in
            all.
    """
    steps = [pre_tokenizers.Split(Regex(cut), "isolated") if isinstance(cut, str) else cut for cut in cuts]
    backend = Tokenizer(models.BPE(ignore_merges=whole_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_end|>", "<|im_start|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 2, trainer)
    backend.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = TEMPLATE
    return fast


def policy(directory: Path, name: str = "Llama 3", tokenizer: Any = None, **changes: Any) -> Any:
    """A random model, saved with a tokenizer."""
    model = make_model(name, **WRITTEN.get(name, {}) | changes)
    model.save_pretrained(directory)
    cuts = [QWEN2] if name.startswith("Qwen") else []
    (tokenizer or merging_tokenizer(cuts, VOCABULARY - 2)).save_pretrained(directory)
    return model
