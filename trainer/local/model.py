"""Load and save a policy: a Hugging Face causal language model, its tokenizer and chat template, full or with LoRA.

Invariant: what `load_policy` returns can be sampled and trained; a directory that would only seem to load is refused.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from agl.errors import ConfigError, ModelLoadError, nearest
from agl.trainer.local.architecture import default_attention, exact_context, model_class
from agl.trainer.local.config import Attention, LoraSpec, Quantize, require_dtype
from agl.trainer.local.memory import require_memory
from agl.trainer.local.prepared import require_local_model
from agl.trainer.local.tokenizer import load, load_config, load_tokenizer

__all__ = ["LoadedPolicy", "LoraSpec", "load_policy", "save_model"]

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPolicy:
    """A policy in memory.

    Attributes:
        model: a `PreTrainedModel` in eval mode, or a peft model around one.
        tokenizer: with a chat template.
        device: where the model is.
        dtype: of the base model's weights.
        max_context: longest prompt + answer in tokens.
        adapters: the LoRA adapters in the model; none when all weights are one policy.
        original: what a quantised model was loaded from; None for one that is not quantised.
        positions: that the model was made for.
        shortened: why `max_context` is less; "" if it is not.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    max_context: int
    adapters: tuple[str, ...] = ()
    original: str | None = None
    positions: int = 0
    shortened: str = ""


def load_policy(
    path: str | os.PathLike[str],
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: Quantize | None = None,
    lora: LoraSpec | None = None,
    seed: int = 0,
    attention: Attention | None = None,
    trained: bool = False,
) -> LoadedPolicy:
    """Load a policy to sample and train.

    Args:
        path: a local Hugging Face model directory or a hub id.
        device: "cpu", "cuda", "cuda:1", ..., "mps", or "auto": cuda where there is one, else the CPU.
        dtype: of the base model's weights: "float32", "bfloat16" or "auto": bfloat16 under LoRA on cuda, otherwise
            float32. Weights in training are always float32; computing in bfloat16 is the learner's `autocast`.
        quantize: hold the model in fewer bits (`quantized`); only with `lora`.
        lora: train an adapter instead of all weights.
        seed: of the adapter's start.
        attention: "eager" or "sdpa"; None = eager on CPU, sdpa on cuda where the model has it.
        trained: refuse it where there is too little memory to train it, not only to hold it.

    Raises:
        ConfigError: a device, dtype, attention or LoRA target that cannot be had.
        ModelLoadError: the directory does not hold a loadable model, tokenizer and chat template; the message says
            what is wrong with which; or the model is of a kind that cannot be trained exactly, or too large.
    """
    name = os.path.expanduser(os.fspath(path))
    where = choose_device(device)
    kind = _dtype(dtype, where, lora)
    if attention not in (None, *get_args(Attention)):
        raise ConfigError(f"attention={attention!r} is not known", hint=nearest(attention, get_args(Attention)))
    check_files(name)
    config = load_config(name)
    found = model_class(config, name)
    context = exact_context(config, name)
    tokenizer = load_tokenizer(name)
    adapter = lora is not None
    require_memory(name, config, where, kind, trained=trained and not adapter, lora=adapter, quantize=quantize)
    attention = attention or default_attention(found, where.type)
    if quantize is None:
        model = _load_model(name, config, kind, attention).to(where)
    else:
        from agl.trainer.local.quantized import loading_options, make_exact

        model = _load_model(name, config, kind, attention, **loading_options(quantize, kind, where))
        make_exact(model)
    rows = int(model.get_input_embeddings().weight.shape[0])
    if (largest := max(tokenizer.get_vocab().values())) >= rows:
        raise ModelLoadError(
            f"the tokenizer has ids up to {largest}, the model's embedding only {rows} rows",
            hint="the two do not belong together: save them from the same run, or resize the model's embedding",
            path=name,
        )
    original = None if quantize is None else name
    policy = LoadedPolicy(
        model.eval(),
        tokenizer,
        where,
        kind,
        context.tokens,
        original=original,
        positions=context.positions,
        shortened=context.why,
    )
    return policy if lora is None else add_adapter(policy, lora, seed)


def add_adapter(policy: LoadedPolicy, lora: LoraSpec, seed: int = 0) -> LoadedPolicy:
    """The same model with one more LoRA adapter, the last of `adapters`, which changes nothing yet.

    Raises:
        ConfigError: a target that the model does not have.
    """
    from peft import PeftModel, get_peft_model

    from agl.trainer.local.embeddings import Embeddings, lora_config, prepare_rows

    name = f"adapter{len(policy.adapters)}"
    targets = lora.target_modules
    model = policy.model
    config = lora_config(lora, Embeddings.of(model.get_base_model() if isinstance(model, PeftModel) else model))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            if isinstance(model, PeftModel):
                model.add_adapter(name, config)
            else:
                model = get_peft_model(model, config, adapter_name=name)
        except ValueError as error:
            raise ConfigError(
                f"LoRA target_modules={targets!r}: {str(error).splitlines()[0]}",
                hint="name linear layers of this model, or use 'all-linear'",
            ) from error
    prepare_rows(model)
    return replace(policy, model=model.eval(), adapters=(*policy.adapters, name))


def save_model(policy: LoadedPolicy, path: str | os.PathLike[str], adapter: str | None = None) -> None:
    """Write a Hugging Face model directory that `load_policy` and `AutoModelForCausalLM` load.

    With LoRA the directory holds the base merged with one adapter (the only one, if `adapter` is None), and
    `adapter/` in it that adapter by itself. An adapter on one of two tied embeddings leaves them untied. Of a quantised
    base, the original weights are loaded again and merged: no quantised weights are written.
    """
    target = Path(path)
    if not policy.adapters:
        policy.model.save_pretrained(target)
    else:
        name = adapter or policy.adapters[0]
        _save_adapter(policy, target / "adapter", name)
        _merged(policy, name, target / "adapter").save_pretrained(target)
    policy.tokenizer.save_pretrained(target)


def _merged(policy: LoadedPolicy, name: str, saved: Path | None = None) -> Any:
    """The base with this adapter merged in, which `saved` holds, too: merging in place and back would leave rounding
    errors in the weights that are being trained on."""
    from agl.trainer.local.embeddings import untie

    if policy.original is not None:
        from peft import PeftModel

        assert saved is not None
        base = _load_model(policy.original, load_config(policy.original), policy.dtype, "eager")
        model = PeftModel.from_pretrained(base, saved)
    else:
        model = copy.deepcopy(policy.model)
        for other in policy.adapters:
            if other != name:
                model.delete_adapter(other)
    untie(model)
    return model.merge_and_unload()


def export_weights(policy: LoadedPolicy, path: str | os.PathLike[str], adapter: str | None, dtype: torch.dtype) -> None:
    """Write what an engine that holds the base model needs for the policy's weights of now: `adapter` by itself, or all
    weights, rounded to `dtype`: also those of an adapter that changes the embedding or the output layer, which engines
    do not take."""
    from agl.trainer.local.embeddings import changes_embeddings

    if adapter is not None and not changes_embeddings(policy.model):
        _save_adapter(policy, Path(path), adapter)
    else:
        model = policy.model if adapter is None else _merged(policy, adapter)
        weights = {name: value.to("cpu", dtype) for name, value in model.state_dict().items()}
        model.save_pretrained(path, state_dict=weights)
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()


def _save_adapter(policy: LoadedPolicy, folder: Path, name: str) -> None:
    # Its own weights alone: peft would add the embeddings that it adapts, and vLLM takes no adapter that holds them.
    policy.model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
    # peft puts an adapter that is not called "default" one folder deeper.
    for file in (folder / name).iterdir():
        file.replace(folder / file.name)
    (folder / name).rmdir()


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is cuda where there is one.

    Raises:
        ConfigError: there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not known", hint="choose auto, cpu, cuda, cuda:<n> or mps") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"device={name!r} is not supported", hint="choose auto, cpu, cuda, cuda:<n> or mps")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            f"device={name!r}, but torch {torch.__version__} finds no Apple GPU here", hint="choose auto or cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r}, but torch sees {torch.cuda.device_count()} cuda devices",
            hint="choose device='auto', or install a torch build for this machine's GPU and driver",
        )
    return device


def _dtype(name: str, device: torch.device, lora: LoraSpec | None) -> torch.dtype:
    require_dtype(name)
    if name == "auto":
        return torch.bfloat16 if lora is not None and device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    if lora is None and dtype != torch.float32:
        raise ConfigError(
            f"dtype={name!r} for weights in training: small updates would be rounded away",
            hint="leave dtype at auto (the learner computes in bfloat16 on cuda by itself), or train with LoRA",
        )
    return dtype


def check_files(name: str) -> None:
    """Raise `ModelLoadError` with what a local directory lacks; a name that looks like a path must be one."""
    require_local_model(name)
    directory = Path(name).expanduser()
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ModelLoadError("not a directory", hint="give the directory that holds config.json", path=name)
    contents = f"it holds: {', '.join(sorted(p.name for p in directory.iterdir())[:12]) or 'nothing'}"
    if not (directory / "config.json").is_file():
        adapter = (directory / "adapter_config.json").is_file()
        raise ModelLoadError(
            "only an adapter, no model" if adapter else "no config.json in the directory",
            hint="merge the adapter into its base model and save that" if adapter else contents,
            path=name,
        )
    if not any(any(directory.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ModelLoadError("no weights in the directory (*.safetensors)", hint=contents, path=name)
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        raise ModelLoadError("no tokenizer in the directory (tokenizer.json)", hint=contents, path=name)


def _load_model(name: str, config: Any, dtype: torch.dtype, attention: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = load(
        "model",
        name,
        lambda: AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            # Only so that the tensors of another shape are reported here too; they are refused below.
            ignore_mismatched_sizes=True,
            **options,
        ),
    )
    model, info = loaded
    absent = sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
    if absent:
        raise ModelLoadError(
            f"{len(absent)} of the model's tensors are not in the weights in that shape and would start at random: "
            f"{', '.join(absent[:4])}{' ...' if len(absent) > 4 else ''}",
            hint="config.json and the weights do not belong together, or a shard is missing",
            path=name,
        )
    return model
