"""The learner: merged equals unmerged, micro-batches do not matter, the gradient goes where the advantage points."""

from __future__ import annotations

import copy
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from call_trees import call, random_calls, trajectories, trajectory
from device import DEVICE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny_learner import CPU, SHAPE, VOCABULARY, gradients, learner, tiny_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agl.errors import CheckpointError, ConfigError, NoTrainableDataError, TrainingError
from agl.mdp.sequence import TrainingRow, merge, unmerged
from agl.mdp.types import Trajectory
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.learner.microbatches import ancestors, collate, length_buckets
from agl.trainer.local.learner.prefix_trees import PrefixTrees, begin_once, chain, divide, prefix_trees

torch.set_num_threads(1)

OBJECTIVES: list[dict[str, Any]] = [
    {"policy_loss": "gspo", "clip_low": 0.05, "clip_high": 0.05, "loss_agg": "seq-mean-token-mean"},
    {"rollout_is": "token", "rollout_is_threshold": 1.1},
    {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    {"critic": True, "gamma": 0.95, "lam": 0.9},
    {"critic": True, "policy_loss": "gspo", "rollout_is": "token"},
    {"policy_loss": "nll"},
    {"policy_loss": "cispo", "clip_low": 0.05, "clip_high": 0.05},
    {"policy_loss": "sapo", "loss_agg": "seq-mean-token-mean"},
    {"policy_loss": "vespo"},
    {"policy_loss": "geo_mean", "clip_low": 0.05, "clip_high": 0.05, "loss_agg": "seq-mean-token-mean"},
]


def lora_model(dropout: float = 0.0) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=dropout, task_type="CAUSAL_LM")
    return get_peft_model(tiny_model(), config)


def rollouts(n: int, seed: int = 0, n_calls: int = 5) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    names = [f"r{i}" for i in range(n)]
    return [trajectory(random_calls(rng, n_calls, rollout=name), name) for name in names]


def rows_of(trajectories_: list[Trajectory], how=merge, model: Any = None) -> list[TrainingRow]:
    """Rows with random advantages and behaviour log-probs near those of `model`, so that some ratios are clipped."""
    rng = np.random.default_rng(7)
    advantages = {t.call.id: rng.normal() for x in trajectories_ for t in x.transitions}
    rows = [row for t in trajectories_ for row in how(t, advantages)]
    true = learner(model).sequence_logprobs(rows)
    noise = {(t.call.id, i): rng.normal(scale=0.2) for x in trajectories_ for t in x.transitions for i in range(8)}
    out = []
    for row, logprobs in zip(rows, true, strict=True):
        old = np.zeros(len(row), np.float32)
        for k, name in enumerate(row.call_ids):
            where = np.flatnonzero((row.calls == k) & row.action_mask)
            old[where] = logprobs[where] + [noise[name, i] for i in range(where.size)]
        out.append(replace(row, logprobs=old))
    return out


def assert_same_update(a: Any, b: Any) -> None:
    assert a[0].keys() == b[0].keys()
    for key in {"loss", "grad_norm", "abs_log_ratio", "clip_fraction", "entropy", "nll", "tokens"} & a[0].keys():
        assert a[0][key] == pytest.approx(b[0][key], rel=1e-4, abs=1e-6), key
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=1e-3, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().cpu().clone() for n, p in model.named_parameters()}


def group(n: int, seed: int) -> list[Trajectory]:
    """Rollouts of one task: their agents begin alike, and often go on alike for a while, too."""
    calls = random_calls(np.random.default_rng(seed), 8)
    rng = np.random.default_rng(seed + 1)
    made = []
    for name in (f"{seed}-{i}" for i in range(n)):
        chosen = sorted(rng.choice(8, 4, replace=False))
        own = [replace(calls[k], id=f"{name}/{k}", rollout_id=name) for k in chosen]
        tail = rng.integers(0, VOCABULARY, 3).tolist()
        whole = [*own[0].prompt_ids.tolist(), *own[0].response_ids.tolist(), *tail]
        made.append(trajectory([*own, call(8, whole, tail, rollout=name)], name))
    return made


def contexts(row: TrainingRow) -> list[tuple[int, ...]]:
    """Each token with all before it in its own context."""
    made: list[tuple[int, ...]] = []
    for token, parent in zip(row.token_ids.tolist(), row.parents.tolist(), strict=True):
        made.append((*(made[parent] if parent >= 0 else ()), token))
    return made


def attended(trees: PrefixTrees) -> np.ndarray:
    """bool [U, U + kept]: which keys each token sees. No two blocks hold the same pair."""
    sees = np.zeros((len(trees), len(trees) + trees.kept), np.bool_)
    for first, last, first_key, last_key in trees.blocks:
        own = (first, last) == (first_key, last_key)
        assert own or last_key <= first or first_key >= len(trees)
        assert not sees[first:last, first_key:last_key].any()
        sees[first:last, first_key:last_key] = np.tri(last - first) if own else True
    return sees


class TestRows:
    @settings(max_examples=60, deadline=None)
    @given(trajectories())
    def test_the_mask_of_a_row_is_its_ancestor_relation(self, t: Trajectory):
        for row in merge(t, {x.call.id: 0.0 for x in t.transitions}):
            sees = ancestors(row)
            for token in range(len(row)):
                expected, at = set(), token
                while at >= 0:
                    expected.add(at)
                    at = int(row.parents[at])
                assert set(np.flatnonzero(sees[token])) == expected

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 10**6), st.integers(1, 200))
    def test_prefix_trees_hold_each_context_once_and_show_it_alone(self, seed: int, limit: int):
        ts = [*group(3, seed), *group(3, seed + 1)]
        rows = [row for t in ts for row in merge(t, {x.call.id: 0.0 for x in t.transitions}) if len(row)]
        trees = prefix_trees(rows)
        contexts_of = [contexts(row) for row in rows]
        assert len(trees) == len({c for row in contexts_of for c in row})
        sees = attended(trees)
        for places, of_row in zip(trees.places, contexts_of, strict=True):
            for place, context in zip(places, of_row, strict=True):
                assert trees.token_ids[sees[place]].tolist() == list(context)
                assert trees.positions[place] == len(context) - 1

        batches = divide(trees, limit)
        assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
        for batch in batches:
            assert len(batch) == 1 or len(prefix_trees([rows[i] for i in batch])) <= limit

        found = []
        for beginning, parts in begin_once(trees, batches, limit / 10, 1):
            assert len(beginning) == 0 or (len(beginning) > limit / 10 and len(parts) > 1)
            for batch, part in parts:
                found.append(batch)
                assert len(part) > 0
                assert part.kept == len(beginning)
                assert len(part) + len(beginning) == len(prefix_trees([rows[i] for i in batch]))
                tokens, positions = (
                    np.concatenate([getattr(x, name) for x in (part, beginning)]) for name in ("token_ids", "positions")
                )
                sees = np.zeros((tokens.size, tokens.size), np.bool_)
                sees[: len(part)], sees[len(part) :, len(part) :] = attended(part), attended(beginning)
                for i, places in zip(batch, part.places, strict=True):
                    for place, context in zip(places, contexts_of[i], strict=True):
                        seen = np.flatnonzero(sees[place])
                        assert tokens[seen[positions[seen].argsort()]].tolist() == list(context)
        assert found == batches

    def test_what_is_computed_once_is_what_saves_most(self):
        """Two groups of three whose prompts begin with the same 10 tokens, in micro-batches of one row; and two rows
        that are alike, after one that is a part of them."""
        groups = [[*range(10), *range(10 * g, 10 * g + 15), 90 + k] for g in (1, 3) for k in range(3)]
        alike = [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]

        def sizes(texts: list[list[int]], worth: float) -> list[tuple[int, list[int]]]:
            trees = prefix_trees([chain(np.array(text, np.int32)) for text in texts])
            found = begin_once(trees, [[i] for i in range(len(texts))], worth, 1)
            return [(len(beginning), [len(part) for _, part in parts]) for beginning, parts in found]

        assert sizes(groups, 5) == [(25, [1, 1, 1]), (25, [1, 1, 1])]
        assert sizes([groups[0], *groups[3:]], 5) == [(0, [26]), (25, [1, 1, 1])]
        assert sizes([groups[0], groups[3]], 5) == [(10, [16, 16])]
        assert sizes(groups, 25) == [(0, [26])] * 6
        assert sizes(alike, 1) == [(3, [1, 2, 2])]

    def test_a_group_that_fits_is_not_divided(self):
        """Five rows of six tokens that share four, twice, in micro-batches of 16: 14 each, though 16 would fit."""
        ts = [
            trajectory([call(0, [g, 1, 2, 3], [k, k], rollout=f"{g}{k}")], f"{g}{k}") for g in (0, 1) for k in range(5)
        ]
        rows = [merge(t, {f"{t.rollout_id}/0": 1.0})[0] for t in ts]
        assert sorted(map(sorted, divide(prefix_trees(rows), 16))) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]

    @given(st.lists(st.integers(1, 60), max_size=20), st.integers(1, 120))
    def test_every_row_is_packed_once_within_the_limit(self, lengths: list[int], limit: int):
        batches = length_buckets(lengths, limit)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= limit

    def test_chains_get_a_plain_mask_and_trees_an_additive_one(self):
        chain = merge(trajectory([call(0, [1, 2], [3])]), {"r/0": 1.0})[0]
        tree = merge(
            trajectory([call(0, [1, 2], [3]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3], [5])]),
            {f"r/{k}": 1.0 for k in range(3)},
        )[0]
        masks = [collate(rows, [r.action_mask for r in rows], CPU).attention_mask for rows in ([chain], [chain, tree])]
        assert masks[0].tolist() == [[1, 1, 1]]
        assert masks[1].shape == (2, 1, 5, 5)

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_log_probs_are_those_of_a_plain_forward_pass(self, attention: str):
        model = tiny_model(attention=attention).eval()
        (t,) = rollouts(1, seed=3, n_calls=8)
        rows = merge(t, {x.call.id: 0.0 for x in t.transitions})
        assert not all(row.is_chain for row in rows)
        found = {}
        for row, logprobs in zip(rows, learner(model).sequence_logprobs(rows), strict=True):
            for k, name in enumerate(row.call_ids):
                found[name] = logprobs[row.calls == k]
        for x in t.transitions:
            ids = torch.from_numpy(x.call.ids.astype(np.int64))
            with torch.no_grad():
                plain = (model(ids[None].to(model.device)).logits[0].float().cpu() / x.call.temperature).log_softmax(-1)
            expected = plain[torch.arange(len(ids) - 1), ids[1:]][x.call.prompt_ids.size - 1 :]
            np.testing.assert_allclose(found[x.call.id], expected.numpy(), atol=1e-5)

    def test_logprobs_of_a_fixed_sequence(self):
        model = tiny_model().eval()
        ids = np.arange(10, dtype=np.int32)
        with torch.no_grad():
            plain = (model(torch.arange(10)[None]).logits[0] / 0.5).log_softmax(-1)
        expected = plain[torch.arange(9), torch.arange(1, 10)].numpy()
        found = learner(model).logprobs(ids, temperature=0.5)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-5)

    @pytest.mark.parametrize(
        ("config", "kind", "extra"),
        [
            (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
            (
                Gemma2Config,
                Gemma2ForCausalLM,
                {"head_dim": 8, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
            ),
            (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 3.0}),
            (GPT2Config, GPT2LMHeadModel, {}),
        ],
    )
    def test_what_a_model_does_to_its_logits_is_kept(self, config: Any, kind: Any, extra: dict[str, Any]):
        torch.manual_seed(0)
        shape = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **SHAPE, **extra}
        if config is GPT2Config:
            shape = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "attn_implementation": "eager"}
        model = kind(config(**shape)).eval()
        (t,) = rollouts(1, seed=3)
        advantages = {x.call.id: 1.0 for x in t.transitions}
        merged, apart = merge(t, advantages), unmerged(t, advantages)
        both = [
            np.concatenate(
                [v[r.action_mask] for r, v in zip(rows, learner(model).sequence_logprobs(rows), strict=True)]
            )
            for rows in (merged, apart)
        ]
        assert sorted(both[0]) == pytest.approx(sorted(both[1]), abs=1e-5)
        ids = torch.arange(8)
        with torch.no_grad():
            plain = model(ids[None].to(model.device)).logits[0].cpu().log_softmax(-1)[torch.arange(7), ids[1:]]
        np.testing.assert_allclose(learner(model).logprobs(ids.numpy()), plain.numpy(), atol=1e-5)

    def test_a_greedy_answer_is_scored_under_the_models_own_distribution(self):
        model = tiny_model()
        rows = [merge(trajectory([call(0, [1, 2], [3, 4], temperature=t)]), {"r/0": 1.0})[0] for t in (0.0, 1.0)]
        assert_same_update(*(gradients(learner(model), [row]) for row in rows))


class TestEquality:
    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 10**6), st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]))
    def test_merged_and_unmerged_rows_give_the_same_loss_and_gradient(self, seed: int, mode: str):
        model = tiny_model()
        data = rollouts(3, seed)
        merged, apart = rows_of(data, merge, model), rows_of(data, unmerged, model)
        if not any(row.n_actions for row in merged):
            return
        subject = learner(model, loss_agg=mode)
        assert_same_update(gradients(subject, merged), gradients(subject, apart))

    @pytest.mark.parametrize(
        "options",
        OBJECTIVES,
        ids=lambda o: "+".join(o),
    )
    def test_with_every_objective(self, options: dict[str, Any]):
        """Whether calls share a row changes neither an answer's ratio nor its weight, its values or its advantages."""
        model = tiny_model()
        data = rollouts(4, seed=5)
        merged, apart = rows_of(data, merge, model), rows_of(data, unmerged, model)
        assert len(merged) < len(apart)
        subject = learner(model, **options)
        if subject._value_head is not None:
            seeded = torch.Generator(DEVICE).manual_seed(0)
            torch.nn.init.normal_(subject._value_head.weight, std=0.5, generator=seeded)
        results = [gradients(subject, rows) for rows in (merged, apart)]
        assert_same_update(*results)
        if options.get("critic"):
            assert results[0][0]["value_loss"] == pytest.approx(results[1][0]["value_loss"], rel=1e-4)
        plain = gradients(learner(tiny_model()), merged)[0]
        assert results[0][0]["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 10**6), st.sampled_from([30, 80, None]))
    def test_a_group_that_shares_its_prefixes_gives_the_loss_and_gradient_of_rows_apart(self, seed: int, limit: int):
        model = tiny_model()
        rows = rows_of([*group(4, seed), *group(3, seed + 1)], merge, model)
        if not any(row.n_actions for row in rows):
            return
        shared = gradients(learner(model, max_tokens_per_microbatch=limit), rows)
        apart = gradients(learner(model, share_prefixes=False), rows)
        assert_same_update(shared, apart)
        trained = [row for row in rows if row.n_actions]
        unique = {c for row in trained for c in contexts(row)}
        assert shared[0]["unique_tokens"] == apart[0]["unique_tokens"] == len(unique)
        assert len(unique) <= shared[0]["forwarded_tokens"] <= apart[0]["forwarded_tokens"] == sum(map(len, trained))
        if limit is None:
            assert shared[0]["forwarded_tokens"] == len(unique)

    @pytest.mark.parametrize("options", OBJECTIVES, ids=lambda o: "+".join(o))
    def test_a_group_shares_its_prefixes_with_every_objective(self, options: dict[str, Any]):
        """Its rows are more than a micro-batch, and compute their common beginning in a pass of its own."""
        model = tiny_model()
        rows = rows_of(group(5, 3), merge, model)
        results = []
        for share, limit in ((True, 50), (False, None)):
            subject = learner(
                model, **options, kl_coef=0.1, entropy_coef=0.01, share_prefixes=share, max_tokens_per_microbatch=limit
            )
            if subject._value_head is not None:
                torch.nn.init.normal_(
                    subject._value_head.weight, std=0.5, generator=torch.Generator(DEVICE).manual_seed(0)
                )
            results.append(gradients(subject, rows))
        assert_same_update(*results)
        assert results[0][0]["forwarded_tokens"] < 1.3 * results[0][0]["unique_tokens"]
        assert 3 * results[0][0]["forwarded_tokens"] - 10 < results[1][0]["forwarded_tokens"]

    def test_also_with_kl_entropy_and_mini_batches(self):
        data = rollouts(4, seed=1)
        options = dict(kl_coef=0.1, entropy_coef=0.01, minibatches=2, update_epochs=2, seed=3)
        results = []
        for how in (merge, unmerged):
            model = tiny_model()
            subject = learner(model, **options)
            metrics = subject.update(rows_of(data, how, model))
            results.append((metrics, weights(model)))
        assert results[0][0]["optimizer_steps"] == 4
        assert results[0][0]["loss"] == pytest.approx(results[1][0]["loss"], rel=1e-4)
        for name, value in results[0][1].items():
            torch.testing.assert_close(value, results[1][1][name], rtol=1e-2, atol=1e-4)

    @pytest.mark.parametrize("limit", [1, 40, 100])
    def test_the_size_of_micro_batches_does_not_matter(self, limit: int):
        model = tiny_model()
        rows = rows_of(rollouts(4), model=model)
        whole = gradients(learner(model), rows)
        assert_same_update(whole, gradients(learner(model, max_tokens_per_microbatch=limit), rows))

    def test_chunked_logits_give_the_same_gradient(self, monkeypatch: pytest.MonkeyPatch):
        model = tiny_model()
        rows = rows_of(rollouts(4), model=model)
        whole = gradients(learner(model, entropy_coef=0.1), rows)
        monkeypatch.setattr("agl.trainer.local.learner.logprobs.CHUNK_ELEMENTS", 5 * VOCABULARY)
        assert_same_update(whole, gradients(learner(model, entropy_coef=0.1), rows))

    @pytest.mark.parametrize("lora", [False, True])
    def test_activation_checkpointing_gives_the_same_gradient(self, lora: bool):
        """Also of an adapter with dropout, and its draws are those of the first computation; with a group whose common
        beginning is computed once for several micro-batches."""
        model = lora_model(dropout=0.3) if lora else tiny_model()
        rows = rows_of([*rollouts(2), *group(5, 3)], model=tiny_model())
        kept, again = (
            gradients(learner(model, max_tokens_per_microbatch=50, activation_checkpointing=x), rows)
            for x in (False, True)
        )
        assert_same_update(kept, again)
        assert kept[0]["forwarded_tokens"] == again[0]["forwarded_tokens"] < 1.3 * kept[0]["unique_tokens"]

    def test_activation_checkpointing_of_layers_that_are_not_marked(self):
        model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2))
        with pytest.raises(ConfigError, match="marks no layers of OpenAIGPT"):
            learner(model, activation_checkpointing=True)

    def test_bfloat16_is_near_float32(self):
        model = tiny_model()
        rows = rows_of(rollouts(4), model=model)
        exact, rounded = gradients(learner(model), rows)[0], gradients(learner(model, autocast="bfloat16"), rows)[0]
        assert rounded["loss"] == pytest.approx(exact["loss"], abs=0.1)
        assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.2)


class TestSupervised:
    """policy_loss="nll"."""

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 10**6), st.sampled_from([None, 40]))
    @example(82873, None)  # 2e-6 where a part of the model's is rounded to float32
    def test_loss_and_gradient_are_torchs_cross_entropy_on_the_conversations(self, seed: int, limit: int | None):
        """Each call apart, its prompt labelled -100, as supervised trainers have it; in float64, which transformers'
        eager attention leaves for its softmax."""
        model: Any = tiny_model(attention="sdpa").double()
        ts = [*group(3, seed), *rollouts(2, seed)]
        rows = [row for t in ts for row in merge(t, {x.call.id: 1.0 for x in t.transitions})]
        calls = [x.call for t in ts for x in t.transitions if x.trainable and x.call.response_ids.size]
        if not calls:
            return
        subject = learner(model, policy_loss="nll", grad_clip=None, max_tokens_per_microbatch=limit)
        metrics, found = gradients(subject, rows)
        model.zero_grad()
        losses, labels = [], [labels_of(c) for c in calls]
        for c, labels_T in zip(calls, labels, strict=True):
            logits = model(torch.from_numpy(c.ids.astype(np.int64))[None].to(model.device)).logits[0].cpu()
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], labels_T[1:], reduction="sum"))
        expected = torch.stack(losses).sum() / sum(int((x >= 0).sum()) for x in labels)
        expected.backward()
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert metrics["nll"] == pytest.approx(expected.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad.cpu(), rtol=1e-6, atol=1e-6)

    def test_advantages_weigh_tokens_and_nothing_is_read_of_the_sampler(self):
        model = tiny_model()
        ts = rollouts(3, seed=4)
        numbers = {x.call.id: float(k) for k, x in enumerate(x for t in ts for x in t.transitions)}
        rows = [row for t in ts for row in merge(t, numbers)]
        other = [
            replace(r, logprobs=np.full_like(r.logprobs, np.nan), temperatures=np.full_like(r.temperatures, 0.3))
            for r in rows
        ]
        subject = learner(model, policy_loss="nll")
        assert_same_update(gradients(subject, rows), gradients(subject, other))
        at_one = [replace(r, temperatures=np.ones_like(r.temperatures)) for r in rows]
        logprobs = subject.sequence_logprobs(at_one)
        weighed = np.concatenate([(-x * r.advantages)[r.action_mask] for r, x in zip(rows, logprobs, strict=True)])
        plain = np.concatenate([-x[r.action_mask] for r, x in zip(rows, logprobs, strict=True)])
        metrics = gradients(subject, rows)[0]
        assert metrics["loss"] == pytest.approx(weighed.mean(), rel=1e-5)
        assert metrics["nll"] == pytest.approx(plain.mean(), rel=1e-5)
        assert not {name for name in metrics if "ratio" in name or "clip" in name or "kl" in name}
        assert metrics["forwarded_tokens"] == metrics["unique_tokens"] < sum(map(len, rows))

    @pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
    def test_an_adapter_learns_the_answers(self, autocast: str):
        model = lora_model()
        rows = [row for t in rollouts(3) for row in merge(t, {x.call.id: 1.0 for x in t.transitions})]
        subject = learner(model, policy_loss="nll", autocast=autocast, learning_rate=3e-2)
        losses = [subject.update(rows)["nll"] for _ in range(30)]
        assert losses[-1] < 0.6 * losses[0]


class TestPreferences:
    """policy_loss="dpo"."""

    PAIRS = (("0-0", "0-1"), ("0-2", "0-1"), ("1-0", "1-1"))
    """One rollout is in two pairs; several calls and rows each."""

    def rows(self) -> tuple[list[Trajectory], list[TrainingRow]]:
        ts = [*group(3, 0), *group(2, 1)]
        return ts, [row for t in ts for row in merge(t, {x.call.id: 1.0 for x in t.transitions})]

    @pytest.mark.parametrize("limit", [None, 30])
    def test_loss_and_gradient_are_those_of_the_formula_on_the_conversations(self, limit: int | None):
        """In float64, against autograd through both sides of each pair at once; some steps away from the reference."""
        model: Any = tiny_model().double()
        ts, rows = self.rows()
        subject = learner(model, policy_loss="dpo", beta=0.3, grad_clip=None, max_tokens_per_microbatch=limit)
        reference = copy.deepcopy(model)
        for _ in range(3):
            subject.update(rows, pairs=self.PAIRS)
        metrics = subject.update(rows, lr_scale=0.0, pairs=self.PAIRS)
        found = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        policy_sums, reference_sums = ({t.rollout_id: log_likelihood(m, t) for t in ts} for m in (model, reference))
        ratios = {name: policy_sums[name] - reference_sums[name].detach() for name in policy_sums}
        margins = torch.stack([0.3 * (ratios[chosen] - ratios[rejected]) for chosen, rejected in self.PAIRS])
        expected = -torch.nn.functional.logsigmoid(margins).mean()
        expected.backward()
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert metrics["reward_margin"] == pytest.approx(margins.mean().item(), rel=1e-5)
        assert metrics["reward_accuracy"] == pytest.approx((margins > 0).double().mean().item())
        chosen = [policy_sums[pair[0]].item() for pair in self.PAIRS]
        assert metrics["chosen_logprob"] == pytest.approx(np.mean(chosen), rel=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("model", [tiny_model, lora_model])
    def test_the_chosen_side_wins(self, model: Any):
        _, rows = self.rows()
        subject = learner(model(), policy_loss="dpo", learning_rate=1e-2, minibatches=2)
        metrics = [subject.update(rows, pairs=self.PAIRS) for _ in range(8)]
        assert metrics[0]["optimizer_steps"] == 2  # two tasks: pairs that share a rollout stay together
        assert metrics[-1]["reward_accuracy"] == 1.0
        assert metrics[-1]["reward_margin"] > max(0.5, metrics[0]["reward_margin"])
        assert metrics[-1]["loss"] < metrics[0]["loss"]

    def test_at_the_reference_nothing_is_preferred(self):
        _, rows = self.rows()
        metrics = learner(lora_model(dropout=0.5), policy_loss="dpo").update(rows, pairs=self.PAIRS)
        assert metrics["loss"] == pytest.approx(np.log(2), rel=1e-6)
        assert metrics["reward_margin"] == 0.0
        assert metrics["chosen_logprob"] < 0
        assert not {name for name in metrics if "ratio" in name or "clip" in name or "kl" in name}

    def test_rows_without_a_pair_are_left_out(self):
        _, rows = self.rows()
        subject = learner(policy_loss="dpo")
        pairs = self.PAIRS[2:]
        alone = [row for row in rows if row.rollout_id[0] == "1"]
        metrics = [subject.update(r, lr_scale=0.0, pairs=pairs) for r in (rows, alone)]
        assert metrics[0] == metrics[1]

    def test_pairs_that_cannot_be_compared(self):
        _, rows = self.rows()
        with pytest.raises(TrainingError, match=r"1 rollout\(s\) of the pairs have no token.*rollout=9-9"):
            learner(policy_loss="dpo").update(rows, pairs=[("0-0", "9-9")])
        with pytest.raises(TrainingError, match="pairs were passed to the loss 'nll'"):
            learner(policy_loss="nll").update(rows, pairs=self.PAIRS)
        with pytest.raises(NoTrainableDataError):
            learner(policy_loss="dpo").update(rows)


def log_likelihood(model: Any, t: Trajectory) -> torch.Tensor:
    """Of all that was sampled in a rollout, call by call; float64 []."""
    total = torch.zeros((), dtype=torch.float64)
    for c in (x.call for x in t.transitions if x.trainable and x.call.response_ids.size):
        logits = model(torch.from_numpy(c.ids.astype(np.int64))[None].to(model.device)).logits[0].cpu()
        total = total - torch.nn.functional.cross_entropy(logits[:-1], labels_of(c)[1:], reduction="sum")
    return total


def labels_of(call_: Any) -> torch.Tensor:
    """Token ids of the answer, -100 before it; int64 [T]."""
    ids = torch.from_numpy(call_.ids.astype(np.int64))
    ids[: call_.prompt_ids.size] = -100
    return ids


class TestUpdate:
    def test_a_value_head_learns_what_the_calls_of_a_state_return(self):
        """Two prompts, one always worth 1 and the other -1: the values before their answers move apart, to them."""
        model = tiny_model()
        subject = learner(model, critic=True, learning_rate=1e-4, value_learning_rate=3e-2, value_clip=None)
        ts = [trajectory([call(0, [5 + k] * 6, [7, 8, 9])], f"r{k}") for k in range(2)]
        rows = [merge(t, {"r/0": value})[0] for t, value in zip(ts, (1.0, -1.0), strict=True)]
        true = subject.sequence_logprobs(rows)
        rows = [replace(r, logprobs=np.where(r.action_mask, x, 0)) for r, x in zip(rows, true, strict=True)]
        first = subject.update(rows)
        for _ in range(60):
            last = subject.update(rows)
        assert last["value_error"] < 0.2 < first["value_error"]
        found = subject._forward(subject._policy, rows, [r.action_mask for r in rows], "values")
        values = [v[r.action_mask] for v, r in zip(found, rows, strict=True)]
        assert values[0].min() > 0.5
        assert values[1].max() < -0.5

    def test_a_value_head_resumes_with_the_rest(self):
        one, two = (learner(tiny_model(), critic=True) for _ in range(2))
        rows = rows_of(rollouts(3))
        one.update(rows)
        two.load_state_dict(one.state_dict())
        assert one.update(rows) == two.update(rows)
        with pytest.raises(CheckpointError):
            learner(tiny_model()).load_state_dict(one.state_dict())

    def test_a_step_makes_rewarded_tokens_likelier_and_punished_ones_less_likely(self):
        model = tiny_model()
        t = trajectory([call(0, list(range(20)), [7, 8, 9]), call(1, list(range(20)), [3, 2])])
        (row,) = merge(t, {"r/0": 1.0, "r/1": -1.0})
        subject = learner(model, learning_rate=1e-3)
        before = subject.sequence_logprobs([row])[0]
        row = replace(row, logprobs=np.where(row.action_mask, before, 0).astype(np.float32))
        metrics = subject.update([row])
        change = subject.sequence_logprobs([row])[0] - before
        assert change[row.calls == 0].sum() > 0 > change[row.calls == 1].sum()
        assert metrics["abs_log_ratio"] == pytest.approx(0, abs=1e-5)
        assert metrics["approx_kl"] == pytest.approx(0, abs=1e-5)

    def test_the_gradient_is_that_of_the_formula_written_out(self):
        model = tiny_model()
        ids, n_prompt = [1, 2, 3, 4, 5, 6], 3
        t = trajectory([call(0, ids[:n_prompt], ids[n_prompt:], logprobs=[-3.0, -3.1, -2.9])])
        (row,) = merge(t, {"r/0": 2.0})
        _, found = gradients(learner(model, clip_low=0.99, clip_high=1e9, grad_clip=None), [row])
        model.zero_grad()
        logprobs = model(torch.tensor([ids]).to(model.device)).logits[0].cpu().log_softmax(-1)[range(2, 5), ids[3:]]
        ratio = (logprobs - torch.tensor([-3.0, -3.1, -2.9])).exp()
        (-2.0 * ratio).mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad.cpu(), rtol=1e-4, atol=1e-6)

    def test_tokens_that_are_not_masked_in_give_no_gradient(self):
        model = tiny_model()
        prompt = [1, 2, 3]
        base = call(0, prompt, [4, 5], finish="cancelled")
        t = trajectory([base, call(1, [*prompt, 4, 5, 6], [7])])
        (row,) = merge(t, {"r/0": 100.0, "r/1": 1.0})
        alone = merge(trajectory([call(0, [*prompt, 4, 5, 6], [7], logprobs=[-2.0])]), {"r/0": 1.0})
        assert_same_update(gradients(learner(model), [row]), gradients(learner(model), alone))

    def test_metrics_are_finite_floats_and_say_what_was_done(self):
        model = tiny_model()
        rows = rows_of(rollouts(3), model=model)
        metrics = learner(model, kl_coef=0.1).update(rows, lr_scale=0.5)
        assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
        assert metrics["tokens"] == sum(row.n_actions for row in rows)
        assert metrics["learning_rate"] == pytest.approx(5e-3)
        assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)
        assert 0 < metrics["clip_fraction"] < 1
        assert metrics["max_abs_log_ratio"] >= metrics["abs_log_ratio"] > 0

    def test_the_gradient_norm_is_clipped_and_reported_unclipped(self):
        model = tiny_model()
        rows = rows_of(rollouts(3), model=model)
        free, found = gradients(learner(model, grad_clip=None), rows)
        assert free["grad_norm"] == pytest.approx(
            torch.stack([g.norm() for g in found.values()]).norm().item(), rel=1e-5
        )
        clipped, found = gradients(learner(model, grad_clip=0.01), rows)
        assert clipped["grad_norm"] == pytest.approx(free["grad_norm"], rel=1e-5)
        assert torch.stack([g.norm() for g in found.values()]).norm().item() == pytest.approx(0.01, rel=1e-2)

    def test_a_mini_batch_has_whole_groups_so_that_each_prompt_is_forwarded_once(self):
        rng, model = np.random.default_rng(0), tiny_model()
        prompts = [[task, *rng.integers(0, VOCABULARY, 20).tolist()] for task in range(4)]
        names = [(task, f"{rng.random()}") for task in range(4) for _ in range(4)]
        made = [
            trajectory([call(0, prompts[task], rng.integers(0, VOCABULARY, 5).tolist(), rollout=name)], name)
            for task, name in sorted(names, key=itemgetter(1))
        ]
        metrics = learner(model, minibatches=4).update(rows_of(made, model=model))
        assert metrics["optimizer_steps"] == 4
        assert metrics["forwarded_tokens"] == metrics["unique_tokens"]

    def test_names_of_rollouts_decide_nothing(self):
        """They are drawn anew in each run, which must repeat another of its seed all the same."""
        found = []
        for names in ("abcd", "dbca"):
            model, rng = tiny_model(), np.random.default_rng(0)
            made = [
                trajectory([call(0, [1, 2, n], rng.integers(0, VOCABULARY, 5).tolist(), rollout=name)], name)
                for n, name in enumerate(names)
            ]
            found.append(learner(model, minibatches=2, learning_rate=1e-2).update(rows_of(made, model=model)))
        assert found[0] == found[1]

    def test_the_kl_penalty_holds_the_policy_near_its_start(self):
        drift = []
        for coefficient in (0.001, 10.0):
            model = tiny_model()
            subject = learner(model, kl_coef=coefficient, learning_rate=1e-3)
            for _ in range(5):
                metrics = subject.update(rows_of(rollouts(3), model=model))
            drift.append(metrics["reference_kl"])
        assert 0 < drift[1] < drift[0]

    @pytest.mark.parametrize("options", [{}, {"policy_loss": "gspo"}, {"minibatches": 2}, {"weight_decay": 0.1}])
    def test_a_step_that_goes_too_far_is_shortened(self, options: dict[str, Any]):
        """With the KL computed here, over all tokens, from log-probs before and after."""
        moved, shares = [], []
        for bound in (None, 0.05):
            model = tiny_model()
            subject = learner(model, learning_rate=0.1, max_kl=bound, **options)
            rows = rows_of(rollouts(4), model=model)
            before = np.concatenate(subject.sequence_logprobs(rows, trained_only=True))
            metrics = subject.update(rows)
            ratio = np.concatenate(subject.sequence_logprobs(rows, trained_only=True)) - before
            trained = np.concatenate([row.action_mask for row in rows])
            moved.append(-ratio[trained].mean())
            shares.append(metrics.get("step_taken"))
        assert moved[0] > 0.5
        assert shares[0] is None
        assert moved[1] < 0.05 * 1.01 * options.get("minibatches", 1) ** 2
        assert (0 if options or DEVICE != CPU else 0.01) <= shares[1] < 1

    def test_a_step_that_no_halving_saves_is_taken_back_whole(self):
        model = tiny_model()
        subject = learner(model, learning_rate=1e-2, max_kl=1e-12)
        # All tokens are punished, so that the KL is above 0 however short the step is.
        rows = [replace(row, advantages=-np.abs(row.advantages)) for row in rows_of(rollouts(3), model=model)]
        before = weights(model)
        metrics = subject.update(rows)
        assert metrics["step_taken"] == 0
        assert metrics["step_kl"] > 1e-12
        for name, weight in weights(model).items():
            torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-6)

    def test_a_step_within_the_bound_is_the_same_to_the_bit(self):
        made = []
        for bound in (None, 1e9):
            model = tiny_model()
            learner(model, max_kl=bound).update(rows_of(rollouts(3), model=model))
            made.append(weights(model))
        assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])

    def test_the_learning_rate_warms_up_and_decays(self):
        config = LearnerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear", total_steps=6)
        assert [config.rate(k) for k in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
        assert LearnerConfig(learning_rate=2.0).rate(10**6) == 2.0

    def test_dropout_of_the_model_stays_off(self):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.5)).train()
        rows = rows_of(rollouts(2), model=model)
        assert_same_update(gradients(learner(model), rows), gradients(learner(model), rows))


class TestErrors:
    def test_nothing_to_train(self):
        t = trajectory([call(0, [1, 2], [3], finish="cancelled")])
        for rows in ([], merge(t, {"r/0": 1.0})):
            with pytest.raises(NoTrainableDataError, match=f"none of {len(rows)} rows"):
                learner().update(rows)

    @pytest.mark.parametrize("field", ["advantages", "logprobs"])
    def test_numbers_that_are_not_finite_name_rollout_and_calls(self, field: str):
        model = tiny_model()
        rows = rows_of(rollouts(2), model=model)
        bad = next(i for i, row in enumerate(rows) if row.n_actions)
        rows[bad] = replace(rows[bad], **{field: np.full(len(rows[bad]), np.nan, np.float32)})
        before = weights(model)
        with pytest.raises(
            TrainingError, match=rf"not finite.*rollout={rows[bad].rollout_id}.*calls={rows[bad].call_ids[0]}"
        ):
            learner(model).update(rows)
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())

    def test_a_loss_that_is_not_finite_leaves_the_weights_and_names_the_calls(self):
        model = tiny_model()
        with torch.no_grad():
            model.get_input_embeddings().weight[5] = float("nan")
        bad = merge(trajectory([call(0, [1, 5, 2], [3], rollout="bad")], "bad"), {"bad/0": 1.0})
        good = merge(trajectory([call(0, [1, 2], [3], rollout="good")], "good"), {"good/0": 1.0})
        subject = learner(model)
        before, state = weights(model), subject.state_dict()
        with pytest.raises(TrainingError, match="not finite") as caught:
            subject.update([*good, *bad])
        assert caught.value.where == {"rollouts": "bad", "calls": "bad/0"}
        assert all(torch.equal(v.nan_to_num(), before[n].nan_to_num()) for n, v in weights(model).items())
        assert subject.state_dict()["updates"] == state["updates"] == 0
        assert all(p.grad is None for p in model.parameters())

    def test_token_ids_that_the_model_does_not_have(self):
        rows = merge(trajectory([call(0, [1, VOCABULARY], [3])]), {"r/0": 1.0})
        with pytest.raises(TrainingError, match=f"0 to {VOCABULARY - 1}"):
            learner().update(rows)

    def test_a_frozen_model(self):
        with pytest.raises(ConfigError, match="frozen"):
            learner(tiny_model().requires_grad_(False))

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"loss_agg": "token-meen"}, "token-mean"),
            ({"kl_kind": "k4"}, "k3"),
            ({"learning_rate": float("nan")}, "learning_rate"),
            ({"dual_clip": 0.5}, "dual_clip"),
            ({"schedule": "linear"}, "total_steps"),
            ({"total_steps": 5}, "total_steps"),
            ({"update_epochs": 0}, "update_epochs"),
            ({"autocast": "float16"}, "bfloat16"),
            ({"loss_scale_factor": 3.0}, "loss_scale_factor"),
            ({"policy_loss": "nil"}, "nll"),
            ({"policy_loss": "nll", "critic": True}, "learns from no returns"),
            ({"policy_loss": "nll", "rollout_is": "token"}, "ratio"),
            ({"policy_loss": "dpo", "kl_coef": 0.1}, "beta holds"),
            ({"policy_loss": "dpo", "beta": 0.0}, "beta"),
        ],
    )
    def test_options_that_cannot_be_used(self, option: dict[str, Any], message: str):
        with pytest.raises(ConfigError, match=message):
            LearnerConfig(**option)


class TestState:
    @pytest.mark.parametrize("lora", [False, True])
    def test_a_resumed_run_equals_one_never_stopped_to_the_bit(self, lora: bool, tmp_path):
        def model() -> Any:
            return lora_model(dropout=0.3) if lora else tiny_model()

        options = dict(minibatches=3, update_epochs=2, kl_coef=0.1, schedule="linear", total_steps=8, seed=5)
        data = [rows_of(rollouts(5, seed=k), model=tiny_model()) for k in range(4)]
        straight = learner(model(), **options)
        first = learner(model(), **options)
        for rows in data[:2]:
            assert straight.update(rows) == first.update(rows)
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = learner(model(), **options)
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for rows in data[2:]:
            torch.rand(3)
            assert straight.update(rows) == second.update(rows)
        a, b = straight.state_dict(), second.state_dict()
        assert all(torch.equal(a["weights"][n], b["weights"][n]) for n in a["weights"])
        for k, moments in a["optimizer"]["state"].items():
            assert all(torch.equal(moments[n], b["optimizer"]["state"][k][n]) for n in moments)

    def test_loading_keeps_the_parameters_in_place_and_what_was_loaded_as_it_was(self):
        model = tiny_model()
        rows = rows_of(rollouts(2), model=model)
        subject = learner(model)
        subject.update(rows)
        state = copy.deepcopy(subject.state_dict())
        kept = copy.deepcopy(state)
        pointers = [p.data_ptr() for p in model.parameters()]
        subject.update(rows)
        subject.load_state_dict(state)
        subject.update(rows)
        assert [p.data_ptr() for p in model.parameters()] == pointers
        assert all(torch.equal(state["weights"][n], kept["weights"][n]) for n in kept["weights"])
        for k, moments in kept["optimizer"]["state"].items():
            assert all(torch.equal(moments[n], state["optimizer"]["state"][k][n]) for n in moments)

    def test_a_state_of_another_model_is_refused(self):
        with pytest.raises(CheckpointError, match="trained weights"):
            learner().load_state_dict(learner(lora_model()).state_dict())


class TestLora:
    def test_only_the_adapter_is_trained(self):
        model = lora_model()
        before = weights(model)
        subject = learner(model)
        subject.update(rows_of(rollouts(3), model=model))
        changed = {n for n, value in weights(model).items() if not torch.equal(value, before[n])}
        assert changed
        assert all("lora_" in name for name in changed)
        assert all("lora_" in name for name in subject.state_dict()["weights"])

    def test_merged_and_unmerged_agree(self):
        model = lora_model()
        data = rollouts(3, seed=2)
        assert_same_update(
            gradients(learner(model), rows_of(data, merge, model)),
            gradients(learner(model), rows_of(data, unmerged, model)),
        )

    @pytest.mark.parametrize("layers", ["all-linear", ["q_proj"]])
    def test_a_beginning_is_computed_once_for_several_micro_batches(self, layers: str | list[str]):
        """Of some of its keys and values there is no gradient where the first layer's have no adapter."""
        model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=layers, task_type="CAUSAL_LM"))
        rows = rows_of(group(5, 3), model=tiny_model())
        ours = gradients(learner(model, max_tokens_per_microbatch=50, kl_coef=0.1), rows)
        assert_same_update(ours, gradients(learner(model, share_prefixes=False, kl_coef=0.1), rows))
        assert ours[0]["forwarded_tokens"] < 1.3 * ours[0]["unique_tokens"]

    def test_the_reference_is_the_model_without_its_adapter(self):
        model = lora_model()
        rows = rows_of(rollouts(3), model=model)
        subject = learner(model, kl_coef=0.01)
        assert subject.update(rows)["reference_kl"] == pytest.approx(0, abs=1e-6)
        assert subject.update(rows)["reference_kl"] > 1e-6

    def test_adapter_dropout_is_on_in_updates_alone(self):
        model = lora_model(dropout=0.5)
        rows = rows_of(rollouts(3), model=tiny_model())
        subject = learner(model)
        subject.update(rows)
        again = [subject.sequence_logprobs(rows) for _ in range(2)]
        for a, b in zip(*again, strict=True):
            np.testing.assert_array_equal(a, b)
        draws = [gradients(subject, rows)[0]["entropy"] for _ in range(2)]
        assert draws[0] != draws[1]
