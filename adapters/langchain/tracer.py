"""Spans of LangChain runs: `invoke_agent` for named agents, `chat` for model calls, `execute_tool` for tools.

Hook: `register_configure_hook` with a variable of ours that holds our handler inside rollouts (langchain-core >= 1.0),
which reaches every thread, task and bare model call without a patch. LangChain offers no way to unregister such a hook,
so `uninstrument` removes it from LangChain's list. Where LangChain calls no hook, methods are patched: `reading`. Its
hook for a tool's end gets a text where the tool returned an object: `_format_output`, which makes it, is patched to
keep the object.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID
from weakref import WeakKeyDictionary

from agl import semconv, tracing
from agl.adapters.base import InstrumentedTracer
from agl.adapters.failed_calls import record_failed_call
from agl.adapters.langchain import reading
from agl.adapters.langchain.labels import Label, label_of
from agl.adapters.langchain.runnable import handles, runnable
from agl.adapters.patching import Patches
from agl.adapters.scopes import counted, model_call, note_returned, place, summariser, tool_end, tool_run
from agl.messages import write
from agl.tracing.context import RolloutContext, Scope
from agl.tracing.provider_formats import finish_reason

if TYPE_CHECKING:
    from langchain_core.callbacks import BaseCallbackHandler

_MOST_ISSUERS = 1000
"""Tool calls of a rollout whose issuers are known: the rollout of a server never ends."""
_URL = re.compile(r"https?://[^\s'\"\\,)]+")


class LangChainTracer(InstrumentedTracer):
    """Traces everything that runs on langchain-core inside rollouts."""

    modules = ("langchain_core",)
    answer_errors: ClassVar[Mapping[str, str]] = {
        "langchain_core.exceptions.OutputParserException": "unparsable",
        "langchain.agents.structured_output.StructuredOutputError": "unparsable",
        "langchain.agents.middleware.model_call_limit.ModelCallLimitExceededError": "turns",
        "langchain.agents.middleware.tool_call_limit.ToolCallLimitExceededError": "turns",
    }
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        attach()

    def _restore(self) -> None:
        detach()


_lock = threading.Lock()
_attached: list[Any] = []
"""For each tracer that is on, LangChain's entry of the one handler."""
_patches: Patches | None = None
_naming_nodes = 0
"""The number of those for which the nodes of graphs are agents."""


def attach(*, nodes: bool = False) -> None:
    """Switch the handler on, for one more tracer.

    Args:
        nodes: the nodes of the user's graphs are agents.
    """
    global _naming_nodes, _patches
    from langchain_core.tools import base
    from langchain_core.tracers.context import _configure_hooks, register_configure_hook

    with _lock:
        if not _attached:
            handler: Any = _handler()
            variable: Any = _HandlerInRollouts(handler)
            register_configure_hook(variable, inheritable=True)
            _patches = reading.patched(handler.close)
            _patches.method(base, "_format_output", _noting)
        _attached.append(_attached[0] if _attached else _configure_hooks[-1])
        _naming_nodes += nodes


def detach(*, nodes: bool = False) -> None:
    """Undo one `attach`."""
    global _naming_nodes
    from langchain_core.tracers.context import _configure_hooks

    with _lock:
        hook = _attached.pop()
        _naming_nodes -= nodes
        if not _attached:
            _configure_hooks.remove(hook)
            if _patches is not None:
                _patches.restore()


def _noting(format_output: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a tool's object of which LangChain makes a text; its hook gets that alone."""

    @functools.wraps(format_output)
    def formatted(content: Any, *args: Any, **kwargs: Any) -> Any:
        output = format_output(content, *args, **kwargs)
        if output is not content:
            note_returned(content)
        return output

    return formatted


class _HandlerInRollouts:
    """Replaces a context variable that LangChain reads at the start of every run that it configures.

    It reads it twice in a row, so the value depends on nothing that another thread may change in between.
    """

    def __init__(self, handler: BaseCallbackHandler) -> None:
        self.handler = handler

    def get(self) -> BaseCallbackHandler | None:
        return None if tracing.idle() else self.handler


@dataclass(slots=True, eq=False)
class _Run:
    """A run of LangChain's inside a rollout.

    Attributes:
        around: the parent scope of the run's children: its own scope, or the one that it was started in.
        label: names the run's agent.
        parent: the run within which it was started; None where LangChain names none that is open.
        called: the run's own name.
        scope: the scope that it opened, if any.
        request: of a model call, its messages and its tools.
        children: ids of the runs within it that have not ended.
        resumed_with: what a person answered, where the graph goes on after a pause.
    """

    around: Scope
    label: Label
    parent: _Run | None = None
    called: str | None = None
    scope: Scope | None = None
    request: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    children: dict[UUID, None] = field(default_factory=dict)
    resumed_with: str | None = None

    def opened(self, scope: Scope | None) -> None:
        if scope is not None:
            self.scope = self.around = scope


@functools.cache
def _handler() -> BaseCallbackHandler:
    """The one handler of this process. Made late, so that importing the adapter does not import the framework."""
    from langchain_core.callbacks import BaseCallbackHandler

    class Handler(BaseCallbackHandler):
        # In the caller's context, also under async: a scope set here is current in the SDK call that follows.
        run_inline = True

        def __init__(self) -> None:
            self.runs: dict[UUID, _Run] = {}
            self.issuers: WeakKeyDictionary[RolloutContext, dict[str, str]] = WeakKeyDictionary()
            """Tool call id -> the agent that issued it, where another node runs the tool, of the last calls."""

        def _begin(
            self,
            run_id: UUID,
            parent_run_id: UUID | None,
            metadata: Mapping[str, Any] | None,
            tags: Any = (),
            called: str | None = None,
        ) -> _Run | None:
            """Remember a run; None outside a rollout."""
            above = None
            if parent_run_id is None:
                # LangChain never ends the runs of streams that were broken off.
                for closed in [r for r, run in list(self.runs.items()) if run.around.rollout.closed]:
                    self.runs.pop(closed, None)
                parent = tracing.current()
            else:
                above = self.runs.get(parent_run_id)
                parent = place(None if above is None else above.around, [run.scope for run in list(self.runs.values())])
            if parent is None:
                return None
            graph = None if above is None else above.called
            label = label_of(metadata or {}, tags or (), above and above.label, nodes=bool(_naming_nodes), graph=graph)
            run = self.runs[run_id] = _Run(parent, label, above, called)
            if (begun := reading.begun.get()) is not None:
                begun.append(run_id)
            if above is not None:
                above.children[run_id] = None
                run.resumed_with = above.resumed_with
            return run

        def _forget(self, run_id: UUID, error: BaseException | str | None = None) -> _Run | None:
            """Remove a run. Those within it that LangChain has not ended end now, with the same error."""
            run = self.runs.pop(run_id, None)
            if run is None:
                return None
            if run.parent is not None:
                run.parent.children.pop(run_id, None)
            for child in reversed([*run.children]):
                self.close(child, error)
            return run

        def close(
            self, run_id: UUID, error: BaseException | str | None = None, attributes: dict[str, Any] | None = None
        ) -> None:
            """End a run and what is still open within it; nothing if it has ended."""
            if isinstance(error, GeneratorExit):
                error = None  # a reader that stops early is no error
            run = self._forget(run_id, error)
            if run is None or (scope := run.scope) is None:
                return
            if run.label.is_node and scope.kind == semconv.INVOKE_AGENT and not _spoke(scope):
                scope.span.update_name(f"{semconv.OPERATION} {scope.agent}")
                attributes = {semconv.OPERATION_NAME: semconv.OPERATION}
            # How a graph pauses or goes elsewhere is no failure.
            if any(cls.__name__ == "GraphBubbleUp" for cls in type(error).__mro__):
                error = None
                if scope.kind == semconv.EXECUTE_TOOL:
                    attributes = {semconv.PAUSED: True}
            tracing.end(scope, error=error, attributes=attributes)

        def on_chain_start(
            self,
            serialized: Any,
            inputs: Any,
            *,
            run_id: UUID,
            parent_run_id: UUID | None = None,
            metadata: dict[str, Any] | None = None,
            tags: list[str] | None = None,
            name: str | None = None,
            **_: Any,
        ) -> None:
            run = self._begin(run_id, parent_run_id, metadata, tags, name)
            if run is None:
                return
            agent = run.label.agent
            parent = run.around
            run.resumed_with = _persons_answer(inputs) or run.resumed_with
            if agent and (run.label.is_node or agent != parent.agent):
                facts = {semconv.RESUMED_WITH: run.resumed_with if parent.rollout.capture_content else None}
                run.opened(tracing.start(semconv.INVOKE_AGENT, agent, agent=agent, parent=parent, attributes=facts))

        def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
            run = self.runs.get(run_id)
            # The name of that node of `create_agent`.
            if run is not None and run.called == "model" and (answers := _structured_answers(outputs)):
                span = run.around.span
                span.set_attribute(
                    semconv.STRUCTURED_ANSWERS, [*span.attributes.get(semconv.STRUCTURED_ANSWERS, ()), *answers]
                )
            self.close(run_id)

        def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
            self.close(run_id, error)

        def on_chat_model_start(
            self,
            serialized: Mapping[str, Any] | None,
            messages: Sequence[Sequence[Any]],
            *,
            run_id: UUID,
            parent_run_id: UUID | None = None,
            metadata: dict[str, Any] | None = None,
            **kwargs: Any,
        ) -> None:
            run = self._begin(run_id, parent_run_id, metadata)
            if run is None:
                return
            parent = run.around
            agent = run.label.agent
            if (metadata or {}).get("lc_source") == "summarization":
                agent = summariser(agent or parent.agent)
            for call, text in _failed_calls(messages):
                record_failed_call(call["name"], call["id"], call["args"], text, parent=parent, agent=agent)
            params = kwargs.get("invocation_params") or {}
            model = str(params.get("model") or params.get("model_name") or (metadata or {}).get("ls_model_name") or "")
            path = (serialized or {}).get("id") or [(serialized or {}).get("name", "unknown")]
            known = metadata or {}
            attributes = {
                semconv.CLIENT: str(path[-1]),
                semconv.URL: _client_url(serialized, params),
                semconv.CONVERSATION_ID: known.get("thread_id"),
            }
            provider = known.get("ls_provider")
            run.opened(model_call(model, provider, agent=agent, parent=parent, attributes=attributes))
            run.request = (messages[0] if messages else (), params.get("tools") or ())

        def on_llm_start(
            self, serialized: Mapping[str, Any] | None, prompts: list[str], *, run_id: UUID, **kwargs: Any
        ) -> None:
            self.on_chat_model_start(serialized, [prompts], run_id=run_id, **kwargs)

        def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
            run = self.runs.get(run_id)
            if run is not None and (scope := run.scope) is not None:
                if _naming_nodes:
                    issued = self.issuers.setdefault(scope.rollout, {})
                    for message in (getattr(g, "message", None) for batch in response.generations for g in batch):
                        calls = getattr(message, "tool_calls", None) or ()
                        issued.update({call["id"]: scope.agent for call in calls if call["id"]})
                    for oldest in list(issued)[:-_MOST_ISSUERS]:
                        issued.pop(oldest, None)
                content = scope.rollout.capture_content
                facts = _facts(scope, [g for batch in response.generations for g in batch], content)
                # A request that no SDK's hook has seen: of another client, or of a model that runs here.
                if content and semconv.INPUT_MESSAGES not in scope.span.attributes:
                    facts |= _request(*run.request)
                self.close(run_id, attributes=facts)

        def on_llm_error(self, error: BaseException, *, run_id: UUID, response: Any = None, **_: Any) -> None:
            run = self.runs.get(run_id)
            facts = None
            # The chunks of a stream until then, next to which LangChain puts what the error says.
            chunks = [g for batch in getattr(response, "generations", ()) for g in batch if _is_chunk(g)]
            if chunks and run is not None and run.scope is not None:
                facts = _facts(run.scope, chunks, run.scope.rollout.capture_content)
            # A reader that stops early is no error.
            self.close(run_id, None if isinstance(error, GeneratorExit) else error, attributes=facts)

        def on_tool_start(
            self,
            serialized: Mapping[str, Any] | None,
            input_str: str,
            *,
            run_id: UUID,
            parent_run_id: UUID | None = None,
            metadata: dict[str, Any] | None = None,
            inputs: dict[str, Any] | None = None,
            **kwargs: Any,
        ) -> None:
            run = self._begin(run_id, parent_run_id, metadata)
            if run is None:
                return
            parent = run.around
            name = (serialized or {}).get("name") or kwargs.get("name") or "tool"
            arguments = inputs if inputs is not None else input_str
            call_id = kwargs.get("tool_call_id")
            agent = self.issuers.get(parent.rollout, {}).get(call_id or "") or run.label.agent
            run.opened(tool_run(name, arguments, call_id, agent=agent, parent=parent))
            if run.scope is not None:
                run.scope.span.set_attribute(semconv.TOOL_DESCRIPTION, (serialized or {}).get("description"))

        def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
            run = self._forget(run_id)
            if run is None or (scope := run.scope) is None:
                return
            result = _tool_result(output, scope.span.attributes.get(semconv.TOOL_CALL_ID))
            scope.span.set_attribute(semconv.HANDOFF_TO, _handoff_target(output))
            tool_end(scope, result)

        def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
            self.close(run_id, error)

    return Handler()


def _failed_calls(messages: Sequence[Sequence[Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each tool call of the last answer whose result, at the end of a conversation, is an error, and that result."""
    for conversation in messages:
        failed: dict[str, str] = {}
        for message in reversed(conversation if isinstance(conversation, list | tuple) else ()):
            if getattr(message, "type", None) != "tool":
                calls = [c for kind in ("tool_calls", "invalid_tool_calls") for c in getattr(message, kind, None) or ()]
                yield from ((c, failed[c["id"]]) for c in calls if c["id"] in failed)
                break
            if message.status == "error":
                failed[message.tool_call_id] = str(message.text)


def _structured_answers(outputs: Any) -> list[str]:
    """The ids of tool calls in which the model's node found the structured answer (`ToolStrategy`)."""
    updates = [getattr(output, "update", output) for output in (outputs if isinstance(outputs, list) else [outputs])]
    return [
        message.tool_call_id
        for update in updates
        if isinstance(update, Mapping) and update.get("structured_response") is not None
        for message in (update.get("messages") or ())[-1:]
        if getattr(message, "type", None) == "tool"
    ]


def _tool_result(output: Any, call_id: Any) -> Any:
    """The result that the model gets: the tool's output, or the message in a `Command` or a list that answers the
    call."""
    update = getattr(output, "update", None)
    if isinstance(update, Mapping) and hasattr(output, "goto"):
        messages = update.get("messages") or ()
    else:
        messages = output if isinstance(output, list) else ()
    answers = [m for m in messages if call_id is not None and getattr(m, "tool_call_id", None) == call_id]
    return answers[-1] if answers else output


def _persons_answer(inputs: Any) -> str | None:
    """The longest text of a `Command` that resumes a paused graph; other texts in it say what kind of answer it is."""
    if not hasattr(inputs, "resume") or not hasattr(inputs, "goto"):
        return None
    return max(_texts_in(inputs.resume), key=len, default=None)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts_in(part)


def _handoff_target(output: Any) -> str | None:
    """The node next to the tool's agent that a `Command` leads to, as handoff tools return it."""
    if getattr(output, "graph", None) is None or not hasattr(output, "goto"):
        return None
    goto = output.goto
    [only] = goto if isinstance(goto, list | tuple) and len(goto) == 1 else [goto]
    name = getattr(only, "node", only)
    return name if isinstance(name, str) and name else None


def _spoke(node: Scope) -> bool:
    """Whether a node called a model or ran an agent."""
    spoken = (semconv.CHAT, semconv.INVOKE_AGENT)
    return any(scope.parent is node and scope.kind in spoken for scope in list(node.rollout.open)) or any(
        span.parent_id == node.span_id and span.operation in spoken for span in reversed(node.rollout.spans)
    )


def _client_url(serialized: Mapping[str, Any] | None, params: Mapping[str, Any]) -> str | None:
    """The URL of a model object, from its serialised form or its parameters."""
    kwargs = (serialized or {}).get("kwargs") or {}
    for source in (kwargs, params):
        for key, value in source.items():
            if isinstance(value, str) and _URL.match(value) and ("url" in key or "base" in key or "endpoint" in key):
                return value
    match = _URL.search(str((serialized or {}).get("repr") or ""))
    return match.group(0) if match else None


def _request(messages: Sequence[Any], tools: Sequence[Any]) -> dict[str, Any]:
    """The attributes for the request of a model call: its messages and tools, in OpenTelemetry's form."""
    from langchain_core.messages.utils import convert_to_openai_messages
    from langchain_core.utils.function_calling import convert_to_openai_tool

    try:
        history = convert_to_openai_messages([messages] if isinstance(messages, str) else messages)
        facts = write.request_facts({"messages": history})
        if tools:
            facts[semconv.TOOL_DEFINITIONS] = json.dumps([convert_to_openai_tool(tool) for tool in tools], default=str)
    except (ValueError, TypeError, KeyError):  # a part of a form that LangChain does not know
        return {semconv.INPUT_MESSAGES: json.dumps(messages, default=str)}
    return facts


def _is_chunk(generation: Any) -> bool:
    from langchain_core.messages import BaseMessageChunk

    return isinstance(getattr(generation, "message", None), BaseMessageChunk)


def _facts(scope: Scope, generations: Sequence[Any], content: bool) -> dict[str, Any]:
    messages = [m for g in generations if (m := getattr(g, "message", None)) is not None]
    if not messages:
        return {}
    metadata = messages[0].response_metadata
    usage = getattr(messages[0], "usage_metadata", None) or {}
    reasons = [r for m in messages if (r := _finish_reason(m))]
    facts = {
        semconv.RESPONSE_ID: metadata.get("id") or _provider_id(messages[0].id),
        semconv.RESPONSE_MODEL: metadata.get("model_name"),
        semconv.FINISH_REASONS: reasons or None,
        **counted(scope, usage),
    }
    if content:
        answers = [{"role": "assistant", "content": m.content, "tool_calls": m.tool_calls} for m in messages]
        facts[semconv.OUTPUT_MESSAGES] = write.answer_json(answers, reasons)
    return facts


def _finish_reason(message: Any) -> str | None:
    """The finish reason of Chat Completions, Anthropic's Messages or OpenAI's Responses."""
    metadata = message.response_metadata
    if reason := metadata.get("finish_reason") or metadata.get("stop_reason"):
        return reason
    incomplete = (metadata.get("incomplete_details") or {}).get("reason")
    return finish_reason(metadata.get("status"), incomplete, calls_tools=bool(message.tool_calls))


def _provider_id(message_id: str | None) -> str | None:
    """The message's id unless it is LangChain's, as for some streams."""
    return None if message_id is None or message_id.startswith(("lc_", "run-")) else message_id
