"""Rollouts and traces leave the store whole: as JSON Lines, JSON files, Parquet and OTLP, read by other programs."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import AGL
from receiver import receiving
from scripted import ScriptedRollouts, calls_once

import agl
from agl import semconv
from agl.errors import ConfigError, ExportError, RewardError, StoreError
from agl.mdp.spans import Event, Span
from agl.mdp.types import Call, float_array, int_array
from agl.trainer.cli.export import export_files, export_traces, since
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.report.export import otlp
from agl.trainer.report.export.json_files import file_name, to_json
from agl.trainer.report.export.rows import RolloutFilter
from agl.trainer.report.export.to_files import to_files
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout, TrainedCall
from agl_massgen.files import read_traces

START = 1_795_000_000.25
SURROGATE = "lone \ud83d end"


def span(rollout_id: str, number: int, name: str, parent: int | None = None, attempt: int = 1, **fields: Any) -> Span:
    trace = f"{int.from_bytes(rollout_id.encode()[-4:]) * 10 + attempt:032x}"
    kind, _, who = name.partition(" ")
    facts = {semconv.OPERATION_NAME: kind, semconv.AGENT_NAME: who, **fields.pop("attributes", {})}
    return Span(
        trace, f"{number:016x}", None if parent is None else f"{parent:016x}", rollout_id, attempt, name,
        START + number, START + number + 0.5, attributes=facts, **fields,
    )  # fmt: skip


async def fill(store: Store) -> None:
    """Two rollouts: one with all that is hard to write, tried twice and trained; one that nothing is known of yet."""
    await store.enqueue_rollouts(
        [NewRollout({"q": "1 + 1 = ? ✎", "bad": SURROGATE, "big": 1 << 70}, run_id="run", step=3, rollout_id="ro-0001")]
    )
    for _ in range(2):
        assert await store.dequeue_rollout("worker ✎")
        attempt = len(await store.query_attempts("ro-0001"))
        status = "failed" if attempt == 1 else "succeeded"
        await store.update_attempt("ro-0001", attempt, status, error="broke ✎" if attempt == 1 else None)
    agent = "wri/ter ✎"
    await store.add_spans(
        [
            span("ro-0001", 1, f"invoke_agent {agent}", attempt=1, status="error", status_message="boom ✎"),
            span("ro-0001", 9, "reward", 1, attributes={semconv.REWARD_NAME: "score", semconv.REWARD_VALUE: 9.0}),
            span("ro-0001", 2, f"invoke_agent {agent}", attempt=2),
            span(
                "ro-0001", 3, "execute_tool calc", 2, attempt=2, status="error", status_message="no",
                attributes={"n": 3, "x": 0.5, "yes": True, "list": ["a", "b"], "mixed": [1, "a"], "none": None,
                            "nested": {"a": [1]}, "text": SURROGATE},
                events=(Event("exception", START + 3.25, {"exception.type": "ValueError ✎"}),),
            ),
            span("ro-0001", 4, "reward", 3, attempt=2, attributes={
                semconv.REWARD_NAME: "score", semconv.REWARD_VALUE: 0.25, semconv.REWARD_PRIMARY: True}),
        ]
    )  # fmt: skip
    first = Call(
        "c1", "ro-0001", 2, 0, agent, "policy", 7, int_array([1, 2, 3]), int_array([4, 5]),
        float_array([-0.1, math.nan]), tool_call_ids=("t1",), request={"messages": [{"role": "user", "content": "✎"}]},
        response={"role": "assistant", "content": SURROGATE}, started_at=START + 2.1, ended_at=START + 2.9,
    )  # fmt: skip
    second = Call(
        "c2", "ro-0001", 2, 1, agent, "policy", 7, int_array([1, 2, 3, 4, 5, 6]), int_array([]), float_array([]),
        finish_reason="error", parent_id="c1", error="gone", started_at=START + 3, ended_at=START + 3.1,
    )  # fmt: skip
    await store.add_calls([first, second])
    await store.add_trained_calls("run", [TrainedCall("c1", "ro-0001", 3, 8, 0, 0.25, 0.25, -1.5, 2)])
    await store.enqueue_rollouts([NewRollout(["later"], mode="val", rollout_id="ro-0002")])


@pytest.fixture
def store(tmp_path: Path) -> str:
    async def main() -> None:
        opened = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        await fill(opened)
        await opened.close()

    asyncio.run(main())
    return str(tmp_path / "run.db")


def exported(store: str, out: Path, format: str, which: RolloutFilter | None = None, **options: Any) -> dict[str, Any]:
    return export_files(store, out, format, which or RolloutFilter(), quiet=True, **{"tokens": True, **options})


def no_constants(text: str) -> Any:
    raise AssertionError(f"{text} is no JSON")


def strict(text: str | bytes) -> Any:
    return json.loads(text, parse_constant=no_constants)


def lines(path: Path) -> list[Any]:
    return [strict(line) for line in path.read_bytes().splitlines()]


def test_json_lines_hold_everything(store: str, tmp_path: Path) -> None:
    facts = exported(store, tmp_path / "out", "jsonl")
    assert (facts["rollouts"], facts["spans"], facts["calls"], facts["files"]) == (2, 7, 2, 3)
    one, two = lines(tmp_path / "out" / "rollouts.jsonl")
    assert one["task"] == {"q": "1 + 1 = ? ✎", "bad": SURROGATE, "big": 1 << 70}
    assert (one["run_id"], one["step"], one["status"], one["agent"], one["reward"]) == (
        "run", 3, "succeeded", "wri/ter ✎", 0.25,
    )  # fmt: skip
    assert [(a["attempt"], a["status"], a["worker_id"], a["error"]) for a in one["attempts"]] == [
        (1, "failed", "worker ✎", "broke ✎"),
        (2, "succeeded", "worker ✎", None),
    ]
    assert [(r["attempt"], r["name"], r["value"], r["call_id"]) for r in one["rewards"]] == [
        (1, "score", 9.0, None),
        (2, "score", 0.25, None),
    ]
    [trained] = one["trained"]
    assert (trained["call_id"], trained["return"], trained["advantage"], trained["tokens"]) == ("c1", 0.25, -1.5, 2)
    assert (two["task"], two["agent"], two["reward"], two["attempts"]) == (["later"], None, None, [])

    spans = lines(tmp_path / "out" / "spans.jsonl")
    tool = next(s for s in spans if s["name"] == "execute_tool calc")
    assert tool["attributes"]["text"] == SURROGATE
    assert tool["events"][0]["attributes"] == {"exception.type": "ValueError ✎"}
    # Calls that no client made a span for have one.
    assert sum(s["attributes"].get("gen_ai.operation.name") == "chat" for s in spans) == 2

    first, second = lines(tmp_path / "out" / "calls.jsonl")
    assert (first["prompt_ids"], first["response_ids"], first["logprobs"]) == ([1, 2, 3], [4, 5], [-0.1, None])
    assert (second["prompt_ids"], second["prompt_tokens"], second["response_tokens"]) == ([1, 2, 3, 4, 5, 6], 6, 0)
    assert first["response"]["content"] == SURROGATE
    frame = pandas.read_json(tmp_path / "out" / "calls.jsonl", lines=True)
    assert frame["policy_version"].tolist() == [7, 7]


def test_json_files_lie_by_date_and_agent(store: str, tmp_path: Path) -> None:
    exported(store, tmp_path / "out", "json", tokens=False)
    found = sorted(p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*.json"))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    assert [(p.parts[1:], p.parts[0] <= date) for p in found] == [
        (("unknown", "ro-0002.json"), True),
        (("wri%2Fter ✎", "ro-0001.json"), True),
    ]
    whole = strict((tmp_path / "out" / found[1]).read_bytes())
    assert (whole["agent"], whole["reward"], len(whole["spans"]), len(whole["calls"])) == ("wri/ter ✎", 0.25, 7, 2)
    assert "prompt_ids" not in whole["calls"][0]
    assert whole["calls"][0]["prompt_tokens"] == 3


def test_massgens_files_of_any_store_are_read_back(store: str, tmp_path: Path) -> None:
    facts = exported(store, tmp_path / "out", "massgen")
    (trace,) = read_traces(tmp_path / "out")
    # Its last attempt alone; of the rollout that nothing is known of there is no run.
    assert (trace.agent_id, trace.status, trace.total_reward) == ("wri/ter ✎", "completed", 0.25)
    assert [s.span_type for s in trace.spans] == ["prompt", "tool", "prompt", "reward"]
    prompt, tool, failed, _ = trace.spans
    assert (prompt.input, prompt.output) == ([{"role": "user", "content": "✎"}], SURROGATE)  # type: ignore[attr-defined]
    assert tool.error == "no"  # type: ignore[attr-defined]
    assert failed.error == "gone"  # type: ignore[attr-defined]
    assert facts["files"] == 2
    index = strict((tmp_path / "out" / "metadata" / "trace_index.json").read_bytes())["traces"]
    assert index[trace.trace_id]["path"] == trace.path.as_posix()
    assert strict((tmp_path / "out" / trace.path).read_bytes())["task"] == trace.task


@pytest.mark.parametrize("tokens", [True, False])
def test_parquet_is_read_by_pandas_and_arrow(store: str, tmp_path: Path, tokens: bool) -> None:
    exported(store, tmp_path / "out", "parquet", tokens=tokens)
    rollouts = pandas.read_parquet(tmp_path / "out" / "rollouts.parquet")
    assert rollouts["rollout_id"].tolist() == ["ro-0001", "ro-0002"]
    assert strict(rollouts["task"][0])["big"] == 1 << 70
    assert rollouts["reward"][0] == 0.25
    assert math.isnan(rollouts["reward"][1])
    [one, two] = pq.read_table(tmp_path / "out" / "rollouts.parquet").to_pylist()
    assert [a["error"] for a in one["attempts"]] == ["broke ✎", None]
    assert (one["trained"][0]["return"], two["trained"], two["run_id"]) == (0.25, [], None)

    spans = pandas.read_parquet(tmp_path / "out" / "spans.parquet")
    assert len(spans) == 7
    tool = strict(spans.set_index("name").loc["execute_tool calc", "attributes"])
    assert (tool["mixed"], tool["nested"], tool["text"]) == ([1, "a"], {"a": [1]}, SURROGATE)

    calls = pq.read_table(tmp_path / "out" / "calls.parquet")
    assert calls["agent"].to_pylist() == ["wri/ter ✎"] * 2
    assert ("prompt_ids" in calls.column_names) is tokens
    if tokens:
        assert calls["prompt_ids"].to_pylist() == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
        first, second = calls["logprobs"].to_pylist()
        np.testing.assert_array_equal(np.float32(first), np.float32([-0.1, np.nan]))
        assert second == []


def test_only_what_fits_is_exported_and_nothing_is_an_error(store: str, tmp_path: Path) -> None:
    def ids(which: RolloutFilter) -> list[str]:
        exported(store, tmp_path / "out", "jsonl", which)
        return [r["rollout_id"] for r in lines(tmp_path / "out" / "rollouts.jsonl")]

    assert ids(RolloutFilter(run_id="run")) == ["ro-0001"]
    assert ids(RolloutFilter(mode="val")) == ["ro-0002"]
    assert ids(RolloutFilter(since=0.0)) == ["ro-0001", "ro-0002"]
    for which in (RolloutFilter(run_id="ru"), RolloutFilter(since=time.time() + 60)):
        with pytest.raises(ExportError, match="no rollout of this store fits"):
            ids(which)
    with pytest.raises(ConfigError, match="no mode 'vla'") as wrong:
        ids(RolloutFilter(mode="vla"))  # type: ignore[arg-type]
    assert "'val'" in str(wrong.value.hint)
    with pytest.raises(ConfigError, match="no format 'jsnl'"):
        exported(store, tmp_path / "out", "jsnl")


@pytest.mark.parametrize("format", ["jsonl", "json"])
def test_exports_are_their_owners_alone(format: str, store: str, tmp_path: Path) -> None:
    exported(store, tmp_path / "new", format)
    (tmp_path / "there").mkdir(mode=0o755)
    exported(store, tmp_path / "there", format)
    written = [path for out in ("new", "there") for path in (tmp_path / out).rglob("*") if path.is_file()]
    assert len(written) >= 4
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_there_keeps_what_is_not_replaced(store: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "rollouts.jsonl").write_text("old")
    exported(store, out, "jsonl")
    assert len(lines(out / "rollouts.jsonl")) == 2
    assert (out / "notes.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    with pytest.raises(ConfigError, match="this is a file"):
        exported(store, out / "notes.txt", "jsonl")


def test_an_export_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """A reward that is no number is found in the middle."""

    async def main() -> None:
        opened = await open_store("memory")
        await fill(opened)
        await opened.dequeue_rollout()
        await opened.add_spans([span("ro-0002", 9, "reward", attributes={semconv.REWARD_NAME: "x"})])
        for format in ("jsonl", "json", "parquet"):
            with pytest.raises(RewardError):
                await to_files(opened, tmp_path / "out", format, RolloutFilter(), quiet=True)
        await opened.close()

    asyncio.run(main())
    assert [*tmp_path.iterdir()] == []


def test_ctrl_c_leaves_no_half_file(tmp_path: Path) -> None:
    async def main() -> None:
        opened = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        new = [NewRollout("t" * 1000, rollout_id=f"ro-{k:05}") for k in range(20_000)]
        await opened.enqueue_rollouts(new)
        await opened.close()

    asyncio.run(main())
    running = subprocess.Popen(
        [*AGL, "export", "--store", "run.db", "--out", "out", "--format", "json"], cwd=tmp_path,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob(".out.*.partial/*/*/*.json")]:
        assert time.monotonic() < deadline
        assert running.poll() is None, running.stderr and running.stderr.read()
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    assert not [p.name for p in tmp_path.iterdir() if p.name != "run.db" and not p.name.startswith("run.db-")]


@pytest.mark.night
def test_memory_does_not_grow_with_the_store(tmp_path: Path) -> None:
    """Neither with the rollouts, of which there are several pages, nor with their spans."""

    async def peak(rollouts: int) -> int:
        opened = await open_store("memory")
        ids = [f"ro-{k:04}" for k in range(rollouts)]
        await opened.enqueue_rollouts([NewRollout("t" * 5000, rollout_id=id) for id in ids])
        made = [span(id, n, "execute_tool x", attributes={"text": "x" * 500}) for id in ids for n in range(1, 6)]
        await opened.add_spans(made)
        del made
        tracemalloc.start()
        facts = await to_files(opened, tmp_path / str(rollouts), "jsonl", RolloutFilter(), quiet=True)
        _, high = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await opened.close()
        assert facts["spans"] == rollouts * 5
        return high

    few, many = asyncio.run(peak(250)), asyncio.run(peak(1000))
    assert many < 2 * few


@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_a_name_stands_for_one_text_and_leads_nowhere_else(one: str, other: str) -> None:
    names = [file_name(one), file_name(other)]
    assert (names[0] == names[1]) == (one == other)
    for name in names:
        assert name not in ("", ".", "..")
        assert not set(name) & set('/\\\0:*?"<>|\n')
        assert len(os.fsencode(name)) <= 255


def test_long_and_hidden_names(tmp_path: Path) -> None:
    for name in ("..", "a/../../b", "x" * 400, ".hidden", "", "ends."):
        (tmp_path / file_name(name)).write_text("")
    assert len([*tmp_path.iterdir()]) == 6


def test_json_is_strict_whatever_it_holds() -> None:
    value = {"a": math.nan, "b": [math.inf, np.float32([1.5, np.nan])], "c": SURROGATE}
    assert strict(to_json(value)) == {"a": None, "b": [None, [1.5, None]], "c": SURROGATE}


def test_since_takes_dates_times_and_ages() -> None:
    assert since("1970-01-02") == 86400
    assert since("1970-01-01T01:00+01:00") == 0
    assert since("90m", now=10_000.0) == 4600
    assert since(None) is None
    with pytest.raises(ConfigError, match="--since is 'yesterday'"):
        since("yesterday")


def traced(
    store: str, url: str, *rollouts: str, which: RolloutFilter | None = None, headers: Any = ()
) -> dict[str, Any]:
    return export_traces(store, rollouts, which, url, headers, quiet=True)


def values(pairs: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        given = getattr(of, kind)
        return [value(v) for v in given.values] if kind == "array_value" else given

    return {p.key: value(p.value) for p in pairs}


def test_traces_are_sent_as_they_are_stored(store: str) -> None:
    with receiving(statuses=[503]) as receiver:
        facts = traced(store, receiver.url, which=RolloutFilter(), headers=["X-Key=a=b"])
    assert (facts["rollouts"], facts["spans"], facts["requests"], receiver.refused) == (2, 7, 1, 1)
    [(path, headers, body)] = receiver.requests
    assert (path, headers["x-key"], headers["content-type"]) == ("/v1/traces", "a=b", "application/x-protobuf")
    assert values(body.resource_spans[0].resource.attributes)["service.name"] == "agl"
    sent = {s.name: s for s in receiver.spans if s.trace_id[-1:] == receiver.spans[-1].trace_id[-1:]}
    tool, root = sent["execute_tool calc"], sent["invoke_agent wri/ter ✎"]
    assert (tool.span_id.hex(), tool.parent_span_id.hex()) == (f"{3:016x}", f"{2:016x}")
    assert (tool.trace_id, root.parent_span_id) == (root.trace_id, b"")
    assert (tool.start_time_unix_nano, tool.end_time_unix_nano) == (
        round((START + 3) * 1e9),
        round((START + 3.5) * 1e9),
    )
    assert (tool.status.code, tool.status.message, root.status.code) == (2, "no", 0)
    facts = values(tool.attributes)
    assert (facts["n"], facts["x"], facts["yes"], facts["list"]) == (3, 0.5, True, ["a", "b"])
    assert (facts["mixed"], facts["nested"], facts["text"]) == ('[1,"a"]', '{"a":[1]}', "lone \\ud83d end")
    assert facts[semconv.OPERATION_NAME] == "execute_tool"
    assert "none" not in facts
    [event] = tool.events
    assert (event.name, event.time_unix_nano) == ("exception", round((START + 3.25) * 1e9))
    assert values(event.attributes) == {"exception.type": "ValueError ✎"}
    chats = [s for s in receiver.spans if s.name.startswith("chat")]
    assert [s.parent_span_id for s in chats] == [root.span_id] * 2


def test_sending_again_sends_the_same_ids(store: str) -> None:
    with receiving() as receiver:
        traced(store, f"{receiver.url}/custom/path", "ro-0001")
        traced(store, f"{receiver.url}/custom/path", "ro-0001")
    assert Counter(Counter((s.trace_id, s.span_id) for s in receiver.spans).values()) == {2: 7}
    assert {path for path, _, _ in receiver.requests} == {"/custom/path"}


def test_many_and_long_spans_go_in_requests_of_bounded_size(tmp_path: Path) -> None:
    async def main() -> None:
        opened = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        await opened.enqueue_rollouts([NewRollout("t", rollout_id="ro-many")])
        await opened.add_spans([span("ro-many", n, "execute_tool x") for n in range(1, 1101)])
        text = "x" * (3 << 20)
        await opened.add_spans([span("ro-many", n, "execute_tool y", attributes={"text": text}) for n in (2001, 2002)])
        await opened.close()

    asyncio.run(main())
    with receiving() as receiver:
        facts = traced(str(tmp_path / "run.db"), receiver.url, "ro-many")
    sizes = [(sum(len(s.spans) for r in b.resource_spans for s in r.scope_spans), b.ByteSize())
             for _, _, b in receiver.requests]  # fmt: skip
    assert facts["spans"] == sum(n for n, _ in sizes) == 1102
    assert facts["requests"] == len(sizes) > 3
    assert all(n <= otlp.MAX_SPANS and size <= otlp.MAX_BYTES for n, size in sizes)


def test_what_the_receiver_says_is_told(store: str) -> None:
    with receiving(statuses=[401]) as receiver:
        with pytest.raises(ExportError, match="refused the spans: HTTP 401 not like this"):
            traced(store, receiver.url, "ro-0001")
        assert receiver.requests == []
    with receiving(rejects=2) as receiver, pytest.raises(ExportError, match="rejected 2 of 7 spans: too old"):
        traced(store, receiver.url, "ro-0001")
    with pytest.raises(ExportError, match=r"took no spans in 6 tries: ConnectError") as refused:
        traced(store, receiver.url, "ro-0001")
    assert "4318" in str(refused.value.hint)


def test_what_is_asked_for_must_be_clear(store: str) -> None:
    for rollouts, which in (((), None), (("ro-0001",), RolloutFilter())):
        with pytest.raises(ConfigError, match="which rollouts"):
            traced(store, "http://localhost:1", *rollouts, which=which)
    with pytest.raises(ConfigError, match="not an http"):
        traced(store, "localhost:4318", "ro-0001")
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        traced(store, "http://localhost:1", "ro-0001", headers=["Bearer secret"])
    with pytest.raises(StoreError, match="ro-9"):
        traced(store, "http://localhost:1", "ro-9")


def test_a_real_agents_rollouts_by_the_command_line(tmp_path: Path) -> None:
    policy = ScriptedRollouts(calls_once("calculator", {"expression": "2 + 2"}, "4"), group_size=2)
    agent = agl.wrap(build_agent(), reward=lambda task, output: float(output == "4"))
    agl.Trainer(policy, directory=tmp_path / "run", progress=False).fit(agent, [{"question": "2 + 2", "answer": "4"}])

    def run(*words: str) -> dict[str, Any]:
        command = [*AGL, *words, "--store", "run", "--json", "facts.json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert f"{len(policy.calls)} rollouts" in done.stdout
        return json.loads((tmp_path / "facts.json").read_text())

    assert run("export", "--out", "out", "--format", "parquet")["rollouts"] == 2
    calls = pq.read_table(tmp_path / "out" / "calls.parquet").to_pylist()
    assert [(c["prompt_ids"], c["response_ids"]) for c in calls] == [
        (c.prompt_ids.tolist(), c.response_ids.tolist()) for made in policy.calls for c in made
    ]
    assert pandas.read_parquet(tmp_path / "out" / "rollouts.parquet")["reward"].tolist() == [1.0, 1.0]
    with receiving() as receiver:
        run("trace", "export", "--all", "--otlp", receiver.url)
    sent = sorted((s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex(), s.name) for s in receiver.spans)
    assert sent == sorted((s.trace_id, s.span_id, s.parent_id or "", s.name) for spans in policy.spans for s in spans)
    assert {"chat", "execute_tool", "invoke_agent", "reward"} <= {s[3].split()[0] for s in sent}
