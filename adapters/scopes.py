"""Opens and ends the scopes of agents, model calls and tools for the adapters, and finds a new scope's parent."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from agl import semconv, tracing
from agl.messages.tool_output import tool_output
from agl.tracing import offered_tools
from agl.tracing.context import Scope
from agl.tracing.usage import usage_facts


def place(known: Scope | None, own: Iterable[Scope | None] = ()) -> Scope | None:
    """The parent of a new scope: the current scope if it lies within `known`, else `known`.

    The context alone is wrong where streams are read in turn or the framework changes threads. The framework's ids
    alone miss scopes in between, such as the user's `agl.operation`.

    Args:
        known: the scope of the parent by the framework's ids; None where there is no such id.
        own: the scopes that the adapter has open. If one of them lies between the current scope and `known`, it is of a
            stream that is read in the same context, which is not the parent.
    """
    here = tracing.current()
    while known is not None and known.ended:
        known = known.parent
    if known is None or known.rollout.closed:
        return here
    between: set[Scope] = set()
    scope = here
    while scope is not known:
        if scope is None:
            return known
        between.add(scope)
        scope = scope.parent
    return known if between and not between.isdisjoint(own) else here


def agent_turn(name: str, *, parent: Scope | None = None, of: Any = None) -> Scope | None:
    """A scope of the agent `name`; None inside a scope of that agent, or outside a rollout.

    Args:
        of: the framework's agent, which may have an id and a description.
    """
    parent = parent or tracing.current()
    if parent is None:
        return None
    facts = _described(of, id=semconv.AGENT_ID, agent_id=semconv.AGENT_ID, description=semconv.AGENT_DESCRIPTION)
    if parent.agent == name:
        # The rollout's root span already stands for the wrapped agent.
        if facts and parent.kind == semconv.INVOKE_AGENT:
            parent.span.set_attributes(facts)
        return None
    return tracing.start(semconv.INVOKE_AGENT, name, agent=name, parent=parent, attributes=facts)


def _described(of: Any, **names: str) -> dict[str, str]:
    """The attributes that the fields of a framework's object have, where they are texts or UUIDs."""
    found = {attribute: getattr(of, field, None) for field, attribute in names.items() if of is not None}
    return {name: str(value) for name, value in found.items() if isinstance(value, str | UUID) and str(value)}


def summariser(agent: str | None) -> str:
    """The name of what summarises an agent's history within the agent, so that `agents=` can select or leave it out."""
    return f"{agent or 'agent'}-summary"


def model_call(
    model: str,
    provider: str | None,
    *,
    parent: Scope | None = None,
    agent: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Scope | None:
    """A model call's scope, within which its SDK request is routed; None outside a rollout.

    Args:
        model: the request's model.
        provider: `gen_ai.provider.name`, such as "openai".
        agent: the calling agent; the parent's agent if None.
    """
    request = {semconv.REQUEST_MODEL: model, semconv.PROVIDER_NAME: provider, **(attributes or {})}
    return tracing.start(semconv.CHAT, model, agent=agent, parent=parent, attributes=request)


def counted(scope: Scope, usage: Any) -> dict[str, Any]:
    """The attributes of a model call's numbers of tokens as a framework counts them; none where the provider's answer
    was seen, whose numbers are right. Some frameworks leave out cached tokens, or report 0 for unknown."""
    if scope.wire_calls == 1 and semconv.INPUT_TOKENS in scope.span.attributes:
        return {}
    return usage_facts(usage)


def tool_run(
    name: str,
    arguments: Any,
    call_id: str | None,
    *,
    parent: Scope | None = None,
    agent: str | None = None,
    issued_by: str | None = None,
    tool: Any = None,
) -> Scope | None:
    """A tool's scope; None outside a rollout, or where the call has one already.

    Args:
        arguments: JSON text, or a value that becomes JSON; None if unknown.
        call_id: the model's `tool_call_id`, by which rewards find the model call that issued it.
        agent: the calling agent; the parent's agent if None.
        issued_by: id of the `chat` span that asked for the tool, where its answer has no `tool_call_id`.
        tool: the framework's tool, which may have a description; without one, it is that of the model's request.
    """
    parent = parent or tracing.current()
    if parent is None or (call_id and _runs(parent, call_id)):
        return None
    text = arguments if isinstance(arguments, str | None) else json.dumps(arguments, default=str)
    is_models = tool is None and (call_id or issued_by)
    if is_models and not parent.rollout.capture_content and not offered_tools.is_known(parent.rollout, name):
        name = offered_tools.UNKNOWN
    described = _described(tool, description=semconv.TOOL_DESCRIPTION)
    if not described:
        described = {semconv.TOOL_DESCRIPTION: offered_tools.description(parent.rollout, agent or parent.agent, name)}
    attributes = {
        semconv.TOOL_NAME: name,
        semconv.TOOL_TYPE: "function",
        **described,
        semconv.TOOL_CALL_ID: call_id,
        semconv.TOOL_CALL_ARGUMENTS: text if parent.rollout.capture_content else None,
        semconv.ISSUED_BY: issued_by,
    }
    return tracing.start(semconv.EXECUTE_TOOL, name, agent=agent, parent=parent, attributes=attributes)


def last_chat(scope: Scope | None) -> str | None:
    """The id of the last `chat` span that ended directly in a scope; None without one.

    Within the scope of one agent's turn, whose steps follow one another, it is the answer that the agent acts on.
    """
    if scope is None:
        return None
    spans = reversed(scope.rollout.spans)
    return next((s.span_id for s in spans if s.operation == semconv.CHAT and s.parent_id == scope.span_id), None)


_returned: WeakKeyDictionary[Scope, Any] = WeakKeyDictionary()
"""A tool's open scope -> what the tool returned, where its framework has made a text of it since."""


def note_returned(value: Any) -> None:
    """Keep an object that the tool running here returned, which its framework is about to write as a text."""
    scope = _tool_around(tracing.current())
    if scope is not None and not isinstance(value, str | bytes | dict | list | tuple | int | float | None):
        _returned[scope] = value


def tool_end(
    scope: Scope,
    returned: Any,
    *,
    failed: bool | str = False,
    error: BaseException | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """End a tool's scope with what the tool returned, the object itself: `tool_output` makes text and outcome of it.

    Args:
        returned: what the tool returned, before the framework puts it into words.
        failed: whether the framework knows that the tool failed; a text says why.
        error: the exception that the framework turned into the result.
        attributes: of the span.
    """
    content = scope.rollout.capture_content
    noted = _returned.pop(scope, None)
    output = tool_output(returned if noted is None or error is not None or failed is not False else noted)
    failure: BaseException | str | None = error
    if error is None and (failed is not False or output.failed):
        why = failed if isinstance(failed, str) else output.text
        failure = (content and why) or "the tool failed"
    by_result = failure is not None and error is None and failed is False and not output.marked
    facts = {
        semconv.TOOL_CALL_RESULT: output.text if content else None,
        semconv.FAILED_BY_RESULT: by_result or None,
        **(attributes or {}),
    }
    tracing.end(scope, error=failure, attributes=facts)


def handoff(from_agent: str, to_agent: str, call_id: str | None) -> None:
    """Record a handoff, once for each tool call; `call_id` is None where no tool call made it."""
    here = tracing.current()
    done = () if here is None else (s for s in here.rollout.spans if s.operation == semconv.HANDOFF)
    if call_id is not None and any(s.attributes.get(semconv.TOOL_CALL_ID) == call_id for s in done):
        return
    attributes = {semconv.HANDOFF_FROM: from_agent, semconv.HANDOFF_TO: to_agent, semconv.TOOL_CALL_ID: call_id}
    scope = tracing.start(semconv.HANDOFF, to_agent, attributes=attributes)
    if scope is not None:
        tracing.end(scope)


Block = Callable[..., AbstractContextManager[Callable[[Any], None]]]


def around(block: Block) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What runs a framework's method in `block(self, *arguments)`, such as a `within`; unchanged outside a rollout."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if tracing.current() is None:
                return original(*args, **kwargs)
            with block(*args, **kwargs) as returns:
                result = original(*args, **kwargs)
                returns(result)
            return result

        return method

    return make


def around_async(block: Block) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`around` of an async method."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def method(*args: Any, **kwargs: Any) -> Any:
            if tracing.current() is None:
                return await original(*args, **kwargs)
            with block(*args, **kwargs) as returns:
                result = await original(*args, **kwargs)
                returns(result)
            return result

        return method

    return make


def _tool_around(scope: Scope | None) -> Scope | None:
    """The innermost open scope of a tool that a scope lies in, or that it is."""
    while scope is not None and (scope.ended or scope.kind != semconv.EXECUTE_TOOL):
        scope = scope.parent
    return scope


def _runs(scope: Scope | None, call_id: str) -> bool:
    scope = _tool_around(scope)
    return scope is not None and scope.span.attributes.get(semconv.TOOL_CALL_ID) == call_id
