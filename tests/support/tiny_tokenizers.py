"""Byte-level tokenizers of a few hundred tokens, with the control tokens and chat templates that tests need."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from agl.trainer.local.prepared import TEMPLATES as AGL_TEMPLATES

TEMPLATES = Path(__file__).parent / "templates"

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]",
)  # fmt: skip
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

TEMPLATE_TOKENS = {
    "chatml": (CHATML, "<|im_end|>"),
    "qwen25": ((*CHATML, "<tool_call>", "</tool_call>"), "<|im_end|>"),
    "qwen3": ((*CHATML, *TAGS), "<|im_end|>"),
    "qwen35": ((*CHATML, *TAGS), "<|im_end|>"),
    "llama31": (LLAMA, "<|eot_id|>"),
    "mistral_v3": (MISTRAL, "</s>"),
    "mistral_tekken": (MISTRAL, "</s>"),
    "role_closed": (("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), "<|endoftext|>"),
    "agl_hermes": (CHATML, "<|im_end|>"),
    "agl_qwen3": ((*CHATML, *TAGS), "<|im_end|>"),
    "agl_llama3": (LLAMA, "<|eot_id|>"),
    "agl_mistral": (MISTRAL, "</s>"),
}
"""Template -> its control tokens and the tokenizer's end token. Those with "agl_" agl gives to models."""

_CORPUS = ["the user and the assistant call a tool with arguments and the tool answers: 12 + 34 = 46 \n\n" * 4]


def tiny_tokenizer(specials: Sequence[str], eos: str, template: str | None = None) -> Any:
    """A byte-level BPE tokenizer with `specials` as single tokens, `TAGS` among them as plain ones."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    bpe.add_tokens([AddedToken(t, special=t not in TAGS, normalized=False) for t in specials])
    bos = next((t for t in specials if t in ("<s>", "<|begin_of_text|>")), None)
    pad = next((t for t in specials if t == "<|endoftext|>"), None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, bos_token=bos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


@cache
def template_tokenizer(name: str) -> Any:
    """The tokenizer of one of `templates/`."""
    specials, eos = TEMPLATE_TOKENS[name]
    ours = name.removeprefix("agl_")
    file = TEMPLATES / f"{name}.jinja" if ours == name else AGL_TEMPLATES / f"{ours}.jinja"
    return tiny_tokenizer(specials, eos, file.read_text())


def sentencepiece_tokenizer(style: str, template: str, specials: Sequence[str] = ()) -> Any:
    """A tokenizer like SentencePiece's, with bytes for what it has no token for.

    Args:
        style: where it puts a space: "legacy" before every text and behind every control token, "first" before a text.
        specials: control tokens in addition to `<s>` and `</s>`.
    """
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *alphabet], show_progress=False)
    bpe.train_from_iterator(['The answer is the sum . The user lookup {"name ": Done'] * 4, trainer)
    if style == "legacy":
        bpe.pre_tokenizer = None
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    space = decoders.Replace("\u2581", " ")
    bpe.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    bpe.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", *specials)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


_MARK = re.compile(r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|</?[a-z_]+>|<[a-z_]+\||<\|[a-z_]+>|\[/?[A-Z_]+\]")
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
)


def published_templates() -> dict[str, Path]:
    """The chat templates of well-known models, which TRL has copies of; none without TRL."""
    found = importlib.util.find_spec("trl")
    directory = Path(found.origin).parent / "chat_templates" if found and found.origin else None
    files = sorted(directory.glob("*.jinja")) if directory else []
    return {f"trl_{file.stem}": file for file in files if not file.stem.endswith("_training")}


@cache
def published_tokenizer(name: str) -> Any:
    """A tokenizer with one of the `published_templates`, and with every mark in it as a control token."""
    source = published_templates()[name].read_text()
    marks = dict.fromkeys(_MARK.findall(source))
    end = next((mark for mark in _ENDS if mark in marks), "</s>")
    begin = ("<s>",) if "bos_token" in source else ()
    return tiny_tokenizer(tuple(dict.fromkeys((*begin, *marks, end))), end, source)


def _deepseek(*names: str) -> tuple[str, ...]:
    return tuple(f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>" for name in names)


def _hunyuan(*names: str) -> tuple[str, ...]:
    return tuple(f"<{end}{name}:opensource>" for name in names for end in ("", "/"))


PACKAGE_TOKENS = tuple(
    dict.fromkeys(
        (
            *CHATML, *LLAMA, *TAGS,
            "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
            "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
            "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
            "<|tool_call_argument_begin|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>",
            "]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>",
            *_deepseek(
                "begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin", "tool calls end",
                "tool call begin", "tool call end", "tool sep", "tool outputs begin", "tool outputs end",
                "tool output begin", "tool output end", "action", "query", "authority", "domain", "title", "read_url",
                "latest_reminder",
            ), "\uff5cDSML\uff5c",
            *(f"<\uff5c{n}:opensource\uff5c>"
              for n in ("hy_begin_of_sentence", "hy_eos", "hy_User", "hy_Assistant", "reasoning_mode")),
            *_hunyuan("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response"),
            "<tool_sep:opensource>", "\u3008|EOS|\u3009", "<assistant>", "</assistant>",
            "<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
            "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>",
            "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<image|>", "<|image|>", "<|think|>",
            '<|"|>', "<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>",
            "<|content_text|>", "<|content_thinking|>", "<|content_xml|>", "<|content_image|>",
            "<|content_audio_input|>", "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>",
            "<|end_message|>", "<|audio_end|>", "<|unused_200053|>", "<|unused_200054|>",
            "<|content_model_end_sampling|>",
        )
    )
)  # fmt: skip
"""The control tokens of all hand-written renderers."""


@cache
def package_tokenizer() -> Any:
    """A tokenizer that fits every hand-written renderer of the `renderers` package that needs no download."""
    return tiny_tokenizer(PACKAGE_TOKENS, "<|im_end|>")
