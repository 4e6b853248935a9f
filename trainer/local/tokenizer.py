"""A policy's tokenizer, its chat template and the tokens that end an answer, without its weights.

Invariant: importing this module loads neither torch nor transformers; a tokenizer that encodes otherwise than its files
say is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from agl.errors import ModelLoadError
from agl.trainer.local.prepared import model_directory
from agl.trainer.rendering.rendering import Rendering

T = TypeVar("T")

PROBE = (
    "What is 47 * 36? It's 1692, isn't it?\n\n"
    'def f(x):\n\treturn {"a": [1, 2.50, -3], "b": "naïve café"}  # 100%\n'
    "Größe 你好世界 こんにちは привет 👋🏽 HTTPServer2024 __init__ it'll WE'VE   spaces\r\n"
)
"""Text on which pre-tokenizers differ: digits, contractions, runs of spaces, scripts, camel case, line ends."""


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a directory or hub id.

    Raises:
        ModelLoadError: it does not load, has no chat template, or does not do what tokenizer.json says.
    """
    from transformers import AutoTokenizer

    tokenizer = load("tokenizer", name, lambda: AutoTokenizer.from_pretrained(name))
    _check_tokens(name, tokenizer)
    if not tokenizer.chat_template:
        raise ModelLoadError(
            "the tokenizer has no chat template",
            hint="use the instruction-tuned version of the model, or give it one: chat_template='hermes', or a file",
            path=name,
        )
    return tokenizer


def load_renderings(models: Mapping[str, str], renderer: str | None = None) -> dict[str, Rendering]:
    """Policy -> the rendering of its model; one per model.

    Args:
        models: policy -> whatever `model_directory` takes.
        renderer: a name from the `renderers` package; None chooses by the model.

    Raises:
        ModelLoadError: a model has no tokenizer or no chat template.
        ConfigError: there is no such renderer.
    """
    made = {m: Rendering(load_tokenizer(model_directory(m)), renderer=renderer) for m in set(models.values())}
    return {policy: made[model] for policy, model in models.items()}


def declared_stops(generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer, as a generation config and a tokenizer declare them."""
    declared = getattr(generation, "eos_token_id", None)
    ids = [declared] if isinstance(declared, int) else list(declared or ())
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


def stop_token_ids(name: str, tokenizer: Any) -> tuple[int, ...]:
    """`declared_stops` of a directory or hub id, without its weights."""
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    if cached_file(name, "generation_config.json", _raise_exceptions_for_missing_entries=False) is not None:
        return declared_stops(GenerationConfig.from_pretrained(name), tokenizer)
    return declared_stops(load_config(name), tokenizer)


def _check_tokens(name: str, tokenizer: Any) -> None:
    """Refuse a tokenizer class that overrides what tokenizer.json says, as transformers' Qwen2Tokenizer does."""
    from tokenizers import Tokenizer
    from transformers.utils.hub import cached_file

    file = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return
    declared = load("tokenizer.json", name, lambda: Tokenizer.from_file(file))
    expected = declared.encode(PROBE, add_special_tokens=False).ids
    actual = tokenizer.encode(PROBE, add_special_tokens=False)
    if actual != expected:
        pairs = enumerate(zip_longest(actual, expected))
        at, (here, there) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        here, there = ("missing" if i is None else repr(declared.id_to_token(i)) for i in (here, there))
        raise ModelLoadError(
            f"{type(tokenizer).__name__} does not tokenise as the directory's tokenizer.json says: token {at} of a "
            f"probe text is {here} instead of {there}",
            hint="its model_type makes transformers use another pre-tokenizer; for your own tokenizer choose "
            "a model_type that keeps tokenizer.json, such as llama or mistral",
            path=name,
        )


def load_config(name: str) -> Any:
    from transformers import AutoConfig

    return load("configuration", name, lambda: AutoConfig.from_pretrained(name))


def load(what: str, name: str, loader: Callable[[], T]) -> T:
    """Run a loader of another library; whatever it raises becomes a `ModelLoadError` with the reason's first line."""
    try:
        return loader()
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        local = Path(name).expanduser().exists()
        raise ModelLoadError(
            f"the {what} does not load: {type(error).__name__}: {reason}",
            hint="check that the directory is complete, and that this version of transformers knows the model"
            if local
            else "there is no such directory here: check the hub id, and that the hub can be reached",
            path=name,
        ) from error
