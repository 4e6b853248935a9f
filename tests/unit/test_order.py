"""What came first is known by numbers that no clock can change; how long it took, by a clock that nobody can set."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from scripted import ScriptedRollouts, in_loop, serving

import agl
from agl import semconv, tracing
from agl.mdp.order import in_order, next_number, numbers_of_calls
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.mdp.types import Call, float_array, int_array
from agl.rewards import Trace
from agl.trainer.report.labels import label
from agl.trainer.store import open_store
from agl.trainer.store.http.otlp import _task
from agl.trainer.store.types import NewRollout

HOUR = 3600.0


class WallClock:
    """The wall clock of this process, which can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead = 0.0
        now, now_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: now() + self._ahead)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(self._ahead * 1e9))

    def jump(self, seconds: float) -> None:
        self._ahead += seconds


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


def span(id: str, number: int | None = None, start: float = 0.0, parent: str | None = "root", **facts: Any) -> Span:
    attributes = {semconv.OPERATION_NAME: semconv.CHAT, semconv.AGENT_NAME: "agent", **facts}
    if number is not None:
        attributes[semconv.SEQUENCE] = number
    return Span("t" * 32, id, parent, "ro-1", 1, "chat m", start, start + 1.0, attributes=attributes)


def call(index: int, span_id: str | None = None, **fields: Any) -> Call:
    tokens = {"prompt_ids": int_array([1]), "response_ids": int_array([2]), "logprobs": float_array([-1.0])}
    return Call(f"r{index}", "ro-1", 1, index, "agent", "policy", 0, span_id=span_id, **tokens, **fields)


# -- a run -----------------------------------------------------------------------------------------------------------
def test_the_last_answer_is_graded_though_the_clock_was_set_back(wall: WallClock, tmp_path: Path) -> None:
    graded: list[Any] = []

    def asks_twice(task: Any) -> str:
        client = OpenAI(base_url="http://provider.invalid/v1", api_key="sk-own")
        history: list[Any] = [{"role": "user", "content": str(task)}]
        for _ in range(3):
            answer = client.chat.completions.create(model="m", messages=history).choices[0].message.content
            history += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
            wall.jump(-3 * HOUR)
        return "done"

    def score(task: Any, output: Any, trace: Trace) -> float:
        graded.append([json.loads(str(c.attributes[semconv.OUTPUT_MESSAGES])) for c in trace.calls])
        seconds.extend(s.end - s.start for s in trace.spans)
        return 1.0

    seconds: list[float] = []
    algorithm = ScriptedRollouts(["one", "two", "three"])
    trainer = agl.Trainer(algorithm, directory=tmp_path, progress=False)  # type: ignore[arg-type]
    trainer.fit(agl.wrap(asks_twice, reward=score), ["a task"])
    assert [messages[0]["parts"][0]["content"] for messages in graded[0]] == ["one", "two", "three"]
    (calls,), (spans,) = algorithm.calls, algorithm.spans
    chats = [s.span_id for s in spans if s.operation == semconv.CHAT]
    assert chats == [c.span_id for c in calls]
    stored = Trace.of_attempt(calls[0].rollout_id, 1, spans, calls)
    said = [m["content"] for _, m in stored.conversation if m["role"] == "assistant"]
    assert said == ["one", "two", "three"]
    seconds += [c.ended_at - c.started_at for c in calls] + [s.end - s.start for s in spans]
    assert all(0 <= each < 60 for each in seconds)


def test_a_span_in_which_the_clock_is_set_lasts_as_long_as_it_lasts(wall: WallClock) -> None:
    rollout = tracing.RolloutContext("ro-1", 1, "agent", select(None))
    with tracing.running(rollout):
        for hours in (-3, 3, -48):
            with tracing.span(semconv.EXECUTE_TOOL, "tool"):
                wall.jump(hours * HOUR)
    assert len(rollout.spans) == 4
    assert all(0 <= s.end - s.start < 60 for s in rollout.spans)


@in_loop
async def test_a_call_during_which_the_clock_is_set_lasts_as_long_as_it_lasts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        wall = WallClock(patch)

        def answer(_: Any) -> str:
            wall.jump(-HOUR)
            return "one"

        async with serving(answer) as rig:
            attempt = await rig.attempt()
            await attempt.chat()
            (made,) = await attempt.close()
    assert 0 <= made.ended_at - made.started_at < 60


# -- programs without spans ------------------------------------------------------------------------------------------
def test_calls_without_spans_are_in_the_order_of_their_arrival() -> None:
    """With their tools in between, whatever the gateway's clock said."""
    asks = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = [
        call(
            0, started_at=900.0, ended_at=901.0, response={"role": "assistant", "content": None, "tool_calls": [asks]}
        ),
        call(
            1,
            started_at=500.0,
            ended_at=501.0,
            request={"messages": [{"role": "tool", "tool_call_id": "t1", "content": "found"}]},
            response={"role": "assistant", "content": "two"},
        ),
        call(2, started_at=100.0, ended_at=101.0, response={"role": "assistant", "content": "three"}),
    ]
    facts: Any = {semconv.OPERATION_NAME: semconv.INVOKE_AGENT}
    root = span("root", 7, parent=None, **facts)
    for spans in ([], [root]):
        trace = Trace.of_attempt("ro-1", 1, spans, calls)
        assert [c.attributes[semconv.RESPONSE_ID] for c in trace.calls] == ["r0", "r1", "r2"]
        ran = [s.name for s in in_order(trace.spans) if s.span_id != "root"]
        assert ran == ["chat policy", "execute_tool look", "chat policy", "chat policy"]


def test_calls_without_spans_lie_among_those_that_have_one() -> None:
    """Half of a program is in another language: what the gateway received says how the two halves interleave."""
    spans = [span("root", 5, parent=None), span("b", 2_000_000_000), span("d", 4_000_000_000)]
    calls = [call(0), call(1, "b"), call(2), call(3, "d"), call(4)]
    numbers = numbers_of_calls(calls, spans)
    assert sorted(numbers, key=lambda id: numbers[id]) == ["r0", "r1", "r2", "r3", "r4"]
    assert (numbers["r1"], numbers["r3"]) == (2_000_000_000, 4_000_000_000)
    assert min(numbers.values()) > 5


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_whatever_has_spans_no_call_without_one_overtakes_another(arrival: list[int], seen: set[int]) -> None:
    """Concurrent calls may arrive in another order than they began; those with spans keep their own numbers."""
    spans = [span(f"s{k}", 10**10 + 10**8 * k) for k in seen]
    calls = [call(index, f"s{k}" if k in seen else None) for index, k in enumerate(arrival)]
    numbers = numbers_of_calls(calls, spans)
    assert {c.span_id: numbers[c.id] for c in calls if c.span_id} == {s.span_id: s.sequence for s in spans}
    unseen = [numbers[c.id] for c in calls if c.span_id is None]
    assert unseen == sorted(unseen)


# -- spans without numbers -------------------------------------------------------------------------------------------
def test_spans_without_a_number_lie_among_the_others_by_their_own_clock() -> None:
    """A program in another language sends them; the gateway numbers its calls."""
    spans = [
        span("root", None, 0.0, parent=None),
        span("first call", 1_000_000, 1.0),
        span("tool", None, 2.0),
        span("second call", 2_000_000, 3.0),
        span("reward", None, 4.0),
        span("agent", None, 5.0),
        span("third call", 3_000_000, 5.0, parent="agent"),
    ]
    assert in_order(reversed(spans)) == spans


def test_spans_without_a_number_stay_within_an_ancestor_that_has_one() -> None:
    """Their sender's clock may be wrong by a day; a number is right."""
    for clock in (-86_400.0, 0.0, 86_400.0):
        spans = [
            span("root", 10, 0.0, parent=None),
            span("early", 20, 1.0),
            span("inner", None, clock, parent="early"),
            span("late", 30, 3.0),
        ]
        assert in_order(reversed(spans)) == spans


def test_spans_without_a_number_come_after_their_parent() -> None:
    odd: Any = {semconv.SEQUENCE: "not a number"}
    spans = [
        span("late", 30),
        span("inner", None, start=-9.0, parent="outer"),
        span("outer", None, start=-10.0, parent="early"),
        span("early", 20),
        span("root", 10, parent=None),
        span("lost", start=-1.0, parent="gone", **odd),
    ]
    assert [s.span_id for s in in_order(spans)] == ["lost", "root", "early", "outer", "inner", "late"]
    circle = [span("a", None, parent="b"), span("b", None, parent="a")]
    assert [s.span_id for s in in_order(circle)] == ["a", "b"]


def test_a_received_traces_task_is_what_was_asked_first() -> None:
    def asked(text: str) -> Any:
        message = {"role": "user", "parts": [{"type": "text", "content": text}]}
        return {semconv.INPUT_MESSAGES: json.dumps([message])}

    spans = [
        span("root", 10, 900.0, parent=None, **{semconv.OPERATION_NAME: semconv.INVOKE_AGENT}),
        span("second", 30, 100.0, **asked("second")),
        span("first", 20, 901.0, **asked("first")),
    ]
    assert _task(spans) == {"input": "first"}


def test_numbers_grow_across_processes_and_forks_of_a_machine() -> None:
    program = "from agl.mdp.order import next_number; print(next_number())"
    before = next_number()
    other = int(subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"],
                               capture_output=True, text=True, check=True).stdout)  # fmt: skip
    assert before < other < next_number()
    several = [next_number() for _ in range(1000)]
    assert several == sorted(set(several))


# -- the store -------------------------------------------------------------------------------------------------------
def test_the_newest_label_counts_though_the_clock_was_set_back(wall: WallClock) -> None:
    async def scenario() -> list[tuple[str, float]]:
        store = await open_store("memory")
        (rollout,) = await store.enqueue_rollouts([NewRollout(task="t", run_id="run", step=0)])
        await store.dequeue_rollout("worker")
        root = {semconv.OPERATION_NAME: semconv.INVOKE_AGENT, semconv.SEQUENCE: next_number()}
        now = time.time()
        id = rollout.rollout_id
        await store.add_spans([Span("t" * 32, "1" * 16, None, id, 1, "invoke_agent", now, now, attributes=root)])
        for value in (1.0, 0.0, 0.5):
            await label(store, id, value)
            wall.jump(-HOUR)
        (summary,) = await store.query_step("run", 0)
        await store.close()
        return [(reward.name, reward.value) for reward in summary.rewards]

    assert asyncio.run(scenario()) == [("label", 0.5)]
