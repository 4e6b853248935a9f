"""Tokens per second of the local engine against `model.generate`: concurrent agents, two turns, uneven answers.

    python benchmarks/engine.py                     # a random model of quickstart size, on CPU
    python benchmarks/engine.py --device cuda --size 0.5b --agents 128 [--model DIR]
    python benchmarks/engine.py --model MODEL --agents 1 8 32 64 --threads 2   # a real model, on CPU

Four ways to sample the same conversations: `generate` in a loop, one call at a time (what agents do that share a model
behind a lock); `generate` on a static batch per turn (which needs all agents in lockstep and runs until its longest
answer ends); the engine in this process; the engine in its policy process, called by asyncio tasks. Only tokens that an
agent requested are counted. `generate` computes no log-probs, the engine does. On cuda all compute in bfloat16: the
first three on weights of that dtype, the policy process by autocast over the float32 weights that it trains.

Then the prefix cache: the rollouts of one task, over several turns, with one cache for all of them, with a cache for
each conversation, and with none; prompt tokens computed, and seconds of the sides in turn. Then what one long
conversation costs many short ones, and on CPU, what it saves that rows read a beginning in common once (`--beginnings`
measures only that, with a real model, too).

With a model on CPU, agl's engine, transformers, llama.cpp and vLLM take turns on the same conversations instead, each
in a new process, some with weights of lower precision, too. llama.cpp needs a GGUF file; `--llama-python` and
`--vllm-python` name the Pythons that have these packages. Peak memory is that of the process that samples, loading not
included. Drift is the mean |log ratio| of sampled tokens, engine against agl's learner in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_sides import SIDES, TURNS, Agent, Answer, Job, converse
from learner import SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agl.trainer.engines.base import Request, Sampling
from agl.trainer.local.engine import forward
from agl.trainer.local.engine.engine import LocalEngine
from agl.trainer.local.gguf import gguf_file
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.local.prepared import model_directory
from agl.trainer.local.protocol import Failed, Finished, Tokens
from agl.trainer.local.tokenizer import load_tokenizer

CONTEXT = 4096
ALONE = 8
"""Agents at most that `generate` answers one call at a time; its rate is that of any number of them."""
ROLLOUTS, ROLLOUT_TURNS, PROMPT = 8, 4, 2000
"""Of the cases with a shared prompt."""


LONG, SHORT_ROWS, SHORT_ANSWER = 4_000, 31, 100
"""Tokens of the long row; the short rows beside it, and the tokens of their answers."""
BEGINNINGS = [1000, 3000]
"""Tokens that all rows begin with."""


def conversations(n: int, vocabulary: int, prompt_tokens: int, answer_tokens: int, seed: int = 0) -> list[Agent]:
    """`n` agents whose answers have 1/2 to 3/2 of `answer_tokens` tokens."""
    rng = np.random.default_rng(seed)

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


def in_words(tokenizer: Any, n: int, answer_tokens: int, seed: int) -> list[Agent]:
    """The same with text in place of random tokens."""
    rng = np.random.default_rng(seed)

    def tokens(text: str) -> np.ndarray:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)

    def agent(lengths: tuple[int, ...]) -> Agent:
        a, b = rng.integers(100, 1000, 2)
        question = {"role": "user", "content": f"What is {a} * {b}? Think step by step, then write the product."}
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
        return Agent(tokens(prompt), lengths, tuple(tokens(f"\n{a} * {b} = {a * b}. So ") for _ in lengths))

    return [agent(random.lengths) for random in conversations(n, 2, 2, answer_tokens, seed)]


def generate(
    model, prompts: list[np.ndarray], length: int, on_token: Callable[[], object] = lambda: None
) -> list[np.ndarray]:
    """One `model.generate` call on prompts padded at the left; exactly `length` tokens each."""

    def on_step(ids: torch.Tensor, _scores: object) -> torch.Tensor:
        on_token()
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

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
            stopping_criteria=[on_step],
        )
    return [row.astype(np.int32) for row in out[:, width:].cpu().numpy()]


def loop(model, agents: list[Agent]) -> None:
    """One call at a time."""
    for agent in agents:
        prompt = agent.prompt
        for length, result in zip(agent.lengths, agent.results, strict=True):
            prompt = np.concatenate([prompt, generate(model, [prompt], length)[0], result])


def static(model, agents: list[Agent]) -> list[float]:
    """All agents in one batch per turn; returns the seconds to the first token of each request."""
    prompts, first = [agent.prompt for agent in agents], []
    for turn in range(TURNS):
        steps = [time.perf_counter()]
        length = max(agent.lengths[turn] for agent in agents)
        answers = generate(model, prompts, length, lambda steps=steps: steps.append(time.perf_counter()))
        first += [steps[1] - steps[0]] * len(agents)
        prompts = [
            np.concatenate([p, a[: agent.lengths[turn]], agent.results[turn]])
            for p, a, agent in zip(prompts, answers, agents, strict=True)
        ]
    return first


def in_process(engine: LocalEngine, agents: list[Agent]) -> tuple[list[float], list[Answer]]:
    """Every agent sends its next request as soon as its last is answered; seconds to first tokens, and answers."""
    engine.drop_caches()

    def step() -> Iterator[tuple[int, int, float]]:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Tokens):
                yield event.request_id, event.token_ids[0], event.logprobs[0]

    def submit(agent: int, prompt: np.ndarray, length: int) -> None:
        engine.submit(agent, prompt, Sampling(max_tokens=length, seed=agent), stream=True)

    return converse(submit, step, agents)


async def through_process(
    policy: LocalPolicy, agents: list[Agent], run: int, stream: bool = False
) -> tuple[list[float], list[Answer]]:
    """One asyncio task per agent; seconds to first tokens, where they are streamed, and answers."""
    first: list[float] = []
    answers: list[Answer] = []

    async def talk(i: int, agent: Agent) -> None:
        prompt = agent.prompt
        for length, result in zip(agent.lengths, agent.results, strict=True):
            request = Request(prompt, Sampling(max_tokens=length, seed=i), session=f"{run}-{i}")
            times = [time.perf_counter()]
            on_tokens = (lambda *_, times=times: times.append(time.perf_counter())) if stream else None
            answer = await policy.generate(request, on_tokens=on_tokens)
            first.extend(at - times[0] for at in times[1:2])
            answers.append((prompt, answer.token_ids.tolist(), answer.logprobs.tolist()))
            prompt = np.concatenate([prompt, answer.token_ids, result])

    await asyncio.gather(*(talk(i, agent) for i, agent in enumerate(agents)))
    return first, answers


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


def decoding(engine: LocalEngine, prompts: list[np.ndarray], lengths: list[int], counted: int) -> float:
    """Tokens per second of the last `counted` of these requests, from when all prompts are computed until these end."""
    first = len(prompts) - counted
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(i, prompt, Sampling(max_tokens=length, seed=i))
    while len(engine._running) < len(prompts):
        engine.step()
    sampled = sum(len(row.tokens) for row in engine._running if row.request_id >= first)
    start, done = time.perf_counter(), 0
    while done < counted:
        done += sum(isinstance(event, Finished) and event.request_id >= first for event in engine.step())
    return (sum(lengths[first:]) - sampled) / (time.perf_counter() - start)


def beside_a_long_row(model, tokenizer, device: torch.device, repeats: int) -> dict[str, float]:
    """Print and return tokens per second of many short rows: alone, and beside one row of many tokens."""
    rates: dict[str, list[float]] = {"alone": [], "beside a long row": []}
    for _ in range(repeats + 1):
        for name in rates:
            engine = LocalEngine(model, tokenizer, device=device, max_context=2 * LONG)
            rng, others = np.random.default_rng(0), [] if name == "alone" else [LONG]
            prompts = [rng.integers(1, engine.vocabulary, n).astype(np.int32) for n in [*others, *[40] * SHORT_ROWS]]
            rates[name].append(decoding(engine, prompts, [*others, *[SHORT_ANSWER] * SHORT_ROWS], SHORT_ROWS))
    medians = {name: statistics.median(several[1:]) for name, several in rates.items()}
    print(f"\n{SHORT_ROWS} rows of 40 + {SHORT_ANSWER} tokens; the long row has {LONG:,}")
    for name, rate in medians.items():
        print(f"{name:32s}{rate:12,.0f} tokens/s{rate / medians['alone']:9.2f}x")
    return medians


def after_beginnings(model, tokenizer, rows: int, sizes: list[int], repeats: int) -> dict[str, dict[str, float]]:
    """Print and return tokens per second of rows whose prompts begin with the same tokens, as agents' prompts begin
    with their system prompt and tools: each row reads its own keys and values of them, or all read the first row's."""
    sides = {"each reads its own": sys.maxsize, "read once": forward.SAVED_BYTES}
    rates: dict[int, dict[str, list[float]]] = {size: {name: [] for name in sides} for size in sizes}
    for size, _, (name, saved) in itertools.product(sizes, range(repeats + 1), sides.items()):
        engine = LocalEngine(model, tokenizer, device=torch.device("cpu"), max_context=size + 256, max_batch=rows)
        rng = np.random.default_rng(0)
        beginning = rng.integers(1, engine.vocabulary, size).astype(np.int32)
        prompts = [np.append(beginning, rng.integers(1, engine.vocabulary, 40).astype(np.int32)) for _ in range(rows)]
        forward.SAVED_BYTES = saved
        rates[size][name].append(decoding(engine, prompts, [48] * rows, rows))
        forward.SAVED_BYTES = sides["read once"]
    print(f"\n{rows} rows that begin alike, then 40 tokens of their own and 48 that are sampled")
    medians = {
        str(size): {name: statistics.median(several[1:]) for name, several in names.items()}
        for size, names in rates.items()
    }
    for size, names in medians.items():
        own, once = names.values()
        print(f"{int(size):,} tokens in common: {own:,.0f} tokens/s, read once {once:,.0f}, {once / own:.2f}x")
    return medians


def random_model(directory: Path, shape: dict[str, int], device: torch.device) -> None:
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
    with device:  # Where random numbers are made fast.
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)


def best(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each repeat, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def measured(python: str, job: Job) -> dict[str, Any]:
    """What a new process measures, or why it cannot."""
    files = Path(job.scratch, "job"), Path(job.scratch, "facts")
    files[0].write_bytes(pickle.dumps(job))
    # The classes of the pickles are those of a module, not of a program.
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import engine_sides as e; e.main()"
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, "-c", program, *files], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{job.side} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return pickle.loads(files[1].read_bytes())


async def drifts(spec: PolicySpec, sides: list[list[Answer]]) -> list[float]:
    """Per side, the mean |log ratio| of its sampled tokens between engine and learner; nan without log-probs."""
    policy, means = await LocalPolicy.start(spec), []
    for answers in sides:
        ratios = [np.nan] if not answers else []
        for prompt, tokens, logprobs in answers:
            learned = await policy.logprobs(np.concatenate([prompt, np.asarray(tokens, np.int32)]))
            ratios.extend(np.abs(learned[-len(tokens) :] - logprobs))
        means.append(float(np.mean(ratios)))
    await policy.close()
    return means


def compare_engines(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the figures of each engine on a real model, by number of agents."""
    directory, file = model_directory(args.model), gguf_file(args.model)
    tokenizer, rows = load_tokenizer(directory), []
    missing = {} if file else {"llama.cpp": "the model is not a GGUF file"}
    pythons = {"llama.cpp": args.llama_python, "vLLM": args.vllm_python}
    with tempfile.TemporaryDirectory() as scratch:
        for n in args.agents:
            rounds = [in_words(tokenizer, n, args.answer_tokens, seed) for seed in range(args.repeats + 1)]
            sizes = (a.prompt.size + sum(a.lengths) + sum(map(len, a.results)) for agents in rounds for a in agents)
            context = max(sizes)
            for side in args.sides:
                package = side.partition(",")[0]
                if package in missing:
                    continue
                job = Job(side, directory, str(file or ""), scratch, args.threads, n, context, rounds)
                facts = {"agents": n, "side": side} | measured(pythons.get(package, sys.executable), job)
                if "missing" in facts:
                    missing[package] = facts["missing"]
                    continue
                rows.append(facts)
                print(f"{n} agents, {side}: {facts['tokens_per_second']:.1f} tokens/s", file=sys.stderr, flush=True)
    spec = PolicySpec(directory, device="cpu", threads=args.threads, trained=False)
    means = asyncio.run(drifts(spec, [facts.pop("answers") for facts in rows]))
    agl = {facts["agents"]: facts["tokens_per_second"] for facts in rows if facts["side"] == "agl"}
    print("| agents | engine | tokens/s | x agl | first token, median ms | peak MiB | drift |")
    print("|---|---|---|---|---|---|---|")
    for facts, drift in zip(rows, means, strict=True):
        facts["drift"], rate = drift, facts["tokens_per_second"]
        ratio = rate / agl.get(facts["agents"], np.nan)
        print(
            f"| {facts['agents']} | {facts['side']} | {rate:,.1f} | {ratio:.2f} | {1e3 * facts['first_token']:,.0f} "
            f"| {facts['peak_bytes'] / 2**20:,.0f} | {'' if np.isnan(drift) else f'{drift:.1e}'} |"
        )
    for package, reason in missing.items():
        print(f"not measured: {package}: {reason}")
    return {"threads": args.threads, "answer_tokens": args.answer_tokens, "rows": rows, "missing": missing}


def main() -> None:
    """Run, print a table, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or GGUF file; without it a random llama")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the random model")
    parser.add_argument("--agents", type=int, nargs="+", default=[32], help="several with --model on CPU only")
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="torch threads on CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beginnings", type=int, nargs="+", metavar="TOKENS", help="that all rows have in common")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="with --model on CPU")
    parser.add_argument("--llama-python", default=sys.executable, help="interpreter with llama-cpp-python and NumPy")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter with vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.beginnings and args.device != "cpu":
        parser.error("--beginnings is for --device cpu: elsewhere each row reads its own")
    if args.model and args.device == "cpu" and not args.beginnings:
        facts = compare_engines(args)
        if args.json:
            args.json.write_text(json.dumps(facts, indent=2) + "\n")
        return

    n = args.agents[0]
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as made:
        directory = model_directory(args.model) if args.model else made
        if not args.model:
            random_model(Path(made), SIZES[args.size], device)
        attention = "eager" if device.type == "cpu" else "sdpa"
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention, dtype=dtype)
        model = model.to(device).eval()
        model.generation_config.eos_token_id = None
        tokenizer = AutoTokenizer.from_pretrained(directory)
        if args.beginnings:
            facts = after_beginnings(model, tokenizer, n, args.beginnings, args.repeats)
            if args.json:
                args.json.write_text(json.dumps({"threads": args.threads, "after_beginnings": facts}, indent=2) + "\n")
            return
        engine = LocalEngine(model, tokenizer, device=device, max_context=2048, max_batch=n)
        agents = conversations(n, engine.vocabulary, args.prompt_tokens, args.answer_tokens)
        wanted, alone = (sum(sum(agent.lengths) for agent in some) for some in (agents, agents[:ALONE]))

        async def measure_process() -> list[float]:
            spec = PolicySpec(directory, device=args.device, threads=args.threads, max_batch=n)
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
            "generate, one call at a time": best(
                lambda: loop(model, agents[:ALONE]), device, max(1, args.repeats // 3)
            ),
            "generate, static batch": best(lambda: static(model, agents), device, args.repeats),
            "engine": best(lambda: in_process(engine, agents), device, args.repeats),
            "engine, through its process": asyncio.run(measure_process()),
        }
        caches = compare_caches(model, tokenizer, device, args.repeats)
        long_row = beside_a_long_row(model, tokenizer, device, args.repeats)
        begun = {} if device.type != "cpu" else after_beginnings(model, tokenizer, n, BEGINNINGS, args.repeats)
    parameters = sum(p.numel() for p in model.parameters())
    counts = {"generate, one call at a time": alone}
    rates = {name: counts.get(name, wanted) / statistics.median(times) for name, times in seconds.items()}
    base = rates["generate, one call at a time"]
    print(f"{n} agents x {TURNS} turns, {wanted} tokens, {parameters / 1e6:.2f}M parameters, {device}")
    for name, rate in rates.items():
        print(f"{name:32s}{rate:12,.0f} tokens/s{rate / base:9.1f}x")
    if args.json:
        facts = {
            "agents": n,
            "turns": TURNS,
            "tokens": wanted,
            "parameters": parameters,
            "device": str(device),
            "threads": args.threads,
            "tokens_per_second": rates,
            "seconds": seconds,
            "shared_prompt": caches,
            "beside_a_long_row": long_row,
            "after_beginnings": begun,
            "ratio_to_loop": {name: rate / base for name, rate in rates.items()},
            "ratio_to_static": {name: rate / rates["generate, static batch"] for name, rate in rates.items()},
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
