"""Agent Lightning 0.3's names at their paths, its spans, and its rule for a rollout's reward."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from scripted import in_loop

import agl.compat as al
from agl import semconv as agl_semconv
from agl.compat import types as T
from agl.compat.adapter.messages import OpenAIMessages
from agl.compat.adapter.triplet import RewardMatchPolicy, TraceTree
from agl.compat.env_var import LightningEnvVar
from agl.compat.semconv import AGL_ANNOTATION, LightningSpanAttributes
from agl.compat.utils import otel
from agl.credit import Uniform, returns
from agl.errors import AglError, ConfigError
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.types import Reward

PATHS = {
    "adapter": "Adapter OtelTraceAdapter TraceAdapter",
    "adapter.messages": "OpenAIMessages TraceToMessages",
    "adapter.triplet": "RewardMatchPolicy TraceTree Transition TracerTraceToTriplet LlmProxyTraceToTriplet",
    "algorithm.decorator": "FunctionalAlgorithm algo",
    "algorithm.fast": "Baseline FastAlgorithm",
    "client": "AgentLightningClient DevTaskLoader",
    "emitter.annotation": "OperationContext emit_annotation operation",
    "emitter.exception": "emit_exception",
    "emitter.message": "emit_message get_message_value",
    "emitter.object": "emit_object encode_object get_object_value",
    "emitter.reward": "emit_reward get_rewards_from_span reward",
    "env_var": "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var",
    "execution.events": "ExecutionEvent MultiprocessingEvent ThreadingEvent",
    "instrumentation": "instrument_all uninstrument_all",
    "instrumentation.agentops": "instrument_agentops",
    "litagent.decorator": "FunctionalLitAgent llm_rollout prompt_rollout",
    "llm_proxy": "AddReturnTokenIds LLMProxy LightningSpanExporter",
    "logging": "configure_logger setup setup_module",
    "semconv": "AGL_ANNOTATION AGL_VIRTUAL LightningResourceAttributes LinkPydanticModel RewardPydanticModel",
    "server": "AgentLightningServer ServerDataStore",
    "store.collection": "AtomicMode Collection InMemoryLightningCollections",
    "store.mongo": "MongoLightningStore",
    "store.utils": "rollout_status_from_attempt scan_unhealthy_rollouts",
    "tracer.base": "Tracer clear_active_tracer get_active_tracer set_active_tracer",
    "tracer.dummy": "DummySpanRecordingContext DummyTracer",
    "tracer.otel": "LightningSpanProcessor OtelTracer",
    "tracer.weave": "WeaveTracer",
    "types": "Attributes AttributeValue Event FilterOptions GenericResponse Link OtelResource ParallelWorkerBase "
    "ProxyLLM Resource RolloutRawResult SortOptions SpanContext SpanCoreFields SpanLike Task TraceStatus",
    "types.core": "RolloutLegacy TaskIfAny",
    "types.tracer": "SpanNames SpanRecordingContext StatusCode TraceState",
    "utils.id": "generate_id",
    "utils.metrics": "ConsoleMetricsBackend MetricsBackend setup_multiprocess_prometheus",
    "utils.otel": "flatten_attributes get_tracer get_tracer_provider make_link_attributes query_linked_spans",
    "utils.otlp": "handle_otlp_export spans_from_proto",
    "utils.system_snapshot": "system_snapshot",
}
"""Module of 0.3 -> some of the names that its reference documents there."""


@pytest.mark.parametrize("path", PATHS)
def test_names_are_at_their_documented_paths(path: str) -> None:
    module = importlib.import_module(f"agl.compat.{path}")
    assert all(getattr(module, name) is not None for name in PATHS[path].split())


@pytest.mark.parametrize("name", ["MongoLightningStore", "DevTaskLoader", "TinkerLLM", "setup_multiprocess_prometheus"])
def test_what_has_no_counterpart_says_what_to_use(name: str) -> None:
    missing = importlib.import_module("agl_agentlightning.missing")
    with pytest.raises(ConfigError, match=name) as refused:
        getattr(missing, name)("mongodb://x")
    assert refused.value.hint


def test_patching_a_name_under_its_old_path_replaces_it_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    reward_module = importlib.import_module("agl.compat.emitter.reward")
    with monkeypatch.context() as patched:
        patched.setattr(reward_module, "emit_annotation", lambda payload, *, propagate: payload)
        assert al.emit_reward(1) == {"agentlightning.reward": [{"name": "primary", "value": 1.0}]}
    assert isinstance(al.emit_reward(1), T.SpanCoreFields)


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_SERVER_PORT", "4747")
    monkeypatch.setenv("AGL_MANAGED_STORE", "perhaps")
    assert al.resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, fallback=1) == 4747
    assert al.resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, fallback="x") == "x"
    with pytest.raises(ValueError, match="is not a boolean"):
        al.resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE)


# -- attributes -------------------------------------------------------------------------------------------------------
def test_nested_values_become_attributes_and_come_back() -> None:
    nested = {"a": [{"b": 1}, {"b": [True, False]}], "c": {"d": "x"}}
    flat = otel.flatten_attributes(nested)
    assert flat == {"a.0.b": 1, "a.1.b": [True, False], "c.d": "x"}
    assert otel.unflatten_attributes(flat) == nested
    assert otel.filter_and_unflatten_attributes(flat, "a") == nested["a"]


def test_links_lead_to_spans() -> None:
    links = otel.extract_links_from_attributes(otel.make_link_attributes({"gen_ai.response.id": "r1"}))
    spans = [T.Span.from_attributes(attributes={"gen_ai.response.id": f"r{i}"}) for i in range(3)]
    assert otel.query_linked_spans(spans, links) == [spans[1]]
    assert otel.extract_tags_from_attributes(otel.make_tag_attributes(["fast", "good"])) == ["fast", "good"]


# -- emitters and tracers ---------------------------------------------------------------------------------------------
async def spans_of(function: Any) -> list[T.Span]:
    tracer = al.OtelTracer()
    async with tracer.trace_context("t"):
        function()
    return [s for s in tracer.get_last_trace() if s.parent_id is not None]


@in_loop
async def test_what_is_emitted_has_both_vocabularies() -> None:
    def emit() -> None:
        al.emit_message("hi", {"k": {"n": 1}})
        al.emit_object({"a": [1]})
        al.emit_object(b"raw")
        al.emit_exception(KeyError("gone"))
        al.emit_reward({"right": 1, "short": 0.5}, primary_key="right", attributes=otel.make_tag_attributes(["x"]))

    spans = await spans_of(emit)
    message, thing, raw, error, reward, named = spans
    assert [s.operation for s in spans] == ["message", "object", "object", "exception", "reward", "reward"]
    assert (al.get_message_value(message), message.attributes["k.n"]) == ("hi", 1)
    assert (al.get_object_value(thing), al.get_object_value(raw)) == ({"a": [1]}, b"raw")
    assert (error.name, error.attributes["exception.type"]) == ("agentlightning.exception", "KeyError")
    assert [(r.name, r.value) for r in al.get_rewards_from_span(reward)] == [("right", 1.0), ("short", 0.5)]
    assert (reward.name, otel.extract_tags_from_attributes(reward.attributes)) == (AGL_ANNOTATION, ["x"])
    own = [Reward.of_span(s.attributes, None) for s in (reward, named)]
    assert [(r.name, r.value, r.primary) for r in own if r] == [("right", 1.0, True), ("short", 0.5, False)]
    assert al.find_final_reward(spans) == 1.0


def test_nothing_is_recorded_without_a_rollout_or_propagation() -> None:
    assert al.get_active_tracer() is None
    assert al.emit_reward(1, propagate=False).attributes["agentlightning.reward.0.value"] == 1.0
    with al.operation(name="sum", propagate=False) as op:
        op.set_input(1, b=2)
        op.set_output(3)
        with pytest.raises(RuntimeError):
            op.span()
    assert op.span().attributes == {
        "agentlightning.operation.name": "sum",
        "agentlightning.operation.input.args.0": 1,
        "agentlightning.operation.input.b": 2,
        "agentlightning.operation.output": 3,
    }


@in_loop
async def test_an_operation_records_its_arguments_its_result_and_its_error() -> None:
    @al.operation(category="maths")
    def divide(a: int, b: int = 2) -> float:
        return a / b

    def run() -> None:
        divide(4)
        with pytest.raises(ZeroDivisionError):
            divide(1, b=0)

    right, wrong = await spans_of(run)
    key = LightningSpanAttributes
    assert right.attributes[key.OPERATION_NAME.value] == "divide"
    assert otel.filter_and_unflatten_attributes(right.attributes, key.OPERATION_INPUT.value) == {"a": 4, "b": 2}
    assert (right.attributes[key.OPERATION_OUTPUT.value], right.attributes["category"]) == (2.0, "maths")
    assert (wrong.status.status_code, wrong.attributes["exception.type"]) == ("ERROR", "ZeroDivisionError")


@in_loop
async def test_spans_of_a_programs_own_tracer_are_in_the_trace() -> None:
    def run() -> None:
        with otel.get_tracer().start_as_current_span("mine") as span:
            span.set_attribute("k", "v")
        with otel.get_tracer(use_active_span_processor=False).start_as_current_span("elsewhere"):
            pass

    [span] = await spans_of(run)
    assert (span.name, span.attributes["k"]) == ("mine", "v")


def test_one_tracer_is_active_at_a_time() -> None:
    tracer = al.DummyTracer()
    al.set_active_tracer(tracer)
    try:
        assert al.get_active_tracer() is tracer
        with pytest.raises(ValueError, match="active tracer already"):
            al.set_active_tracer(al.DummyTracer())
    finally:
        al.clear_active_tracer()
    assert al.get_active_tracer() is None


# -- a rollout's reward -----------------------------------------------------------------------------------------------
@al.reward.reward
def evaluate(value: float) -> float:
    return value


def calc_x(task: Any) -> None:
    al.emit_reward(evaluate(1.0))


def shaped(task: Any) -> None:
    al.emit_reward(0.2)
    al.emit_reward({"main": 0.7, "style": 5.0}, primary_key="main")


def returned(task: Any) -> float:
    return evaluate(1.0)


def mixed(task: Any) -> None:
    """agl's own rewards add up, also with 0.3's last one."""
    al.emit_reward(0.2)
    al.emit_reward(0.5)
    importlib.import_module("agl").emit_reward(0.25)


@pytest.mark.parametrize(("agent", "reward"), [(calc_x, 1.0), (shaped, 0.7), (returned, 1.0), (mixed, 0.75)])
@in_loop
async def test_the_last_reward_of_a_rollout_is_its_reward(agent: Any, reward: float) -> None:
    store = al.InMemoryLightningStore()
    runner = al.LitAgentRunner(al.OtelTracer())
    with runner.run_context(agent=al.rollout(agent), store=store):
        done = await runner.step({"q": 1})
    spans = await store.agl_store.query_spans(done.rollout_id)
    trajectory = build_trajectory(done.rollout_id, 1, "g", SpanIndex([], spans), select(None)).trajectory
    assert trajectory.total_reward == pytest.approx(reward)
    assert returns(Uniform(), trajectory) == []
    await store.close()


def test_a_reward_with_a_link_is_credited_to_that_response() -> None:
    spans = []

    def emit() -> None:
        al.emit_reward(0.5, attributes=otel.make_link_attributes({"gen_ai.response.id": "chatcmpl-7"}))

    async def run() -> None:
        spans.extend(await spans_of(emit))

    in_loop(run)()
    assert spans[0].attributes[agl_semconv.REWARD_CALL] == "chatcmpl-7"


@pytest.mark.parametrize(
    ("value", "key", "error"), [("x", None, TypeError), ({"a": "x"}, "a", ValueError), ({"a": 1}, "b", ValueError)]
)
def test_a_reward_that_is_no_number_is_refused(value: Any, key: str | None, error: type[Exception]) -> None:
    with pytest.raises(AglError) as refused:
        al.emit_reward(value, primary_key=key)
    assert isinstance(refused.value, error)


# -- adapters on 0.3's spans ------------------------------------------------------------------------------------------
def span(id: str, name: str, parent: str | None, start: float, end: float, **attributes: Any) -> T.Span:
    named = {k.replace("__", "."): v for k, v in attributes.items()}
    return T.Span.from_attributes(
        span_id=id,
        name=name,
        parent_id=parent,
        start_time=start,
        end_time=end,
        attributes=named,
        sequence_id=int(start),
    )


def trace() -> list[T.Span]:
    """Two agents' calls of which one lost its parent, and AgentOps' reward."""
    reward = {"agentops.task.output": '{"type": "reward", "value": 0.5}'}
    chat = "openai.chat.completion"
    return [
        span("root", "session", None, 0, 10),
        span("a", "agent.node", "root", 1, 5, agent__name="writer"),
        span("b", "agent.node", "root", 6, 9, agent__name="critic"),
        span("c1", chat, "root", 2, 3, prompt_token_ids=[1], response_token_ids=[2, 3], gen_ai__response__id="r1"),
        span("c1-again", chat, "c1", 2, 3, gen_ai__response__id="r1"),
        span("c2", chat, "b", 7, 8, prompt_token_ids=[4], response_token_ids=[5], gen_ai__response__id="r2"),
        span("r", "reward", "root", 9.5, 9.6, **reward),
    ]


def test_triplets_of_an_agent_from_spans_of_03() -> None:
    [first, second] = al.TracerTraceToTriplet().adapt(trace())
    assert (first.prompt["token_ids"], first.response["token_ids"], first.reward) == ([1], [2, 3], None)
    assert (second.metadata["agent_name"], second.metadata["response_id"], second.reward) == ("critic", "r2", 0.5)
    [only] = al.TracerTraceToTriplet(agent_match="writer").adapt(trace())
    assert (only.metadata["agent_name"], only.reward) == ("writer", 0.5)
    assert al.TracerTraceToTriplet(repair_hierarchy=False, agent_match="writer").adapt(trace()) == []
    siblings = al.TracerTraceToTriplet(reward_match=RewardMatchPolicy.FIRST_SIBLING, repair_hierarchy=False)
    assert [t.reward for t in siblings.adapt(trace())] == [None, 0.5]


def test_a_trees_lost_root_is_virtual() -> None:
    tree = TraceTree.from_spans([s for s in trace() if s.span_id != "root"])
    assert (tree.id, tree.span.name) == ("root", "agentlightning.virtual")
    assert tree.names_tuple()[1][0] == ("agent.node [writer]", [])
    with pytest.raises(ValueError, match="no spans"):
        TraceTree.from_spans([])


def test_triplets_from_a_proxys_spans_by_their_numbers() -> None:
    calls = [
        span(
            f"c{i}", "raw_gen_ai_request", None, i, i + 1,
            **{"llm.hosted_vllm.prompt_token_ids": "[1, 2]", "llm.hosted_vllm.response_token_ids": f"[[{i}]]"},
        )
        for i in (1, 2)
    ]  # fmt: skip
    rewards = [span(f"r{i}", AGL_ANNOTATION, None, i, i, **{"agentlightning.reward.0.value": i / 10}) for i in (0, 3)]
    found = al.LlmProxyTraceToTriplet().adapt([*calls, *rewards])
    assert [(t.response["token_ids"], t.reward) for t in found] == [([1], None), ([2], 0.3)]


def test_messages_from_spans_of_03() -> None:
    call = span(
        "c", "openai.chat.completion", None, 1, 2,
        **{
            "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "2 + 2", "gen_ai.prompt.prompt_filter": "[]",
            "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.finish_reason": "tool_calls",
            "gen_ai.request.functions.0.name": "add", "gen_ai.request.functions.0.parameters": '{"type": "object"}',
        },
    )  # fmt: skip
    facts = {"tool.name": "add", "tool.parameters": "{}", "tool.call.id": "x", "tool.call.type": "function"}
    tool = span("t", "tool", "c", 2, 3, **facts)
    made = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    expected: OpenAIMessages = {
        "messages": [
            {"role": "user", "content": "2 + 2"},
            {"role": "assistant", "content": None, "tool_calls": [made]},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    }
    assert al.TraceToMessages().adapt([call, tool]) == [expected]


def test_resources_take_their_type_and_a_proxys_address_its_rollout() -> None:
    assert al.LLM("http://x/v1", "m", resource_type="llm") == al.LLM("http://x/v1", "m")
    assert al.PromptTemplate("{x}", resource_type="prompt_template").format(x=1) == "1"
    proxy = al.ProxyLLM("http://x/v1", "m", "key")
    assert proxy.get_base_url("ro", "at") == "http://x/rollout/ro/attempt/at/v1"

    @al.rollout
    def address(task: Any, llm: al.LLM) -> str:
        return llm.endpoint

    now = al.AttemptedRollout(
        rollout_id="ro", input=1, start_time=0.0,
        attempt=al.Attempt(rollout_id="ro", attempt_id="at", sequence_id=1, start_time=0.0),
    )  # fmt: skip
    assert address.rollout(1, {"llm": proxy}, now) == proxy.get_base_url("ro", "at")
