"""examples/text_to_sql for its tests: its modules, a small database, and its program on scripted completions."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paths import ROOT
from scripted import Line, ScriptedRollouts, tool_call_of

from agl.mdp.types import Trajectory, Transition
from agl.testing.provider import Provider, Reply
from agl.trainer.objectives.advantages import StepAdvantages, compute_advantages

EXAMPLE = ROOT / "examples" / "text_to_sql"
MODULES = ("agent", "databases", "rewards", "train")
KEY = "sk-provider"

DUMP = """
CREATE TABLE public.item (name text NOT NULL, price real, stock bigint DEFAULT '0'::bigint NOT NULL, added date);
INSERT INTO public.item (name, price, stock, added) VALUES
('lamp', 30.5, 4, CURRENT_DATE - INTERVAL '3 days'),
('chair', 80, 1, DATE_TRUNC('month', CURRENT_DATE) - INTERVAL '2 weeks'),
('mug', 7.25, 12, '2024-02-29');
"""
QUESTION = "Which item is the dearest?"
RIGHT = "SELECT name FROM item ORDER BY price DESC LIMIT 1"
WRONG = "SELECT name FROM item ORDER BY price LIMIT 1"
BROKEN = "SELECT nme FROM item"


@contextmanager
def modules() -> Iterator[SimpleNamespace]:
    """The example's modules."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


def make_shop(data: Path) -> Path:
    """A folder like sql-eval's, with one small database and one question that has two right answers."""
    (data / "shop.sql").write_text(DUMP)
    with (data / "questions_gen_sqlite.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["db_name", "question", "query", "instructions"])
        writer.writeheader()
        queries = f"{RIGHT};SELECT name, price FROM item ORDER BY price DESC LIMIT 1;"
        writer.writerow({"db_name": "shop", "question": QUESTION, "query": queries, "instructions": ""})
    return data


def asks(query: str) -> str:
    """What the policy says to have a query run."""
    return tool_call_of("run_sql", {"query": query})


def frozen(checks: Callable[[str], str], answer: str = "It is the chair.") -> Callable[[dict[str, Any]], Reply]:
    """The provider's checker and answerer."""

    def script(body: dict[str, Any]) -> Reply:
        told, asked = (m["content"] for m in body["messages"])
        return Reply(checks(asked) if told.startswith("Does this query") else answer)

    return script


class Run:
    """A group of rollouts of each question on scripted completions, one after the other."""

    def __init__(
        self,
        example: SimpleNamespace,
        data: Path,
        out: Path,
        provider: Provider,
        script: list[Line],
        *options: str,
        group_size: int = 1,
        ids: list[str] | None = None,
    ) -> None:
        given = example.train.arguments(
            ["--data", str(data), "--out", str(out), "--model", "scripted", "--endpoint", provider.url,
             "--api-key-env", "AGL_TEST_KEY", "--workers", "1", *options]
        )  # fmt: skip
        example.databases.make_databases(data, out / "databases")
        questions = example.databases.tasks(data, out / "databases")
        self.questions = [q for q in questions if ids is None or q["id"] in ids]
        self.algorithm = ScriptedRollouts(script, group_size=group_size)
        trainer = example.train.trainer(given, self.algorithm)
        trainer.progress = False
        trainer.fit(example.train.build_agent(given, questions, out / "databases"), self.questions)
        self.trajectories: list[Trajectory] = self.algorithm.trajectories
        self.scored: StepAdvantages = compute_advantages(self.trajectories, trainer.config.credit)

    def earned(self) -> list[list[tuple[str, dict[str, float]]]]:
        """Per rollout and call: the agent, and what the call earned by name."""
        return [[(t.call.agent, named(t)) for t in x.transitions] for x in self.trajectories]

    def numbers(self) -> tuple[list[float], list[float]]:
        """Returns and advantages of every call, in order."""
        return [c.return_ for c in self.scored.calls], [c.advantage for c in self.scored.calls]


def named(what: Transition | Trajectory) -> dict[str, float]:
    assert len({r.name for r in what.rewards}) == len(what.rewards)
    return {r.name: r.value for r in what.rewards}
