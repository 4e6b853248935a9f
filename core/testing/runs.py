"""How the conformance suite runs a subject's agent in a rollout, and reads the rollout's spans."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from agl.agents import frameworks as plugins
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import Provider
from agl.testing.subject import Subject
from agl.tracing.context import RolloutContext

ASK = "what is 2+3?"


def ways(subject: Subject) -> tuple[str, ...]:
    return (*subject.ways, *subject.async_ways)


def reads(subject: Subject) -> tuple[str, ...]:
    return (*subject.sync_reads, *subject.async_reads)


def context(subject: Subject, gateway: Provider | None = None, *, agents: Any = None, id: str = "ro") -> RolloutContext:
    outer = "outer" if subject.names_agents else "solver"
    return RolloutContext(id, 1, outer, select(agents), gateway.root if gateway else None, "agl-key")


def instrumented(subject: Subject) -> contextlib.AbstractContextManager[Any]:
    """The subject's adapter switched on, and the tracers of the SDKs where those make the spans of model calls."""
    return subject.tracer() if subject.traces_models else plugins.switched_on([subject.tracer()])


def do(subject: Subject, agent: Any, question: Any = ASK, *, way: str | None = None) -> str:
    """The answer of one run, in the first way that there is if none is given."""
    way = way or ways(subject)[0]
    answer = getattr(agent, way)(question)
    return answer if way in subject.ways else asyncio.run(answer)


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]
