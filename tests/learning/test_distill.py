"""On-policy distillation: a student becomes as good as its teacher, without any reward."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import openai
import pytest
from roles import WRITER, asked_to_write, writes

import agl
from agl.trainer.quickstart.policy import Recipe, Stage, make_policy

pytestmark = [pytest.mark.slow, pytest.mark.night]


@agl.rollout
async def writer(task: Any, llm: agl.LLM) -> float | None:
    """Writes a number; tells nobody whether it is the right one, unless it is measured."""
    client = openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
    messages: Any = [{"role": "system", "content": WRITER}, {"role": "user", "content": asked_to_write(task["number"])}]
    answer = await client.chat.completions.create(model=llm.model, messages=messages)
    return float(answer.choices[0].message.content == task["number"]) if task["measured"] else None


def tasks(n: int, seed: int, *, measured: bool = False) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"number": str(rng.randrange(10, 100)), "measured": measured} for _ in range(n)]


@pytest.fixture(scope="module")
def teacher(role_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student, further taught to write what it is asked to."""
    folder = tmp_path_factory.mktemp("teacher") / "run" / "policy"
    recipe = Recipe(rows=8, row_tokens=160, warmup_steps=4, learning_rate=1e-3)
    stages = (Stage("writes well", lambda rng: writes(rng, 1.0), 40),)
    make_policy(folder, threads=1, recipe=recipe, stages=stages, start=role_policy)
    return folder.parent


def distill(student: Path, teacher: Any, **changes: Any) -> agl.Distill:
    return agl.Distill(**{
        "model": str(student), "teacher": teacher, "group_size": 4, "batch_size": 16, "steps": 6, "learning_rate": 3e-4,
        "betas": (0.9, 0.95), "max_response_tokens": 12, "max_context": 128, "val_every": 6,
    } | changes)  # fmt: skip


def test_the_student_becomes_as_good_as_its_teacher(role_policy: Path, teacher: Path, tmp_path: Path) -> None:
    trainer = agl.Trainer(distill(role_policy, teacher), n_workers=16, directory=tmp_path, progress=False)
    result = trainer.fit(writer, tasks(256, 0), tasks(64, 1, measured=True))
    successes = [h["val/reward"] for h in result.history if "val/reward" in h]
    divergences = [h["train/reverse_kl"] for h in result.history if "train/reverse_kl" in h]
    print(successes, divergences)
    assert successes[-1] - successes[0] >= 0.2
    assert 0 < divergences[-1] < 0.5 * divergences[0]
