"""What another program reads of the command line: JSON alone on stdout, for every command; and every help's example."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from agl.trainer.cli.app import app
from agl.trainer.cli.options import with_json

AGL = [sys.executable, "-c", "from agl.trainer.cli import main; main()"]
MINE = """
from openai import OpenAI

def agent(task):
    client = OpenAI(api_key="unused")
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": task["q"]}])
    print("printed by the agent")
    return answer.choices[0].message.content

def reward(task, output):
    return float(len(output) % 2)
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Each command's words and itself; `store` is one, and has another."""

    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", {})
        if name and (not inner or command.invoke_without_command):
            yield name, command
        for word, one in inner.items():
            yield from below(f"{name} {word}".strip(), one)

    yield from below("", typer.main.get_command(app))


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_an_example_that_the_command_takes(name: str) -> None:
    text = " ".join(CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "400"}).output.split())
    match = re.search(r"Example: (agl .*)$", text)
    assert match, text[-200:]
    words = shlex.split(match[1])[1:]
    own = words[: words.index("--")] if "--" in words else words
    assert own[: len(name.split())] == name.split()
    command = COMMANDS[name]
    with command.make_context(
        name, own[len(name.split()) :] + ["x"] * (name == "run"), resilient_parsing=True
    ) as context:
        known = {flag for param in command.get_params(context) for flag in param.opts}
    assert {word for word in own if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ("runs --json", "runs --json -"),
        ("explain --json ro-1", "explain --json - ro-1"),
        ("explain --json out.json ro-1", "explain --json out.json ro-1"),
        ("explain --json dir/out ro-1", "explain --json dir/out ro-1"),
        ("explain ro-1 --json --store x", "explain ro-1 --json - --store x"),
        ("run --json -- python x.py --json", "run --json - -- python x.py --json"),
        ("run python x.py --json", "run python x.py --json"),
        ("run -- python x.py --json", "run -- python x.py --json"),
    ],
)
def test_a_file_may_follow(words: str, sent: str) -> None:
    assert with_json(words.split())[0] == sent.split()


def agl(*words: object, cwd: Path) -> str:
    """What a command prints to stdout."""
    done = subprocess.run([*AGL, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, and what `agl train --json` printed of it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "mine.py").write_text(MINE)
    (folder / "tasks.jsonl").write_text("\n".join(json.dumps({"q": f"{n}?"}) for n in range(4)))
    printed = agl(
        "train", "--json", "--model", untrained_model, "--tasks", "tasks.jsonl", "--val", "tasks.jsonl",
        "--agent", "mine.py:agent", "--reward", "mine.py:reward", "--steps", 1, "--group-size", 2, "--batch-size", 2,
        "--max-response-tokens", 6, "--directory", "agl-runs/a", cwd=folder,
    )  # fmt: skip
    (folder / "train.json").write_text(printed)
    return folder


def lines(printed: str) -> list[Any]:
    return [json.loads(line) for line in printed.splitlines()]


def test_train(place: Path) -> None:
    facts = json.loads((place / "train.json").read_text())
    assert facts["steps"] == 1
    assert facts["before"] is not None


def test_lists_are_json_lines(place: Path) -> None:
    (run,) = lines(agl("runs", "--json", cwd=place))
    facts = json.loads((place / "train.json").read_text())
    assert (run["status"], run["step"], run["steps"]) == ("succeeded", 1, 1)
    assert run["val/reward"] == [facts["before"], facts["after"]]
    rollouts = lines(agl("explain", "--list", "--json", "--store", "agl-runs/a", cwd=place))
    assert len(rollouts) == 4 + 4 + 4
    assert rollouts == lines(agl("trace", "ls", "--json", "--store", "agl-runs/a", cwd=place))
    agl("runs", "--json", "runs.jsonl", cwd=place)
    assert lines((place / "runs.jsonl").read_text()) == [run]
    agl("runs", "--json", "runs.json", cwd=place)
    assert json.loads((place / "runs.json").read_text()) == [run]


def test_the_other_commands(place: Path, untrained_model: Path) -> None:
    store = ("--store", "agl-runs/a")
    rollout = lines(agl("trace", "ls", "--json", *store, cwd=place))[-1]["rollout_id"]
    assert json.loads(agl("explain", rollout, "--json", *store, cwd=place))["rollout_id"] == rollout
    assert lines(agl("trace", "show", rollout, "--json", *store, cwd=place))
    assert json.loads(agl("export", "--out", "exported", "--json", *store, cwd=place))["rollouts"] == 12
    assert "versions" in json.loads(agl("doctor", "--json", cwd=place))
    assert json.loads(agl("doctor", "--json", "--model", untrained_model, cwd=place))["parameters"]
    assert json.loads(agl("store", "prune", "--older-than", "1d", "--json", *store, cwd=place))["rollouts"] == 0
    ran = json.loads(agl("run", "--json", "--store", "r.db", "--", sys.executable, "-c", "print('hello')", cwd=place))
    assert ran["exit_code" if "exit_code" in ran else "status"] in (0, "succeeded")
    evaluated = json.loads(
        agl(
            "eval", "agl-runs/a", "--tasks", "tasks.jsonl", "--agent", "mine.py:agent", "--reward", "mine.py:reward",
            "--max-response-tokens", 4, "--json", "-", cwd=place,
        )
    )  # fmt: skip
    assert evaluated["policies"]


@pytest.mark.parametrize("words", ["store --db sqlite:///s.db --port 0", "dashboard agl-runs/a --port 0"])
def test_a_server_prints_where_it_is_at_its_start(words: str, place: Path) -> None:
    with subprocess.Popen([*AGL, *words.split(), "--json"], cwd=place, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        server.send_signal(signal.SIGINT)
        assert server.stdout.read() == ""
    assert json.loads(text)["url"].startswith("http://127.0.0.1:")
