"""The engines that `engine.py --model` compares. Each runs in a separate process, in the Python that has it.

A rival's environment runs this file too, so nothing but NumPy and the standard library is imported at the top.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

TURNS = 2
SCORED = 16
"""Answers of a side whose log-probs are compared with the learner's."""


@dataclass(frozen=True)
class Agent:
    """One conversation: the first prompt, then per turn how many tokens to sample and what the tool answers."""

    prompt: np.ndarray
    lengths: tuple[int, ...]
    results: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Job:
    """What a process measures: a warm-up, and a run for each further round of so many agents. `context` is the length
    of the longest conversation."""

    side: str
    directory: str
    gguf: str
    scratch: str
    threads: int
    agents: int
    context: int
    rounds: list[list[Agent]]


Answer = tuple[np.ndarray, list[int], list[float]]
"""The prompt, the tokens sampled, and their log-probs."""
Run = Callable[[list[Agent]], tuple[list[float], list[Answer]]]
"""Seconds to the first token of each request, and the answers of a side that reports log-probs."""


def converse(
    submit: Callable[[int, np.ndarray, int], object],
    step: Callable[[], Iterable[tuple[int, int, float]]],
    agents: list[Agent],
) -> tuple[list[float], list[Answer]]:
    """Every agent sends its next request as soon as its last is answered.

    Args:
        submit: queue a request: agent, prompt, length. step: (agent, token, log-prob) of each new token.
    """
    first: list[float] = []
    answers: list[Answer] = []
    turns = [0] * len(agents)
    running: dict[int, tuple[float, Answer]] = {}

    def send(i: int, prompt: np.ndarray) -> None:
        submit(i, prompt, agents[i].lengths[turns[i]])
        running[i] = time.perf_counter(), (prompt, [], [])

    for i, agent in enumerate(agents):
        send(i, agent.prompt)
    while running:
        for i, token, logprob in step():
            sent, (prompt, tokens, logprobs) = running[i]
            if not tokens:
                first.append(time.perf_counter() - sent)
            tokens.append(token)
            logprobs.append(logprob)
            if len(tokens) == agents[i].lengths[turns[i]]:
                answers.append(running.pop(i)[1])
                turns[i] += 1
                if turns[i] < TURNS:
                    send(i, np.concatenate([prompt, np.asarray(tokens, np.int32), agents[i].results[turns[i] - 1]]))
    return first, answers


def torch_model(job: Job, dtype: str, attention: str) -> Any:
    """With weights of this dtype. "int8" and "fp16" are torch's dynamic quantisation, of the linear layers only."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    torch.set_flush_denormal(True)
    quantised = {"int8": torch.qint8, "fp16": torch.float16}.get(dtype)
    weights = torch.float32 if quantised else getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(job.directory, attn_implementation=attention, dtype=weights)
    model.generation_config.eos_token_id = None
    if quantised:
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=quantised)
    return model.eval()


def agl(job: Job, dtype: str = "float32") -> tuple[Run, int]:
    """The engine in this process."""
    import torch
    from engine import in_process

    from agl.trainer.local.engine.engine import LocalEngine
    from agl.trainer.local.tokenizer import load_tokenizer

    model = torch_model(job, dtype, "eager")
    tokenizer = load_tokenizer(job.directory)
    engine = LocalEngine(model, tokenizer, device=torch.device("cpu"), max_context=job.context, max_batch=job.agents)
    return lambda agents: in_process(engine, agents), os.getpid()


def agl_process(job: Job) -> tuple[Run, int]:
    """The engine in its policy process, called by asyncio tasks that stream their answers."""
    from engine import through_process

    from agl.trainer.local.policy import LocalPolicy, PolicySpec

    spec = PolicySpec(
        job.directory, device="cpu", max_context=job.context, threads=job.threads, max_batch=job.agents, trained=False
    )
    loop = asyncio.new_event_loop()
    policy = loop.run_until_complete(LocalPolicy.start(spec))
    return lambda agents: loop.run_until_complete(through_process(policy, agents, 0, stream=True)), policy.process.pid


def transformers(job: Job) -> tuple[Run, int]:
    """`model.generate` on a static batch per turn."""
    from engine import static

    model = torch_model(job, "float32", "sdpa")
    return lambda agents: (static(model, agents), []), os.getpid()


def llama_cpp(job: Job, ftype: int | None = None) -> tuple[Run, int]:
    """llama.cpp in this process, by its C API, since the class `Llama` has one sequence only.

    Agents are sequences of one context, and a step decodes one batch of all that they are waiting for. Tokens are drawn
    with NumPy, because llama.cpp's own samplers return no log-probs.

    Args:
        ftype: the `llama_ftype` to convert the file's weights to; None = as they are.
    """
    import llama_cpp as api  # pyright: ignore[reportMissingImports]

    file, n = job.gguf, job.agents
    if ftype is not None and not os.path.exists(file := f"{job.scratch}/{ftype}.gguf"):
        conversion = api.llama_model_quantize_default_params()
        conversion.ftype, conversion.allow_requantize = ftype, True
        api.llama_model_quantize(job.gguf.encode(), file.encode(), ctypes.byref(conversion))
    options = api.llama_context_default_params()
    # Each sequence gets a multiple of 256 cells.
    options.n_ctx = options.n_batch = n * -(-job.context // 256) * 256
    options.n_seq_max = options.n_outputs_max = n
    options.n_threads = options.n_threads_batch = job.threads
    model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
    context = api.llama_init_from_model(model, options)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch, random = api.llama_batch_init(options.n_batch, 0, 1), np.random.default_rng(0)
    waiting: dict[int, np.ndarray] = {}
    lengths, left = [0] * n, [0] * n

    def submit(agent: int, prompt: np.ndarray, length: int) -> None:
        # A later prompt begins with what the sequence holds.
        waiting[agent], left[agent] = prompt[lengths[agent] :], length

    def step() -> Iterable[tuple[int, int, float]]:
        agents, batch.n_tokens = list(waiting), 0
        for agent in agents:
            for token in waiting.pop(agent):
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.seq_id[at][0] = int(token), lengths[agent], agent
                batch.n_seq_id[at], batch.logits[at] = 1, False
                lengths[agent] += 1
                batch.n_tokens += 1
            batch.logits[batch.n_tokens - 1] = True
        if api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), (len(agents), vocabulary))
        logits = logits - logits.max(axis=1, keepdims=True)
        cdf = np.cumsum(np.exp(logits), axis=1, dtype=np.float64)
        for row, agent in enumerate(agents):
            token = int(np.searchsorted(cdf[row], random.random() * cdf[row, -1], side="right"))
            left[agent] -= 1
            if left[agent]:
                waiting[agent] = np.array([token])
            yield agent, token, float(logits[row, token] - np.log(cdf[row, -1]))

    def run(agents: list[Agent]) -> tuple[list[float], list[Answer]]:
        api.llama_memory_clear(api.llama_get_memory(context), False)
        lengths[:] = [0] * n
        return converse(submit, step, agents)

    return run, os.getpid()


def vllm(job: Job, dtype: str = "float32") -> tuple[Run, int]:
    """vLLM in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import EngineArgs, LLMEngine, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    limits = {
        "max_model_len": job.context, "max_num_seqs": job.agents,
        # Without a size for keys and values, it takes a share of all memory; in blocks of 128, hardly any is reused.
        "kv_cache_memory_bytes": 16 + job.agents << 24, "block_size": 32,
    }  # fmt: skip
    engine = LLMEngine.from_engine_args(EngineArgs(job.directory, dtype=dtype, **limits))
    kind, numbers = RequestOutputKind.DELTA, itertools.count()

    def submit(agent: int, prompt: np.ndarray, length: int) -> None:
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, output_kind=kind)
        engine.add_request(f"{agent}-{next(numbers)}", {"prompt_token_ids": prompt.tolist()}, sampling)

    def step() -> Iterable[tuple[int, int, float]]:
        for output in engine.step():
            answer = output.outputs[0]
            for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
                yield int(output.request_id.partition("-")[0]), token, logprobs[token].logprob

    return lambda agents: converse(submit, step, agents), os.getpid()


SIDES: dict[str, Callable[[Job], tuple[Run, int]]] = {
    "agl": agl,
    "agl, policy process": agl_process,
    "agl, bfloat16": lambda job: agl(job, "bfloat16"),
    "agl, fp16 linear": lambda job: agl(job, "fp16"),
    "agl, int8 linear": lambda job: agl(job, "int8"),
    "transformers, static batch": transformers,
    "llama.cpp": llama_cpp,
    "llama.cpp, f16": lambda job: llama_cpp(job, 1),
    "llama.cpp, f32": lambda job: llama_cpp(job, 0),
    "vLLM": vllm,
    "vLLM, bfloat16": lambda job: vllm(job, "bfloat16"),
}


def main() -> None:
    """Measure the job of a pickle; write the facts to another, or why the side is not here."""
    job: Job = pickle.loads(Path(sys.argv[1]).read_bytes())
    facts: dict[str, Any] = {}
    try:
        run, pid = SIDES[job.side](job)
    except ImportError as error:
        facts["missing"] = str(error)
    else:
        # The peak of sampling, not of loading.
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        run([replace(agent, lengths=(4,) * TURNS) for agent in job.rounds[0]])
        rates, first, answers = [], [], []
        for agents in job.rounds[1:]:
            start = time.perf_counter()
            seconds, answers = run(agents)
            rates.append(sum(sum(agent.lengths) for agent in agents) / (time.perf_counter() - start))
            first += seconds
        peak = int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
        facts = {
            "tokens_per_second": statistics.median(rates), "rates": rates, "first_token": statistics.median(first),
            "peak_bytes": peak, "answers": answers[:SCORED],
        }  # fmt: skip
    Path(sys.argv[2]).write_bytes(pickle.dumps(facts))
