"""Which agents are trained: names, globs, expressions, functions, and several policies."""

from __future__ import annotations

import re

import pytest

from agl.errors import ConfigError
from agl.mdp.selection import DEFAULT_POLICY, select


@pytest.mark.parametrize(
    ("agents", "chosen"),
    [
        (None, {"writer", "rewriter", "judge", "Writer"}),
        ("writer", {"writer"}),
        ("*writer", {"writer", "rewriter"}),
        (["writer", "jud?e"], {"writer", "judge"}),
        (re.compile("^re"), {"rewriter"}),
        (re.compile("writer", re.IGNORECASE), {"writer", "rewriter", "Writer"}),
        (lambda name: name.islower(), {"writer", "rewriter", "judge"}),
        ({"writer": "a", "judge": "b"}, {"writer", "judge"}),
        (iter(["judge"]), {"judge"}),
    ],
)
def test_a_filter_chooses(agents: object, chosen: set[str]) -> None:
    selection = select(agents)  # type: ignore[arg-type]
    assert {n for n in ("writer", "rewriter", "judge", "Writer") if selection.policy_for(n)} == chosen


def test_the_first_rule_that_matches_names_the_policy() -> None:
    selection = select({"writer": "a", re.compile("er$"): "b", "*": "a"})
    assert [selection.policy_for(n) for n in ("writer", "rewriter", "judge")] == ["a", "b", "a"]
    assert selection.policies == ("a", "b")
    assert select("x").policy_for("x") == DEFAULT_POLICY
    assert str(selection) == "'writer', /er$/, '*'"


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ([], "selects no agent"),
        ({}, "selects no agent"),
        ([3], "agents= holds 3, a int"),
        ({"writer": 3}, "agents= maps 'writer' to 3"),
    ],
)
def test_a_bad_filter_says_so(agents: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        select(agents)  # type: ignore[arg-type]
    assert caught.value.hint
