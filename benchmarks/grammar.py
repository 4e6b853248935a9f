"""Tokens per second of answers that are held to a JSON schema, against free ones of the same length; and xgrammar.

    python benchmarks/grammar.py                        # a random model with 272 tokens
    python benchmarks/grammar.py --model MODEL --agents 16 --threads 2

Each engine samples the same number of tokens twice, free and held: agl's, and transformers' `generate` on a static
batch with xgrammar's logits processor, where that package is installed. Then what a forward pass of the learner takes
over the held answers, with the grammar and without. The ratio is held to free, within each side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import best, random_model
from learner import SIZES
from transformers import AutoModelForCausalLM

from agl.mdp.sequence import TrainingRow, merge
from agl.mdp.types import Call, Trajectory, Transition
from agl.trainer.engines.base import Completion, Sampling, json_grammar
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.engine.engine import LocalEngine
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.prepared import model_directory
from agl.trainer.local.protocol import Finished
from agl.trainer.local.tokenizer import load_tokenizer

TOKENS, PROMPT = 48, 40
SCHEMA = json.dumps({
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["add", "subtract", "multiply"]},
        "steps": {"type": "array", "minItems": 9, "items": {"type": "object", "properties": {"n": {"type": "integer"}},
                                                           "required": ["n"], "additionalProperties": False}},
    },
    "required": ["name", "kind", "steps"],
    "additionalProperties": False,
})  # fmt: skip
"""Answers to it are longer than `TOKENS`."""


def sampled(engine: LocalEngine, prompts: list[np.ndarray], grammar: str) -> list[Completion]:
    """The answers of the engine, all of `TOKENS` tokens."""
    engine.drop_caches()
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(TOKENS, seed=i, grammar=grammar))
    done = {}
    while engine.has_work:
        done |= {e.request_id: e.completion for e in engine.step() if isinstance(e, Finished)}
    return [done[i] for i in range(len(prompts))]


def generated(model: Any, tokenizer: Any, prompts: list[np.ndarray], held: bool) -> None:
    """The same by transformers, with xgrammar."""
    processors = []
    if held:
        import xgrammar
        from xgrammar.contrib.hf import LogitsProcessor

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
        processors = [LogitsProcessor(xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False))]
    with torch.inference_mode():
        ids = torch.from_numpy(np.stack(prompts)).long()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=TOKENS, pad_token_id=0,
            eos_token_id=None, logits_processor=processors,
        )  # fmt: skip


def rows(prompts: list[np.ndarray], answers: list[Completion], grammar: str) -> list[TrainingRow]:
    made = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        call = Call(str(i), str(i), 1, 0, "a", "policy", 0, prompt, answer.token_ids, answer.logprobs,
                    request={"used": {"grammar": grammar}})  # fmt: skip
        made += merge(Trajectory(str(i), 1, "policy", "g", (Transition(call),)), {str(i): 1.0})
    return made


def main() -> None:
    """Run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or GGUF file; without it a random llama")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as made:
        directory = model_directory(args.model) if args.model else made
        if not args.model:
            random_model(Path(made), SIZES["tiny"] | {"vocab_size": 272}, device)
        tokenizer = load_tokenizer(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    engine = LocalEngine(model, tokenizer, device=device, max_context=512, max_batch=args.agents)
    learner = Learner(model, LearnerConfig(learning_rate=0.0), device, tokenizer=tokenizer)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, engine.vocabulary, PROMPT).astype(np.int32) for _ in range(args.agents)]
    grammar = json_grammar([("", json.loads(SCHEMA), "")], [tokenizer.eos_token_id])
    answers = sampled(engine, prompts, grammar)
    assert all(answer.token_ids.size == TOKENS for answer in answers)
    trained = rows(prompts, answers, grammar)
    free = [replace(row, grammars=()) for row in trained]
    sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "agl's engine, llguidance": (lambda: sampled(engine, prompts, ""), lambda: sampled(engine, prompts, grammar)),
        "agl's learner, log-probs": (
            lambda: learner.sequence_logprobs(free),
            lambda: learner.sequence_logprobs(trained),
        ),
    }
    if importlib.util.find_spec("xgrammar"):
        generate = lambda held: lambda: generated(model, tokenizer, prompts, held)  # noqa: E731
        sides["transformers, xgrammar"] = (generate(False), generate(True))
    print(f"{args.agents} answers of {TOKENS} tokens, {engine.vocabulary:,} tokens in the vocabulary\n")
    print("| | free, tokens/s | held, tokens/s | held / free |")
    print("|---|---|---|---|")
    for name, works in sides.items():
        plain, held = (args.agents * TOKENS / min(best(work, device, args.repeats)) for work in works)
        print(f"| {name} | {plain:,.0f} | {held:,.0f} | {held / plain:.2f} |")


if __name__ == "__main__":
    main()
