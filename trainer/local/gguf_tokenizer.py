"""The tokenizer of a GGUF file, read and written: tokens, merges, pre-tokenizer, special tokens and chat template.

Invariant: what is read or written gives every text the tokens that llama.cpp gives it; any other tokenizer is refused.
Source: the GGUF specification (ggml/docs/gguf.md), and llama.cpp's names of pre-tokenizers (llama-vocab.cpp).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl.errors import ExportError, ModelLoadError
from agl.trainer.local.gguf import converted, value

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter
    from transformers import PreTrainedTokenizerFast

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"
QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", _DIGIT)
"""What Qwen's tokenizers cut texts into; each digit is a token of its own."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What llama.cpp does with a text before it merges byte pairs.

    Attributes:
        cuts: regular expressions; each cuts what those before it have left, into its matches and what lies between.
        whole_words: whether a piece that is a token is taken without merging.
        exact: whether llama.cpp computes exactly these cuts; otherwise it approximates them.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    exact: bool = True


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone"), PreTokenizer((_DIGIT, _GPT2))
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), PreTokenizer((_LLAMA3,), whole_words=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), PreTokenizer((QWEN2,))),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, exact=False),
}
"""By llama.cpp's name. The first of those that do the same is written."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPELLED_OUT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPELLINGS = {
    _GPT2.replace("'(?:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d"): _GPT2,
    _LLAMA3.replace(_CONTRACTIONS, _SPELLED_OUT): _LLAMA3,
    QWEN2.replace(_CONTRACTIONS, _SPELLED_OUT): QWEN2,
}
"""Other spellings of the same regular expressions."""
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
"""Types of tokens."""
_STOPS = ("eos", "eot", "eom")
"""Keys of tokens that end an answer."""
CONVERTER = "llama.cpp's convert_hf_to_gguf.py may know it; compare the answers of its file with those of agl serve"


def gguf_tokenizer(reader: GGUFReader, file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes, with its chat template if it has one.

    transformers' own conversion cuts every text as GPT-2 does, whatever the file says, which gives numbers other tokens
    than the model was trained on.

    Raises:
        ModelLoadError: a kind of tokenizer that is not known.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = value(reader, "tokenizer.ggml.model")
    tokens: list[str] = value(reader, "tokenizer.ggml.tokens") or []
    special = {
        f"{name}_token": tokens[index]
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := value(reader, f"tokenizer.ggml.{field}_token_id")) is not None
    }
    template = value(reader, "tokenizer.chat_template")
    if kind == "gpt2":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_pairs(reader, tokens, file), **special)
    elif kind == "llama":
        tokenizer = converted(file, lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
        # Its conversion takes the token that begins a text for the one that ends it, and leaves user-defined ones out.
        tokenizer.add_special_tokens(special)
        _add_tokens(reader, tokens, tokenizer)
    else:
        raise ModelLoadError(
            f"a GGUF tokenizer of the kind {kind!r} is not known",
            hint="take the model's Hugging Face directory instead; known kinds are gpt2 and llama",
            path=file,
        )
    tokenizer.chat_template = template
    context = value(reader, f"{value(reader, 'general.architecture')}.context_length")
    tokenizer.model_max_length = int(context) if context else tokenizer.model_max_length
    return tokenizer


def _byte_pairs(reader: GGUFReader, tokens: list[str], file: Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = value(reader, "tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"the GGUF file's pre-tokenizer {name!r} is not known, so its texts would become other tokens",
            hint=f"take the model's Hugging Face directory; known are {', '.join(PRE_TOKENIZERS)}",
            path=file,
        )
    merges = [tuple(pair.split(" ", 1)) for pair in value(reader, "tokenizer.ggml.merges") or ()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    known = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=known.whole_words))
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in known.cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    _add_tokens(reader, tokens, tokenizer)
    return tokenizer


def _add_tokens(reader: GGUFReader, tokens: list[str], tokenizer: Any) -> None:
    """Have the tokenizer find the control tokens and the user's own in a text before it is cut."""
    from tokenizers import AddedToken

    kinds = value(reader, "tokenizer.ggml.token_type") or [1] * len(tokens)
    for wanted in (_CONTROL, _USER_DEFINED):
        added = [t for t, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=wanted == _CONTROL) for token in added])


def write_tokenizer(writer: GGUFWriter, tokenizer: Any, rows: int, stops: Sequence[int]) -> list[str]:
    """Describe a tokenizer in a GGUF file, with its chat template.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        rows: of the model's embeddings; tokens that the tokenizer lacks are
            written as unused. stops: ids of the tokens that end an answer.

    Returns:
        What llama.cpp does otherwise with some texts, as sentences.

    Raises:
        ExportError: llama.cpp would give texts other tokens, or not stop where the policy does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise refused(f"{type(tokenizer).__name__} has no tokenizer.json")
    description = json.loads(backend.to_str())
    pre_tokenizer = _pre_tokenizer(description)
    tokens, types = _tokens(description, rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in description["model"]["merges"]]
    )
    first, last = _added_around(tokenizer)
    writer.add_add_bos_token(first)
    writer.add_add_eos_token(last)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    # The tokenizer's own comes first.
    ends = sorted(stops, key=lambda token: (token != tokenizer.eos_token_id, token))
    if len(ends) > len(_STOPS):
        names = ", ".join(tokens[token] for token in ends)
        raise refused(f"its answers end with {len(ends)} tokens ({names}), and a GGUF file names {len(_STOPS)} at most")
    for name, token in zip(_STOPS, ends, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_chat_template(tokenizer.chat_template)
    if description["normalizer"] is None:
        return []
    return ["llama.cpp does not compose characters as the tokenizer does (NFC): send it composed text"]


def _pre_tokenizer(description: Mapping[str, Any]) -> str:
    """llama.cpp's name of what the tokenizer does with a text before it merges byte pairs.

    Args:
        description: tokenizer.json.
    """
    model = description["model"]
    normalizer = description["normalizer"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback" if model["type"] == "BPE" else model["type"]
        raise refused(f"its tokenizer is of the kind {kind}, and byte-level BPE alone is written")
    if not model["merges"]:
        raise refused("its tokenizer merges no bytes, and llama.cpp loads none such")
    for option in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(option):
            raise refused(f"its tokenizer has {option}={model[option]!r}")
    if normalizer not in (None, {"type": "NFC"}):
        raise refused(f"its tokenizer changes texts first ({normalizer['type']})")
    cuts = tuple(_SPELLINGS.get(cut, cut) for cut in _cuts(description["pre_tokenizer"]))
    whole_words = bool(model.get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        if known.exact and (known.cuts, known.whole_words) == (cuts, whole_words):
            return name
    raise refused(
        f"llama.cpp has no pre-tokenizer that cuts texts at {' then '.join(map(repr, cuts))}"
        f"{' and takes whole words without merging' if whole_words else ''}"
    )


def _cuts(pre_tokenizer: Mapping[str, Any] | None) -> Iterator[str]:
    """The regular expressions of a byte-level pre-tokenizer, each of which isolates its matches."""
    steps = [] if pre_tokenizer is None else list(pre_tokenizer.get("pretokenizers", [pre_tokenizer]))
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise refused(f"its pre-tokenizer does not end with bytes: {[step['type'] for step in steps]}")
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(by_words)} if step is steps[-1]:
                if by_words:
                    yield _GPT2
            case {"type": "Digits", "individual_digits": True}:
                yield _DIGIT
            case {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}:
                yield cut
            case {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Removed", "invert": True}:
                yield cut
            case _:
                raise refused(f"its pre-tokenizer has the step {json.dumps(step)}")


def _tokens(description: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The text and the type of each of the model's rows."""
    names = {token: text for text, token in description["model"]["vocab"].items()}
    types = dict.fromkeys(names, _NORMAL)
    for added in description["added_tokens"]:
        for option in ("lstrip", "rstrip", "single_word"):
            if added[option]:
                raise refused(f"its token {added['content']!r} has {option}=True")
        names[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    if max(names) >= rows:
        raise refused(f"its tokenizer has {max(names) + 1} tokens, and its model {rows}")
    return (
        [names.get(row, f"[PAD{row}]") for row in range(rows)],
        [types.get(row, _UNUSED) for row in range(rows)],
    )


def _added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the tokenizer puts its first token before a text, and its last one behind it."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    for first in (False, True):
        for last in (False, True):
            before = [tokenizer.bos_token_id] if first else []
            behind = [tokenizer.eos_token_id] if last else []
            if [*before, *bare, *behind] == whole:
                return first, last
    raise refused(f"its tokenizer writes {tokenizer.convert_ids_to_tokens(whole)} for 'a'")


def refused(what: str) -> ExportError:
    """For a policy that would be another one in llama.cpp."""
    return ExportError(f"as GGUF the policy would be another one: {what}", hint=CONVERTER)
