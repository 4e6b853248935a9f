"""What passes through the gateway in every dialect: a request, its choices while they are sampled, its replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agl.errors import ConfigError, RefusedAnswerError
from agl.mdp.outcomes import TOOL_RESULTS, UNKNOWN_TOOLS
from agl.mdp.types import IntArray
from agl.trainer.engines.base import Completion, Engine, Sampling
from agl.trainer.gateway.sessions import ForkCause, SessionMatch
from agl.trainer.rendering.normalise import with_tool_names
from agl.trainer.rendering.refusals import refused_answer
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolparsers import ParsedMessage


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy that the gateway serves.

    Attributes:
        name: the policy's.
        engine: samples its tokens.
        rendering: converts between messages and tokens.
        stop_token_ids: the tokens that end an answer.
    """

    name: str
    engine: Engine
    rendering: Rendering
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What an agent requests, in the form of Chat Completions for every dialect.

    Attributes:
        messages, tools: OpenAI's chat messages and tools.
        force_tool: the name of a tool that must be called, True for any tool, None for no force.
        sampling: the agent's parameters; its `seed` is one part of each answer's own.
        n: number of answers.
        options: the sampling fields of the client's body, for the record.
        replaced: facts of the request's replaced system prompts, for the record; None if none were to be replaced.
        one_call: whether an answer may call one tool only.
        failed_tools: ids of the tool calls with results marked as errors, in dialects that mark them.
        schema_field: where the client's body has the schema of the answer, for errors.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    force_tool: str | Literal[True] | None
    sampling: Sampling
    n: int = 1
    options: Mapping[str, Any] | None = None
    failed_tools: frozenset[str] = frozenset()
    one_call: bool = False
    replaced: Mapping[str, Any] | None = None
    schema_field: str = "response_format"


@dataclass(slots=True, eq=False)
class Choice:
    """One answer while it is sampled.

    Attributes:
        number: from 0.
        prompt: int32 [P], `forced` included.
        forced: int32 [F], the beginning of the answer that was written for the model.
        ids, logprobs: tokens streamed so far.
        top: their alternatives, of a request with `top_logprobs`.
        recorded: whether its call is recorded.
        grammar: that it is held to, in the form of `Sampling.grammar`.
    """

    number: int
    prompt: IntArray
    forced: IntArray
    ids: list[int]
    logprobs: list[float]
    recorded: bool = False
    top: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    grammar: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One answer.

    Attributes:
        call_id: of the recorded call.
        message: the assistant message in OpenAI's form.
        completion: the sampled tokens.
        finish_reason: "stop", "length" or "tool_calls".
        prompt_tokens: P.
        reasoning_tokens: how many of the sampled tokens are reasoning.
        unfinished: whether it has tool calls and ends within another one, whose beginning is in the message's text.
        stop_text: the one of the request's stop texts that ended it.
        choice: that it completes.
        parsed: the whole answer as it was read, what follows a stop text included.
    """

    call_id: str
    message: Mapping[str, Any]
    completion: Completion
    finish_reason: str
    prompt_tokens: int
    reasoning_tokens: int
    unfinished: bool = False
    stop_text: str | None = None
    choice: Choice | None = None
    parsed: ParsedMessage | None = None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What the answers of one request took, which the APIs call usage.

    Attributes:
        prompt: tokens of the prompt.
        cached: how many of them the engine did not compute for this request.
        sampled: tokens of all answers, stop tokens included.
        reasoning: how many of them are reasoning.
    """

    prompt: int
    cached: int
    sampled: int
    reasoning: int

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> TokenCounts:
        """The counts of a request with these answers. The prompt was computed once for all of them."""
        return cls(
            replies[0].prompt_tokens,
            min(reply.completion.cached_tokens for reply in replies),
            sum(int(reply.completion.token_ids.size) for reply in replies),
            sum(reply.reasoning_tokens for reply in replies),
        )


OnTokens = Callable[[Choice, Sequence[int]], None]
"""Called with a choice and its newly sampled ids, as they come."""


def rendered_prompt(
    rendering: Rendering, request: ChatRequest, match: SessionMatch
) -> tuple[IntArray, IntArray, SessionMatch]:
    """Prompt ids, the forced beginning of the answer in them, and `match`, as a fork if the template cannot continue.

    Shapes: int32 [P], int32 [F].

    Raises:
        ConfigError: the messages cannot be rendered.
        RefusedAnswerError: they could be with another answer of this attempt in them.
    """
    if match.parent is not None:
        parent = match.parent
        new = with_tool_names(request.messages)[match.new :]
        system = request.messages[0].get("role") in ("system", "developer")
        extended = rendering.extend(
            parent.prompt_ids, parent.response_ids, new, request.tools, history_has_system=system
        )
        if not isinstance(extended, str):
            prompt = rendering.force(extended, request.tools, request.force_tool)
            buffer, ids = parent.shared(prompt.ids)
            return ids, prompt.forced_ids, replace(match, buffer=buffer)
        match = replace(match, parent=None, new=0, cause=ForkCause.TEMPLATE, detail=extended)
    try:
        whole = rendering.prompt(request.messages, request.tools)
    except ConfigError as error:
        refused = refused_answer(rendering, request.messages, request.tools, sorted(match.answers))
        if refused is None:
            raise
        raise RefusedAnswerError(error.message, hint=error.hint, call=match.answers[refused]) from error
    prompt = rendering.force(whole.ids, request.tools, request.force_tool)
    return prompt.ids, prompt.forced_ids, match


def cut_at_stop(parsed: ParsedMessage, stop: Sequence[str]) -> ParsedMessage:
    """Remove a stop text and what follows it from an answer; its tokens stay in the completion.

    Engines end an answer at a stop text wherever it occurs, as vLLM does: what there is next to a reasoning with a stop
    text comes before it.
    """
    if (end := _first(stop, parsed.reasoning or "")) is not None:
        return replace(parsed, reasoning=(parsed.reasoning or "")[:end] or None)
    if (end := _first(stop, parsed.content)) is not None:
        return replace(parsed, content=parsed.content[:end])
    return parsed


def stop_text_of(completion: Completion, stop: Sequence[str], rendering: Rendering) -> str | None:
    """The stop text that ended an answer; None where something else did."""
    if not stop or completion.finish_reason != "stop":
        return None
    text = rendering.decode(completion.token_ids)
    places = [(at, each) for each in stop if (at := text.find(each)) >= 0]
    return min(places)[1] if places else None


def _first(texts: Sequence[str], within: str) -> int | None:
    """Where the first of some texts begins; None if there is none."""
    return min((at for text in texts if (at := within.find(text)) >= 0), default=None)


def assistant_message(
    parsed: ParsedMessage, tool_call_id: Callable[[int], str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The assistant message in OpenAI's form, and the ids minted for its tool calls."""
    ids = tuple(tool_call_id(k) for k in range(len(parsed.tool_calls)))
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if ids:
        # A name may hold half of a surrogate pair, too.
        names = [call.name.encode(errors="replace").decode() for call in parsed.tool_calls]
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": call.arguments}}
            for i, name, call in zip(ids, names, parsed.tool_calls, strict=True)
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message, ids


def request_record(
    request: ChatRequest,
    match: SessionMatch | None = None,
    sampling: Sampling | None = None,
    answer: Mapping[str, Any] | None = None,
    versions: Sequence[tuple[int, int]] = (),
    *,
    content: bool,
) -> dict[str, Any]:
    """What is stored of a request with its call; messages that the parent call holds are left out.

    Args:
        request: of the agent.
        match: its place in the attempt's conversations, once known.
        sampling: the parameters that were applied.
        answer: the assistant message.
        versions: as in `Completion`.
        content: whether messages and tools are stored.
    """
    record: dict[str, Any] = {"asked": dict(request.options or {}), **(request.replaced or {})}
    if sampling is not None:
        record["used"] = {
            name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")
        }
        if sampling.grammar:
            record["used"]["grammar"] = sampling.grammar
        if versions:
            record["used"]["versions"] = list(map(list, versions))
    if match is not None and match.detail:
        record["fork_detail"] = match.detail
    new = match.new if match else 0
    if any(m.get("role") == "tool" for m in request.messages[new:]):
        failed = request.failed_tools
        record[TOOL_RESULTS] = [
            {"id": m.get("tool_call_id"), "name": m.get("name"), "failed": m.get("tool_call_id") in failed}
            for m in with_tool_names(request.messages)[new:]
            if m.get("role") == "tool"
        ]
    if answer is not None:
        offered = {t["function"]["name"] for t in request.tools or ()}
        unknown = [c["id"] for c in answer.get("tool_calls") or () if c["function"]["name"] not in offered]
        if unknown:
            record[UNKNOWN_TOOLS] = unknown
    if content:
        record["messages"] = [dict(m) for m in request.messages[new:]]
        if match is None or match.parent is None:
            record["tools"] = [dict(t) for t in request.tools or ()]
    return record
