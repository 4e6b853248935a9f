"""`agl plan`: closed forms, what no simulation may break, its memory formula, measured tables, and what it prints."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from transformers import LlamaConfig
from typer.testing import CliRunner

from agl.errors import ConfigError
from agl.trainer.cli.app import app
from agl_plan.engine import Engine, Pace
from agl_plan.plan import MACHINES, Model, Site, lay_out, model
from agl_plan.simulate import Layout, VirtualLoop, _learn, run
from agl_plan.workload import Turn, Workload, tool_times

ALIKE = Workload(batch_size=2, group_size=4, prompt=100, answer=50, turns=1, spread=0.0, tools=((0.0, 1.0),))
"""Rollouts of equal length without tools."""
SLOW = Workload(batch_size=4, group_size=4, answer=20, turns=2, spread=0.3, tools=((0.05, 0.9), (30.0, 0.1)))
"""Rollouts that now and then wait for a tool."""
SHARINGS = ("turns", "shared", "separate")


def on_virtual_time(coroutine: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def test_an_hour_passes_at_once_and_in_order() -> None:
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, asyncio.get_running_loop().time()))

    async def both() -> None:
        await asyncio.gather(sleeper("late", 3600), sleeper("early", 1.5))

    on_virtual_time(both())
    assert order == [("early", 1.5), ("late", 3600)]


@pytest.mark.parametrize("shares", [False, True])
def test_without_tools_and_with_equal_lengths_a_step_is_the_sum_of_its_parts(shares: bool) -> None:
    pace = Pace(iteration=0.01, row=0.001, context=1e-5, prefill=0.002, attention=1e-6)
    layout = Layout(0, pace, update=3.0, token=0.001, pair=1e-6, publish=0.5, sharing="turns", shares=shares)
    came = run(layout, ALIKE, 3)
    prefill = 2 * (0.002 * 100 + 1e-6 * 100**2 / 2)
    decode = 50 * (0.01 + 8 * 0.001 + 8 * 100 * 1e-5)
    tokens, pairs = (2 * 100 + 8 * 50, 2 * 100**2 + 8 * (150**2 - 100**2)) if shares else (8 * 150, 8 * 150**2)
    learning = 3.0 + 0.001 * tokens + 1e-6 * pairs / 2
    assert came.seconds == pytest.approx([prefill + decode + learning + 0.5] * 3, rel=1e-9)
    assert came.idle == pytest.approx(0.5 / (prefill + decode + learning + 0.5), rel=1e-9)


def test_one_step_ahead_on_separate_devices_takes_the_longer_of_the_two() -> None:
    layout = Layout(1, Pace(iteration=0.1), update=2.0, publish=0.25, sharing="separate", sampling=3, learning=1)
    came = run(layout, ALIKE, 5)  # 50 iterations: 5 s
    assert came.seconds == pytest.approx([5 + 5 + 0.25, *[5 + 0.25] * 3, 2 + 0.25])
    assert came.idle == pytest.approx(1 - 5 * (3 * 5 + 2) / (4 * sum(came.seconds)))


def test_on_shared_devices_both_have_half_while_both_work() -> None:
    layout = Layout(1, Pace(iteration=0.1), update=2.0)
    assert sum(run(layout, ALIKE, 5).seconds) == pytest.approx(5 * (5 + 2), rel=0.01), "no work is won or lost"

    async def ended() -> tuple[float, float]:
        engine, loop = Engine(Pace(iteration=1.0)), asyncio.get_running_loop()
        call = asyncio.create_task(engine.sample(0, 1, 10))
        await asyncio.sleep(0)
        await _learn(layout, [engine], 3.0)
        learned = loop.time()
        await call
        return learned, loop.time()

    assert on_virtual_time(ended()) == pytest.approx((6, 13))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(
        draw(st.sampled_from([0, 1, 2, 3, 4, 6])), Pace(iteration=0.01, row=0.002, prefill=1e-4),
        engines=draw(st.integers(1, 3)), room=draw(st.sampled_from([600, 1500, 10_000])),
        update=draw(st.sampled_from([0.0, 1.0, 10.0])), publish=draw(st.sampled_from([0.0, 1.0])),
        sharing=draw(st.sampled_from(SHARINGS)), verl=draw(st.booleans()), workers=draw(st.sampled_from([5, 1000])),
    )  # fmt: skip


@settings(max_examples=40)
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_work_is_conserved_and_every_group_counts_once(layout: Layout, seed: int) -> None:
    workload = replace(SLOW, prompt=100, result=50, max_context=600)
    came = run(layout, workload, 5, seed)
    turns = [t for group in range(20) for member in range(4) for t in workload.rollout(seed, group, member)]
    assert came.sampled == sum(turn.sampled for turn in turns)
    again = 20 * (4 - min(4, layout.engines)) * 100
    assert came.computed >= sum(turn.new for turn in turns) - again, "what is evicted is computed again"
    assert all(len(groups) == 4 for groups in came.groups)
    assert sorted(chain(*came.groups)) == list(range(20))
    assert 0 <= came.idle <= 1


@pytest.mark.full
@settings(max_examples=15)
@given(
    sharing=st.sampled_from(["shared", "separate"]), update=st.sampled_from([0.1, 2.0, 20.0]), seed=st.integers(0, 999)
)  # fmt: skip
def test_more_staleness_is_never_slower(sharing: Any, update: float, seed: int) -> None:
    """But for the batches that are begun before the first step can end, which share the engine with its own."""
    layout, bounds = Layout(0, Pace(row=0.002), update=update, sharing=sharing), (0, 1, 2, 4, 8)
    came = [run(replace(layout, staleness=k), SLOW, 8, seed) for k in bounds]
    batch = 2 * came[0].sampled / 8 * 0.002
    for (k, before), (more, after) in pairwise(zip(bounds, came, strict=True)):
        assert sum(after.seconds) <= sum(before.seconds) + batch * (more // 2 - k // 2) + 1e-6
    assert sum(came[-1].seconds) < 0.9 * sum(came[0].seconds), "waiting for slow tools costs nothing in any schedule"


def test_a_slow_group_counts_later_but_not_after_its_bound() -> None:
    recorded = [[Turn(10, 10, 0.0)]] * 63 + [[Turn(10, 10, 1000.0)]]
    workload = Workload(4, 2, recorded=recorded)
    came = run(Layout(4, Pace(iteration=0.01), update=1.0), workload, 12, seed=3)
    late = [step - number // 4 for step, groups in enumerate(came.groups) for number in groups]
    assert 0 < max(late) <= 3
    first_ended = run(Layout(1, Pace(iteration=0.01), update=1.0, verl=True), workload, 12, seed=3)
    assert sum(first_ended.seconds) < sum(run(Layout(1, Pace(iteration=0.01), update=1.0), workload, 12, 3).seconds)


def test_calls_wait_for_room_and_idle_conversations_make_it() -> None:
    async def served(room: float) -> tuple[float, int]:
        engine = Engine(Pace(iteration=1.0, prefill=0.1), room)
        await asyncio.gather(*(engine.sample(i, 10, 10) for i in range(3)))
        for i in (1, 0):
            await engine.sample(i, 30, 10)
        return asyncio.get_running_loop().time(), engine.computed

    assert on_virtual_time(served(1000)) == (pytest.approx((3 + 10) + 2 * (1 + 10)), 30 + 20)
    # Two fit at once; 2 takes the room of 0, which is computed as a whole when it comes back, and 1 is still cached.
    assert on_virtual_time(served(40)) == (pytest.approx((2 + 10) + (1 + 10) + (1 + 10) + (3 + 10)), 30 + 10 + 30)


def test_what_a_group_begins_with_is_computed_once_for_each_weights() -> None:
    async def computed() -> tuple[float, float, float]:
        engine, loop = Engine(Pace(iteration=1.0, prefill=0.1)), asyncio.get_running_loop()
        await asyncio.gather(*(engine.sample(i, 100, 10, group=i // 3, shared=80) for i in range(6)))
        first = loop.time()
        engine.updated(rebuild=False)
        await engine.sample(6, 100, 10, group=0, shared=80)
        second = loop.time()
        calls = [asyncio.create_task(engine.sample(i, 100, 10, group=2, shared=80)) for i in (7, 8, 9)]
        await asyncio.sleep(14 + 5)
        engine.updated(rebuild=True)
        await asyncio.gather(*calls)
        return first, second - first, loop.time() - second

    # Two groups of (80 + 3 * 20) tokens; one conversation; a group, and after 5 tokens each of its rows once more.
    rows, rebuilt = 0.1 * (80 + 3 * 20), 0.1 * (80 + 3 * 25)
    assert on_virtual_time(computed()) == pytest.approx((2 * rows + 10, 10 + 10, rows + 5 + rebuilt + 5))


def test_work_ends_where_the_clock_no_longer_sees_it() -> None:
    async def ended() -> float:
        await asyncio.sleep(1e6)
        await Engine(Pace(iteration=1e-12)).sample(0, 1, 10)
        return asyncio.get_running_loop().time()

    assert on_virtual_time(ended()) == pytest.approx(1e6)


def test_an_engine_that_sleeps_does_nothing() -> None:
    async def ended() -> float:
        engine = Engine(Pace(iteration=1.0))
        call = asyncio.create_task(engine.sample(0, 1, 10))
        await asyncio.sleep(4)
        engine.share(0.0)
        await asyncio.sleep(100)
        engine.share(0.5)
        await call
        return asyncio.get_running_loop().time()

    assert on_virtual_time(ended()) == pytest.approx(4 + 100 + 12)


@pytest.mark.parametrize("text", ["", "fast", "1:0.5", "1,2", "-1", "1:0.7,2:0.7", "1:2:3"])
def test_times_of_tools_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="shares add up to 1"):
        tool_times(text)


def test_times_of_tools() -> None:
    assert tool_times("0.05,5:0.02") == ((0.05, 0.98), (5.0, 0.02))


H100 = Site(**MACHINES["h100"])
SEVEN = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "vocab_size": 152064}  # fmt: skip
"""Qwen2.5-7B, as in docs/one-gpu.md."""


def test_memory_is_what_the_page_about_one_gpu_has() -> None:
    seven, short = Model("7B", LlamaConfig(**SEVEN)), Workload(max_context=4096)
    layout, row = lay_out(seven, short, replace(H100, lora=16, pass_tokens=8192), "local", 0)
    page = (ROOT / "docs" / "one-gpu.md").read_text()
    [together] = re.findall(r"^\| 7B, activation checkpointing \|.* ([\d.]+) \|$", page, re.MULTILINE)
    # The page takes a fourth of the tokens for answers, a plan half of them: no difference from one chunk of logits on.
    assert row["learning"] / 2**30 == pytest.approx(float(together), abs=0.05)
    assert layout is not None


def test_a_copy_to_sample_from_and_vllm_beside_it_take_their_memory() -> None:
    small, work = model("1B"), Workload()
    alone, copied, asleep, awake = (
        lay_out(small, work, H100, name, k)[1] for name, k in [("local", 0), ("local", 2), ("vllm", 0), ("vllm", 2)]
    )
    weights = 2 * small.parameters[0]
    assert copied["learning"] - alone["learning"] == pytest.approx(weights)
    assert asleep["learning"] == alone["learning"]
    assert awake["learning"] - asleep["learning"] == pytest.approx(0.5 * 80e9)


def test_verl_divides_the_state_of_training() -> None:
    seven, rows = model("7B"), {}
    for gpus in (8, 16, 32):
        rows[gpus] = lay_out(seven, Workload(), replace(H100, gpus=gpus), "verl sync", 0)[1]["learning"]
    assert rows[8] - rows[16] == pytest.approx(16 * seven.parameters[0] / 16, rel=0.1)
    assert rows[8] - rows[16] == pytest.approx(2 * (rows[16] - rows[32]))


def test_a_mixture_of_experts_goes_through_some_of_them_and_linear_attention_keeps_nothing() -> None:
    from transformers import Qwen3MoeConfig

    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
             "vocab_size": 1000}  # fmt: skip
    total, active = Model("m", Qwen3MoeConfig(**shape)).parameters
    assert total - active == pytest.approx(4 * 6 * 3 * 256 * 128)
    kinds = ["linear_attention", "full_attention"] * 2
    whole, half = Model("m", Qwen3MoeConfig(**shape)), Model("m", Qwen3MoeConfig(**shape, layer_types=kinds))
    assert whole.attention == (4 * 4 * 4 * 64, 2 * 4 * 2 * 64)
    assert half.attention == (whole.attention[0] / 2, whole.attention[1] / 2)


@pytest.mark.parametrize("size", ["0.5B", "3B", "7B", "70b"])
def test_a_size_is_a_llama_of_about_that_size(size: str) -> None:
    assert model(size).parameters[0] == pytest.approx(float(size[:-1]) * 1e9, rel=0.02)


def agl_plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_the_command_prints_a_row_for_each_layout_and_what_it_is_computed_from(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    printed = agl_plan("--model", "1B", "--set", "gpus=4", "--set", "steps=3", "--json", str(file))
    facts = json.loads(file.read_text())
    found = [(row["layout"], row["staleness"], row["devices"]) for row in facts["layouts"]]
    of_one = [(name, k, 1) for name in ("local", "vllm") for k in (0, 1, 2, 4)]
    assert found == [*of_one, ("verl sync", 0, 4), ("verl colocate_async", 1, 4), ("verl separate_async", 1, 4)]
    for row in facts["layouts"]:
        if "seconds" not in row:
            assert row["note"].startswith("does not fit: ")
            continue
        assert row["hours"] == pytest.approx(row["seconds"] * 3 / 3600)
        assert row["usd"] == pytest.approx(row["hours"] * row["devices"] * 2.5)
        assert re.search(rf"{row['layout']} +{row['staleness']} .* {row['seconds']:.3g} +{row['idle']:.0%}", printed)
    assert facts["computed_from"]["turns"] == 5
    assert "turns=5" in printed
    assert f"left out: {facts['left_out']}" in printed


def test_progress_counts_simulated_steps_on_stderr() -> None:
    words = ["plan", "--layout", "verl", "--set", "gpus=8", "--set", "steps=3"]
    shown, quiet = (CliRunner().invoke(app, [*words, *more]) for more in ([], ["--quiet"]))
    assert "simulated step 9/9 · verl separate_async" in shown.stderr
    assert "simulated step 10" not in shown.stderr
    assert (quiet.stderr, quiet.stdout) == ("", shown.stdout)


def plan_of(*words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        agl_plan(*words, "--json", f"{folder}/plan.json")
        return json.loads(Path(folder, "plan.json").read_text())


@pytest.mark.full
def test_json_alone_goes_to_stdout() -> None:
    words = ["plan", "--layout", "verl", "--set", "gpus=8", "--set", "steps=2", "--json"]
    code = f"import sys; sys.argv = ['agl', *{words}]; from agl.trainer.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["layouts"][0]["layout"] == "verl sync"


def test_prompts_count_once_where_an_update_computes_them_once() -> None:
    numbers = ("prompt=4000", "turns=1", "gpus=2", "steps=1", "learn=0.05")
    words = ["--model", "1B", "--max-staleness", "0", *(word for number in numbers for word in ("--set", number))]
    alone, shared = (
        {row["layout"]: row["seconds"] for row in plan_of(*words, "--set", f"share_prefixes={share}")["layouts"]}
        for share in (0, 1)
    )
    assert shared["verl sync"] < 0.5 * alone["verl sync"]
    assert shared["local"] == alone["local"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--machine h10", "--machine h10: no such machine\n  -> did you mean 'h100'?"),
        ("--model ./nothing", "no such directory"),
        ("--layout ray", "--layout has no option 'ray'"),
        ("--set tunrs=3", "--set has no option 'tunrs'\n  -> did you mean 'turns'?"),
        ("--set turns", "--set turns: no NAME=NUMBER from 0 on\n  -> as in --set gpus=8"),
        ("--set turns=-1", "no NAME=NUMBER from 0 on"),
        ("--set gpus=0", "--set gpus=0\n  -> give more than 0"),
        ("--set learn=1.5", "--set learn=1.5\n  -> give a share, above 0 and at most 1"),
        ("--layout local --model 1B --set bandwidth=1", "more than 48 days\n  -> check --set and --tool"),
        ("--layout local --model 1B --tool 1e300", "more than 48 days"),
        ("--model 0B", "--model 0B: its embeddings alone would be larger"),
        ("--set share_prefixes=2", "--set share_prefixes=2\n  -> give 0 or 1"),
        ("--set prompt=8192", "--set prompt=8192: no room for an answer\n  -> max_context is 8192"),
        ("--set gpus=1.5", "gpus is 1.5\n  -> use a whole number"),
        ("--tool fast", "shares add up to 1"),
        ("--from ./nothing", "there is no store at this path"),
        ("--from . --set turns=3", "--set with --from has no option 'turns'"),
    ],
)
def test_what_is_wrong_is_said(words: str, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        agl_plan(*words.split())


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--layout local --model 70B", "of 74.5 GiB", "--layout verl --set gpus=64 would fit"),
        ("--layout verl --model 70B --set gpus=16", "learning takes", "--set lora=16 would fit"),
        ("--layout local --model 7B", "learning takes", "--set lora=16 would fit"),
        ("--layout verl --model 7B --set gpus=8 --set memory=28e9", "learning takes", "pass_tokens=8192 would fit"),
        ("--layout vllm --model 1B --set max_context=4000000", "learning takes", "shorter conversations"),
        ("--layout vllm --model 1B --set gpu_memory=0.05", "room for 0 tokens", "--set gpu_memory=0.7 would fit"),
    ],
)
def test_what_does_not_fit_says_what_would(words: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        agl_plan(*words.split())
    assert hint in str(raised.value.hint)
    if "would fit" in hint:
        change = str(raised.value.hint).partition(" would")[0]
        others = words.split()[2 if "--layout" in change else 0 :]
        facts = plan_of(*others, *change.split(), "--max-staleness", "0", "--set", "steps=1")
        assert "seconds" in facts["layouts"][0]
