"""What every engine must do, whatever runs behind it: one suite, run on each of them.

A subclass of `EngineSuite` gives the fixtures `runner` (an `asyncio.Runner`) and `engine` (an `Engine` on its loop that
serves the model of `suite_model` with a context of `CONTEXT` tokens).
"""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_engine import VOCABULARY, prompts, reference, tiny_model, tiny_tokenizer

from agl.errors import AglError, ConfigError, ContextLengthError, EngineError
from agl.trainer.engines.base import Completion, Engine, Request, Sampling

CONTEXT = 256
ATOL = 2e-4
"""Of log-probs in float32."""
SAMPLINGS = [
    Sampling(max_tokens=12, seed=1),
    Sampling(max_tokens=12, seed=2, temperature=0.7, top_p=0.9),
    Sampling(max_tokens=12, seed=3, temperature=1.3, top_k=5),
    Sampling(max_tokens=12, seed=4, temperature=0.0, top_p=0.5, top_k=3),
    Sampling(max_tokens=12, seed=5, temperature=0.9, top_p=0.8, top_k=40),
    Sampling(max_tokens=12, seed=6, top_p=0.3),
]


def suite_model():
    """The model that the engines of the suite serve: of a shape that vLLM has kernels for."""
    return tiny_model(hidden_size=128, intermediate_size=96, initializer_range=0.15, max_position_embeddings=512)


def write_suite_model(directory: Path) -> Path:
    """Write it as a Hugging Face directory whose generation_config.json would change what is sampled."""
    model = suite_model()
    model.generation_config.repetition_penalty = 1.7
    model.generation_config.top_k = 2
    model.generation_config.do_sample = True
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


class EngineSuite:
    """See the module."""

    @pytest.fixture(scope="class")
    def model(self):
        return suite_model()

    @pytest.fixture
    def ask(self, runner, engine):
        """Sample one answer, or several at once."""

        def ask(prompt, *samplings: Sampling, **options):
            async def all_of_them() -> list[Completion]:
                asked = np.asarray(prompt, np.int32)
                return await asyncio.gather(*(engine.generate(Request(asked, s), **options) for s in samplings))

            answers = runner.run(all_of_them())
            return answers if len(samplings) > 1 else answers[0]

        return ask

    def test_it_is_an_engine(self, engine):
        assert isinstance(engine, Engine)
        assert engine.max_context == CONTEXT

    def test_logprobs_are_those_of_the_distribution_that_tokens_are_drawn_from(self, model, ask):
        for prompt in prompts(3):
            for sampling, answer in zip(SAMPLINGS, ask(prompt, *SAMPLINGS), strict=True):
                assert answer.token_ids.dtype == np.int32
                assert answer.logprobs.dtype == np.float32
                assert answer.token_ids.size == answer.logprobs.size == sampling.max_tokens
                assert answer.finish_reason == "length"
                assert answer.top_logprobs == () or list(answer.top_logprobs) == []
                np.testing.assert_allclose(answer.logprobs, reference(model, prompt, answer, sampling), atol=ATOL)

    def test_tokens_are_drawn_with_those_probabilities(self, model, ask):
        n, prompt = 500, prompts(1)[0]
        answers = ask(prompt, *(Sampling(max_tokens=1, temperature=1.2, top_k=6, seed=i) for i in range(n)))
        with torch.no_grad():
            logits = model(torch.tensor(prompt).long()[None]).logits[0, -1].double() / 1.2
        kept = torch.topk(logits, 6)
        probs = dict(zip(kept.indices.tolist(), torch.softmax(kept.values, -1).tolist(), strict=True))
        drawn = [int(a.token_ids[0]) for a in answers]
        assert set(drawn) <= set(probs)
        # The 0.9999 quantile of chi-square with 5 degrees of freedom is 25.7.
        assert sum((drawn.count(i) - n * p) ** 2 / (n * p) for i, p in probs.items()) < 25.7

    def test_greedy_takes_the_likeliest_token(self, model, ask):
        prompt = prompts(1)[0]
        answer = ask(prompt, Sampling(max_tokens=16, temperature=0.0))
        ids = torch.tensor(np.concatenate([prompt, answer.token_ids])).long()[None]
        with torch.no_grad():
            best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert answer.token_ids.tolist() == best.tolist()

    def test_the_seed_decides(self, ask):
        prompt = prompts(1)[0]
        first, again, other = (ask(prompt, Sampling(max_tokens=30, seed=s)) for s in (7, 7, 2**62 + 8))
        assert first.token_ids.tolist() == again.token_ids.tolist()
        assert first.token_ids.tolist() != other.token_ids.tolist()

    def test_what_is_streamed_is_the_answer(self, runner, engine):
        async def one(i: int):
            seen: list[tuple[int, float]] = []
            seen_top: list[list[tuple[int, float]]] = []
            threads = set()

            def on_tokens(ids, logprobs, top=()):
                threads.add(threading.current_thread())
                seen.extend(zip(ids, logprobs, strict=True))
                seen_top.extend(map(list, top))

            sampling = Sampling(max_tokens=3 + i, seed=i, top_logprobs=i % 3)
            answer = await engine.generate(Request(prompts(8)[i], sampling, session=f"s{i}"), on_tokens=on_tokens)
            assert threads == {threading.current_thread()}
            assert seen_top == [list(top) for top in answer.top_logprobs]
            return seen, answer

        async def all_of_them():
            return await asyncio.gather(*(one(i) for i in range(8)))

        for i, (seen, answer) in enumerate(runner.run(all_of_them())):
            assert [token for token, _ in seen] == answer.token_ids.tolist()
            np.testing.assert_array_equal(np.float32([p for _, p in seen]), answer.logprobs)
            assert answer.token_ids.size == 3 + i
            assert [len(top) for top in answer.top_logprobs] == ([i % 3] * (3 + i) if i % 3 else [])

    def test_top_logprobs_are_of_the_same_distribution(self, ask):
        answer = ask(prompts(1)[0], Sampling(max_tokens=5, top_logprobs=4, top_k=3, temperature=0.8))
        assert len(answer.top_logprobs) == 5
        for token, logprob, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
            assert len(top) == 3
            assert sum(math.exp(p) for _, p in top) == pytest.approx(1, abs=1e-5)
            assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)
            assert dict(top)[int(token)] == pytest.approx(float(logprob))

    def test_a_stop_token_ends_the_answer_and_is_kept(self, ask):
        prompt = prompts(1)[0]
        free = ask(prompt, Sampling(max_tokens=20, seed=3))
        stop = int(free.token_ids[6])
        answer = ask(prompt, Sampling(max_tokens=20, seed=3, stop_token_ids=(stop, VOCABULARY - 1)))
        assert answer.finish_reason == "stop"
        assert answer.token_ids.tolist() == free.token_ids[: free.token_ids.tolist().index(stop) + 1].tolist()

    def test_nothing_but_what_was_asked_ends_an_answer(self, model, ask):
        """Not the end-of-text token either, which is id 0: what ends an answer is the gateway's to say."""
        samplings = [Sampling(max_tokens=200, seed=i, temperature=1.5) for i in range(12)]
        answers = ask([1, 2, 3], *samplings)
        assert {a.finish_reason for a in answers} == {"length"}
        assert any(0 in a.token_ids[:-1] for a in answers)

    def test_a_stop_text_ends_the_answer_where_it_is_complete(self, ask):
        prompt, tokenizer = prompts(1)[0], tiny_tokenizer()
        free = ask(prompt, Sampling(max_tokens=60, seed=3, top_k=30))
        text = tokenizer.decode(free.token_ids.tolist(), clean_up_tokenization_spaces=False)
        stop = next(
            text[i : i + 2] for i in range(8, len(text)) if text[i : i + 2].isascii() and len(text[i : i + 2]) == 2
        )
        for told in (None, lambda ids, logprobs: None):
            sampling = Sampling(max_tokens=60, seed=3, top_k=30, stop=("zzzzzz", stop))
            answer = ask(prompt, sampling, on_tokens=told)
            assert answer.finish_reason == "stop"
            cut = tokenizer.decode(answer.token_ids.tolist(), clean_up_tokenization_spaces=False)
            assert cut.endswith(stop)
            assert cut.count(stop) == 1
            assert answer.token_ids.tolist() == free.token_ids[: answer.token_ids.size].tolist()

    def test_the_context_limit_ends_the_answer(self, ask):
        answer = ask(np.arange(CONTEXT - 5) % VOCABULARY, Sampling(max_tokens=50))
        assert (answer.finish_reason, answer.token_ids.size) == ("length", 5)

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize(
        ("prompt", "sampling", "error", "message"),
        [
            (np.arange(CONTEXT) % VOCABULARY, Sampling(1), ContextLengthError, f"{CONTEXT} tokens .* of {CONTEXT}"),
            ([], Sampling(1), EngineError, "at least one token"),
            ([[1, 2]], Sampling(1), EngineError, "flat"),
            ([VOCABULARY], Sampling(1), EngineError, "the tokenizer of the model that is served"),
            ([1], Sampling(0), ConfigError, "max_tokens=0"),
            ([1], Sampling(1, temperature=-1.0), ConfigError, "temperature=-1.0"),
            ([1], Sampling(1, top_p=0.0), ConfigError, "top_p=0.0"),
            ([1], Sampling(1, top_k=-1), ConfigError, "top_k=-1"),
            ([1], Sampling(1, stop=("",)), ConfigError, "empty stop text"),
        ],
    )
    def test_a_request_that_cannot_be_served_is_refused(self, ask, prompt, sampling, error, message, streamed):
        with pytest.raises(error, match=message) as raised:
            ask(prompt, sampling, on_tokens=(lambda ids, logprobs: None) if streamed else None)
        assert isinstance(raised.value, AglError)
        assert raised.value.hint

    @pytest.mark.parametrize("streamed", [False, True])
    def test_cancelling_ends_a_call_and_no_other(self, runner, engine, streamed):
        async def scenario():
            begun = asyncio.Event()
            on_tokens = (lambda ids, logprobs: begun.set()) if streamed else None
            long = Sampling(max_tokens=CONTEXT, seed=1)
            calls = [
                asyncio.ensure_future(engine.generate(Request(np.int32([1, 2, i]), long), on_tokens=on_tokens))
                for i in range(3)
            ]
            if streamed:
                await begun.wait()
            else:
                await asyncio.sleep(0.02)
            calls[1].cancel()
            return await asyncio.gather(*calls, return_exceptions=True)

        first, cancelled, last = runner.run(scenario())
        assert isinstance(cancelled, asyncio.CancelledError)
        assert {a.token_ids.size for a in (first, last)} == {CONTEXT - 3}
