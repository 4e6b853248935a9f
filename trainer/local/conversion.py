"""The process that prepares a model, `python -m agl.trainer.local.conversion SOURCE TARGET`; see `prepared`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from agl.errors import ModelLoadError
from agl.trainer.local.gguf import gguf_file, gguf_model, gguf_tokenizer, read_gguf
from agl.trainer.local.tokenizer import declared_stops, load, load_config
from agl.trainer.rendering.rendering import Rendering

_CONTROL = re.compile(r"<\|\w+\|>|\[/?[A-Z_]{3,}\]")
"""Texts of a template that have to be tokens of their own."""


def prepare(source: str, template: str | None, target: Path) -> None:
    """Write the directory: what has to change, and links to the rest.

    Raises:
        ModelLoadError: the model cannot be read.
    """
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.hub import cached_file

    file, model = gguf_file(source), None
    if file is not None:
        tokenizer, model = gguf_tokenizer(read_gguf(file), file), gguf_model(file)
        config = model.config
    else:
        tokenizer = load("tokenizer", source, lambda: AutoTokenizer.from_pretrained(source))
        config = load_config(source)
    if template is not None:
        tokenizer.chat_template = template
        lacking = set(_CONTROL.findall(template)) - set(tokenizer.get_vocab())
        added: list[Any] = [AddedToken(t, special=True, normalized=False) for t in sorted(lacking)]
        tokenizer.add_tokens(added)
        rows = max(tokenizer.get_vocab().values()) + 1
        if rows > config.get_text_config().vocab_size:
            model = model or load("model", source, lambda: AutoModelForCausalLM.from_pretrained(source, dtype="auto"))
            model.resize_token_embeddings(rows)
    if model is not None:
        generation = model.generation_config
    elif cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False) is not None:
        generation = GenerationConfig.from_pretrained(source)
    else:
        generation = GenerationConfig(eos_token_id=config.get_text_config().eos_token_id)
    if tokenizer.chat_template:
        # What other engines end an answer with.
        generation.eos_token_id = sorted({*declared_stops(generation, tokenizer), *Rendering(tokenizer).stop_token_ids})
    tokenizer.save_pretrained(target)
    if model is not None:
        model.generation_config = generation
        model.save_pretrained(target)
        return
    generation.save_pretrained(target)
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(load("model", source, lambda: snapshot_download(source)))
    for path in folder.resolve().iterdir():
        if not (target / path.name).exists() and not path.name.startswith("."):
            (target / path.name).symlink_to(path.resolve())


if __name__ == "__main__":
    try:
        prepare(sys.argv[1], json.load(sys.stdin), Path(sys.argv[2]))
    except ModelLoadError as error:
        print(json.dumps({"message": error.message, "hint": error.hint}))
        sys.exit(1)
