"""Programs with other models are recorded by `agl run` without a change; what they did trains a model of one's own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import PROGRAMS, environment, launch
from scripted import quick_tokenizer
from traced_runs import saved

import agl
from agl.mdp.sequence import merge
from agl.testing.provider import Provider, Reply, serve
from agl.testing.subject import uses_add
from agl.trainer.report.explain import list_rollouts, render

IN_CI = ("bare_openai", "langchain_agent", "pydantic_ai_agent")
"""What .ci/run does of it, too: the last of these was once trained as silence."""
FRAMEWORKS = {
    "bare_openai": "openai",
    "langchain_agent": "langchain",
    "langgraph_agent": "langgraph",
    "openai_agents_agent": "agents",
    "agent_framework_agent": "agent_framework",
    "strands_agent": "strands",
    "autogen_agent": "autogen_agentchat",
}
"""Program -> the framework that it needs; the clients among them use Chat Completions, Responses and streams."""


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as running:
        yield running


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(quick_tokenizer(), tmp_path_factory.mktemp("student"))


def rows(chosen: Any) -> list[tuple[str, str]]:
    """The text of each training row, and of what is trained in it."""
    tokenizer = quick_tokenizer()
    made = [row for one in chosen.trajectories for row in merge(one, chosen.weights)]
    return [(tokenizer.decode(row.token_ids), tokenizer.decode(row.token_ids[row.action_mask])) for row in made]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.night) for name in FRAMEWORKS]
)
def test_what_a_program_of_each_framework_did_can_be_imitated(
    name: str, provider: Provider, student: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed")
    done = launch(tmp_path, environment(provider), "--", sys.executable, str(PROGRAMS / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    chosen = agl.traces(tmp_path / "agl-runs" / "traces.db").load(student)
    assert chosen.counts["calls_kept"] == chosen.counts["calls_retokenised"] == chosen.counts["calls"] == 2
    made = rows(chosen)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    trained = "".join(answers for _, answers in made)
    assert trained.startswith(call)
    assert trained.removeprefix(call).strip().startswith("sum 5")
    assert made[-1][0].count("<tool_response>\n5\n</tool_response>") == 1
    # AutoGen asks for its summary without the tools, which no template continues.
    assert len(made) == (2 if name == "autogen_agent" else 1)

    (rollout,) = list_rollouts(tmp_path / "agl-runs" / "traces.db")
    report = agl.explain(rollout["rollout_id"], tmp_path / "agl-runs" / "traces.db")
    first, second = report.provider_calls
    assert (report.calls, first.error, second.error) == ([], None, None)
    assert [m["role"] for m in first.messages][-1] == "user"
    assert first.reply is not None
    assert [c["function"]["name"] for c in first.reply["tool_calls"]] == ["add"]
    assert second.reply is not None
    assert "sum 5" in second.reply["content"]
    # What was said before is not said again, but by AutoGen's summary, which is asked for in other words.
    if name != "autogen_agent":
        assert [(m["role"], m["content"]) for m in second.messages] == [("tool", "5")]
    assert "sum 5" in render(report)


def test_what_only_the_provider_knows_is_not_guessed(provider: Provider, student: str, tmp_path: Path) -> None:
    """A response that continues another by its id, several answers at once, an image, and an answer cut short."""
    provider.script = lambda body: Reply("fine")
    (tmp_path / "program.py").write_text(
        "from openai import OpenAI\n"
        "client = OpenAI()\n"
        "first = client.responses.create(model='m', input='hello')\n"
        "client.responses.create(model='m', input='and now?', previous_response_id=first.id)\n"
        "image = {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,AAAA'}}\n"
        "ask = lambda content, **more: client.chat.completions.create(\n"
        "    model='m', messages=[{'role': 'user', 'content': content}], **more)\n"
        "ask([image])\n"
        "ask('twice', n=2)\n"
    )
    done = launch(tmp_path, environment(provider), "--", sys.executable, "program.py")
    assert done.returncode == 0, done.stderr
    chosen = agl.traces(tmp_path / "agl-runs" / "traces.db").load(student)
    assert {k.partition("/")[2]: n for k, n in chosen.counts.items() if k.startswith("calls_left_out/")} == {
        "earlier messages kept by the provider": 1,
        "not only text": 1,
        "several answers to one request": 1,
    }
    assert [trained for _, trained in rows(chosen)] == ["fine<|im_end|>"]


def test_an_agent_with_a_closed_model_is_recorded_with_its_rewards(
    provider: Provider, student: str, tmp_path: Path
) -> None:
    from openai import OpenAI

    def answer(body: dict[str, Any]) -> Reply:
        asked = next(m["content"] for m in body["messages"] if m["role"] == "user")
        if "error" in asked:
            return Reply(status=400)
        return Reply("4") if "2 + 2" in asked else Reply("no idea")

    provider.script = answer

    @agl.rollout
    def solver(task: str) -> float:
        client = OpenAI(base_url=provider.url, api_key="sk-closed", max_retries=0)
        reply = client.chat.completions.create(model="closed", messages=[{"role": "user", "content": task}])
        return float(reply.choices[0].message.content == "4")

    trainer = agl.Trainer(agl.Baseline(repeats=2), directory=tmp_path, max_attempts=1, progress=False)
    trainer.fit(solver, ["2 + 2?", "3 + 3?", "an error"])
    chosen = agl.traces(tmp_path, where=agl.reward() >= 1).load(student)
    assert [trained for _, trained in rows(chosen)] == ["4<|im_end|>"]
    assert chosen.rewards["reward"].n == 4
    assert chosen.counts["rollouts_left_out/failed"] == 2
    assert chosen.counts["rollouts_left_out/condition not met"] == 2
    assert chosen.counts["rollouts_left_out/duplicate"] == 1
