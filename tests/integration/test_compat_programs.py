"""Programs as users of Agent Lightning 0.3 wrote them train on agl: rows, gradients, tools, routing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from paths import pythonpath

pytest.importorskip("agent_framework")
pytest.importorskip("agent_framework_openai")

import habits
from openai import AsyncOpenAI, OpenAI
from verl_config import CONFIG

import agl.compat as al
from agl.errors import NoAgentMatchedError
from agl.testing.provider import Reply, serve
from agl.trainer.store import open_store

pytestmark = pytest.mark.slow

CALL = habits.tool_call("calculate", '{"expression": "2 + 2"}')
MATH = "Use the calculator. Answer after ###."
SERVE = "Serve the customer."


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is right about half of the time in each of the programs below."""
    tool = {"type": "function", "function": {"name": "calculate", "description": "", "parameters": {}}}
    sums: list[dict[str, Any]] = [{"role": "system", "content": MATH}, {"role": "user", "content": "2 + 2"}]
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {
        "name": "calculate", "arguments": '{"expression": "2 + 2"}'}}]}  # fmt: skip
    served = [{"role": "system", "content": SERVE}, {"role": "user", "content": "cancel"}]
    situations = [
        habits.Situation([{"role": "user", "content": "yes or no"}], ("yes", "no")),
        habits.Situation(sums, (CALL, "### 5"), [tool]),
        habits.Situation([*sums, called, {"role": "tool", "content": "4"}], ("### 4",), [tool]),
        habits.Situation(served, ("done", "never")),
    ]
    return habits.make(tmp_path_factory.mktemp("habits"), situations, max_context=1024)


def config(policy: Path, *, steps: int = 2, tasks: int = 2, group: int = 6) -> dict[str, Any]:
    rollout = {**CONFIG["actor_rollout_ref"]["rollout"], "n": group, "temperature": 1.0}
    return {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": tasks, "max_prompt_length": 512, "max_response_length": 64},
        "actor_rollout_ref": {
            "rollout": rollout,
            "actor": {"ppo_mini_batch_size": tasks, "optim": {"lr": 1e-3}, "clip_ratio_high": 0.3},
            "model": {"path": str(policy), "use_remove_padding": True},
        },
        "trainer": {"n_gpus_per_node": 1, "nnodes": 1, "logger": ["console"], "test_freq": 2, "total_epochs": steps},
    }


def facts(directory: Path) -> dict[str, Any]:
    """What a run left in its store."""

    async def read() -> dict[str, Any]:
        store = await open_store(str(directory / "run.db"))
        rollouts = await store.query_rollouts(mode="train")
        calls = [c for r in rollouts for c in await store.query_calls(r.rollout_id)]
        spans = [s for r in rollouts for s in await store.query_spans(r.rollout_id)]
        trained = [t for r in rollouts for t in await store.query_trained_calls(r.rollout_id)]
        await store.close()
        return {"rollouts": rollouts, "calls": calls, "spans": spans, "trained": trained}

    return asyncio.run(read())


def test_a_function_agent_under_verl(policy: Path, tmp_path: Path) -> None:
    @al.rollout
    def agent(task: dict[str, str], llm: al.LLM) -> float:
        client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        said = client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["q"]}],
            temperature=llm.sampling_parameters["temperature"],
        )
        return float(said.choices[0].message.content == "yes")

    trainer = al.Trainer(algorithm=al.VERL(config(policy, steps=3)), n_runners=2, directory=tmp_path / "run", seed=1)
    tasks = [{"q": "yes or no"}, {"q": "yes or no"}]
    result = trainer.fit(agent, tasks, tasks)
    steps = [h for h in result.history if h["step"] > 0]
    assert len(steps) == 3
    assert all(h["train/rows"] == 12 for h in steps)
    assert max(h["learner/grad_norm"] for h in steps if "learner/grad_norm" in h) > 0
    assert [h["step"] for h in result.history if "val/reward" in h] == [0, 2, 3]
    assert result.policy is not None


PROGRAM = """
import asyncio, json, os, re, sys
from typing import TypedDict

from agent_framework import Agent, MCPStdioTool
from agent_framework.lab.lightning import AgentFrameworkTracer
from agent_framework.openai import OpenAIChatClient
from agl.compat import LLM, Dataset, Trainer, rollout
from agl.compat.algorithm.verl import VERL


class Problem(TypedDict):
    question: str
    result: str


@rollout
async def math_agent(task: Problem, llm: LLM) -> float:
    async with (
        MCPStdioTool(name="calculator", command=sys.executable, args=[os.environ["CALCULATOR"]],
                     load_prompts=False) as server,
        Agent(
            client=OpenAIChatClient(model=llm.model, api_key="dummy", base_url=llm.endpoint),
            name="MathAgent",
            instructions=os.environ["INSTRUCTIONS"],
            default_options={"temperature": llm.sampling_parameters.get("temperature", 0.0)},
        ) as agent,
    ):
        result = await agent.run(task["question"], tools=server)
        found = re.search(r"###\\s*(.+?)$", result.messages[-1].text)
        return float(found is not None and found.group(1) == task["result"])


config = json.loads(os.environ["CONFIG"])
trainer = Trainer(algorithm=VERL(config), tracer=AgentFrameworkTracer(), n_workers=2, directory=os.environ["DIRECTORY"])
tasks = [Problem(question="2 + 2", result="4")]
trainer.fit(math_agent, tasks, val_dataset=tasks)
"""


CALCULATOR = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> str:
    """The sum of two numbers, written "a + b"."""
    left, right = expression.split("+")
    return str(int(left) + int(right))


server.run()
'''


def from_index(package: str, into: Path) -> Path:
    """A package's files, as its index has them; skips where there is none to ask."""
    get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(into)]
    done = subprocess.run([*get, package], capture_output=True, text=True, timeout=300)
    wheels = list(into.glob(f"{package.replace('-', '_')}*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"{package} cannot be had from the package index")
    zipfile.ZipFile(wheels[0]).extractall(into / "files")
    return into / "files"


@pytest.mark.night
def test_the_lab_packages_tracer_and_an_mcp_calculator(policy: Path, tmp_path: Path) -> None:
    """The official maths sample's shape, with the lab package as it is on the index: it imports `agentlightning`."""
    import json

    import agent_framework

    pytest.importorskip("mcp.server.mcpserver")
    files = from_index("agent-framework-lab", tmp_path / "index")
    # The lab's modules lie inside the framework's package, which is installed elsewhere.
    for entry in Path(agent_framework.__file__).parent.iterdir():
        target = files / "agent_framework" / entry.name
        if not target.exists():
            target.symlink_to(entry)
    program, calculator = tmp_path / "train.py", tmp_path / "calculator.py"
    program.write_text(PROGRAM)
    calculator.write_text(CALCULATOR)
    environment = {
        **os.environ,
        "PYTHONPATH": pythonpath(files),
        "CONFIG": json.dumps(config(policy, tasks=1, group=8)),
        "INSTRUCTIONS": MATH,
        "CALCULATOR": str(calculator),
        "DIRECTORY": str(tmp_path / "run"),
    }
    run = [sys.executable, "-m", "agl.compat", str(program)]
    done = subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the verl config is trained as GRPO on this machine" in done.stderr
    found = facts(tmp_path / "run")
    assert {c.agent for c in found["calls"]} == {"MathAgent"}
    tools = [s for s in found["spans"] if s.operation == "execute_tool"]
    assert tools
    assert all("4" in str(s.attributes["gen_ai.tool.call.result"]) for s in tools if s.status != "error")
    assert any(t.advantage != 0 and t.tokens > 0 for t in found["trained"])
    assert max(t.policy_version for t in found["trained"]) >= 1


class Assistant(al.LitAgent[dict]):
    """Two agents without names in a workflow; the executors' ids say who is who. The user simulator has a provider."""

    url = ""
    names: tuple[str | None, str | None] = (None, None)

    async def rollout_async(self, task: Any, resources: al.NamedResources, rollout: al.Rollout) -> float:
        from agent_framework import Agent, AgentExecutor, AgentExecutorRequest, Message, WorkflowBuilder
        from agent_framework.openai import OpenAIChatClient

        llm = resources.get("main_llm")
        assert isinstance(llm, al.LLM)
        policy = OpenAIChatClient(base_url=llm.endpoint, api_key="sk-user", model=llm.model)
        frozen = OpenAIChatClient(base_url=self.url, api_key="sk-user", model="gpt-4.1")
        user = AgentExecutor(Agent(client=frozen, instructions="Be a user.", name=self.names[0]), id="user_simulator")
        server = Agent(client=policy, instructions=SERVE, name=self.names[1])
        assistant = AgentExecutor(server, id="assistant_agent", context_mode="last_agent")
        workflow = WorkflowBuilder(start_executor=user, output_from=[assistant]).add_edge(user, assistant).build()
        asked = AgentExecutorRequest(messages=[Message(role="user", contents=["start"])], should_respond=True)
        events = await workflow.run(asked)
        return float(events.get_outputs()[-1].text == "done")


def test_a_class_agent_with_a_frozen_user_simulator(policy: Path, tmp_path: Path) -> None:
    """The official tau2 sample's shape: `trained_agents` names the one executor whose agent is trained."""
    agent = Assistant(trained_agents="^assistant_agent$")
    from agl.adapters.agent_framework import AgentFrameworkTracer

    with serve(lambda body: Reply("cancel")) as provider:
        agent.url = provider.url
        trainer = al.Trainer(
            algorithm=al.VERL(config(policy, tasks=1, group=8)), tracer=AgentFrameworkTracer(), n_workers=4,
            directory=tmp_path / "run",
        )  # fmt: skip
        result = trainer.fit(agent, [{"id": 1}], val_dataset=[{"id": 2}])
    found = facts(tmp_path / "run")
    assert {c.agent for c in found["calls"]} == {"assistant_agent"}
    assert {s.agent for s in found["spans"] if s.operation == "chat"} == {"assistant_agent", "user_simulator"}
    assert {s.headers["authorization"] for s in provider.seen} == {"Bearer sk-user"}
    assert {s.body["model"] for s in provider.seen} == {"gpt-4.1"}
    assert any(t.advantage != 0 for t in found["trained"])
    assert result.history[-1]["policy_version"] >= 1


def test_agents_with_names_are_found_by_the_ids_of_their_executors(policy: Path, tmp_path: Path) -> None:
    agent = Assistant()
    agent.names = ("Uma", "Ann")
    with serve(lambda body: Reply("cancel")) as provider:
        agent.url = provider.url
        trainer = al.Trainer(
            algorithm=al.VERL(config(policy, tasks=1, group=2)), directory=tmp_path / "run",
            adapter={"agent_match": "assistant_agent"},
        )  # fmt: skip
        trainer.dev(agent, [{"id": 1}])
        assert len(provider.seen) == 1


def test_a_reward_that_is_emitted_twice_counts_once(policy: Path, tmp_path: Path) -> None:
    """Calc-X's pattern: `@reward` on the evaluation, and `emit_reward` of its result."""

    @al.reward.reward
    async def evaluate(answer: str) -> float:
        return float(answer == "yes")

    @al.rollout
    async def agent(task: dict[str, str], llm: al.LLM) -> None:
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            said = await client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": task["q"]}], temperature=1.0
            )
        al.emit_reward(await evaluate(said.choices[0].message.content or ""))

    algorithm = al.VERL(config(policy, steps=1, tasks=1, group=8))
    trainer = al.Trainer(algorithm=algorithm, n_runners=2, directory=tmp_path / "run", seed=1)
    trainer.fit(agent, [{"q": "yes or no"}])
    assert {t.return_ for t in facts(tmp_path / "run")["trained"]} == {0.0, 1.0}


def test_a_filter_that_matches_nobody_names_who_spoke(policy: Path, tmp_path: Path) -> None:
    agent = Assistant()
    with serve(lambda body: Reply("cancel")) as provider:
        agent.url = provider.url
        trainer = al.Trainer(
            algorithm=al.VERL(config(policy, tasks=1, group=2)), n_workers=2, directory=tmp_path / "run",
            adapter=al.TracerTraceToTriplet(agent_match="writer"),
        )  # fmt: skip
        with pytest.raises(NoAgentMatchedError, match="assistant_agent"):
            trainer.dev(agent, [{"id": 1}])
