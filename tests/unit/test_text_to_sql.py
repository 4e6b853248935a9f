"""examples/text_to_sql: who reaches the gateway and who the provider, what calls earn, and what they are trained on."""

from __future__ import annotations

import datetime
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from real_data import folder
from scripted import Line, tool_call_of

from agl.testing.provider import serve

pytest.importorskip("sqlglot", reason="the example's databases are made with sqlglot")

from text_to_sql import BROKEN, KEY, RIGHT, WRONG, Run, asks, frozen, make_shop, modules, named

from agl.mdp.sequence import merge


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    with modules() as found:
        yield found


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shop(tmp_path_factory.mktemp("sql-eval"))


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
        ["OK", "There is no such column.", "ok, that is it", "Not it.", "Not it.", "Not it.", "Not it.", "OK."]
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
    for trajectory in run.scored.trajectories:
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
def test_all_four_are_trained(example: SimpleNamespace, shop: Path, tmp_path: Path, key: None, option: str) -> None:
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
    policies = {t.policy for t in run.scored.trajectories}
    assert policies == ({"writer", "checker", "answerer"} if option == "--joint" else {"policy"})


def test_one_query_a_turn_and_no_other_tool(example: SimpleNamespace, shop: Path, tmp_path: Path, key: None) -> None:
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
    path = example.databases.make_databases(shop, tmp_path)["shop"]
    today = datetime.date.today()
    rows = dict(sqlite3.connect(path).execute("SELECT name, added FROM item"))
    assert rows["mug"] == "2024-02-29"
    assert rows["chair"] == (today.replace(day=1) - datetime.timedelta(14)).isoformat()
    assert rows["lamp"] == (today - datetime.timedelta(3)).isoformat()
    (task,) = example.databases.tasks(shop, tmp_path)
    assert task["queries"] == [RIGHT, "SELECT name, price FROM item ORDER BY price DESC LIMIT 1"]
    assert "CREATE TABLE item (name TEXT NOT NULL" in task["schema"]


@pytest.mark.slow
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
