"""examples/memory: its scripts score what they must with the real agent, and what it shows cannot be had otherwise."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.testing.provider import Script, says, serve
from examples.memory import __main__ as program
from examples.memory.agent import build
from examples.memory.scripts import beginner, oracle
from examples.memory.tasks import CHANCE, DRINKS, FAVOURITE, NOTED, reward, shops

SHOPS = shops(0)


def success(script: Script, tasks: list[Any], directory: Path, memory: agl.Memory | None = None) -> list[float]:
    """Of each mode of the memory; once without one."""
    recall = agl.memory.tools(k=1)[:1]
    with serve(script) as provider:
        use = None if memory is None else memory.per("shop")
        agent = agl.wrap(build(provider.url, "m", "none", recall), reward=reward, memory=use)
        report = agl.evaluate(agent, tasks, directory=directory, n_workers=16, progress=False)
    return [policy.success.value for policy in report.policies.values()]


@pytest.mark.night
def test_the_oracle_knows_the_customers_the_shop_or_nothing(tmp_path: Path) -> None:
    """On: all. Shuffled: as often as two customers prefer the same. Off: chance. Within three standard errors."""
    tasks, memory = SHOPS.held_out.questions(), program.told(SHOPS.held_out)
    on, off, shuffled = success(oracle, tasks, tmp_path, memory)
    assert on == 1.0
    alike = sum((count / len(tasks)) ** 2 for count in Counter(SHOPS.held_out.drinks.values()).values())
    for share, expected in ((off, CHANCE), (shuffled, alike)):
        assert abs(share - expected) < 3 * (expected * (1 - expected) / len(tasks)) ** 0.5


def test_who_is_told_says_so_and_who_says_nothing_earns_nothing(tmp_path: Path) -> None:
    assert success(oracle, SHOPS.held_out.statements[:8], tmp_path / "told") == [1.0]
    silent = [*SHOPS.held_out.questions()[:4], *SHOPS.held_out.statements[:4]]
    assert success(says(""), silent, tmp_path / "null") == [0.0]


@pytest.mark.night
def test_the_beginner_mostly_errs(tmp_path: Path) -> None:
    on, off, shuffled = success(beginner, SHOPS.train.questions(), tmp_path, program.told(SHOPS.train))
    assert 0.25 < on < 0.55
    assert off < shuffled < on


@pytest.mark.parametrize("seed", range(3))
def test_shops_differ_in_customers_and_tastes(seed: int) -> None:
    town = shops(seed)
    assert len(town.train.drinks | town.held_out.drinks | town.beginner.drinks) == 160 + 192 + 540
    assert town.train.favourite != town.held_out.favourite
    for shop, share in ((town.train, FAVOURITE), (town.held_out, FAVOURITE), (town.beginner, CHANCE)):
        preferred = Counter(shop.drinks.values())
        assert preferred.pop(shop.favourite) == round(share * len(shop.drinks))
        assert len(preferred) == len(DRINKS) - 1
        assert max(preferred.values()) - min(preferred.values()) <= 1
        assert {task["answer"] for task in shop.questions()} == set(DRINKS)
        assert {task["answer"] for task in shop.statements} == {NOTED}
    assert shops(seed + 1).train.drinks != town.train.drinks


def test_debug_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["--tiny", "--debug", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert shown.count("== task") == shown.count("execute_tool recall") == shown.count("reward 1.0\n") == 3
