"""0.3's trace adapters: spans, agl's or 0.3's, to triplets and to messages."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, TypedDict, TypeVar

from agl import semconv
from agl.errors import ConfigError
from agl.messages import read, write
from agl_agentlightning import types as T
from agl_agentlightning.attributes import filter_and_unflatten_attributes
from agl_agentlightning.trace_tree import CALL_NAMES, LLM_CALL, TraceTree, counted_reward, is_call, to_triplet

__all__ = [
    "Adapter",
    "LlmProxyTraceToTriplet",
    "OpenAIMessages",
    "OtelTraceAdapter",
    "RewardMatchPolicy",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTripletBase",
    "TraceTree",
    "TracerTraceToTriplet",
    "Transition",
]

S = TypeVar("S")
V = TypeVar("V")


class Adapter(Generic[S, V]):
    """Turns an `S` into a `V`; subclasses override `adapt`."""

    def adapt(self, source: S, /) -> V:
        raise NotImplementedError(f"{type(self).__name__} does not say how to adapt its source")

    def __call__(self, source: S, /) -> V:
        return self.adapt(source)


class TraceAdapter(Adapter[Sequence[Any], V], Generic[V]):
    """Turns spans into a `V`."""


class OtelTraceAdapter(Adapter[Sequence[Any], V], Generic[V]):
    """Turns the SDK's spans into a `V`."""


class TraceToTripletBase(TraceAdapter[list[T.Triplet]]):
    """Adapters that make triplets."""


class RewardMatchPolicy(StrEnum):
    """Which LLM call a reward goes to: of the calls that ended before it and have none yet, the last one of the trace,
    or the last one among the reward's siblings."""

    FIRST_SIBLING = "first_sibling"
    FIRST_OCCURRENCE = "first_occurrence"


class TracerTraceToTriplet(TraceToTripletBase):
    """Selects the agents whose LLM calls are trained: in `Trainer(adapter=)`, `agent_match` becomes the selection.

    Args:
        repair_hierarchy: move spans of 0.3's tracers under the span that encloses them in time; agl's spans are joined
            by ids.
        llm_call_match: regular expression on the name of the call's span.
        agent_match: regular expression (`re.search`) on the name of the agent that made the call; None = every agent.
        exclude_llm_call_in_reward: leave out calls within the span of a reward.
        reward_match: which call gets a reward.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = LLM_CALL,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        self.repair_hierarchy = repair_hierarchy
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.reward_match = RewardMatchPolicy(reward_match)
        self._calls, self._agents = _pattern("llm_call_match", llm_call_match), _pattern("agent_match", agent_match)
        self._skip_empty_token_spans = _skip_empty_token_spans

    @property
    def selection(self) -> re.Pattern[str] | None:
        """The value for `agl.Trainer(agents=)`.

        Raises:
            ConfigError: `llm_call_match` matches no LLM call, so nothing would be trained.
        """
        if self._calls is not None and not any(self._calls.search(name) for name in CALL_NAMES):
            raise ConfigError(
                f"llm_call_match={self.llm_call_match!r} matches no LLM call: their spans are named 'chat <model>'",
                hint="leave it out; agent_match selects the agents to train",
            )
        return self._agents

    def tree(self, source: Sequence[Any], /) -> TraceTree:
        """The spans, agl's, 0.3's or the SDK's, as a tree."""
        tree = TraceTree.from_spans([_as_span(s) for s in source])
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        return tree

    def adapt(self, source: Sequence[Any], /) -> list[T.Triplet]:
        """One triplet per LLM call, in the order of the tree."""
        if not source:
            return []
        return self.tree(source).to_trajectory(
            self.llm_call_match,
            self.agent_match,
            self.exclude_llm_call_in_reward,
            reward_match=self.reward_match,
            _skip_empty_token_spans=self._skip_empty_token_spans,
        )

    def visualize(
        self, source: Sequence[Any], /, filename: str = "trace_tree", interested_span_match: str | None = None
    ) -> TraceTree:
        """Draw the tree as `<filename>.png`; needs the package graphviz."""
        tree = self.tree(source)
        tree.visualize(filename, interested_span_match)
        return tree


class Transition(TypedDict):
    """0.3's name for a call's tokens; `Triplet` and `agl.Transition` have them."""

    state: list[int]
    action: list[int]
    response_id: str | None
    agent_name: str
    reward: float | None


_PROXY_CALLS = ("raw_gen_ai_request", "litellm_request")


class LlmProxyTraceToTriplet(TracerTraceToTriplet):
    """Triplets of every agent's calls, from agl's spans or those of 0.3's proxy, in the order of `sequence_id`.

    A reward goes to the last call before it that has none yet.
    """

    def __init__(self) -> None:
        super().__init__()

    def adapt(self, source: Sequence[Any], /) -> list[T.Triplet]:
        spans = sorted(map(_as_span, source), key=lambda s: (s.sequence_id, s.start_time or 0))
        calls: list[tuple[int, T.Triplet]] = []
        seen: set[str] = set()
        for span in spans:
            triplet = _proxy_triplet(span)
            if triplet is None or not (triplet.prompt["token_ids"] and triplet.response["token_ids"]):
                continue
            response_id = triplet.metadata["response_id"]
            if response_id not in seen:
                calls.append((span.sequence_id, triplet))
            if response_id is not None:
                seen.add(response_id)
        for span in spans:
            if (reward := counted_reward(span)) is not None:
                earlier = (t for at, t in reversed(calls) if at < span.sequence_id and t.reward is None)
                if (triplet := next(earlier, None)) is not None:
                    triplet.reward = reward
        return [triplet for _, triplet in calls]


def _proxy_triplet(span: T.Span) -> T.Triplet | None:
    attributes = span.attributes or {}
    if span.name not in _PROXY_CALLS:
        return to_triplet(span, str(attributes.get(semconv.AGENT_NAME, ""))) if is_call(span, CALL_NAMES[0]) else None
    if span.name == "raw_gen_ai_request":
        raw = {k: _literal(v) for k, v in filter_and_unflatten_attributes(attributes, "llm.hosted_vllm").items()}
        choices = raw.get("choices") or [{}]
        prompt = raw.get("prompt_token_ids")
        response = (raw.get("response_token_ids") or [None])[0]
        response = response or choices[0].get("token_ids")
    else:
        prompt, response = (_literal(attributes.get(k)) for k in (T.PROMPT_TOKEN_IDS, T.RESPONSE_TOKEN_IDS))
    return T.Triplet(
        prompt={"token_ids": list(prompt or ())},
        response={"token_ids": list(response or ())},
        metadata={"response_id": attributes.get(semconv.RESPONSE_ID) or attributes.get("llm.hosted_vllm.id")},
    )


def _literal(value: Any) -> Any:
    """The value that a text writes in Python's way, or the text."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


class OpenAIMessages(TypedDict):
    """A conversation, and the tools that the model was offered, as OpenAI's fine-tuning takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """One OpenAI-style conversation per LLM call."""

    def adapt(self, source: Sequence[Any], /) -> list[OpenAIMessages]:
        conversations: list[OpenAIMessages] = []
        for span in source:
            attributes: Mapping[str, Any] = span.attributes or {}
            if attributes.get(semconv.OPERATION_NAME) == semconv.CHAT:
                messages = write.to_openai([*read.sent(span), *read.said(span)], text_only=False)
                conversations.append({"messages": messages, "tools": read.offered(span) or None})
            elif semconv.OPERATION_NAME not in attributes and any(
                _items(attributes, k) for k in ("prompt", "completion")
            ):
                children = [s for s in source if s.parent_id is not None and s.parent_id == span.span_id]
                conversations.append(_conversation(attributes, children))
        return conversations


def _conversation(attributes: Mapping[str, Any], children: Sequence[Any]) -> OpenAIMessages:
    """The conversation of one of 0.3's call spans, whose tool calls are spans within it."""
    called = [
        {
            "id": t["call"]["id"],
            "name": t["name"],
            "arguments": t["parameters"],
            "type": t["call"].get("type", "function"),
        }
        for child in children
        if (t := filter_and_unflatten_attributes(child.attributes or {}, "tool"))
    ]
    messages = [_message(m) for m in _items(attributes, "prompt")]
    for answer in _items(attributes, "completion"):
        messages.append(_message({**answer, **({"tool_calls": called} if called else {})}))
    offered = filter_and_unflatten_attributes(attributes, "gen_ai.request.functions")
    tools = [{"type": "function", "function": {**f, "parameters": _json(f.get("parameters"))}} for f in offered]
    return {"messages": messages, "tools": tools or None}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.get("role", "assistant"), "content": message.get("content")}
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [
            {
                "id": c["id"],
                "type": c.get("type", "function"),
                "function": {"name": c["name"], "arguments": c["arguments"]},
            }
            for c in calls
        ]
    if message.get("tool_call_id") is not None:
        result["tool_call_id"] = message["tool_call_id"]
    return result


def _items(attributes: Mapping[str, Any], name: str) -> list[Any]:
    """The numbered items of `gen_ai.<name>`; other keys may stand among them."""
    nested = filter_and_unflatten_attributes(attributes, f"gen_ai.{name}")
    return nested if isinstance(nested, list) else [nested[k] for k in sorted(filter(str.isdigit, nested), key=int)]


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _as_span(span: Any) -> T.Span:
    return span if isinstance(span, T.Span) else T.Span.from_opentelemetry(span, "", "", 0)


def _pattern(name: str, text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"{name}={text!r} is not a regular expression: {error}", hint="see Python's re") from error
