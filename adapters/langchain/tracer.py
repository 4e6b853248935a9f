"""Spans of LangChain runs: `invoke_agent` for named agents, `chat` for model calls, `execute_tool` for tools.

Hook: `register_configure_hook` with a context variable whose *default* is our handler (langchain-core >= 1.0), which
reaches every thread, task and bare model call without a patch. LangChain offers no way to take such a hook back, so
`uninstrument` removes it from the list it was put in.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import UUID

from agl import routing, semconv, tracing
from agl.adapters.base import InstrumentedTracer
from agl.adapters.langchain.wrap import handles, wrap
from agl.tracing import Scope

if TYPE_CHECKING:
    from langchain_core.callbacks import BaseCallbackHandler

_URL = re.compile(r"https?://[^\s'\"\\,)]+")


class LangChainTracer(InstrumentedTracer):
    """Traces everything that runs on langchain-core inside rollouts."""

    handles = staticmethod(handles)
    wrap = staticmethod(wrap)

    def _install(self) -> None:
        from langchain_core.tracers.context import _configure_hooks, register_configure_hook

        routing.install()
        register_configure_hook(ContextVar("agl_langchain", default=_handler()), inheritable=True)  # noqa: B039
        self._hook = _configure_hooks[-1]

    def _restore(self) -> None:
        from langchain_core.tracers.context import _configure_hooks

        _configure_hooks.remove(self._hook)
        routing.uninstall()


@functools.cache
def _handler() -> BaseCallbackHandler:
    """The one handler of this process. Made late, so that importing the adapter does not import the framework."""
    from langchain_core.callbacks import BaseCallbackHandler

    class Handler(BaseCallbackHandler):
        # In the caller's own context, also under async: a scope set here is seen by the SDK call that follows.
        run_inline = True

        def __init__(self) -> None:
            self.scopes: dict[UUID, Scope] = {}
            """The scope that a run opened."""
            self.around: dict[UUID, Scope] = {}
            """The innermost scope within which a run's children lie: its own, or the one it was started in."""

        def _parent(self, parent_run_id: UUID | None) -> Scope | None:
            """The scope that a run belongs to: by the context, where that lies within LangChain's parent run; by
            LangChain's ids, where it does not (streams read in turn share one context) or is lost."""
            here = tracing.current()
            if parent_run_id is None:
                self._forget_closed()
                return here
            known = self.around.get(parent_run_id)
            while known is not None and known.ended:
                known = known.parent
            if known is None or known.rollout.closed or (here is not None and here.within(known)):
                return here
            return known

        def _forget_closed(self) -> None:
            """Drop the runs of ended rollouts that LangChain never ended: streams that were broken off."""
            for runs in (self.scopes, self.around):
                for run_id in [r for r, scope in list(runs.items()) if scope.rollout.closed]:
                    runs.pop(run_id, None)

        def _open(self, run_id: UUID, scope: Scope | None) -> None:
            if scope is not None:
                self.scopes[run_id] = self.around[run_id] = scope

        def _close(self, run_id: UUID, error: BaseException | str | None = None, **attributes: Any) -> None:
            self.around.pop(run_id, None)
            if (scope := self.scopes.pop(run_id, None)) is not None:
                tracing.end(scope, error=error, attributes=attributes.get("attributes"))

        def on_chain_start(
            self,
            serialized: Any,
            inputs: Any,
            *,
            run_id: UUID,
            parent_run_id: UUID | None = None,
            metadata: dict[str, Any] | None = None,
            **_: Any,
        ) -> None:
            parent = self._parent(parent_run_id)
            if parent is None:
                return
            agent = (metadata or {}).get("lc_agent_name")
            if agent and agent != parent.agent:
                self._open(run_id, tracing.start(semconv.INVOKE_AGENT, agent, agent=agent, parent=parent))
            else:
                self.around[run_id] = parent

        def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
            self._close(run_id)

        def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
            self._close(run_id, error)

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
            parent = self._parent(parent_run_id)
            if parent is None:
                return
            params = kwargs.get("invocation_params") or {}
            model = str(params.get("model") or params.get("model_name") or (metadata or {}).get("ls_model_name") or "")
            self._open(
                run_id,
                tracing.start(
                    semconv.CHAT,
                    model,
                    agent=(metadata or {}).get("lc_agent_name"),
                    parent=parent,
                    attributes={
                        semconv.REQUEST_MODEL: model,
                        semconv.PROVIDER_NAME: (metadata or {}).get("ls_provider"),
                        semconv.CLIENT: _client_name(serialized),
                        semconv.URL: _client_url(serialized, params),
                    },
                ),
            )

        def on_llm_start(
            self, serialized: Mapping[str, Any] | None, prompts: list[str], *, run_id: UUID, **kwargs: Any
        ) -> None:
            self.on_chat_model_start(serialized, [prompts], run_id=run_id, **kwargs)

        def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
            scope = self.scopes.get(run_id)
            if scope is not None:
                self._close(run_id, attributes=_facts(response, scope.rollout.capture_content))

        def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
            self._close(run_id, error)

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
            parent = self._parent(parent_run_id)
            if parent is None:
                return
            name = (serialized or {}).get("name") or kwargs.get("name") or "tool"
            arguments = json.dumps(inputs, default=str) if inputs is not None else input_str
            self._open(
                run_id,
                tracing.start(
                    semconv.EXECUTE_TOOL,
                    name,
                    agent=(metadata or {}).get("lc_agent_name"),
                    parent=parent,
                    attributes={
                        semconv.TOOL_NAME: name,
                        semconv.TOOL_CALL_ID: kwargs.get("tool_call_id"),
                        semconv.TOOL_CALL_ARGUMENTS: arguments if parent.rollout.capture_content else None,
                    },
                ),
            )

        def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
            scope = self.scopes.get(run_id)
            if scope is None:
                return
            failed = getattr(output, "status", None) == "error"
            text = str(getattr(output, "content", output))
            result = text if scope.rollout.capture_content else None
            self._close(run_id, text if failed else None, attributes={semconv.TOOL_CALL_RESULT: result})

        def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
            self._close(run_id, error)

    return Handler()


def _client_name(serialized: Mapping[str, Any] | None) -> str:
    path = (serialized or {}).get("id")
    return str(path[-1]) if path else str((serialized or {}).get("name", "unknown"))


def _client_url(serialized: Mapping[str, Any] | None, params: Mapping[str, Any]) -> str | None:
    """The URL a model object was set up with, from whatever LangChain tells of it."""
    kwargs = (serialized or {}).get("kwargs") or {}
    for source in (kwargs, params):
        for key, value in source.items():
            if isinstance(value, str) and _URL.match(value) and ("url" in key or "base" in key or "endpoint" in key):
                return value
    found = _URL.search(str((serialized or {}).get("repr") or ""))
    return found.group(0) if found else None


def _facts(response: Any, content: bool) -> dict[str, Any]:
    generations = [g for batch in response.generations for g in batch]
    messages = [m for g in generations if (m := getattr(g, "message", None)) is not None]
    if not messages:
        return {}
    metadata = messages[0].response_metadata
    usage = getattr(messages[0], "usage_metadata", None) or {}
    reasons = [r for m in messages if (r := m.response_metadata.get("finish_reason"))]
    facts = {
        semconv.RESPONSE_ID: metadata.get("id") or _provider_id(messages[0].id),
        semconv.RESPONSE_MODEL: metadata.get("model_name"),
        semconv.FINISH_REASONS: reasons or None,
        semconv.INPUT_TOKENS: usage.get("input_tokens"),
        semconv.OUTPUT_TOKENS: usage.get("output_tokens"),
    }
    if content:
        said = [{"role": "assistant", "content": m.content, "tool_calls": m.tool_calls} for m in messages]
        facts[semconv.OUTPUT_MESSAGES] = json.dumps(said, default=str)
    return facts


def _provider_id(message_id: str | None) -> str | None:
    """The message's id unless LangChain made it up, as it does for some streams."""
    return None if message_id is None or message_id.startswith(("lc_", "run-")) else message_id
