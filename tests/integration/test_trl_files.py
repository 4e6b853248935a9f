"""What `agl export` writes for TRL is taken by TRL's own trainers as it is, and says what agl trains itself.

Skipped where TRL is not installed.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Asked, quick_tokenizer, tool_call
from traced_runs import TASKS, record

import agl
from agl.mdp.sequence import merge
from agl.trainer.traces.files import IGNORED, write

pytest.importorskip("trl")

OPTIONS: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 64, "max_length": None,
    "gradient_checkpointing": False, "disable_tqdm": True, "max_steps": 1, "learning_rate": 0.0, "logging_steps": 1,
    "save_strategy": "no",
}  # fmt: skip

_answers = itertools.count()


def policy(asked: Asked) -> str:
    """Calls the tool, and then repeats its result in one rollout and gets it wrong in the next."""
    text = quick_tokenizer().decode(asked.prompt_ids.tolist())
    if "<tool_response>" not in text:
        return tool_call(text.split("user\n")[1].split("<|im_end|>")[0])
    right = text.split("<tool_response>\n")[1].split("\n")[0]
    return right if next(_answers) % 2 == 0 else "0"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record(folder, policy)
    return folder


@pytest.fixture(scope="module")
def model(untrained_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(untrained_model, dtype=torch.float32)


def loaded(path: Path, cache: Path) -> Any:
    from datasets import load_dataset

    return load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))


@pytest.mark.night
def test_sft_trainer_takes_the_tokens(recorded: Path, model: Any, untrained_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    data = agl.traces(recorded, where=agl.reward() >= 1)
    facts = asyncio.run(write(data, "sft", tmp_path, model=str(untrained_model)))
    assert facts["format"] == "tokens"
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(tmp_path / "trl"), shuffle_dataset=False, **OPTIONS),
        train_dataset=loaded(tmp_path / "sft.jsonl", tmp_path / "cache"),
        processing_class=AutoTokenizer.from_pretrained(untrained_model),
    )

    # Row for row what agl's learner would be given.
    chosen = data.load(str(untrained_model))
    rows = [row for one in chosen.trajectories for row in merge(one, chosen.weights)]
    theirs = trainer.train_dataset
    assert [list(r) for r in theirs["input_ids"]] == [row.token_ids.tolist() for row in rows]
    labels = [np.where(row.action_mask, row.token_ids, IGNORED).tolist() for row in rows]
    assert [list(r) for r in theirs["labels"]] == labels
    assert len(rows) == facts["rows"] == len(TASKS)

    # And the same loss: minus the mean log-prob of the trained tokens.
    trainer.train()
    total, n = 0.0, 0
    with torch.no_grad():
        for row in rows:
            tokens = torch.from_numpy(row.token_ids.astype(np.int64))
            logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1].float(), -1)
            trained = torch.from_numpy(row.action_mask[1:].copy())
            total -= float(logprobs[trained, tokens[1:][trained]].sum())
            n += int(trained.sum())
    (first, *_) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert first == pytest.approx(total / n, rel=1e-4)


def test_dpo_trainer_takes_the_pairs(recorded: Path, model: Any, untrained_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    facts = asyncio.run(write(agl.traces(recorded), "pairs", tmp_path))
    assert facts["rows"] == len(TASKS)
    tokenizer = AutoTokenizer.from_pretrained(untrained_model)
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(output_dir=str(tmp_path / "trl"), **OPTIONS),
        train_dataset=loaded(tmp_path / "pairs.jsonl", tmp_path / "cache"),
        processing_class=tokenizer,
    )

    # The same tokens as were sampled: the prompt up to the first answer that differs, and the two answers.
    chosen = agl.traces(recorded, where="reward>=1").load(str(untrained_model))
    prompts = [one.transitions[1].call.prompt_ids.tolist() for one in chosen.trajectories]
    # A chat template ends a turn with a line end, which nobody samples.
    end = tokenizer.encode("\n")
    for row, prompt, task in zip(trainer.train_dataset, prompts, TASKS, strict=True):
        assert row["prompt_ids"] == prompt
        assert row["chosen_ids"] == [*tokenizer.encode(f"{task['answer']}<|im_end|>"), *end]
        assert row["rejected_ids"] == [*tokenizer.encode("0<|im_end|>"), *end]
    trainer.train()
    (first, *_) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    # Nothing was learnt yet, so the policy prefers neither: -log sigmoid(0).
    assert first == pytest.approx(np.log(2), abs=1e-3)


def test_rewards_load_as_a_dataset(recorded: Path, tmp_path: Path) -> None:
    asyncio.run(write(agl.traces(recorded), "rewards", tmp_path))
    rows = loaded(tmp_path / "rewards.jsonl", tmp_path / "cache")
    assert sorted(rows["reward"]) == [0.0] * len(TASKS) + [1.0] * len(TASKS)
