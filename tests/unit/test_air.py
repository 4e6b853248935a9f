"""AIR's rules: what they may ask for, when they are asked, and that each outcome is credited once, in any order."""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agl
from agl import semconv, tracing
from agl.errors import ConfigError, RewardError
from agl.mdp.builder import CreditedReward, build_trajectory
from agl.mdp.outcomes import TOOL_RESULTS, UNKNOWN_TOOLS, reports_failure
from agl.mdp.selection import Selection, select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, Reward, float_array, int_array
from agl.rewards.air import reward_spans
from agl.tracing.context import RolloutContext

EVERYONE = select(None)


def call(index: int, *, agent: str = "solver", policy: str | None = "policy", **more: Any) -> Call:
    return Call(
        f"c{index}", "ro", 1, index, agent, policy, 0, int_array([1, 2]), int_array([3]), float_array([-0.5]),
        **{"span_id": f"chat{index}"} | more,
    )  # fmt: skip


def span(span_id: str, parent: str | None, kind: str, agent: str = "solver", **more: Any) -> Span:
    status, attributes = more.pop("status", "unset"), more.pop("attributes", {})
    facts = {semconv.OPERATION_NAME: kind, semconv.AGENT_NAME: agent, **attributes}
    message = "broken" if status == "error" else None
    return Span("t" * 32, span_id, parent, "ro", 1, f"{kind} x", 0.0, 1.0, status, message, facts, **more)


def tool(
    span_id: str, call_id: str | None, *, name: str = "add", ok: bool = True, parent: str = "root", **more: Any
) -> Span:
    facts = {semconv.TOOL_NAME: name, semconv.TOOL_CALL_ID: call_id, semconv.TOOL_CALL_RESULT: f"result of {span_id}",
             semconv.TOOL_CALL_ARGUMENTS: json.dumps({"a": span_id})}  # fmt: skip
    attributes = {k: v for k, v in facts.items() if v is not None} | more.pop("attributes", {})
    status = "unset" if ok else "error"
    return span(span_id, parent, semconv.EXECUTE_TOOL, attributes=attributes, status=status, **more)


ROOT = span("root", None, semconv.INVOKE_AGENT, "outer")


def scored() -> agl.AIR:
    """+1 for a success, -1 for a failure."""
    air = agl.AIR()
    air.on_tool_success(name="ok")(lambda: 1.0)
    air.on_tool_failure(name="bad")(lambda: -1.0)
    return air


def credited_by(
    air: agl.AIR, calls: list[Call], spans: list[Span], selection: Selection = EVERYONE
) -> tuple[CreditedReward, ...]:
    index = SpanIndex(calls, spans)
    return air.rewards(build_trajectory("ro", 1, "g", index, selection), index, selection)


def given_by(air: agl.AIR, calls: list[Call], spans: list[Span]) -> list[tuple[str, float, str | None]]:
    return [(r.name, r.value, call_id) for r, call_id in credited_by(air, calls, spans)]


# -- rules ------------------------------------------------------------------------------------------------------------


def test_the_rules_of_the_guide() -> None:
    air = agl.AIR()

    @air.on_tool_success
    def reward_tool_success(tool_name: str, output: str) -> float:
        assert (tool_name, output) == ("add", "result of t1")
        return 0.3

    @air.on_tool_failure
    def penalize_failure(tool_name: str, error: str) -> float:
        assert (tool_name, error) == ("add", "broken")
        return -0.2

    @air.on_call
    def short(transition: agl.Transition) -> float | None:
        return 0.1 if transition.call.index == 1 else None

    calls = [call(0, tool_call_ids=("a", "b")), call(1)]
    rewards = credited_by(
        air, calls, [ROOT, span("chat1", "root", semconv.CHAT), tool("t2", "b", ok=False), tool("t1", "a")]
    )
    assert rewards == (
        (Reward("reward_tool_success", 0.3, "air", "t1"), "c0"),
        (Reward("penalize_failure", -0.2, "air", "t2"), "c0"),
        (Reward("short", 0.1, "air", "chat1"), "c1"),
    )
    assert reward_tool_success("add", "result of t1") == 0.3


def test_the_global_set_is_the_one_that_true_means() -> None:
    from agl import air

    assert air is agl.air
    assert isinstance(agl.air, agl.AIR)
    assert agl.Trainer(agl.Baseline(), air=True).config.air is agl.air
    own = agl.AIR()
    assert agl.Trainer(agl.Baseline(), air=own).config.air is own
    assert [agl.Trainer(agl.Baseline(), air=off).config.air for off in (None, False)] == [None, None]
    with pytest.raises(ConfigError, match="air= is 'yes'"):
        agl.Trainer(agl.Baseline(), air="yes")  # type: ignore[arg-type]


def test_a_rule_is_told_what_it_names() -> None:
    air, told = agl.AIR(), []

    @air.on_tool_success
    def one(arguments: Any, *, agent: str, tool_call_id: str, unused: int = 7) -> None:
        told.append((arguments, agent, tool_call_id, unused))

    @air.on_tool_success
    def two(tool_name: str, **rest: Any) -> None:
        told.append((tool_name, sorted(rest)))

    assert credited_by(air, [call(0, tool_call_ids=("a",))], [ROOT, tool("t1", "a")], EVERYONE) == ()
    assert told == [({"a": "t1"}, "solver", "a", 7), ("add", ["agent", "arguments", "output", "tool_call_id"])]


def test_filters_names_and_primary() -> None:
    air = agl.AIR()
    air.on_tool_success(tool="calc*", agent=["writer", re.compile("^sol")], name="calc")(lambda: 1.0)
    air.on_tool_success(tool=lambda name: name == "add", name="extra", primary=False)(
        lambda: {"reward": 2.0, "speed": 3.0}
    )
    calls = [call(0, tool_call_ids=("a", "b")), call(1, agent="critic", tool_call_ids=("c",))]
    spans = [ROOT, tool("t1", "a", name="calculator"), tool("t2", "b"), tool("t3", "c", name="calculator")]
    rewards = credited_by(air, calls, spans, EVERYONE)
    assert [(r.name, r.primary, c) for r, c in rewards] == [
        ("calc", True, "c0"),
        ("reward", False, "c0"),
        ("speed", False, "c0"),
    ]


def test_a_filter_by_a_name_is_for_that_tool_and_that_agent_alone() -> None:
    air = agl.AIR()
    air.on_tool_success(tool="add[1]", name="tool")(lambda: 1.0)
    air.on_tool_success(agent="solver [1]", name="agent")(lambda: 2.0)
    offered = {"tools": [{"type": "function", "function": {"name": name}} for name in ("add[1]", "add1")]}
    calls = [
        call(0, agent="solver 1", request=offered, tool_call_ids=("a",)),
        call(1, agent="solver [1]", tool_call_ids=("b",)),
    ]
    ran = [tool("t1", "a", name="add1", agent="solver 1"), tool("t2", "b", name="mul", agent="solver [1]")]
    assert given_by(air, calls, [ROOT, *ran]) == [("agent", 2.0, "c1")]
    ran[0] = tool("t1", "a", name="add[1]", agent="solver 1")
    assert given_by(air, calls, [ROOT, *ran]) == [("tool", 1.0, "c0"), ("agent", 2.0, "c1")]


def rule(value: float) -> Any:
    def again() -> float:
        return value

    return again


def test_registering_a_function_again_replaces_it() -> None:
    air = agl.AIR()
    for value in (1.0, 2.0):
        air.on_tool_success(rule(value))
    air.on_tool_failure(rule(3.0))
    air.on_tool_success(name="other")(rule(4.0))
    assert len(air) == 3
    calls, spans = [call(0, tool_call_ids=("a",))], [ROOT, tool("t1", "a")]
    assert given_by(air, calls, spans) == [("again", 2.0, "c0"), ("other", 4.0, "c0")]
    air.clear()
    assert len(air) == 0


def test_what_cannot_be_a_rule_is_refused_at_once() -> None:
    air = agl.AIR()

    async def later(tool_name: str) -> float:
        return 1.0

    class Async:
        async def __call__(self) -> float:
            return 1.0

    for function in (later, functools.partial(later), Async()):
        with pytest.raises(ConfigError, match="is async"):
            air.on_tool_success(name="x")(function)
    with pytest.raises(ConfigError, match="passes a rule no 'result'") as caught:
        air.on_tool_success(lambda result: 1.0)
    assert "tool_name, output, arguments, agent, tool_call_id" in str(caught.value)
    with pytest.raises(ConfigError, match="has no name"):
        air.on_call(lambda transition: 1.0)
    with pytest.raises(ConfigError, match=r"no option 'tools'\s+.*'tool'"):
        air.on_tool_success(tools="x")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="no option 'tool'"):
        air.on_call(tool="x")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="tool= holds 3"):
        air.on_tool_success(tool=[3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="primary is 'yes'"):
        air.on_call(primary="yes")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="was given 'calculator'"):
        air.on_tool_success("calculator")  # type: ignore[type-var]
    assert len(air) == 0


def test_a_trainer_with_air_needs_rules_and_what_they_read() -> None:
    agent = agl.wrap(lambda task: "x", name="a", reward=lambda task, output: 1.0)
    with pytest.raises(ConfigError, match="there are no rules"):
        agl.Trainer(agl.Baseline(), air=agl.AIR(), progress=False).fit(agent, ["t"])
    air = agl.AIR()
    air.on_tool_success(name="long")(lambda output: len(output))
    with pytest.raises(ConfigError, match="'long' reads output, which capture_content=False"):
        agl.Trainer(agl.Baseline(), air=air, capture_content=False, progress=False).dev(agent, ["t"])
    scored().require(capture_content=False)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: float("nan"), "the reward 'reward' is nan"),
        (lambda: "good", "is 'good', a str"),
        (lambda: {}, "empty dict"),
        (lambda: 1 / 0, "raised ZeroDivisionError"),
        (lambda: [1.0], "a list"),
    ],
)
def test_a_rule_that_fails_names_itself_the_tool_and_the_call(bad: Any, message: str) -> None:
    air = agl.AIR()
    air.on_tool_success(name="my_rule")(bad)
    with pytest.raises(RewardError, match=f"AIR rule 'my_rule' .on_tool_success.*{message}") as caught:
        credited_by(air, [call(0, tool_call_ids=("a",))], [ROOT, tool("t1", "a")], EVERYONE)
    assert "rollout=ro, attempt=1, agent=solver, tool=add, span=t1, call=c0" in str(caught.value)


def test_a_call_rule_sees_what_the_call_earned() -> None:
    air, seen = scored(), []

    @air.on_call(agent="solver")
    def look(transition: agl.Transition) -> float:
        seen.append((transition.call.id, [(r.name, r.value) for r in transition.rewards]))
        return 0.5

    with tracing.running(context := RolloutContext("ro", 1, "outer", EVERYONE)):
        with tracing.span(semconv.CHAT, "m", agent="solver") as chat:
            agl.emit_reward({"emitted": 2.0})
        assert chat is not None
        attributes = {semconv.TOOL_CALL_ID: "a", semconv.TOOL_NAME: "add"}
        with tracing.span(semconv.EXECUTE_TOOL, "add", attributes=attributes):
            pass
    calls = [
        call(0, span_id=chat.span_id, tool_call_ids=("a",)), call(1, error="stopped"), 
        call(2, agent="judge", policy=None),
        call(3, agent="other"),
    ]  # fmt: skip
    rewards = given_by(air, calls, context.spans)
    assert seen == [("c0", [("emitted", 2.0), ("ok", 1.0)])]
    assert rewards == [("ok", 1.0, "c0"), ("look", 0.5, "c0")]


# -- credit -----------------------------------------------------------------------------------------------------------


def test_an_outcome_without_an_id_goes_to_the_call_around_it_or_to_the_whole_rollout() -> None:
    calls = [call(0, tool_call_ids=("a",)), call(1, agent="sub", tool_call_ids=("b",))]
    spans = [
        ROOT, span("chat0", "root", semconv.CHAT), tool("t1", "a"),
        tool("inside a tool", None, parent="t1", name="helper"), tool("inside a call", None, parent="chat0"),
        tool("unknown id", "zz", parent="t1"), tool("nowhere", None),
        span("sub", "t1", semconv.INVOKE_AGENT, "sub"), span("chat1", "sub", semconv.CHAT, "sub"),
        tool("of the sub", None, parent="sub", agent="sub"), tool("t2", "b", parent="sub", ok=False, agent="sub"),
    ]  # fmt: skip
    rewards = {r.span_id: c for r, c in credited_by(scored(), calls, spans, EVERYONE)}
    assert rewards == {
        "t1": "c0", "t2": "c1", "inside a tool": "c0", "inside a call": "c0", "unknown id": None, "nowhere": None,
        "of the sub": None,
    }  # fmt: skip
    credited = credited_by(scored(), calls, spans, EVERYONE)
    stored = reward_spans(credited, SpanIndex(calls, spans))
    built = build_trajectory("ro", 1, "g", SpanIndex(calls, [*spans, *stored]), EVERYONE)
    assert {r.span_id for r in built.unplaced} == {"unknown id", "nowhere", "of the sub"}
    assert built.reward == 5.0
    assert [t.reward for t in built.trajectories["policy"].transitions] == [3.0, -1.0]


def test_the_tools_of_agents_that_are_not_selected_are_not_rewarded() -> None:
    calls = [call(0, tool_call_ids=("a",)), call(1, agent="proxied", policy=None, tool_call_ids=("b",))]
    spans = [
        ROOT, tool("t1", "a", agent="runs it for the solver"), tool("t2", "b", agent="solver"),
        tool("t3", "theirs", parent="t1", agent="judge"), tool("t4", None, parent="t1", agent="judge"),
    ]  # fmt: skip
    # A tool of a judge that runs within the solver's own tool call is in nobody's interest but the judge's.
    selected = select("solver")
    rewards = {r.span_id: c for r, c in credited_by(scored(), calls, spans, selected)}
    assert rewards == {"t1": "c0"}


def test_the_outcome_of_a_failed_call_is_not_lost() -> None:
    credited = credited_by(
        scored(), [call(0), call(1, error="cut", tool_call_ids=("a",))], [ROOT, tool("t1", "a")], EVERYONE
    )
    assert [c for _, c in credited] == [None]


def test_a_tool_that_waits_for_a_human_has_no_outcome_yet() -> None:
    calls = [
        call(0, tool_call_ids=("a", "b")),
        call(1, request={TOOL_RESULTS: [{"id": "b", "name": "add", "failed": True}]}),
    ]
    paused = {"attributes": {semconv.PAUSED: True}}
    spans = [ROOT, tool("t1", "a", **paused), tool("t2", "a"), tool("t3", "b", **paused)]
    assert given_by(scored(), calls, spans) == [("ok", 1.0, "c0"), ("bad", -1.0, "c0")]


def test_one_run_seen_by_two_layers_is_one_outcome_and_a_retry_another() -> None:
    spans = [ROOT, tool("t1", "a", ok=False), tool("t2", "a"), tool("t3", "a", parent="t2")]
    assert given_by(scored(), [call(0, tool_call_ids=("a",))], spans) == [("bad", -1.0, "c0"), ("ok", 1.0, "c0")]


def test_results_that_the_gateway_was_sent_stand_for_tools_without_spans() -> None:
    def message(call_id: str, text: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    def result(call_id: str, failed: bool = False, name: str = "add") -> dict[str, Any]:
        return {"id": call_id, "name": name, "failed": failed}

    asked = {"tool_calls": [{"id": "a", "function": {"name": "add", "arguments": '{"a": 1}'}}]}
    calls = [
        call(0, tool_call_ids=("a", "b", "c", "d", "e"), response=asked, request={UNKNOWN_TOOLS: ["c"]}),
        call(1, request={
            TOOL_RESULTS: [result("a"), result("b", True), result("c"), result("d"), result("z")],
            "messages": [message("a", [{"type": "text", "text": "5"}]), message("b", "no"),
                         message("c", "no such tool")],
        }),
        call(2, request={TOOL_RESULTS: [result("a"), result("e", name="silent")]}),
    ]  # fmt: skip
    spans = [ROOT, tool("t1", "d", ok=False), tool("t2", None, name="silent", parent="root")]
    air, told = agl.AIR(), []
    air.on_tool_success(name="ok")(lambda tool_name, arguments, output: told.append((tool_name, arguments, output)))
    air.on_tool_failure(name="bad")(lambda tool_call_id, error: told.append((tool_call_id, error)))
    credited_by(air, calls, spans, EVERYONE)
    assert told == [
        ("add", {"a": 1}, "5"), ("b", "no"), ("c", "no such tool"), ("d", "broken"), 
        ("silent", {"a": "t2"}, "result of t2"),
    ]  # fmt: skip
    runs = span("chat0", "root", semconv.CHAT, attributes={semconv.RUNS_TOOLS: True})
    told.clear()
    credited_by(air, calls, [*spans, runs], EVERYONE)
    assert told[0] == ("a", "5"), "what the framework runs itself, and did not run, it refused"


def test_equal_tool_calls_of_one_answer_are_credited_once() -> None:
    def ran(n: int, arguments: str, ok: bool = True, call_id: str | None = None) -> Any:
        facts = {
            semconv.TOOL_CALL_ID: call_id or f"t{n}",
            semconv.TOOL_NAME: "search",
            semconv.TOOL_CALL_ARGUMENTS: arguments,
        }
        status = {} if ok else {"status": "error"}
        return span(f"s{n}", "root", semconv.EXECUTE_TOOL, attributes=facts, **status)

    ids = tuple(f"t{n}" for n in range(9))
    calls = [call(0, tool_call_ids=ids), call(1, tool_call_ids=("later",))]
    spam = [ran(n, '{"q": "a", "n": 1}') for n in range(5)]
    others = [
        ran(5, '{"n": 1, "q": "a"}'),
        ran(6, '{"q": "b"}'),
        ran(7, '{"q": "a", "n": 1}', ok=False),
        ran(8, '{"q": "a", "n": 1}', ok=False),
        ran(9, '{"q": "a", "n": 1}', call_id="later"),
    ]
    assert sorted(given_by(scored(), calls, [ROOT, *spam, *others])) == [
        ("bad", -1.0, "c0"), ("ok", 1.0, "c0"), ("ok", 1.0, "c0"), ("ok", 1.0, "c1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ('{"error": "no"}', True),
        ('{"error": null, "rows": 3}', False),
        ('{"success": false}', True),
        ("Error: no such file", True),
        ("errors: 0", False),
        ("5", False),
    ],
)
@pytest.mark.parametrize("spans", [False, True])
def test_a_result_that_says_it_failed_failed_whoever_ran_the_tool(text: str, failed: bool, spans: bool) -> None:
    """The rule of `agl.rewards.ToolSuccess`."""
    sent = {TOOL_RESULTS: [{"id": "a", "name": "add", "failed": False}]}
    calls = [
        call(0, tool_call_ids=("a",)),
        call(1, request={**sent, "messages": [{"role": "tool", "tool_call_id": "a", "content": text}]}),
    ]
    facts = {semconv.TOOL_CALL_ID: "a", semconv.TOOL_NAME: "add", semconv.TOOL_CALL_RESULT: text}
    ran = [span("t1", "root", semconv.EXECUTE_TOOL, attributes=facts)] if spans else []
    assert given_by(scored(), calls, [ROOT, *ran]) == [("bad", -1.0, "c0") if failed else ("ok", 1.0, "c0")]
    assert reports_failure(text) == failed


def test_forged_results_and_ids_earn_nothing() -> None:
    def asks(n: int, *results: tuple[str, bool]) -> Any:
        sent = [{"id": i, "name": "add", "failed": failed} for i, failed in results]
        return call(n, request={TOOL_RESULTS: sent})

    issued = call(0, tool_call_ids=("a", "b"))
    # A tool that can ask the policy says that it succeeded, before and after the program says that it failed.
    forged = [issued, asks(1, ("a", False)), asks(2, ("a", True)), asks(3, ("a", False))]
    assert given_by(scored(), forged, [ROOT]) == [("bad", -1.0, "c0")]
    # Ids that no answer of this attempt issued, and a result told over and over.
    invented = [issued, asks(1, ("x", False), ("b", False), ("b", False)), asks(2, ("b", False), ("y", False))]
    assert given_by(scored(), invented, [ROOT]) == [("ok", 1.0, "c0")]
    # What the tool's own span says counts, whatever requests say.
    assert given_by(scored(), [issued, asks(1, ("a", False))], [ROOT, tool("t1", "a", ok=False)]) == [
        ("bad", -1.0, "c0")
    ]


def test_a_handoff_goes_to_the_call_that_decided_it_and_is_no_tools_success() -> None:
    air = scored()

    @air.on_handoff
    def handed(from_agent: str, to_agent: str) -> float:
        assert from_agent == "a"
        return {"b": 1.0, "c": 2.0, "d": 3.0}[to_agent]

    air.on_handoff(from_agent="a", to_agent="d", name="to_d")(lambda: 9.0)
    calls = [
        call(0, agent="a", tool_call_ids=("h1",)), call(1, agent="b", tool_call_ids=("h2",)), call(2, agent="a"),
        call(3, agent="a"),
    ]  # fmt: skip
    facts = {semconv.HANDOFF_FROM: "a", semconv.TOOL_CALL_ID: "h1"}
    spans = [
        ROOT, span("turn", "root", semconv.INVOKE_AGENT, "a"), span("chat2", "turn", semconv.CHAT, "a"),
        tool("as a tool", "h1", name="transfer_to_b", agent="a"),
        span("h", "turn", semconv.HANDOFF, "a", attributes={**facts, semconv.HANDOFF_TO: "b"}),
        tool("by a tool", "h1", name="go", agent="a", attributes={semconv.HANDOFF_TO: "c"}),
        tool("failed", "h2", name="go", agent="b", ok=False),
        span("without a tool", "turn", semconv.HANDOFF, "a", attributes={semconv.HANDOFF_TO: "d"}),
    ]  # fmt: skip
    assert sorted(given_by(air, calls, spans)) == [
        ("bad", -1.0, "c1"), ("handed", 1.0, "c0"), ("handed", 2.0, "c0"), ("handed", 3.0, "c2"), ("to_d", 9.0, "c2"),
    ]  # fmt: skip


@st.composite
def attempts(draw: st.DrawFn) -> tuple[list[Call], list[Span], dict[str, tuple[bool, str | None]]]:
    """Agents within tools of agents, parallel tool calls, retries, lost ids; and what each run must earn for whom."""
    calls: list[Call] = []
    spans, owed = [ROOT], {}

    def speak(agent: str, parent: str, depth: int) -> None:
        for _ in range(draw(st.integers(1, 2))):
            index = len(calls)
            ids = tuple(f"id{index}.{k}" for k in range(draw(st.integers(0, 3))))
            policy = None if agent == "frozen" else "policy"
            calls.append(call(index, agent=agent, policy=policy, tool_call_ids=ids))
            spans.append(span(f"chat{index}", parent, semconv.CHAT, agent))
            for call_id in ids:
                for retry in range(draw(st.integers(1, 2))):
                    name, ok = f"{call_id}/{retry}", draw(st.booleans())
                    known = draw(st.sampled_from([call_id, call_id, None, f"lost {call_id}"]))
                    spans.append(tool(name, known, ok=ok, parent=parent, agent=agent))
                    if policy is not None:
                        owed[name] = (ok, f"c{index}" if known == call_id else None)
                    if depth < 2 and draw(st.booleans()):
                        inner = draw(st.sampled_from(["solver", "helper", "frozen"]))
                        spans.append(span(f"{name}!", name, semconv.INVOKE_AGENT, inner))
                        speak(inner, f"{name}!", depth + 1)

    speak("solver", "root", 0)
    return calls, spans, owed


@settings(max_examples=150, deadline=None)
@given(attempts(), st.randoms(use_true_random=False))
def test_every_outcome_is_credited_once_to_the_call_that_issued_it_in_any_order(
    attempt: Any, rng: random.Random
) -> None:
    calls, spans, owed = attempt
    selection = select(["solver", "helper"])
    credited = credited_by(scored(), calls, spans, selection)
    got = [(r.span_id, (r.value > 0, c)) for r, c in credited]
    assert len(got) == len(owed)
    assert dict(got) == owed

    shuffled = [replace(s, start=rng.random(), end=rng.random()) for s in rng.sample(spans, len(spans))]
    again = credited_by(scored(), rng.sample(calls, len(calls)), shuffled, selection)
    key = lambda pair: (pair[0].span_id, pair[0].name)  # noqa: E731
    assert sorted(again, key=key) == sorted(credited, key=key)

    index = SpanIndex(calls, spans)
    trained = build_trajectory("ro", 1, "g", index, selection).with_rewards(credited)
    read = build_trajectory("ro", 1, "g", SpanIndex(calls, [*spans, *reward_spans(credited, index)]), selection)
    assert sorted(trained.credited, key=key) == sorted(read.credited, key=key) == sorted(credited, key=key)
    placed, again = ([(t.call.id, t.rewards) for t in x.trajectory.transitions] for x in (trained, read))
    assert placed == again, "what is read from the store later is what was trained"
    assert trained.trajectory.rewards == read.trajectory.rewards
    earned = {t.call.id: t.reward for t in trained.trajectories["policy"].transitions}
    assert earned == {c.id: sum(2 * ok - 1 for ok, i in owed.values() if i == c.id) for c in calls if c.policy}
