"""Beside an OpenTelemetry set-up that is there already: its spans stay what they were, and ours are not doubled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from all_subjects import SUBJECTS
from paths import SUPPORT

SETUPS = {
    "traceloop-openai": ("openai", "opentelemetry.instrumentation.openai:OpenAIInstrumentor"),
    "traceloop-anthropic": ("anthropic", "opentelemetry.instrumentation.anthropic:AnthropicInstrumentor"),
    "traceloop-langchain": ("langchain", "opentelemetry.instrumentation.langchain:LangchainInstrumentor"),
    "traceloop-openai-under-langchain": ("langchain", "opentelemetry.instrumentation.openai:OpenAIInstrumentor"),
    "openinference-openai": ("openai", "openinference.instrumentation.openai:OpenAIInstrumentor"),
    "openinference-responses": ("openai_responses", "openinference.instrumentation.openai:OpenAIInstrumentor"),
    "openinference-anthropic": ("anthropic", "openinference.instrumentation.anthropic:AnthropicInstrumentor"),
    "openinference-langchain": ("langchain", "openinference.instrumentation.langchain:LangChainInstrumentor"),
    "openinference-agents": ("openai_agents", "openinference.instrumentation.openai_agents:OpenAIAgentsInstrumentor"),
}
"""Name -> subject, instrumentor."""


@pytest.mark.parametrize(
    ("setup", "first"),
    [
        pytest.param(setup, first, marks=[pytest.mark.night] if (i + j) % 2 else [])
        for i, setup in enumerate(SETUPS)
        for j, first in enumerate(("theirs", "ours"))
    ],
)
def test_both_tell_every_call_once(setup: str, first: str) -> None:
    subject, instrumentor = SETUPS[setup]
    pytest.importorskip(instrumentor.partition(":")[0])
    if subject not in {s.name for s in SUBJECTS}:
        pytest.skip(f"{subject} is not installed")
    script = SUPPORT / "beside_instrumentors.py"
    command = [sys.executable, str(script), subject, instrumentor, first]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1500:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found["alone"].values())
    assert found["outside"] == found["alone"]
    assert found["leaked"] == []
    assert found["restored"]
    for way, told in found["inside"].items():
        assert told["theirs"] == found["alone"][way], way
        assert told["chats"] == told["wire"], way
        assert told["wire_calls"] == [1, 1], way
        assert told["statuses"] == ["unset"], way
        assert {"chat", "invoke_agent"} <= {*told["kinds"]}, way
