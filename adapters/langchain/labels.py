"""Which agent a LangChain run is a part of, told from the metadata and tags of callbacks (langchain >= 1.2.15)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_AGENTS_OWN = re.compile(r"model|tools|.+\.(before|after)_(agent|model)")
"""The nodes of a graph that `create_agent` makes, which are parts of one agent."""


class Label(NamedTuple):
    """What a run's metadata say of it, and which agent it therefore is a part of.

    Attributes:
        agent: the agent; None = the one around it.
        named: `create_agent`'s name, its own or inherited. node: the graph's node, likewise.
        is_node: whether it is that node.
    """

    agent: str | None
    named: str | None
    node: str | None
    is_node: bool


def label_of(metadata: Mapping[str, Any], tags: Sequence[str], above: Label | None, *, nodes: bool) -> Label:
    """The label of a run.

    Args:
        above: of the run that started it.
        nodes: whether the nodes of the user's own graphs are agents.
    """
    named, node = metadata.get("lc_agent_name"), metadata.get("langgraph_node")
    if nodes and node is not None and _starts_node(metadata, node, tags, above):
        return Label(node, named, node, True)
    # A graph of the user's own in an agent's tool inherits the agent's name, and is not that agent.
    inherited = above is not None and above.named == named
    return Label(above.agent if inherited and above is not None else named, named, node, False)


def _starts_node(metadata: Mapping[str, Any], node: str, tags: Sequence[str], above: Label | None) -> bool:
    """Whether a run is a node, or a task of the functional API, of a graph of the user's own."""
    # What runs inside a node inherits its metadata, but not its tags.
    if not any(tag.startswith("graph:step:") for tag in tags) and (above is None or above.node == node):
        return False
    return metadata.get("ls_integration") != "langchain_create_agent" or not _AGENTS_OWN.fullmatch(node)
