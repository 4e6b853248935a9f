"""Small random models of the families that people train, by the name that people give the family."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_engine import SIZES as TINY
from tiny_engine import tiny_tokenizer

CONTEXT = 1024
"""Positions of every model here."""
SIZES: dict[str, Any] = {
    # Each family attends as it does by default.
    **{name: value for name, value in TINY.items() if name != "attn_implementation"},
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}
SLIDING_FIRST = ["sliding_attention", "full_attention"]
OLD_NAMES: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "n_ctx": CONTEXT}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def rope(kind: str, **others: Any) -> dict[str, Any]:
    """The configuration's entry of one kind of rope scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **others}}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        config: transformers' class of its configuration. changes: of `SIZES`; `...` for what the class does not have.
        examples: models that people know.
    """

    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    examples: str = ""


LONG_ROPE = {
    **rope("longrope", short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 4.0, 8.0]),
    "original_max_position_embeddings": 256,
}
LLAMA3_ROPE = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=256)

FAMILIES = {
    "Llama 2": Family("LlamaConfig", {"num_key_value_heads": 4}, "Llama-2-7b-chat, TinyLlama, Vicuna"),
    "Llama 3": Family("LlamaConfig", {}, "Meta-Llama-3-8B-Instruct"),
    "Llama 3.1": Family("LlamaConfig", LLAMA3_ROPE, "Llama-3.1-8B-Instruct, Llama-3.2-1B-Instruct"),
    "Llama, linear rope": Family("LlamaConfig", rope("linear", factor=4.0), "longchat-7b-16k"),
    "Llama, dynamic NTK": Family("LlamaConfig", rope("dynamic", factor=4.0), "Nous-Hermes 8k"),
    "Llama, YaRN": Family("LlamaConfig", YARN, "Yarn-Llama-2-7b-64k"),
    "Llama 4": Family(
        "Llama4TextConfig",
        {**EXPERTS, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 64,
         "layer_types": ["chunked_attention", "full_attention"]},
        "Llama-4-Scout",
    ),
    "Qwen 2.5": Family("Qwen2Config", {}, "Qwen2.5-0.5B-Instruct"),
    "Qwen 2, sliding": Family(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "Qwen2-7B, window on"
    ),
    "Qwen 3": Family("Qwen3Config", {}, "Qwen3-0.6B"),
    "Qwen 3 MoE": Family("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4}, "Qwen3-30B-A3B"),
    "Qwen 3 Next": Family(
        "Qwen3NextConfig",
        {**EXPERTS, "num_experts": 4, "layer_types": ["linear_attention", "full_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "shared_expert_intermediate_size": 24},
        "Qwen3-Next-80B-A3B",
    ),
    "Mistral": Family("MistralConfig", {"sliding_window": None}, "Mistral-7B-Instruct-v0.2, v0.3"),
    "Mistral, sliding": Family("MistralConfig", {"sliding_window": 64}, "Mistral-7B-Instruct-v0.1, Zephyr"),
    "Mixtral": Family("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}, "Mixtral-8x7B"),
    "Ministral": Family("MinistralConfig", {"sliding_window": 64, "layer_types": SLIDING_FIRST}, "Ministral-8B"),
    "Gemma": Family("GemmaConfig", {"num_key_value_heads": 1}, "gemma-2b-it"),
    "Gemma 2": Family("Gemma2Config", {"sliding_window": 64, "layer_types": SLIDING_FIRST}, "gemma-2-2b-it"),
    "Gemma 3": Family("Gemma3TextConfig", {"sliding_window": 64, "layer_types": SLIDING_FIRST}, "gemma-3-1b-it"),
    "Gemma 3n": Family(
        "Gemma3nTextConfig",
        {"num_hidden_layers": 4, "intermediate_size": [64] * 4, "num_kv_shared_layers": 2, "laurel_rank": 4,
         "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 64,
         "layer_types": SLIDING_FIRST * 2},
        "gemma-3n-E2B-it",
    ),
    "Gemma 4": Family("Gemma4TextConfig", {"global_head_dim": 16, "layer_types": SLIDING_FIRST}, "gemma-4-E4B-it"),
    "Phi-2": Family("PhiConfig", {"num_key_value_heads": 4}, "phi-2"),
    "Phi-3": Family("Phi3Config", {}, "Phi-3-mini-4k-instruct, phi-4"),
    "Phi-3, long rope": Family("Phi3Config", LONG_ROPE, "Phi-3-mini-128k, Phi-3.5-mini, Phi-4-mini"),
    "gpt-oss": Family(
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "layer_types": SLIDING_FIRST, **YARN},
        "gpt-oss-20b",
    ),
    "DeepSeek V2": Family("DeepseekV2Config", {**EXPERTS, **LATENT, "topk_method": "greedy"}, "DeepSeek-V2-Lite-Chat"),
    "DeepSeek V3": Family("DeepseekV3Config", {**EXPERTS, **LATENT}, "DeepSeek-V3, R1, Kimi K2, Moonlight"),
    "Cohere": Family("CohereConfig", {}, "c4ai-command-r-v01"),
    "Cohere 2": Family("Cohere2Config", {"sliding_window": 64, "layer_types": SLIDING_FIRST}, "c4ai-command-r7b"),
    "OLMo 2": Family("Olmo2Config", {}, "OLMo-2-1B-Instruct"),
    "OLMo 3": Family("Olmo3Config", {"sliding_window": 64, "layer_types": SLIDING_FIRST}, "Olmo-3-7B-Instruct"),
    "SmolLM 3": Family("SmolLM3Config", {}, "SmolLM3-3B"),
    "Granite": Family("GraniteConfig", {}, "granite-3.3-2b-instruct"),
    "Granite 4": Family(
        "GraniteMoeHybridConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4,
         "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "shared_intermediate_size": 24},
        "granite-4.0-h-tiny",
    ),
    "GLM 4": Family("Glm4Config", {}, "GLM-4-9B-0414"),
    "StarCoder 2": Family("Starcoder2Config", {}, "starcoder2-15b-instruct"),
    "StableLM 2": Family("StableLmConfig", {}, "stablelm-2-1_6b-chat"),
    "Falcon": Family(
        "FalconConfig",
        {"head_dim": ..., "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
        "falcon-7b-instruct",
    ),
    "Falcon, ALiBi": Family(
        "FalconConfig", {"head_dim": ..., "num_key_value_heads": ..., "alibi": True}, "falcon-rw-1b"
    ),
    "Nemotron": Family("NemotronConfig", {}, "Nemotron-Mini-4B-Instruct"),
    "EXAONE 4": Family("Exaone4Config", {"sliding_window": 64, "layer_types": SLIDING_FIRST}, "EXAONE-4.0-1.2B"),
    "GPT-2": Family("GPT2Config", OLD_NAMES, "gpt2"),
    "GPT-J": Family("GPTJConfig", {**OLD_NAMES, "rotary_dim": 4}, "gpt-j-6b"),
    "GPT-NeoX": Family("GPTNeoXConfig", {}, "pythia-410m, dolly-v2"),
    "GPT-Neo": Family(
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 64},
        "gpt-neo-125m, TinyStories",
    ),
    "OPT": Family("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "opt-350m"),
    "BLOOM": Family("BloomConfig", {"n_layer": 2, "n_head": 4}, "bloomz-560m"),
    "MPT": Family("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}, "mpt-7b-chat"),
    "LFM2": Family(
        "Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "LFM2-1.2B"
    ),
    "RecurrentGemma": Family(
        "RecurrentGemmaConfig",
        {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 64},
        "recurrentgemma-2b-it",
    ),
    "Mamba": Family("MambaConfig", {"state_size": 4}, "mamba-130m"),
    "Mamba 2": Family("Mamba2Config", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1}, "mamba2-130m"),
    "Falcon H1": Family(
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
        "Falcon-H1-0.5B-Instruct",
    ),
}  # fmt: skip


def make_model(name: str, **changes: Any) -> Any:
    """The random model of a family, in eval mode, on the CPU."""
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(0)
    settings = {name: value for name, value in (SIZES | family.changes | changes).items() if value is not ...}
    config = getattr(transformers, family.config)(**settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def write_model(name: str, directory: Path, **changes: Any) -> Path:
    """Its directory, with a tokenizer of bytes."""
    make_model(name, **changes).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
