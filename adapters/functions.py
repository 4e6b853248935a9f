"""Functions that call bare SDK clients, as agents: what the adapters of the SDKs share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agl.adapters.base import InstrumentedTracer, Runnable
from agl.agents.agent import Tracer
from agl.agents.frameworks import CLIENTS, ImportedFrameworks, adapters


def is_function(agent: object) -> bool:
    """Whether `agent` is a plain function task -> output."""
    return inspect.isfunction(agent) or inspect.ismethod(agent)


def function_runnable(agent: Callable[[Any], Any]) -> Runnable:
    """How a function task -> output, sync or async, is run: with the task itself, for its result."""
    return Runnable(getattr(agent, "__name__", "agent"), agent, lambda task: task, lambda result: result)


class ClientTracer(InstrumentedTracer):
    """A tracer of one SDK's bare clients, which brings those of the other SDKs for the functions that it wraps."""

    @classmethod
    def tracers(cls) -> tuple[Tracer, ...]:
        # A function's type does not tell which SDK it calls. A tracer of an SDK that is not installed does nothing.
        others = (tracer for name, tracer in adapters().items() if name in CLIENTS and tracer is not cls)
        return (cls(), *(tracer() for tracer in others), ImportedFrameworks())
