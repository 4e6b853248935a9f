"""Each counted figure of a run's history, against SQL on its database: two agents on one policy, two policies, groups
that are equal, fail whole or keep one rollout, attempts that are tried again, and a resume."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import agl
from agl import tracing
from agl.adapters.langchain import LangChainTracer

GROUP = 4
TASKS = ["equal", "spread", "lost", "one left", "tried again", "one checked", "declared", "half equal"]
"""What becomes of the rollouts of each task."""

_ROLLOUTS = """
    CREATE TEMP VIEW last AS
        SELECT * FROM rollouts AS r
        WHERE status != 'cancelled' AND NOT EXISTS (
            SELECT 1 FROM rollouts AS other
            WHERE other.mode = r.mode AND other.step = r.step AND other.position = r.position AND other.seq > r.seq
            AND other.status != 'cancelled'
        );
    CREATE TEMP VIEW comparisons AS
        SELECT r.step AS step, r.group_key AS group_key, c.policy AS policy, c.agent AS agent,
            count(DISTINCT r.rollout_id) AS n, count(DISTINCT t.return_value) AS different
        FROM last AS r
        JOIN calls AS c ON c.rollout_id = r.rollout_id AND c.attempt = r.attempts
        JOIN trained_calls AS t ON t.call_id = c.id AND t.step = r.step + 1
        WHERE r.mode = 'train' AND r.status = 'succeeded' AND c.policy IS NOT NULL
        GROUP BY r.step, r.group_key, c.policy, c.agent;
"""
"""A resumed run leaves rollouts in the store that it runs again: the last one of a place counts."""

_COUNTS = {
    "train/rollouts": "SELECT count(*) FROM last WHERE mode = 'train' AND step = :step - 1",
    "train/failed_rollouts": """
        SELECT count(*) FROM last WHERE mode = 'train' AND step = :step - 1 AND status = 'failed'""",
    "train/groups": "SELECT count(DISTINCT group_key) FROM last WHERE mode = 'train' AND step = :step - 1",
    "train/failed_attempts": """
        SELECT count(*) FROM attempts AS a JOIN last AS r USING (rollout_id)
        WHERE r.mode = 'train' AND r.step = :step - 1 AND a.status IN ('failed', 'timeout', 'unresponsive')""",
    "train/policy_faults": """
        SELECT count(*) FROM attempts AS a JOIN last AS r ON a.rollout_id = r.rollout_id AND a.attempt = r.attempts
        WHERE r.mode = 'train' AND r.step = :step - 1 AND a.status = 'succeeded' AND a.error LIKE '%own failure%'""",
    "train/dropped_groups": """
        SELECT count(*) FROM (
            SELECT group_key FROM last WHERE mode = 'train' AND step = :step - 1
            EXCEPT SELECT group_key FROM comparisons WHERE step = :step - 1 AND n > 1
        )""",
    "train/zero_variance_groups": """
        SELECT count(*) FROM (
            SELECT group_key FROM comparisons WHERE step = :step - 1 AND n > 1
            GROUP BY group_key HAVING max(different) = 1
        )""",
    "train/trained_rollouts": """
        SELECT count(DISTINCT rollout_id) FROM trained_calls
        WHERE step = :step AND dropped IS NULL AND tokens > 0 AND advantage != 0""",
    "train/updated_policies": "SELECT count(*) FROM policy_versions WHERE step = :step AND version > 0",
    "train/resampled_tasks": f"""
        SELECT count(DISTINCT group_key) FROM last
        WHERE mode = 'train' AND step = :step - 1 AND position >= :batch_size * {GROUP}""",
    "val/failed_rollouts": "SELECT count(*) FROM last WHERE mode = 'val' AND step = :step AND status = 'failed'",
    "val/failed_attempts": """
        SELECT count(*) FROM attempts AS a JOIN last AS r USING (rollout_id)
        WHERE r.mode = 'val' AND r.step = :step AND a.status IN ('failed', 'timeout', 'unresponsive')""",
}


def counted(directory: Path, step: int, batch_size: int) -> dict[str, int]:
    """The figures of one step, by the run's database alone."""
    with sqlite3.connect(directory / "run.db") as database:
        database.executescript(_ROLLOUTS)
        values = {"step": step, "batch_size": batch_size}
        return {name: database.execute(query, values).fetchone()[0] for name, query in _COUNTS.items()}


class Program:
    """A writer and a checker. What becomes of a rollout depends on its task and on its place among those of the task.

    Args:
        interrupted: whether this process gets Ctrl-C in the second step, once the other tasks' rollouts have ended.
    """

    def __init__(self, *, interrupted: bool = False) -> None:
        model = ChatOpenAI(model="any", api_key="unused")  # type: ignore[arg-type]
        self.writer, self.checker = create_agent(model, [], name="writer"), create_agent(model, [], name="checker")
        self._places: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._interrupted = interrupted

    async def __call__(self, task: str) -> float:
        scope = tracing.current()
        assert scope is not None
        places = self._places[task]
        place = places.setdefault(scope.rollout.rollout_id, len(places))
        odd = float(place % 2)
        if task == "half equal" and place >= GROUP and self._interrupted:
            await self._interrupt()
        await self.writer.ainvoke({"messages": [{"role": "user", "content": task}]})
        if task != "one checked" or place % GROUP == 0:
            await self.checker.ainvoke({"messages": [{"role": "user", "content": task}]})
        if (
            task == "lost"
            or (task == "one left" and place % GROUP)
            or (task == "tried again" and odd < scope.rollout.attempt % 2)
        ):
            raise ConnectionError(f"the tool server refused {place}")
        if task == "declared" and place % GROUP == 0:
            raise agl.PolicyFault("no answer")
        if task == "half equal":
            agl.emit_reward({"verdict": odd}, agent="checker")
        return 1.0 if task in ("equal", "one left", "half equal") else odd

    async def _interrupt(self) -> None:
        await asyncio.sleep(2)
        if self._interrupted:
            self._interrupted = False
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)


def fit(program: Program, algorithm: Any, directory: Path, *, agents: Any, resume: bool = False) -> agl.Result:
    trainer = agl.Trainer(
        algorithm, agents=agents, tracer=LangChainTracer(), n_workers=4, max_attempts=2, directory=directory,
        progress=False, credit=agl.credit.PerAgent(),
    )  # fmt: skip

    @agl.rollout
    async def agent(task: str) -> float:
        return await program(task)

    return trainer.fit(agent, TASKS, TASKS[:5], resume=resume)


def checked(result: agl.Result, batch_size: int) -> list[dict[str, int]]:
    """The figures of each step, which are those of the database."""
    steps = []
    for entry in result.history:
        by_sql = counted(result.directory, entry["step"], batch_size)
        figures = {name: entry[name] for name in by_sql if name in entry}
        assert figures == {name: by_sql[name] for name in figures}, f"step {entry['step']}"
        steps.append(figures)
    return steps


SETTINGS: dict[str, Any] = {
    "group_size": GROUP, "learning_rate": 1e-4, "max_response_tokens": 4, "max_context": 128, "device": "cpu",
    "val_every": 1,
}  # fmt: skip


@pytest.mark.parametrize("agents", [None, {"writer": "a", "checker": "b"}], ids=["one policy", "two policies"])
def test_the_counts_of_a_step_are_those_of_the_database(untrained_model: Path, tmp_path: Path, agents: Any) -> None:
    algorithm = agl.GRPO(model=str(untrained_model), batch_size=len(TASKS), steps=1, **SETTINGS)
    _, step = checked(fit(Program(), algorithm, tmp_path, agents=agents), len(TASKS))
    assert (step["train/rollouts"], step["train/groups"], step["train/failed_rollouts"]) == (32, 8, 7)
    assert step["train/dropped_groups"] == 2, "one failed whole, one kept one rollout"
    assert step["train/zero_variance_groups"] == 1
    assert 0 < step["train/trained_rollouts"] < 25
    assert step["train/policy_faults"] == 1
    assert step["train/failed_attempts"] == 16
    assert step["train/updated_policies"] == (2 if agents else 1)


def test_tasks_that_were_sampled_in_place_of_others_count(untrained_model: Path, tmp_path: Path) -> None:
    algorithm = agl.DAPO(model=str(untrained_model), batch_size=4, steps=1, max_gen_batches=2, **SETTINGS)
    _, step = checked(fit(Program(), algorithm, tmp_path, agents=None), 4)
    assert step["train/resampled_tasks"] > 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_step_counts_what_the_stopped_run_had_seen(
    untrained_model: Path, tmp_path: Path, staleness: int
) -> None:
    algorithm = agl.GRPO(
        model=str(untrained_model), batch_size=len(TASKS), steps=2, max_staleness=staleness, **SETTINGS
    )
    program = Program(interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        fit(program, algorithm, tmp_path, agents=None)
    result = fit(program, algorithm, tmp_path, agents=None, resume=True)
    steps = checked(result, len(TASKS))
    assert len(steps) == 3
    assert steps[-1]["train/failed_attempts"] > steps[-1]["train/failed_rollouts"]
