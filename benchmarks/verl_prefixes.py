"""An update by verl's actor: rows as verl forwards them, and with the prefixes that they share computed once.

verl's FSDP engine in two processes that take turns, with the same model, rows, PPO loss and limit of tokens per
micro-batch: log-probs of all rows, then gradients. Rows are groups of answers to a long prompt, and all prompts begin
with the same half, as those of agents do.

    python benchmarks/verl_prefixes.py [--prompts 64 512 2048] [--answers 8] [--rounds 2]
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


def serve(model: str, library: str) -> None:
    """One side: for each line of standard input, a JSON line with the seconds of an update, and log-probs."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(HERE.parent / "tests" / "verl" / "programs"))
    from forwarded import batch, engine

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import verl  # noqa: F401
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    torch.set_num_threads(os.cpu_count() or 1)
    dist.init_process_group("gloo")
    made = engine(model, None if library == "-" else library)
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.0
    )
    print("ready", flush=True)
    for line in sys.stdin:
        prompt_tokens, answers = json.loads(line)
        of = rows(prompt_tokens, answers, made.module.config.vocab_size)
        options = {"global_batch_size": len(of), "max_token_len_per_gpu": max(4096, prompt_tokens + TOKENS)}
        started = time.monotonic()
        with made.eval_mode():
            seen = made.forward_backward_batch(batch(of, options), None, forward_only=True)
        with made.train_mode():
            made.optimizer_zero_grad()
            made.forward_backward_batch(batch(of, options), functools.partial(ppo_loss, config))
        seconds = time.monotonic() - started
        answered = [values[-TOKENS - 1 : -1] for values in seen["model_output"]["log_probs"].unbind()]
        print(json.dumps({"seconds": seconds, "logprobs": torch.cat(answered).tolist()}), flush=True)
    dist.destroy_process_group()


def compare(model: Path, prompts: list[int], answers: int, rounds: int) -> None:
    """The table."""
    sys.path.insert(0, str(HERE.parent / "tests" / "verl"))
    from verl_cpu.settings import environment

    paths = [str(HERE.parent / ".src"), str(HERE.parent / "tests" / "verl"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **environment(), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sides = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--model", str(model), "--side", library], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
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
        for _ in range(rounds):
            for side, process in sides.items():
                assert process.stdin is not None
                process.stdin.write(json.dumps([prompt_tokens, answers]) + "\n")
                process.stdin.flush()
                facts = json.loads(read(side))
                logprobs[side] = np.array(facts["logprobs"])
                seconds[side].append(facts["seconds"])
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
    parser.add_argument("--model", help="a directory; a model of 3M parameters made here, if left out")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.model, options.side)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if options.model is None:
            from transformers import LlamaConfig, LlamaForCausalLM

            from agl.trainer.quickstart.tokenizer import build_tokenizer

            tokenizer = build_tokenizer()
            config = LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
            )  # fmt: skip
            LlamaForCausalLM(config).save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        compare(Path(options.model or scratch), options.prompts, options.answers, options.rounds)


if __name__ == "__main__":
    main()
