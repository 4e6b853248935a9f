"""Conditions on a rollout's rewards: `agl.reward() >= 1` and its text."""

from __future__ import annotations

from typing import Any

import pytest
from call_trees import trajectory

import agl
from agl.errors import ConfigError
from agl.mdp.builder import AttemptTrajectory
from agl.mdp.conditions import condition, parse
from agl.mdp.types import Reward


def attempt(**rewards: float) -> AttemptTrajectory:
    """An attempt with these rewards; "correct" is primary."""
    credited = tuple((Reward(name, value, primary=name == "correct"), None) for name, value in rewards.items())
    return AttemptTrajectory(trajectory([]), credited, (), (), ())


@pytest.mark.parametrize(
    ("text", "fulfilled"),
    [
        ("reward>=1", True),
        ("reward > 1", False),
        ("correct == 1", True),
        ("correct=1", True),
        ("length<0.2", True),
        ("correct>=1 & length<0.2", True),
        ("correct>=1 & length<-1e-1", False),
        ("correct<1 | length<.2", True),
        ("correct<1 | correct>2 & length<1", False),
        ("(correct<1 | length<1) and not correct>2", True),
        ("~(correct<1 | length>=1)", True),
        ('"tool calls" <= 3', True),
        # No reward of the name: neither a comparison nor its opposite holds.
        ("missing >= 0", False),
        ("not missing >= 0", False),
        ("missing != 5", False),
        ('"reward" >= 0', False),
    ],
)
def test_a_text_is_a_condition_that_prints_itself(text: str, fulfilled: bool) -> None:
    one = attempt(correct=1.0, length=0.1, **{"tool calls": 3.0})
    parsed = parse(text)
    assert parsed(one) is fulfilled
    assert parse(str(parsed)) == parsed


def test_comparisons_in_python_are_the_same_conditions() -> None:
    assert str(agl.reward() >= 1) == "reward >= 1"
    written = (agl.reward("correct") >= 1) & (agl.reward("length") < 0.2) | ~(agl.reward('a "b"') == 2)
    assert str(written) == '(correct >= 1 & length < 0.2) | "a \\"b\\"" != 2'
    assert parse(str(written)) == written
    assert str(agl.reward("reward") > 0) == '"reward" > 0'
    assert condition(written) is written
    assert condition(None) is None


def test_a_rollout_without_reward_fulfils_no_comparison() -> None:
    assert not (agl.reward() >= 0)(attempt())
    assert not (agl.reward() < 0)(attempt())
    assert agl.reward("length")(attempt(length=0.5)) == 0.5
    assert agl.reward()(attempt(length=0.5)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing before 'the end'"),
        ("reward", "'reward' begins no comparison"),
        ("reward >= x", "'reward' begins no comparison"),
        ("reward >= 1 &", "missing before 'the end'"),
        ("(reward > 1", "not closed"),
        ("reward > 1)", "'\\)' is unexpected"),
        ("reward > 1 length < 2", "'length' is unexpected"),
        ("reward > 1..2", "cannot read '1..2'"),
        ("reward ? 1", "cannot read '\\? 1'"),
        ('"\\q" > 1', "cannot read"),
        ('"" > 1', "no reward ''"),
    ],
)
def test_a_text_that_is_no_condition_says_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    "mistake",
    [
        lambda r: bool(r > 1),
        lambda r: 0 < r < 1,
        lambda r: r > 0 and r < 1,
        lambda r: r >= 1 & r,
        lambda r: (r >= 1) & 3,
        lambda r: r >= "1",
        lambda r: r >= float("nan"),
        lambda r: r >= None,
        lambda r: r == r,
        lambda r: agl.reward(3),  # type: ignore[arg-type]
        lambda r: condition(r),
        lambda r: condition(3),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_in_python_says_what_to_write(mistake: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        mistake(agl.reward())
    assert caught.value.hint
