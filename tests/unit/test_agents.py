"""What a runner can run: functions with injected arguments, classes, wrapped agents; the errors for anything else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedRollouts

import agl
from agl import LLM, LitAgent, PromptTemplate, RolloutInfo
from agl.agents.agent import Agent, Outcome, as_agent, scored
from agl.agents.resources import NamedResources, Task, as_tasks
from agl.errors import ConfigError

MODEL = LLM("http://gateway/v1", "m", "key", {"temperature": 0.5})
RESOURCES: NamedResources = {"llm": MODEL, "greeting": PromptTemplate("Hello {name}")}
INFO = RolloutInfo("ro-1", 2, "train", 7)


def run(value: Any, task: Any = "task", resources: NamedResources = RESOURCES, info: RolloutInfo = INFO) -> Outcome:
    agent = as_agent(value)
    result: Any = agent.run(task, resources, info)
    return asyncio.run(result) if agent.is_async else result


def test_arguments_are_given_by_name() -> None:
    @agl.rollout
    def agent(task, llm, prompt_template, resources, rollout) -> float:
        assert (task, llm, prompt_template, resources, rollout) == (
            "task", MODEL, RESOURCES["greeting"], RESOURCES, INFO,
        )  # fmt: skip
        return 1.0

    assert run(agent) == Outcome(1.0, 1.0)


def test_arguments_are_given_by_annotation_and_the_first_one_left_is_the_task() -> None:
    @agl.rollout
    def agent(problem: dict, model: LLM, hello: PromptTemplate, info: RolloutInfo, tries: int = 3) -> str:
        return f"{problem} {model.model} {hello.format(name='you')} {info.step} {tries}"

    assert run(agent).output == "task m Hello you 7 3"


def test_a_function_agent_may_be_async_named_and_still_called() -> None:
    @agl.rollout(name="solver", error_reward=-1.0)
    async def agent(task: str) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"reward": float(len(task))}

    got = as_agent(agent)
    assert (got.name, got.is_async, got.error_reward) == ("solver", True, -1.0)
    assert run(agent).reward == {"reward": 4.0}
    assert asyncio.run(agent("xy")) == {"reward": 2.0}
    assert agent.__name__ == "agent"


def test_none_means_that_rewards_were_emitted() -> None:
    assert run(agl.rollout(lambda task: None)) == Outcome(None, None)


def test_a_plain_function_needs_no_decorator() -> None:
    def solve(task: str, llm: LLM) -> float:
        return 0.5

    assert (as_agent(solve).name, run(solve).reward) == ("solve", 0.5)


def test_an_argument_that_nothing_can_be_given_for() -> None:
    with pytest.raises(ConfigError, match="agent 'f' has an argument 'temperature' that agl cannot fill") as caught:

        @agl.rollout
        def f(task: str, temperature: float) -> float: ...

    assert "task, llm, prompt_template, resource, resources, rollout" in str(caught.value)
    with pytest.raises(ConfigError, match="agent 'g' takes 'task' by position only"):

        @agl.rollout
        def g(task: str, /) -> float: ...


def test_a_resource_is_found_by_name_or_as_the_only_one_of_its_kind() -> None:
    @agl.rollout
    def agent(task: Any, judge: LLM) -> str:
        return judge.model

    judge = LLM("http://judge/v1", "j")
    assert run(agent, resources={"llm": MODEL, "judge": judge}).output == "j"
    assert run(agent, resources={"llm": MODEL}).output == "m"
    with pytest.raises(ConfigError, match=r"asks for 'judge' \(LLM\), but the resources are a, b"):
        run(agent, resources={"a": MODEL, "b": judge})
    with pytest.raises(ConfigError, match="but the resources are empty") as caught:
        run(agent, resources={})
    assert "initial_resources" in str(caught.value)


class Sync(LitAgent):
    def rollout(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> float:
        return 1.0

    def validation_rollout(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> float:
        return 2.0


class Async(LitAgent):
    name = "by name"

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> float:
        return 1.0

    async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: RolloutInfo) -> float:
        return 3.0


@pytest.mark.parametrize(("agent", "name", "rewards"), [(Sync(), "Sync", (1.0, 2.0)), (Async(), "by name", (3.0, 1.0))])
def test_a_class_has_a_training_and_a_validation_form(agent: LitAgent, name: str, rewards: tuple[float, float]) -> None:
    assert as_agent(agent).name == name
    assert run(agent, info=RolloutInfo("ro", 1, "train")).reward == rewards[0]
    assert run(agent, info=RolloutInfo("ro", 1, "val")).reward == rewards[1]


FORMS = list(itertools.permutations(["task", "resources", "rollout"]))


def form(names: Sequence[str], *, is_async: bool = False) -> Any:
    """A method of these arguments that returns how many of them have the value that they are named for."""
    space: dict[str, Any] = {"RESOURCES": RESOURCES, "INFO": INFO}
    checks = "(task == 'task') + (resources == RESOURCES) + (rollout == INFO)"
    exec(f"{'async ' if is_async else ''}def rollout(self, {', '.join(names)}): return {checks}", space)
    return space["rollout"]


@pytest.mark.parametrize("names", FORMS, ids=", ".join)
@pytest.mark.parametrize("mode", ["", "training_", "validation_"])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_forms_of_a_class_get_their_arguments_by_name(names: Sequence[str], mode: str, is_async: bool) -> None:
    method = f"{mode}rollout{'_async' if is_async else ''}"
    agent = type("Own", (LitAgent,), {method: form(names, is_async=is_async)})()
    info = RolloutInfo("ro-1", 2, "val" if mode == "validation_" else "train", 7)
    expected = 3.0 if info == INFO else 2.0
    assert run(agent, info=info).reward == expected


def test_a_form_with_names_of_its_own_goes_by_place() -> None:
    class Own(LitAgent):
        def training_rollout(self, x: Any, named: Any, /, about: Any) -> float:  # type: ignore[override]
            return float((x, named, about) == ("task", RESOURCES, INFO))

    assert run(Own()).reward == 1.0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("task", "rollout_id", "resources"),
            r"takes \(task, rollout_id, resources\), whose names contradict",
        ),
        (("sample", "rollout", "llm"), r"takes \(sample, rollout, llm\), whose names contradict"),
        (("task", "prompt_template", "rollout"), "whose names contradict"),
        (("task", "rollout"), r"takes no \(task, resources, rollout\)"),
        (("task", "resources", "rollout", "llm"), "has an argument 'llm' that agl cannot fill"),
    ],
)
def test_a_form_that_contradicts_itself_is_refused(names: Sequence[str], message: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def rollout(self, {', '.join(names)}): return 1.0", space)
    with pytest.raises(ConfigError, match=message):
        as_agent(type("Own", (LitAgent,), {"rollout": space["rollout"]})())


def test_a_function_gets_its_task_under_no_name_of_something_else() -> None:
    for name in ("rollout_id", "output", "trace", "rollout_info"):
        space: dict[str, Any] = {}
        exec(f"def agent({name}, llm): return 1.0", space)
        with pytest.raises(ConfigError, match=f"has an argument '{name}' that agl cannot fill"):
            agl.rollout(space["agent"])


def test_a_class_that_overrides_nothing() -> None:
    class Empty(LitAgent):
        pass

    with pytest.raises(ConfigError, match="Empty overrides neither rollout nor rollout_async"):
        as_agent(Empty())


def test_what_cannot_run_says_how_to_wrap_it() -> None:
    for value in (3, object(), Sync):
        with pytest.raises(ConfigError, match="cannot run a builtins") as caught:
            as_agent(value)
        assert "agl.wrap(agent, reward=score)" in str(caught.value)
    with pytest.raises(ConfigError, match=r"no adapter knows builtins\.int") as caught:
        agl.wrap(3)  # type: ignore[arg-type]
    assert "langchain" in str(caught.value)


def test_rewards_may_be_sync_or_async_and_see_the_output() -> None:
    async def answer(task: str) -> str:
        return task * 2

    async def score(task: str, output: str) -> float:
        return float(len(output))

    assert run(scored("a", answer, score)) == Outcome(8.0, "tasktask")
    assert run(scored("a", answer, lambda task, output: 1)) == Outcome(1, "tasktask")
    assert run(scored("a", str.upper, lambda task, output: output == "TASK")) == Outcome(True, "TASK")
    assert run(scored("a", str.upper, None)) == Outcome(None, "TASK")
    with pytest.raises(ConfigError, match="agent 'a' is sync but its reward function is async"):
        scored("a", str.upper, score)


def test_an_agent_is_itself() -> None:
    agent = Agent("a", lambda task, resources, rollout: Outcome(1.0), False)
    assert as_agent(agent) is agent


def test_a_dict_task_reads_as_attributes() -> None:
    task = Task.of({"question": "q", "meta": {"level": 1}, "parts": [{"x": 2}]})
    assert (task.question, task["question"], task.meta.level, task.parts[0].x) == ("q", "q", 1, 2)
    with pytest.raises(AttributeError, match="the task has no field 'answer'; it has 'question', 'meta', 'parts'"):
        _ = task.answer
    assert Task.of("text") == "text"


def test_datasets_are_anything_with_items() -> None:
    class Indexed:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> str:
            return "ab"[index]

    assert [*as_tasks(Indexed())] == ["a", "b"]
    assert [*as_tasks(x for x in "ab")] == ["a", "b"]
    assert [*as_tasks(None)] == []
    assert isinstance(Indexed(), agl.Dataset)


@pytest.mark.parametrize("error_reward", [None, -1.0])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_raises_is_named_as_the_reward(
    is_async: bool, error_reward: float | None, tmp_path: Path
) -> None:
    def score(task: Any, output: Any) -> float:
        return task["missing"]

    async def ascore(task: Any, output: Any) -> float:
        return task["missing"]

    async def clerk(task: Any) -> str:
        return "x"

    wrapped = agl.wrap(clerk, ascore if is_async else score, error_reward=error_reward)
    trainer = agl.Trainer(ScriptedRollouts(lambda asked: "x"), directory=tmp_path, progress=False, max_attempts=1)
    with pytest.raises(agl.AglError) as raised:
        trainer.fit(wrapped, [{"q": 1}])
    name = "ascore" if is_async else "score"
    assert f"the reward {name!r} ({__file__}:" in raised.value.message
    assert "of agent 'clerk' raised KeyError: 'missing'" in raised.value.message
    assert "low reward for an output that it cannot read" in (raised.value.hint or "")
