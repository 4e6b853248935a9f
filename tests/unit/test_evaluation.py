"""`agl.evaluate` on real runs and stores: what is counted, compared, shown and refused."""

from __future__ import annotations

import asyncio
import json
import re
import time
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from rich.console import Console

import agl
from agl.errors import CheckpointError, ConfigError, DatasetError, RolloutError
from agl.testing.provider import says, serve
from agl.trainer.evaluation.evaluate import fingerprint
from agl.trainer.report.curve import svg_curve
from agl.trainer.report.progress import Progress

TASKS = [{"n": n} for n in range(6)]
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202egpj.exe"


class Skill:
    """An agent that solves the tasks below `level`, and of each other one the first of two rollouts, where `half`."""

    def __init__(self, level: int, *, half: bool = False, fails: tuple[int, ...] = ()) -> None:
        self.runs: list[int] = []

        @agl.rollout(name="solver")
        async def solver(task: Any, rollout: agl.RolloutInfo) -> dict[str, float]:
            n = task["n"]
            self.runs.append(n)
            if n in fails:
                raise RuntimeError(f"out of cheese {HOSTILE}")
            agl.emit_message(f"task {n} {HOSTILE}")
            solved = n < level or (half and self.runs.count(n) == 1)
            return {"reward": float(solved), "brevity": n / 10}

        self.agent = solver


def evaluated(tmp_path: Path, skill: Skill, name: str = "now", **options: Any) -> agl.Evaluation:
    settings: Any = {"directory": tmp_path / "e", "progress": False, "max_attempts": 1, "n_workers": 4}
    return agl.evaluate(skill.agent, TASKS, {name: None}, **{**settings, **options})


def test_numbers_of_an_agent_on_its_own_models(tmp_path: Path) -> None:
    report = evaluated(tmp_path, Skill(3, half=True), samples=2)
    now = report.policies["now"]
    assert (now.tasks, now.samples, len(now.rollouts)) == (6, 2, 12)
    assert now.success.value == pytest.approx(0.75)
    assert now.success.low < 0.75 < now.success.high
    assert now.pass_at == {1: pytest.approx((0.75, 0.75)), 2: (1.0, 1.0)}
    assert now.pass_hat == {1: pytest.approx((0.75, 0.75)), 2: (0.5, 0.5)}
    assert now.reward.value == pytest.approx(0.75)
    assert now.rewards["brevity"].value == pytest.approx(0.25)
    assert now.success_bounds == pytest.approx((0.75, 0.75))
    assert now.failures == {}
    assert now.ran["seed"] == 0
    facts = json.loads(report.save(tmp_path / "r.json").read_text())
    assert facts["policies"]["now"]["success"]["value"] == pytest.approx(0.75)
    assert facts["tasks"]["5"] == {"n": 5}
    assert len(list((tmp_path / "e").glob("run.db"))) == 1


def test_failed_rollouts_are_neither_failures_nor_left_out(tmp_path: Path) -> None:
    now = evaluated(tmp_path, Skill(3, fails=(0, 5)), samples=2).policies["now"]
    assert now.failed == 4
    [(cause, n)] = now.failures.items()
    assert n == 4
    assert cause == f"RolloutError: agent 'solver' raised RuntimeError: out of cheese {HOSTILE}", "wherever it happened"
    assert now.success.value == pytest.approx(0.5), "of the tasks that ended"
    assert now.success_bounds == pytest.approx((2 / 6, 4 / 6))
    assert now.pass_at[2] == pytest.approx((2 / 6, 4 / 6))


def test_what_a_success_is(tmp_path: Path) -> None:
    at_half = evaluated(tmp_path, Skill(6), success=1.5)
    assert at_half.policies["now"].success.value == 0.0
    brief = evaluated(
        tmp_path / "2", Skill(6), success=lambda r: any(x.name == "brevity" and x.value < 0.35 for x in r.rewards)
    )
    assert brief.policies["now"].success.value == pytest.approx(4 / 6)


def both(tmp_path: Path, levels: tuple[int, int] = (2, 5)) -> agl.Evaluation:
    """Two policies of one store, as two runs of it."""

    async def main() -> agl.Evaluation:
        from agl.trainer.evaluation.policy_report import RolloutQuery
        from agl.trainer.store import open_store

        parts = {}
        for name, level in zip(("start", "now"), levels, strict=True):
            report = await agl.evaluate_async(
                Skill(level).agent, TASKS, {name: None}, store=str(tmp_path / "s.db"), directory=tmp_path / name,
                progress=False,
            )  # fmt: skip
            parts[name] = RolloutQuery(report.policies[name].run_id)
        store = await open_store(str(tmp_path / "s.db"))
        try:
            return await agl.Evaluation.of_runs(store, str(tmp_path / "s.db"), parts)
        finally:
            await store.close()

    return asyncio.run(main())


def test_two_policies_are_compared_task_by_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = both(tmp_path)
    comparison = report.compare("start", "now")
    assert comparison.success.value == pytest.approx(0.5)
    assert comparison.success_p == pytest.approx(0.25), "McNemar: three of three"
    assert not comparison.significant
    assert [f.task for f in comparison.gained] == [2, 3, 4]
    assert comparison.lost == []
    before, after = (report.rollout(r) for r in comparison.gained[0].rollouts)
    assert (before.success, after.success) == (False, True)
    assert report.compare("now", "start").success.value == pytest.approx(-0.5)
    report.table()
    shown = capsys.readouterr().out
    assert "start -> now: success +50.0 points" in shown
    assert "solved in most samples: 3 tasks by now only" in shown
    with pytest.raises(ConfigError, match="did you mean 'start'"):
        report.compare("strat", "now")


def test_rates_differ_by_100_points_at_most(tmp_path: Path) -> None:
    comparison = both(tmp_path, (0, 6)).compare("start", "now")
    assert (comparison.success.value, comparison.success.high) == (1.0, 1.0)
    assert comparison.success.low < 1


class Page(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_a_report_is_one_file_that_runs_and_loads_nothing(tmp_path: Path) -> None:
    report = both(tmp_path)
    page = report.save(tmp_path / "r.html").read_text()
    found = Page(page)
    assert not {"script", "img", "link", "iframe", "object"} & {*found.tags}
    assert not {"src", "href", "onclick", "onload"} & {*found.attributes}
    assert "default-src 'none'" in page
    assert found.tags.count("details") == 3
    assert "<script>" not in page
    markdown = report.save(tmp_path / "r.md").read_text()
    assert "| success |" in markdown
    assert "<h1>" in report._repr_html_()
    with pytest.raises(ConfigError, match=r"\.html, \.json or \.md"):
        report.save(tmp_path / "r.pdf")


def test_what_a_model_wrote_is_text(tmp_path: Path) -> None:
    report = evaluated(tmp_path, Skill(3, fails=(1,)), name=HOSTILE)
    for page in (report.save(tmp_path / "r.html").read_text(), report.save(tmp_path / "r.md").read_text()):
        assert "<script>" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert "\\x1b" in page


@pytest.mark.parametrize("set_back", [0.0, 3 * 3600.0])
def test_an_interrupted_evaluation_goes_on(set_back: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the clock was set back meanwhile: what ran again counts, not what had failed before."""
    stops = Skill(6, fails=(5,))
    evaluated(tmp_path, stops, samples=2)
    rest = Skill(6)
    with pytest.raises(ConfigError, match="already has an evaluation"):
        evaluated(tmp_path, rest, samples=2)
    with pytest.raises(CheckpointError, match="samples: 2 -> 3"):
        evaluated(tmp_path, rest, samples=3, resume=True)
    with pytest.raises(CheckpointError, match="no evaluation to resume"):
        evaluated(tmp_path / "nowhere", rest, samples=2, resume=True)

    async def as_if_killed() -> None:
        from dataclasses import replace

        from agl.trainer.store import open_store

        store = await open_store(str(tmp_path / "e" / "run.db"))
        [run] = await store.query_runs()
        assert run.name == "now"
        assert run.status == "succeeded"
        await store.put_run(replace(run, status="running"))
        await store.close()

    asyncio.run(as_if_killed())
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - set_back)
    now = evaluated(tmp_path, rest, samples=2, resume=True).policies["now"]
    assert rest.runs == [5, 5], "only what had failed is run again"
    assert now.success.value == 1.0
    assert (now.failed, len(now.rollouts)) == (0, 12)


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    agent, options = Skill(1).agent, {"progress": False, "directory": tmp_path / "x"}
    with pytest.raises(DatasetError, match="held-out tasks is empty"):
        agl.evaluate(agent, [], **options)
    with pytest.raises(ConfigError, match="two policies are called 'a'"):
        agl.evaluate(agent, TASKS, [("a", None), ("a", None)], **options)
    with pytest.raises(ConfigError, match="samples is 0"):
        agl.evaluate(agent, TASKS, samples=0, **options)
    with pytest.raises(ConfigError, match="policies= is empty"):
        agl.evaluate(agent, TASKS, {}, **options)
    with pytest.raises(ConfigError, match="give it a name"):
        agl.evaluate(agent, TASKS, "policy", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="each of its policies a directory"):
        agl.evaluate(agent, TASKS, {"now": {"solver": None}}, **options)  # type: ignore[dict-item]
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints" / "step-000004").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no policy"):
        agl.evaluate(agent, TASKS, {"run": run_dir}, **options)
    with pytest.raises(ConfigError, match="has no option 'time_out'"):
        agl.evaluate(agent, TASKS, time_out=2, **options)
    assert not (tmp_path / "x").exists(), "nothing is made before all is known to be right"
    several = {"model": {"other": "some/model"}, "repeats": 1}
    with pytest.raises(ConfigError, match=r"model= has 'other', to which no agent is sent|model= has no policy 'mine'"):
        agl.Trainer(agl.Baseline(**several), directory=tmp_path / "z", progress=False, agents={"solver": "mine"}).fit(
            agent, TASKS
        )
    with pytest.raises(RolloutError, match="all 6 rollouts"):
        agl.evaluate(
            Skill(0, fails=tuple(range(6))).agent, TASKS, max_attempts=1, **{**options, "directory": tmp_path / "y"}
        )


def test_a_fingerprint_sees_other_weights(tmp_path: Path) -> None:
    weights = bytearray(1_000_000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = fingerprint(str(tmp_path))
    assert first is not None
    assert fingerprint(str(tmp_path)) == first
    weights[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert fingerprint(str(tmp_path)) != first
    assert fingerprint("no/such-model") is None


def test_validations_of_a_training_are_an_evaluation(tmp_path: Path) -> None:
    """Nothing is run again: the rollouts are those of the store."""
    skill = Skill(3)
    result = agl.Trainer(agl.Baseline(), directory=tmp_path / "run", progress=False).fit(skill.agent, [], TASKS)
    report = agl.Evaluation.of_result(result)
    assert list(report.policies) == ["step 0"]
    assert report.policies["step 0"].success.value == pytest.approx(result.history[0]["val/reward"])
    assert len(skill.runs) == 6
    result.history.clear()
    with pytest.raises(DatasetError, match="no validation"):
        agl.Evaluation.of_result(result)


def test_progress_counts_rollouts_where_nothing_is_trained(tmp_path: Path) -> None:
    text = StringIO()
    console = Console(file=text, width=120)
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path / "run", max_attempts=1)
    progress = Progress(True, console, label="now")
    asyncio.run(trainer.fit_async(Skill(3, fails=(1,)).agent, [], TASKS, progress=progress))
    assert re.search(r"now 6/6 · failed 1 · ETA 0:00", text.getvalue())


def test_a_step_that_takes_long_shows_its_rollouts_where_there_is_no_bar() -> None:
    """A validation of half an hour left a log without a line."""
    text = StringIO()
    progress = Progress(True, Console(file=text, width=120))
    progress.start(3)
    progress.began("val", 0, 60)
    progress.count()
    assert text.getvalue() == ""
    for _ in range(2):
        progress._started -= 60
        progress._last_line -= 60
        progress.count()
        progress.count()
    assert text.getvalue().split("\n") == ["  validation 2/60", "  validation 4/60", ""]


def test_the_curve_has_every_validation_with_its_interval() -> None:
    """Read back: from 10 at reward 1 down to 160 at 0, and from 40 at the first step to 480 at the last."""
    history = [
        {"step": step, "val/reward": value, "val/reward_low": low, "val/reward_high": high}
        for step, value, low, high in ((0, 0.2, 0.1, 0.4), (1, 0.6, 0.5, 0.7), (4, 1.0, 0.9, 1.0))
    ]
    shown = svg_curve(history)
    circles = [tuple(map(float, xy)) for xy in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', shown)]
    assert [((x - 40) / 110, (160 - y) / 150) for x, y in circles] == [
        (entry["step"], pytest.approx(entry["val/reward"])) for entry in history
    ]
    around = re.findall(r"([\d.]+),([\d.]+)", re.findall(r'<polygon points="([^"]+)"', shown)[0])
    heights = [(160 - float(y)) / 150 for _, y in around]
    assert heights == pytest.approx([0.1, 0.5, 0.9, 1.0, 0.7, 0.4])


def test_a_result_in_a_notebook(tmp_path: Path) -> None:
    history = [{"step": 0, "val/reward": 0.25}, {"step": 1, "train/reward": float("nan"), "val/reward": 0.5}]
    result = agl.Result("run-<b>1", tmp_path / HOSTILE, "s", history, {"policy": tmp_path / "<i>"}, None)
    shown = result._repr_html_()
    found = Page(shown)
    assert not {"script", "i"} & {*found.tags}
    assert shown.count("<polyline") == 2
    assert "run-&lt;b&gt;1" in shown
    assert "0.500" in shown
    assert "\x1b" not in shown
    assert "<svg" not in agl.Result("r", tmp_path, "s", history[:1], {}, None)._repr_html_()
    # In a terminal it is a line, however long the history is.
    assert "1 steps, held-out reward 0.250 -> 0.500, in" in repr(result)
    assert repr(agl.Result("r", tmp_path, "s", [], {}, None)) == f"<Result of r: 0 steps, in {tmp_path}>"


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_has_a_live_bar_where_it_can_draw_one(has_widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from agl.trainer.report import progress as module

    shown: list[Any] = []
    monkeypatch.setattr(module, "find_spec", lambda name: name if has_widgets else None)
    monkeypatch.setattr(module.Bar, "start", lambda bar: shown.append(bar))
    progress = Progress(True, Console(force_jupyter=True))
    assert progress.console.is_jupyter
    progress.start(10)
    progress.stop()
    assert bool(shown) is has_widgets


def test_under_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook: neither `fit` nor `evaluate` needs the caller's loop."""

    async def cell() -> float:
        report = evaluated(tmp_path, Skill(3))
        return report.policies["now"].success.value

    assert asyncio.run(cell()) == pytest.approx(0.5)


def test_calls_and_tokens_of_models_elsewhere(tmp_path: Path) -> None:
    with serve(says("four")) as server:

        @agl.rollout(name="team")
        async def team(task: Any) -> dict[str, float]:
            client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": HOSTILE}]
                )
            return {"reward": float(answer.choices[0].message.content == "four"), "length": 4.0}

        report = agl.evaluate(team, TASKS[:2], directory=tmp_path, progress=False)
    [own] = report.policies.values()
    assert own.means["calls"] == 2
    assert own.means["tokens"] > 0
    assert own.agents["team"]["calls"] == 2
    assert own.means["seconds"] > 0
    assert "four" in own.rollouts[0].transcript
    assert "\x1b" not in own.rollouts[0].transcript
