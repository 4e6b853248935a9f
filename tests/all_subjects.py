"""Every adapter under test; one whose framework is not installed is left out."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence

from subjects import BareOpenAI, LangChain, Subject

FRAMEWORKS = {
    "agent_framework": ("subject_agent_framework", "AgentFramework"),
    "agents": ("subject_openai_agents", "OpenAIAgents"),
    "autogen_agentchat": ("subject_autogen", "AutoGen"),
    "langgraph": ("subject_langgraph", "LangGraph"),
    "strands": ("subject_strands", "Strands"),
}
"""Framework's module -> where its `Subject` is."""


def _installed() -> list[Subject]:
    return [
        getattr(importlib.import_module(module), name)()
        for framework, (module, name) in FRAMEWORKS.items()
        if importlib.util.find_spec(framework) is not None
    ]


_LANGCHAIN = () if importlib.util.find_spec("langchain_openai") is None else (LangChain(),)

SUBJECTS: tuple[Subject, ...] = (BareOpenAI(), *_LANGCHAIN, *_installed())


def chosen(specs: Sequence[str] | None) -> Sequence[Subject]:
    """The subjects of a run: those that are named (`file.py:Class` or `package.module:Class`), else all of ours."""
    return tuple(map(_named, specs)) if specs else SUBJECTS


@functools.cache
def _named(spec: str) -> Subject:
    from agl.trainer.cli.loading import load_object

    return load_object(spec, "--subject")()
