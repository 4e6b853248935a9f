"""Every adapter under test; one whose framework is not installed is left out."""

from __future__ import annotations

import importlib
import importlib.util

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


SUBJECTS: tuple[Subject, ...] = (BareOpenAI(), LangChain(), *_installed())
