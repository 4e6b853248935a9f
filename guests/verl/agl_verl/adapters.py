"""Adapters in verl: which it can have, and a model with one as plain transformers loads it.

Invariant: importing this module loads no torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from agl.errors import CheckpointError, ConfigError
from agl_verl.config.plan import MODEL, Plan

EMBEDDINGS = ("embed_tokens", "lm_head", "embed_in", "embed_out", "wte")
"""Names of the embedding and of the output layer in transformers' models."""
_META = "lora_train_meta.json"
_LORA = re.compile(r"base_model\.model\.(.+)\.lora_A\.default\.weight")


def check_targets(plan: Plan) -> None:
    """Refuse adapters that verl does not hand to vLLM, or saves as another model where embeddings share weights.

    Raises:
        ConfigError: with the layer.
    """
    targets = plan.lora_targets
    if not plan.lora_rank or targets == "all-linear":
        return
    for name in EMBEDDINGS:
        if isinstance(targets, str):
            adapted = name in targets or re.fullmatch(targets, f"model.{name}") or re.fullmatch(targets, name)
        else:
            adapted = any(name == target.rpartition(".")[2] for target in targets)
        if adapted:
            raise ConfigError(
                f"{MODEL}.target_modules={targets!r} adapts {name}, and vLLM has no adapters for that layer of many "
                "models",
                hint="leave it out, or train on one machine with agl.GRPO(lora=)",
            )


def check_tokens(plan: Plan, directory: str) -> None:
    """Refuse to train adapters on a model whose chat template added tokens: verl would not train their rows.

    Args:
        directory: of the prepared model, or a hub id.

    Raises:
        ConfigError: how many tokens, and what to do.
    """
    file = Path(directory) / "config.json"
    if not plan.lora_rank or not file.is_file():
        return
    # The key is `agl.trainer.local.embeddings.ADDED_TOKENS`, which loads torch.
    added = json.loads(file.read_text(encoding="utf-8")).get("agl_added_tokens")
    if added:
        raise ConfigError(
            f"{MODEL}.lora_rank={plan.lora_rank} with {len(added)} tokens that the chat template added to the model, "
            "whose rows of the embedding verl's adapters leave as they began",
            hint="choose a chat_template whose tokens the model has, train all weights, or use agl.GRPO(lora=), which "
            "trains these rows",
        )


def merged(folder: Path) -> Path:
    """The Hugging Face directory of what verl's trainer saved in `folder` (`actor`): its own, or of a model with an
    adapter one made here, as verl writes that in peft's names, which transformers does not know.

    Raises:
        CheckpointError: it is not the model that its configuration says.
    """
    saved = folder / "huggingface"
    target = folder / "merged"
    if not (folder / _META).is_file():
        return saved
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    weights = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
    layers = [match[1] for name in weights if (match := _LORA.fullmatch(name))]
    if not layers:
        return saved
    facts = json.loads((folder / _META).read_text(encoding="utf-8"))
    dtype = next(iter(weights.values())).dtype
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved), dtype=dtype)
    config = LoraConfig(r=facts["r"], lora_alpha=facts["lora_alpha"], target_modules=layers, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    missing, unknown = adapted.load_state_dict(weights, strict=False)
    tied = {f"base_model.model.{name}" for name in model.all_tied_weights_keys}
    if unknown or set(missing) - tied:
        raise CheckpointError(
            f"verl's model with an adapter has other weights than its configuration: "
            f"{', '.join([*unknown, *sorted(set(missing) - tied)][:4])}",
            hint="please report this with the versions of verl and transformers",
            path=saved,
        )
    whole: Any = adapted.merge_and_unload()  # type: ignore[operator]
    if (saved / "generation_config.json").is_file():
        whole.generation_config = GenerationConfig.from_pretrained(saved)
    whole.save_pretrained(target)
    AutoTokenizer.from_pretrained(saved).save_pretrained(target)
    return target
