"""The suite over an adapter that has hooks for agents alone."""

from __future__ import annotations

from typing import Any, ClassVar

from patched_tinyagents import PatchedTracer
from test_tinyagents_conformance import TinyAgents

from agl.testing.conformance import Conformance


class PatchedTinyAgents(TinyAgents):
    tracer = PatchedTracer
    traces_models = False
    traces_tools = False
    gaps: ClassVar[frozenset[str]] = frozenset()

    def changed(self) -> Any:
        from tinyagents import Agent

        return super().changed(), dict(vars(Agent))


class TestPatchedTinyAgents(Conformance):
    subjects = (PatchedTinyAgents(),)
    # It has no entry point, and stands in the place of the one that has.
    test_wrap_finds_the_framework_by_type = None
    test_all_adapters_together_do_not_double_spans = None
