"""The dashboard in a real Chromium: every page of what real trainings left, by mouse, by keyboard, on a phone.

Pictures go to the folder `AGL_DASHBOARD_PICTURES`, if it is set. `AGL_DASHBOARD_RUNS` names the directories of two runs
of the quickstart, divided by ":", to take them of, in place of two short ones that are made here.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dashboards import CONTROL, HOSTILE, Dashboard, served, train_arithmetic, train_hostile
from launching import PROGRAMS, environment, launch
from rules import HELD_OUT, fit, gepa, rule_provider, template_agent
from running import say
from tiny_run import train as train_tiny
from untrained import make_untrained

import agl
from agl.testing.provider import serve
from agl.testing.subject import uses_add
from agl.texts import printable
from agl.trainer.http.aio import run_in_thread
from agl.trainer.store import open_store
from agl.trainer.store.types import MemoryEntry, TrainingRun

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium-headless-shell")

LAPTOP, TABLET, PHONE = {"width": 1280, "height": 800}, {"width": 820, "height": 1180}, {"width": 390, "height": 844}
PICTURES = os.environ.get("AGL_DASHBOARD_PICTURES")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of two runs on the same held-out tasks."""
    if named := os.environ.get("AGL_DASHBOARD_RUNS"):
        return [Path(part) for part in named.split(":")]
    tiny_policy: Path = request.getfixturevalue("tiny_policy")
    base = tmp_path_factory.mktemp("runs")
    for name, rate in (("slow", 1e-5), ("fast", 5e-4)):
        train_arithmetic(tiny_policy, base / name, learning_rate=rate)
    return [base / "slow", base / "fast"]


@pytest.fixture(scope="module")
def site(runs: list[Path]) -> Iterator[Dashboard]:
    with served(*runs) as dashboard:
        yield dashboard


@pytest.fixture(scope="module")
def hostile(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dashboard, agl.Result]]:
    result = train_hostile(untrained_model, tmp_path_factory.mktemp("hostile"))
    with served(result.directory) as dashboard:
        yield dashboard, result


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    chromium: Any, site: Dashboard, hash: str = "", *, size: dict[str, int] = LAPTOP, scheme: str = "light"
) -> Iterator[Any]:
    """A page by its link; at the end nothing may have been wrong with it, and no other host have been asked."""
    wrong: list[str] = []
    context = chromium.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith(f"{site.url}/") or wrong.append(request.url))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.goto(f"{site.link}{hash}")
    yield page
    assert wrong == []
    context.close()


def picture(page: Any, name: str) -> None:
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


def fits(page: Any) -> None:
    """Nothing has to be scrolled sideways."""
    wide = "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth)"
    shown = f"{wide}.slice(0, 8).map((e) => e.outerHTML.slice(0, 100))"
    within = page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert within, (page.url, page.evaluate(shown))


def accessible(page: Any) -> None:
    """Nothing breaks a rule of axe-core: names, roles, keyboard, contrast at WCAG's AA."""
    found = axe.Axe().run(page).response["violations"]
    faults = [f"{v['id']}: {n['html'][:120]}: {n['failureSummary']}" for v in found for n in v["nodes"]]
    assert faults == [], "\n".join([page.url, *faults])


def run_of(site: Dashboard, number: int) -> str:
    return next(r["run_id"] for r in site.json("runs")["runs"] if r["store"] == number)


def trained_rollout(site: Dashboard) -> str:
    """A rollout of the second store's first step whose tool call was rewarded."""
    step = site.json(f"1/runs/{run_of(site, 1)}/steps/train/0")["rollouts"]
    return max(step, key=lambda r: (r["advantage"] or 0, r["calls"]))["rollout_id"]


def test_the_prompts_of_a_search(chromium: Any, tmp_path: Path) -> None:
    start = "You answer questions about places. Answer: {question}"
    with rule_provider() as provider:
        resources = {"prompt": agl.PromptTemplate(start)}
        search = gepa(provider.url, held_out=HELD_OUT)
        result = fit(search, template_agent(provider.url), tmp_path, initial_resources=resources)
    with served(tmp_path) as site, opened(chromium, site, f"/0/run/{result.run_id}") as page:
        prompt = page.locator(".prompt")
        prompt.wait_for()
        prompt.scroll_into_view_if_needed()
        picture(page, "prompts")
        fits(page)
        # The result stands there first, against what it was rewritten from.
        best = next(c for c in site.json(f"0/runs/{result.run_id}/prompts")["candidates"] if c["chosen"])
        assert page.locator("tr.here b").inner_text() == "result"
        assert re.fullmatch(r"Also be \w+\.", prompt.locator("ins").inner_text().strip())
        page.get_by_role("button", name="start", exact=True).click()
        page.wait_for_function("() => document.querySelector('.prompt ins')?.textContent.split('Also').length > 2")
        assert prompt.locator("pre").inner_text() == result.prompts["prompt"]
        page.get_by_role("button", name=f"{best['parent']}", exact=True).click()
        page.get_by_text(f"candidate {best['parent']}", exact=True).wait_for()


@pytest.mark.parametrize("validated", [True, False])
def test_the_loss_stands_first_where_it_is_what_is_minimised(chromium: Any, tmp_path: Path, validated: bool) -> None:
    async def fill() -> None:
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        await store.put_run(TrainingRun("run-sft", algorithm="SFT", step=3, created_at=1.0))
        for step, nll in enumerate((0.75, 0.5, 0.25), 1):
            values = {"learner/nll": nll, "learner/loss": nll} | ({"val/reward": step / 4} if validated else {})
            await store.add_metrics("run-sft", step, values)
        await store.close()

    run_in_thread(fill())
    with served(tmp_path) as site, opened(chromium, site, "/0/run/run-sft") as page:
        names = page.locator(".card .name")
        names.first.wait_for()
        plots = ["negative log-likelihood per token", *(["reward"] if validated else [])]
        assert names.all_inner_texts()[: len(plots)] == plots
        assert "training 0.25" in page.locator("[aria-label^='negative']").get_attribute("aria-label")
        picture(page, f"loss-{validated}")


def test_from_the_curve_to_a_token(chromium: Any, site: Dashboard) -> None:
    run = run_of(site, 1)
    with opened(chromium, site) as page:
        assert "key=" not in page.url
        page.locator(f"a[href$='/1/run/{run}']").click()
        curve = page.locator(".pick .canvas canvas")
        curve.wait_for()
        picture(page, "run")
        box = page.locator(".pick .canvas").bounding_box()  # the canvas in it may just be drawn anew
        # In the middle of the curve is a training step.
        page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + box["height"] / 2)
        page.mouse.click(box["x"] + box["width"] * 0.45, box["y"] + box["height"] / 2)
        page.wait_for_url(re.compile(r"/run/.*/(train|val)/\d+"))
        page.goto(f"{site.url}/#/1/run/{run}/train/1")
        page.locator(".strip").first.wait_for()
        assert page.locator(".dot").count() == len(site.json(f"1/runs/{run}/steps/train/0")["rollouts"])
        picture(page, "step")
        page.locator(".strip .about a").first.click()
        page.locator(".column mark").first.wait_for()
        page.set_viewport_size({"width": LAPTOP["width"], "height": 240})
        button, mark = page.get_by_role("button", name="First difference").first, page.locator(".column mark").first
        button.scroll_into_view_if_needed()
        assert mark.bounding_box()["y"] > 240
        button.click()
        place = mark.bounding_box()
        assert 0 <= place["y"] < place["y"] + place["height"] <= 240
        page.set_viewport_size(LAPTOP)
        picture(page, "group")
        page.locator(".column header a").first.click()
        page.locator(".tok").first.wait_for()
        id = page.url.rpartition("/")[2]
        (call, *_) = site.json(f"1/rollouts/{id}")["calls"]
        page.locator(".tok").nth(1).hover()
        detail = page.locator(".detail")
        assert f"id {call['tokens']['ids'][1]}" in detail.inner_text()
        assert f"{call['policy']} v{call['policy_version']}" in detail.inner_text()
        assert "trained in step 1" in detail.inner_text()
        for color in ("Log-prob", "Gradient weight", "Advantage"):
            page.get_by_role("button", name=color, exact=True).click()
        for view, shown in (("Conversation", ".message.sampled"), ("Spans", ".tree li"), ("Tokens", ".tok")):
            page.get_by_role("button", name=view, exact=True).click()
            page.locator(shown).first.wait_for()
            picture(page, view.lower())
        # Escape is the way back, and every view has its address.
        for expected, shown in (("/group/", ".column mark"), ("/train/1", ".strip"), (f"/run/{run}", ".pick canvas")):
            page.keyboard.press("Escape")
            page.wait_for_url(re.compile(re.escape(expected)))
            page.locator(shown).first.wait_for()


def test_what_the_pages_say_is_what_the_store_has(chromium: Any, site: Dashboard) -> None:
    id = trained_rollout(site)
    report = site.json(f"1/rollouts/{id}")
    with opened(chromium, site, f"/1/rollout/{id}") as page:
        page.locator(".tok").first.wait_for()
        texts = page.locator(".tok").all_text_contents()
        assert texts == [t.replace("\n", "⏎\n") for call in report["calls"] for t in call["tokens"]["texts"]]
        assert page.locator(".tok.off").count() == 0
        strength = {
            c["advantage"]: sum(c["advantage"] >= edge for edge in (0.01, 0.1, 0.3, 1, 3)) for c in report["calls"]
        }
        assert min(strength) > 0
        for n in range(1, 6):
            alike = [c for c in report["calls"] if strength[c["advantage"]] == n]
            assert page.locator(f".tok.p{n}").count() == sum(len(c["tokens"]["texts"]) for c in alike)
        assert page.locator("h1").inner_text() == id
        merged = page.locator("section:has(h2:text('training rows')) tbody tr td").nth(1).inner_text()
        assert merged == " + ".join(map(str, report["rows"][0]["calls"]))
        page.get_by_role("button", name="Log-prob", exact=True).click()
        assert page.locator(".tok[class*=' l']").count() == len(texts)
        page.locator(".tok").nth(2).hover()
        picture(page, "rollout")


def test_the_interval_of_held_out_rewards_is_drawn_between_validations(chromium: Any, site: Dashboard) -> None:
    run = run_of(site, 1)
    values = site.json(f"1/runs/{run}/metrics")["values"]
    known = [k for k, value in enumerate(values["val/reward_low"]) if value is not None]
    assert len(known) == 2
    assert known[1] - known[0] > 1, "steps without a validation between them"
    with opened(chromium, site, f"/1/run/{run}") as page:
        canvas = page.locator(".pick .canvas canvas")
        canvas.wait_for()
        low, high = ([values[f"val/reward_{end}"][k] for k in known] for end in ("low", "high"))
        height = (sum(high) - sum(low)) / 2
        band = 0.0
        # It is there before it is drawn.
        for _ in range(100):
            alphas = canvas.evaluate(
                "(c) => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
                ".filter((_, i) => i % 4 === 3)"
            )
            # The band alone is drawn in 18 % of its colour.
            band = sum(40 <= alpha <= 52 for alpha in alphas) / len(alphas)
            if band >= 0.5 * height:
                break
            page.wait_for_timeout(100)
        assert band == pytest.approx(0.8 * height, abs=0.3 * height)


def test_a_long_run_and_one_with_other_steps(chromium: Any, tmp_path: Path) -> None:
    """Every validation can be opened, numbered metrics are in order, and a legend names the step of each value."""

    async def write(path: Path, steps: range) -> None:
        store = await open_store(f"sqlite:///{path / 'run.db'}")
        await store.put_run(TrainingRun(path.name, status="succeeded", step=steps[-1], created_at=1.0))
        for step in steps:
            numbered = {f"learner/number_{i}": float(i + step) for i in (10, 2, 1)}
            more = {"goal/of the game": step / 2, **numbered}
            await store.add_metrics(path.name, step, {"val/reward": step / 100, **more})
        await store.close()

    for name, steps in (("long", range(0, 50)), ("short", range(0, 3))):
        (tmp_path / name).mkdir()
        run_in_thread(write(tmp_path / name, steps))
    with served(tmp_path / "long", tmp_path / "short") as shown:
        with opened(chromium, shown, "/0/run/long") as page:
            page.locator(".plot .name").nth(3).wait_for()
            names = page.locator(".plot .name").all_text_contents()
            assert [name for name in names if name.startswith("number")] == ["number_1", "number_2", "number_10"]
            assert names[:2] == ["of the game", "reward"], "what the run is about comes first"
            page.get_by_label("validation").select_option("40")
            page.wait_for_url(re.compile("/0/run/long/val/40$"))
        page = chromium.new_page()  # Not `opened`: that they have no tasks in common is an error in the console.
        page.goto(f"{shown.link}/compare?a=0:long&b=1:short")
        page.locator(".legend").first.wait_for()
        legend = " ".join(page.locator(".legend").first.inner_text().split())
        assert legend == "step 49 a0.49 b0.02 at step 2"
        page.close()


def test_what_agents_remember_is_listed_and_searched(chromium: Any, tmp_path: Path) -> None:
    texts = [f"parcel {i} goes to dock {i % 7}" for i in range(120)] + ["<script>alert(1)</script> gate 12"]

    async def write() -> None:
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        await store.put_run(TrainingRun("run", status="succeeded", step=2, created_at=1.0))
        await store.add_metrics("run", 1, {"train/reward": 0.5})
        for version in (0, 1):
            entries = [
                MemoryEntry(("clerk",), f"note-{i}", {"n": i}, text, i / 10 if i % 2 else None, since=version)
                for i, text in enumerate(texts)
                if i % 2 == version
            ]
            await store.merge_memories("run", version, entries)
        await store.close()

    run_in_thread(write())
    with served(tmp_path) as shown, opened(chromium, shown, "/0/run/run") as page:
        rows = page.locator("table.memory tbody tr")
        rows.first.wait_for()
        section = page.locator("section", has=page.get_by_role("heading", name="memory"))
        assert "121 entries, the newest first; 100 are shown" in section.inner_text()
        assert rows.count() == 100
        cells = rows.first.locator("td, th").all_inner_texts()
        assert cells == ["clerk", "note-119", "parcel 119 goes to dock 0", "11.9", "1"]
        section.get_by_role("searchbox").fill("gate")
        rows.first.get_by_text("note-120").wait_for()
        assert (rows.count(), "1 of 121 entries" in section.inner_text()) == (1, True)
        accessible(page)
        fits(page)


OF_A_STEP = {
    "rollouts": "SELECT count(*) FROM here",
    "mean reward": """SELECT avg(reward) FROM (SELECT sum(json_extract(attributes, '$."agl.reward.value"')) AS reward
        FROM here JOIN spans USING (rollout_id) WHERE attempt = attempts AND name LIKE 'reward%'
        AND coalesce(json_extract(attributes, '$."agl.reward.primary"'), 1) GROUP BY rollout_id)""",
    "groups not trained": """SELECT count(*) FROM (SELECT 1 FROM here LEFT JOIN trained_calls USING (rollout_id)
        GROUP BY group_key HAVING total(abs(advantage) * tokens) = 0)""",
    "trained tokens": "SELECT total(tokens) FROM here JOIN trained_calls USING (rollout_id)",
    "failed": "SELECT total(status = 'failed') FROM here",
    "forks": "SELECT count(fork_cause) FROM here JOIN calls USING (rollout_id) WHERE attempt = attempts",
    "idle": "SELECT total(tokens) FROM here JOIN trained_calls USING (rollout_id) WHERE advantage = 0",
}
HERE = "WITH here AS (SELECT * FROM rollouts WHERE mode = 'train' AND step = ?)"


@pytest.mark.parametrize("which", ["slow", "fast", "hostile"])
def test_the_numbers_of_a_step_are_those_of_sql(
    chromium: Any, site: Dashboard, runs: list[Path], hostile: tuple[Dashboard, agl.Result], which: str
) -> None:
    number = int(which == "fast")
    shown, directory = (hostile[0], hostile[1].directory) if which == "hostile" else (site, runs[number])
    run = run_of(shown, number)
    steps = shown.json(f"{number}/runs/{run}")["step"]
    for step in range(steps):
        with sqlite3.connect(directory / "run.db") as store:
            wanted = {
                name: store.execute(f"{HERE} {query}", (step,)).fetchone()[0] for name, query in OF_A_STEP.items()
            }
        idle = wanted.pop("idle")
        with opened(chromium, shown, f"/{number}/run/{run}/train/{step + 1}") as page:
            page.locator(".dot").first.wait_for()
            facts = {x.locator("dt").inner_text(): x.locator("dd").inner_text() for x in page.locator(".fact").all()}
            trained, _, without = facts["trained tokens"].partition(" (")
            assert without == (f"{idle:,.0f} with advantage 0)" if idle else "")
            numbers = {
                name: float(text.replace(",", "")) for name, text in (facts | {"trained tokens": trained}).items()
            }
            assert numbers == pytest.approx(wanted, abs=6e-4)
            assert page.get_by_role("link", name=f"step {step + 2} →").count() == (step + 1 < steps)


def test_a_run_shows_its_alerts_and_samples_of_its_last_step(chromium: Any, site: Dashboard, runs: list[Path]) -> None:
    run = run_of(site, 1)
    with sqlite3.connect(runs[1] / "run.db") as store:
        (step,) = store.execute("SELECT step - 1 FROM runs").fetchone()
        query = """SELECT rollout_id, sum(json_extract(attributes, '$."agl.reward.value"')) FROM here
            JOIN spans USING (rollout_id) WHERE attempt = attempts AND name LIKE 'reward%'
            AND coalesce(json_extract(attributes, '$."agl.reward.primary"'), 1) GROUP BY rollout_id"""
        rewards = dict(store.execute(f"{HERE} {query}", (step,)))
        flat = store.execute(
            "SELECT step FROM metrics a JOIN metrics b USING (run_id, step) WHERE b.name = 'train/groups' "
            "AND a.name = 'train/zero_variance_groups' AND b.value > 1 AND a.value >= 0.75 * b.value"
        ).fetchall()
    with opened(chromium, site, f"/1/run/{run}") as page:
        page.get_by_role("heading", name="samples of step").wait_for()
        rows = (
            page.locator("section", has=page.get_by_role("heading", name="samples of step")).locator("tbody tr").all()
        )
        shown = {row.locator("th").inner_text(): float(row.locator("td").first.inner_text()) for row in rows}
        wrong = page.get_by_role("heading", name="alerts")
        said = page.locator("section", has=wrong).locator("li").all_inner_texts() if wrong.count() else []
    in_order = sorted(rewards.values())
    assert shown == pytest.approx(
        {"best": in_order[-1], "median": in_order[len(in_order) // 2], "worst": in_order[0]}, abs=6e-4
    )
    assert any("equal rewards" in text for text in said) == bool(flat)


def test_the_list_draws_the_curves_of_each_run(chromium: Any, site: Dashboard, runs: list[Path]) -> None:
    run = run_of(site, 1)
    with sqlite3.connect(runs[1] / "run.db") as store:
        rows = store.execute("SELECT name, value FROM metrics WHERE name LIKE '%/reward' ORDER BY step").fetchall()
    curves = {name: [value for of, value in rows if of == name] for name in ("train/reward", "val/reward")}
    low, high = (side(value for values in curves.values() for value in values) for side in (min, max))
    assert low < high
    with opened(chromium, site, "/") as page:
        row = page.locator("tr", has=page.locator(f'a[href$="{run}"]'))
        row.locator("polyline.held-out").wait_for(state="attached")
        drawn = [row.locator(f"polyline.{kind}").get_attribute("points") for kind in ("train", "held-out")]
    for values, points in zip(curves.values(), drawn, strict=True):
        heights = [float(point.split(",")[1]) for point in points.split()]
        # Of 22 pixels the lowest value is one above the bottom, the highest one below the top.
        assert heights == pytest.approx([21 - 20 * (value - low) / (high - low) for value in values], abs=0.06)


def test_where_the_time_went_adds_up(chromium: Any, site: Dashboard, runs: list[Path]) -> None:
    run = run_of(site, 1)
    with sqlite3.connect(runs[1] / "run.db") as store:
        phases = dict(
            store.execute("SELECT substr(name, 9), total(value) FROM metrics WHERE name LIKE 'seconds/%' GROUP BY name")
        )
        rates = dict(store.execute("SELECT step, value FROM metrics WHERE name = 'tokens_per_second'"))
        sampling = dict(store.execute("SELECT step, value FROM metrics WHERE name = 'seconds/sampling'"))
        parts = store.execute(
            "SELECT substr(name, 23), total(value) FROM metrics WHERE name LIKE 'train/rollout_seconds/%' GROUP BY name"
        )
        of_rollouts = dict(parts.fetchall())
    assert {"sampling", "learning", "publishing", "validating"} == {*phases}
    with opened(chromium, site, f"/1/run/{run}") as page:
        facts = [
            page.locator(".fact", has=page.get_by_text(label)).locator("dd").inner_text()
            for label in ("time goes to", "a rollout's time")
        ]
    assert {"models", "tools", "grading", "agent"} == {*of_rollouts}
    assert of_rollouts["grading"] > 0
    for fact, seconds in zip(facts, (phases, of_rollouts), strict=True):
        shown = {name: int(share) for name, share in re.findall(r"(\w+) (\d+) %", fact)}
        total = sum(seconds.values())
        assert shown == {name: round(100 * s / total) for name, s in seconds.items() if s / total >= 0.005}
    for step, rate in rates.items():
        rollouts = site.json(f"1/runs/{run}/steps/train/{step - 1}")["rollouts"]
        tokens = sum(r["tokens"] for r in rollouts if r["status"] == "succeeded")
        assert rate * sampling[step] == pytest.approx(tokens)


def test_an_advantage_has_the_same_colour_on_every_page(chromium: Any, site: Dashboard) -> None:
    id = trained_rollout(site)
    with opened(chromium, site, f"/1/group/{id}") as page:
        page.locator(".column mark").first.wait_for()
        chips = page.locator(".column .chip").all()
        classes = {chip.inner_text(): chip.get_attribute("class") for chip in chips}
        columns = page.locator(".column header a").all()
        for link in [column.get_attribute("href") for column in columns][:3]:
            with opened(chromium, site, link.removeprefix("#")) as other:
                other.locator(".tok").first.wait_for()
                for chip in other.locator(".chip").all():
                    if (text := chip.inner_text()) in classes:
                        assert chip.get_attribute("class") == classes[text]


def test_filters_and_bins(chromium: Any, site: Dashboard) -> None:
    run = run_of(site, 1)
    rollouts = site.json(f"1/runs/{run}/steps/train/0")["rollouts"]
    with opened(chromium, site, f"/1/run/{run}/train/1") as page:
        page.locator(".bar:not([disabled])").last.click()
        best = max(r["reward"] for r in rollouts)
        chosen = sum(r["reward"] > best - 0.05 for r in rollouts)
        page.get_by_text(f"{chosen} of {len(rollouts)} rollouts").wait_for()
        assert page.locator(".dot").count() == chosen
        page.reload()
        page.get_by_text(f"{chosen} of {len(rollouts)} rollouts").wait_for()
        page.get_by_role("button", name="Clear").click()
        question = rollouts[0]["task"]["question"]
        page.get_by_role("searchbox").fill(question)
        same = sum(r["task"]["question"] == question for r in rollouts)
        page.get_by_text(f"{same} of {len(rollouts)} rollouts").wait_for()


def test_two_runs_are_compared(chromium: Any, site: Dashboard) -> None:
    with opened(chromium, site) as page:
        page.get_by_role("checkbox").nth(1).wait_for()
        for box in page.get_by_role("checkbox").all():
            box.check()
        page.get_by_role("link", name="Compare", exact=True).click()
        page.get_by_text("common tasks").wait_for()
        picture(page, "compare")
        names = [side.inner_text() for side in page.locator(".versus a").all()]
        assert sorted(names) == sorted(run_of(site, n) for n in (0, 1))
        settings = [site.json(f"{n}/runs/{run_of(site, n)}")["config"] for n in (0, 1)]
        differ = {k for k in {*settings[0], *settings[1]} if settings[0].get(k) != settings[1].get(k)}
        assert "algorithm.learning_rate" in differ
        assert set(page.locator("table.settings tbody th").all_inner_texts()) == differ
        changed = page.locator("table.stack:not(.settings) tbody tr")
        if changed.count():
            changed.first.locator("a").first.click()
            page.wait_for_url(re.compile("/rollout/"))


def test_rollouts_of_all_steps_are_searched(chromium: Any, site: Dashboard, runs: list[Path]) -> None:
    """What the page lists is what SQL says; and every row leads to its rollout."""
    run = run_of(site, 1)
    with sqlite3.connect(runs[1] / "run.db") as db:
        in_run = "SELECT rollout_id FROM rollouts r WHERE run_id = ? AND mode = 'train'"
        called = {
            id
            for (id,) in db.execute(
                f"{in_run} AND EXISTS (SELECT 1 FROM calls c WHERE c.rollout_id = r.rollout_id"
                """ AND answer LIKE '%"name":"calculator"%')""",
                [run],
            )
        }
    steps = site.json(f"1/runs/{run}")["step"]
    rollouts = [r for n in range(steps) for r in site.json(f"1/runs/{run}/steps/train/{n}")["rollouts"]]
    rewards = {r["rollout_id"]: r["reward"] for r in rollouts}
    assert 0 < len(called) < len(rewards)
    expected = {id for id in called if rewards[id] is not None and rewards[id] >= 1}
    with opened(chromium, site, f"/1/run/{run}") as page:
        page.get_by_role("link", name="Search rollouts").click()
        page.locator("table.found").wait_for()
        page.get_by_label("tool").fill("calculator")
        page.get_by_label("reward from").fill("1")
        page.get_by_role("button", name="Search").click()
        page.get_by_text(f"{len(expected)} rollouts, the newest first").wait_for()
        links = [a.get_attribute("href") for a in page.locator("table.found td.wide a").all()]
        assert {link.rsplit("/", 1)[1] for link in links if link} == expected
        picture(page, "search")
        accessible(page)
        fits(page)
        page.locator("table.found td.wide a").first.click()
        page.wait_for_url(re.compile("/rollout/"))
        page.go_back()
        page.get_by_text(f"{len(expected)} rollouts, the newest first").wait_for()
        page.get_by_label("tool").fill("no such tool")
        page.get_by_role("button", name="Search").click()
        page.get_by_text("No rollout matches").wait_for()


def test_three_runs_are_compared(chromium: Any, runs: list[Path], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / "copy")
    with served(*runs, tmp_path / "copy") as site, opened(chromium, site) as page:
        page.get_by_role("checkbox").nth(2).wait_for()
        for box in page.get_by_role("checkbox").all():
            box.check()
        page.get_by_role("link", name="Compare", exact=True).click()
        page.get_by_role("heading", name="Three runs compared").wait_for()
        page.get_by_text("common tasks").wait_for()
        page.locator("table.settings").wait_for()
        rates = {n: site.json(f"{n}/runs/{run_of(site, n)}")["config"]["algorithm.learning_rate"] for n in range(3)}
        row = page.locator("table.settings tr", has_text="learning_rate").locator("td").all_inner_texts()
        assert sorted(map(float, row)) == sorted(rates.values())
        assert page.locator(".versus .swatch").count() == 3
        legend = page.locator(".plot:not(.small) .legend").first.locator(".swatch").count()
        assert legend == 3
        picture(page, "three")
        accessible(page)
        fits(page)


def test_by_keyboard_alone(chromium: Any, site: Dashboard) -> None:
    def tab_to(page: Any, selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"{selector} is not reached")

    run = run_of(site, 1)
    with opened(chromium, site) as page:
        page.locator("table.runs").wait_for()
        tab_to(page, f"a[href$='/1/run/{run}']")
        page.keyboard.press("Enter")
        page.locator(".pick canvas").wait_for()
        tab_to(page, ".pick .canvas")
        for key in ("Home", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        page.wait_for_url(re.compile("/train/1$"))
        page.locator(".strip").first.wait_for()
        tab_to(page, ".strip .about a")
        page.keyboard.press("Enter")
        page.locator(".column header a").first.wait_for()
        tab_to(page, ".column header a")
        page.keyboard.press("Enter")
        page.locator(".tok").first.wait_for()
        tab_to(page, ".tok")
        before = page.locator(".detail").inner_text()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.i") == "1"
        assert page.locator(".detail").inner_text() != before
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"


def test_small_plots_are_read_by_keyboard_and_all_of_them_are_printed(chromium: Any, site: Dashboard) -> None:
    run = run_of(site, 1)
    metrics = site.json(f"1/runs/{run}/metrics")
    losses = metrics["values"]["learner/loss"]
    with opened(chromium, site, f"/1/run/{run}", scheme="dark") as page:
        plot = page.locator("figure.small", has=page.get_by_text("loss", exact=True))
        plot.locator("canvas").wait_for()
        plot.locator(".canvas").focus()
        for index, key in enumerate(("Home", "ArrowRight")):
            page.keyboard.press(key)
            legend = plot.locator(".legend").inner_text()
            assert f"step {metrics['steps'][index]}" in legend
            value = losses[index]
            shown = legend.rpartition("\n")[2].split()[-1]
            assert (shown == "–") if value is None else (float(shown) == pytest.approx(value, rel=0.01, abs=1e-3))
        # Also those that nobody has scrolled to.
        page.locator("figure:not(:has(canvas))").first.wait_for(state="detached")
        assert page.locator("figure").count() > 20
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(26, 31, 38)"
        assert page.get_by_role("link", name="Search rollouts").count() == 0
        fits(page)


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        pytest.param("dark", LAPTOP, id="laptop-dark"),
        pytest.param("light", PHONE, id="phone-light"),
        pytest.param("light", LAPTOP, id="laptop-light", marks=pytest.mark.night),
        pytest.param("light", TABLET, id="tablet-light", marks=pytest.mark.night),
        pytest.param("dark", PHONE, id="phone-dark", marks=pytest.mark.night),
    ],
)
def test_every_page_fits(chromium: Any, site: Dashboard, scheme: str, size: dict[str, int]) -> None:
    runs, id = [run_of(site, 0), run_of(site, 1)], trained_rollout(site)
    pages = {
        "runs": ("/", "table.runs"),
        "run": (f"/1/run/{runs[1]}", ".pick canvas"),
        "step": (f"/1/run/{runs[1]}/train/1", ".strip"),
        "validation": (f"/1/run/{runs[1]}/val/0", ".single"),
        "group": (f"/1/group/{id}", ".column .line"),
        "rollout": (f"/1/rollout/{id}", ".tok"),
        "conversation": (f"/1/rollout/{id}?view=conversation", ".message"),
        "spans": (f"/1/rollout/{id}?view=spans", ".tree li"),
        "compare": (f"/compare?a=0:{runs[0]}&b=1:{runs[1]}", "text=common tasks"),
        "runners": ("/1/runners", "text=No rollout is running"),
        "recorded": ("/1/recorded", "h1"),
        "search": (f"/1/run/{runs[1]}/search?text=what", "table.found"),
        "nowhere": ("/1/rollout/ro-nowhere", ".failure"),
    }
    with opened(chromium, site, "/nothing", size=size, scheme=scheme) as page:
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (scheme == "dark")
        for name, (hash, shown) in pages.items():
            if name == "nowhere":
                # Chromium reports the 404 that is asked for here.
                continue
            page.evaluate("(hash) => { location.hash = hash }", hash)
            page.locator(shown).first.wait_for()
            fits(page)
            accessible(page)
            assert page.locator(".failure").count() == 0
            picture(page, f"{name}-{scheme}-{size['width']}")
        page.evaluate(
            "document.querySelector('main').insertAdjacentElement('beforeend', document.createElement('button'))"
        )
        with pytest.raises(AssertionError, match="button-name"):
            accessible(page)
        page.get_by_role("button", name="dark or light").click()
        turned = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert turned != dark


@pytest.mark.parametrize(
    "size", [pytest.param(LAPTOP, id="laptop", marks=pytest.mark.night), pytest.param(PHONE, id="phone")]
)
def test_what_agents_and_tools_wrote_is_text(
    chromium: Any, hostile: tuple[Dashboard, agl.Result], size: dict[str, int]
) -> None:
    site, result = hostile
    step = site.json(f"0/runs/{result.run_id}/steps/train/0")["rollouts"]
    failed = next(r["rollout_id"] for r in step if r["attempts"] > 1)
    hashes = ["/", f"/0/run/{result.run_id}", f"/0/run/{result.run_id}/train/1", f"/0/run/{result.run_id}/val/2"]
    hashes += [f"/0/group/{failed}", f"/compare?a=0:{result.run_id}&b=0:{result.run_id}&a_step=0", "/0/runners"]
    hashes += [f"/0/rollout/{failed}?view={view}" for view in ("tokens", "conversation", "spans")]
    hashes += [f"/0/rollout/{failed}?attempt=1"]
    with opened(chromium, site, "/", size=size) as page:
        seen = ""
        for hash in hashes:
            page.evaluate("(hash) => { location.hash = hash }", hash)
            page.wait_for_load_state("networkidle")
            page.locator(".loading").first.wait_for(state="detached")
            for details in page.locator("details").all()[:40]:
                details.evaluate("(element) => { element.open = true }")
            fits(page)
            accessible(page)
            text = page.locator("body").inner_text()
            seen += text
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2060-\u206f]", text), hash
            assert page.title().endswith("agl")
            assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert printable(HOSTILE) in seen
        assert printable(CONTROL) in seen
        assert "forked: assistant_rewritten" in seen
        picture(page, f"hostile-{size['width']}")


def test_what_a_recorded_program_said_is_a_conversation(chromium: Any, tmp_path: Path) -> None:
    with serve(uses_add()) as provider:
        done = launch(tmp_path, environment(provider), "--", sys.executable, str(PROGRAMS / "bare_openai.py"))
    assert done.returncode == 0, done.stderr
    with served(tmp_path / "agl-runs" / "traces.db") as shown:
        (rollout,) = shown.json("0/rollouts")["rollouts"]
        with opened(chromium, shown, f"/0/rollout/{rollout['rollout_id']}") as page:
            page.locator(".message").first.wait_for()
            said = [tuple(m.inner_text().split("\n", 1)) for m in page.locator(".message").all()]
            picture(page, "recording")
            assert [role.lower() for role, _ in said] == ["user", "assistant", "tool", "assistant"]
            assert 'add({"a": 2, "b": 3})' in said[1][1].replace('":', '": ').replace(",", ", ").replace("  ", " ")
            assert said[2][1].strip() == "5"
            assert "sum 5" in said[3][1]
            facts = {x.locator("dt").inner_text(): x.locator("dd").inner_text() for x in page.locator(".fact").all()}
            assert facts["calls"] == "2"


def game(directory: Path) -> tuple[list[Path], str]:
    """Kuhn poker by two policies, and by one that both players share; the text that stands first on their pages."""
    from examples.games.kuhn import __main__ as kuhn

    kuhn.main(["--tiny", "--steps", "2", "--out", str(directory)])
    return [directory / form for form in ("two-policies", "one-shared-policy")], "exploitability"


def search(directory: Path) -> tuple[list[Path], str]:
    """GEPA's search for a prompt."""
    with rule_provider() as provider:
        resources = {"prompt": agl.PromptTemplate("You answer questions about places. Answer: {question}")}
        agent = template_agent(provider.url)
        fit(gepa(provider.url, held_out=HELD_OUT), agent, directory, initial_resources=resources)
    return [directory], "reward"


def imitation(directory: Path) -> tuple[list[Path], str]:
    """A recorded run, which has no step, and a policy that imitates it."""
    from agl.trainer.quickstart.tasks import arithmetic_tasks
    from examples.distil_then_reinforce.agent import build, reward
    from examples.distil_then_reinforce.scripts import strong

    with serve(strong) as provider:
        solver = agl.wrap(build(provider.url, "strong", "none"), reward=reward)
        agl.Trainer(agl.Baseline(), directory=directory / "recorded").fit(
            solver, arithmetic_tasks(8, seed=0, split="train")
        )
    sft = agl.SFT(
        model=str(untrained := directory / "model"), data=agl.traces(directory / "recorded"), epochs=2, batch_size=4
    )
    make_untrained(untrained)
    agl.Trainer(sft, directory=directory / "sft").fit(None)
    return [directory / "sft", directory / "recorded"], "negative log-likelihood per token"


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("kind", [game, search, imitation], ids=lambda kind: kind.__name__)
def test_every_kind_of_run_has_a_page_that_fits(chromium: Any, tmp_path: Path, kind: Any) -> None:
    directories, first = kind(tmp_path)
    with served(*directories) as shown:
        for scheme, size in itertools.product(("light", "dark"), (LAPTOP, TABLET, PHONE)):
            with opened(chromium, shown, size=size, scheme=scheme) as page:
                page.locator("table.runs").wait_for()
                fits(page)
                accessible(page)
                for number, _ in enumerate(directories):
                    page.evaluate("(hash) => { location.hash = hash }", f"/{number}/run/{run_of(shown, number)}")
                    page.locator("dl.facts").wait_for()
                    if number == 0:
                        assert page.locator(".card .name").first.inner_text() == first
                    page.wait_for_load_state("networkidle")
                    fits(page)
                    accessible(page)


def test_without_the_key_and_with_a_pruned_rollout(chromium: Any, site: Dashboard) -> None:
    context = chromium.new_context(viewport=LAPTOP)
    page = context.new_page()
    page.goto(f"{site.url}/")
    page.get_by_label("Key").fill("not the key of this server")
    page.get_by_role("button", name="Open").click()
    page.get_by_label("Key").fill(site.key)
    page.get_by_role("button", name="Open").click()
    page.locator("table.runs").wait_for()
    # A tab of its own has the key from this one.
    second = context.new_page()
    second.goto(f"{site.url}/#/1/runners")
    second.get_by_text("No rollout is running").wait_for()
    second.evaluate("location.hash = '/1/rollout/ro-nowhere'")
    second.get_by_role("alert").wait_for()
    assert "ro-nowhere" in second.get_by_role("alert").inner_text()
    context.close()


def test_runs_are_searched_and_ordered(chromium: Any, site: Dashboard) -> None:
    with opened(chromium, site) as page:
        rows = page.locator("table.runs tbody tr")
        rows.first.wait_for()
        names = [row.locator("a").inner_text() for row in rows.all()]
        assert len(names) == 2
        page.get_by_label("search").fill(f"grpo {names[1]}")
        page.wait_for_function("document.querySelectorAll('table.runs tbody tr').length === 1")
        assert rows.locator("a").inner_text() == names[1]
        page.get_by_label("search").fill("no such run")
        page.get_by_text("No run matches.").wait_for()
        page.get_by_label("search").fill("")
        page.get_by_label("order").select_option("held-out reward")
        page.wait_for_function("document.querySelectorAll('table.runs tbody tr').length === 2")
        ends = {run["run_id"]: run["ends"]["val/reward"][-1][1] for run in site.json("runs")["runs"]}
        shown = [row.locator("a").inner_text() for row in rows.all()]
        assert [ends[name] for name in shown] == sorted(ends.values(), reverse=True)


def test_notes_and_labels_are_written_by_hand(chromium: Any, untrained_model: Path, tmp_path: Path) -> None:
    """A label, a name with tags, deleting and its undo; each is there after the page was loaded anew."""
    result = train_tiny(untrained_model, tmp_path, steps=1)
    with served(tmp_path) as site:
        rollout = site.json(f"0/runs/{result.run_id}/steps/train/0")["rollouts"][0]["rollout_id"]
        with opened(chromium, site, f"/0/rollout/{rollout}") as page:
            page.get_by_label("your label").fill("0.5")
            page.get_by_label("why").fill("half right")
            page.get_by_role("button", name="Label", exact=True).click()
            page.get_by_role("button", name="Withdraw 0.5").wait_for()
            row = page.locator("table.rewards tr", has_text="half right")
            assert "0.5" in row.inner_text()
            picture(page, "label")
            fits(page)
            page.reload()
            page.get_by_role("button", name="Withdraw 0.5").click()
            page.get_by_role("button", name="Label", exact=True).wait_for()
        with opened(chromium, site, f"/0/run/{result.run_id}") as page:
            page.get_by_role("button", name="Name, tags, note").click()
            accessible(page)
            page.get_by_label("name").fill("<b>mine</b>")
            page.get_by_label("tags").fill("baseline, cheap")
            page.get_by_label("note").fill("before the new tool")
            picture(page, "noted")
            page.get_by_role("button", name="Save").click()
            page.get_by_role("heading", name="<b>mine</b>").wait_for()
            assert page.locator(".noted .tag").all_inner_texts() == ["baseline", "cheap"]
            assert page.get_by_role("button", name="Stop after this step").count() == 0  # it has ended
            page.get_by_role("button", name="Delete").click()
            page.get_by_role("button", name="Restore").wait_for()
            fits(page)
        with opened(chromium, site) as page:
            page.get_by_text("yet. A run appears").wait_for()
            page.get_by_role("link", name="Deleted runs").click()
            page.get_by_role("link", name="<b>mine</b>").click()
            page.get_by_role("button", name="Restore").click()
            page.get_by_role("button", name="Delete").wait_for()
            page.goto(f"{site.link}")
            page.get_by_role("link", name="<b>mine</b>").wait_for()


def test_the_curve_has_tokens_and_time_as_x_and_zooms_without_opening_a_step(chromium: Any, site: Dashboard) -> None:
    run = run_of(site, 1)
    with opened(chromium, site, f"/1/run/{run}") as page:
        curve = page.locator("figure.pick")
        curve.locator("canvas").wait_for()
        page.get_by_role("button", name="Trained tokens").click()
        page.get_by_text("reward by trained tokens").wait_for()
        page.get_by_role("button", name="Time").click()
        page.get_by_text("reward by minutes").wait_for()
        curve.locator("canvas").wait_for()
        box = curve.locator(".canvas").bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 90, steps=4)
        page.mouse.up()
        page.wait_for_timeout(300)
        assert page.url.endswith(f"/1/run/{run}")
        page.mouse.click(box["x"] + 300, box["y"] + 80)
        page.wait_for_url("**/train/*")


def test_a_long_rollout_is_folded(chromium: Any, untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def talker(task: Any, llm: agl.LLM) -> float:
        for turn in range(12):
            say(llm, f"{task['question']} {turn}")
        return 1.0

    algorithm = agl.GRPO(
        model=str(untrained_model), group_size=2, batch_size=1, steps=1, max_response_tokens=4, max_context=128,
        learning_rate=1e-4,
    )  # fmt: skip
    agl.Trainer(algorithm, directory=tmp_path, progress=False, n_workers=2).fit(talker, [{"question": "q"}])
    with served(tmp_path) as shown:
        rollout = shown.json(f"0/runs/{run_of(shown, 0)}/steps/train/0")["rollouts"][0]["rollout_id"]
        with opened(chromium, shown, f"/0/rollout/{rollout}") as page:
            page.locator(".folded").nth(11).wait_for()
            assert page.evaluate("document.body.scrollHeight") < 2000
            page.get_by_role("button", name="call 7", exact=True).press("Enter")
            page.locator(".tokens").wait_for()
            assert page.get_by_role("button", name="call 7", exact=True).get_attribute("aria-expanded") == "true"
            page.get_by_role("button", name="Unfold all 12 calls").click()
            page.locator(".tokens").nth(11).wait_for()
        with opened(chromium, shown, f"/0/rollout/{rollout}?call=9&token=0") as page:
            page.locator(".tokens").wait_for()
            assert page.locator(".folded").count() == 11
        with opened(chromium, shown, f"/0/rollout/{rollout}?view=conversation") as page:
            page.locator("details").nth(11).wait_for()
            assert page.locator("details[open]").count() == 0
