"""A reward function gets the task and the output by its arguments' names, wherever they stand."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import agl
from agl.agents.agent import scored
from agl.errors import ConfigError
from agl.rewards.arguments import GROUP_REWARD, Arguments
from agl.rewards.function import RewardCaller
from agl.rewards.trace import Trace
from agl.trainer.run.group_reward import require_group_reward

TRACE = Trace("ro", 1, "solver", ())
ORDERS = list(itertools.permutations(["task", "output", "trace"]))


def called(reward: Any) -> Any:
    return RewardCaller(reward)("the task", "the output", TRACE)


def function(signature: str, *, is_async: bool = False) -> Any:
    """A function of these arguments that returns the values of those with our names."""
    space: dict[str, Any] = {}
    returned = "dict(task=task, output=output, trace=trace)"
    exec(f"{'async ' if is_async else ''}def score({signature}): return {returned}", space)
    return space["score"]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
@pytest.mark.parametrize("form", ["{}", "*, {}", "{}, tolerance=0.1", "tolerance=0.1, *, {}"])
def test_names_decide_in_every_order(order: Sequence[str], form: str) -> None:
    signature = form.format(", ".join(order))
    given = {"task": "the task", "output": "the output", "trace": TRACE}
    assert called(function(signature)) == given
    caller = RewardCaller(function(signature, is_async=True))
    assert asyncio.run(caller.call_async("the task", "the output", TRACE)) == given


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (lambda t, o: (t, o), ("the task", "the output")),
        (lambda task, folder: (task, folder), ("the task", "the output")),
        (lambda sample, output: (sample, output), ("the task", "the output")),
        (lambda answer, task: (task, answer), ("the task", "the output")),
        (lambda completion, task, *, strict=True: (task, completion), ("the task", "the output")),
        (lambda text, answer: (text, answer), ("the task", "the output")),
        (lambda output, prompt: (prompt, output), ("the task", "the output")),
        (lambda output, task, /: (task, output), ("the task", "the output")),
        (lambda *both: both, ("the task", "the output")),
        (lambda solution_str, task: (task, solution_str), ("the task", "the output")),
        (lambda outputs, inputs: (inputs, outputs), ("the task", "the output")),
        (lambda inputs, outputs: (inputs, outputs), ("the task", "the output")),
        (lambda sample, agent_output: (sample, agent_output), ("the task", "the output")),
        (lambda *, outputs, task: (task, outputs), ("the task", "the output")),
        (lambda record, model_output: (record, model_output), ("the task", "the output")),
        (functools.partial(lambda strict, output, task: (task, output), True), ("the task", "the output")),
        (functools.partial(lambda output, task, strict: (task, output), strict=True), ("the task", "the output")),
    ],
)
def test_other_names_go_by_place_unless_one_of_ours_decides(reward: Any, value: Any) -> None:
    assert called(reward) == value


def test_an_annotation_that_cannot_be_read_is_no_obstacle() -> None:
    def score(output: agl.NoSuchType, task: not_there) -> Any:  # type: ignore[name-defined, attr-defined]  # noqa: F821
        return task, output

    assert called(score) == ("the task", "the output")


class Methods:
    def score(self, output: Any, task: Any) -> Any:
        return task, output

    def __call__(self, output: Any, task: Any) -> Any:
        return task, output


def test_methods_and_objects_go_the_same_way() -> None:
    assert called(Methods().score) == called(Methods()) == ("the task", "the output")

    def annotated(seen: Trace, output: Any, task: Any) -> Any:
        return task, output, seen

    assert called(annotated) == ("the task", "the output", TRACE)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda output, expected: 1.0, r"takes \(output, expected\), whose names contradict their places"),
        (lambda x, task: 1.0, r"takes \(x, task\), whose names contradict"),
        (lambda completion, ground_truth: 1.0, r"takes \(completion, ground_truth\), whose names contradict"),
        (lambda completion, answer: 1.0, r"takes \(completion, answer\), whose names contradict"),
        (lambda response, answer, info=None: 1.0, r"takes \(response, answer\), whose names contradict"),
        (lambda y_pred, y_true: 1.0, r"takes \(y_pred, y_true\), whose names contradict"),
        (lambda llm_response, ground_truth_answer: 1.0, r"takes \(llm_response, ground_truth_answer\), whose names"),
        (lambda pred, gold: 1.0, r"takes \(pred, gold\), whose names contradict"),
        (lambda solution, problem: 1.0, r"takes \(solution, problem\), whose names contradict"),
        (lambda completion, prompt: 1.0, r"takes \(completion, prompt\), whose names contradict"),
        (lambda solution_str, ground_truth: 1.0, r"takes \(solution_str, ground_truth\), whose names contradict"),
        (lambda data_source, solution_str: 1.0, r"takes \(data_source, solution_str\), whose names contradict"),
        (lambda outputs, reference_outputs: 1.0, r"takes \(outputs, reference_outputs\), whose names contradict"),
        (lambda inputs, reference_outputs: 1.0, r"takes \(inputs, reference_outputs\), whose names contradict"),
        (lambda agent_output, expected: 1.0, r"takes \(agent_output, expected\), whose names contradict"),
        (lambda expected, actual: 1.0, r"takes \(expected, actual\), whose names contradict"),
        (lambda task, ground_truth: 1.0, r"takes \(task, ground_truth\), whose names contradict"),
        (lambda task, question: 1.0, r"takes \(task, question\), whose names contradict"),
        (lambda answer, output: 1.0, r"takes \(answer, output\), whose names contradict"),
        (lambda completions, prompts: 1.0, r"takes \(completions, prompts\), whose names contradict"),
        (lambda data_source, solution_str, ground_truth, extra_info: 1.0, "whose names contradict"),
        (lambda inputs, outputs, reference_outputs: 1.0, "'reference_outputs' that agl cannot fill"),
        (lambda task: 1.0, r"takes no \(task, output\)"),
        (lambda task, trace: 1.0, r"takes no \(task, output\)"),
        (lambda task, output, x: 1.0, "has an argument 'x' that agl cannot fill"),
        (lambda x, task, output: 1.0, "has an argument 'x' that agl cannot fill"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_runs(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        scored("agent", lambda task: "an output", reward)
    assert caught.value.hint
    with pytest.raises(ConfigError, match=message):
        agl.rewards.Weighted({"part": (1.0, reward)})


def test_the_parts_of_a_sum_and_the_reward_of_an_agent_go_by_name() -> None:
    def equal(output: str, task: str) -> float:
        return float((task, output) == ("the task", "the output"))

    assert agl.rewards.Weighted({"part": (2.0, equal)})("the task", "the output")["reward"] == 2.0
    agent = scored("agent", lambda task: "the output", equal)
    assert agent.run("the task", {}, None).reward == 1.0  # type: ignore[union-attr, arg-type]


def test_a_comparison_of_rollouts_goes_by_name() -> None:
    class Longest:
        label = "longest"

        async def score(self, traces: Sequence[Trace], task: Any) -> Any:
            return task, traces

    positional, named = Arguments.of(Longest().score, GROUP_REWARD).bind({"task": "t", "traces": [TRACE]})
    assert asyncio.run(Longest().score(*positional, **named)) == ("t", [TRACE])

    class Wrong(Longest):
        async def score(self, traces: Sequence[Trace], question: str, reference: str) -> Any:  # type: ignore[override]
            return []

    with pytest.raises(ConfigError, match="an argument 'reference' that agl cannot fill"):
        require_group_reward(Wrong(), capture_content=True)
