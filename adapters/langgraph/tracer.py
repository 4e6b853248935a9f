"""Spans of LangGraph runs: a node that asks a model is an agent by the node's name.

Hook: LangChain's, shared with its adapter, so that both together make each span once (langgraph >= 1.2.4 and
langchain >= 1.3.6, whose metadata distinguish `create_agent`'s graphs from the user's).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from agl.adapters.base import InstrumentedTracer
from agl.adapters.langchain import tracer as langchain
from agl.adapters.langgraph.runnable import handles, runnable
from agl.adapters.openai.tracer import OpenAITracer
from agl.agents.agent import Tracer


class LangGraphTracer(InstrumentedTracer):
    """Traces graphs, and everything else that runs on langchain-core, inside rollouts.

    A call's agent is the innermost of: an agent with a name (`create_agent(name=...)`), a node of a `StateGraph`. So a
    node that holds an unnamed agent is that agent. A node that calls no model is an `operation` span; the tools that it
    runs belong to the agent that issued the calls.
    """

    modules = ("langgraph.graph", "langgraph.func")
    answer_errors: ClassVar[Mapping[str, str]] = {"langgraph.errors.GraphRecursionError": "turns"}
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    @classmethod
    def tracers(cls) -> tuple[Tracer, ...]:
        # A node may call a bare client.
        return (cls(), OpenAITracer())

    def _install(self) -> None:
        langchain.attach(nodes=True)

    def _restore(self) -> None:
        langchain.detach(nodes=True)
