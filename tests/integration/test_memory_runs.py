"""What a run's rollouts remember: one frozen version per step, wherever they run, honest about what may be found."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from processes import free_port

import agl
from agl.agents.agent import as_agent
from agl.agents.memory import MemoryUse
from agl.errors import AglError, ConfigError, RolloutError
from agl.testing.provider import Reply, last_said, serve
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.policies.frozen import FrozenPolicy
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.runners.remote.worker import run_worker
from agl.trainer.store import open_store
from agl.trainer.store.types import MemoryEntry

RUNNERS = ["local", "process", pytest.param("ray", marks=pytest.mark.night)]


@pytest.fixture(params=RUNNERS)
def runners(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("one_ray")
    return request.param


@dataclass
class InSteps(Algorithm):
    """An algorithm that runs the tasks whose field "step" says so in each step, and trains nothing.

    Attributes:
        outputs: of each step, in the order of the tasks: what the agents have found. rollouts: likewise, as stored.
    """

    steps: int = 1
    group_size: int = 1
    versions: dict[str, int] = field(default_factory=dict)
    outputs: list[list[Any]] = field(default_factory=list)
    rollouts: list[list[Any]] = field(default_factory=list)
    interrupt: int | None = None

    async def run(self, run: Run) -> None:
        await run.begin(self.steps)
        workplace = Workplace(run)
        try:
            if run.resume:
                await workplace.resume_from(self.interrupt or 0, {}, sampled=False)
            await workplace.start(lambda mode: SamplingRules(), "", routed=False)
            for step in range(self.interrupt or 0 if run.resume else 0, self.steps):
                if step == self.interrupt and not run.resume:
                    raise RuntimeError("killed")
                await self._some(workplace, run.train, "train", step)
                if run.val:
                    await self._some(workplace, run.val, "val", step + 1)
        finally:
            await workplace.stop()

    async def _some(self, workplace: Workplace, tasks: Sequence[Any], mode: Any, step: int) -> None:
        chosen = [(i, t) for i, t in enumerate(tasks) if mode == "val" or t["step"] == step]
        results = await workplace.rollouts(chosen, mode=mode, step=step, group_size=self.group_size)
        spans = [await workplace.run.store.query_spans(r.rollout.rollout_id) for r in results]
        self.outputs.append(
            [next((s.attributes.get("agl.output") for s in own if s.parent_id is None), None) for own in spans]
        )
        self.rollouts.append([r.rollout for r in results])

    async def dev(self, run: Run, n_tasks: int) -> None:
        await self.run(run)


def remembering(memory: Any) -> Any:
    @agl.rollout(name="notes", memory=memory)
    def notes(task: Any) -> agl.Outcome:
        [recall, remember] = agl.memory.tools()
        found = recall(task["ask"]) if "ask" in task else ""
        if "say" in task:
            remember(task["say"])
        if task.get("raise"):
            raise ValueError("the tool is broken")
        return agl.Outcome(task.get("reward", 1.0), found)

    return notes


def fit(
    algorithm: InSteps, agent: Any, tasks: list[Any], directory: Path, *, resume: bool = False, **options: Any
) -> None:
    val = options.pop("val", None)
    trainer: Any = agl.Trainer
    options = {"n_workers": 2, "max_attempts": 1, "progress": False, "directory": directory} | options
    trainer(algorithm, **options).fit(agent, tasks, val, resume=resume)


def test_remote_runners_read_it_from_the_run(tmp_path: Path) -> None:
    agent, port = remembering(agl.Memory().per("agent")), free_port()

    async def both() -> InSteps:
        stop, algorithm = asyncio.Event(), InSteps(2)
        worker = asyncio.ensure_future(run_worker(as_agent(agent), f"http://127.0.0.1:{port}", key="k", until=stop))
        tasks = [{"step": 0, "say": TEA}, {"step": 1, "ask": ASKED}]
        await asyncio.to_thread(fit, algorithm, agent, tasks, tmp_path, runners="remote", runner_key="k", port=port)
        stop.set()
        await worker
        return algorithm

    assert asyncio.run(both()).outputs == [[""], [f'- "{TEA}"']]


def stated(directory: Path) -> list[MemoryEntry]:
    """What the run in a directory has remembered, all versions together."""

    async def read() -> list[MemoryEntry]:
        store = await open_store(str(directory / "run.db"))
        [run] = await store.query_runs()
        try:
            return await store.query_memories(run.run_id)
        finally:
            await store.close()

    return asyncio.run(read())


TEA, MILK = "customer C-417 prefers tea", "customer C-512 prefers milk"
ASKED = "What does C-417 prefer?"


def test_what_a_rollout_notes_later_steps_find(runners: Any, tmp_path: Path) -> None:
    memory, algorithm = agl.Memory(), InSteps(3)
    said = [{"step": 0, "say": TEA}, {"step": 0, "say": MILK}, {"step": 0, "ask": ASKED}]
    later = [{"step": 1, "ask": ASKED}, {"step": 2, "ask": ASKED, "n": 1}]
    fit(algorithm, remembering(memory.per("agent")), said + later, tmp_path, runners=runners)
    assert algorithm.outputs[0] == ["", "", "nothing found"], "the step itself reads what was there before it"
    assert algorithm.outputs[1:] == [[f'- "{TEA}"']] * 2
    [first, *_], [second], _ = algorithm.rollouts
    assert first.metadata["memory"] == {"snapshot": f"{first.run_id}@0", "mode": "on"}
    assert second.metadata["memory"]["snapshot"] == f"{first.run_id}@1"
    assert {hit.text for hit in memory.search(("notes",))} == {TEA, MILK}, "what was learned is the memory's now"
    assert [hit.text for hit in memory.search(query="C-417")] == [TEA]


def test_a_search_is_a_span_with_ids_scores_and_the_snapshot(tmp_path: Path) -> None:
    memory = agl.Memory()
    memory.put(("notes",), "tea", {"text": TEA})
    algorithm = InSteps(1)
    fit(algorithm, remembering(memory.per("agent")), [{"step": 0, "ask": ASKED}], tmp_path)

    async def spans() -> Any:
        store = await open_store(str(tmp_path / "run.db"))
        try:
            return await store.query_spans(algorithm.rollouts[0][0].rollout_id)
        finally:
            await store.close()

    [search] = [s.attributes for s in asyncio.run(spans()) if s.name == "memory search"]
    assert search["agl.memory.snapshot"] == algorithm.rollouts[0][0].metadata["memory"]["snapshot"]
    assert list(search["agl.memory.keys"]) == ["notes/tea"]
    assert search["agl.memory.scores"] == pytest.approx([1.1]), "1 x relevance + 0.1 x recency, of the only entry"
    assert search["agl.memory.query"] == ASKED


def test_nothing_of_the_same_task_is_found(tmp_path: Path) -> None:
    """The answer is planted by the task's own rollouts, in an earlier step and by its siblings."""
    algorithm = InSteps(2, group_size=2)
    planted = {"ask": ASKED, "say": TEA}
    fit(
        algorithm,
        remembering(agl.Memory().per("agent")),
        [{"step": 0, **planted}, {"step": 1, **planted}],
        tmp_path / "other",
    )
    assert algorithm.outputs[1] == [f'- "{TEA}"'] * 2, "the field step makes it another task"

    class Again(InSteps):
        async def _some(self, workplace: Workplace, tasks: Sequence[Any], mode: Any, step: int) -> None:
            results = await workplace.rollouts([(0, tasks[0])], mode="train", step=step)
            spans = await workplace.run.store.query_spans(results[0].rollout.rollout_id)
            self.outputs.append([s.attributes.get("agl.output") for s in spans if s.parent_id is None])

    again = Again(3)
    fit(again, remembering(agl.Memory().per("agent")), [planted], tmp_path / "same")
    assert again.outputs == [["nothing found"]] * 3
    assert [entry.text for entry in stated(tmp_path / "same")] == [TEA], "it is there"


def test_validation_writes_nothing_and_failures_write_nothing(tmp_path: Path) -> None:
    memory, algorithm = agl.Memory(), InSteps(2)
    train = [{"step": 0, "say": TEA, "raise": True}, {"step": 0}, {"step": 1, "ask": "C-417 C-512"}]
    fit(algorithm, remembering(memory.per("agent")), train, tmp_path, val=[{"say": MILK}, {"ask": "C-417 C-512"}])
    assert algorithm.outputs[2] == ["nothing found"]
    assert algorithm.outputs[1] == algorithm.outputs[3] == ["", "nothing found"]
    assert stated(tmp_path) == []
    assert len(memory) == 0


def test_a_validation_reads_what_training_has_left(tmp_path: Path) -> None:
    algorithm = InSteps(1)
    fit(algorithm, remembering(agl.Memory().per("agent")), [{"step": 0, "say": TEA}], tmp_path, val=[{"ask": ASKED}])
    assert algorithm.outputs == [[""], [f'- "{TEA}"']]


def test_a_resumed_run_reads_what_the_stopped_one_read(tmp_path: Path) -> None:
    tasks: list[Any] = [
        {"step": s, "say": f"note {s} of C-{s}", "ask": "note", "n": n} for s in range(4) for n in range(3)
    ]

    def outputs(directory: Path, stop: bool) -> tuple[list[Any], list[Any]]:
        memory = agl.Memory(keep=5)
        agent = remembering(memory.per("agent"))
        algorithm = InSteps(4)
        if stop:
            first = InSteps(4, interrupt=2)
            with pytest.raises(RuntimeError, match="killed"):
                fit(first, agent, tasks, directory)
            # Of step 3, which a killed run had begun, some was merged.
            algorithm = InSteps(4, interrupt=2, outputs=first.outputs)
        fit(algorithm, agent, tasks, directory, resume=stop)
        found = [(e.namespace, e.key, e.text, e.since) for e in stated(directory)]
        return algorithm.outputs, found

    assert outputs(tmp_path / "whole", False) == outputs(tmp_path / "stopped", True)


def test_what_a_stopped_run_wrote_too_much_is_forgotten(tmp_path: Path) -> None:
    tasks = [{"step": s, "say": f"note {s}", "ask": "note"} for s in range(3)]
    algorithm = InSteps(3)
    agent = remembering(agl.Memory().per("agent"))
    fit(algorithm, agent, tasks, tmp_path)
    again = InSteps(3, interrupt=1)
    fit(again, agent, tasks, tmp_path, resume=True)
    assert again.outputs == algorithm.outputs[1:], "rollouts of step 2 do not see what they wrote before"


@pytest.mark.parametrize(("mode", "found"), [("on", TEA), ("off", "nothing found"), ("shuffled", MILK)])
def test_the_ablation_changes_what_is_found_alone(mode: Any, found: str, tmp_path: Path) -> None:
    memory = agl.Memory()
    for key, text in (("tea", TEA), ("milk", MILK)):
        memory.put(("notes",), key, {"text": text})
    algorithm = InSteps(1)
    use = MemoryUse(memory, "agent", mode)
    fit(algorithm, remembering(use), [{"step": 0, "ask": "C-417"}], tmp_path)
    assert algorithm.outputs == [[found if mode == "off" else f'- "{found}"']]


@pytest.mark.night
def test_an_evaluation_loads_a_policy_once_for_all_modes(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    load = FrozenPolicy.load

    async def recorded(*args: Any, **options: Any) -> FrozenPolicy:
        assert all(policy.engine.process.returncode is not None for policy in loaded), "one is gone before the next"
        loaded.append(await load(*args, **options))
        return loaded[-1]

    @agl.rollout(memory=agl.Memory().per("agent"))
    def clerk(task: Any, llm: agl.LLM) -> float:
        client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}], max_tokens=2)
        return 1.0

    monkeypatch.setattr(FrozenPolicy, "load", recorded)
    other = shutil.copytree(untrained_model, tmp_path / "other")
    policies = {"a": untrained_model, "b": other}
    report = agl.evaluate(clerk, ["hello"], policies, directory=tmp_path / "e", progress=False)
    assert len(report.policies) == 6
    assert len(loaded) == 2


def test_agents_and_customers_have_their_own(tmp_path: Path) -> None:
    algorithm = InSteps(2)
    tasks = [{"step": 0, "say": TEA, "customer": "a"}, *({"step": 1, "ask": ASKED, "customer": c} for c in "ab")]
    fit(algorithm, remembering(agl.Memory().per("customer")), tasks, tmp_path)
    assert algorithm.outputs[1] == [f'- "{TEA}"', "nothing found"]
    with pytest.raises(AglError, match="no field 'customer'"):
        fit(Raising(1), remembering(agl.Memory().per("customer")), [{"step": 0, "ask": "x"}], tmp_path / "none")


def test_the_best_episode_of_a_task_is_kept_redacted(tmp_path: Path) -> None:
    """Episodes come from the calls of an agent's own model, too."""

    def script(body: dict[str, Any]) -> Reply:
        return Reply(f"noted: {last_said(body)[1][-3:]}")

    def redact(text: str) -> str:
        return text.replace("secret", "[...]")

    with serve(script) as provider:

        @agl.rollout(name="clerk", memory=(memory := agl.Memory(redact=redact)).per("agent"))
        def clerk(task: Any, rollout: agl.RolloutInfo) -> float:
            client = OpenAI(base_url=provider.url, api_key="none")
            said = f"{task['q']} secret {'tea' if task['step'] == 0 else 'ice'}"
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": said}])
            return 1.0 if task["step"] == 0 else 0.0

        fit(InSteps(2, group_size=2), clerk, [{"step": 0, "q": "a"}, {"step": 1, "q": "a"}], tmp_path)
    first, second = memory.search(("clerk",))
    assert first.value == {"input": "a [...] tea", "output": "noted: tea", "reward": 1.0}
    assert first.text == "a [...] tea\nnoted: tea"
    assert second.value["reward"] == 0.0
    assert memory.search(query="secret") == []


@pytest.mark.night
def test_a_run_that_does_not_know_of_the_memory_says_so(tmp_path: Path) -> None:
    module = tmp_path / "forgetful.py"
    module.write_text(
        "import agl\n@agl.rollout(memory=agl.Memory())\ndef agent(task):\n    return float(not agl.memory.search())\n"
    )
    with pytest.raises(ConfigError, match="has a memory, of which its run does not know"):
        fit(Raising(), f"{module}:agent", [{"step": 0}], tmp_path / "run", runners="process")
    with pytest.raises(ConfigError, match="needs the texts"):
        fit(InSteps(), remembering(agl.Memory()), [{"step": 0}], tmp_path / "silent", capture_content=False)


class Raising(InSteps):
    """It ends with the error of its first rollout."""

    async def _some(self, workplace: Workplace, tasks: Sequence[Any], mode: Any, step: int) -> None:
        results = await workplace.rollouts([(0, tasks[0])], mode="train", step=step)
        if results[0].error is not None:
            raise results[0].error


def test_a_broken_embedding_ends_the_attempt(tmp_path: Path) -> None:
    def embed(texts: Sequence[str]) -> Any:
        raise OSError("the endpoint is down")

    with pytest.raises(RolloutError, match="the memory cannot be read: OSError: the endpoint is down"):
        fit(Raising(), remembering(agl.Memory(embed=embed)), [{"step": 0, "ask": "x"}], tmp_path)


def test_a_memory_that_the_agent_was_not_given_is_refused(tmp_path: Path) -> None:
    other = agl.Memory()

    @agl.rollout
    def sneaky(task: Any) -> float:
        other.put(("a",), "k", {"v": 1})
        return 1.0

    with pytest.raises(RolloutError, match="in a rollout of an agent that has none"):
        fit(Raising(), sneaky, [{"step": 0}], tmp_path)


def test_of_ten_thousand_episodes_the_important_survive() -> None:
    memory = agl.Memory(keep=1000)
    # One in ten earned a reward, in no order.
    rewards = [float(i * 7919 % 10 == 0) for i in range(10_000)]
    memory.put_all(((("e",), str(i), f"episode {i}", None, reward) for i, reward in enumerate(rewards)))
    kept = memory.entries()
    assert len(kept) == 1000
    assert all(entry.reward == 1.0 for entry in kept)
    assert [hit.text for hit in memory.search(("e",), query="episode 4990", limit=1)] == ["episode 4990"]
    memory.put(("e",), "rule", "always be polite")
    memory.put_all((("e",), f"new {i}", f"episode new {i}", None, 1.0) for i in range(2000))
    kept = memory.entries()
    assert [entry.key for entry in kept if entry.reward is None] == ["rule"], "what no rollout wrote goes last"
    assert len(kept) == 1000
    assert all(entry.key.startswith("new") for entry in kept if entry.reward is not None), "of equals the newest stay"
