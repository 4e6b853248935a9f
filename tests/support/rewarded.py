"""An agent run against a scripted policy under AIR's rules: what these are told, and which calls are rewarded."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from scripted import serving

import agl
from agl import tracing
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.types import Call
from agl.tracing.context import RolloutContext

NOWHERE = "http://provider.invalid/v1"
Event = tuple[str, ...]


def calls_of(*calls: tuple[str, dict[str, Any]]) -> str:
    """Tool calls as the quickstart's policy writes them."""
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)


def watched() -> tuple[agl.AIR, list[Event]]:
    """Rules that keep what they are told."""
    air, told = agl.AIR(), []

    def success(tool_name: str, output: str, agent: str) -> float:
        told.append(("success", tool_name, str(output).strip(), agent))
        return 1.0

    def failure(tool_name: str, error: str, agent: str) -> float:
        told.append(("failure", tool_name, error, agent))
        return -1.0

    def handoff(from_agent: str, to_agent: str) -> float:
        told.append(("handoff", from_agent, to_agent))
        return 0.5

    air.on_tool_success(success)
    air.on_tool_failure(failure)
    air.on_handoff(handoff)
    return air, told


async def rewarded(
    tracer: Any, script: list[Any], run: Callable[[], Awaitable[Any]], agents: Any = None
) -> tuple[list[Event], list[tuple[float, int | None]], list[Call]]:
    """Run an agent against a scripted policy: what the rules were told, (value, index of the call) of each reward."""
    air, told = watched()
    async with serving(script) as rig:
        attempt = await rig.attempt(agents=agents)
        access, selection = attempt.access, select(agents)
        url = rig.gateway.base_url
        context = RolloutContext(access.rollout_id, access.attempt, "outer", selection, url, attempt.key)
        with tracer, tracing.running(context):
            await run()
        calls = await attempt.close()
    index = {c.id: c.index for c in calls}
    span_index = SpanIndex(calls, context.spans)
    trajectory = build_trajectory(access.rollout_id, access.attempt, "g", span_index, selection)
    credited = air.rewards(trajectory, span_index, selection)
    return told, [(r.value, None if i is None else index[i]) for r, i in credited], calls
