"""verl's FSDP engine on given rows: writes what it computes for them, and the gradient of verl's PPO loss.

    forwarded.py MODEL ROWS OUT LIBRARY RANK RANKS PORT MAX_TOKENS LORA_RANK

LIBRARY is verl's `external_lib`, or "-". ROWS is a list of verl's fields as arrays, of which each rank has its part.
OUT/RANK.pt gets "log_probs" and "entropy" of each of the rank's rows, "grad.NAME" of each weight, and the number of
"micro_batches".
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TEMPERATURE = 0.7


def batch(of: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """As verl's trainer hands rows to a worker."""
    from verl.utils import tensordict_utils as tu

    tensors = {
        name: torch.nested.as_nested_tensor([torch.from_numpy(row[name]) for row in of], layout=torch.jagged)
        for name in of[0]
        if not isinstance(of[0][name], str)
    }
    texts = {name: [row[name] for row in of] for name in of[0] if isinstance(of[0][name], str)}
    always = {"temperature": TEMPERATURE, "use_dynamic_bsz": True, "use_remove_padding": False}
    return tu.get_tensordict({**tensors, **texts}, {**always, **options})


def engine(
    model: str, library: str | None, lora_rank: int = 0, *, computed: str = "fp32", attention: str = "sdpa"
) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import FSDPEngineWithLMHead

    precision = {"param_dtype": computed, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    made = FSDPEngineWithLMHead(
        HFModelConfig(
            path=model, external_lib=library, use_remove_padding=attention != "sdpa",
            override_config={"attn_implementation": attention},
            enable_gradient_checkpointing=True, lora_rank=lora_rank, target_modules="all-linear",
        ),
        FSDPEngineConfig(
            strategy="fsdp2", model_dtype="fp32", mixed_precision=precision, use_torch_compile=False,
            wrap_policy={"min_num_params": 0},
        ),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        CheckpointConfig(),
    )  # fmt: skip
    made.initialize()
    return made


def main(
    model: str, rows: str, out: str, library: str, rank: str, ranks: str, port: str, max_tokens: str, lora: str
) -> None:
    os.environ.update(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import verl  # noqa: F401
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    made = engine(model, None if library == "-" else library, int(lora))
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01
    )
    everything = torch.load(rows, weights_only=False)
    part = len(everything) // int(ranks)
    mine = everything[int(rank) * part :][:part]
    options = {
        "global_batch_size": len(everything), "calculate_entropy": True, "max_token_len_per_gpu": int(max_tokens)
    }  # fmt: skip
    with made.eval_mode():
        seen = made.forward_backward_batch(batch(mine, options), None, forward_only=True)
    with made.train_mode():
        made.optimizer_zero_grad()
        trained = made.forward_backward_batch(batch(mine, options), functools.partial(ppo_loss, config))
        learned = {name: weight for name, weight in made.module.named_parameters() if weight.requires_grad}
        result: dict[str, Any] = {f"grad.{name}": weight.grad.full_tensor() for name, weight in learned.items()}
    result |= {name: list(values.unbind()) for name, values in seen["model_output"].items()}
    result["micro_batches"] = len(trained["loss"])
    torch.save(result, Path(out) / f"{rank}.pt")
    dist.barrier()
    if rank == "0":
        made.module.config.save_pretrained(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
