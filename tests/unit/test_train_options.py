"""`agl train`: every algorithm by name, and options from flags, `--set` and a file, all checked alike."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import agl
from agl.errors import ConfigError
from agl.trainer.algorithms.options import ALGORITHMS
from agl.trainer.cli.app import app

MINE = """
import agl

rank = agl.rewards.RankJudge("judge", api_key="k")

def agent(task):
    return "x"

def reward(task, output):
    return 1.0
"""


class _Built(Exception):
    pass


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`agl train` up to the trainer: the algorithm, and the trainer's options."""
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n')
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)

    def build(trainer: Any, algorithm: Any, **options: Any) -> None:
        agl.Trainer.__wrapped__(trainer, algorithm, **options)  # type: ignore[attr-defined]
        raise _Built(algorithm, options)

    def run(*words: object) -> tuple[Any, dict[str, Any]]:
        given = ["train", *map(str, words)]
        if "--model" not in given and "--config" not in given:
            given += ["--model", "m"]
        if "--tasks" not in given and "--data" not in given:
            given += ["--tasks", "tasks.jsonl", "--agent", "mine.py:agent"]
            given += [] if "--reward" in given else ["--reward", "mine.py:reward"]
        result = CliRunner().invoke(app, given, catch_exceptions=True)
        if isinstance(result.exception, _Built):
            return result.exception.args  # type: ignore[return-value]
        assert result.exception is not None, result.output
        raise result.exception

    original = agl.Trainer.__init__
    agl.Trainer.__wrapped__ = original  # type: ignore[attr-defined]
    monkeypatch.setattr(agl.Trainer, "__init__", build)
    yield run
    del agl.Trainer.__wrapped__  # type: ignore[attr-defined]


def recorded(directory: Path) -> Path:
    """A store, of which nothing is read before training."""
    import asyncio

    from agl.trainer.store import open_store

    async def make() -> None:
        await (await open_store(f"sqlite:///{directory / 'run.db'}")).close()

    asyncio.run(make())
    return directory / "run.db"


GIVEN: dict[str, list[str]] = {"sft": ["--data"], "distill": ["--set", "teacher=big"]}
"""What an algorithm cannot do without."""


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_by_its_name(name: str, train: Any, tmp_path: Path) -> None:
    given = GIVEN.get(name, [])
    given = [*given, str(recorded(tmp_path))] if given == ["--data"] else given
    algorithm, options = train("--algorithm", name, *given)
    cls = ALGORITHMS[name]
    assert type(algorithm) is cls
    assert algorithm.model == "m"
    defaults = {f.name: f.default for f in fields(cls)}
    how_long = (algorithm.steps, algorithm.epochs)
    assert how_long == {"sft": (None, 1), "dpo": (None, 1), "rft": (None, None)}.get(name, (200, None))
    for option in ("learning_rate", "temperature", "val_every", "batch_size", "group_size"):
        if option in defaults:
            assert getattr(algorithm, option) == defaults[option], option
    assert (options["n_workers"], options["seed"], options["timeout"]) == (8, 0, 600.0)
    assert (options["air"], options["credit"], options["directory"]) == (None, agl.credit.Uniform(), None)
    more, _ = train("--algorithm", name.upper(), *given, "--learning-rate", "3e-4", "--set", "weight_decay=0.1")
    assert (more.learning_rate, more.weight_decay) == (3e-4, 0.1)


def test_flags_beat_assignments_and_those_the_file(train: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model:\n  name: of-the-file\n  lora: 4\ntraining:\n  algorithm: rloo\n  epochs: 2\n  batch_size: 4\n"
        "  kl_coef: 0.5\nruntime:\n  nworkers: 3\n  timeout: 7\n  directory: there\n"
        "  credit: per_agent(shared=0.5, own=2)\n"
    )
    algorithm, options = train("--config", "run.yaml", "--set", "batch_size=5", "--kl-coef", "0.2")
    assert type(algorithm) is agl.RLOO
    assert (algorithm.model, algorithm.epochs, algorithm.steps) == ("of-the-file", 2, None)
    assert (algorithm.batch_size, algorithm.kl_coef, algorithm.lora) == (5, 0.2, agl.LoraSpec(rank=4, alpha=8.0))
    assert (options["n_workers"], options["timeout"], options["directory"]) == (3, 7, "there")
    assert options["credit"] == agl.credit.PerAgent(0.5, 2)
    algorithm, options = train(
        "--config", "run.yaml", "--steps", 9, "--model", "mine", "--n-workers", 2, "--directory", "here"
    )
    assert (algorithm.steps, algorithm.epochs, algorithm.model) == (9, None, "mine")
    assert (options["n_workers"], options["directory"]) == (2, "here")


@pytest.mark.parametrize(
    ("text", "credit"),
    [
        ("uniform", agl.credit.Uniform()), ("Discounted(0.9)", agl.credit.Discounted(0.9)),
        ("per-call(shared=0.5)", agl.credit.PerCall(0.5)), ("per_agent", agl.credit.PerAgent()),
        ("turn_groups(gamma=0.5)", agl.credit.TurnGroups(0.5)), ("competitive", agl.credit.Competitive()),
    ],
)  # fmt: skip
def test_credit_by_name(text: str, credit: Any, train: Any) -> None:
    assert train("--credit", text)[1]["credit"] == credit


def test_rewards_of_tools_and_of_groups(train: Any, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text("import agl\n@agl.air.on_tool_failure\ndef failed(error):\n    return -0.1\n")
    try:
        assert train("--air")[1]["air"] is True
        assert train("--air", "--set", "air_rules=rules.py")[1]["air"] is True
        assert len(agl.air) == 1
    finally:
        agl.air.clear()
    assert train("--reward", "mine.py:rank")[1]["group_reward"].label == "rank"
    assert train()[1]["group_reward"] is None


def test_what_samples(train: Any) -> None:
    if find_spec("vllm") is None:
        with pytest.raises(ConfigError, match="engine='vllm' needs vllm"):
            train("--set", "engine=vllm")
    assert train("--set", "engine=torch", "--set", "attention=sdpa")[0].attention == "sdpa"


def test_what_is_imitated(train: Any, tmp_path: Path) -> None:
    store = recorded(tmp_path)
    algorithm, options = train(
        "--algorithm", "sft", "--data", store, "--where", "reward>=1", "--agents", "w*", "--per-task", 2
    )
    assert (algorithm.data.stores, algorithm.data.where, algorithm.data.agents) == ([str(store)], "reward>=1", ["w*"])
    assert (algorithm.data.per_task, options["agents"]) == (2, ["w*"])
    algorithm, _ = train("--algorithm", "dpo", "--data", store, "--set", "by=correct", "--set", "beta=0.2")
    assert (str(algorithm.by), algorithm.beta) == (str(agl.reward("correct")), 0.2)
    algorithm, _ = train("--algorithm", "rft", "--where", "reward>=0.5", "--per-task", 3, "--set", "rounds=2")
    assert (algorithm.where, algorithm.per_task, algorithm.rounds) == ("reward>=0.5", 3, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "grop"], "--algorithm: there is no algorithm 'grop'\n  -> did you mean 'grpo'"),
        (["--algorithm", "gepa"], "agl.GEPA is used in a script"),
        (["--set", "bacth_size=3"], "there is no option 'bacth_size'\n  -> did you mean 'batch_size'"),
        (["--set", "batch_size=lots"], "--set batch_size=lots: batch_size is 'lots'"),
        (["--set", "batch_size"], "--set 'batch_size' names no value"),
        (["--algorithm", "rft", "--kl-coef", "0.1"], "--kl-coef: RFT has no option 'kl_coef'"),
        (["--algorithm", "rft", "--set", "sample=2"], "there is no option 'sample'\n  -> did you mean 'samples'"),
        (["--algorithm", "grpo", "--where", "reward>=1"], "--where: GRPO has no option 'where'"),
        (["--algorithm", "sft"], "SFT needs data=\n  -> --data STORE"),
        (["--algorithm", "sft", "--where", "reward>=1"], "SFT needs data="),
        (["--algorithm", "distill"], "Distill needs teacher=\n  -> --set teacher="),
        (["--algorithm", "rft", "--data", "x.db"], "--data: RFT learns from rollouts that it samples"),
        (["--algorithm", "rft", "--where", "reward=>1"], "where is .reward=>1."),
        (["--credit", "discuonted(0.9)"], "--credit: there is no credit 'discuonted"),
        (["--credit", "discounted(gama=0.9)"], "--credit: credit 'discounted"),
        (["--credit", "discounted(open('x'))"], "--credit: credit .*malformed"),
        (["--device", "cdua"], "--device: device is 'cdua': input should be 'auto', 'cpu', 'cuda' or 'mps'"),
        (["--config", "none.yaml"], "the configuration cannot be read"),
        (["--tasks", "tasks.jsonl"], "no agent given"),
        (["--kl-coef", "0.1", "--set", "kl_coef=0.2"], "--kl-coef: kl_coef is set twice: --set kl_coef=0.2 sets it"),
        (["--set", "n_workers=4", "--set", "nworkers=8"], "nworkers is set twice: n_workers .*sets it"),
        (["--algorithm", "rft", "--epochs", "3"], "RFT with steps=None, epochs=3\n  -> rounds="),
        (["--set", "gpus=2"], "the embedded trainer uses one GPU, not 2"),
        (["--steps", "2", "--epochs", "2"], "either steps= or epochs="),
        (["--set", "engine=http://gpu:8000"], "the weights of another server cannot be trained here"),
        (["--model", ""], "no model given"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(words: list[str], message: str, train: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        train(*words)


def flags(command: str) -> set[str]:
    import typer

    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {name for p in found.get_params(typer.Context(found)) for name in p.opts if name.startswith("--")}


def test_every_setting_that_can_be_text_is_an_option_with_a_help_text() -> None:
    from agl.trainer.algorithms.options import OPTIONS, SECTIONS
    from agl.trainer.run.config import RunConfig

    assert [name for name, option in OPTIONS.items() if not option.help] == []
    assert {f.name for f in fields(RunConfig)} >= set(SECTIONS["runtime"]) - {"air_rules"}
    of_run = {f"--{name.replace('_', '-')}" for name in SECTIONS["runtime"]}
    assert of_run <= flags("train") & flags("serve")


def test_the_flags_of_train(train: Any) -> None:
    assert train("--reward-range", "-1,1")[1]["reward_range"] == (-1.0, 1.0)
    algorithm, options = train("--lora", 4, "--n-workers", 2, "--directory", "here")
    assert (algorithm.lora, options["n_workers"], options["directory"]) == (agl.LoraSpec(rank=4, alpha=8.0), 2, "here")
    known = (
        "tasks model algorithm agent agent-command reward env val agents data where per-task air credit steps epochs "
        "group-size batch-size learning-rate warmup-steps schedule kl-coef temperature max-response-tokens val-every "
        "prompts device runners host port gateways store silent-seconds timeout max-attempts log project name seed "
        "resume dev dashboard set config json quiet lora n-workers directory runner-patience capture-content air-rules "
        "reward-range help webhook"
    )
    assert flags("train") == {f"--{name}" for name in known.split()}
