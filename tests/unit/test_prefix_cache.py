"""The engine's prefix cache: what many requests share is computed once, and nothing that they get depends on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import VOCABULARY, engine_for, fail_first_pass, finish, reference, sample, tiny_model

from agl.trainer.engines.base import Sampling
from agl.trainer.local.engine.engine import PREFILL_TOKENS
from agl.trainer.local.engine.kv_cache import PrefixTree
from agl.trainer.local.protocol import Failed, Finished

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def text(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng([size, seed]).integers(0, VOCABULARY, size).astype(np.int32)


def submit(engine, asked, max_tokens: int = 6) -> None:
    for i, prompt in enumerate(asked):
        engine.submit(i, prompt, Sampling(max_tokens=max_tokens, seed=i))


# -- the tree -----------------------------------------------------------------------------------------------------

CHUNK = 2


def keys_values(ids: np.ndarray) -> torch.Tensor:
    """Stand-ins for keys and values, [2, 1, n, 1]: each depends on all tokens up to its own."""
    sums = [0]
    for token in ids.tolist():
        sums.append((sums[-1] * 31 + token + 1) % 1_000_003)
    return torch.tensor(sums[1:]).expand(2, -1)[:, None, :, None].clone()


def put(tree: PrefixTree, policy: str, *ids: int):
    """Store a sequence chunk by chunk; the last node, or None where memory did not reach."""
    array = np.asarray(ids, np.int32)
    node, parts = tree.match(policy, array)
    at = sum(part.shape[2] for part in parts)
    while node is not None and at < array.size:
        end = min(at + CHUNK, array.size)
        node.pins += 1
        new = tree.extend(node, array[at:end], lambda at=at, end=end: keys_values(array)[:, :, at:end])
        node.pins -= 1
        node, at = new, end
    return node


def length(tree: PrefixTree, policy: str, *ids: int) -> int:
    """How much of a prefix is stored, after a look at its keys and values."""
    array = np.asarray(ids, np.int32)
    _, parts = tree.match(policy, np.append(array, -1).astype(np.int32))
    n = sum(part.shape[2] for part in parts)
    if n:
        assert torch.equal(torch.cat(parts, dim=2), keys_values(array[:n]))
    return n


def test_shared_chunks_are_stored_once_and_each_policys_apart():
    tree = PrefixTree(100)
    put(tree, "a", 1, 2, 3, 4)
    put(tree, "a", 1, 2, 3, 4, 5)
    put(tree, "a", 1, 2, 7)
    put(tree, "a", 1, 2)
    assert tree.tokens == 6
    assert length(tree, "a", 1, 2, 3, 9) == 2
    assert length(tree, "a", 1, 2, 7, 8) == 3
    assert length(tree, "b", 1, 2) == 0
    put(tree, "b", 1, 2)
    tree.clear("a")
    assert (tree.tokens, length(tree, "a", 1, 2), length(tree, "b", 1, 2)) == (2, 0, 2)


def test_the_last_token_of_a_prompt_is_never_taken_from_the_tree():
    tree = PrefixTree(100)
    put(tree, "a", 1, 2, 3, 4)
    _, parts = tree.match("a", np.int32([1, 2, 3, 4]))
    assert [part.shape[2] for part in parts] == [2]


def test_the_least_recently_used_end_goes_first_and_pinned_prefixes_stay():
    tree = PrefixTree(8)
    put(tree, "a", 1, 2, 3)
    put(tree, "a", 1, 2, 4)
    pinned = put(tree, "a", 5, 6)
    assert pinned is not None
    pinned.pins += 1
    assert length(tree, "a", 1, 2, 3) == 3
    put(tree, "a", 8, 9)
    put(tree, "a", 7)
    assert [length(tree, "a", *ids) for ids in ((1, 2, 3), (1, 2, 4), (5, 6), (8, 9), (7,))] == [3, 2, 2, 2, 1]
    assert put(tree, "a", *range(10, 17)) is None
    assert length(tree, "a", 5, 6) == 2
    pinned.pins -= 1
    put(tree, "a", *range(20, 28))
    assert [length(tree, "a", *ids) for ids in ((5, 6), range(20, 28))] == [0, 8]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "pin", "match", "clear"]), st.integers(0, 1), st.text("012", max_size=9)),
        max_size=40,
    ),
    st.integers(0, 20),
)
def test_a_tree_returns_what_was_stored_within_its_budget(actions, max_tokens):
    tree, pinned, stored = PrefixTree(max_tokens), [], {"0": [], "1": []}
    for action, name, word in actions:
        policy, ids = str(name), [int(c) for c in word]
        if action == "clear":
            tree.clear(policy)
            pinned = [p for p in pinned if p[0] != policy]
            stored[policy] = []
        elif action == "match":
            known = max((common(ids, other) for other in stored[policy]), default=0)
            assert length(tree, policy, *ids) <= known
        else:
            node = put(tree, policy, *ids)
            stored[policy].append(ids)
            if action == "pin" and node is not None and len(ids):
                node.pins += 1
                pinned.append((policy, ids))
        assert tree.tokens <= max_tokens
        for owner, kept in pinned:
            assert length(tree, owner, *kept) == len(kept)
    for policy in stored:
        tree.clear(policy)
    assert tree.tokens == 0


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- what is computed -----------------------------------------------------------------------------------------------


def test_rollouts_that_arrive_together_compute_their_prompt_once(model):
    engine, prompt = engine_for(model, max_context=2048), text(1000, 0)
    submit(engine, [prompt] * 8)
    answers = finish(engine)
    # Whole chunks of 32 are shared, and every row computes the last one: its logits give the answer's first token.
    assert engine.computed_tokens == 1000 + 7 * 8
    assert engine.reused_tokens == 7 * 992
    assert sorted(a.cached_tokens for a in answers.values()) == [0] + [992] * 7
    assert len({tuple(a.token_ids.tolist()) for a in answers.values()}) == 8


def test_tasks_and_agents_share_their_system_prompt(model):
    engine, system = engine_for(model, max_context=2048), text(300, 1)
    asked = [np.concatenate([system, text(100, task)]) for task in (2, 3) for _ in range(4)]
    submit(engine, asked)
    answers = finish(engine)
    assert engine.computed_tokens == 400 + (400 - 288) + 6 * (400 - 384)
    turns = [np.concatenate([p, answers[i].token_ids, text(20, i)]) for i, p in enumerate(asked)]
    submit(engine, turns)
    for i, answer in finish(engine).items():
        np.testing.assert_allclose(
            answer.logprobs, reference(model, turns[i], answer, Sampling(max_tokens=6)), atol=1e-4
        )
    # An answer's last token was sampled and never fed.
    assert engine.computed_tokens == 608 + 8 * (1 + 20)


def test_a_batch_that_has_no_room_for_all_shares_with_those_that_come_later(model):
    engine, prompt = engine_for(model, max_batch=3), text(200, 4)
    submit(engine, [prompt] * 8)
    assert len(finish(engine)) == 8
    assert engine.computed_tokens == 200 + 7 * 8


def test_without_a_cache_every_row_computes_its_prompt_in_one_pass(model):
    engine = engine_for(model, prefix_cache_tokens=0)
    submit(engine, [text(200, 4)] * 8)
    engine.step()
    assert len(engine._running) == 8
    finish(engine)
    assert (engine.computed_tokens, engine.reused_tokens) == (1600, 0)


# -- exactness --------------------------------------------------------------------------------------------------


def test_answers_are_equal_to_the_bit_with_and_without_a_cache(model):
    """One request at a time, none of which continues another: the passes are then the same."""
    cached, fresh = engine_for(model), engine_for(model, prefix_cache_tokens=0)
    shared = text(230, 5)
    for i, size in enumerate([230, 230, 100, 64, 33, 31, 96, 229, 150]):
        prompt, sampling = np.concatenate([shared[:size], text(1 + i % 4, i)]), Sampling(max_tokens=20, seed=i)
        one, other = sample(cached, prompt, sampling), sample(fresh, prompt, sampling)
        assert one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
    assert cached.reused_tokens > 700


def test_a_conversation_does_not_depend_on_what_others_have_stored(model):
    """To the bit: a resumed run, whose cache is empty where it was not, must equal one that never stopped."""
    alone, after = engine_for(model), engine_for(model)

    def talk(engine, first: int) -> list[bytes]:
        prompt, answers = np.concatenate([text(75, 1), text(first, 2)]), []
        for turn in range(3):
            answer = sample(engine, prompt, Sampling(max_tokens=15, seed=first + turn))
            answers += [answer.token_ids.tobytes(), answer.logprobs.tobytes()]
            prompt = np.concatenate([prompt, answer.token_ids, text(40, turn)])
        return answers

    for other in (3, 30, 0, 41):
        talk(after, other)
    assert talk(after, 30) == talk(alone, 30)
    assert after.reused_tokens > alone.reused_tokens


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=4),  # segments of 20 tokens
            st.integers(0, 5),  # tokens of its own
            st.integers(1, 8),  # of the answer
            st.integers(0, 4),  # steps until the next event
            st.sampled_from(["", "", "", "abort", "abort first", "update"]),
        ),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 6),
    st.sampled_from([0, 30, 90, 100_000]),
)
def test_no_answer_depends_on_the_cache(schedule, max_batch, cache_tokens):
    """Shared prefixes, cancellation, eviction and updates of the weights in between, on one engine with and one without
    a cache."""
    runs = []
    for tokens in (cache_tokens, 0):
        model = tiny_model()
        engine = engine_for(model, max_batch=max_batch, prefix_cache_tokens=tokens)
        answers, prompts, versions = {}, {}, 0
        for i, (segments, own, max_tokens, steps, event) in enumerate(schedule):
            prompts[i] = np.concatenate([*(text(20, s) for s in segments), text(own, i)]).astype(np.int32)
            engine.submit(i, prompts[i], Sampling(max_tokens=max_tokens, seed=i))
            for _ in range(steps):
                answers |= {e.request_id: e.completion for e in engine.step() if isinstance(e, Finished)}
            if event == "abort":
                engine.abort(i)
            elif event == "abort first":
                engine.abort(min(set(range(i + 1)) - set(answers), default=0))
            elif event == "update":
                versions += 1
                with torch.no_grad():
                    model.lm_head.weight.mul_(0.9)
                    model.model.layers[0].self_attn.v_proj.weight.mul_(1.1)
                engine.on_weights_changed(versions)
        answers |= finish(engine)
        assert engine._prefixes.tokens <= tokens
        assert not any(node.pins for node in engine._prefixes._least_recent)
        runs.append(answers)
        if not versions:
            for i, answer in answers.items():
                if answer.token_ids.size:
                    expected = reference(model, prompts[i], answer, Sampling(max_tokens=1))
                    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    assert sorted(runs[0]) == sorted(runs[1]) == list(range(len(schedule)))
    for i, answer in runs[0].items():
        # Waiting for a prefix takes no step, so a request that is cancelled has as many tokens, too.
        assert answer.token_ids.tolist() == runs[1][i].token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, runs[1][i].logprobs, atol=1e-5)
        assert answer.policy_version == runs[1][i].policy_version


def test_an_update_drops_the_prefixes_of_its_own_policy_alone(model):
    engine, prompt = engine_for(model), text(100, 7)
    for policy in ("a", "b"):
        engine.submit(1, prompt, Sampling(max_tokens=2), policy=policy)
        finish(engine)
    assert engine.computed_tokens == 200
    engine.on_weights_changed(1, "a")
    for policy in ("a", "b"):
        engine.submit(1, prompt, Sampling(max_tokens=2), policy=policy)
        finish(engine)
    assert engine.computed_tokens == 200 + 100 + 4


def test_a_pass_that_fails_ends_its_own_requests_alone(model, monkeypatch):
    engine = engine_for(model)
    fail_first_pass(engine, monkeypatch)
    submit(engine, [text(PREFILL_TOKENS["cpu"] // 16, 8)] * 4)
    (failed,) = engine.step()
    assert isinstance(failed, Failed)
    assert len(finish(engine)) == 3
    assert engine.computed_tokens == 2 * 128 + 2 * 32
