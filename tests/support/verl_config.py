"""A config of verl's as people write it, and changes to it."""

from __future__ import annotations

from typing import Any

from agl_verl.config.plan import Plan, flatten, read
from agl_verl.config.renamed import rename

CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
    "data": {"train_batch_size": 8, "max_prompt_length": 400, "max_response_length": 100},
    "actor_rollout_ref": {
        "rollout": {"tensor_model_parallel_size": 1, "n": 4, "log_prob_micro_batch_size_per_gpu": 2, "temperature": 0.9,
                    "multi_turn": {"format": "hermes"}, "name": "vllm", "gpu_memory_utilization": 0.7},
        "actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 2, "optim": {"lr": 3e-6},
                  "entropy_coeff": 0, "use_kl_loss": True, "kl_loss_coef": 0.02, "kl_loss_type": "low_var_kl",
                  "clip_ratio_low": 0.1,
                  "clip_ratio_high": 0.3, "fsdp_config": {"param_offload": True}},
        "ref": {"log_prob_micro_batch_size_per_gpu": 2, "fsdp_config": {"param_offload": True}},
        "model": {"path": "some/model", "use_remove_padding": True, "enable_gradient_checkpointing": True},
    },
    "trainer": {"n_gpus_per_node": 1, "val_before_train": False, "critic_warmup": 0, "logger": ["console", "wandb"],
                "project_name": "p", "nnodes": 1, "test_freq": 4, "total_epochs": 3},
}  # fmt: skip


def changed(key: str, value: Any) -> dict[str, Any]:
    """The config with one dotted key set."""

    def put(node: dict[str, Any], parts: list[str]) -> dict[str, Any]:
        head, *rest = parts
        return {**node, head: put(node.get(head, {}), rest) if rest else value}

    return put(CONFIG, key.split("."))


def plan(config: dict[str, Any]) -> Plan:
    return read(rename(flatten(config)))
