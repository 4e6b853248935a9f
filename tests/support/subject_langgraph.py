"""LangGraph under the conformance suite: a graph with one node, which holds an unnamed agent with the tool `add`."""

from __future__ import annotations

from typing import Any

from subjects import LangChain, _Graph, chat_model, no_numbers, resumed

from agl.adapters.langgraph import LangGraphTracer
from agl.testing.subject import Decision, add


class LangGraph(LangChain):
    name = "langgraph"
    tracer = LangGraphTracer
    requires = ("langgraph", "langchain", "langchain_openai")

    def agent(self, url: str, name: str) -> Any:
        from langchain_core.tools import tool

        return self._of(url, name, tool(add))

    def reporting(self, url: str, name: str) -> Any:
        return self._of(url, name, no_numbers())

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        from langchain_core.tools import StructuredTool, ToolException
        from langgraph.checkpoint.memory import InMemorySaver
        from langgraph.types import interrupt

        def asking(a: int, b: int) -> int:
            """Add two numbers."""
            if interrupt("may it add?") != "approved":
                raise ToolException("a person refused it")
            return add(a, b)

        tool = StructuredTool.from_function(asking, name="add", handle_tool_error=True)
        graph = self._of(url, name, tool, InMemorySaver()).graph
        return await resumed(graph, question, None if decision == "unanswered" else decision)

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        from langchain_core.tools import StructuredTool

        made = StructuredTool.from_function(coroutine=tool, name="add", description="Add two numbers.")
        return await self._of(url, name, made).ainvoke(question)

    def _of(self, url: str, name: str, tool: Any, checkpointer: Any = None) -> Any:
        from langchain.agents import create_agent
        from langgraph.graph import START, MessagesState, StateGraph

        graph = StateGraph(MessagesState)
        graph.add_node(name, create_agent(chat_model(url), [tool], system_prompt=self.prompt))
        graph.add_edge(START, name)
        return _Graph(graph.compile(checkpointer, name=name))
