"""Mixins that record agents and orchestrators: MassGen's, and any others that speak this protocol.

- An agent has `chat(messages, ...)`, an async generator, and an id: `agent_id`, `orchestrator_id`, `name` or its
  class's name. `current_stage=` among its arguments may name the stage of a coordination.
- A chunk is an object or a dict with `type`: "content" and "reasoning" have `content`; "tool_calls" has `tool_calls`
  (OpenAI's form), "tool_result" has `tool_call_id` and `content` or `error`; "error" has `error`. A tool `new_answer`
  gives an answer (argument `content`), `vote` votes. Other types are passed on.
- An orchestrator also has a list of events, `coordination_tracker.events` or `events`, to which it appends: objects or
  dicts with `event_type`, `agent_id` and `context`. It is read from "new_answer", "vote_cast" (context: `voted_for`,
  `reason`), "restart_triggered" (`affected_agents`), "final_agent_selected" and "final_answer" (`answer`).
  `coordination_tracker.get_anonymous_agent_mapping()`, where there is one, gives the agents of anonymous ids.

Invariant: the chunks, the exceptions and the end of `chat()` are those of the class it is mixed into. What a mixin
fails at is logged; only in a trainer's rollout, where data would be lost without a word, it raises.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from agl import tracing
from agl_massgen.collector import PRESENTING, AgentRun, CollectedRollout, TraceCollector
from agl_massgen.config import RLConfig
from agl_massgen.files import (
    ContentSpan,
    CoordinationSpan,
    PromptSpan,
    ReasoningSpan,
    ToolSpan,
    TraceStatus,
)
from agl_massgen.rewards import RewardComputer

log = logging.getLogger("agl.massgen")

EVENTS = {
    "new_answer": "answer",
    "vote_cast": "vote",
    "restart_triggered": "restart",
    "final_agent_selected": "winner",
    "final_answer": "final_answer",
    "agent_timeout": "timeout",
    "agent_error": "error",
    "vote_ignored": "vote_ignored",
}
"""The orchestrator's name of an event -> ours. Others say nothing that these do not."""


class _Recorded:
    """What both mixins do: they wrap `chat()`."""

    def __init__(self, *args: Any, enable_rl: bool = False, rl_config: RLConfig | None = None, **kwargs: Any) -> None:
        config = rl_config or RLConfig(enable_rl=enable_rl)
        self.rl_config = config
        self.trace_collector = TraceCollector(config=config) if enable_rl and config.enable_rl else None
        super().__init__(*args, **kwargs)

    async def chat(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """The class's own `chat()`, recorded."""
        watch: _Watch | None = None
        if self.trace_collector is not None:
            try:
                watch = self._watch(self.trace_collector, _messages(args, kwargs), kwargs.get("current_stage"))
            except Exception as error:
                scope = tracing.current()
                if scope is not None and not isinstance(scope.rollout, CollectedRollout):
                    raise
                log.warning("chat() of %s is not recorded: %s: %s", _id(self), type(error).__name__, error)
        chunks = super().chat(*args, **kwargs)  # type: ignore[misc]
        if watch is None:
            async with _closing(chunks):
                async for chunk in chunks:
                    yield chunk
            return
        status: TraceStatus = "cancelled"
        failure: Exception | str | None = None
        try:
            while True:
                with watch.run.step():
                    try:
                        chunk = await anext(chunks)
                    except StopAsyncIteration:
                        break
                with watch.guarded("a chunk"):
                    watch.saw(chunk)
                yield chunk
            status, failure = ("completed", None) if watch.error is None else ("failed", watch.error)
        except Exception as error:
            status = "failed"
            failure = error
            raise
        finally:
            # Also when the generator is closed half-way, as that of an agent is which is restarted.
            try:
                with watch.run.step():
                    await _close(chunks)
            finally:
                try:
                    with watch.guarded("its end"):
                        watch.ended(status)
                finally:
                    watch.run.end(status, failure)

    def _watch(self, collector: TraceCollector, messages: Any, stage: Any) -> _Watch:
        raise NotImplementedError


class RLAgentMixin(_Recorded):
    """Records an agent: `class RLSingleAgent(RLAgentMixin, SingleAgent)`.

    Args:
        enable_rl, rl_config: whether, and how. All other arguments are the class's own.

    Attributes:
        reference: the right answer to what is asked next, where it is known; answers are compared with it.
        trace_collector: None where nothing is recorded.
    """

    reference: str | None = None

    def _watch(self, collector: TraceCollector, messages: Any, stage: Any) -> _Watch:
        return _AgentWatch(collector, self, messages, stage)


class RLOrchestratorMixin(_Recorded):
    """Records an orchestrator: `class RLOrchestrator(RLOrchestratorMixin, Orchestrator)`.

    Arguments and attributes as of `RLAgentMixin`.
    """

    reference: str | None = None

    def _watch(self, collector: TraceCollector, messages: Any, stage: Any) -> _Watch:
        return _OrchestratorWatch(collector, self, messages, stage)


class _Watch:
    """One call of `chat()`: its run, and the text of its answer."""

    def __init__(self, collector: TraceCollector, owner: Any, messages: Any, stage: Any) -> None:
        self.owner, self.messages, self.rewards = owner, messages, RewardComputer()
        self.config = collector.config
        self.stage = None if stage is None else str(getattr(stage, "value", stage))
        self.run: AgentRun = collector.start_trace(_id(owner), _question(messages), stage=self.stage)
        self.parts: list[str] = []
        self.error: str | None = None

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Log what goes wrong in a block, and go on; raise it in a trainer's rollout."""
        try:
            yield
        except Exception as error:
            if not self.run.collected:
                raise
            log.warning("%s of %s is not recorded: %s: %s", what, _id(self.owner), type(error).__name__, error)

    def saw(self, chunk: Any) -> None:
        raise NotImplementedError

    def ended(self, status: TraceStatus) -> None:
        raise NotImplementedError


class _AgentWatch(_Watch):
    """Makes spans of an agent's chunks: one of the pieces of a text, one of a tool call when its result is known."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._text: tuple[str, list[str]] | None = None
        self._tools: dict[str, dict[str, Any]] = {}
        self.answer: str | None = None
        self.voted = False

    def saw(self, chunk: Any) -> None:
        kind = _kind(chunk)
        content = _field(chunk, "content")
        if kind == "content" or kind.startswith("reasoning"):
            text = content or _field(chunk, "reasoning_delta") or _field(chunk, "reasoning_summary_delta")
            if isinstance(text, str) and text:
                self._add("content" if kind == "content" else "reasoning", text)
            return
        if kind == "tool_calls":
            for call in _field(chunk, "tool_calls") or ():
                self._called(call)
        elif kind == "tool_result":
            self._tool_ended(str(_field(chunk, "tool_call_id")), content, _field(chunk, "error"))
        elif kind in ("mcp_status", "custom_tool_status"):
            self._tool_status(chunk, str(content or ""))
        elif kind == "error":
            # An agent that says that it failed does not raise.
            self.error = str(_field(chunk, "error") or content or "error")
        else:
            return
        self._flush()

    def ended(self, status: TraceStatus) -> None:
        self._flush(partial=status != "completed")
        for call_id in list(self._tools):
            self._tool_ended(call_id, None, None, known=False)
        text = "".join(self.parts)
        if self.run.collected and not self.run.asked_a_model:
            # No adapter knows the client; what was asked and said is known all the same.
            backend = getattr(self.owner, "backend", None)
            model = getattr(self.owner, "model", None) or getattr(backend, "model", None) or "unknown"
            self.run.emit(PromptSpan(self.messages, text, str(model)))
        answer = self.answer if self.answer is not None else "" if self.voted else text
        # Part of an answer is no answer, and a presentation repeats one.
        if (
            self.config.enable_answer_quality_rewards
            and status == "completed"
            and self.stage not in PRESENTING
            and not (self.voted and self.answer is None)
        ):
            self.run.emit(self.rewards.answer(answer, self.owner.reference))

    def _add(self, kind: str, text: str) -> None:
        if self._text is None or self._text[0] != kind:
            self._flush()
            self._text = kind, []
        self._text[1].append(text)
        if kind == "content":
            self.parts.append(text)

    def _flush(self, *, partial: bool = False) -> None:
        if self._text is not None:
            kind, pieces = self._text
            text = "".join(pieces)
            self._text = None
            self.run.emit(ContentSpan(text, partial) if kind == "content" else ReasoningSpan(text))

    def _called(self, call: Any) -> None:
        function = _field(call, "function") or call
        name = str(_field(function, "name"))
        arguments = _arguments(_field(function, "arguments"))
        call_id = str(_field(call, "id") or _field(call, "call_id") or f"{name} {len(self._tools)}")
        self._tools[call_id] = {"name": name, "arguments": arguments}
        if name == "new_answer" and isinstance(arguments, Mapping):
            self.answer = str(arguments.get("content", ""))
        self.voted = self.voted or name == "vote"

    def _tool_status(self, chunk: Any, content: str) -> None:
        """A tool that MassGen runs itself: called, then its arguments and its result, then whether it failed."""
        status = str(_field(chunk, "status") or "")
        source = str(_field(chunk, "source") or "")
        name = source.removeprefix("mcp_").removeprefix("custom_")
        call_id = str(_field(chunk, "tool_call_id") or name)
        told = content.partition(": ")[2]
        if status.endswith("tool_called"):
            self._tools.setdefault(call_id, {"name": name, "arguments": {}})
        elif status == "function_call":
            self._tools.setdefault(call_id, {"name": name})["arguments"] = _arguments(told)
        elif status == "function_call_output" and call_id in self._tools:
            self._tools[call_id]["result"] = told
        elif status.endswith("tool_response") and call_id in self._tools:
            self._tool_ended(call_id, self._tools[call_id].get("result", ""), None)
        elif status.endswith("tool_error"):
            self._tools.setdefault(call_id, {"name": name, "arguments": {}})
            self._tool_ended(call_id, None, content or "error")

    def _tool_ended(self, call_id: str, result: Any, error: Any, *, known: bool = True) -> None:
        call = self._tools.pop(call_id, None)
        if call is None:
            return
        span = ToolSpan(call["name"], call.get("arguments"), result, None if error is None else str(error))
        rated = known and self.config.enable_tool_rewards
        self.run.emit(span, call_id=call_id, reward=self.rewards.tool(span) if rated else None)


class _OrchestratorWatch(_Watch):
    """Makes spans of an orchestrator's events, as they come."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen = len(_events(self.owner))
        self.votes: dict[str, str] = {}
        self.winner: str | None = None
        self.final: str | None = None

    def saw(self, chunk: Any) -> None:
        if _kind(chunk) == "content" and isinstance(content := _field(chunk, "content"), str):
            self.parts.append(content)
        self._read()

    def ended(self, status: TraceStatus) -> None:
        self._read()
        answer = "".join(self.parts) if self.final is None else self.final
        if answer:
            self.run.emit(ContentSpan(answer, status != "completed"))
        if not self.config.enable_coordination_rewards or status != "completed" or not (self.votes or self.winner):
            return
        self.run.emit(self.rewards.coordination(self.run.attempt, self.votes, answer, self.owner.reference))
        if self.winner is not None:
            for voter, voted_for in self.votes.items():
                self.run.emit(self.rewards.voting(voter, voted_for, self.winner))

    def _read(self) -> None:
        events = _events(self.owner)
        new = events[self._seen :]
        self._seen = len(events)
        for event in new:
            name = str(getattr(kind := _field(event, "event_type"), "value", kind))
            if name in EVENTS:
                self._event(EVENTS[name], event)

    def _event(self, kind: str, event: Any) -> None:
        agent = self._real(_field(event, "agent_id"))
        facts = _field(event, "context") or {}
        voted_for = self._real(facts.get("voted_for"))
        if kind == "vote" and agent is not None and voted_for is not None:
            self.votes[agent] = voted_for
        elif kind == "restart":
            # Votes are on answers that are no longer the newest.
            for affected in facts.get("affected_agents") or list(self.votes):
                self.votes.pop(self._real(affected) or "", None)
        elif kind == "winner":
            self.winner = agent
        elif kind == "final_answer":
            self.final = facts.get("answer") or _final_answer(self.owner, agent)
        number = facts.get("agent_round", facts.get("round"))
        self.run.emit(
            CoordinationSpan(
                event_type=kind,
                agent_id=agent,
                voted_for=voted_for,
                reason=str(facts.get("reason") or ""),
                round=number if isinstance(number, int) else None,
                details=str(_field(event, "details") or ""),
            )
        )

    def _real(self, agent: Any) -> str | None:
        """An agent by its own id: agents know each other as agent1, agent2, ..."""
        mapping = getattr(getattr(self.owner, "coordination_tracker", None), "get_anonymous_agent_mapping", dict)()
        return None if agent is None else str(mapping.get(agent, agent))


@contextlib.asynccontextmanager
async def _closing(chunks: Any) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await _close(chunks)


async def _close(chunks: Any) -> None:
    if (aclose := getattr(chunks, "aclose", None)) is not None:
        await aclose()


def _events(orchestrator: Any) -> list[Any]:
    tracker = getattr(orchestrator, "coordination_tracker", orchestrator)
    return getattr(tracker, "events", None) or []


def _final_answer(orchestrator: Any, agent: str | None) -> str | None:
    answers = getattr(getattr(orchestrator, "coordination_tracker", None), "final_answers", {})
    return getattr(answers.get(agent), "content", None)


def _id(owner: Any) -> str:
    names = (getattr(owner, name, None) for name in ("agent_id", "orchestrator_id", "name"))
    return str(next((name for name in names if name), type(owner).__name__))


def _kind(chunk: Any) -> str:
    kind = _field(chunk, "type")
    return str(getattr(kind, "value", kind))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _messages(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("messages", [])


def _question(messages: Any) -> str:
    """What was asked: the last message of the user."""
    if isinstance(messages, str):
        return messages
    asked = [_field(m, "content") for m in messages if _field(m, "role") == "user"]
    return asked[-1] if asked and isinstance(asked[-1], str) else json.dumps(asked[-1:], default=str)


def _arguments(value: Any) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value
