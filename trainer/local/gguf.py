"""Models in GGUF, llama.cpp's format, de-quantised to float32.

Source: the GGUF specification (ggml/docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agl.errors import ModelLoadError
from agl.extras import install_line

if TYPE_CHECKING:
    from gguf import GGUFReader

T = TypeVar("T")


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
    architecture = value(reader, "general.architecture")
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if architecture not in GGUF_CONFIG_MAPPING:
        raise ModelLoadError(
            f"transformers does not convert GGUF models of the architecture {architecture!r}",
            hint="take the model's Hugging Face directory; from GGUF it converts "
            + ", ".join(sorted(set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer"})),
            path=file,
        )
    return reader


def gguf_config(reader: GGUFReader, file: Path) -> Any:
    """The configuration of the model in a GGUF file, as transformers has it.

    Raises:
        ModelLoadError: it cannot be converted, or the file says what is not understood.
    """
    import transformers

    from agl.trainer.local.gguf_config import honour

    config = converted(file, lambda: transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    honour(reader, config, file)
    return config


def gguf_model(file: Path) -> Any:
    """The causal language model, in float32.

    Raises:
        ModelLoadError: it cannot be converted, or the file says what is not understood.
    """
    import torch
    import transformers

    from agl.trainer.local.gguf_config import require_understood_tensors
    from agl.trainer.local.memory import model_of_shapes

    reader = read_gguf(file)
    config = gguf_config(reader, file)
    require_understood_tensors(reader, converted(file, lambda: model_of_shapes(config, "eager")), file)
    options: dict[str, Any] = {"gguf_file": file.name, "config": config, "dtype": torch.float32}
    # Newer releases would else keep the quantised blocks, which can be neither trained nor saved.
    if (quantized := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = quantized(dequantize=True)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = converted(file, lambda: load(file.parent, output_loading_info=True, **options))
    if absent := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"the GGUF file lacks {len(absent)} of the model's tensors, which would start at random: "
            f"{', '.join(absent[:4])}{' ...' if len(absent) > 4 else ''}",
            hint="take the model's Hugging Face directory instead",
            path=file,
        )
    return model


def converted(file: Path, convert: Callable[[], T]) -> T:
    """What transformers makes of the file."""
    try:
        return convert()
    except Exception as error:
        raise ModelLoadError(
            f"the GGUF file does not convert: {type(error).__name__}: {error}",
            hint="take the model's Hugging Face directory instead",
            path=file,
        ) from error


def value(reader: GGUFReader, name: str) -> Any:
    """The value of a key; None if the file does not have it."""
    field = reader.get_field(name)
    return None if field is None else field.contents()
