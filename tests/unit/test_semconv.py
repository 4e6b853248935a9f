"""Our attribute names are those of OpenTelemetry's conventions, or ours by their prefix."""

from __future__ import annotations

import pytest
from all_subjects import SUBJECTS
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from agl import semconv, tracing
from agl.testing import conformance
from agl.testing.subject import Subject

DESCRIBE_AGENTS = {
    "openai_agents": {semconv.WORKFLOW_NAME: "Agent workflow"},
    "strands": {semconv.AGENT_ID: "default"},
    "smolagents": {semconv.AGENT_DESCRIPTION: "adds"},
}
"""Frameworks whose agents have more than a name, as the subject's do."""


def _names(module: object) -> set[str]:
    return {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


def test_every_gen_ai_name_is_one_of_the_conventions() -> None:
    ours = {name for name in _names(semconv) if name.startswith("gen_ai.")}
    # An event's name, not an attribute's.
    assert ours - _names(gen_ai_attributes) == {semconv.EVALUATION}


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.traces_tools], ids=lambda s: s.name)
def test_spans_of_agents_and_tools_have_what_the_framework_says_of_them(subject: Subject) -> None:
    rollout = conformance.context(subject)
    with conformance.serve(subject.script()) as provider, conformance.instrumented(subject), tracing.running(rollout):
        conformance.do(subject, subject.agent(provider.url, "solver"), way=next(iter(conformance.ways(subject))))
    tools = [s for s in rollout.spans if s.operation == semconv.EXECUTE_TOOL]
    assert {s.attributes.get(semconv.TOOL_DESCRIPTION) for s in tools} == {"Add two numbers."}
    agents = [s.attributes for s in rollout.spans if s.agent == "solver" and s.operation == semconv.INVOKE_AGENT]
    for name, value in DESCRIBE_AGENTS.get(subject.name, {}).items():
        assert value in [attributes.get(name) for attributes in agents]
