"""Programs in another language, with the official openai package for Node: recorded, answered by a policy, trained."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import OPENAI_KEY, PROGRAMS, chats, environment, facts, holds, launch, listed, outline, show, trace

import agl
from agl import semconv
from agl.agents.prompts import save_prompts
from agl.testing.provider import Provider, Reply, serve
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

PACKAGE = "openai@6.10.0"


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the agent and the package that it imports."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    shutil.copy(PROGRAMS / "agent.mjs", folder)
    return folder


@pytest.fixture
def folder(node_folder: Path) -> Path:
    shutil.rmtree(node_folder / "agl-runs", ignore_errors=True)
    return node_folder


def calculates(body: dict) -> Reply:
    last = body["messages"][-1]
    return (
        Reply(last["content"]) if last["role"] == "tool" else Reply(None, (("calculator", {"expression": "12 * 3"}),))
    )


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(calculates) as running:
        yield running


@pytest.mark.parametrize("words", [(), ("--stream",)], ids=["whole", "stream"])
def test_a_program_on_its_own_model_is_recorded(words: tuple[str], provider: Provider, folder: Path) -> None:
    plain = subprocess.run(
        ["node", "agent.mjs", "What is 12 * 3?", *words], cwd=folder, env=environment(provider), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    untraced = [(s.path, s.body["messages"][0]) for s in provider.seen]
    provider.seen.clear()
    done = launch(folder, environment(provider), "--", "node", "agent.mjs", "What is 12 * 3?", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert [(s.path, s.body["messages"][0]) for s in provider.seen] == untraced
    assert all(s.headers["authorization"] == f"Bearer {OPENAI_KEY}" for s in provider.seen)
    assert all("OpenAI/JS" in s.headers["user-agent"] for s in provider.seen)
    spans = trace(folder)
    assert outline(spans) == ["agent agent", "  chat", "  tool calculator", "  chat"]
    tool = next(s["attributes"] for s in spans if s["attributes"][semconv.OPERATION_NAME] == semconv.EXECUTE_TOOL)
    assert (tool[semconv.TOOL_CALL_ARGUMENTS], tool[semconv.TOOL_CALL_RESULT]) == ('{"expression": "12 * 3"}', "36")
    assert facts(folder)["input_tokens"] == 14
    assert "36" in chats(spans)[1]["attributes"][semconv.OUTPUT_MESSAGES]
    assert not holds(folder / "agl-runs", OPENAI_KEY)
    shown = show(folder, "trace", "show", listed(folder)[0]["rollout_id"])
    assert "[calculator]" in shown


@pytest.mark.parametrize("words", [(), ("--stream",)], ids=["whole", "stream"])
def test_a_program_gets_another_system_prompt_and_no_other_byte_changes(
    words: tuple[str], provider: Provider, folder: Path
) -> None:
    command = ("--", "node", "agent.mjs", "What is 12 * 3?", *words)
    plain = launch(folder, environment(provider), *command)
    own = [s.raw for s in provider.seen]
    provider.seen.clear()
    provider.ids = itertools.count(1)
    save_prompts(folder / "agl-runs", {"p": agl.SystemPrompt("agent", 'Use\n"it".', "Use the calculator.")})
    done = launch(folder, environment(provider), "--prompts", "agl-runs", *command)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    old, new = b'"content":"Use the calculator."', b'"content":"Use\\n\\"it\\"."'
    assert [s.raw for s in provider.seen] == [raw.replace(old, new) for raw in own] != own
    assert facts(folder)["unused_prompts"] == []


def test_what_the_provider_refuses_is_recorded_without_the_key(provider: Provider, folder: Path) -> None:
    provider.script = lambda body: Reply(status=429)
    done = launch(folder, environment(provider), "--", "node", "agent.mjs", "What is 12 * 3?")
    assert done.returncode == 1
    assert "429" in done.stderr, "the program's own error"
    (chat,) = chats(trace(folder))
    assert "scripted 429" in chat["status_message"]
    assert not holds(folder / "agl-runs", OPENAI_KEY)


def test_a_provider_that_cannot_be_reached(provider: Provider, folder: Path) -> None:
    env = environment(provider, OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    done = launch(folder, env, "--", "node", "agent.mjs", "What is 12 * 3?")
    assert done.returncode == 1
    (chat,) = chats(trace(folder))
    assert "could not reach http://127.0.0.1:9/v1" in chat["status_message"]


def test_the_url_is_the_programs_alone_and_ends_with_it(provider: Provider, folder: Path) -> None:
    (folder / "url.mjs").write_text("""
const url = process.env.OPENAI_BASE_URL;
const other = url.replace(/keys\\/[^/]+/, "keys/guess");
const body = JSON.stringify({ model: "m", messages: [{ role: "user", content: "hi" }] });
const answer = await fetch(`${other}/chat/completions`, { method: "POST", body });
console.log(url);
console.log(answer.status);
""")
    done = launch(folder, environment(provider), "--", "node", "url.mjs")
    url, status = done.stdout.split()
    assert status == "401"
    assert provider.seen == []
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models", timeout=5)


def test_a_policy_answers(untrained_model: Path, provider: Provider, folder: Path) -> None:
    words = ("--model", untrained_model, "--agent", "solver")
    done = launch(folder, environment(provider), *words, "--", "node", "agent.mjs", "What is 12 * 3?")
    assert done.returncode == 0, done.stderr
    assert provider.seen == []
    rollout = facts(folder)["rollout_id"]
    assert outline(trace(folder))[:2] == ["agent solver", "  chat"]
    assert "agent solver  policy policy v0" in show(folder, "explain", rollout)
    assert not holds(folder / "agl-runs", OPENAI_KEY)


@pytest.mark.slow
@pytest.mark.night
def test_an_agent_in_node_learns(tiny_policy: Path, folder: Path, tmp_path: Path, no_process_left: None) -> None:
    agent = agl.CommandAgent(["node", "agent.mjs"], name="solver", reward=exact_answer, cwd=folder)
    algorithm = agl.GRPO(
        model=str(tiny_policy), group_size=8, batch_size=8, steps=6, learning_rate=5e-4, betas=(0.9, 0.95),
        max_response_tokens=48, max_context=256, val_every=6, max_batch=64,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=8, directory=tmp_path / "run", progress=False)
    tasks = arithmetic_tasks(256, seed=0, split="train")
    result = trainer.fit(agent, tasks, arithmetic_tasks(64, seed=0, split="heldout"))
    validations = [h["val/reward"] for h in result.history if "val/reward" in h]
    assert validations[-1] - validations[0] >= 0.2, validations
    steps = [h for h in result.history if h["step"] > 0]
    assert all(h["train/failed_rollouts"] == 0 for h in steps)
    assert all(h["train/forks"] == 0 for h in steps), "its histories continue token for token"
