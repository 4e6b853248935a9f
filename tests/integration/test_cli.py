"""The command line as a person uses it: separate processes, real files, real exits."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import agl_each

from agl._version import __version__
from agl.trainer.cli import main
from agl.trainer.quickstart import policy
from agl.trainer.quickstart import run as quickstart

AGL = [sys.executable, "-c", "from agl.trainer.cli import main; main()"]

AGENT = '''
import re
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI

@tool
def calculator(expression: str) -> str:
    """Calculate `a op b`."""
    return str(eval(expression)) if re.fullmatch(r"[0-9]+ [-+*] [0-9]+", expression) else "error"

model = ChatOpenAI(model="any", api_key="unused", max_completion_tokens=64)
agent = create_agent(model, [calculator], system_prompt="Use the calculator.", name="mine")

def reward(task, output):
    return float(output.strip() == task["answer"])
'''


def _agl(*arguments: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*AGL, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=570)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def _workspace(tmp_path: Path) -> Path:
    from agl.trainer.quickstart.tasks import arithmetic_tasks

    for name, n, split in (("tasks", 32, "train"), ("val", 8, "heldout")):
        lines = map(json.dumps, arithmetic_tasks(n, seed=0, split=split))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.py").write_text(AGENT)
    return tmp_path


_TRAIN = ("train", "--tasks", "tasks.jsonl", "--agent", "mine.py:agent", "--reward", "mine.py:reward")
_SMALL = ("--group-size", 4, "--batch-size", 2, "--max-response-tokens", 24, "--val-every", 2, "--directory", "out")


def test_help_names_every_command(tmp_path: Path) -> None:
    text = _agl("--help", cwd=tmp_path).stdout
    for command in ("quickstart", "train", "eval", "explain", "make-policy", "doctor", "push"):
        assert command in text


def test_the_version(tmp_path: Path) -> None:
    assert _agl("--version", cwd=tmp_path).stdout == f"agl {__version__}\n"


def test_an_untrained_policy_with_the_words_of_another_task(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "texts.txt").write_text("Where is parcel 17?\nThe parcel is in Quito.\n" * 200)
    done = _agl("make-policy", "own", "--corpus", "texts.txt", "--hidden", 64, "--layers", 1, "--json", cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert (facts["loss"], facts["steps"], facts["tokens"]) == (None, 0, 0)
    assert facts["parameters"] < 300_000
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "own")
    assert len(tokenizer.encode(" parcel")) == 1
    said = "The parcel is in Quito."
    turns = [{"role": "user", "content": "Where is parcel 17?"}, {"role": "assistant", "content": said}]
    ids = tokenizer.apply_chat_template(turns, return_dict=False)
    assert said in tokenizer.decode(ids)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (64, 1)
    assert model(torch.tensor([ids])).logits.isfinite().all()
    (tmp_path / "nothing.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for options, reason in (
        (("--corpus", "nothing.txt"), "the corpus is empty"),
        (("--corpus", "missing.txt"), "the corpus cannot be read"),
        (("--corpus", "binary.txt"), "the corpus cannot be read"),
        (("--hidden", 100), "take a multiple of 64, such as 128"),
    ):
        refused = _agl("make-policy", "other", *options, cwd=tmp_path, check=False)
        assert refused.returncode == 1
        assert reason in " ".join(refused.stderr.split())
        assert not (tmp_path / "other").exists()


def test_train_explain_and_resume(untrained_model: Path, tmp_path: Path) -> None:
    here = _workspace(tmp_path)
    common = (*_TRAIN, *_SMALL, "--val", "val.jsonl", "--model", untrained_model, "--steps", 2)
    log = ("--log", "tensorboard", "--project", "p", "--name", "mine")
    done = _agl(*common, *log, "--json", "facts.json", cwd=here)
    assert list((here / "out" / "tensorboard").glob("events.*"))
    facts = json.loads((here / "facts.json").read_text())
    assert facts["steps"] == 2
    assert 0 <= facts["before"] <= 1
    assert (here / facts["policy"] / "config.json").is_file()
    assert (here / facts["checkpoint"] / "run.json").is_file()
    assert "step 2/2" in done.stderr
    assert "step 0 -> step 2: success" in done.stdout
    assert facts["evaluation"]["comparisons"][0]["tasks"] == 8

    listed = _agl("explain", "--list", "--store", "out", "--json", "list.json", cwd=here)
    rollouts = json.loads((here / "list.json").read_text())
    trained = [r for r in rollouts if r["mode"] == "train"]
    assert len(trained) == 16
    assert "train" in listed.stdout
    # Not cut at a screen's width, as another program reads them.
    assert str(trained[-1]["task"]) in listed.stdout
    shown = _agl("explain", trained[0]["rollout_id"][:13], "--store", "out", "--json", "one.json", cwd=here)
    one = json.loads((here / "one.json").read_text())
    assert one["rollout_id"] == trained[0]["rollout_id"]
    assert one["calls"][0]["agent"] == "mine"
    assert one["calls"][0]["step"] == 1
    why = "not trained in step 1: the step made no update"  # nothing untrained is ever right
    for word in ("rollout", "log-probs", "advantage", "training rows", why):
        assert word in shown.stdout

    again = _agl(*common, "--resume", cwd=here)
    assert "step 1/2" not in again.stderr, "both steps are done already"


def test_bad_command_lines(untrained_model: Path, tmp_path: Path) -> None:
    here = _workspace(tmp_path)
    (here / "bad.jsonl").write_text("{}\n{oops\n")
    rest = ("--model", untrained_model, "--steps", 1)

    def tasks(file: str) -> tuple[str, ...]:
        return tuple(file if word == "tasks.jsonl" else word for word in _TRAIN)

    cases: dict[str, tuple[object, ...]] = {
        "--reward": (*_TRAIN, *rest, "--rewards", "x"),
        "mine.py has no 'agnt'": ("train", "--tasks", "tasks.jsonl", "--agent", "mine.py:agnt", *rest),
        "needs a reward": ("train", "--tasks", "tasks.jsonl", "--agent", "mine.py:agent", *rest),
        "no such task file": (*tasks("nowhere.jsonl"), *rest),
        "did you mean 'tensorboard'?": (*_TRAIN, *rest, "--log", "tensorbord"),
        "there is no store at this path": ("explain", "ro-1", "--store", "nowhere"),
        "line 2 is not JSON": (*tasks("bad.jsonl"), *rest),
    }
    for told, (code, output) in zip(cases, agl_each(cases.values(), here), strict=True):
        assert code != 0, output
        assert "Traceback" not in output
        assert told in " ".join(output.split())


@pytest.mark.slow
def test_ctrl_c_ends_within_seconds_and_the_run_goes_on(untrained_model: Path, tmp_path: Path) -> None:
    here = _workspace(tmp_path)
    command = (*_TRAIN, *_SMALL, "--model", untrained_model)
    running = subprocess.Popen(
        [*AGL, *map(str, command), "--steps", "200"], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _wait_for(here / "out" / "checkpoints" / "step-000002" / "run.json", running)
        children = _children(running.pid)
        assert children
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=20)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "Resume it with" in errors
    assert "Traceback" not in errors
    assert not [pid for pid in children if _alive(pid)]
    steps = [int(p.name.removeprefix("step-")) for p in (here / "out" / "checkpoints").glob("step-*")]
    done = max(steps)
    last = json.loads((here / "out" / "checkpoints" / f"step-{done:06d}" / "run.json").read_text())
    assert last["step"] == done


_EVAL = ("eval", "--tasks", "val.jsonl", "--agent", "mine.py:agent", "--reward", "mine.py:reward")


@pytest.mark.slow
@pytest.mark.night
def test_policies_are_evaluated(untrained_model: Path, tmp_path: Path) -> None:
    here = _workspace(tmp_path)
    reports = ("--html", "r/e.html", "--markdown", "r/e.md", "--json", "r/e.json")
    options = ("--against", untrained_model, "--samples", 2, "--max-response-tokens", 16, "--temperature", 0.5,
               "--directory", "e", *reports)  # fmt: skip
    done = _agl(*_EVAL, f"now={untrained_model}", *options, "--fail-below", 0.5, cwd=here, check=False)
    assert done.returncode == 1, done.stderr
    assert "now: the success rate is below 0.5" in done.stderr
    assert f"{untrained_model}: success" not in done.stderr, "what it is compared with may be below"
    assert "now 16/16" in done.stderr
    facts = json.loads((here / "r/e.json").read_text())
    before, now = facts["policies"].values()
    assert (now["tasks"], now["samples"]) == (8, 2)
    assert now["ran"]["fingerprint"] == before["ran"]["fingerprint"]
    assert (now["ran"]["temperature"], now["ran"]["max_response_tokens"]) == (0.5, 16)
    assert max(r["numbers"]["tokens"] / r["numbers"]["calls"] for r in now["rollouts"]) == 16
    # The same weights and seeds: the same answers.
    assert [r["numbers"]["tokens"] for r in now["rollouts"]] == [r["numbers"]["tokens"] for r in before["rollouts"]]
    [comparison] = facts["comparisons"]
    assert (comparison["success"]["value"], comparison["success_p"]) == (0.0, 1.0)
    assert "| success |" in (here / "r/e.md").read_text()
    assert "<h1>Evaluation</h1>" in (here / "r/e.html").read_text()
    again = _agl(*_EVAL, f"now={untrained_model}", *options, "--resume", "--fail-below", 0, cwd=here)
    assert "16/16" not in again.stderr, "all had been run"

    def fails(*arguments: object) -> str:
        failed = _agl(*arguments, cwd=here, check=False)
        assert failed.returncode != 0
        assert "Traceback" not in failed.stderr
        return " ".join(failed.stderr.split())

    assert "'--fail-below'" in fails(*_EVAL, untrained_model, "--fail-below", 1.5)
    (here / "empty.jsonl").write_text("")
    assert "the task file is empty" in fails(*("empty.jsonl" if a == "val.jsonl" else a for a in _EVAL))


@pytest.mark.night
@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation_which_goes_on(untrained_model: Path, tmp_path: Path) -> None:
    here = _workspace(tmp_path)
    command = (*_EVAL, untrained_model, "--samples", "400", "--directory", "e")
    running = subprocess.Popen(
        [*AGL, *map(str, command)], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert running.stderr is not None
        lines = iter(running.stderr.readline, "")
        # Lines before say how far the policy's loading is, where that takes long.
        assert any("/3200" in line for line in lines)
        children = _children(running.pid)
        assert children
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=20)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "resume=True / --resume" in " ".join(errors.split())
    assert "Traceback" not in errors
    assert not [pid for pid in children if _alive(pid)]


def _wait_for(path: Path, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(p) for p in listed.split()]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.slow
def test_the_quickstarts_facts(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command in small: what it writes, not how well it learns. Its policy begins with one that is there."""
    recipe = policy.Recipe(capability_steps=1, mixed_steps=1, learning_rate=1e-9)
    make = functools.partial(policy.make_policy, start=tiny_policy, recipe=recipe)
    monkeypatch.setattr(policy, "make_policy", make)
    monkeypatch.setattr(quickstart, "BATCH_SIZE", 4)
    monkeypatch.setattr(quickstart, "HELDOUT_TASKS", 64)
    monkeypatch.chdir(tmp_path)
    command = ["quickstart", "--steps", "2", "--directory", "qs", "--json", "qs.json"]
    monkeypatch.setattr(sys, "argv", ["agl", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    facts: dict[str, Any] = json.loads((tmp_path / "qs.json").read_text())
    assert set(facts) >= {"before", "after", "seconds", "steps", "parameters", "checkpoint", "curve"}
    assert 0.05 <= facts["before"] < 0.45
    assert facts["steps"] == 2
    assert facts["evaluation"]["policies"]["step 0"]["success"]["value"] == pytest.approx(facts["before"])
    assert facts["evaluation"]["policies"]["step 0"]["tasks"] == 64
    assert facts["parameters"] < 3_000_000
    assert (tmp_path / facts["curve"]).read_text().startswith("<svg ")
    assert (tmp_path / facts["checkpoint"] / "run.json").is_file()


@pytest.mark.night
@pytest.mark.slow
def test_imitation_from_a_shell(tiny_policy: Path, tmp_path: Path) -> None:
    """Two rounds of sampling and imitating; then another policy learns from what the first one's rollouts are."""
    directory = _workspace(tmp_path)
    (directory / "run.yaml").write_text("training:\n  algorithm: rft\n  rounds: 2\n  samples: 2\n  tasks: 3\n")
    rft = (*_TRAIN, "--model", tiny_policy, "--config", "run.yaml", "--where", "reward>=0", "--directory", "rft")
    _agl(*rft, "--max-response-tokens", 48, "--set", "minibatches=1", "--json", "rft.json", "--quiet", cwd=directory)
    facts = json.loads((directory / "rft.json").read_text())
    assert facts["steps"] == 2
    assert [entry["train/rollouts"] for entry in facts["history"] if entry["step"]] == [6, 6]
    assert Path(directory / facts["policy"]).is_dir()

    sft = ("train", "--algorithm", "sft", "--model", tiny_policy, "--data", "rft", "--where", "reward>=0")
    done = _agl(*sft, "--per-task", 1, "--directory", "sft", "--batch-size", 2, "--json", "sft.json", cwd=directory)
    facts = json.loads((directory / "sft.json").read_text())
    assert facts["steps"] >= 1
    assert Path(directory / facts["policy"]).is_dir()
    assert "rollouts" in done.stderr

    refused = _agl(*sft[:-1], "reward>=5", "--directory", "none", cwd=directory, check=False)
    assert refused.returncode == 1
    assert "nothing is left of" in " ".join(refused.stderr.split())
