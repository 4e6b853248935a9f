"""How the requests of a rollout described their tools, which many frameworks do not tell their hooks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agl import semconv
from agl.mdp.spans import Span
from agl.messages import google
from agl.tracing.context import RolloutContext

UNKNOWN = "unknown"
"""Without content, the name of a tool that a model called and no request offered: the model made its name up."""
MOST_NAMES = 10_000
"""Names of tools that are remembered, likewise."""
MOST_AGENTS = 100
"""Agents of a rollout whose tools are remembered, so that a server does not grow for ever."""


def remember(rollout: RolloutContext, agent: str, tools: Any) -> None:
    """Keep the tools of an agent's request, in its API's form, until the agent's next one."""
    rollout.offered.pop(agent, None)
    rollout.offered[agent] = tools
    if len(rollout.offered) > MOST_AGENTS:
        del rollout.offered[next(iter(rollout.offered))]


def description(rollout: RolloutContext, agent: str, name: str) -> str | None:
    """How the agent's last request, or else the last one of any agent, described a tool; None if it did not."""
    others = (tools for other, tools in reversed([*rollout.offered.items()]) if other != agent)
    offers = [rollout.offered.get(agent), *others]
    return next((text for tools in offers if (text := _described(tools, name)) is not None), None)


def remember_names(rollout: RolloutContext, tools: Any) -> None:
    """Keep the names alone of a request's tools."""
    for tool in _functions(tools):
        if isinstance(name := tool.get("name"), str) and len(rollout.offered_names) < MOST_NAMES:
            rollout.offered_names.add(name)


def is_known(rollout: RolloutContext, name: str) -> bool:
    """Whether a request of a rollout without content had a tool of that name, or none is known to have had any."""
    return name in rollout.offered_names or len(rollout.offered_names) in (0, MOST_NAMES)


def recorded_description(chat: Span, name: str) -> str | None:
    """How the request of a `chat` span described a tool; None if it did not, or was not recorded."""
    try:
        return _described(json.loads(str(chat.attributes.get(semconv.TOOL_DEFINITIONS, "null"))), name)
    except ValueError:
        return None


def _described(tools: Any, name: str) -> str | None:
    texts = (tool.get("description") for tool in _functions(tools) if tool.get("name") == name)
    return next((text for text in texts if isinstance(text, str) and text), None)


def _functions(tools: Any) -> Iterator[Mapping[str, Any]]:
    """What describes each tool of a request, in whichever API's form; namespaces and Google's lists are taken apart."""
    for tool in google.listed(tools):
        if not isinstance(tool, Mapping):
            continue
        group = google.camel(tool).get("functionDeclarations") or tool.get("tools")
        if group:
            yield from _functions(group)
        else:
            function = tool.get("function")
            yield function if isinstance(function, Mapping) else tool
