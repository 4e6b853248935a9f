"""`agl.VERL(share_prefixes=True)`: verl's engine computes shared prefixes once, and what it computes stays the same."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jobs import algorithm, quickstart, train
from recomputed import ids_of, local_rows, whole
from test_schemas import sampled
from tiny_engine import tiny_model, tiny_tokenizer
from untrained import make_untrained
from verl_cpu.settings import environment

from agl.trainer.local.learner.prefix_trees import chain, prefix_trees
from agl_verl.rows import GRAMMARS, Chain

pytestmark = pytest.mark.timeout(900)
PROGRAM = Path(__file__).parent / "programs" / "forwarded.py"


def fields(prompt: Any, response: Any, mask: Any, seed: int, grammars: str = "") -> dict[str, Any]:
    """A row as verl's workers have it, with advantages of its own."""
    ids = np.concatenate([prompt, response]).astype(np.int64)
    mask = np.asarray(mask, dtype=np.int64)
    rng = np.random.default_rng(seed)
    return {
        "prompts": ids[: len(prompt)], "responses": ids[len(prompt) :], "input_ids": ids,
        "position_ids": np.arange(ids.size), "response_mask": mask, "loss_mask": mask,
        "advantages": rng.normal(size=mask.size).astype(np.float32) * mask,
        "old_log_probs": np.full(mask.size, -4, np.float32), GRAMMARS: grammars,
    }  # fmt: skip


def grouped(vocabulary: int) -> list[dict[str, Any]]:
    """Four groups of four: a common system text and prompts of their own; one to three turns, one row twice, and one of
    padding. Answers of a group begin alike."""
    rng = np.random.default_rng(1)
    system, rows = rng.integers(vocabulary, size=17), []
    for group in range(4):
        prompt = np.concatenate([system, rng.integers(vocabulary, size=5 + 7 * group)])
        for member in range(4):
            turns = [np.full(int(rng.integers(2, 9)), k % 2 == 0) for k in range(2 * (member % 3) + 1)]
            mask = np.concatenate(turns).astype(np.int64)
            response = rng.integers(vocabulary, size=mask.size)
            response[:2] = prompt[:2]
            row = fields(prompt, response, mask, len(rows))
            if (group, member) == (1, 3):
                row = fields(prompt[:1], response[:1], [0], 0)
            if (group, member) == (2, 1):
                row = {**rows[-1], "advantages": 2 * rows[-1]["advantages"]}
            rows.append(row)
    return rows


def computed(
    folder: Path,
    model: Path,
    rows: list[dict[str, Any]],
    library: str,
    *,
    ranks: int = 1,
    lora: int = 0,
    max_tokens: int = 90,
) -> list[dict[str, Any]]:
    """What the ranks of verl's engine write."""
    folder.mkdir()
    torch.save(rows, folder / "rows.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(model), str(folder / "rows.pt"), str(folder), library,
             *map(str, (rank, ranks, port, max_tokens, lora))],
            env={**os.environ, **environment(), "HF_HUB_OFFLINE": "1"}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, error in zip(started, errors, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def require_equal(rows: list[dict[str, Any]], whole_rows: list[dict[str, Any]], shared: list[dict[str, Any]]) -> None:
    """Outputs of trained tokens and gradients, to rounding; verl has no use for other outputs, which are 0."""
    mine, theirs = ([of for rank in side for of in zip(rank["log_probs"], rank["entropy"], strict=True)]
                    for side in (shared, whole_rows))  # fmt: skip
    assert len(mine) == len(theirs) == len(rows)
    for row, ours, verls in zip(rows, mine, theirs, strict=True):
        at = row["input_ids"].size - row["loss_mask"].size + np.flatnonzero(row["loss_mask"]) - 1
        for our, verl in zip(ours, verls, strict=True):
            torch.testing.assert_close(our[at], verl[at], atol=5e-6, rtol=1e-6)
            assert (np.delete(our.numpy(), at) == 0).all()
    gradients = [name for name in whole_rows[0] if name.startswith("grad.")]
    assert sum(whole_rows[0][name].abs().max() > 0 for name in gradients) >= len(gradients) / 2
    for name in gradients:
        expected = whole_rows[0][name]
        assert (shared[0][name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "lora"), [(2, 0), pytest.param(1, 4, marks=pytest.mark.night)])
def test_the_engine_computes_the_same(tmp_path: Path, ranks: int, lora: int) -> None:
    from transformers import AutoConfig

    model = make_untrained(tmp_path / "model", head_dim=32)
    rows = grouped(AutoConfig.from_pretrained(model).vocab_size)
    verls = computed(tmp_path / "verl", model, rows, "-", ranks=ranks, lora=lora)
    ours = computed(tmp_path / "agl", model, rows, "agl_verl.trees", ranks=ranks, lora=lora)
    require_equal(rows, verls, ours)
    counts = [[rank["micro_batches"] for rank in side] for side in (verls, ours)]
    assert len(set(counts[1])) == 1
    assert counts[1][0] < counts[0][0], "a micro-batch is filled with different tokens"
    # The attention that it was trained with is none that a policy could be loaded with.
    assert "agl_tree" not in (tmp_path / "agl" / "config.json").read_text()


@pytest.mark.slow
def test_answers_within_a_schema_share_their_prompts(tmp_path: Path) -> None:
    """What was hidden when they were sampled is hidden here, too; rows of the same answer are held to it, or free."""

    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)

    def row(one: Chain, seed: int) -> dict[str, Any]:
        held = json.dumps(one.grammars) if one.grammars else ""
        return fields(one.prompt_ids, one.response_ids, one.response_mask, seed, held)

    held, free, *others = sampled()
    untrained = fields(
        held.prompt_ids, held.response_ids, [*held.response_mask[:-5], *[0] * 5], 9, json.dumps(held.grammars)
    )
    rows = [row(held, 0), row(held, 1), untrained, row(free, 2), *(row(other, 3 + i) for i, other in enumerate(others))]
    rows[4] = {**fields(held.prompt_ids, held.response_ids, held.response_mask, 4)}  # the same answer, free
    verls = computed(tmp_path / "verl", model, rows, "agl_verl.masks", max_tokens=400)
    ours = computed(tmp_path / "agl", model, rows, "agl_verl.trees", max_tokens=400)
    require_equal(rows, verls, ours)
    first, alike, _, _, unheld = (ours[0]["log_probs"][i] for i in range(5))
    assert torch.equal(first, alike)
    assert (first - unheld).abs().max() > 1, "nothing was hidden, so this shows nothing"


@pytest.mark.slow
def test_a_model_whose_attention_takes_more_than_a_mask_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = tmp_path / "model"
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, attn_logit_softcapping=20.0,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    with pytest.raises(
        AssertionError, match=r"cannot compute shared prefixes once: .*softcap.*\n.*share_prefixes=False"
    ):
        computed(tmp_path / "agl", model, grouped(64), "agl_verl.trees")


@pytest.mark.slow
def test_a_training_by_two_ranks(cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path) -> None:
    """The rows of the local trainer, with log-probs of the policy that sampled them; what is saved can be loaded."""
    from transformers import AutoModelForCausalLM

    result = train(
        quickstart(),
        algorithm(
            tiny_policy, {"trainer.checkpoint_callback_class": "captured.Captured"}, steps=2, checkpoint_every=1,
            batch_size=8, val_before_train=False, gpus=2, share_prefixes=True,
        ),
        tmp_path / "run", heldout=4,
    )  # fmt: skip
    assert result.history[1]["verl/agl/probe/moved"] > 1e-2
    for step, entry in enumerate(result.history, start=1):
        assert entry["verl/training/rollout_probs_diff_max"] < 1e-2
        assert entry["verl/agl/probe/logprob_diff"] < 1e-3
        rows = torch.load(tmp_path / "run" / "checkpoints" / f"global_step_{step}" / "rows.pt")
        ours = asyncio.run(local_rows(result.store, step))
        assert Counter(map(ids_of, rows.values())) == Counter(ids for ids, of_ids in ours.items() for _ in of_ids)
        for row in rows.values():
            mask = row["response_mask"].bool()
            off = (row["old_log_probs"] - row["rollout_log_probs"])[mask].abs()
            # vLLM rounds otherwise, which shows most in tokens that are rarely sampled.
            assert off.mean() < 2e-3
            assert off.max() < 2e-2
            assert (row["old_log_probs"][~mask] == 0).all(), "it computed rows in verl's way"
            n = len(ids_of(row))
            assert any(np.abs(whole(row, "advantages", n) - a).max() <= 1e-6 for _, _, a in ours[ids_of(row)])
    assert AutoModelForCausalLM.from_pretrained(result.policy).config.vocab_size > 0


def test_only_outputs_before_trained_tokens_are_computed() -> None:
    """Of three rows of a group, two of them alike: by hand."""
    from agl_verl.trees import wanted

    ids = [np.array(row) for row in ([5, 6, 7, 8, 9], [5, 6, 7, 8, 4], [5, 6, 7, 8, 9])]
    masks = [np.array([1, 0, 1]), np.array([1, 0, 1]), np.array([0, 1, 1])]
    trees = prefix_trees([chain(row) for row in ids])
    found = wanted(trees, ids, masks, [[], [], []])
    places = trees.places[0]
    expected = {(places[1], 7), (places[3], 9), (places[3], 4), (places[2], 8)}
    assert set(zip(found.places.tolist(), found.labels.tolist(), strict=True)) == expected
    assert found.at.tolist() == [1, 3, 6, 8, 12, 13]
    assert found.labels[found.source].tolist() == [7, 9, 7, 4, 8, 9]
    held = wanted(trees, ids, masks, [[(2, 5, "g")], [], []])
    assert held.places.size == 6


def test_a_micro_batch_of_padding_alone_has_an_output_and_no_token() -> None:
    """A rank whose rows are all padding takes part in the backward pass, as FSDP's other ranks wait for it."""
    from agl_verl.trees import wanted

    ids, masks = [np.array([3, 3]), np.array([3, 3])], [np.array([0]), np.array([0])]
    found = wanted(prefix_trees([chain(row) for row in ids]), ids, masks, [[], []])
    assert (found.places.tolist(), found.source.size, found.at.size) == ([0], 0, 0)
    outputs = torch.ones(found.places.size, requires_grad=True)
    source, at = torch.from_numpy(found.source), torch.from_numpy(found.at)
    torch.zeros(4).index_copy(0, at, outputs[source]).sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.tolist() == [0]


@pytest.mark.parametrize("shares", [False, True])
def test_each_rank_gets_whole_groups(shares: bool) -> None:
    """verl's own division, by length alone, parts every group here."""
    from omegaconf import OmegaConf
    from transfer_queue import KVBatchMeta

    from agl_verl.trainer_hooks import _trainer_class

    trainer = object.__new__(_trainer_class("sync", print, bool, []))
    actor = {"use_dynamic_bsz": True, "ppo_mini_batch_size": 4, "use_prefix_grouper": shares}
    trainer.config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"n": 4}, "actor": actor}, "trainer": {"critic_warmup": 0}}
    )
    trainer.use_critic, trainer.global_steps, trainer._mini_batches = False, 1, {"actor_rollout_ref.actor": 1}
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    tags = [{"seq_len": 100 + 40 * group + 17 * member} for member in range(4) for group in range(4)]
    keys = [f"{group}_{member}" for member in range(4) for group in range(4)]
    batch = trainer._balance_batch(KVBatchMeta(keys, tags), metrics={})
    ranks = [Counter(key.split("_")[0] for key in batch.keys[at : at + 8]) for at in (0, 8)]
    assert sorted(batch.keys) == sorted(keys)
    assert (max(len(rank) for rank in ranks) == 2) == shares, ranks
    assert [dict(zip(keys, tags, strict=True))[key] for key in batch.keys] == batch.tags
