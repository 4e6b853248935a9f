"""examples/smollm2: tasks, grader and expert of each program, over real HTTP; and a tiny policy by its recipe."""

from __future__ import annotations

import asyncio
import json
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real_data
from untrained import make_untrained

import agl
from agl import semconv
from agl.testing.provider import Reply, Script, says, serve
from agl.trainer.store import open_store

pytest.importorskip("agents")
pytest.importorskip("agent_framework")
pytest.importorskip("langgraph")
pytest.importorskip("reasoning_gym")

from examples.common import Endpoint
from examples.smollm2 import arithmetic, calculator, functions, settings
from examples.smollm2 import sql as text_to_sql
from examples.smollm2.__main__ import CLAIMS, main
from examples.smollm2.recipe import learn


def success(build: Any, script: Script, tasks: Any, where: Path) -> list[float]:
    """The reward of each task, in order."""
    with serve(script) as provider:
        agent = build(Endpoint(provider.url, "scripted", "none"))
        report = agl.evaluate(agent, tasks, {"scripted": None}, directory=where, n_workers=8, progress=False)
    (policy,) = report.policies.values()
    assert policy.failed == 0
    return [rollout.reward or 0.0 for rollout in sorted(policy.rollouts, key=lambda rollout: rollout.task)]


class TestFunctions:
    @pytest.fixture(scope="class")
    def tasks(self) -> list[functions.Task]:
        return [task for part in functions.PARTS for task in functions.load(part)]

    def test_the_expert_is_right_but_where_the_data_contradict_themselves(self, tasks: list[functions.Task]) -> None:
        def call(task: functions.Task) -> dict[str, Any]:
            ((name, accepted),) = task["answer"].items()
            return {"name": name, "arguments": functions._first(accepted)}

        wrong = [task["id"] for task in tasks if not functions.right_call(task, [call(task)])]
        assert len(tasks) == 600
        assert wrong == ["simple_python_96", "multiple_119"]
        first = tasks[0]
        right = call(first)
        assert right == {"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 5}}
        for calls in (
            [],
            [right, right],
            [right | {"name": "area"}],
            [right | {"arguments": {"base": 10}}],
            [right | {"arguments": {"base": 10, "height": 6}}],
            [right | {"arguments": {"base": 10, "height": "5"}}],
            [right | {"arguments": {"base": 10, "height": True}}],
            [right | {"arguments": {"base": 10, "height": 5, "unit": "miles"}}],
            [right | {"arguments": {"base": 10, "height": 5, "depth": 1}}],
            [right | {"arguments": [10, 5]}],
        ):
            assert functions.right_call(first, calls) == 0, calls
        assert functions.right_call(first, [right | {"arguments": {"base": 10, "height": 5.0, "unit": "Units"}}]) == 1

    def test_parameters_are_json_schemas(self, tasks: list[functions.Task]) -> None:
        def types(schema: Any) -> set[str]:
            inner = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
            own = {schema["type"]} if "type" in schema else set()
            return own.union(*map(types, inner))

        found = set().union(*(types(f["parameters"]) for task in tasks for f in task["functions"]))
        assert found <= {"object", "array", "string", "number", "integer", "boolean"}
        names = {f["name"] for task in tasks for f in task["functions"]}
        assert all(name.replace("_", "").replace("-", "").isalnum() for name in names)

    def test_the_agent_earns_what_its_call_is_worth(self, tasks: list[functions.Task], tmp_path: Path) -> None:
        some = tasks[:12]
        assert success(functions.build, functions.expert(tasks), some, tmp_path / "expert") == [1.0] * 12
        assert success(functions.build, says("It is 25."), some, tmp_path / "none") == [0.0] * 12

        def careless(body: dict[str, Any]) -> Reply:
            ((name, arguments),) = functions.expert(tasks)(body).tools
            return Reply(tools=((name, dict(list(arguments.items())[1:])),))

        assert success(functions.build, careless, some, tmp_path / "careless") == [0.0] * 12


class TestCalculator:
    def test_problems_of_gsm8k_become_records_of_calc_x(self) -> None:
        tasks = calculator.gsm8k(real_data.folder("gsm8k") / "test.jsonl")
        assert len(tasks) > 300
        assert all(1 <= len(calculator.GADGET.findall(task["chain"])) <= 2 for task in tasks)
        assert len({task["question"] for task in tasks}) == len(tasks)

    def test_the_expert_solves_them_with_the_calculator(self, tmp_path: Path) -> None:
        calc = calculator.load(real_data.folder("calc_x") / "train.jsonl")[:8]
        tasks = [*calc, *calculator.gsm8k(real_data.folder("gsm8k") / "train.jsonl")[:16]]
        assert success(calculator.build, calculator.expert(tasks), tasks, tmp_path / "expert") == [1.0] * 24
        assert sum(success(calculator.build, says("### 0"), tasks, tmp_path / "none")) == 0


def test_the_writer_earns_the_rows_of_its_query(tmp_path: Path) -> None:
    claim = text_to_sql.claim(Namespace(seed=0, data=real_data.folder("sql_eval"), out=tmp_path))
    tasks = claim.heldout[:10]
    assert claim.expert is not None
    assert success(claim.build, claim.expert, tasks, tmp_path / "expert") == [1.0] * 10
    assert success(claim.build, says("SELECT 1"), tasks, tmp_path / "none") == [0.0] * 10


@pytest.mark.parametrize(
    ("kind", "answer", "right", "wrong"),
    [
        ("chain_sum", "5", ["5", "It is 5.", "2 + 3 = 5", "5.0 then 5"], ["", "6", "five", "5 or 6", "55"]),
        ("gcd", "4", ["4", "The GCD is 4."], ["2", "gcd(4, 8) = 8"]),
    ],
)
def test_an_answer_is_the_last_number(kind: str, answer: str, right: list[str], wrong: list[str]) -> None:
    task = next(t for t in arithmetic.questions(kind, 2000, seed=0) if t["answer"] == answer)
    assert [arithmetic.score(task, text) for text in right] == [1.0] * len(right)
    assert [arithmetic.score(task, text) for text in wrong] == [0.0] * len(wrong)
    assert arithmetic.questions(kind, 20, seed=3) == arithmetic.questions(kind, 20, seed=3)


def test_held_out_questions_are_not_trained_on() -> None:
    options = Namespace(seed=0, data=real_data.folder("sql_eval").parent, out=None)
    for made in (arithmetic.claim(options), arithmetic.claim(options, "gcd"), functions.claim(options)):
        trained = {json.dumps(task["question"]) for task in (*made.train, *made.recorded)}
        assert len(made.heldout) >= 96
        assert not trained & {json.dumps(task["question"]) for task in made.heldout}


@pytest.mark.slow
@pytest.mark.parametrize("claim", [pytest.param("arithmetic", marks=pytest.mark.night), "calculator"])
def test_its_recipe_runs_to_the_end(
    claim: str, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = real_data.folder("gsm8k").parent
    facts = main([claim, "--short", "--model", str(tiny_policy), "--threads", "1", "--data", str(data)])
    assert claim in CLAIMS
    assert len(facts["measured"]) == (3 if claim == "calculator" else 2)
    assert facts["rollouts"] == 2
    for measured in facts["measured"]:
        # Wilson's interval of 4 tasks, and never one below 0.
        n, p, z = 4, measured["reward"], 1.959964
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
        low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
        assert (measured["reward_low"], measured["reward_high"]) == pytest.approx((low, high), abs=1e-5)
    assert json.loads((tmp_path / f"runs/smollm2-{claim}-0/result.json").read_text()) == facts
    assert (Path(facts["policy"]) / "chat_template.jinja").is_file()


def test_no_interval_of_a_success_rate_leaves_0_to_100() -> None:
    change = settings.USUAL | {"learning_rate": "5e-5"}
    runs = {settings.place_of(change, seed): reward for seed, reward in enumerate((0.89, 0.9, 0.98))}
    assert "| 3 | 92.3 %, 80.1 to 100.0 | 89, 90, 98 |" in settings.table(runs)


@pytest.mark.slow
@pytest.mark.night
def test_settings_are_compared_run_by_run(
    tiny_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--short", "--model", str(tiny_policy), "--directory", str(tmp_path), "--seeds"]
    settings.main([*command, "2"])
    rewards = {
        seed: [
            json.loads(file.read_text())["history"][-1]["val/reward"]
            for file in tmp_path.glob(f"runs/*lora=16_seed={seed}/result.json")
        ]
        for seed in (0, 1)
    }
    assert [len(found) for found in rewards.values()] == [1, 1]
    assert not list(tmp_path.rglob("runs/*/policy")), "70 of them fill a disk"
    mean = 50 * (rewards[0][0] + rewards[1][0])
    row = f"| `lora=16`, `learning_rate=5e-4` | 2 | {mean:.1f} %"
    shown = capsys.readouterr().out
    assert row in shown
    assert "| the start | | " in shown
    settings.main([*command, "2", "--table"])
    assert row in capsys.readouterr().out
    with pytest.raises(SystemExit, match="began with another policy"):
        settings.main(["--directory", str(tmp_path)])
    with pytest.raises(SystemExit, match="began with another policy"):
        settings.main(["--directory", str(tmp_path), "--save"])
    with pytest.raises(SystemExit, match="has no run"):
        settings.main(["--directory", str(tmp_path / "none"), "--save", str(tmp_path / "kept.json")])
    keep, kept = ["--directory", str(tmp_path), "--save", str(tmp_path / "kept.json")], tmp_path / "kept.json"
    settings.main(keep)
    assert row in capsys.readouterr().out
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {settings.place_of(settings.USUAL, 0): 1.0}))
    settings.main(keep)
    shown = capsys.readouterr().out
    assert row in shown
    assert "| nothing | 1 | 100.0 % | 100 |" in shown, "what was kept before is lost"


@pytest.mark.slow
@pytest.mark.night
def test_the_writer_alone_is_trained(tmp_path: Path) -> None:
    """In the recipe's two steps and its validations, the policy answers the writer, the script everybody else."""
    options = Namespace(
        seed=0, data=real_data.folder("sql_eval"), out=tmp_path, short=True, steps=None, threads=1, save=False
    )
    options.model = str(make_untrained(tmp_path / "model", context=8192))
    made = text_to_sql.claim(options)
    # A token of this model is a character.
    tasks = [task for task in made.train if len(task["schema"]) < 1500]
    learn("sql", replace(made, train=tasks, recorded=tasks, max_context=8192, max_response_tokens=8), options)
    for part in ("imitation", "grpo"):
        sampled, asked = asyncio.run(agents_of(tmp_path / part))
        assert sampled == {"writer"}
        assert asked == {"writer", "checker", "answerer"}


async def agents_of(directory: Path) -> tuple[set[str], set[str | None]]:
    """The agents for which the policy has answered, and those that asked any model."""
    store = await open_store(f"sqlite:///{directory / 'run.db'}")
    rollouts = [rollout.rollout_id for rollout in await store.query_rollouts()]
    calls = [call for rollout in rollouts for call in await store.query_calls(rollout)]
    spans = [span for rollout in rollouts for span in await store.query_spans(rollout)]
    await store.close()
    sampled = {call.agent for call in calls if call.policy is not None and call.response_ids.size}
    return sampled, {span.agent for span in spans if span.operation == semconv.CHAT}
