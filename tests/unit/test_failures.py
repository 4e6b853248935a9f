"""Attempts that failed are counted by what failed; one fault of the user's code that ended many of them ends a run."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import say

import agl
from agl.errors import CallbackError, RewardError, RolloutError, UserCodeError
from agl.mdp.builder import AttemptTrajectory
from agl.mdp.types import Trajectory
from agl.rewards.function import RewardCaller
from agl.trainer.run.failures import failure_counts, failures_line, require_sound
from agl.trainer.runners.blame import raised_at
from agl.trainer.runners.protocol import Failure, RolloutResult
from agl.trainer.store.types import Rollout, RolloutConfig, new_rollout_id

PLACE = "agent.py:12"
REQUEST = httpx.Request("GET", "http://search")


def failed(message: str, kind: str = "agent", place: str = "", traceback: str = "") -> Failure:
    return Failure("ro-1", 1, kind, message, place, traceback)


def result(*failures: Failure, succeeded: bool = True, group: str = "g") -> RolloutResult:
    """A rollout whose attempts failed so, before one succeeded, or not."""
    status = "succeeded" if succeeded else "failed"
    rollout = Rollout(
        new_rollout_id(), "t", status, "train", None, 0, group, 0, 0, None, 0, RolloutConfig(), {}, 1, 0.0, 1.0
    )
    trajectory = AttemptTrajectory(Trajectory("ro", 1, None, group, (), ()), (), (), (), ()) if succeeded else None
    error = None if succeeded else RolloutError(failures[-1].message)
    return RolloutResult(rollout, len(failures) + succeeded, trajectory, error, failures)


def step(n_succeeded: int, *failures: Failure) -> list[RolloutResult]:
    """A step in which each failure is that of a rollout's only attempt."""
    return [result() for _ in range(n_succeeded)] + [result(failure, succeeded=False) for failure in failures]


def test_more_than_a_quarter_of_one_exception_ends_the_run_with_its_traceback() -> None:
    same = failed("agent 'a' raised KeyError: 'x'", traceback="Traceback ...\n  File agent.py, line 12\nKeyError: 'x'")
    require_sound(step(9, same, same, same), "step 2")
    with pytest.raises(UserCodeError) as raised:
        require_sound(step(8, same, same, same), "step 2")
    text = str(raised.value)
    assert "ended attempts of 3 of the 11 rollouts of step 2" in text
    assert "the same exception in your code, agent 'a' raised KeyError" in text
    assert "File agent.py, line 12" in text
    assert "agl.PolicyFault" in text


def test_one_place_counts_whatever_it_raises() -> None:
    failures = [failed(f"agent 'a' raised KeyError: {k}", place=PLACE) for k in range(4)]
    with pytest.raises(
        UserCodeError, match=rf"one place in your code, {PLACE}, ended attempts of 4 of the 12 rollouts"
    ):
        require_sound(step(8, *failures), "step 1")
    elsewhere = [failed(f"agent 'a' raised KeyError: {k}", place=f"agent.py:{k}") for k in range(4)]
    require_sound(step(8, *elsewhere), "step 1")


def test_long_messages_that_only_begin_alike_are_not_the_same() -> None:
    failures = [failed(f"agent 'a' raised LookupError: {'no such patient, ' * 20}{k}") for k in range(4)]
    require_sound(step(8, *failures), "step 1")


def test_a_rollout_that_fails_each_time_counts_once() -> None:
    """A task that cannot be done is no reason to stop: its group is dropped whole."""
    bug = failed("agent 'a' raised KeyError: 'x'", place=PLACE)
    require_sound([result(bug, bug, bug, succeeded=False)] * 4 + step(12), "step 1")


def test_attempts_count_that_a_later_one_of_the_rollout_made_good() -> None:
    """Otherwise what is tried again until it succeeds would be a selection without a word."""
    bug = failed("the reward 'score' raised ValueError", "reward")
    with pytest.raises(UserCodeError, match="ended attempts of 4 of the 8 rollouts"):
        require_sound([result(bug) for _ in range(4)] + [result() for _ in range(4)], "step 1")


@pytest.mark.parametrize("kind", ["timeout", "infrastructure"])
def test_what_surrounds_the_users_code_ends_no_run(kind: str) -> None:
    require_sound(step(2, *[failed("the network", kind)] * 6), "step 1")


def test_a_part_of_a_step_is_held_against_the_whole() -> None:
    same = [failed("agent 'a' raised KeyError: 'x'")] * 4
    require_sound(step(4, *same), "step 1", expected=16)
    with pytest.raises(UserCodeError):
        require_sound(step(4, *same, *same), "step 1", expected=16)


def test_a_programs_errors_are_alike_by_their_first_and_last_line() -> None:
    texts = [f"'node' ended with exit status 1; its stderr:\n at task {k}\nTypeError: x is null" for k in range(4)]
    with pytest.raises(UserCodeError, match="the same exception"):
        require_sound(step(4, *map(failed, texts)), "step 1")


def test_the_line_and_the_history_say_how_many_and_of_what() -> None:
    bug, slow = failed("agent 'a' raised KeyError: 'x'", place=PLACE), failed("ran past its limit", "timeout")
    results = [result(bug), result(bug, bug, succeeded=False), result(slow, group="h"), result(group="i")]
    line = failures_line(results)
    assert line == (
        "4 of 7 attempts failed, in 2 of 3 groups; 1 of 4 rollouts are left out: "
        f"3 x agent 'a' raised KeyError: 'x' ({PLACE}); 1 x ran past its limit"
    )
    assert failure_counts(results, "train") == {
        "train/failed_attempts": 4,
        "train/failed_attempts/agent": 3,
        "train/failed_attempts/reward": 0,
        "train/failed_attempts/timeout": 1,
        "train/failed_attempts/infrastructure": 0,
    }
    assert failures_line(step(3)) is None


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_a_failure_is_recorded_by_kind_with_its_place(tmp_path: Path) -> None:
    """Whatever runner executed it: the coordinator counts, by the spans and the error of the report."""
    raised = {
        "agent": KeyError("x"),
        "reward": ValueError("cannot read it"),
        "ours": RewardError("no reference"),
        "timeout": TimeoutError("a tool"),
        "infrastructure": ConnectionResetError("gone"),
        "service": httpx.HTTPStatusError("503", request=REQUEST, response=httpx.Response(503)),
    }

    def agent(task: Any) -> str:
        if task["raises"] in ("agent", "timeout", "infrastructure", "service"):
            raise raised[task["raises"]]
        return "whole"

    def reward(task: Any, output: str) -> float:
        if task["raises"] in ("reward", "ours"):
            raise raised[task["raises"]]
        return 1.0

    algorithm = agl.Baseline()
    trainer = agl.Trainer(algorithm, directory=tmp_path, n_workers=1, max_attempts=1, progress=False)
    result = trainer.fit(agl.wrap(agent, reward), [{"raises": name} for name in [*raised, "nothing"]])
    [entry] = result.history
    counts = {name.rpartition("/")[2]: n for name, n in entry.items() if name.startswith("train/failed_attempts/")}
    assert counts == {"agent": 1, "reward": 2, "timeout": 0, "infrastructure": 3}


def test_a_rollouts_failures_are_those_of_all_its_attempts(tmp_path: Path) -> None:
    def agent(task: Any) -> str:
        first = not (tmp_path / "tried").exists()
        (tmp_path / "tried").touch()
        if first:
            raise KeyError(task)
        return "whole"

    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, n_workers=1, progress=False)
    [entry] = trainer.fit(agl.wrap(agent, lambda task, output: 1.0), ["t"]).history
    assert (entry["train/failed_attempts/agent"], entry["train/failed_rollouts"]) == (1, 0)


@pytest.mark.full
@pytest.mark.parametrize("runners", ["local", "process"])
@pytest.mark.parametrize("where", ["agent", "reward"])
def test_a_run_learns_nothing_from_what_a_fault_has_left(
    where: str, runners: Any, untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent, or its grader, raises in a third of its calls, each after an answer that was cut."""
    calls = itertools.count()

    def broken(task: Any) -> None:
        if next(calls) % 3 == 2:
            raise KeyError(task["question"])

    @agl.rollout
    def solver(task: Any, llm: agl.LLM) -> float:
        answer = say(llm, task["question"])
        if where == "agent":
            broken(task)
            return float(len(answer))
        return RewardCaller(lambda task, output: broken(task) or float(len(output)))(task, answer)

    algorithm = agl.GRPO(model=str(untrained_model), group_size=4, batch_size=4, steps=1, max_response_tokens=4)
    trainer = agl.Trainer(algorithm, directory=tmp_path, n_workers=1, runners=runners)
    with pytest.raises(UserCodeError) as raised:
        trainer.fit(solver, [{"question": f"q{k}"} for k in range(4)])
    assert "one place in your code" in str(raised.value)
    assert "raise KeyError(task" in str(raised.value)
    assert "attempts failed, in" in " ".join(capsys.readouterr().err.split())


class NoException(BaseException):
    """Such as what `pytest.fail` raises."""


def ends(task: str) -> None:
    """Raise what no future holds, or what ends an event loop, for some tasks."""
    if task == "next":
        next(iter([]))
    if task == "exit":
        sys.exit(3)
    if task == "cancelled":
        raise asyncio.CancelledError
    if task == "no exception":
        raise NoException


def whole(task: str) -> str:
    return task


async def whole_async(task: str) -> str:
    return task


def ending(task: str) -> str:
    ends(task)
    return task


async def ending_async(task: str) -> str:
    ends(task)
    return task


def one(task: str, output: str) -> float:
    return 1.0


def reward_ending(task: str, output: str) -> float:
    ends(task)
    return 1.0


async def reward_ending_async(task: str, output: str) -> float:
    ends(task)
    return 1.0


@pytest.mark.parametrize(
    ("agent", "reward", "kind"),
    [
        (ending, one, "agent"),
        (ending_async, one, "agent"),
        (whole, reward_ending, "reward"),
        (whole_async, reward_ending, "reward"),
        (whole_async, reward_ending_async, "reward"),
    ],
)
def test_whatever_user_code_raises_ends_its_own_attempt(agent: Any, reward: Any, kind: str, tmp_path: Path) -> None:
    """It neither waits for the limit of time nor ends the loop, the other rollouts or the program."""
    tasks = [*"abcdefghijklm", "next", "exit", "cancelled", "no exception"]
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, max_attempts=1, timeout=30, progress=False)
    [entry] = trainer.fit(agl.wrap(agent, reward, name="solver"), tasks).history
    assert (entry["train/failed_attempts"], entry[f"train/failed_attempts/{kind}"]) == (4, 4)
    assert entry["train/reward"] == 1.0


def test_a_callback_that_finds_nothing_ends_its_run(tmp_path: Path) -> None:
    class Finds(agl.Callback):
        def on_step(self, run: Any, entry: Any) -> None:
            next(iter([]))

    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, callbacks=[Finds()], progress=False)
    with pytest.raises(CallbackError, match="StopIteration"):
        trainer.fit(agl.wrap(whole, one, name="solver"), ["a"])


class Comparing:
    label = "comparing"

    async def score(self, task: str, traces: Any) -> list[float]:
        ends(task)
        return [{"a": 1.0}[task] for _ in traces]


@pytest.mark.parametrize(
    ("task", "raised"), [("b", "KeyError: 'b'"), ("next", "RuntimeError: .*StopIteration"), ("exit", "SystemExit: 3")]
)
def test_a_group_reward_that_raises_is_named_with_its_group(task: str, raised: str, tmp_path: Path) -> None:
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, group_reward=Comparing(), progress=False)
    with pytest.raises(UserCodeError, match=rf"group_reward=comparing raised .*{raised}.*step=1, group=") as error:
        trainer.fit(agl.wrap(whole, one, name="solver"), ["a", task])
    assert "resume=True" in str(error.value)


def test_a_group_of_exceptions_is_told_by_its_members(tmp_path: Path) -> None:
    """Python's own message says only how many there are, which is the same for different faults."""

    async def agent(task: str) -> str:
        async def tool() -> None:
            raise LookupError(f"no {task}")

        async with asyncio.TaskGroup() as group:
            group.create_task(tool())
        return task

    with pytest.raises(RolloutError, match=r"\(1 sub-exception\): LookupError: no a"):
        agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False).fit(agl.wrap(agent, one, name="solver"), ["a"])
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(agent("a"))
    assert raised_at(raised.value) == f"{__file__}:{inspect.getsourcelines(agent)[1] + 2}"
