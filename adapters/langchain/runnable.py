"""A LangChain runnable (an agent, a chain, a model) as an agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl.adapters.base import Runnable, question

_FRAMEWORK = ("langchain_core.runnables", "langchain_core.language_models")


def handles(agent: object) -> bool:
    """Whether `agent` is a LangChain runnable: any but a user's graph, which is LangGraph's."""
    if is_graph(agent):
        config: Any = getattr(agent, "config", None) or {}
        return (config.get("metadata") or {}).get("ls_integration") == "langchain_create_agent"
    return any(cls.__module__.startswith(_FRAMEWORK) for cls in type(agent).__mro__)


def is_graph(agent: object) -> bool:
    """Whether `agent` is a compiled graph, `create_agent`'s among them."""
    return any(cls.__module__.startswith("langgraph.") for cls in type(agent).__mro__)


def runnable(agent: Any) -> Runnable:
    """How a runnable is run: by `ainvoke`."""

    async def invoke(value: Any) -> Any:
        return await agent.ainvoke(value)

    def plain(task: Any) -> Any:
        return dict(task) if isinstance(task, Mapping) else task

    return Runnable(name_of(agent), invoke, messages if is_graph(agent) else plain, text_of)


def name_of(agent: Any) -> str:
    """The runnable's name, else "agent"."""
    name = getattr(agent, "name", None)
    return name if isinstance(name, str) and name not in ("", "LangGraph") else "agent"


def messages(task: Any) -> Any:
    """A graph's input: the task's messages, or its question as one."""
    if isinstance(task, Mapping) and "messages" in task:
        return dict(task)
    return {"messages": [{"role": "user", "content": question(task)}]}


def text_of(result: Any) -> Any:
    """A result's structured response, its last message's text, or the result itself."""
    if isinstance(result, Mapping):
        if result.get("structured_response") is not None:
            return result["structured_response"]
        if result.get("messages"):
            return text_of(result["messages"][-1])
        return result
    if hasattr(result, "content") and hasattr(result, "type"):
        text = result.text
        return str(text() if callable(text) and not isinstance(text, str) else text)
    return result
