"""Which agents are trained: names, globs, expressions, functions, and several policies."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv, tracing
from agl.errors import ConfigError, NoAgentMatchedError
from agl.mdp.selection import DEFAULT_POLICY, select
from agl.rewards.trace import Trace
from agl.tracing.context import RolloutContext
from agl.trainer.runners.protocol import Lease
from agl.trainer.runners.remote.serialization import (
    received_lease,
    selection_from_json,
    selection_to_json,
    sent_lease,
)
from agl.trainer.store.types import Attempt, AttemptedRollout, Rollout, RolloutConfig


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


NAMES = st.text("ab*?[]! 1", min_size=1, max_size=6)


@given(agents=st.lists(NAMES, min_size=1, max_size=4, unique=True), rules=st.lists(NAMES, min_size=1, max_size=4))
def test_a_name_is_that_agent_and_no_other(agents: list[str], rules: list[str]) -> None:
    policies = {rule: f"policy-{i}" for i, rule in enumerate(rules)}
    selection = select(policies)
    known = selection.knowing(agents)
    for agent in agents:
        policy = known.policy_for(agent)
        if agent in policies:
            assert policy == selection.policy_for(agent) == policies[agent]
        else:
            assert policy not in {policies[name] for name in agents if name in policies}
            # A text that is nobody's name stays a pattern.
            patterns = {rule: policy for rule, policy in policies.items() if rule not in agents}
            assert policy == (select(patterns).policy_for(agent) if patterns else None)
    # The order in which names become known makes no difference, and neither does a process in between.
    later = selection
    for agent in reversed(agents):
        later = later.knowing([agent])
    assert later == known == selection_from_json({"rules": selection_to_json(known), "names": sorted(known.names)})


@given(
    rules=st.lists(NAMES, min_size=1, max_size=4), seen=st.lists(NAMES, max_size=4), more=st.lists(NAMES, max_size=4)
)
def test_more_names_only_make_a_selection_smaller(rules: list[str], seen: list[str], more: list[str]) -> None:
    before = select(rules).knowing(seen)
    after = before.knowing(more)
    selected = {agent for agent in (*seen, *more) if after.policy_for(agent)}
    assert selected <= {agent for agent in (*seen, *more) if before.policy_for(agent)}


@pytest.mark.parametrize("order", [1, -1])
def test_names_with_a_globs_characters(order: int) -> None:
    workers = ["worker 1", "worker [1]"][::order]
    assert [select("worker [1]").knowing(workers).policy_for(n) for n in ("worker 1", "worker [1]")] == [None, "policy"]
    both = select({"coder[ab]": "brackets", "coder*": "rest"}).knowing(["coder[ab]", "codera"])
    assert [both.policy_for(n) for n in ("coder[ab]", "codera")] == ["brackets", "rest"]
    assert select("coder[ab]").knowing(["codera", "coderb"]).policy_for("codera") == "policy"
    assert select({"*": "all", "writer": "own"}).policy_for("writer") == "own"


def test_a_rule_that_selects_nobody_is_named_with_those_who_were_there() -> None:
    selection = select(["desk", "nobody", re.compile("^x"), "d*"])
    assert selection.unmatched(["desk", "front"]) == ("'nobody'", "/^x/")
    with pytest.raises(NoAgentMatchedError, match=r"agents= names 'nobody', .* in 3 rollouts; .* 'desk', 'front'"):
        selection.require_matched(["desk", "front"], "in 3 rollouts")
    select(["desk", "front", "x*", re.compile("^x")]).require_matched(["desk", "front"], "here")


def test_an_attempt_knows_its_agents_as_soon_as_they_begin() -> None:
    with tracing.running(context := RolloutContext("ro", 1, "main", select("worker [1]"))):
        with tracing.span(semconv.INVOKE_AGENT, "worker [1]", agent="worker [1]"):
            assert context.selection.policy_for("worker [1]") is not None
        assert context.selection.policy_for("worker 1") is None


def test_a_trace_of_a_name_is_of_that_agent_alone() -> None:
    with tracing.running(context := RolloutContext("ro", 1, "main", select(None))):
        for agent in ("coder[ab]", "codera"):
            with (
                tracing.span(semconv.INVOKE_AGENT, agent, agent=agent),
                tracing.span(semconv.CHAT, "m"),
            ):
                pass
    trace = Trace("ro", 1, "main", tuple(context.spans))
    assert trace.of("coder[ab]").agents == ("coder[ab]",)
    assert trace.of("coder[ac]").agents == ("codera",)


@pytest.mark.parametrize("own_workers", [True, False])
def test_a_worker_of_another_process_knows_the_names_that_were_seen(own_workers: bool) -> None:
    """Its own workers have the rules from their start, and get the names that were seen since."""
    rollout = Rollout(
        "ro", "task", "running", "train", None, 0, "g", 0, 0, None, 0, RolloutConfig(), {}, 1, 0.0, None,
    )  # fmt: skip
    attempted = AttemptedRollout(rollout, Attempt("ro", 1, "running"))
    chosen = select({"worker [1]": "a", re.compile("^x"): "b"})
    lease = Lease(attempted, chosen.knowing(["worker [1]"]))
    sent = sent_lease(lease, selection=not own_workers, known={})
    arrived = replace(sent, selection=selection_from_json(json.loads(json.dumps(sent.selection))))
    received = received_lease(arrived, "http://here", chosen if own_workers else None, {}).selection
    assert [received.policy_for(n) for n in ("worker [1]", "worker 1", "xyz")] == ["a", None, "b"]
