"""An update by verl's actor: rows as verl forwards them, and with the prefixes that they share computed once.

verl's FSDP engine in two processes that take turns, with the same model, rows, PPO loss and limit of tokens per
micro-batch: log-probs of all rows, then gradients. Rows are groups of answers to a long prompt, and all prompts begin
with the same half, as those of agents do.

    python benchmarks/verl_prefixes.py [--prompts 64 512 2048] [--answers 8] [--rounds 2]
    python benchmarks/verl_prefixes.py --device cuda    # 0.5B parameters in bfloat16

On cuda verl's rows are packed, without padding, as verl has it by default; their attention is the FlashAttention that
torch has for packed rows, since a flash-attn that fits is rarely there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
SIDES = {"verl": "-", "agl": "agl_verl.trees"}
"""Side -> verl's `external_lib`."""
TOKENS, GROUPS = 64, 4
"""Of an answer; and of a batch."""


def rows(prompt_tokens: int, answers: int, vocabulary: int) -> list[dict[str, Any]]:
    """`GROUPS` groups, as verl's workers get them."""
    rng = np.random.default_rng(0)
    system, made = rng.integers(vocabulary, size=prompt_tokens // 2), []
    for _ in range(GROUPS):
        prompt = np.concatenate([system, rng.integers(vocabulary, size=prompt_tokens - system.size)])
        for _ in range(answers):
            answer, ones = rng.integers(vocabulary, size=TOKENS), np.ones(TOKENS, dtype=np.int64)
            ids = np.concatenate([prompt, answer])
            made.append(
                {
                    "prompts": prompt, "responses": answer, "input_ids": ids, "position_ids": np.arange(ids.size),
                    "response_mask": ones, "loss_mask": ones, "old_log_probs": np.full(TOKENS, -8, np.float32),
                    "advantages": rng.normal(size=TOKENS).astype(np.float32),
                }
            )  # fmt: skip
    return made


def packed_attention(
    module: Any, query: Any, key: Any, value: Any, _mask: None, scaling: float, position_ids: Any, **_: Any
) -> tuple[Any, None]:
    """Causal attention of rows that lie one after another, each beginning with position 0; as transformers calls it.

    Args:
        query: [1, heads, T, head_dim]. key, value: [1, key heads, T, head_dim]. position_ids: [1, T].
    """
    import torch
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.nonzero(position_ids[0] == 0).flatten().to(torch.int32)
    ends = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    longest = int(position_ids.max()) + 1
    keys, values = (x[0].repeat_interleave(query.shape[1] // x.shape[1], 0).transpose(0, 1) for x in (key, value))
    out = varlen_attn(
        query[0].transpose(0, 1), keys, values, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0)
    )
    return out[None], None


def serve(model: str, library: str, device: str) -> None:
    """One side: for each line of standard input, a JSON line with the seconds of an update, and log-probs."""
    import torch
    import torch.distributed as dist
    from transformers import AttentionInterface

    sys.path.insert(0, str(HERE.parent / "tests" / "verl" / "programs"))
    from forwarded import batch, engine

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import verl  # noqa: F401
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    torch.set_num_threads(os.cpu_count() or 1)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    AttentionInterface.register("packed", packed_attention)
    packed = library == "-" and device == "cuda"
    how = {"computed": "fp32" if device == "cpu" else "bf16", "attention": "packed" if packed else "sdpa"}
    made = engine(model, None if library == "-" else library, **how)
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.0
    )
    print("ready", flush=True)
    for line in sys.stdin:
        prompt_tokens, answers = json.loads(line)
        of = rows(prompt_tokens, answers, made.module.config.vocab_size)
        options = {
            "global_batch_size": len(of), "use_remove_padding": packed,
            "max_token_len_per_gpu": max(4096 if device == "cpu" else 16384, prompt_tokens + TOKENS),
        }  # fmt: skip
        started = time.monotonic()
        with made.eval_mode():
            seen = made.forward_backward_batch(batch(of, options), None, forward_only=True)
        with made.train_mode():
            made.optimizer_zero_grad()
            made.forward_backward_batch(batch(of, options), functools.partial(ppo_loss, config))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - started
        answered = [values[-TOKENS - 1 : -1] for values in seen["model_output"]["log_probs"].unbind()]
        print(json.dumps({"seconds": seconds, "logprobs": torch.cat(answered).tolist()}), flush=True)
    dist.destroy_process_group()


def compare(model: Path, prompts: list[int], answers: int, rounds: int, device: str) -> None:
    """The table."""
    sys.path.insert(0, str(HERE.parent / "tests" / "verl"))
    from verl_cpu.settings import environment

    paths = [str(HERE.parent / ".src"), str(HERE.parent / "tests" / "verl"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **(environment() if device == "cpu" else {})}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sides = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--model", str(model), "--device", device, "--side", library],
            env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for side, library in SIDES.items()
    }  # fmt: skip

    def read(side: str) -> str:
        """The next line that is the side's own; verl prints, too."""
        output = sides[side].stdout
        assert output is not None
        for line in output:
            if line.startswith(("ready", '{"seconds"')):
                return line
        raise SystemExit(f"{side}: the process ended (exit code {sides[side].wait()})")

    for side, process in sides.items():
        read(side)
        assert process.stdin is not None
        process.stdin.write(json.dumps([8, 1]) + "\n")  # the first one warms up
        process.stdin.flush()
        read(side)
    print(f"| {GROUPS} groups of {answers} answers of {TOKENS} tokens | tokens: rows / different | "
          "update: verl / with shared prefixes | ratio | log-probs differ by |")  # fmt: skip
    print("|---|---|---|---|---|")
    for prompt_tokens in prompts:
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        logprobs: dict[str, Any] = {}
        warming = int(device == "cuda")  # the first round of each length compiles its kernels
        for k in range(warming + rounds):
            for side, process in sides.items():
                assert process.stdin is not None
                process.stdin.write(json.dumps([prompt_tokens, answers]) + "\n")
                process.stdin.flush()
                facts = json.loads(read(side))
                logprobs[side] = np.array(facts["logprobs"])
                seconds[side] += [facts["seconds"]] * (k >= warming)
        verl, ours = (statistics.median(seconds[side]) for side in SIDES)
        whole = GROUPS * answers * (prompt_tokens + TOKENS)
        different = prompt_tokens // 2 + GROUPS * (prompt_tokens - prompt_tokens // 2 + answers * TOKENS)
        print(f"| prompt of {prompt_tokens:,} tokens | {whole:,} / {different:,} | {verl:.2f} / {ours:.2f} s | "
              f"{verl / ours:.1f}x | {np.abs(logprobs['verl'] - logprobs['agl']).max():.1e} |", flush=True)  # fmt: skip
    for process in sides.values():
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048], help="their tokens")
    parser.add_argument("--answers", type=int, default=8, help="of a group")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="a directory; if left out, random weights: 3M parameters, on cuda 0.5B")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.model, options.side, options.device)
        return
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no GPU")
    with tempfile.TemporaryDirectory() as scratch:
        if options.model is None:
            from learner import SIZES
            from transformers import LlamaConfig, LlamaForCausalLM

            from agl.trainer.quickstart.tokenizer import build_tokenizer

            tokenizer = build_tokenizer()
            small = {
                "vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
                "num_attention_heads": 4,
            }  # fmt: skip
            shape: dict[str, Any] = small if options.device == "cpu" else SIZES["0.5b"]
            config = LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=8192)
            LlamaForCausalLM(config).save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        compare(Path(options.model or scratch), options.prompts, options.answers, options.rounds, options.device)


if __name__ == "__main__":
    main()
