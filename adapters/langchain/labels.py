"""Which agent a LangChain run is a part of, by the metadata and tags of its callbacks (langchain >= 1.2.15)."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_AGENT_NODES = re.compile(r"model|tools|.+\.(before|after)_(agent|model)")
"""The nodes of a graph that `create_agent` makes, which are parts of one agent."""
_AGENT_MAKERS = frozenset({"langchain_create_agent", "deepagents"})
"""What the metadata of such graphs names as their maker: `create_deep_agent` overwrites LangChain's entry."""

_REACT_AGENT = "langgraph.prebuilt.chat_agent_executor"
UNNAMED_GRAPH = "LangGraph"


class Label(NamedTuple):
    """A run's agent, and the metadata that it follows from.

    Attributes:
        agent: the agent; None = the agent of the surrounding run.
        name: the name of a `create_agent`, of this run or inherited.
        node: the graph's node, likewise.
        is_node: whether the run is that node.
    """

    agent: str | None
    name: str | None
    node: str | None
    is_node: bool


def label_of(
    metadata: Mapping[str, Any], tags: Sequence[str], above: Label | None, *, nodes: bool, graph: str | None = None
) -> Label:
    """The label of a run.

    Args:
        above: the label of the run that started it.
        nodes: whether the nodes of the user's graphs are agents.
        graph: the name of the run that started it, which is the graph's where this one is a node.
    """
    name = metadata.get("lc_agent_name")
    node = metadata.get("langgraph_node")
    if nodes and node is not None and _starts_node(metadata, node, tags, above):
        if graph not in (None, UNNAMED_GRAPH) and _of_react_agent():
            return Label(graph, name, node, False)
        return Label(node, name, node, True)
    # A user's graph in an agent's tool inherits the agent's name, and is not that agent.
    inherited = above is not None and above.name == name
    return Label(above.agent if inherited and above is not None else name, name, node, False)


def _starts_node(metadata: Mapping[str, Any], node: str, tags: Sequence[str], above: Label | None) -> bool:
    """Whether a run is a node, or a task of the functional API, of one of the user's graphs."""
    # A run inside a node inherits its metadata, but not its tags.
    if not any(tag.startswith("graph:step:") for tag in tags) and (above is None or above.node == node):
        return False
    return metadata.get("ls_integration") not in _AGENT_MAKERS or not _AGENT_NODES.fullmatch(node)


def _of_react_agent() -> bool:
    """Whether the node that starts now is part of a `langgraph.prebuilt.create_react_agent`, which calls each of its
    nodes "agent" and says nothing of it in the metadata. The frame that runs the node has it."""
    frame = sys._getframe(1)
    for _ in range(24):
        steps = getattr(frame.f_locals.get("self"), "steps", None)
        if steps:
            function = getattr(steps[0], "func", None) or getattr(steps[0], "afunc", None)
            return getattr(function, "__module__", None) == _REACT_AGENT
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
