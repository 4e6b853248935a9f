"""Models in GGUF, llama.cpp's format: weights de-quantised to float32, and the tokenizer that the file describes.

Source: the GGUF specification (ggml/docs/gguf.md), and llama.cpp's names of pre-tokenizers (llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agl.errors import ModelLoadError
from agl.extras import install_line

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

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
_PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (_LLAMA3.replace(r"\p{N}{1,3}", _DIGIT),)),
    "tekken": (_TEKKEN,),
}
"""llama.cpp's name -> what a text is cut into, one after another, before byte pairs are merged."""
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens."""


def gguf_file(model: str) -> Path | None:
    """The file, if `model` is a GGUF file, or a directory that holds one and no Hugging Face model.

    Raises:
        ModelLoadError: there is no such file, or the directory holds several.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError("no such file", hint="give a GGUF file, a model directory or a hub id", path=model)
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelLoadError(
            f"the directory holds {len(files)} GGUF files: {', '.join(f.name for f in files[:4])}",
            hint="name one of them: model='DIR/FILE.gguf'",
            path=model,
        )
    return files[0] if files else None


def read_gguf(file: Path) -> GGUFReader:
    """Open a GGUF file; its tensors are mapped, not read.

    Raises:
        ModelLoadError: it is no GGUF file, cut short, or of an architecture that transformers
            does not convert.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelLoadError("GGUF files need the package gguf", hint=install_line("gguf"), path=file) from error
    try:
        reader = GGUFReader(file)
    except Exception as error:
        size = file.stat().st_size
        with file.open("rb") as start:
            whole = start.read(4) == b"GGUF"
        raise ModelLoadError(
            f"the file of {size:,} bytes is cut short or damaged: {error}" if whole else "not a GGUF file",
            hint="download it again, and compare its size and hash" if whole else "its first bytes are not 'GGUF'",
            path=file,
        ) from error
    architecture = _value(reader, "general.architecture")
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if architecture not in GGUF_CONFIG_MAPPING:
        raise ModelLoadError(
            f"transformers does not convert GGUF models of the architecture {architecture!r}",
            hint="take the model's Hugging Face directory; from GGUF it converts "
            + ", ".join(sorted(set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer"})),
            path=file,
        )
    return reader


def gguf_model(file: Path) -> Any:
    """The causal language model, in float32.

    Raises:
        ModelLoadError: it cannot be converted, or the file says what is not understood.
    """
    import torch
    import transformers

    from agl.trainer.local.gguf_config import honour, require_understood_tensors
    from agl.trainer.local.memory import model_of_shapes

    reader = read_gguf(file)
    config = _converted(file, lambda: transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    honour(reader, config, file)
    require_understood_tensors(reader, _converted(file, lambda: model_of_shapes(config, "eager")), file)
    options: dict[str, Any] = {"gguf_file": file.name, "config": config, "dtype": torch.float32}
    # Newer releases would else keep the quantised blocks, which can be neither trained nor saved.
    if (quantized := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = quantized(dequantize=True)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = _converted(file, lambda: load(file.parent, output_loading_info=True, **options))
    if absent := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"the GGUF file lacks {len(absent)} of the model's tensors, which would start at random: "
            f"{', '.join(absent[:4])}{' ...' if len(absent) > 4 else ''}",
            hint="take the model's Hugging Face directory instead",
            path=file,
        )
    return model


def _converted(file: Path, convert: Callable[[], T]) -> T:
    """What transformers makes of the file."""
    try:
        return convert()
    except Exception as error:
        raise ModelLoadError(
            f"the GGUF file does not convert: {type(error).__name__}: {error}",
            hint="take the model's Hugging Face directory instead",
            path=file,
        ) from error


def gguf_tokenizer(reader: GGUFReader, file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes, with its chat template if it has one.

    transformers' own conversion cuts every text as GPT-2 does, whatever the file says, which gives numbers other tokens
    than the model was trained on.

    Raises:
        ModelLoadError: a kind of tokenizer that is not known.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = _value(reader, "tokenizer.ggml.model")
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens") or []
    special = {
        f"{name}_token": tokens[index]
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := _value(reader, f"tokenizer.ggml.{field}_token_id")) is not None
    }
    template = _value(reader, "tokenizer.chat_template")
    if kind == "gpt2":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_pairs(reader, tokens, file), **special)
    elif kind == "llama":
        tokenizer = _converted(file, lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
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
    context = _value(reader, f"{_value(reader, 'general.architecture')}.context_length")
    tokenizer.model_max_length = int(context) if context else tokenizer.model_max_length
    return tokenizer


def _byte_pairs(reader: GGUFReader, tokens: list[str], file: Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = _value(reader, "tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"the GGUF file's pre-tokenizer {name!r} is not known, so its texts would become other tokens",
            hint=f"take the model's Hugging Face directory; known are {', '.join(_PRE_TOKENIZERS)}",
            path=file,
        )
    merges = [tuple(pair.split(" ", 1)) for pair in _value(reader, "tokenizer.ggml.merges") or ()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3's tokenizer takes a whole word that is a token without merging it.
    whole = _PRE_TOKENIZERS[name] == (_LLAMA3,)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _PRE_TOKENIZERS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    _add_tokens(reader, tokens, tokenizer)
    return tokenizer


def _add_tokens(reader: GGUFReader, tokens: list[str], tokenizer: Any) -> None:
    """Have the tokenizer find the control tokens and the user's own in a text before it is cut."""
    from tokenizers import AddedToken

    kinds = _value(reader, "tokenizer.ggml.token_type") or [1] * len(tokens)
    for wanted in (_CONTROL, _USER_DEFINED):
        added = [t for t, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=wanted == _CONTROL) for token in added])


def _value(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()
