"""Tokens per second of the local engine against `model.generate`: concurrent agents, two turns, uneven answers.

    python benchmarks/engine.py                     # a random model of quickstart size, on CPU
    python benchmarks/engine.py --device cuda --size 0.5b --agents 128 [--model DIR]

Four ways to sample the same conversations: `generate` in a loop, one call at a time (what agents do that share a model
behind a lock); `generate` on a static batch per turn (which needs all agents in lockstep and runs until its longest
answer ends); the engine in this process; the engine in its policy process, called by asyncio tasks. Only tokens that an
agent requested are counted. `generate` computes no log-probs, the engine does. On cuda all compute in bfloat16: the
first three on weights of that dtype, the policy process by autocast over the float32 weights that it trains.

Then the prefix cache: the rollouts of one task, over several turns, with one cache for all of them, with a cache for
each conversation, and with none; prompt tokens computed, and seconds of the sides in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from learner import SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agl.trainer.engines.base import Request, Sampling
from agl.trainer.local.engine.engine import LocalEngine
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.local.protocol import Failed, Finished

TURNS = 2
CONTEXT = 4096
ROLLOUTS, ROLLOUT_TURNS, PROMPT = 8, 4, 2000
"""Of the cases with a shared prompt."""


@dataclass(frozen=True)
class Agent:
    """One conversation: the first prompt, then per turn how many tokens to sample and what the tool answers."""

    prompt: np.ndarray
    lengths: tuple[int, ...]
    results: tuple[np.ndarray, ...]


def conversations(n: int, vocabulary: int, prompt_tokens: int, answer_tokens: int) -> list[Agent]:
    """`n` agents whose answers have 1/2 to 3/2 of `answer_tokens` tokens."""
    rng = np.random.default_rng(0)

    def text(size: int) -> np.ndarray:
        return rng.integers(1, vocabulary, size).astype(np.int32)

    return [
        Agent(
            text(int(rng.integers(prompt_tokens // 2, prompt_tokens * 3 // 2))),
            tuple(int(x) for x in rng.integers(answer_tokens // 2, answer_tokens * 3 // 2 + 1, TURNS)),
            tuple(text(12) for _ in range(TURNS)),
        )
        for _ in range(n)
    ]


def generate(model, prompts: list[np.ndarray], length: int) -> list[np.ndarray]:
    """One `model.generate` call on prompts padded at the left; exactly `length` tokens each."""
    width = max(p.size for p in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, p in enumerate(prompts):
        ids[i, width - p.size :] = torch.from_numpy(p.astype(np.int64))
        mask[i, width - p.size :] = 1
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            top_k=0,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
        )
    return [row.astype(np.int32) for row in out[:, width:].cpu().numpy()]


def loop(model, agents: list[Agent]) -> None:
    """One call at a time."""
    for agent in agents:
        prompt = agent.prompt
        for length, result in zip(agent.lengths, agent.results, strict=True):
            prompt = np.concatenate([prompt, generate(model, [prompt], length)[0], result])


def static(model, agents: list[Agent]) -> None:
    """All agents in one batch per turn."""
    prompts = [agent.prompt for agent in agents]
    for turn in range(TURNS):
        answers = generate(model, prompts, max(agent.lengths[turn] for agent in agents))
        prompts = [
            np.concatenate([p, a[: agent.lengths[turn]], agent.results[turn]])
            for p, a, agent in zip(prompts, answers, agents, strict=True)
        ]


def in_process(engine: LocalEngine, agents: list[Agent]) -> None:
    """Every agent sends its next request as soon as its last is answered."""
    engine.drop_caches()
    prompts, turns = [agent.prompt for agent in agents], [0] * len(agents)

    def submit(i: int) -> None:
        sampling = Sampling(max_tokens=agents[i].lengths[turns[i]], seed=i)
        engine.submit(i, prompts[i], sampling)

    for i in range(len(agents)):
        submit(i)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                i = event.request_id
                prompts[i] = np.concatenate([prompts[i], event.completion.token_ids, agents[i].results[turns[i]]])
                turns[i] += 1
                if turns[i] < TURNS:
                    submit(i)


async def through_process(policy: LocalPolicy, agents: list[Agent], run: int) -> None:
    """One asyncio task per agent."""

    async def talk(i: int, agent: Agent) -> None:
        prompt = agent.prompt
        for length, result in zip(agent.lengths, agent.results, strict=True):
            sampling = Sampling(max_tokens=length, seed=i)
            answer = await policy.generate(Request(prompt, sampling, session=f"{run}-{i}"))
            prompt = np.concatenate([prompt, answer.token_ids, result])

    await asyncio.gather(*(talk(i, agent) for i, agent in enumerate(agents)))


def shared_prompt(engine: LocalEngine, prompt: np.ndarray, apart: bool) -> int:
    """Rollouts of one task, each of several turns; returns how many prompt tokens were computed.

    Args:
        apart: whether conversations share nothing. A cache is kept apart by policy, and the model has no adapters.
    """
    engine.drop_caches()
    before = engine.computed_tokens
    rng = np.random.default_rng(1)
    prompts, turns = [prompt] * ROLLOUTS, [0] * ROLLOUTS

    def submit(i: int) -> None:
        sampling = Sampling(max_tokens=16, seed=ROLLOUT_TURNS * i + turns[i])
        engine.submit(i, prompts[i], sampling, policy=str(i) if apart else "policy")

    for i in range(ROLLOUTS):
        submit(i)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                i, result = event.request_id, rng.integers(1, engine.vocabulary, 24).astype(np.int32)
                prompts[i] = np.concatenate([prompts[i], event.completion.token_ids, result])
                turns[i] += 1
                if turns[i] < ROLLOUT_TURNS:
                    submit(i)
    return engine.computed_tokens - before


def compare_caches(model, tokenizer, device: torch.device, repeats: int) -> dict[str, dict[str, float]]:
    """Print and return prompt tokens computed and seconds with each kind of cache."""
    cached, uncached = (
        LocalEngine(model, tokenizer, device=device, max_context=CONTEXT, prefix_cache_tokens=tokens)
        for tokens in (None, 0)
    )
    sides = {"one cache": (cached, False), "a cache per conversation": (cached, True), "no cache": (uncached, True)}
    prompt = np.random.default_rng(0).integers(1, cached.vocabulary, PROMPT).astype(np.int32)
    computed: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, (engine, apart) in sides.items():
            start = time.perf_counter()
            computed[name] = shared_prompt(engine, prompt, apart)
            seconds[name].append(time.perf_counter() - start)
    print(f"\n{ROLLOUTS} rollouts x {ROLLOUT_TURNS} turns over one prompt of {PROMPT} tokens")
    base = statistics.median(seconds["one cache"][1:])
    for name in sides:
        median = statistics.median(seconds[name][1:])
        print(f"{name:32s}{computed[name]:9,d} prompt tokens computed{median:9.2f} s{median / base:7.2f}x")
    return {
        name: {"computed_tokens": computed[name], "seconds": statistics.median(seconds[name][1:])} for name in sides
    }


def random_model(directory: Path, shape: dict[str, int]) -> None:
    """Write a random llama of this shape and a byte tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<|end|>": 0} | {c: i for i, c in enumerate(letters, start=1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def best(work: Callable[[], None], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each repeat, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    """Run, print a table, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face directory; without it a random llama is made")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the random model")
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="torch threads on CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as made:
        directory = args.model or made
        if not args.model:
            random_model(Path(made), SIZES[args.size])
        attention = "eager" if device.type == "cpu" else "sdpa"
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention, dtype=dtype)
        model = model.to(device).eval()
        model.generation_config.eos_token_id = None
        tokenizer = AutoTokenizer.from_pretrained(directory)
        engine = LocalEngine(model, tokenizer, device=device, max_context=2048, max_batch=args.agents)
        agents = conversations(args.agents, engine.vocabulary, args.prompt_tokens, args.answer_tokens)
        wanted = sum(sum(agent.lengths) for agent in agents)

        async def measure_process() -> list[float]:
            spec = PolicySpec(directory, device=args.device, threads=args.threads, max_batch=args.agents)
            policy = await LocalPolicy.start(spec)
            try:
                seconds = []
                for run in range(args.repeats + 1):
                    start = time.perf_counter()
                    await through_process(policy, agents, run)
                    seconds.append(time.perf_counter() - start)
                return seconds[1:]
            finally:
                await policy.close()

        seconds = {
            "generate, one call at a time": best(lambda: loop(model, agents), device, max(1, args.repeats // 3)),
            "generate, static batch": best(lambda: static(model, agents), device, args.repeats),
            "engine": best(lambda: in_process(engine, agents), device, args.repeats),
            "engine, through its process": asyncio.run(measure_process()),
        }
        caches = compare_caches(model, tokenizer, device, args.repeats)
    parameters = sum(p.numel() for p in model.parameters())
    rates = {name: wanted / statistics.median(times) for name, times in seconds.items()}
    base = rates["generate, one call at a time"]
    print(f"{args.agents} agents x {TURNS} turns, {wanted} tokens, {parameters / 1e6:.2f}M parameters, {device}")
    for name, rate in rates.items():
        print(f"{name:32s}{rate:12,.0f} tokens/s{rate / base:9.1f}x")
    if args.json:
        facts = {
            "agents": args.agents,
            "turns": TURNS,
            "tokens": wanted,
            "parameters": parameters,
            "device": str(device),
            "threads": args.threads,
            "tokens_per_second": rates,
            "seconds": seconds,
            "shared_prompt": caches,
            "ratio_to_loop": {name: rate / base for name, rate in rates.items()},
            "ratio_to_static": {name: rate / rates["generate, static batch"] for name, rate in rates.items()},
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
