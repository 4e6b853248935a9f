"""Supervised fine-tuning and preference pairs give the loss and the gradient of TRL's own trainers on the same rows.

Skipped where TRL is not installed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from call_trees import call, random_calls, trajectory
from tiny_learner import gradients, learner

from agl.mdp.sequence import TrainingRow, merge, unmerged
from agl.mdp.types import Trajectory

pytest.importorskip("trl")

OPTIONS: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 16, "max_length": None,
    "gradient_checkpointing": False, "remove_unused_columns": False, "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(untrained_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(untrained_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(untrained_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(untrained_model)


def rollouts() -> list[Trajectory]:
    """A conversation of three turns, and call trees that fork."""
    turns = [call(0, [1, 2, 3], [4, 5]), call(1, [1, 2, 3, 4, 5, 6], [7]), call(2, [1, 2, 3, 4, 5, 6, 7, 8, 9], [10])]
    made = [trajectory(turns)]
    for name in ("a", "b", "c"):
        made.append(trajectory(random_calls(np.random.default_rng(ord(name)), 5, rollout=name), name))
    return made


def rows_of(ts: list[Trajectory], how: Any = merge) -> list[TrainingRow]:
    return [row for t in ts for row in how(t, {x.call.id: 1.0 for x in t.transitions}) if row.n_actions]


def assert_same_gradient(ours: Mapping[str, torch.Tensor], theirs: Any) -> None:
    assert any(g.abs().max() > 1e-3 for g in ours.values())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_supervised_fine_tuning(model: Any, tokenizer: Any, tmp_path: Path):
    """Chains are TRL's rows as they are, labelled by the action mask; trees are rows of one call each there."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    ts = rollouts()
    apart = [row for t in ts for row in (rows_of([t]) if t.rollout_id == "r" else rows_of([t], unmerged))]
    assert all(row.is_chain for row in apart)
    examples = [
        {"input_ids": row.token_ids.tolist(), "labels": np.where(row.action_mask, row.token_ids, -100).tolist()}
        for row in apart
    ]
    theirs = copy.deepcopy(model)
    trainer = SFTTrainer(
        theirs,
        SFTConfig(str(tmp_path), **OPTIONS),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(examples))])
    n = sum(row.n_actions for row in apart)
    expected = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(n))
    expected.backward()
    metrics, found = gradients(learner(copy.deepcopy(model), policy_loss="nll", grad_clip=None), rows_of(ts))
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["tokens"] == n
    assert metrics["forwarded_tokens"] < sum(map(len, apart))
    assert_same_gradient(found, theirs)


def test_preference_pairs(model: Any, tokenizer: Any, tmp_path: Path):
    """One call a side, as TRL has it; the policy is some steps away from the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rng = np.random.default_rng(0)
    ts: list[Trajectory] = []
    for p in range(3):
        prompt = rng.integers(0, 24, 6).tolist()
        for side in ("chosen", "rejected"):
            answer = rng.integers(0, 24, rng.integers(2, 7)).tolist()
            ts.append(trajectory([call(0, prompt, answer, rollout=f"{p}{side}", temperature=0.7)], f"{p}{side}"))
    pairs = [(f"{p}chosen", f"{p}rejected") for p in range(3)]
    subject = learner(copy.deepcopy(model), policy_loss="dpo", beta=0.2, grad_clip=None, learning_rate=1e-3)
    for _ in range(2):
        subject.update(rows_of(ts), pairs=pairs)
    theirs = copy.deepcopy(subject._model)
    found = subject.update(rows_of(ts), lr_scale=0.0, pairs=pairs)
    ours = {n: p.grad for n, p in subject._model.named_parameters()}

    texts = [{"prompt": "1", "chosen": "2", "rejected": "3"}]
    trainer = DPOTrainer(
        theirs,
        copy.deepcopy(model),
        args=DPOConfig(str(tmp_path), beta=0.2, **OPTIONS),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
    )
    calls = {t.rollout_id: t.transitions[0].call for t in ts}
    inputs = trainer.data_collator(
        [
            {
                "prompt_ids": calls[chosen].prompt_ids.tolist(),
                "chosen_ids": calls[chosen].response_ids.tolist(),
                "rejected_ids": calls[rejected].response_ids.tolist(),
            }
            for chosen, rejected in pairs
        ]
    )
    expected = trainer.compute_loss(trainer.model, inputs)
    expected.backward()
    logged = {name: np.mean(values) for name, values in trainer._metrics["eval"].items()}
    assert found["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert abs(found["reward_margin"]) > 1e-3
    assert found["reward_margin"] == pytest.approx(logged["rewards/margins"], abs=1e-5)
    assert found["reward_accuracy"] == pytest.approx(logged["rewards/accuracies"])
    assert found["chosen_logprob"] == pytest.approx(logged["logps/chosen"], rel=1e-6)
    assert_same_gradient(ours, theirs)
