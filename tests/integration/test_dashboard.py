"""The dashboard's API on a store that a real training made: what it says is what the store and `explain` say."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from dashboards import CONTROL, HOSTILE, MARKUP, Dashboard, rollouts, served, train_hostile
from launching import AGL
from rules import HELD_OUT, START, apo, fit, gepa, rule_provider, template_agent
from store_server import KEYS, OPERATOR, RUNNER

import agl
from agl.texts import printable
from agl.trainer.dashboard import views
from agl.trainer.dashboard.app import dashboard_app, ui_routes
from agl.trainer.dashboard.sources import Source
from agl.trainer.report.rollout_report import describe
from agl.trainer.store import open_store
from agl.trainer.store.http.server import StoreServer
from agl.trainer.store.types import NewRollout, TrainingRun

CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f]")


@pytest.fixture(scope="module")
def run(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> agl.Result:
    return train_hostile(untrained_model, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run: agl.Result) -> Iterator[Dashboard]:
    with served(run.directory) as dashboard:
        yield dashboard


def test_a_run_is_its_history(page: Dashboard, run: agl.Result) -> None:
    listed = page.json("runs")
    (row,) = listed["runs"]
    assert (row["run_id"], row["status"], row["step"], row["steps"]) == (run.run_id, "succeeded", 2, 2)
    heldout = [h["val/reward"] for h in run.history if "val/reward" in h]
    assert [value for _, value in row["ends"]["val/reward"]] == pytest.approx([heldout[0], heldout[-1]])
    metrics = page.json(f"0/runs/{run.run_id}/metrics")
    for entry in run.history:
        at = metrics["steps"].index(entry["step"])
        assert metrics["values"]["val/reward"][at] == pytest.approx(entry["val/reward"])
    later = page.json(f"0/runs/{run.run_id}/metrics?after=1")
    assert later["steps"] == [2]
    assert later["values"]["train/reward"] == [metrics["values"]["train/reward"][-1]]


def test_a_run_that_is_no_search_has_no_candidates(page: Dashboard, run: agl.Result) -> None:
    assert page.json(f"0/runs/{run.run_id}/prompts?candidate=0") == {"candidates": []}


def test_a_step_is_read_in_pages(page: Dashboard, run: agl.Result) -> None:
    path = f"0/runs/{run.run_id}/steps/train/1"
    whole = page.json(path)
    assert whole["total"] == len(whole["rollouts"]) == 8
    assert whole["next"] is None
    parts, after = [], ""
    while True:
        part = page.json(f"{path}?limit=3{after}")
        parts += part["rollouts"]
        if part["next"] is None:
            break
        after = f"&after={part['next']}"
    assert [r["rollout_id"] for r in parts] == [r["rollout_id"] for r in whole["rollouts"]]
    assert {r["rollout_id"] for r in parts} == {r.rollout_id for r in rollouts(run.directory, step=1, mode="train")}


def test_neighbours_are_the_steps_that_have_rollouts(tmp_path: Path) -> None:
    """A search for prompts validates in steps between those that it trains on."""

    async def fill() -> None:
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        await store.put_run(TrainingRun("run-search", algorithm="GEPA", step=7, created_at=1.0))
        for mode, steps in (("train", (0, 3, 4)), ("val", (2, 7))):
            new = [NewRollout(task="t", mode=mode, run_id="run-search", step=step) for step in steps]  # type: ignore[arg-type]
            await store.enqueue_rollouts(new)
        await store.close()

    asyncio.run(fill())
    with served(tmp_path) as shown:
        around = {s: shown.json(f"0/runs/run-search/steps/train/{s}")["around"] for s in (0, 3, 4)}
        assert around == {0: [None, 3], 3: [0, 4], 4: [3, None]}
        assert shown.json("0/runs/run-search/steps/val/2")["around"] == [None, 7]


def test_a_rollout_is_what_explain_says_page_by_page(
    page: Dashboard, run: agl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = page.json(f"0/runs/{run.run_id}/steps/train/0")["rollouts"][0]["rollout_id"]

    async def explained() -> Any:
        store = await open_store(run.store)
        try:
            return await describe(store, id)
        finally:
            await store.close()

    report = asyncio.run(explained())
    monkeypatch.setattr(views, "MOST_TOKENS", 5)
    calls: dict[str, list[Any]] = {}
    forks: list[Any] = []
    first: Any = [0, 0]
    while first is not None:
        part = page.json(f"0/rollouts/{id}?call={first[0]}&token={first[1]}")
        assert sum(len(c["tokens"]["ids"]) for c in part["calls"]) <= 5
        for call in part["calls"]:
            if call["first_token"] == 0:
                forks.append(call["fork"])
            tokens = call["tokens"]
            calls.setdefault(call["id"], []).extend(zip(tokens["texts"], tokens["ids"], tokens["trained"], strict=True))
        first = part["next"]
    assert list(calls) == [c.call.id for c in report.calls]
    for call in report.calls:
        assert calls[call.call.id] == [(printable(t.text), t.id, t.trained) for t in call.tokens]
    assert part["rows"] == [views.shown(vars_of(row)) for row in report.rows]
    assert forks == [c.fork for c in report.calls]
    assert forks[1].startswith("assistant_rewritten")
    group = page.json(f"0/rollouts/{id}/group")["rollouts"]
    assert [r["rollout_id"] for r in group] == page.json(f"0/rollouts/{id}")["siblings"]
    assert len(group) == 4


def vars_of(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def test_what_agents_and_tools_wrote_controls_nothing(page: Dashboard, run: agl.Result) -> None:
    ids = [r.rollout_id for r in rollouts(run.directory)]
    paths = ["runs", f"0/runs/{run.run_id}", "0/rollouts?mode=train", f"0/runs/{run.run_id}/steps/train/0"]
    texts = [json.dumps(page.json(path), ensure_ascii=False) for path in paths]
    texts += [json.dumps(page.json(f"0/rollouts/{id}"), ensure_ascii=False) for id in ids]
    for text in texts:
        assert not CONTROL_CHARACTERS.search(text)
    everything = "".join(texts)
    # Markup stays what it is: text.
    assert json.dumps(MARKUP)[1:-1] in everything
    assert json.dumps(printable(CONTROL))[1:-1] in everything
    failed = next(r for r in page.json(f"0/runs/{run.run_id}/steps/train/0")["rollouts"] if r["attempts"] > 1)
    (attempt, *_) = page.json(f"0/rollouts/{failed['rollout_id']}")["attempts"]
    assert printable(HOSTILE) in attempt["error"]


def test_a_page_of_a_long_text_is_bounded() -> None:
    value = {"text": "x" * 1_000_000, "deep": None, "many": list(range(100_000)), "large": 2**60, "nan": float("nan")}
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    shown = views.shown({**value, "deep": deep})
    assert len(json.dumps(shown)) < 200_000
    assert shown["text"].endswith("(980,000 more characters)")
    assert shown["large"] == str(2**60)
    assert shown["nan"] is None
    assert len(json.dumps(views.shown(["x" * 1000] * 1000, total=5000))) < 100_000


def test_keys_and_headers(page: Dashboard, run: agl.Result) -> None:
    for path in ("api/runs", "metrics", "agents", "memory", f"api/0/runs/{run.run_id}"):
        assert page.get(path).status_code == 200
        for key in ("", "not-the-key-of-this-server"):
            answer = page.get(path, key=key)
            assert answer.status_code == 401
            assert "link" in answer.json()["error"]["message"]
    for path in ("", "static/app.js", "static/vendor/uplot.js", "api/runs", "nothing"):
        headers = page.get(path, key="").headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert page.get("", key="").text.startswith("<!doctype html>")
    assert page.get("", key="", headers={"accept": "application/json"}).status_code == 401
    tag = page.get("static/app.js").headers["etag"]
    assert page.get("static/app.js", headers={"if-none-match": tag}).status_code == 304
    # A name that its owner points at this machine.
    assert page.get("api/runs", headers={"host": "evil.test"}).status_code == 403
    for sent, status in (({}, 401), ({"authorization": f"Bearer {page.key}"}, 405)):
        answer = httpx.post(f"{page.url}/metrics/update?iteration=1&reward=9", headers=sent)
        assert answer.status_code == status


def test_a_runners_key_reads_nothing(run: agl.Result) -> None:
    transport = httpx.ASGITransport(dashboard_app([Source("run", run.store)], KEYS))

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            keys = (OPERATOR, RUNNER)
            return [
                (await client.get("/api/stores", headers={"authorization": f"Bearer {key}"})).status_code
                for key in keys
            ]

    assert asyncio.run(statuses()) == [200, 403]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("0/runs/run-nowhere", 404),
        ("0/runs/run-nowhere/metrics", 404),
        ("0/rollouts/ro-nowhere", 404),
        ("7/runs/x", 404),
        ("7/runners", 404),
        ("0/runs/RUN/steps/dreams/0", 400),
        ("0/runs/RUN/steps/train/0?limit=0", 400),
        ("0/runs/RUN/steps/train/0?limit=1e9", 400),
        ("0/runs/RUN/metrics?after=x", 400),
        (f"0/rollouts/{'x' * 300}", 400),
        ("compare?a=0:RUN", 400),
        ("compare?a=0:RUN&b=9:RUN", 400),
        ("compare?a=0:RUN&b=0:run-nowhere", 404),
        ("compare?a=0:RUN&b=0:RUN&b_step=77", 404),
        ("nothing", 404),
        ("../app.py", 404),
    ],
)
def test_what_is_not_there_is_said(page: Dashboard, run: agl.Result, path: str, status: int) -> None:
    answer = page.get(f"api/{path.replace('RUN', run.run_id)}")
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    for outside in ("static/../app.py", "static/%2e%2e/app.py", "static//etc/passwd", "static/"):
        assert page.get(outside).status_code == 404


def test_validations_are_compared_task_by_task(page: Dashboard, run: agl.Result) -> None:
    found = page.json(f"compare?a=0:{run.run_id}&b=0:{run.run_id}&a_step=0")
    assert [(side["step"], side["steps"]) for side in found["sides"]] == [(0, [0, 1, 2]), (2, [0, 1, 2])]
    rewards = [
        {r["rollout_id"]: r["reward"] for r in page.json(f"0/runs/{run.run_id}/steps/val/{step}")["rollouts"]}
        for step in (0, 2)
    ]
    mean = [sum(side.values()) / len(side) for side in rewards]
    assert [side["reward"] for side in found["sides"]] == pytest.approx(mean)
    assert found["paired"]["tasks"] == 2
    assert found["paired"]["difference"] == pytest.approx(mean[1] - mean[0])
    for task in found["changed"]:
        assert task["rewards"] == [rewards[i][task["rollouts"][i][0]] for i in (0, 1)]
    assert found["better"] + found["worse"] == len(found["changed"])


def test_the_guides_endpoints(page: Dashboard, run: agl.Result) -> None:
    whole = page.get("", headers={"accept": "application/json"}).json()
    assert whole["status"] == "running"
    assert set(whole["endpoints"]) == {"/metrics", "/agents", "/memory"}
    metrics = page.get("metrics").json()
    assert metrics == whole["metrics"]
    assert metrics["training_iterations"] == 2
    assert metrics["average_reward"] == pytest.approx(run.history[-1]["train/reward"])
    assert metrics["memory_size"] == page.get("memory").json()["memory_size"] == len(rollouts(run.directory))
    assert metrics["active_agents"] == [printable(HOSTILE)]
    (agent,) = page.get("agents").json()["agents"]
    assert (agent["agent"], agent["rollouts"]) == (printable(HOSTILE), 8)


def test_a_pruned_rollout_says_so_and_what_was_trained_remains(run: agl.Result, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.directory, copy)
    (rollout, *_) = rollouts(copy, step=0, mode="train")

    async def prune() -> None:
        store = await open_store(f"sqlite:///{copy / 'run.db'}")
        await store.prune(time.time() + 10)
        await store.close()

    asyncio.run(prune())
    with served(copy) as dashboard:
        answer = dashboard.json(f"0/rollouts/{rollout.rollout_id}")
        assert answer["pruned"] is True
        assert answer["rollout"]["task"]
        assert all(call["tokens"] > 0 for call in answer["trained"])
        assert len(answer["trained"]) == 2


def test_a_store_that_cannot_be_read_hides_no_other(run: agl.Result, tmp_path: Path) -> None:
    for name in ("newer", "older"):
        shutil.copytree(run.directory, tmp_path / name)
    with sqlite3.connect(tmp_path / "newer" / "run.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    with served(tmp_path / "newer", tmp_path / "older") as dashboard:
        listed = dashboard.json("runs")
        assert [r["store"] for r in listed["runs"]] == [1]
        assert "9999" in listed["stores"][0]["error"]["message"]
        assert listed["stores"][0]["error"]["hint"]
        assert dashboard.get("api/0/runners").status_code == 409


def test_a_store_without_a_model_shows_ids(run: agl.Result, tmp_path: Path) -> None:
    shutil.copytree(run.directory, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "run.db") as database:
        database.execute('UPDATE rollouts SET metadata = \'{"model": "/nowhere"}\'')
    (rollout, *_) = rollouts(tmp_path / "run", step=0, mode="train")
    with served(tmp_path) as dashboard:
        (call, *_) = dashboard.json(f"0/rollouts/{rollout.rollout_id}")["calls"]
        assert call["tokens"]["texts"] == [f"<{i}>" for i in call["tokens"]["ids"]]


def test_the_page_of_a_served_store_and_of_its_url(run: agl.Result) -> None:
    id = rollouts(run.directory, step=0, mode="train")[0].rollout_id

    async def main() -> None:
        store = await open_store(run.store)
        server = StoreServer(store, port=0, keys=KEYS, extra_routes=ui_routes(store, "run", KEYS))
        url = await server.start()
        try:
            operator = {"authorization": f"Bearer {OPERATOR}"}
            async with httpx.AsyncClient(follow_redirects=True, timeout=60) as client:
                assert (await client.get(f"{url}/ui")).text.startswith("<!doctype html>")
                assert (await client.get(f"{url}/ui/static/app.js")).status_code == 200
                assert (await client.get(f"{url}/ui/api/runs")).status_code == 401
                direct = (await client.get(f"{url}/ui/api/runs", headers=operator)).json()
                assert [r["run_id"] for r in direct["runs"]] == [run.run_id]
                assert (await client.get(f"{url}/ui/metrics", headers=operator)).json()["training_iterations"] == 2
                missing = await client.get(f"{url}/ui/api/0/rollouts/ro-nowhere", headers=operator)
                assert missing.status_code == 404
                with served(url.replace("://", f"://:{OPERATOR}@")) as dashboard:
                    through = await asyncio.to_thread(dashboard.json, "runs")
                    assert OPERATOR not in json.dumps(through)
                    assert [r["run_id"] for r in through["runs"]] == [run.run_id]
                    over_http = await asyncio.to_thread(dashboard.json, f"0/rollouts/{id}")
                    assert over_http == (await client.get(f"{url}/ui/api/0/rollouts/{id}", headers=operator)).json()
        finally:
            await server.stop()
            await store.close()

    asyncio.run(main())


def test_the_command(run: agl.Result, tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    command = [*AGL, "dashboard", str(run.directory), "--port", "0", "--json", str(facts)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 60
        while not facts.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        link = json.loads(facts.read_text())["link"]
        url, key = link.split("/#key=")
        listed = httpx.get(f"{url}/api/runs", headers={"authorization": f"Bearer {key}"}, timeout=60).json()
        assert [r["run_id"] for r in listed["runs"]] == [run.run_id]
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert link in output
    done = subprocess.run([*AGL, "dashboard", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "there is no run in this directory" in done.stderr


AGENT = """
import agl, openai

@agl.rollout
async def solve(task, llm: agl.LLM) -> float:
    client = openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return float(len(answer.choices[0].message.content or "") % 2)
"""


def test_training_shows_itself(untrained_model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('"one"\n"two"\n')
    command = [
        *AGL, "train", "--tasks", "tasks.jsonl", "--agent", "agent.py:solve", "--model", str(untrained_model),
        "--steps", "40", "--group-size", "4", "--batch-size", "2", "--max-response-tokens", "8", "--dashboard",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("dashboard "))
        url, key = line.split()[1].split("/#key=")
        running: list[Any] = []
        deadline = time.monotonic() + 100
        while not running and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            listed = httpx.get(f"{url}/api/runs", headers={"authorization": f"Bearer {key}"}, timeout=60).json()
            running = [r for r in listed["runs"] if r["status"] == "running" and r["step"] > 0]
        assert running
        assert running[0]["steps"] == 40
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/", timeout=5)


@pytest.mark.parametrize("algorithm", [gepa, apo])
def test_candidates_of_a_search_and_what_changed(tmp_path: Path, algorithm: Any) -> None:
    with rule_provider() as provider:
        search = algorithm(provider.url, held_out=HELD_OUT)
        result = fit(search, template_agent(provider.url), tmp_path)
    with served(tmp_path) as shown:
        path = f"0/runs/{result.run_id}/prompts"
        found = shown.json(path)["candidates"]
        texts: list[str] = []
        for candidate in found:
            number = candidate["number"]
            alone = shown.json(f"{path}?candidate={number}")["changes"]["prompt"]
            assert [kind for kind, _ in alone] == ["same"]
            texts.append(alone[0][1])
        assert found[0] | {"evaluations": None} == {
            "number": 0, "parent": None, "depth": 0, "texts": None, "chosen": False, "evaluations": None,
        }  # fmt: skip
        assert texts[0] == START
        for number, candidate in enumerate(found[1:], 1):
            parent = candidate["parent"]
            assert texts[number].startswith(texts[parent])
            assert candidate["depth"] == found[parent]["depth"] + 1 == len(re.findall("Also be", texts[number]))
            parts = shown.json(f"{path}?candidate={number}&against={parent}")["changes"]["prompt"]
            assert "".join(text for kind, text in parts if kind != "removed") == texts[number]
            assert "".join(text for kind, text in parts if kind == "added").split()[:2] == ["Also", "be"]
        for wrong in (f"candidate={len(found)}", "candidate=-1", "candidate=x", f"candidate=0&against={len(found)}"):
            assert shown.get(f"api/{path}?{wrong}").status_code == 400, wrong
        [best] = [candidate["number"] for candidate in found if candidate["chosen"]]
        assert texts[best] == result.prompts["prompt"]
        for evaluation in (e for candidate in found for e in candidate["evaluations"]):
            mode = "train" if evaluation["split"] == "train" else "val"
            step = evaluation["step"] - (mode == "train")
            rewards = [r["reward"] for r in shown.json(f"0/runs/{result.run_id}/steps/{mode}/{step}")["rollouts"]]
            assert len(rewards) == evaluation["tasks"]
            assert fmean(rewards) == pytest.approx(evaluation["score"])
            assert evaluation["low"] <= evaluation["score"] <= evaluation["high"]
