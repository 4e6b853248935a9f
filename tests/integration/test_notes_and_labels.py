"""What people note on runs and rollouts: labels are rewards that select and are exported, and change no training; runs
are named, tagged, deleted, restored and stopped, by the command line and by the dashboard."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboards import served
from launching import AGL
from openai import OpenAI
from tiny_run import StopAfter, train

import agl
from agl.errors import ConfigError
from agl.mdp.conditions import reward
from agl.testing.provider import Reply, serve
from agl.trainer.report.explain import explain
from agl.trainer.report.labels import label
from agl.trainer.store.location import read_store
from agl.trainer.traces.stored import Traces


@pytest.fixture
def run(untrained_model: Path, tmp_path: Path) -> agl.Result:
    return train(untrained_model, tmp_path / "run", steps=1)


def command(*words: object, cwd: Path) -> Any:
    done = subprocess.run(
        [*AGL, *map(str, words), "--json"], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return json.loads(done.stdout) if lines[0] == "{" else [json.loads(line) for line in lines]


def rollouts(result: agl.Result, mode: str = "train") -> list[str]:
    found = read_store(result.store, lambda store: store.query_rollouts(mode=mode))  # type: ignore[arg-type]
    return [r.rollout_id for r in found]


def answers(task: dict[str, str]) -> float:
    client = OpenAI()
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
    return 0.5


def test_labels_select_what_is_imitated(untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(lambda body: Reply("4")) as provider:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        tasks = [{"question": f"{i} + 1?"} for i in range(5)]
        run = agl.Trainer(agl.Baseline(), directory=tmp_path / "run", progress=False).fit(agl.rollout(answers), tasks)
    good, changed, bad, withdrawn, _ = rollouts(run, "dev")
    for rollout, value, note in (
        (good, 1, "as I would"),
        (changed, 0, None),
        (bad, 0, "guessed"),
        (withdrawn, 1, None),
    ):
        command("label", rollout, value, *(["--note", note] if note else []), "--store", run.store, cwd=tmp_path)
    command("label", changed, 0.9, "--note", "on second thoughts", "--store", run.store, cwd=tmp_path)
    command("label", withdrawn, "--remove", "--store", run.store, cwd=tmp_path)

    chosen = Traces(run.directory, where=reward("label") >= 0.9).load(str(untrained_model))
    assert {trajectory.rollout_id for trajectory in chosen.trajectories} == {good, changed}
    report = explain(changed, run.store)
    assert report.total_reward == 0.5  # a label is in no sum
    shown = {r.name: r for r in report.rewards}["label"]
    assert (shown.value, shown.explanation, shown.primary) == (0.9, "on second thoughts", False)
    assert "label" not in {r.name for r in explain(withdrawn, run.store).rewards}
    facts = command("export", "rewards", "--out", "out", "--where", "label<0.9", "--store", run.store, cwd=tmp_path)
    assert facts["rows"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ro-none", "1"), "no rollout"),
        (("ROLLOUT",), "no value"),
        (("ROLLOUT", "nan"), "a label of nan"),
        (("ROLLOUT", "1", "--name", "reward"), "has a reward 'reward' of its own"),
    ],
)
def test_a_label_that_cannot_be_given(words: tuple[str, ...], message: str, run: agl.Result) -> None:
    named = [rollouts(run)[0] if word == "ROLLOUT" else word for word in words]
    done = subprocess.run(
        [*AGL, "label", *named, "--store", run.store], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr


def test_runs_are_noted_deleted_and_restored(run: agl.Result) -> None:
    place = run.directory
    words = ("--name", "baseline", "--tag", "a", "--tag", "b", "--text", "before")
    command("note", run.run_id[:9], *words, "--store", run.store, cwd=place)
    facts = command("note", run.run_id, "--untag", "a", "--tag", "c", "--delete", "--store", run.store, cwd=place)
    assert (facts["name"], facts["tags"], facts["note"]) == ("baseline", ["b", "c"], "before")
    assert command("runs", run.directory, "--deleted", cwd=place)[0]["name"] == "baseline"
    empty = subprocess.run([*AGL, "runs", ".", "--json"], cwd=place, capture_output=True, text=True, timeout=60)
    assert (empty.returncode, empty.stdout) == (0, "")
    command("note", run.run_id, "--restore", "--store", run.store, cwd=place)
    (row,) = command("runs", run.directory, cwd=place)
    assert (row["name"], row["tags"], row["note"], row["step"]) == ("baseline", ["b", "c"], "before", 1)


def test_a_page_writes_what_the_command_line_does(run: agl.Result) -> None:
    (rollout, *_) = rollouts(run)
    with served(run.directory) as page:
        assert page.post(f"0/rollouts/{rollout}/label", {"value": 0.5, "note": "half"}).status_code == 200
        labels = [r for r in page.json(f"0/rollouts/{rollout}")["rewards"] if r["source"] == "label"]
        assert [(r["value"], r["explanation"]) for r in labels] == [(0.5, "half")]
        assert page.post(
            f"0/runs/{run.run_id}/about", {"name": "mine", "tags": ["x", " x ", ""], "deleted": True}
        ).is_success
        assert page.json("runs")["runs"] == []
        (row,) = page.json("runs?deleted=1")["runs"]
        assert (row["name"], row["about"]["tags"]) == ("mine", ["x"])
        for path, value in (
            (f"0/runs/{run.run_id}/about", {"step": 7}),
            (f"0/runs/{run.run_id}/about", {"tags": "x"}),
            (f"0/runs/{run.run_id}/about", {"note": "x" * 5000}),
            (f"0/runs/{run.run_id}/about", {"deleted_at": 1.0}),
            (f"0/rollouts/{rollout}/label", {"value": "1"}),
            (f"0/rollouts/{rollout}/label", {"value": True}),
            (f"0/rollouts/{rollout}/label", []),
        ):
            assert page.post(path, value).status_code == 400, (path, value)
        stopped = page.post(f"0/runs/{run.run_id}/stop", {})
        assert (stopped.status_code, stopped.json()["error"]["message"]) == (409, "the run has succeeded")
        assert page.json(f"0/runs/{run.run_id}")["stopping"] is False
        # Without the key, and as another site's page would send it.
        bare = f"{page.url}/api/0/runs/{run.run_id}/stop"
        assert httpx.post(bare, json={}).status_code == 401
        text = {"authorization": f"Bearer {page.key}", "content-type": "text/plain"}
        for path in (f"runs/{run.run_id}/about", f"rollouts/{rollout}/label"):
            assert httpx.post(f"{page.url}/api/0/{path}", content="{}", headers=text).status_code == 415


def test_a_run_is_stopped_from_outside_and_goes_on(untrained_model: Path, tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tiny_run import StopAfter, train
result = train(Path({str(untrained_model)!r}), Path("run"), steps=500, every=500)
print(result.history[-1]["step"])
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not ((found := _runs(tmp_path)) and found[0]["step"] >= 1):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        asked = command("stop", found[0]["run_id"], "--store", "run", cwd=tmp_path)
        output, _ = process.communicate(timeout=120)
    done = int(output.split()[-1])
    assert process.returncode == 0
    assert asked["step"] <= done < 500
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06d}").is_dir()
    result = train(untrained_model, tmp_path / "run", steps=500, every=500, resume=True, callbacks=StopAfter(done + 1))
    assert [entry["step"] for entry in result.history] == list(range(done + 2))


def _runs(place: Path) -> list[dict[str, Any]]:
    return command("runs", "run", cwd=place) if (place / "run" / "run.db").exists() else []


def test_a_number_too_large_for_a_float_is_no_label(run: agl.Result) -> None:
    (rollout, *_) = rollouts(run)
    with pytest.raises(ConfigError, match="a label of 1000"):
        read_store(run.store, lambda store: label(store, rollout, 10**400))


def test_what_cannot_be_noted_is_refused(run: agl.Result) -> None:
    from agl.trainer.run.about import note

    for changes in ({"nme": "x"}, {"name": 3}, {"deleted": "yes"}):
        with pytest.raises(ConfigError, match="cannot be noted on a run"):
            read_store(run.store, lambda store, c=changes: note(store, run.run_id, c))
