"""docs/adapters.md: its tables are what the suite and pyproject.toml say, and the examples of each framework's page run
as they stand."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from all_subjects import ALL
from extras import requirements
from paths import ROOT
from scripted import Asked, ScriptedRollouts, calls_once, quick_tokenizer, tool_call_of

import agl
from agl.testing import capabilities
from agl.testing.conformance import Conformance
from agl.testing.provider import Provider, Reply, serve

PAGE = ROOT / "docs" / "adapters.md"
FRAMEWORKS = ROOT / "docs" / "adapters"
REWRITE = "run: pytest tests/unit/test_adapter_conformance.py --capabilities docs/adapters.md"


def test_the_matrix_is_what_the_adapters_declare() -> None:
    expected = capabilities.table(capabilities.rows(Conformance), ALL)
    assert capabilities.between(PAGE.read_text(), "capabilities") == expected, REWRITE


def test_the_requirements_are_pyprojects() -> None:
    assert capabilities.between(PAGE.read_text(), "requirements") == requirements(), REWRITE


def test_every_case_of_the_suite_is_a_row() -> None:
    cases = {name for name in dir(Conformance) if name.startswith("test_")}
    assert cases == {row.case for row in capabilities.rows(Conformance)}, "mark the case with @capability(...)"


def examples() -> dict[str, str]:
    """Title of a framework's page and number -> a Python block of it."""
    found = {}
    for page in FRAMEWORKS.glob("*.md"):
        text = page.read_text()
        title = text.partition("\n")[0].removeprefix("# ")
        for i, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            found[f"{title}, {i + 1}"] = block
    return found


Script = Callable[[Asked], str]


@dataclass(frozen=True)
class Case:
    """How to run an example, and what must come of it.

    Attributes:
        needs: the module without which it is skipped. script: the policy that is asked in place of the model.
        task: given to the agent. agent, calls: who is trained, and how often it asks. others: requests that go to the
            provider. fork: why each call but the first begins a row of its own.
    """

    needs: str
    script: Script
    agent: str = "solver"
    calls: int = 1
    others: int = 0
    fork: str | None = None
    task: dict[str, str] = field(default_factory=lambda: {"question": "what is 2+3?", "answer": "5"})


def answers(asked: Asked) -> str:
    return "5"


def in_texts(asked: Asked) -> str:
    """smolagents tells the model of a tool's result as the user, and ends with a tool of its own."""
    prompt = quick_tokenizer().decode(asked.prompt_ids.tolist())
    name, arguments = ("final_answer", {"answer": "5"}) if "Observation:\n5" in prompt else ("add", {"a": 2, "b": 3})
    return tool_call_of(name, arguments)


ADDS = calls_once("add", {"a": 2, "b": 3}, "5")
CASES = {
    "Bare OpenAI, Anthropic and Google clients, 1": Case("openai", answers),
    "Bare OpenAI, Anthropic and Google clients, 2": Case("anthropic", answers),
    "Bare OpenAI, Anthropic and Google clients, 3": Case("google.genai", answers),
    "LangChain, 1": Case("langchain_openai", ADDS, calls=2),
    "LangGraph, 1": Case("langchain_openai", answers, others=1),
    "OpenAI Agents SDK, 1": Case("agents", ADDS, calls=2),
    "OpenAI Agents SDK, 2": Case(
        "agents",
        calls_once("transfer_to_poems", {}, ""),
        agent="triage",
        others=1,
        task={"question": "write me a poem", "specialist": "poems"},
    ),
    "Microsoft Agent Framework, 1": Case("agent_framework", ADDS, calls=2),
    "Strands, 1": Case("strands", ADDS, calls=2),
    "Pydantic AI, 1": Case("pydantic_ai", ADDS, calls=2),
    "smolagents, 1": Case("smolagents", in_texts, calls=2, fork="assistant_rewritten"),
    "crewai, 1": Case("crewai", ADDS, calls=2),
    "AutoGen, 1": Case("autogen_agentchat", ADDS, calls=2),
    "AutoGen, 2": Case("autogen_agentchat", answers, others=1),
}


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """Every SDK finds its provider here, by the environment, as a user's program does."""
    with serve(lambda body: Reply("fine")) as server:
        for sdk, url in (("OPENAI", server.url), ("ANTHROPIC", server.root)):
            monkeypatch.setenv(f"{sdk}_API_KEY", "sk-own")
            monkeypatch.setenv(f"{sdk}_BASE_URL", url)
        monkeypatch.setenv("GEMINI_API_KEY", "sk-own")
        monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", server.root)
        yield server


@pytest.fixture
def agents_sdk_sends_nothing() -> Iterator[None]:
    """The Agents SDK posts its traces to OpenAI otherwise, at exit."""
    if importlib.util.find_spec("agents") is None:
        yield
        return
    from agents import set_tracing_disabled

    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


def test_a_function_tells_its_agents_apart_as_the_page_says(provider: Provider, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    naming = 'with agl.tracing.span("invoke_agent", "critic", agent="critic"):'
    assert f"`{naming} ...`" in (FRAMEWORKS / "bare-clients.md").read_text()
    source = f"""
import agl
import agl.tracing

def solver(task):
    said = ask("solve")
    {naming}
        ask("criticise")
    return said
"""

    def ask(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content

    scope: dict[str, Any] = {"ask": ask}
    exec(source, scope)
    client = openai.OpenAI()
    policy = ScriptedRollouts(answers)
    agent = agl.wrap(scope["solver"], reward=lambda task, output: float(output == "5"))
    agl.Trainer(policy, agents=["critic"], directory=tmp_path, progress=False).fit(agent, ["t"])
    assert [c.agent for c in policy.calls[0]] == ["critic"]
    assert [s.body["messages"][0]["content"] for s in provider.seen] == ["solve"]
    assert policy.rewards == [0.0]


def test_every_example_is_run_and_every_page_linked() -> None:
    assert examples().keys() == CASES.keys()
    linked = set(re.findall(r"\]\(adapters/([a-z-]+)\.md\)", PAGE.read_text()))
    assert linked == {page.stem for page in FRAMEWORKS.glob("*.md")}


@pytest.mark.parametrize("name", CASES)
def test_an_example_runs_and_trains_who_it_says(
    name: str, provider: Provider, agents_sdk_sends_nothing: None, tmp_path: Path
) -> None:
    case = CASES[name]
    pytest.importorskip(case.needs)
    # From a file, because some frameworks read the source of a tool.
    (file := tmp_path / "example.py").write_text(examples()[name])
    scope: dict[str, Any] = {"__name__": "example"}
    exec(compile(file.read_text(), file, "exec"), scope)

    trainer = scope["trainer"]
    policy = trainer.algorithm = ScriptedRollouts(case.script)
    trainer.directory, trainer.progress = tmp_path / "run", False
    trainer.fit(scope["agent"], [case.task])

    assert policy.rewards == [1.0]
    [calls] = policy.calls
    assert [(c.agent, c.policy, c.fork_cause) for c in calls] == [
        (case.agent, "policy", case.fork if i else None) for i in range(case.calls)
    ]
    assert len(provider.seen) == case.others
    keys = {s.headers.get("authorization", s.headers.get("x-api-key", "")) for s in provider.seen}
    assert keys <= {"Bearer sk-own", "sk-own"}
