"""LangGraph under the conformance suite: a graph with one node, which holds an unnamed agent with the tool `add`."""

from __future__ import annotations

from typing import Any

from subjects import LangChain, _Graph, chat_model, no_numbers

from agl.adapters.langgraph import LangGraphTracer
from agl.testing.subject import add


class LangGraph(LangChain):
    name = "langgraph"
    tracer = LangGraphTracer
    requires = ("langgraph", "langchain", "langchain_openai")

    def agent(self, url: str, name: str) -> Any:
        from langchain_core.tools import tool

        return self._of(url, name, tool(add))

    def reporting(self, url: str, name: str) -> Any:
        return self._of(url, name, no_numbers())

    def _of(self, url: str, name: str, tool: Any) -> Any:
        from langchain.agents import create_agent
        from langgraph.graph import START, MessagesState, StateGraph

        graph = StateGraph(MessagesState)
        graph.add_node(name, create_agent(chat_model(url), [tool], system_prompt=self.prompt))
        graph.add_edge(START, name)
        return _Graph(graph.compile(name=name))
