"""examples/text_to_sql: who reaches the gateway and who the provider, what every call earns, and what it is trained on."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from provider import Provider, Reply, serve
from real_data import folder
from scripted import Line, ScriptedRollouts, tool_call_of

from agl.mdp import Trajectory, Transition
from agl.sequence import merge
from agl.trainer.algorithms.advantages import Scored, score

pytest.importorskip("sqlglot", reason="the example's databases are made with sqlglot")

EXAMPLE = Path(__file__).parents[1] / "examples" / "text_to_sql"
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


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like sql-eval's, with one small database and one question that has two right answers."""
    data = tmp_path_factory.mktemp("sql-eval")
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
            ["--data", str(data), "--out", str(out), "--model", "scripted", "--endpoint", provider.url, "--workers", "1",
             "--api-key-env", "AGL_TEST_KEY", *options]
        )  # fmt: skip
        example.databases.make_databases(data, out / "databases")
        questions = example.databases.tasks(data, out / "databases")
        self.questions = [q for q in questions if ids is None or q["id"] in ids]
        self.algorithm = ScriptedRollouts(script, group_size=group_size)
        trainer = example.train.trainer(given, self.algorithm)
        trainer.progress = False
        trainer.fit(example.train.wrapped(given, questions, out / "databases"), self.questions)
        self.trajectories: list[Trajectory] = self.algorithm.trajectories
        self.scored: Scored = score(self.trajectories, trainer.credit)

    def earned(self) -> list[list[tuple[str, dict[str, float]]]]:
        """Per rollout and call: the agent, and what the call earned by name."""
        return [[(t.call.agent, named(t)) for t in x.transitions] for x in self.trajectories]

    def numbers(self) -> tuple[list[float], list[float]]:
        """Returns and advantages of every call, in order."""
        return [c.return_ for c in self.scored.calls], [c.advantage for c in self.scored.calls]


def named(what: Transition | Trajectory) -> dict[str, float]:
    assert len({r.name for r in what.rewards}) == len(what.rewards)
    return {r.name: r.value for r in what.rewards}


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TEST_KEY", KEY)


def test_writer_and_rewriter_are_trained_and_the_others_stay_where_they_are(
    example: SimpleNamespace, shop: Path, tmp_path: Path, key: None
) -> None:
    script: list[Line] = [
        asks(RIGHT),  # right at once
        asks(BROKEN), asks(RIGHT),  # fails, is mended
        asks(WRONG), asks(BROKEN), "I cannot.",  # gets worse and worse
        asks(RIGHT), asks(WRONG),  # the checker is wrong about a right one
    ]  # fmt: skip
    verdicts = iter(
        ["OK"] + ["There is no such column.", "ok, that is it"] + ["Not it.", "Not it.", "Not it."] + ["Not it.", "OK."]
    )
    with serve(frozen(lambda asked: next(verdicts))) as provider:
        run = Run(example, shop, tmp_path, provider, script, group_size=4)

    # Selection: eight calls at the gateway, twelve at the provider, with its own key and nothing of ours.
    assert len(run.algorithm.engine.asked) == 8
    assert [[(c.agent, c.policy) for c in calls] for calls in run.algorithm.calls] == [
        [("writer", "policy")],
        [("writer", "policy"), ("rewriter", "policy")],
        [("writer", "policy"), ("rewriter", "policy"), ("rewriter", "policy")],
        [("writer", "policy"), ("rewriter", "policy")],
    ]
    assert len(provider.seen) == 12
    told = [next(iter(s.body["messages"]))["content"].split()[0] for s in provider.seen]
    assert told.count("Does") == 8
    assert told.count("Answer") == 4
    for seen in provider.seen:
        assert seen.headers["authorization"] == f"Bearer {KEY}"
        assert seen.body["model"] == "gpt-4.1-mini"
        assert "traceparent" not in seen.headers
        assert "agl-" not in seen.text
    assert not any(KEY in str(c.request) + str(c.response) for calls in run.algorithm.calls for c in calls)

    # Rewards: each at the call that earned it, and nothing of the checker's and the answerer's anywhere.
    assert run.earned() == [
        [("writer", {"query_matches": 1.0, "query_runs": 0.1})],
        [
            ("writer", {"query_matches": 0.0, "query_fails": -0.1}),
            ("rewriter", {"query_matches": 1.0, "query_runs": 0.1}),
        ],
        [
            ("writer", {"query_matches": 0.0, "query_runs": 0.1}),
            ("rewriter", {"query_matches": 0.0, "query_fails": -0.1}),
            ("rewriter", {"query_matches": 0.0, "no_query": -0.2}),
        ],
        [
            ("writer", {"query_matches": 1.0, "query_runs": 0.1}),
            ("rewriter", {"query_matches": 0.0, "query_runs": 0.1}),
        ],
    ]
    assert [named(t) for t in run.trajectories] == [{"final_match": m} for m in (1.0, 1.0, 0.0, 0.0)]

    # Credit: what a call earned, and half of final_match. Advantages: less the mean of the agent's rollouts, by their
    # standard deviation; the rewriter's two calls of the third rollout enter with their mean.
    # writer 1.6, 0.4, 0.1, 1.1: mean 0.8, deviations 0.8, -0.4, -0.7, 0.3, variance 1.38 / 3.
    # rewriter 1.6, (-0.1, -0.2), 0.1: mean of 1.6, -0.15, 0.1 = 1.55 / 3, variance 1.791667 / 2.
    returns, advantages = run.numbers()
    assert returns == pytest.approx([1.6, 0.4, 1.6, 0.1, -0.1, -0.2, 1.1, 0.1])
    w, r, mean = (1.38 / 3) ** 0.5, (1.7916667 / 2) ** 0.5, 1.55 / 3
    assert advantages == pytest.approx(
        [
            0.8 / w, -0.4 / w, (1.6 - mean) / r, -0.7 / w, (-0.1 - mean) / r, (-0.2 - mean) / r, 0.3 / w,
            (0.1 - mean) / r,
        ], abs=1e-5
    )  # fmt: skip
    assert_rows(run)


def assert_rows(run: Run) -> None:
    """Rows hold, as trained tokens, what was sampled, with its log-probs and its call's advantage, and nothing else."""
    calls = {c.id: c for calls in run.algorithm.calls for c in calls}
    trained: set[str] = set()
    for trajectory in run.scored.kept:
        for row in merge(trajectory, run.scored.advantages):
            assert row.policy == trajectory.policy
            assert np.array_equal(row.action_mask, row.calls >= 0)
            for k, call_id in enumerate(row.call_ids):
                at = row.calls == k
                assert row.token_ids[at].tolist() == calls[call_id].response_ids.tolist()
                assert row.logprobs[at].tolist() == calls[call_id].logprobs.tolist()
                assert row.advantages[at] == pytest.approx(run.scored.advantages[call_id])
                assert calls[call_id].policy == row.policy
                trained.add(call_id)
            assert not row.advantages[~row.action_mask].any()
    dropped = {c.call_id for c in run.scored.calls if c.dropped}
    assert trained == calls.keys() - dropped


JOINT: list[Line] = [
    asks(WRONG), "OK", "The mug.",  # the checker lets a wrong query pass, of which the answerer tells the truth
    asks(BROKEN), "No such column.", asks(RIGHT), "OK", "I do not know.",
]  # fmt: skip
JOINT_EARNED = [
    [
        ("writer", {"query_matches": 0.0, "query_runs": 0.1}),
        ("checker", {"verdict_is_right": 0.0}),
        ("answerer", {"answer_states_result": 1.0}),
    ],
    [
        ("writer", {"query_matches": 0.0, "query_fails": -0.1}),
        ("checker", {"verdict_is_right": 1.0}),
        ("rewriter", {"query_matches": 1.0, "query_runs": 0.1}),
        ("checker", {"verdict_is_right": 1.0}),
        ("answerer", {"answer_states_result": 0.0}),
    ],
]


@pytest.mark.parametrize("option", ["--joint", "--shared"])
def test_all_four_are_trained(
    example: SimpleNamespace, shop: Path, tmp_path: Path, key: None, option: str
) -> None:
    with serve(frozen(lambda asked: "OK")) as provider:
        run = Run(example, shop, tmp_path, provider, JOINT, option, group_size=2)
    assert provider.seen == []
    for calls in run.algorithm.calls:
        assert [c.policy for c in calls] == [c.agent if option == "--joint" else "policy" for c in calls]
    assert run.earned() == JOINT_EARNED
    assert [named(t) for t in run.trajectories] == [{"final_match": 0.0}, {"final_match": 1.0}]

    # Two rollouts of a group lie 1 / sqrt(2) standard deviations from their mean, whatever they came to. The rewriter
    # spoke in one alone, which has nothing to be compared with.
    returns, advantages = run.numbers()
    assert returns == pytest.approx([0.1, 0.0, 1.0, 0.4, 1.5, 1.6, 1.5, 0.5])
    h = 0.5**0.5
    assert advantages == pytest.approx([-h, -h, h, h, h, 0.0, h, -h], abs=1e-4)
    assert [c.dropped is not None for c in run.scored.calls] == [False] * 5 + [True] + [False] * 2
    assert_rows(run)
    policies = {t.policy for t in run.scored.kept}
    assert policies == ({"writer", "checker", "answerer"} if option == "--joint" else {"policy"})


def test_one_query_a_turn_and_no_other_tool(
    example: SimpleNamespace, shop: Path, tmp_path: Path, key: None
) -> None:
    """Several queries earn no more than one, and what is no query earns what none earns."""
    script: list[Line] = [f"{asks(WRONG)}\n{asks(RIGHT)}", tool_call_of("shell", {"c": "ls"}), asks("DROP TABLE item")]
    with serve(frozen(lambda asked: "No.")) as provider:
        run = Run(example, shop, tmp_path, provider, script)
        assert "error: not authorized" in provider.seen[-1].body["messages"][-1]["content"]
    assert run.earned() == [
        [
            ("writer", {"query_matches": 0.0, "query_runs": 0.1}),
            ("rewriter", {"query_matches": 0.0, "no_query": -0.2}),
            ("rewriter", {"query_matches": 0.0, "query_fails": -0.1}),
        ]
    ]


@pytest.mark.parametrize(
    ("answer", "rows", "share"),
    [
        ("It is the chair, at 80.", [("chair", 80.0)], 1.0),
        ("The Chair.", [("chair", 80.0)], 0.5),
        ("1,250 items, about 4.43 each", [(1250, 4.4286)], 1.0),
        ("125 items", [(1250,)], 0.0),
        ("a and b", [("a",), ("b",), ("c",), ("d",)], 2 / 3),
        ("nothing", [], 1.0),
        ("nothing", [(None,)], 1.0),
        ("nothing", None, 1.0),
    ],
)
def test_what_an_answer_states(example: SimpleNamespace, answer: str, rows: Any, share: float) -> None:
    assert example.rewards.stated(answer, rows) == pytest.approx(share)


def test_a_dump_becomes_a_database(example: SimpleNamespace, shop: Path, tmp_path: Path) -> None:
    import datetime
    import sqlite3

    path = example.databases.make_databases(shop, tmp_path)["shop"]
    today = datetime.date.today()  # noqa: DTZ011
    rows = dict(sqlite3.connect(path).execute("SELECT name, added FROM item"))
    assert rows["mug"] == "2024-02-29"
    assert rows["chair"] == (today.replace(day=1) - datetime.timedelta(14)).isoformat()
    assert rows["lamp"] == (today - datetime.timedelta(3)).isoformat()
    (task,) = example.databases.tasks(shop, tmp_path)
    assert task["queries"] == [RIGHT, "SELECT name, price FROM item ORDER BY price DESC LIMIT 1"]
    assert "CREATE TABLE item (name TEXT NOT NULL" in task["schema"]


def test_real_questions(example: SimpleNamespace, tmp_path: Path, key: None) -> None:
    """Every real reference runs and meets itself; a few questions go through the whole program."""
    data = folder("sql_eval")
    example.databases.make_databases(data, tmp_path / "databases")
    questions = example.databases.tasks(data, tmp_path / "databases")
    assert len(questions) == len({q["id"] for q in questions}) == 210
    earnings = example.rewards.Earnings(questions, tmp_path / "databases")
    assert [q["id"] for q in questions if earnings._match(q, q["queries"][-1]) != 1.0] == []

    some = questions[::50]
    assert len({q["db"] for q in some}) == 5
    script = [asks(query) for q in some for query in (q["queries"][0], "SELECT 'nothing'", q["queries"][-1])]

    def checks(asked: str) -> str:
        return "That is nothing." if "Query: SELECT 'nothing'" in asked else "Not it."

    with serve(frozen(checks)) as provider:
        run = Run(example, data, tmp_path, provider, script, ids=[q["id"] for q in some])
    runs = {"query_runs": 0.1}
    assert run.earned() == [
        [
            ("writer", {"query_matches": 1.0, **runs}),
            ("rewriter", {"query_matches": 0.0, **runs}),
            ("rewriter", {"query_matches": 1.0, **runs}),
        ]
    ] * len(some)
    assert run.numbers()[0] == pytest.approx([1.6, 0.6, 1.6] * len(some))


# -- the command line -------------------------------------------------------------------------------------------------


def command(*options: object, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:  # noqa: B006
    clean = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "OPENAI_BASE_URL")}
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), *map(str, options)],
        env={**clean, **env}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_dry_run_on_an_endpoint(shop: Path, tmp_path: Path) -> None:
    """All four agents ask the endpoint, with its key alone; nothing is trained."""

    def script(body: dict[str, Any]) -> Reply:
        told, asked = (m["content"] for m in body["messages"])
        if told.startswith(("Write", "The query")):
            return Reply(tools=(("run_sql", {"query": RIGHT if "Query:" in asked else BROKEN}),))
        return Reply("OK" if told.startswith("Does") and "chair" in asked else "Not the chair.")

    with serve(script) as provider:
        done = command(
            "--data", shop, "--out", tmp_path / "run", "--dev", "--endpoint", provider.url, "--api-key-env", "MY_KEY",
            "--json", tmp_path / "facts.json", env={"MY_KEY": KEY, "OPENAI_API_KEY": "sk-another"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(provider.seen) == 5
    assert {s.headers["authorization"] for s in provider.seen} == {f"Bearer {KEY}"}
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["policies"] == {}
    assert facts["rewards"]["dev"] == pytest.approx(
        {
            "final_match": 1.0, "query_matches": 0.5, "query_fails": -0.1, "query_runs": 0.1, "verdict_is_right": 1.0,
            "answer_states_result": 1.0,
        }
    )  # fmt: skip


def test_without_its_key_an_endpoint_is_not_given_another(shop: Path, tmp_path: Path) -> None:
    with serve(frozen(lambda asked: "OK")) as provider:
        command(
            "--data", shop, "--out", tmp_path / "run", "--dev", "--endpoint", provider.url, "--api-key-env", "NO_SUCH_KEY",
            env={"OPENAI_API_KEY": "sk-another"},
        )  # fmt: skip
    assert {s.headers["authorization"] for s in provider.seen} == {"Bearer NO_SUCH_KEY is not set"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "."], "--model is needed"),
        (["--data", ".", "--model", "m", "--select", "writer,poet"], "no agent is called poet"),
        (["--data", "/nowhere", "--model", "m"], "does not hold"),
        (["--data", ".", "--model", "m", "--joint", "--shared"], "not allowed with"),
    ],
)
def test_what_is_refused(
    example: SimpleNamespace, options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.train.main([*options, "--out", str(tmp_path)])
    assert said in capsys.readouterr().err + str(stopped.value)
