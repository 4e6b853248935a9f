"""Rollout context and spans: threads, pools, tasks, strangers' tracers, and what comes too late."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl import semconv, tracing
from agl.mdp.selection import select
from agl.mdp.spans import Span, from_otel
from agl.tracing.context import RolloutContext


def context(rollout_id: str = "ro", agent: str = "main") -> RolloutContext:
    return RolloutContext(rollout_id, 1, agent, select(None))


def here() -> str | None:
    scope = tracing.current()
    return scope.rollout.rollout_id if scope else None


def named(spans: list[Span], name: str) -> Span:
    [span] = [s for s in spans if s.name == name]
    return span


def test_spans_nest_and_carry_who_and_where() -> None:
    with tracing.running(rollout := context()) as root:
        with tracing.span(semconv.INVOKE_AGENT, "sub", agent="sub"), tracing.span(semconv.CHAT, "m"):
            assert tracing.current().agent == "sub"  # type: ignore[union-attr]
        assert tracing.current() is root
    assert [s.name for s in rollout.spans] == ["chat m", "invoke_agent sub", "invoke_agent main"]
    chat, sub, main = rollout.spans
    assert (chat.parent_id, sub.parent_id, main.parent_id) == (sub.span_id, main.span_id, None)
    assert {s.trace_id for s in rollout.spans} == {main.trace_id}
    assert (chat.agent, chat.rollout_id, chat.attempt) == ("sub", "ro", 1)
    assert main.start <= chat.start <= chat.end <= main.end


def test_a_request_belongs_to_the_call_in_which_it_is_made() -> None:
    with tracing.running(context()):
        assert tracing.model_call() is None
        with tracing.span(semconv.CHAT, "m") as chat:
            assert tracing.model_call() is chat
            with tracing.span(semconv.OPERATION, "retry"):
                assert tracing.model_call() is chat
            for kind in (semconv.INVOKE_AGENT, semconv.EXECUTE_TOOL):
                with tracing.span(kind, "another"):
                    assert tracing.model_call() is None
        assert tracing.model_call() is None


def test_outside_a_rollout_there_is_nothing() -> None:
    assert tracing.start(semconv.CHAT, "m") is None
    with tracing.span(semconv.CHAT, "m") as scope:
        assert scope is None
    assert here() is None


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), asyncio.CancelledError(), SystemExit(3)])
def test_an_exception_is_recorded_and_goes_on_unchanged(error: BaseException) -> None:
    rollout = context()
    with pytest.raises(type(error)) as caught, tracing.running(rollout), tracing.span(semconv.EXECUTE_TOOL, "t"):
        raise error
    assert caught.value is error
    for span in rollout.spans:
        assert span.status == "error"
        assert span.attributes[semconv.ERROR_TYPE] == type(error).__qualname__
        assert [e.name for e in span.events] == ["exception"]
    assert len(rollout.spans) == 2


def test_threads_started_in_a_rollout_belong_to_it() -> None:
    seen: list[str | None] = []
    with tracing.running(rollout := context()):
        with tracing.span(semconv.INVOKE_AGENT, "sub", agent="sub"):

            def work() -> None:
                seen.append(here())
                with tracing.span(semconv.CHAT, "in thread"):
                    pass

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert tracing.current() is not None
    assert seen == ["ro"]
    chat = named(rollout.spans, "chat in thread")
    assert chat.parent_id == named(rollout.spans, "invoke_agent sub").span_id
    assert chat.agent == "sub"


class Subclass(threading.Thread):
    seen: str | None = "not run"

    def run(self) -> None:
        self.seen = here()


def test_thread_subclasses_too_and_only_inside() -> None:
    with tracing.running(context()):
        inside = Subclass()
        inside.start()
        inside.join()
    outside = Subclass()
    outside.start()
    outside.join()
    assert (inside.seen, outside.seen) == ("ro", None)


def test_another_librarys_hook_of_threads_is_put_back_as_it_was() -> None:
    pytest.importorskip("wrapt")
    # In a process of its own: in this one a framework may have hooked threads for good. Such a wrapper is a descriptor,
    # so what the class gives for the attribute is not what its namespace holds.
    code = """
import threading, wrapt
from agl import tracing
from agl.mdp.selection import select
wrapt.wrap_function_wrapper(threading.Thread, "start", lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs))
hooked = threading.Thread.__dict__["start"]
with tracing.running(tracing.RolloutContext("ro", 1, "a", select(None))):
    print(threading.Thread.__dict__["start"] is hooked)
print(threading.Thread.__dict__["start"] is hooked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_pools_worker_carries_each_tasks_rollout_and_nothing_over() -> None:
    with ThreadPoolExecutor(1) as pool:
        with tracing.running(context("a")):
            assert pool.submit(here).result() == "a"
            assert list(pool.map(lambda _: here(), range(2))) == ["a", "a"]
            empty = contextvars.Context()
            assert empty.run(lambda: pool.submit(here)).result() is None
        assert pool.submit(here).result() is None
        with tracing.running(context("b")):
            assert pool.submit(here).result() == "b"
        assert pool.submit(here).result() is None


def test_run_in_executor_and_to_thread() -> None:
    async def main() -> list[str | None]:
        loop = asyncio.get_running_loop()
        with tracing.running(context()):
            inside = [await loop.run_in_executor(None, here), await asyncio.to_thread(here)]
        return [*inside, await loop.run_in_executor(None, here), await asyncio.to_thread(here)]

    assert asyncio.run(main()) == ["ro", "ro", None, None]


def test_a_thread_that_outlives_its_rollout_is_no_longer_in_it() -> None:
    ended, seen = threading.Event(), []

    def work() -> None:
        ended.wait(5)
        seen.append(here())
        with tracing.span(semconv.CHAT, "late"):
            pass

    with tracing.running(rollout := context()):
        thread = threading.Thread(target=work)
        thread.start()
    ended.set()
    thread.join()
    assert seen == [None]
    assert [s.name for s in rollout.spans] == ["invoke_agent main"]


def test_twenty_rollouts_in_threads_never_mix() -> None:
    barrier = threading.Barrier(20)
    rollouts = [context(f"ro-{i}") for i in range(20)]

    def run(rollout: RolloutContext) -> None:
        with tracing.running(rollout):
            barrier.wait(10)
            for k in range(5):
                with tracing.span(semconv.CHAT, f"{k}"), ThreadPoolExecutor(2) as pool:
                    seen = list(pool.map(lambda _: here(), range(3)))
                assert seen == [rollout.rollout_id] * 3

    threads = [threading.Thread(target=run, args=(r,)) for r in rollouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rollout in rollouts:
        assert len(rollout.spans) == 6
        assert {s.rollout_id for s in rollout.spans} == {rollout.rollout_id}
        assert len({s.trace_id for s in rollout.spans}) == 1
    assert threading.Thread.start.__module__ == "threading"


def test_twenty_rollouts_in_tasks_never_mix() -> None:
    rollouts = [context(f"ro-{i}") for i in range(20)]

    async def inner(k: int) -> None:
        with tracing.span(semconv.CHAT, f"{k}"):
            await asyncio.sleep(0.001 * (k % 3))
            assert await asyncio.to_thread(here) == here()

    async def run(rollout: RolloutContext) -> None:
        with tracing.running(rollout):
            await asyncio.gather(*(inner(k) for k in range(5)))
            await asyncio.create_task(inner(5))

    async def main() -> None:
        await asyncio.gather(*(run(r) for r in rollouts))

    asyncio.run(main())
    for rollout in rollouts:
        root = named(rollout.spans, "invoke_agent main")
        assert len(rollout.spans) == 7
        assert {s.parent_id for s in rollout.spans if s is not root} == {root.span_id}


def test_a_span_may_end_in_another_context() -> None:
    with tracing.running(rollout := context()):
        scope = tracing.start(semconv.CHAT, "m")
        assert scope is not None
        contextvars.Context().run(tracing.end, scope)
        assert tracing.current() is scope.parent
        with tracing.span(semconv.CHAT, "next"):
            pass
    assert named(rollout.spans, "chat next").parent_id == named(rollout.spans, "invoke_agent main").span_id


def test_spans_that_end_out_of_order_leave_the_innermost_open_one() -> None:
    with tracing.running(context()) as root:
        outer, inner = tracing.start(semconv.INVOKE_AGENT, "a"), tracing.start(semconv.CHAT, "m")
        assert outer is not None
        assert inner is not None
        tracing.end(outer)
        assert tracing.current() is inner
        tracing.end(inner)
        assert tracing.current() is root


def test_a_span_ends_once_also_from_two_threads() -> None:
    with tracing.running(rollout := context()):
        for k in range(50):
            scope = tracing.start(semconv.CHAT, f"{k}")
            assert scope is not None
            threads = [threading.Thread(target=tracing.end, args=(scope,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert len(rollout.spans) == 51


def test_what_is_open_at_the_end_is_kept_and_what_ends_later_is_dropped() -> None:
    with tracing.running(rollout := context()):
        scope = tracing.start(semconv.CHAT, "never read")
        assert scope is not None
    assert [s.name for s in rollout.spans] == ["chat never read", "invoke_agent main"]
    tracing.end(scope, attributes={"late": True})
    assert len(rollout.spans) == 2
    assert tracing.start(semconv.CHAT, "m", parent=scope) is None
    assert here() is None


@pytest.fixture
def theirs() -> trace.Tracer:
    return TracerProvider(shutdown_on_exit=False).get_tracer("theirs")


def parent_of(span: trace.Span) -> int | None:
    parent = span.parent  # type: ignore[attr-defined]
    return parent.span_id if parent else None


def test_users_spans_form_the_tree_that_they_form_without_agl(theirs: trace.Tracer) -> None:
    with theirs.start_as_current_span("job") as job:
        with tracing.running(context()) as root:
            with theirs.start_as_current_span("step") as step:
                with tracing.span(semconv.CHAT, "m") as chat, theirs.start_as_current_span("http") as http:
                    pass
                with theirs.start_as_current_span("after") as after:
                    pass
            assert trace.get_current_span() is job
        assert trace.get_current_span() is job
    assert chat is not None
    assert parent_of(step) == job.get_span_context().span_id
    assert parent_of(http) == step.get_span_context().span_id
    assert parent_of(after) == step.get_span_context().span_id
    assert {span.get_span_context().trace_id for span in (step, http, after)} == {job.get_span_context().trace_id}
    assert parent_of(chat.span) == root.span.get_span_context().span_id
    assert parent_of(root.span) is None


def test_nothing_of_ours_stays_current_after_a_rollout(theirs: trace.Tracer) -> None:
    with theirs.start_as_current_span("job") as job:
        with tracing.running(context()):
            first, second = tracing.start(semconv.CHAT, "elsewhere"), tracing.start(semconv.CHAT, "never")
            assert first is not None
            assert second is not None
            contextvars.Context().run(tracing.end, second)
        assert trace.get_current_span() is job
    assert not trace.get_current_span().get_span_context().is_valid


def test_the_first_span_does_not_block_the_event_loop() -> None:
    """In a process of its own: whichever test is first makes the provider."""
    program = """
import asyncio
from blockbuster import blockbuster_ctx
from agl import semconv, tracing
from agl.mdp.selection import select
from agl.tracing.context import RolloutContext

async def main():
    with blockbuster_ctx(), tracing.running(RolloutContext("ro", 1, "main", select(None))) as root:
        with tracing.span(semconv.CHAT, "m"):
            pass
    return root.span.resource.attributes

print(dict(asyncio.run(main())))
"""
    environment = {**os.environ, "OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "team=red"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "'service.name': 'mine'" in done.stdout
    assert "'team': 'red'" in done.stdout


def test_the_global_tracer_provider_is_untouched() -> None:
    before = trace.get_tracer_provider()
    with tracing.running(context()):
        pass
    assert trace.get_tracer_provider() is before
    assert tracing.provider() is not before


def test_the_environment_cannot_switch_spans_off() -> None:
    code = (
        "from agl import tracing\nfrom agl.mdp.selection import select\n"
        "with tracing.running(r := tracing.RolloutContext('ro', 1, 'a', select(None))):\n"
        "    with tracing.span('chat', 'm', attributes={'long': 'x' * 999}): pass\n"
        "assert [len(s.attributes.get('long', '')) for s in r.spans] == [999, 0], r.spans\n"
    )
    off = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_SAMPLER": "always_off", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "5"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **off}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_threads_are_as_before_once_no_rollout_runs() -> None:
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit
    with tracing.running(context("a")), tracing.running(context("b")):
        assert threading.Thread.start is not start
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == (start, submit)


def test_another_librarys_thread_hook_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    # Not always Python's own: frameworks hook threads for good when they are first used.
    before = threading.Thread.start.__code__
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing.running(context("a")))
        ours = threading.Thread.start

        def theirs(self: threading.Thread) -> None:
            calls.append("theirs")
            ours(self)

        threading.Thread.start = theirs  # type: ignore[method-assign]
    try:
        assert threading.Thread.start is theirs
        with tracing.running(context("b")):
            thread = Subclass()
            thread.start()
            thread.join()
        assert thread.seen == "b"
        assert calls == ["theirs"]
    finally:
        threading.Thread.start = ours  # type: ignore[method-assign]
        with tracing.running(context("c")):
            pass
    assert threading.Thread.start.__code__ is before


def test_processors_of_agls_provider_see_what_the_store_gets() -> None:
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    tracing.provider().add_span_processor(processor)
    try:
        attributes = {"n": 1, "none": None, "words": ["a", "b"]}
        with (
            contextlib.suppress(ValueError),
            tracing.running(rollout := context()),
            tracing.span(semconv.CHAT, "m", attributes=attributes),
        ):
            raise ValueError("no")
    finally:
        processor.shutdown()
        tracing.provider()._active_span_processor._span_processors = ()
    assert [from_otel(span) for span in exporter.get_finished_spans()] == list(rollout.spans)
    chat = rollout.spans[0]
    assert (chat.attributes["n"], chat.attributes["words"], "none" in chat.attributes) == (1, ("a", "b"), False)
    assert json.loads(exporter.get_finished_spans()[0].to_json())["parent_id"] == f"0x{rollout.spans[1].span_id}"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("x" * 10_000, "x" * 10_000),
        (True, True),
        (1.5, 1.5),
        ([], ()),
        ([1, 2], (1, 2)),
        (object(), None),
        (None, None),
    ],
)
def test_attributes_are_those_that_opentelemetry_has_types_for(value: object, kept: object) -> None:
    with tracing.running(rollout := context()), tracing.span(semconv.CHAT, "m") as scope:
        assert scope is not None
        scope.span.set_attribute("value", value)
    assert rollout.spans[0].attributes.get("value") == kept
    scope.span.set_attribute("late", 1)
    assert "late" not in rollout.spans[0].attributes
