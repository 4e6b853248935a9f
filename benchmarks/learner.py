"""Learner speed: one update on merged rows against one row per call, at 2, 4, 8 and 16 turns.

    python benchmarks/learner.py [--device cuda] [--size 1.5b | --model DIR] [--json FILE]

Both sides train the same tokens to the same loss; what differs is how often the conversation is forwarded. TFLOP/s are
the model's: 6 x parameters x forwarded tokens; over the device's peak (989 dense in bfloat16 on an H100) they are its
utilisation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agl.mdp.sequence import TrainingRow, merge, unmerged
from agl.mdp.types import Call, Trajectory, Transition, float_array, int_array
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.model import load_policy

SIZES = {
    "tiny": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=400),
    "small": dict(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, vocab_size=32000
    ),
    "0.5b": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, vocab_size=151936
    ),
    "1.5b": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, vocab_size=151936
    ),
}


def model_for(arguments: argparse.Namespace, device: torch.device) -> Any:
    """The model of `--model`, or a random one of `--size`."""
    if arguments.model:
        return load_policy(arguments.model, device=str(device)).model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = SIZES[arguments.size]
    config = LlamaConfig(
        **shape,
        num_key_value_heads=2,
        max_position_embeddings=1 << 15,
        tie_word_embeddings=True,
        attn_implementation="eager" if device.type == "cpu" else "sdpa",
    )
    return LlamaForCausalLM(config).to(device)  # type: ignore[arg-type]


def conversations(arguments: argparse.Namespace, turns: int, vocabulary: int) -> list[Trajectory]:
    """`--rollouts` conversations: a prompt, then `turns` answers with an observation between each two."""
    rng = np.random.default_rng(turns)

    def tokens(n: int) -> list[int]:
        return rng.integers(0, vocabulary, n).tolist()

    trajectories = []
    for r in range(arguments.rollouts):
        history, transitions = tokens(arguments.prompt), []
        for k in range(turns):
            answer = tokens(arguments.answer)
            call = Call(
                id=f"{r}/{k}",
                rollout_id=str(r),
                attempt=1,
                index=k,
                agent="agent",
                policy="policy",
                policy_version=0,
                prompt_ids=int_array(history),
                response_ids=int_array(answer),
                logprobs=float_array([-np.log(vocabulary)] * len(answer)),
            )
            transitions.append(Transition(call))
            history = [*history, *answer, *tokens(arguments.observation)]
        trajectories.append(Trajectory(str(r), 1, "policy", "group", tuple(transitions)))
    return trajectories


def seconds_per_update(
    learner: Learner, rows: list[TrainingRow], repeats: int, device: torch.device
) -> tuple[float, float]:
    """(median seconds of an update, its loss). The learning rate is 0, so every update computes the same."""
    loss = learner.update(rows, lr_scale=0.0)["loss"]
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        learner.update(rows, lr_scale=0.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times), loss


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="a Hugging Face directory; without it a random model of --size")
    parser.add_argument("--size", choices=SIZES, help="tiny on CPU, 0.5b on cuda unless given")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=24, help="tokens sampled per turn")
    parser.add_argument("--observation", type=int, default=16, help="tokens between two answers")
    parser.add_argument("--max-tokens-per-microbatch", type=int, help="the learner's default unless given")
    parser.add_argument("--autocast", choices=["bfloat16", "float32"], help="the learner's default unless given")
    parser.add_argument("--threads", type=int, help="torch threads on CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    arguments.size = arguments.size or ("tiny" if device.type == "cpu" else "0.5b")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = model_for(arguments, device)
    learner = Learner(
        model,
        LearnerConfig(autocast=arguments.autocast, max_tokens_per_microbatch=arguments.max_tokens_per_microbatch),
        device,
    )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    parameters = sum(p.numel() for p in model.parameters())

    results = []
    widths = {"rows": 6, "forwarded": 10, "trained": 8, "s/update": 9, "trained tok/s": 13, "TFLOP/s": 8}
    print(f"{'turns':>5} {'':>10} " + " ".join(f"{name:>{width}}" for name, width in widths.items()))
    for turns in arguments.turns:
        data = conversations(arguments, turns, vocabulary)
        advantages = {t.call.id: (-1.0) ** t.call.index for x in data for t in x.transitions}
        entry: dict[str, Any] = {"turns": turns}
        for name, how in (("merged", merge), ("per turn", unmerged)):
            rows = [row for t in data for row in how(t, advantages)]
            seconds, loss = seconds_per_update(learner, rows, arguments.repeats, device)
            trained, forwarded = sum(row.n_actions for row in rows), sum(map(len, rows))
            tflops = 6 * parameters * forwarded / seconds / 1e12
            entry[name.replace(" ", "_")] = {
                "rows": len(rows),
                "forwarded_tokens": forwarded,
                "model_tflops_per_second": tflops,
                "trained_tokens": trained,
                "seconds": seconds,
                "trained_tokens_per_second": trained / seconds,
                "loss": loss,
            }
            print(
                f"{turns:>5} {name:>10} {len(rows):>6} {forwarded:>10} {trained:>8} {seconds:>9.3f} "
                f"{trained / seconds:>13.0f} {tflops:>8.3f}"
            )
        entry["speedup"] = entry["per_turn"]["seconds"] / entry["merged"]["seconds"]
        entry["token_ratio"] = entry["per_turn"]["forwarded_tokens"] / entry["merged"]["forwarded_tokens"]
        print(f"{turns:>5} {'ratio':>10} {entry['token_ratio']:>17.2f} {'':>8} {entry['speedup']:>8.2f}x")
        results.append(entry)
    if arguments.json:
        facts = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "parameters": parameters,
            "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "autocast": str(learner.autocast or next(model.parameters()).dtype).removeprefix("torch."),
            "results": results,
        }
        arguments.json.write_text(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
