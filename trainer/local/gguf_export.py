"""A policy as one GGUF file, which llama.cpp and what is built on it load.

Invariant: the file computes what the policy computes and gives texts its tokens, up to the precision that was asked
for; what cannot be written so is refused before a weight is loaded. The file is there whole or not at all.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from agl.errors import ConfigError, ExportError, ModelLoadError, nearest
from agl.extras import require
from agl.trainer.local.loading import no_progress_bar
from agl.trainer.local.prepared import model_directory
from agl.trainer.local.tokenizer import PROBE, declared_stops, load, load_config, load_tokenizer
from agl.trainer.rendering.rendering import Rendering

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

    from agl.trainer.local.gguf_families import Family

Precision = Literal["f32", "f16", "bf16", "q8_0"]
"""Of the matrices; vectors are float32. q8_0 has blocks of 32 bytes with a scale each."""
OnTensors = Callable[[int, int], object]
"""Called with how many tensors have been written, and how many there are."""


def export_gguf(
    model: str | Path,
    out: Path | None = None,
    precision: str = "f16",
    *,
    on_tensors: OnTensors = lambda done, total: None,
) -> dict[str, Any]:
    """Write a policy as a GGUF file; an existing file of that name is replaced when the new one is complete.

    Args:
        model: whatever `model_directory` takes. An adapter alone is merged into the base that it names.
        out: the file; None for "NAME-PRECISION.gguf" here, NAME being that of the model's directory.
        precision: one of `Precision`.

    Returns:
        The `file`, its `bytes`, `type`, `architecture` and number of `tensors`, `notes` on what llama.cpp does
        otherwise, and the `seconds` it took.

    Raises:
        ConfigError: an option has an impossible value, or the package gguf is missing.
        ModelLoadError: the model, its tokenizer or an adapter's base does not load.
        ExportError: llama.cpp does not have the model or its tokenizer, or writing fails.
    """
    require("agl export gguf", "local,gguf", ("torch", "gguf"))
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    from agl.trainer.local.gguf_families import family_of

    if precision not in get_args(Precision):
        raise ConfigError(f"there is no type {precision!r}", hint=nearest(precision, get_args(Precision)))
    name = Path(model).name.removesuffix(".gguf") or "policy"
    file = Path(f"{name}-{precision}.gguf") if out is None else Path(out).expanduser()
    if file.is_dir():
        raise ConfigError("the export is one file, and this is a directory", hint=f"--out {file / name}.gguf", path=out)
    started = time.monotonic()
    directory = model_directory(model)
    config = load_config(directory)
    family = family_of(config)
    tokenizer = load_tokenizer(directory)
    generation: Any = config
    if cached_file(directory, "generation_config.json", _raise_exceptions_for_missing_entries=False) is not None:
        generation = GenerationConfig.from_pretrained(directory)
    stops = {*declared_stops(generation, tokenizer), *Rendering(tokenizer).stop_token_ids}

    def described(path: Path) -> tuple[GGUFWriter, list[str]]:
        return _described(path, precision, config, family, tokenizer, sorted(stops))

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _whole_file(file) as partial:
            writer, notes = described(partial)
            _require_read_back(writer, partial, config, family, tokenizer)
            partial.unlink()
            writer, _ = described(partial)
            tensors = _write_weights(writer, directory, family, precision, on_tensors)
            size = partial.stat().st_size
    except OSError as error:
        raise ExportError(
            f"cannot write the file: {error}", hint="choose a place on a disk with free space, with --out", path=file
        ) from error
    return {
        "file": str(file),
        "bytes": size,
        "type": precision,
        "architecture": family.architecture,
        "tensors": tensors,
        "notes": notes,
        "seconds": time.monotonic() - started,
    }


def _described(
    path: Path, precision: str, config: Any, family: Family, tokenizer: Any, stops: list[int]
) -> tuple[GGUFWriter, list[str]]:
    """A writer with all keys and the tensors of rope scaling, and what llama.cpp does otherwise."""
    from gguf import GGUFWriter, LlamaFileType

    from agl.trainer.local.gguf_config import ROPE_LONG
    from agl.trainer.local.gguf_families import write_config
    from agl.trainer.local.gguf_tokenizer import write_tokenizer

    kinds = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer = GGUFWriter(path, family.architecture)
    # Without a name: llama.cpp gives models of some names, such as Phi-3's, other tokens.
    writer.add_type("model")
    writer.add_file_type(LlamaFileType[kinds[precision]])
    writer.add_quantization_version(2)
    tensors = write_config(writer, config, family)
    for tensor, numbers in tensors.items():
        writer.add_tensor(tensor, numbers)
    notes = write_tokenizer(writer, tokenizer, config.vocab_size, stops)
    if ROPE_LONG in tensors:
        context = config.original_max_position_embeddings
        notes.append(f"llama.cpp turns all tokens otherwise where its context is above {context}: pass it -c {context}")
    return writer, notes


def _require_read_back(writer: GGUFWriter, file: Path, config: Any, family: Family, tokenizer: Any) -> None:
    """Write the file without weights, and refuse a model that is read from it as another one."""
    from agl.trainer.local.gguf import gguf_config, read_gguf
    from agl.trainer.local.gguf_families import require_equal
    from agl.trainer.local.gguf_tokenizer import gguf_tokenizer, refused

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = read_gguf(file)
    try:
        require_equal(config, gguf_config(reader, file), family)
        read = gguf_tokenizer(reader, file)
    except ModelLoadError as error:
        raise refused(error.message) from error
    if read.encode(PROBE, add_special_tokens=False) != tokenizer.encode(PROBE, add_special_tokens=False):
        raise refused("its tokenizer cuts a text otherwise than the file says")


def _write_weights(writer: GGUFWriter, directory: str, family: Family, precision: str, on_tensors: OnTensors) -> int:
    """Write the file with the model's weights, one tensor at a time. Returns their number."""
    import torch
    from gguf import quant_shape_to_byte_shape
    from transformers import AutoModelForCausalLM

    with no_progress_bar():
        model = load("model", directory, lambda: AutoModelForCausalLM.from_pretrained(directory, dtype="auto"))
    weights: dict[str, torch.Tensor] = model.state_dict()
    names = dict(_names(model, family))
    kinds = {name: _kind(weights[source].shape, precision) for name, source in names.items()}
    rope = [info.tensor for info in writer.tensors[0].values() if info.tensor is not None]
    for name, source in names.items():
        shape = quant_shape_to_byte_shape(weights[source].shape, kinds[name])
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for numbers in rope:
            writer.write_tensor_data(numbers)
        for done, (name, source) in enumerate(names.items()):
            on_tensors(done, len(names))
            numbers = weights[source].to(torch.float32).numpy()
            writer.write_tensor_data(_encoded(name, _as_llama_cpp(name, numbers, model.config, family), kinds[name]))
        on_tensors(len(names), len(names))
    finally:
        writer.close()
    return len(rope) + len(names)


def _names(model: Any, family: Family) -> Iterator[tuple[str, str]]:
    """llama.cpp's name of each tensor, and the model's.

    Raises:
        ExportError: llama.cpp has no place for a tensor.
    """
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    from agl.trainer.local.gguf_tokenizer import refused

    weights = model.state_dict()
    plain = TensorProcessor(config=model.config.to_dict())
    found = get_gguf_hf_weights_map(model, plain, model_type=family.architecture)
    named = {source: name for name, source in found.items()}
    if model.config.tie_word_embeddings:
        named["lm_head.weight"] = ""
    if others := sorted(weights.keys() - named.keys()):
        raise refused(f"llama.cpp's {family.architecture} models have no place for {', '.join(others[:4])}")
    for source in weights:
        if named[source]:
            yield named[source], source


def _as_llama_cpp(name: str, numbers: np.ndarray, config: Any, family: Family) -> np.ndarray:
    """A tensor in the order and with the offset that llama.cpp has."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    kind = name.split(".")[-2]
    if family.pairs and kind in heads:
        numbers = numbers.reshape(heads[kind], 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
    if family.norm_offset and name.endswith("norm.weight"):
        numbers = numbers + np.float32(family.norm_offset)
    return np.ascontiguousarray(numbers)


def _kind(shape: tuple[int, ...], precision: str) -> GGMLQuantizationType:
    """How a tensor is stored."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) < 2:
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[precision.upper()]
    whole_blocks = shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
    return kind if whole_blocks else GGMLQuantizationType.F16


def _encoded(name: str, numbers: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """uint8: the bytes of a tensor.

    Raises:
        ExportError: it has numbers that this kind cannot hold.
    """
    from gguf import GGMLQuantizationType, quants

    largest = float(np.abs(numbers).max())
    limit = float(np.finfo(np.float16 if kind == GGMLQuantizationType.F16 else np.float32).max)
    if not largest <= limit:
        raise ExportError(
            f"the largest number of {name} is {largest:g}, and {kind.name.lower()} ends at {limit:g}",
            hint="export it with --type bf16 or f32, if it is a finite number",
        )
    return quants.quantize(numbers, kind).view(np.uint8)


@contextmanager
def _whole_file(file: Path) -> Iterator[Path]:
    """A path next to `file`. What the block writes there becomes the file, or is deleted if it fails."""
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
