"""The local engine: what it samples, and that batching, prefix reuse and updates never change the log-probs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_model
from device import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import (
    ARCHITECTURES,
    CPU,
    VOCABULARY,
    engine_for,
    fail_first_pass,
    finish,
    prompts,
    reference,
    sample,
    tiny_model,
    tiny_tokenizer,
)

from agl.trainer.algorithms.loop import PROBE_TOKENS
from agl.trainer.engines.base import Sampling
from agl.trainer.local.agreement import TOLERANCE
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.engine import attention, forward
from agl.trainer.local.engine.attention import agrees
from agl.trainer.local.engine.engine import CHUNK_TOKENS
from agl.trainer.local.engine.kv_cache import common_beginnings
from agl.trainer.local.engine.linear import FEW, favour_few_rows
from agl.trainer.local.engine.sampler import StopTexts, UniformStream, Warp
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.protocol import Failed, Finished, Tokens

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


# -- exactness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 24), (24,), (1, 24), (2, 24), (FEW, 1, 24), (3, 7, 24), (FEW + 1, 24)])
def test_few_rows_go_through_a_linear_layer_the_other_way_round(shape, bias, monkeypatch):
    layer = torch.nn.Linear(24, 40, bias=bias)
    x = torch.randn(shape)
    with torch.no_grad():
        expected = layer(x)
    favour_few_rows(layer)
    turned: list[int] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: turned.append(b.shape[1]) or multiply(a, b))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
    rows = x.numel() // 24
    assert turned == ([rows] if 1 < rows <= FEW else [])
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert turned == ([rows] if 1 < rows <= FEW else [])


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_logprobs_are_those_of_a_full_forward_pass(architecture):
    model = tiny_model(architecture)
    engine = engine_for(model, max_batch=5)
    samplings = [
        Sampling(max_tokens=3 + i, seed=i, temperature=t, top_p=p, top_k=k)
        for i, (t, p, k) in enumerate(
            [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 5), (0.0, 0.5, 3), (0.9, 0.8, 40), (1.0, 1.0, 0), (1.0, 0.3, 0)]
            * 2
        )
    ]
    asked = prompts(len(samplings))
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        engine.submit(i, prompt, sampling)
    answers = finish(engine)
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        assert answers[i].logprobs.dtype == np.float32
        assert answers[i].token_ids.size == sampling.max_tokens
        np.testing.assert_allclose(answers[i].logprobs, reference(model, prompt, answers[i], sampling), atol=1e-4)


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2"])
def test_decoding_in_padded_shapes_gives_the_same_logprobs(architecture):
    """As on a GPU, where these shapes are recorded: rows that come late, leave early and outgrow their columns."""
    model = tiny_model(architecture)
    engine = engine_for(model, max_batch=5)
    engine._slots = forward.SlotModel(engine._slots.model, DEVICE, None, 5, padded=True)
    sizes = [3, 250, 40, 12, 255, 90, 7, 130]
    asked = [np.random.default_rng(i).integers(0, VOCABULARY, size).astype(np.int32) for i, size in enumerate(sizes)]
    samplings = [Sampling(max_tokens=4 + 7 * (i % 4), seed=i, temperature=0.9) for i in range(len(sizes))]
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        engine.submit(i, prompt, sampling)
    answers, rows = {}, set[int]()
    while engine.has_work:
        answers |= {event.request_id: event.completion for event in engine.step() if isinstance(event, Finished)}
        rows.add(len(engine._running))
    assert rows >= {5, 3, 1}
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        np.testing.assert_allclose(answers[i].logprobs, reference(model, prompt, answers[i], sampling), atol=1e-4)


@pytest.mark.parametrize("kind", ["autocast", "weights"])
def test_half_precision_stays_near_the_full_forward_pass(kind):
    model, prompt, sampling = tiny_model(), prompts(1)[0], Sampling(max_tokens=12)
    expected = tiny_model()
    engine = engine_for(model.bfloat16()) if kind == "weights" else engine_for(model, autocast=torch.bfloat16)
    answer = sample(engine, prompt, sampling)
    np.testing.assert_allclose(answer.logprobs, reference(expected, prompt, answer, sampling), atol=0.2)


def test_an_owner_of_many_requests_does_not_starve_the_others(model):
    """The engine is full of one owner's long answers, and more of them wait; others come in at once nevertheless."""
    engine = engine_for(model, max_batch=4)
    greedy = [Sampling(max_tokens=60, seed=i) for i in range(12)]
    asked = prompts(len(greedy))
    for i, sampling in enumerate(greedy):
        engine.submit(i, asked[i], sampling, owner="greedy")
    answers = {event.request_id: event.completion for _ in range(5) for event in engine.step()}
    for i, prompt in enumerate(prompts(3), start=100):
        engine.submit(i, prompt, Sampling(max_tokens=4, seed=i), owner=f"modest {i}")
    steps = 0
    while not {100, 101, 102} <= answers.keys():
        answers |= {event.request_id: event.completion for event in engine.step()}
        steps += 1
    assert steps <= 6, "as many as one of them needs, and one or two to let them in"
    answers |= finish(engine)
    for i, sampling in enumerate(greedy):
        assert answers[i].token_ids.size == 60
        np.testing.assert_allclose(answers[i].logprobs, reference(model, asked[i], answers[i], sampling), atol=1e-4)


def test_waiting_requests_are_let_in_one_of_each_owner_in_turn(model):
    engine = engine_for(model, max_batch=2)
    asked = prompts(6)
    for i, owner in enumerate(["a", "a", "a", "a", "b", "c"]):
        engine.submit(i, asked[i], Sampling(max_tokens=3, seed=i), owner=owner)
    ended = [event.request_id for _ in range(20) if engine.has_work for event in engine.step()]
    assert {*ended[:2]} == {0, 4}
    assert {*ended[2:4]} == {1, 5} or {*ended[2:4]} == {2, 5}
    assert sorted(ended) == list(range(6))


def test_attention_is_replaced_only_where_the_logits_stay():
    for architecture in ("llama", "qwen2", "qwen3", "mistral"):
        assert agrees(tiny_model(architecture), CPU)
    assert not agrees(tiny_model("gemma2"), CPU)
    # It looks at keys and values after they are cached, which come in parts.
    assert not agrees(make_model("Falcon"), CPU)


def test_sampling_leaves_the_models_own_attention_in_place(model):
    sample(engine_for(model), [1, 2, 3], Sampling(max_tokens=2))
    assert model.config._attn_implementation == "eager"


def test_greedy_is_what_transformers_generates(model):
    engine = engine_for(model)
    for i, prompt in enumerate(prompts(6)):
        engine.submit(i, prompt, Sampling(max_tokens=20, temperature=0))
    answers = finish(engine)
    for i, prompt in enumerate(prompts(6)):
        ids = torch.tensor(prompt).long()[None]
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=None
        )
        assert answers[i].token_ids.tolist() == expected[0, len(prompt) :].tolist()


def test_a_lora_model_is_served_with_its_adapter():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    prompt, sampling = prompts(1)[0], Sampling(max_tokens=8)
    answer = sample(engine_for(wrapped), prompt, sampling)
    np.testing.assert_allclose(answer.logprobs, reference(wrapped, prompt, answer, sampling), atol=1e-4)
    with wrapped.disable_adapter():
        assert np.abs(reference(wrapped, prompt, answer, sampling) - answer.logprobs).max() > 0.01


def test_score_goes_through_the_cache_and_agrees(model, monkeypatch):
    monkeypatch.setattr("agl.trainer.local.engine.engine.SCORED_STEPS", 32)
    ids = np.concatenate(prompts(4, seed=3))
    with torch.no_grad():
        logits = model.to(DEVICE)(torch.tensor(ids, device=DEVICE).long()[None]).logits[0, :-1].cpu() / 0.8
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:]).long()[:, None])[:, 0]
    for length in (2, 3, 40, ids.size):
        got = engine_for(model).logprobs(ids[:length], temperature=0.8)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected[: length - 1], atol=1e-4)


def test_a_scored_prompt_has_the_most_likely_tokens_of_each_place():
    model = tiny_model("llama")
    ids = np.random.default_rng(0).integers(1, VOCABULARY, 60)
    chosen, top_ids, top = engine_for(model).scores(ids, top=3)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.from_numpy(ids)[None].to(DEVICE)).logits[0, :-1].float(), -1).cpu()
    np.testing.assert_allclose(chosen, expected.gather(1, torch.from_numpy(ids[1:, None]))[:, 0], atol=1e-4)
    best = expected.topk(3)
    np.testing.assert_array_equal(top_ids, best.indices)
    np.testing.assert_allclose(top, best.values, atol=1e-4)
    np.testing.assert_array_equal(chosen, engine_for(model).logprobs(ids))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_probe_after_an_update_holds_where_engine_and_learner_use_autocast(architecture, monkeypatch):
    """As on cuda, where both compute in bfloat16 over float32 weights."""
    monkeypatch.setattr("agl.trainer.local.engine.engine.SCORED_STEPS", 32)
    model, ids = tiny_model(architecture).to(DEVICE), np.concatenate(prompts(4))[:PROBE_TOKENS]
    trained = Learner(model, LearnerConfig(autocast="bfloat16"), DEVICE).logprobs(ids)
    served = engine_for(model, autocast=torch.bfloat16).logprobs(ids)
    assert np.abs(trained - served).max() <= TOLERANCE["float32"]


def test_memory_for_keys_and_values_is_what_training_leaves(model, monkeypatch):
    whole = engine_for(model)._prefixes.max_tokens
    state = 16 * sum(p.numel() for p in model.parameters())
    memory = "agl.trainer.local.engine.engine._memory"
    monkeypatch.setattr(memory, lambda device: 2 * state)
    trained = engine_for(model)._prefixes.max_tokens
    assert 0 < trained < whole
    frozen = engine_for(tiny_model().requires_grad_(False))._prefixes.max_tokens
    assert frozen == pytest.approx(trained * (2 - 1 / 4) / (2 - 1), rel=0.01)
    monkeypatch.setattr(memory, lambda device: state // 2)
    engine = engine_for(model)
    assert engine._prefixes.max_tokens == 0
    prompt = prompts(1)[0]
    assert sample(engine, prompt, Sampling(max_tokens=3)).token_ids.size == 3


def test_a_prompt_longer_than_one_prefill_pass(model, monkeypatch):
    monkeypatch.setattr("agl.trainer.local.engine.engine.PREFILL_TOKENS", {"cpu": 16, DEVICE.type: 16})
    engine, asked = engine_for(model), prompts(5, seed=4)
    for i, prompt in enumerate(asked):
        engine.submit(i, prompt, Sampling(max_tokens=5, seed=i))
    for i, answer in finish(engine).items():
        np.testing.assert_allclose(
            answer.logprobs, reference(model, asked[i], answer, Sampling(max_tokens=5)), atol=1e-4
        )


# -- batching ---------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 12), st.integers(1, 40), st.booleans()), min_size=1, max_size=9
    ),
    st.integers(1, 4),
)
def test_requests_that_join_and_leave_keep_their_own_logprobs(schedule, max_batch):
    model = tiny_model()
    engine = engine_for(model, max_batch=max_batch)
    rng = np.random.default_rng(0)
    asked, answers = {}, {}
    for i, (steps, max_tokens, length, aborted) in enumerate(schedule):
        asked[i] = rng.integers(0, VOCABULARY, length).astype(np.int32)
        engine.submit(i, asked[i], Sampling(max_tokens=max_tokens, seed=i))
        for _ in range(steps):
            answers.update({e.request_id: e.completion for e in engine.step() if isinstance(e, Finished)})
        if aborted:
            engine.abort(i)
    answers.update(finish(engine))
    assert sorted(answers) == sorted(asked)
    for i, answer in answers.items():
        if answer.token_ids.size:
            np.testing.assert_allclose(
                answer.logprobs, reference(model, asked[i], answer, Sampling(max_tokens=1)), atol=1e-4
            )
        assert answer.finish_reason == ("length" if answer.token_ids.size == schedule[i][1] else "cancelled")


def test_a_request_alone_repeats_to_the_bit_and_its_seed_decides(model):
    prompt = prompts(1)[0]
    first = sample(engine_for(model), prompt, Sampling(max_tokens=30, seed=7))
    again = sample(engine_for(model), prompt, Sampling(max_tokens=30, seed=7))
    other = sample(engine_for(model), prompt, Sampling(max_tokens=30, seed=8))
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.logprobs.tobytes() == again.logprobs.tobytes()
    assert first.token_ids.tolist() != other.token_ids.tolist()


def test_an_aborted_request_returns_what_it_has_and_frees_its_slot(model):
    engine = engine_for(model, max_batch=1)
    engine.submit(1, prompts(1)[0], Sampling(max_tokens=100))
    engine.submit(2, prompts(1)[0], Sampling(max_tokens=2))
    engine.submit(3, prompts(1)[0], Sampling(max_tokens=2))
    engine.step()
    engine.abort(1)
    engine.abort(3)
    engine.abort(99)
    answers = finish(engine)
    assert answers[1].finish_reason == "cancelled"
    assert 1 <= answers[1].token_ids.size <= 2
    assert answers[2].finish_reason == "length"
    assert answers[3].finish_reason == "cancelled"
    assert answers[3].token_ids.size == 0


def test_memory_bounds_the_batch(model):
    engine = engine_for(model)
    engine._cache_tokens = 100
    for i, prompt in enumerate(prompts(6)):
        engine.submit(i, prompt, Sampling(max_tokens=10))
    engine.step()
    assert len(engine._running) < 6
    assert len(finish(engine)) == 6


def test_streamed_tokens_are_the_answer(model):
    engine = engine_for(model)
    engine.submit(1, prompts(1)[0], Sampling(max_tokens=9), stream=True)
    engine.submit(2, prompts(1)[0], Sampling(max_tokens=9), stream=False)
    events = []
    while engine.has_work:
        events += engine.step()
    tokens = [e for e in events if isinstance(e, Tokens)]
    answer = next(e.completion for e in events if isinstance(e, Finished) and e.request_id == 1)
    assert {e.request_id for e in tokens} == {1}
    assert [t for e in tokens for t in e.token_ids] == answer.token_ids.tolist()
    assert [p for e in tokens for p in e.logprobs] == answer.logprobs.tolist()


# -- prefixes ---------------------------------------------------------------------------------------------------


def test_a_conversation_is_prefilled_once_and_gives_the_same_logprobs(model, monkeypatch):
    engine, fresh = engine_for(model), engine_for(model, prefix_cache_tokens=0)
    widths = []
    run = engine._slots.prefill

    def counted(number, first, ids, starts, policies):
        widths.extend(i.size for i in ids)
        return run(number, first, ids, starts, policies)

    monkeypatch.setattr(engine._slots, "prefill", counted)
    prompt = prompts(1)[0]
    for turn in range(4):
        sampling = Sampling(max_tokens=6, seed=turn)
        answer = sample(engine, prompt, sampling)
        alone = sample(fresh, prompt, sampling)
        assert answer.token_ids.tolist() == alone.token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-5)
        prompt = np.concatenate([prompt, answer.token_ids, prompts(1, seed=turn)[0][:5]])
    first = prompts(1)[0].size
    chunks = [min(first, n) for n in (CHUNK_TOKENS[DEVICE.type], first - CHUNK_TOKENS[DEVICE.type]) if n > 0]
    assert widths == [*chunks, *(1 + prompts(1, seed=t)[0][:5].size for t in range(3))]


def test_the_whole_prompt_again_still_computes_its_last_token(model):
    engine, prompt = engine_for(model), prompts(1)[0]
    first = sample(engine, prompt, Sampling(max_tokens=4, seed=1))
    again = sample(engine, prompt, Sampling(max_tokens=4, seed=1))
    np.testing.assert_allclose(first.logprobs, again.logprobs, atol=1e-5)


# -- weights ----------------------------------------------------------------------------------------------------


def test_a_weight_update_is_seen_by_the_next_step_even_of_a_running_request():
    model = tiny_model()
    engine, prompt = engine_for(model), prompts(1)[0]
    sample(engine, prompt, Sampling(max_tokens=2))
    before = tiny_model()
    engine.submit(1, prompt, Sampling(max_tokens=12))
    for _ in range(4):
        engine.step()
    had = len(engine._running[0].tokens)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor(prompt, device=DEVICE).long()[None]).logits.square().mean().backward()
    optimizer.step()
    engine.on_weights_changed(1)
    answer = finish(engine)[1]
    assert (answer.policy_version, answer.versions) == (0, [(0, 0), (had, 1)])
    old = reference(before, prompt, answer, Sampling(max_tokens=12))
    new = reference(model, prompt, answer, Sampling(max_tokens=12))
    assert np.abs(old - new).max() > 0.01
    np.testing.assert_allclose(answer.logprobs, np.concatenate([old[:had], new[had:]]), atol=1e-4)
    assert sample(engine, prompt, Sampling(max_tokens=2)).policy_version == 1


def test_weights_that_diverged_are_reported():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    engine = engine_for(model)
    engine.submit(1, prompts(1)[0], Sampling(max_tokens=4))
    (event,) = engine.step()
    assert isinstance(event, Failed)
    assert "not finite" in str(event.error)
    assert not engine.has_work


# -- sampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 4, 1.0), (1.5, 0, 0.8), (1.2, 6, 0.7)]
)
def test_tokens_are_drawn_with_the_probabilities_reported(temperature, top_k, top_p):
    n, logits = 20_000, torch.tensor([2.0, 1.5, 1.0, 1.0, 0.0, -0.5, -1.0, -2.0])
    warp = Warp.of([Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p)] * n, CPU)
    logprobs = warp.logprobs(logits.expand(n, -1))
    stream = UniformStream(0)
    tokens, drawn = warp.draw(logprobs, [stream.next() for _ in range(n)])
    probs = logprobs[0].double().exp()
    assert probs.sum().item() == pytest.approx(1)
    assert torch.equal(drawn, logprobs.gather(1, tokens[:, None])[:, 0])
    counts = torch.bincount(tokens, minlength=8).double()
    kept = probs > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - n * probs)[kept] ** 2 / (n * probs[kept])).sum().item()
    # The 0.999 quantile of chi-square with 7 degrees of freedom is 24.3.
    assert chi_square < 24.3


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = Warp.of([Sampling(1, top_p=0.75)], CPU).logprobs(logits).exp()[0]
    np.testing.assert_allclose(kept, [0.625, 0.375, 0, 0], atol=1e-6)
    kept = Warp.of([Sampling(1, top_p=0.01)], CPU).logprobs(logits).exp()[0]
    np.testing.assert_allclose(kept, [1, 0, 0, 0])


# -- ends -------------------------------------------------------------------------------------------------------


def test_stop_texts_are_found_across_tokens_and_inside_characters():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("so: é\n\nObservation: 4", add_special_tokens=False)
    for stop, rest in (("\nObservation:", " 4"), ("é", "\n\nObservation: 4"), ("4", "")):
        watch = StopTexts((stop,), tokenizer.decode)
        ends = [watch.add(i) for i in ids]
        assert tokenizer.decode(ids[ends.index(True) + 1 :]) == rest
    assert not any(map(StopTexts(("nothing",), tokenizer.decode).add, ids))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mistral", {"sliding_window": 24}),
        ("gemma2", {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_a_sliding_window_is_that_of_a_full_forward_pass(architecture, changes, padded):
    model = tiny_model(architecture, **changes)
    engine = engine_for(model, max_batch=3)
    assert engine.max_context == 512
    engine._slots = forward.SlotModel(engine._slots.model, DEVICE, None, 3, padded=padded)
    begin = np.random.default_rng(9).integers(0, VOCABULARY, 40)
    asked = [
        np.concatenate([begin, np.random.default_rng(i).integers(0, VOCABULARY, n)]) for i, n in enumerate((3, 90, 200))
    ]
    samplings = [Sampling(max_tokens=40, seed=i) for i in range(len(asked))]
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        engine.submit(i, prompt.astype(np.int32), sampling)
    answers = finish(engine)
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        np.testing.assert_allclose(answers[i].logprobs, reference(model, prompt, answers[i], sampling), atol=1e-4)


# -- rows of different length -----------------------------------------------------------------------------------

of_our_attention = pytest.mark.skipif(DEVICE.type != "cpu", reason="elsewhere one cache holds all rows")


@of_our_attention
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_rows_of_different_length_do_not_change_each_other(architecture, monkeypatch):
    """Rows that come late, leave early, are aborted, and grow out of one cache and the next, in one batch."""
    monkeypatch.setattr(forward, "SHORTEST", 16)
    model = tiny_model(architecture)
    engine = engine_for(model, max_batch=6)
    assert engine._slots.longest[:3] == [16, 64, 256]
    rng = np.random.default_rng(0)
    sizes = [3, 14, 15, 16, 40, 62, 63, 200, 5, 130, 9, 12]
    asked = [rng.integers(0, engine.vocabulary, size).astype(np.int32) for size in sizes]
    samplings = [Sampling(max_tokens=5 + 11 * (i % 5), seed=i, temperature=0.9) for i in range(len(sizes))]
    answers, several, before = {}, 0, set[int]()
    for i in range(4):
        engine.submit(i, asked[i], samplings[i])
    engine.submit(99, asked[7], samplings[4])
    waiting = iter(range(4, len(sizes)))
    for step in itertools.count():
        if (i := next(waiting, None)) is not None:
            engine.submit(i, asked[i], samplings[i])
        if step == 9:
            engine.abort(99)
        answers |= {e.request_id: e.completion for e in engine.step() if isinstance(e, Finished)}
        several += len({row.cache for row in engine._running}) > 1
        assert all(row.cached <= engine._slots.longest[row.cache] for row in engine._running)
        used = {row.cache for row in engine._running}
        # Those that its last rows have left hold no memory, from the next step on.
        assert not any(c.length for i, c in enumerate(engine._slots.caches) if i not in used | before)
        before = used
        if not engine.has_work:
            break
    assert several > 20
    assert answers.pop(99).finish_reason == "cancelled"
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        assert answers[i].token_ids.size == sampling.max_tokens
        np.testing.assert_allclose(answers[i].logprobs, reference(model, prompt, answers[i], sampling), atol=1e-4)


@of_our_attention
def test_a_long_row_takes_no_memory_of_short_ones(model, monkeypatch):
    """The keys and values of 15 short rows stay in short slots while one long row is decoded beside them."""
    monkeypatch.setattr(forward, "SHORTEST", 256)
    engine = engine_for(model, max_batch=16, prefix_cache_tokens=0)
    rng = np.random.default_rng(0)
    for i in range(15):
        engine.submit(i, rng.integers(0, engine.vocabulary, 8).astype(np.int32), Sampling(max_tokens=20, seed=i))
    engine.submit(15, rng.integers(0, engine.vocabulary, 400).astype(np.int32), Sampling(max_tokens=20))
    engine.step()
    short, long, *_ = engine._slots.caches
    assert (short.length, long.length) == (128, 512)
    assert long.slots < 4
    assert [row.cache for row in engine._running] == [0] * 15 + [1]


@of_our_attention
def test_a_pass_that_fails_ends_the_requests_of_every_cache(model, monkeypatch):
    """Those whose own cache was not computed yet, too: none is forgotten. What comes later is answered."""
    monkeypatch.setattr(forward, "SHORTEST", 256)
    engine = engine_for(model)
    rng = np.random.default_rng(0)
    fail_first_pass(engine, monkeypatch)
    for i, size in enumerate((10, 300, 12)):
        engine.submit(i, rng.integers(0, engine.vocabulary, size).astype(np.int32), Sampling(max_tokens=3))
    events = [event for _ in range(40) if engine.has_work for event in engine.step()]
    assert sorted(e.request_id for e in events if isinstance(e, Failed | Finished)) == [0, 1, 2]
    assert any(isinstance(e, Failed) for e in events)
    assert sample(engine, prompts(1)[0], Sampling(max_tokens=4)).token_ids.size == 4


@of_our_attention
def test_a_cache_without_rows_has_no_memory(model, monkeypatch):
    monkeypatch.setattr(forward, "SHORTEST", 256)
    engine = engine_for(model, prefix_cache_tokens=0)
    rng = np.random.default_rng(0)
    for size in (20, 400, 20):
        engine.submit(1, rng.integers(0, engine.vocabulary, size).astype(np.int32), Sampling(max_tokens=2))
        finish(engine)
    assert [cache.length > 0 for cache in engine._slots.caches[:2]] == [True, False]


# -- rows that begin alike --------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0, 1, 2, 40, 50, 900]), max_size=24), st.integers(1, 200))
def test_runs_of_rows_are_divided_by_what_they_share(shared, least):
    """Every row is in one run; what a run has in common, all its rows have; the run that saves most of all is there."""
    runs = common_beginnings(shared, least)
    assert [row for first, last, _ in runs for row in range(first, last)] == list(range(len(shared) + 1))
    for first, last, common in runs:
        assert not common or common == min(shared[first : last - 1])
        assert not common or common * (last - first - 1) >= least
    assert all(before[2] or after[2] for before, after in itertools.pairwise(runs)), "others are read in one go"
    spans = ((a, b) for a in range(len(shared)) for b in range(a + 1, len(shared) + 1))
    most = max(((b - a) * min(shared[a:b]) for a, b in spans), default=0)
    assert max((last - first - 1) * common for first, last, common in runs) == (most if most >= least else 0)


def begin_alike(engine, monkeypatch, policies=("policy",)) -> tuple[dict, list, list, list[int]]:
    """Answers to prompts of three beginnings, some the same to their end, that come late, leave early and outgrow their
    cache; with the prompts, the samplings, and the rows of each run that read a beginning together."""
    monkeypatch.setattr(forward, "SHORTEST", 64)
    monkeypatch.setattr(forward, "SAVED_BYTES", 1)
    rows: list[int] = []
    attend = attention._attend_in_common

    def counted(query: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(query))
        return attend(query, *others)

    monkeypatch.setattr(attention, "_attend_in_common", counted)
    rng = np.random.default_rng(0)

    def text(size: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, size).astype(np.int32)

    beginnings = [text(40), text(56), text(90)]
    asked = [np.concatenate([beginnings[i // 4], text([0, 0, 3, 7][i % 4])]) for i in range(12)]
    samplings = [Sampling(max_tokens=4 + 9 * (i % 3), seed=i, temperature=0.9) for i in range(len(asked))]
    answers, waiting = {}, list(range(len(asked)))
    while waiting or engine.has_work:
        for i in waiting[:2]:
            engine.submit(i, asked[i], samplings[i], policy=policies[i % len(policies)])
        del waiting[:2]
        answers |= {e.request_id: e.completion for e in engine.step() if isinstance(e, Finished)}
    return answers, asked, samplings, rows


@of_our_attention
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_rows_that_begin_alike_keep_their_own_logprobs(architecture, monkeypatch):
    model = tiny_model(architecture)
    answers, asked, samplings, rows = begin_alike(engine_for(model, max_batch=8), monkeypatch)
    assert {2, 3, 4} <= {*rows}
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        assert answers[i].token_ids.size == sampling.max_tokens
        np.testing.assert_allclose(answers[i].logprobs, reference(model, prompt, answers[i], sampling), atol=1e-4)


@of_our_attention
@pytest.mark.parametrize("kind", ["autocast", "weights"])
def test_rows_that_begin_alike_in_half_precision(kind, monkeypatch):
    model = tiny_model()
    engine = engine_for(model.bfloat16()) if kind == "weights" else engine_for(model, autocast=torch.bfloat16)
    answers, asked, samplings, rows = begin_alike(engine, monkeypatch)
    assert rows
    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True)):
        expected = reference(tiny_model(), prompt, answers[i], sampling)
        np.testing.assert_allclose(answers[i].logprobs, expected, atol=0.2)


@of_our_attention
def test_rows_of_other_policies_are_not_read_together(model, monkeypatch):
    """Their adapters give other keys and values for the same tokens."""
    answers, _, _, rows = begin_alike(engine_for(model, max_batch=8), monkeypatch, [str(i) for i in range(12)])
    assert len(answers) == 12
    assert not rows


@of_our_attention
def test_little_in_common_is_read_by_each_row(model, monkeypatch):
    """A kernel more in each layer takes longer than it saves."""
    monkeypatch.setattr(attention, "_attend_in_common", None)
    engine = engine_for(model)
    for i in range(8):
        engine.submit(i, np.arange(100, dtype=np.int32), Sampling(max_tokens=4, seed=i))
    assert len(finish(engine)) == 8
