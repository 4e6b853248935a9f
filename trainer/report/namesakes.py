"""Agents that may be several of one name, which agl cannot tell apart: they are selected and trained as one."""

from __future__ import annotations

from agl.messages import read
from agl.rewards.trace import Trace


def namesakes(trace: Trace) -> dict[str, tuple[str, ...]]:
    """Agent -> the system prompts of its calls, for agents with several of them in one attempt.

    One agent has one system prompt, unless it writes the time or its notes into it.
    """
    prompts: dict[str, dict[str, None]] = {}
    for call in trace.calls:
        messages = read.sent(call)
        if call.agent is None or not messages:
            continue
        system = "\n".join(m.text for m in messages if m.role in ("system", "developer"))
        prompts.setdefault(call.agent, {})[system] = None
    return {agent: tuple(texts) for agent, texts in prompts.items() if len(texts) > 1}
