"""0.3's trace adapters: spans to triplets and to messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from agl import semconv
from agl.errors import ConfigError
from agl.trainer.compat import types as T
from agl.trainer.compat.emitter import get_reward_value

__all__ = [
    "Adapter",
    "LlmProxyTraceToTriplet",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTripletBase",
    "TracerTraceToTriplet",
]

V = TypeVar("V")

LLM_CALL = r"openai\.chat\.completion"
_CALL_NAMES = ("openai.chat.completion", "chat")
"""Names of an LLM call's span in 0.3; agl's is `chat <model>`."""


class TraceAdapter(Generic[V]):
    """Turns spans into a `V`; subclasses override `adapt`."""

    def adapt(self, source: Sequence[Any], /) -> V:
        raise NotImplementedError(f"{type(self).__name__} does not say how to adapt spans")

    def __call__(self, source: Sequence[Any], /) -> V:
        return self.adapt(source)


Adapter = TraceAdapter


class TraceToTripletBase(TraceAdapter[list[T.Triplet]]):
    """Adapters that make triplets."""


class TracerTraceToTriplet(TraceToTripletBase):
    """Selects the agents whose LLM calls are trained: in `Trainer(adapter=)`, `agent_match` becomes the selection.

    Args:
        agent_match: regular expression (`re.search`) on the name of the agent that made the call; None = every agent.
        llm_call_match: regular expression on the name of the call's span.
        repair_hierarchy, exclude_llm_call_in_reward, reward_match: without effect: calls are joined to agents and
            rewards by ids.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = LLM_CALL,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: Any = None,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        self.llm_call_match, self.agent_match = llm_call_match, agent_match
        self._calls, self._agents = _pattern("llm_call_match", llm_call_match), _pattern("agent_match", agent_match)
        self._skip_empty = _skip_empty_token_spans

    @property
    def selection(self) -> re.Pattern[str] | None:
        """The value for `agl.Trainer(agents=)`.

        Raises:
            ConfigError: `llm_call_match` matches no LLM call, so nothing would be trained.
        """
        if self._calls is not None and not any(self._calls.search(name) for name in _CALL_NAMES):
            raise ConfigError(
                f"llm_call_match={self.llm_call_match!r} matches no LLM call: their spans are named 'chat <model>'",
                hint="leave it out; agent_match selects the agents to train",
            )
        return self._agents

    def adapt(self, source: Sequence[Any], /) -> list[T.Triplet]:
        """One triplet per LLM call in order, with the last primary reward that follows it before the next."""
        triplets: list[T.Triplet] = []
        for span in sorted(source, key=lambda s: getattr(s, "sequence_id", 0)):
            reward = get_reward_value(span)
            if reward is not None and triplets:
                triplets[-1].reward = reward
            elif self._matches(span):
                triplets.append(_triplet(span))
        return [t for t in triplets if t.response["token_ids"]] if self._skip_empty else triplets

    def _matches(self, span: Any) -> bool:
        attributes = span.attributes or {}
        if attributes.get(semconv.OPERATION_NAME) != semconv.CHAT:
            return False
        named = self._calls is None or any(self._calls.search(name) for name in (span.name, *_CALL_NAMES))
        return named and (self._agents is None or bool(self._agents.search(str(attributes[semconv.AGENT_NAME]))))


class LlmProxyTraceToTriplet(TracerTraceToTriplet):
    """As `TracerTraceToTriplet` over every agent: tokens always come from the gateway here."""

    def __init__(self) -> None:
        super().__init__()


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """One OpenAI-style conversation per LLM call: {"messages": [...], "tools": None}."""

    def adapt(self, source: Sequence[Any], /) -> list[dict[str, Any]]:
        conversations = []
        for span in source:
            attributes: Mapping[str, Any] = span.attributes or {}
            if attributes.get(semconv.OPERATION_NAME) == semconv.CHAT:
                prompt = json.loads(attributes.get(semconv.INPUT_MESSAGES) or "[]")
                prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                answer = json.loads(attributes.get(semconv.OUTPUT_MESSAGES) or "[]")
                conversations.append({"messages": [*prompt, *answer], "tools": None})
        return conversations


def _triplet(span: Any) -> T.Triplet:
    attributes = span.attributes
    return T.Triplet(
        prompt={
            "token_ids": list(attributes.get(T.PROMPT_TOKEN_IDS, ())),
            "raw_content": attributes.get(semconv.INPUT_MESSAGES),
        },
        response={
            "token_ids": list(attributes.get(T.RESPONSE_TOKEN_IDS, ())),
            "raw_content": attributes.get(semconv.OUTPUT_MESSAGES),
        },
        metadata={
            "response_id": attributes.get(semconv.RESPONSE_ID),
            "agent_name": attributes.get(semconv.AGENT_NAME),
        },
    )


def _pattern(name: str, text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"{name}={text!r} is not a regular expression: {error}", hint="see Python's re") from error
