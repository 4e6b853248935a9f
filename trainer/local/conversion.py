"""The process that prepares a model, `python -m agl.trainer.local.conversion SOURCE TARGET`; see `prepared`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agl.errors import ModelLoadError
from agl.trainer.local.embeddings import ADDED_TOKENS, untie
from agl.trainer.local.gguf import gguf_file, gguf_model, read_gguf
from agl.trainer.local.gguf_tokenizer import gguf_tokenizer
from agl.trainer.local.prepared import is_adapter
from agl.trainer.local.tokenizer import declared_stops, load, load_config
from agl.trainer.rendering.rendering import Rendering

_CONTROL = re.compile(r"<\|\w+\|>|\[/?[A-Z_]{3,}\]")
"""Texts of a template that have to be tokens of their own."""


def prepare(source: str, template: str | None, target: Path) -> None:
    """Write the directory: what has to change, and links to the rest.

    Raises:
        ModelLoadError: the model cannot be read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.hub import cached_file

    file = gguf_file(source)
    model = None
    if file is not None:
        tokenizer = gguf_tokenizer(read_gguf(file), file)
        model = gguf_model(file)
        config = model.config
    elif is_adapter(source):
        tokenizer, model = _merged(Path(source).expanduser())
        config = model.config
    else:
        tokenizer = load("tokenizer", source, lambda: AutoTokenizer.from_pretrained(source))
        config = load_config(source)
    if template is not None:
        tokenizer.chat_template = template
        lacking = set(_CONTROL.findall(template)) - set(tokenizer.get_vocab())
        if lacking:
            model = model or load("model", source, lambda: AutoModelForCausalLM.from_pretrained(source, dtype="auto"))
            config = model.config
            _add_tokens(model, tokenizer, sorted(lacking))
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


def _merged(adapter: Path) -> tuple[Any, Any]:
    """The tokenizer, and the adapter's base with the adapter in it: in float32, since a sum would be rounded.

    Raises:
        ModelLoadError: the base or the adapter does not load.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = json.loads((adapter / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not base:
        raise ModelLoadError("the adapter names no base", hint="set base_model_name_or_path in adapter_config.json")
    base_model = load("base", base, lambda: AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    model = load("adapter", str(adapter), lambda: PeftModel.from_pretrained(base_model, str(adapter)))
    untie(model)
    with_tokenizer = str(adapter) if (adapter / "tokenizer_config.json").is_file() else base
    tokenizer = load("tokenizer", with_tokenizer, lambda: AutoTokenizer.from_pretrained(with_tokenizer))
    return tokenizer, model.merge_and_unload()


def _add_tokens(model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
    """Give the tokenizer these tokens and the model their rows, which begin as those of tokens of like use: what ends
    an answer as the model's own end, anything else as the mean of the tokens that its text has been until now.

    Their ids are kept in the configuration: LoRA, too, has to train their rows.
    """
    from tokenizers import AddedToken

    ends = [tokenizer.eos_token_id, *declared_stops(model.generation_config, tokenizer)]
    end = [token for token in ends if token is not None][:1]
    pieces = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    added: list[Any] = [AddedToken(text, special=True, normalized=False) for text in texts]
    tokenizer.add_tokens(added)
    stops = Rendering(tokenizer).stop_token_ids
    rows = max(tokenizer.get_vocab().values()) + 1
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    head = model.get_output_embeddings()
    tensors = {id(p): p for p in (model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None))}
    ids = tokenizer.convert_tokens_to_ids(list(texts))
    with torch.no_grad():
        for text, token in zip(texts, ids, strict=True):
            known = [piece for piece in pieces[text] if piece != tokenizer.unk_token_id]
            alike = (end if token in stops else []) or known or [*range(min(ids))]
            for tensor in tensors.values():
                if tensor is not None:
                    tensor[token] = tensor[alike].float().mean(0)
    setattr(model.config, ADDED_TOKENS, sorted({*(getattr(model.config, ADDED_TOKENS, None) or ()), *ids}))


if __name__ == "__main__":
    try:
        prepare(sys.argv[1], json.load(sys.stdin), Path(sys.argv[2]))
    except ModelLoadError as error:
        print(json.dumps({"message": error.message, "hint": error.hint}))
        sys.exit(1)
