"""`agl.environments`: one suite for every kind, on the real packages; a kind whose package is missing is skipped."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environments import SUPPORT, Subject, fixed, subjects
from paths import ROOT

import agl
from agl.agents.causes import answer_error_cause
from agl.errors import AglError, ConfigError, DatasetError, MissingExtraError, RolloutError
from agl.testing.provider import Reply, Script, says, serve
from agl_environments.asking import Replay

GARBAGE = '}{"]\x00 \ud7ff </answer> ((((' + "9" * 400
SUBJECTS = subjects()
IN_PROCESSES = (
    "reasoning-gym:gcd", "gymnasium:Taxi", "verifiers:tool", "inspect:tool", "nemo-gym:counter", "openenv:typed",
    "harbor:sums",
)  # fmt: skip


@pytest.fixture(params=SUBJECTS, ids=[s.id for s in SUBJECTS])
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    subject: Subject = request.param
    if subject.missing:
        pytest.skip(subject.missing)
    monkeypatch.syspath_prepend(str(SUPPORT))
    return subject


@pytest.fixture
def environment(subject: Subject) -> Iterator[Any]:
    with subject.open() as (name, options):
        yield agl.environments.load(name, n=subject.n, seed=3, **options)


def scores(environment: Any, scripts: dict[str, Script], where: Path) -> list[float]:
    """The reward of each task, by the agent of the environment on scripted models: one for each task, or "" for all."""
    rewards = []
    for index, task in enumerate(environment.tasks if "" not in scripts else [environment.tasks]):
        tasks = task if isinstance(task, list) else [task]
        with serve(scripts.get("") or scripts[str(index)]) as provider, pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENAI_BASE_URL", provider.url)
            patch.setenv("OPENAI_API_KEY", "scripted")
            report = agl.evaluate(
                environment.agent, tasks, {"scripted": None}, directory=where / str(index), progress=False
            )
        (policy,) = report.policies.values()
        assert policy.failed == 0
        assert all(r.reward is not None for r in policy.rollouts)
        rewards += [r.reward for r in sorted(policy.rollouts, key=lambda r: r.task)]
    return rewards


def test_an_oracle_scores_full(subject: Subject, environment: Any, tmp_path: Path) -> None:
    scripts = {str(i): subject.oracle(task) for i, task in enumerate(environment.tasks)}
    rewards = scores(environment, scripts, tmp_path)
    assert len(rewards) == len(environment.tasks) == subject.n
    assert min(rewards) >= subject.full


def test_a_policy_that_says_nothing_gets_the_floor(subject: Subject, environment: Any, tmp_path: Path) -> None:
    assert set(scores(environment, {"": says("")}, tmp_path)) == {subject.floor}


def test_garbage_is_the_policys_failure(subject: Subject, environment: Any, tmp_path: Path) -> None:
    assert set(scores(environment, {"": says(GARBAGE)}, tmp_path)) == {
        subject.floor if subject.garbage is None else subject.garbage
    }


WRONG: dict[str, Any] = {"a": "x" * 99, "count": [], "field": {}}


@pytest.mark.parametrize(
    "calls", [[("", {})], [("", WRONG)], [("no_such_tool", {})], [("", WRONG), ("no_such_tool", {})]],
    ids=["empty", "wrong", "unknown", "several"],
)  # fmt: skip
def test_a_wrong_tool_call_is_the_policys_failure(
    subject: Subject, environment: Any, calls: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    if not subject.tools:
        pytest.skip("it has no tools")

    def script(body: dict[str, Any]) -> Reply:
        if any(m["role"] == "tool" for m in body["messages"]):
            return Reply("I give up")
        return Reply(tools=tuple((name or subject.tools[0], arguments) for name, arguments in calls))

    assert set(scores(environment, {"": script}, tmp_path)) == {subject.floor}


def test_a_policy_that_calls_tools_for_ever_comes_to_an_end(subject: Subject, environment: Any) -> None:
    if not subject.tools:
        pytest.skip("it has no tools")
    wrong = {"a": 1, "b": 1, "count": 1, "field": 99, "colour": "none", "command": "true"}
    parameters = {"increment_counter": ("count",), "act": ("field", "colour"), "add": ("a", "b"), "bash": ("command",)}
    needed = parameters[subject.tools[0]]
    with serve(lambda body: Reply(tools=((subject.tools[0], {k: wrong[k] for k in needed}),))) as provider:
        outcome = asyncio.run(
            asyncio.wait_for(environment._solve(environment.tasks[0], {"llm": agl.LLM(provider.url, "m", "k")}), 60)
        )
    assert outcome.reward == subject.floor
    assert len(provider.seen) > 2


def test_tasks_are_json_and_the_same_for_the_same_seed(subject: Subject) -> None:
    with subject.open() as (name, options):
        first, again, other = (agl.environments.load(name, n=subject.n, seed=s, **options).tasks for s in (3, 3, 4))
        fewer = agl.environments.load(name, n=2, seed=3, **options).tasks
    assert first == again != other
    assert fewer[0] == first[0] or "size" in json.dumps(first[0])
    assert json.loads(json.dumps(first)) == first
    assert len({json.dumps(task, sort_keys=True) for task in first}) == subject.n


def test_a_task_from_a_file_is_scored_alike_by_another_load(subject: Subject) -> None:
    with subject.open() as (name, options):
        tasks = json.loads(json.dumps(agl.environments.load(name, n=2, seed=3, **options).tasks))
        other = agl.environments.load(name, n=1, seed=9, **options)
        assert [other.reward(task, "") for task in tasks] == [subject.floor] * 2


def test_an_environment_that_breaks_is_not_the_policys_fault(subject: Subject, tmp_path: Path) -> None:
    if subject.broken is None:
        pytest.skip("it runs no code that could be broken here")
    with subject.broken() as (name, options):
        environment = agl.environments.load(name, n=2, seed=3, **options)
        script = subject.oracle(environment.tasks[0]) if subject.id != "gymnasium:FrozenLake" else says("right")
        with pytest.raises(AglError, match=r"the environment .* failed: .*(is damaged|is gone|/verify answered 500)"):
            scores(environment, {"": script}, tmp_path)
        with pytest.raises(
            RolloutError, match=r"the environment .* failed: .*(is damaged|is gone|/verify answered 500)"
        ) as raised:
            asyncio.run(environment.play(environment.tasks[0], Replay(["right", "plum", "40"] * 3)))
    assert answer_error_cause(raised.value) is None


@pytest.mark.slow
def test_the_agent_runs_in_worker_processes(
    subject: Subject, environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subject.id not in IN_PROCESSES:
        pytest.skip("one of each kind is enough")
    # The workers import what the environment imported.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    with serve(says("")) as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        report = agl.evaluate(
            environment.agent, environment.tasks[:2], {"scripted": None}, runners="process", n_workers=2,
            directory=tmp_path, progress=False,
        )  # fmt: skip
    (policy,) = report.policies.values()
    assert [r.reward for r in policy.rollouts] == [subject.floor] * 2


def test_an_unreachable_model_is_not_the_environments_failure(subject: Subject, environment: Any) -> None:
    llm = agl.LLM("http://127.0.0.1:1/v1", "gone", "none")
    import openai

    with pytest.raises(openai.APIConnectionError):
        asyncio.run(environment._solve(environment.tasks[0], {"llm": llm}))


def test_a_reward_for_an_agent_of_your_own(subject: Subject, environment: Any) -> None:
    """The answers that the environment's agent gave are scored as it was scored."""
    task = environment.tasks[0]
    with serve(subject.oracle(task)) as provider:
        outcome = asyncio.run(environment._solve(task, {"llm": agl.LLM(provider.url, "m", "k")}))
    assert outcome.reward >= subject.full
    assert environment.reward(task, outcome.output) == outcome.reward


def test_a_text_that_breaks_a_grader_is_the_policys_failure() -> None:
    """reasoning-gym's grader of prime factors raises for a text without numbers; without a right answer to check it by,
    it would be the grader's failure."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    import reasoning_gym

    primes = agl.environments.load("reasoning-gym:prime_factorization", n=1)
    (task,) = primes.tasks
    dataset = reasoning_gym.create_dataset(task["dataset"], **json.loads(task["options"]))
    with pytest.raises(ValueError, match="invalid literal"):
        dataset.score_answer("two and three", dataset[0])
    assert primes.reward(task, "two and three") == 0
    assert primes.reward(task, task["answer"]) == 1


def test_a_grader_that_breaks_for_every_text_is_not_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    from reasoning_gym.arithmetic.gcd import GCDDataset

    def gone(*_: Any) -> float:
        raise ValueError("its table is gone")

    gcd = agl.environments.load("reasoning-gym:gcd", n=1)
    monkeypatch.setattr(GCDDataset, "score_answer", gone)
    with pytest.raises(RolloutError, match="its table is gone"):
        gcd.reward(gcd.tasks[0], "5")


@pytest.mark.parametrize(
    ("name", "options", "package", "message"),
    [
        ("gcd", {}, "", r"no kind of environment: 'gcd'.*\n.*known: gymnasium, harbor, inspect, nemo-gym"),
        ("reasoning_gym:gcd", {}, "", "did you mean 'reasoning-gym'"),
        ("reasoning-gym", {}, "", "no environment's name: 'reasoning-gym'"),
        ("reasoning-gym:gcd", {"n": 0}, "", "n=0 tasks"),
        ("reasoning-gym:gdc", {}, "reasoning_gym", "no data set 'gdc'.*\n.*did you mean 'gcd'"),
        ("reasoning-gym:gcd", {"max": 3}, "reasoning_gym", "refuses the options of 'gcd'.*'max'"),
        ("reasoning-gym:gcd", {"max_value": 0}, "reasoning_gym", "refuses the options of 'gcd'"),
        ("reasoning-gym:gcd", {"max_value": {1}}, "reasoning_gym", "an option of 'gcd' is no JSON"),
        ("gymnasium:CartPole-v1", {}, "gymnasium", "does not know the actions of CartPole-v1"),
        ("gymnasium:Taxi-v99", {}, "gymnasium", "gymnasium has no environment 'Taxi-v99'"),
        ("gymnasium:no_module:X-v0", {"actions": ["a"], "floor": 0}, "gymnasium", "No module named 'no_module'"),
        ("verifiers:no-such-env", {}, "verifiers.legacy", "verifiers cannot load 'no-such-env'"),
        ("inspect:no_such_file.py@x", {}, "inspect_ai", "no_such_file.py@x"),
        ("nemo-gym:localhost:1", {"tasks": []}, "", "'localhost:1' is no address"),
        ("nemo-gym:http://127.0.0.1:1", {"tasks": "none.jsonl"}, "", "these are no tasks of NeMo Gym"),
        ("openenv:http://127.0.0.1:1", {}, "openenv", "no OpenEnv server answers at http://127.0.0.1:1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_runs(
    name: str, options: dict[str, Any], package: str, message: str
) -> None:
    if package and Subject("", package, fixed(""), lambda task: says("")).missing:
        pytest.skip(f"{package} is not installed")
    with pytest.raises((ConfigError, DatasetError), match=message):
        agl.environments.load(name, **options)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtraError, match=r'pip install "\./guests/environments\[gymnasium\]"'):
        agl.environments.load("gymnasium:Taxi-v4")


@pytest.mark.parametrize("way", ["load", "as_verifiers"])
def test_verifiers_without_its_environments_is_named_with_the_line_that_installs_them(way: str, tmp_path: Path) -> None:
    """As of 0.4, of which both need nothing but that it is there."""
    for needed in ("openai", "aiohttp", "datasets"):
        pytest.importorskip(needed)
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers/__init__.py").write_text("__version__ = '0.4.0'\n")
    program = f"import agl; agl.environments.{way}('verifiers:x')"
    paths = os.pathsep.join([str(tmp_path), str(ROOT / ".src")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert "this is verifiers 0.4.0, and agl reads the environments of 0.3" in done.stderr
    assert 'pip install "verifiers>=0.3,<0.4"' in done.stderr


class TestTraining:
    """A tiny policy that names an action of Blackjack by chance, trained in the game itself."""

    RULES = "Play."

    @pytest.fixture(scope="class")
    def policy(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        from agl.trainer.quickstart.demos import Demo, Turn, opening
        from agl.trainer.quickstart.policy import Recipe, Stage, make_policy

        def hand(rng: random.Random) -> str:
            return f"({rng.randrange(4, 22)}, {rng.randrange(1, 11)}, {rng.randrange(2)})"

        def plays(rng: random.Random) -> Demo:
            system = f"{self.RULES} Answer with one action: stick, hit."
            turns = [Turn(opening(hand(rng), system, ()), "hit<|im_end|>")]
            while rng.random() < 0.5 and len(turns) < 4:
                turns.append(
                    Turn(f"\n<|im_start|>user\n{hand(rng)}<|im_end|>\n<|im_start|>assistant\n", "hit<|im_end|>")
                )
            last = replace(turns[-1], answer=rng.choice(("hit", "stick")) + "<|im_end|>")
            return (*turns[:-1], last)

        directory = tmp_path_factory.mktemp("player") / "policy"
        recipe = Recipe(rows=8, row_tokens=160, warmup_steps=5)
        make_policy(directory, threads=1, recipe=recipe, stages=(Stage("plays", plays, 70),))
        return directory

    @pytest.mark.slow
    def test_grpo_in_a_game(self, policy: Path, tmp_path: Path) -> None:
        pytest.importorskip("gymnasium", reason="gymnasium is not installed")
        game = agl.environments.load("gymnasium:Blackjack-v1", n=8, seed=1, rules=self.RULES)
        algorithm = agl.GRPO(
            model=str(policy), group_size=6, batch_size=8, steps=2, learning_rate=3e-3, max_response_tokens=6,
            max_context=512, val_every=2,
        )  # fmt: skip
        result = agl.Trainer(algorithm, agents=["solver"], directory=tmp_path, progress=False).fit(
            game.agent, game.tasks, game.tasks[:4]
        )
        steps = [entry for entry in result.history if "train/reward" in entry]
        assert len(steps) == 2
        for entry in steps:
            assert -1 < entry["train/reward"] < 1
            assert entry["train/failed_rollouts"] == entry["train/policy_faults"] == 0
            assert entry["train/calls"] > entry["train/rows"] == 8 * 6  # some hands took more than one call
            assert entry["train/forks"] == 0
        assert steps[1]["train/reward"] > steps[0]["train/reward"] + 0.2
        assert any("val/reward" in entry for entry in result.history)
        before, after = (Path(p, "model.safetensors").read_bytes() for p in (policy, result.policy))
        assert before != after
