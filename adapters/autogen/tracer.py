"""Spans of AutoGen runs: `invoke_agent` for each agent's turn, `execute_tool` for tools, `chat` for each request.

Hook: none exists that runs before the model's request (AutoGen logs calls after they were made, and its
OpenTelemetry spans go to the user's tracer provider), so methods of its base classes are replaced while instrumented;
each family's module says which, and for which versions. The `chat` spans are the SDK's, through `agl.adapters.openai`:
AutoGen's own results drop the response's id.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable

from agl.adapters.autogen import ag2, agentchat, classic
from agl.adapters.autogen.runnable import handles, runnable
from agl.adapters.patching import Patches, PatchingTracer
from agl.extras import install_line

_FAMILIES: dict[str, tuple[Callable[[Patches], None], ...]] = {
    "autogen_core": (agentchat.install,),
    "autogen": (classic.install, ag2.install_beta),
    "ag2": (ag2.install,),
}


class AutoGenTracer(PatchingTracer):
    """Traces agents, teams and tools of autogen-agentchat, autogen-core, classic AutoGen, `autogen.beta` and ag2 inside
    rollouts."""

    modules = ("autogen_agentchat", "autogen_core", "autogen", "ag2")
    with_openai = True
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _patch(self, patches: Patches) -> None:
        installed = [family for module, family in _FAMILIES.items() if importlib.util.find_spec(module) is not None]
        if not installed:
            raise ImportError(f"AutoGen is not installed; {install_line('autogen')}")
        for install in itertools.chain.from_iterable(installed):
            install(patches)
