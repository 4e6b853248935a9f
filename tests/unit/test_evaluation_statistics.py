"""What is said of a policy's success holds as often as it says: intervals cover, tests err, differences are seen."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl.trainer.report import statistics

SETTINGS = [(20, 1), (50, 1), (200, 1), (20, 4), (50, 4), (50, 16), (200, 4)]
"""(tasks, samples)"""
POLICIES = 1_000


def drawn(tasks: int, samples: int, gain: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Synthetic policies of different mean success and spread between tasks, each on tasks of its own, and each once
    more with `gain` added to the mean.

    Returns:
        True means (POLICIES,), and two arrays of success rates (POLICIES, tasks) on the same tasks.
    """
    rng = np.random.default_rng([tasks, samples])
    mean = rng.uniform(0.1, 0.9 - gain, POLICIES)
    concentration = np.exp(rng.uniform(np.log(0.5), np.log(20), POLICIES))
    shape = ((mean * concentration)[:, None], ((1 - mean) * concentration)[:, None], (POLICIES, tasks))
    rates = rng.beta(*shape)
    better = rates + (1 - rates) * (gain / (1 - mean))[:, None]
    return mean, rng.binomial(samples, rates) / samples, rng.binomial(samples, better) / samples


def covered(interval: statistics.Interval, truth: np.ndarray | float) -> float:
    low, high = interval
    return float(np.mean((low <= truth) & (truth <= high)))


@pytest.mark.parametrize(("tasks", "samples"), SETTINGS)
def test_intervals_of_success_cover(tasks: int, samples: int) -> None:
    mean, rates, _ = drawn(tasks, samples)
    assert 0.93 <= covered(statistics.success_interval(rates, samples), mean) <= 0.97


@pytest.mark.parametrize(("tasks", "samples"), SETTINGS)
def test_intervals_of_rewards_and_differences_cover(tasks: int, samples: int) -> None:
    _, first, second = drawn(tasks, samples, gain=0.1)
    # 0.938 of 20,000 policies where a task shows -1, 0 or 1 and there are 20.
    assert 0.93 <= covered(statistics.mean_interval(second - first, 1 / samples), 0.1) <= 0.97
    rng = np.random.default_rng(tasks)
    rewards = rng.normal(3.0, 2.0, (POLICIES, tasks)) + rng.normal(0, 5.0, (POLICIES, tasks, samples)).mean(-1)
    assert 0.93 <= covered(statistics.mean_interval(rewards), 3.0) <= 0.97


@pytest.mark.parametrize(("tasks", "samples"), SETTINGS)
def test_a_policy_is_no_better_than_itself(tasks: int, samples: int) -> None:
    _, first, second = drawn(tasks, samples)
    flagged = np.mean([statistics.sign_flip_test(d) < 0.05 for d in second - first])
    # An exact test of few different outcomes errs less often than it may.
    assert flagged <= 0.07
    assert samples == 1 or tasks == 20 or flagged >= 0.03


def test_ten_points_are_seen_with_enough_tasks_and_not_with_twenty() -> None:
    def seen(tasks: int, samples: int) -> tuple[float, float]:
        _, first, second = drawn(tasks, samples, gain=0.1)
        p_values = [statistics.sign_flip_test(d) for d in second - first]
        smallest = np.median([statistics.smallest_difference(d) for d in second - first])
        return float(np.mean(np.array(p_values) < 0.05)), float(smallest)

    share, smallest = seen(300, 4)
    assert smallest < 0.1
    assert share > 0.9
    share, smallest = seen(20, 1)
    assert smallest > 0.2
    assert share < 0.5


def test_the_smallest_difference_is_seen_in_four_of_five() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 0.3, (POLICIES, 100))
    smallest = np.median([statistics.smallest_difference(d) for d in noise])
    low, high = statistics.mean_interval(noise + smallest)
    assert np.mean((low > 0) | (high < 0)) == pytest.approx(0.8, abs=0.04)


def test_known_values() -> None:
    low, high = statistics.success_interval([1] * 7 + [0] * 3)
    assert (low, high) == pytest.approx((0.3968, 0.8922), abs=1e-4)  # Wilson (1927)
    assert statistics.t_quantile(1) == pytest.approx(12.7062, abs=1e-4)
    assert statistics.t_quantile(9) == pytest.approx(2.26216, abs=1e-5)
    assert statistics.t_quantile(10**9) == pytest.approx(1.95996, abs=1e-3)
    for gained, lost in ((5, 0), (9, 3), (30, 10), (4, 4)):
        n = gained + lost
        mcnemar = min(1.0, 2 * sum(math.comb(n, i) for i in range(min(gained, lost) + 1)) / 2**n)
        assert statistics.sign_flip_test([1] * gained + [-1] * lost + [0] * 9) == pytest.approx(mcnemar)


def test_the_interval_of_none_or_all_ends_there_exactly() -> None:
    for n in range(1, 200):
        assert statistics.success_interval([0.0] * n)[0] == 0.0
        assert statistics.success_interval([1.0] * n)[1] == 1.0


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4), min_size=2, max_size=12))
def test_rewards_of_0_and_1_have_the_interval_of_a_share(rewards: list[list[float]]) -> None:
    low, high = statistics.reward_interval(rewards)
    mean = np.mean([np.mean(of_task) for of_task in rewards])
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    if all(len(of_task) == 1 for of_task in rewards):
        assert (low, high) == pytest.approx(statistics.success_interval([r for (r,) in rewards]))
    other = statistics.reward_interval([[2.0 * r for r in of_task] for of_task in rewards])
    means = [2 * np.mean(of_task) for of_task in rewards]
    if any(2.0 in (2.0 * r for r in of_task) for of_task in rewards):
        assert other == pytest.approx(statistics.mean_interval(means), nan_ok=True)


def test_all_the_same() -> None:
    """No spread is not no error."""
    assert statistics.success_interval([1.0] * 10, 4)[0] < 0.75
    low, high = statistics.mean_interval([0.0] * 20, unit=0.25)
    assert -0.1 < low < 0 < high < 0.1
    assert statistics.sign_flip_test([0.0] * 20) == 1.0
    assert np.isinf(statistics.mean_interval([0.5])).all(), "one task says nothing about others"


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9), st.integers(1, 30))
def test_the_sign_flip_test_is_the_enumeration(units: list[int], unit: int) -> None:
    signs = itertools.product((-1, 1), repeat=len(units))
    sums = [abs(sum(s * u for s, u in zip(sign, units, strict=True))) for sign in signs]
    expected = np.mean([total >= abs(sum(units)) for total in sums])
    assert statistics.sign_flip_test(np.array(units) / unit) == pytest.approx(expected)


def test_the_sign_flip_test_of_any_numbers_is_near_that_of_rounded_ones() -> None:
    differences = np.random.default_rng(0).normal(0.2, 1.0, 60)
    exact = statistics.sign_flip_test(np.round(differences, 3))
    assert statistics.sign_flip_test(differences * math.pi) == pytest.approx(exact, abs=0.004)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices(of: tuple[int, int, int]) -> None:
    n, c, k = of
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert statistics.pass_at_k([n], [c], k)[0] == pytest.approx(np.mean([any(x) for x in choices]))
    assert statistics.pass_hat_k([n], [c], k)[0] == pytest.approx(np.mean([all(x) for x in choices]))


@pytest.mark.parametrize("k", [0, 4])
def test_k_beyond_the_samples_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match=f"k={k} cannot be estimated from 3 samples"):
        statistics.pass_at_k([4, 3], [1, 1], k)
