"""Learner speed: one update on the prefix trees of whole groups, on one row per rollout, and on one row per call. The
side "per micro-batch" is "group trees" where each micro-batch computes its rows' common beginning for itself.

    python benchmarks/learner.py [--prompt 2000 --turns 4] [--device cuda] [--size 1.5b | --model DIR] [--json FILE]

All sides train the same tokens to the same loss; what differs is how often a conversation and a task's prompt are
forwarded. TFLOP/s are the model's: 6 x parameters x forwarded tokens; over the device's peak (989 dense in bfloat16 on
an H100) they are its utilisation. Memory is the largest that a process of its own held for one update, or for the last
of `--updates`, beyond what it held before the first: model, data and libraries. From the second on, AdamW's moments
are there from the beginning.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from agl.mdp.sequence import TrainingRow, merge, unmerged
from agl.mdp.types import Call, Trajectory, Transition, float_array, int_array
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.learner.microbatches import MicroBatch
from agl.trainer.local.learner.prefix_trees import PrefixTrees, begin_once
from agl.trainer.local.memory import update_memory, with_adapters
from agl.trainer.local.model import LoadedPolicy, add_adapter, load_policy

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
    "3b": dict(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, vocab_size=151936
    ),
}


def model_for(arguments: argparse.Namespace, device: torch.device) -> Any:
    """The model of `--model`, or a random one of `--size`."""
    lora = LoraSpec(arguments.lora) if arguments.lora else None
    if arguments.model:
        return load_policy(arguments.model, device=str(device), lora=lora).model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = SIZES[arguments.size]
    config = LlamaConfig(
        **shape,
        num_key_value_heads=2,
        max_position_embeddings=1 << 15,
        tie_word_embeddings=True,
        attn_implementation="eager" if device.type == "cpu" else "sdpa",
    )
    # As a policy with an adapter is loaded.
    kind = torch.bfloat16 if lora is not None and device.type == "cuda" else torch.float32
    with device:  # Where random numbers are made fast.
        model: Any = LlamaForCausalLM(config)
    if lora is None:
        return model
    plain = LoadedPolicy(model.to(kind), None, device, kind, config.max_position_embeddings)
    return add_adapter(plain, lora).model


def conversations(arguments: argparse.Namespace, turns: int, vocabulary: int) -> list[Trajectory]:
    """`--rollouts` conversations: a prompt, then `turns` answers with an observation between each two. `--group` of
    them begin with the same prompt."""
    rng = np.random.default_rng(turns)

    def tokens(n: int) -> list[int]:
        return rng.integers(0, vocabulary, n).tolist()

    trajectories = []
    prompt: list[int] = []
    for r in range(arguments.rollouts):
        if r % arguments.group == 0:
            prompt = tokens(arguments.prompt)
        history, transitions = prompt, []
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


class BeginsEachTime(Learner):
    """Computes what micro-batches have in common in each of them."""

    def _microbatches(self, *arguments: Any) -> Iterator[tuple[list[int], MicroBatch]]:
        def apart(trees: PrefixTrees, batches: Seq[list[int]], _worth: float, block: int) -> Any:
            return begin_once(trees, batches, float("inf"), block)

        with patch("agl.trainer.local.learner.learner.begin_once", apart):
            yield from super()._microbatches(*arguments)


SIDES = {
    "group trees": (merge, True, Learner),
    "per micro-batch": (merge, True, BeginsEachTime),
    "per rollout": (merge, False, Learner),
    "per call": (unmerged, False, Learner),
}
"""How calls become rows, whether rollouts share what they begin with, and the learner."""


def update(learner: Learner, rows: list[TrainingRow], device: torch.device) -> tuple[float, dict[str, float]]:
    """(seconds of an update, its metrics). The learning rate is 0, so every update computes the same."""
    started = time.perf_counter()
    metrics = learner.update(rows, lr_scale=0.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, metrics


def prepare(
    arguments: argparse.Namespace, turns: int, sides: Seq[str], device: torch.device
) -> dict[str, tuple[Learner, list[TrainingRow]]]:
    """Each side's learner of one model, and its rows."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = model_for(arguments, device)
    data = conversations(arguments, turns, int(model.get_input_embeddings().weight.shape[0]))
    advantages = {t.call.id: (-1.0) ** t.call.index for x in data for t in x.transitions}
    prepared = {}
    for side in sides:
        how, share, kind = SIDES[side]
        config = LearnerConfig(
            autocast=arguments.autocast,
            max_tokens_per_microbatch=arguments.max_tokens_per_microbatch,
            share_prefixes=share,
        )
        rows = [row for t in data for row in how(t, advantages)]
        prepared[side] = kind(model, config, device), rows
    return prepared


def predicted(arguments: argparse.Namespace, row_tokens: int, device: torch.device) -> int:
    """What an update takes by `update_memory`, in addition to the weights."""
    plain = argparse.Namespace(**vars(arguments) | {"lora": None})
    model = model_for(plain, torch.device("cpu" if arguments.model else "meta"))
    config = LearnerConfig(share_prefixes=True)
    tokens = arguments.max_tokens_per_microbatch or (4096 if device.type == "cpu" else 16384)
    needed = update_memory(
        model, config, tokens, row_tokens=row_tokens, trained=tokens // 2, autocast=device.type == "cuda"
    )
    weights = sum(p.numel() for p in model.parameters())
    if arguments.lora:
        return with_adapters(model, arguments.lora, needed).total - 2 * weights
    return needed.total - 4 * weights


def peak_bytes(arguments: argparse.Namespace, turns: int, side: str) -> int:
    """What one update takes, in a process of its own."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # It needs the room.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_bytes, arguments, turns, side).result()


def _peak_bytes(arguments: argparse.Namespace, turns: int, side: str) -> int:
    device = torch.device(arguments.device)
    learner, rows = prepare(arguments, turns, [side], device)[side]
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        for _ in range(arguments.updates):
            torch.cuda.reset_peak_memory_stats(device)
            learner.update(rows, lr_scale=0.0)
        return torch.cuda.max_memory_allocated(device) - before
    before = _resident("VmRSS")
    for _ in range(arguments.updates):
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
        learner.update(rows, lr_scale=0.0)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    """Bytes of memory of this process, now ("VmRSS") or at most ("VmHWM")."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="a Hugging Face directory; without it a random model of --size")
    parser.add_argument("--size", choices=SIZES, help="tiny on CPU, 0.5b on cuda unless given")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="rollouts that begin with the same prompt")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["group trees", "per rollout", "per call"])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=24, help="tokens sampled per turn")
    parser.add_argument("--observation", type=int, default=16, help="tokens between two answers")
    parser.add_argument("--max-tokens-per-microbatch", type=int, help="the learner's default unless given")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter instead of all weights")
    parser.add_argument("--updates", type=int, default=1, help="whose last one's memory is measured")
    parser.add_argument("--formula", action="store_true", help="also print the memory that the formula predicts")
    parser.add_argument("--autocast", choices=["bfloat16", "float32"], help="the learner's default unless given")
    parser.add_argument("--threads", type=int, help="torch threads on CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    # As the policy process does: an adapter's first gradients are that small.
    torch.set_flush_denormal(True)
    device = torch.device(arguments.device)
    arguments.size = arguments.size or ("tiny" if device.type == "cpu" else "0.5b")

    results = []
    widths = {"rows": 6, "forwarded": 10, "trained": 8, "s/update": 9, "trained tok/s": 13, "TFLOP/s": 8, "MB": 7}
    print(f"{'turns':>5} {'':>15} " + " ".join(f"{name:>{width}}" for name, width in widths.items()) + "  ratios")
    for turns in arguments.turns:
        prepared = prepare(arguments, turns, arguments.sides, device)
        model = next(iter(prepared.values()))[0]._model
        parameters = sum(p.numel() for p in model.parameters())
        seconds: dict[str, list[float]] = {side: [] for side in prepared}
        metrics: dict[str, dict[str, float]] = {}
        # In turns, after one of each to warm up.
        for k in range(arguments.repeats + 1):
            for side, (learner, rows) in prepared.items():
                took, metrics[side] = update(learner, rows, device)
                if k:
                    seconds[side].append(took)
        entry: dict[str, Any] = {"turns": turns, "parameters": parameters, "sides": {}}
        for side, (_, rows) in prepared.items():
            took, forwarded = statistics.median(seconds[side]), metrics[side]["forwarded_tokens"]
            entry["sides"][side] = found = {
                "rows": len(rows),
                "forwarded_tokens": forwarded,
                "unique_tokens": metrics[side]["unique_tokens"],
                "model_tflops_per_second": 6 * parameters * forwarded / took / 1e12,
                "trained_tokens": metrics[side]["tokens"],
                "seconds": took,
                "trained_tokens_per_second": metrics[side]["tokens"] / took,
                "loss": metrics[side]["loss"],
                "peak_bytes": peak_bytes(arguments, turns, side),
            }
            first = entry["sides"][arguments.sides[0]]
            found["token_ratio"] = forwarded / first["forwarded_tokens"]
            found["time_ratio"] = took / first["seconds"]
            print(
                f"{turns:>5} {side:>15} {len(rows):>6} {forwarded:>10.0f} {found['trained_tokens']:>8.0f} {took:>9.3f} "
                f"{found['trained_tokens_per_second']:>13.0f} {found['model_tflops_per_second']:>8.3f} "
                f"{found['peak_bytes'] / 1e6:>7.0f}  {found['token_ratio']:.2f} tokens, {found['time_ratio']:.2f} time"
            )
        results.append(entry)
        if arguments.formula:
            longest = max(len(row) for _, rows in prepared.values() for row in rows)
            print(f"{turns:>5} by the formula, at most: {predicted(arguments, longest, device) / 1e6:.0f} MB")
    if arguments.json:
        facts = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "results": results,
        }
        arguments.json.write_text(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
