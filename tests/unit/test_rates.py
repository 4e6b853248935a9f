"""The usual learning rates: one table in code and documentation, and what a run makes of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import agl
from agl.trainer.local.rates import USUAL_RATES, table, usual_rate

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "hyper-parameters.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("parameters", "lora", "imitates", "rate"),
    [
        (500_000, False, False, 1e-4),
        (135_000_000, False, False, 2e-5),
        (135_000_000, True, False, 2e-4),
        (500_000_000, False, False, 1e-6),
        (7_000_000_000, True, False, 1e-5),
        (7_000_000_000, False, True, 1e-5),
    ],
)
def test_it_depends_on_size_adapter_and_loss(parameters: int, lora: bool, imitates: bool, rate: float) -> None:
    assert usual_rate(parameters, lora=lora, imitates=imitates) == rate


def test_larger_models_never_get_a_higher_rate_and_adapters_never_a_lower_one() -> None:
    sizes = [10, *(rates.below for rates in USUAL_RATES if math.isfinite(rates.below))]
    for imitates in (False, True):
        for lora in (False, True):
            of_sizes = [usual_rate(int(size), lora=lora, imitates=imitates) for size in sizes]
            assert of_sizes == sorted(of_sizes, reverse=True)
        assert all(
            usual_rate(int(size), lora=True, imitates=imitates) >= usual_rate(int(size), lora=False, imitates=imitates)
            for size in sizes
        )


@pytest.mark.parametrize("algorithm", [agl.GRPO, agl.PPO])
def test_a_rate_that_is_chosen_is_kept_and_none_is_left_to_the_model(algorithm: type[agl.GRPO]) -> None:
    chosen = algorithm(model="m", steps=1, learning_rate=3e-6).policy_spec(seed=0, steps=1)
    assert (chosen.usual_rate, chosen.learner.learning_rate) == (False, 3e-6)
    assert algorithm(model="m", steps=1).policy_spec(seed=0, steps=1).usual_rate
