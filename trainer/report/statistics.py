"""Success, mean rewards and differences of policies with what is known of their error; numpy alone.

Samples of one task are not independent, so everything here begins with one number per task and treats the tasks as
drawn from a larger population. T: tasks, the last axis; "...": any axes before it. Intervals are two-sided, at 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agl.errors import ConfigError

CONFIDENCE = 0.95
POWER = 0.8
SIGN_FLIPS = 50_000
"""How many are drawn where the exact test would be too long."""

Floats = NDArray[np.float64]
Interval = tuple[Floats, Floats]
"""Lower and upper bounds: arrays of the shape of the axes before the tasks."""


def success_interval(rates_T: ArrayLike, samples: float = 1) -> Interval:
    """The interval of the mean of the tasks' success rates.

    Wilson's interval for the number of independent rollouts that would give the same standard error; between the number
    of tasks and that of rollouts (Dean and Pagano, Survey Methodology 41, 2015; Franco et al., JSSAM 7, 2019). With one
    sample per task it is Wilson's own. Simulated, it covers the truth where a bootstrap over tasks is too narrow: with
    20 tasks 95 to 96 % instead of 90 %.

    Args:
        rates_T: (..., T), each between 0 and 1.
        samples: per task; their mean, where tasks differ.
    """
    rates = np.asarray(rates_T, np.float64)
    n = rates.shape[-1]
    p = rates.mean(-1)
    squared_error = rates.var(-1, ddof=min(1, n - 1)) / n
    with np.errstate(divide="ignore", invalid="ignore"):
        independent = np.where(squared_error > 0, p * (1 - p) / squared_error, n)
    # With one sample a task's variance is p (1 - p), and nothing has to be estimated.
    effective = np.clip(independent, n, n * samples)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) if samples == 1 else t_quantile(n - 1)
    middle = (p + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z * np.sqrt(p * (1 - p) / effective + (z / (2 * effective)) ** 2) / (1 + z * z / effective)
    # With p = 0 or 1 that end is the interval's own, but for rounding.
    return np.clip(middle - half, 0.0, p), np.clip(middle + half, p, 1.0)


def mean_interval(values_T: ArrayLike, unit: float = 0.0) -> Interval:
    """Student's interval of the mean over tasks, which is the one with standard errors clustered by task (Miller,
    arXiv 2411.00640). Infinite with one task.

    Args:
        values_T: (..., T); each task's mean reward, or its difference between two policies.
        unit: the smallest difference that a task can show. Where all tasks show the same, the spread is taken to be
            that with one task more that shows `unit` more, and one that shows as much less (Bonett and Price, 2012).
    """
    values = np.asarray(values_T, np.float64)
    n = values.shape[-1]
    mean = values.mean(-1)
    half = t_quantile(n - 1) * _standard_error(values, unit)
    return mean - half, mean + half


def reward_interval(rewards_T: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The interval of the mean reward over two tasks or more: `success_interval` where each reward is 0 or 1, else
    `mean_interval`.

    Args:
        rewards_T: each task's rewards, one at least.
    """
    every = [reward for rewards in rewards_T for reward in rewards]
    means_T = [math.fsum(rewards) / len(rewards) for rewards in rewards_T]
    shares = all(reward in (0, 1) for reward in every)
    low, high = success_interval(means_T, len(every) / len(means_T)) if shares else mean_interval(means_T)
    return float(low), float(high)


def smallest_difference(differences_T: ArrayLike, unit: float = 0.0) -> float:
    """The difference between two policies that a comparison like this one would show as significant in `POWER` of
    cases: (z_0.975 + z_0.8) standard errors (Miller, arXiv 2411.00640, section 5). Arguments as `mean_interval`."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)
    return float(z * _standard_error(np.asarray(differences_T, np.float64), unit))


def _standard_error(values: Floats, unit: float) -> Floats:
    n = values.shape[-1]
    if n == 1:
        return np.full(values.shape[:-1], np.inf)
    spread = values.std(-1, ddof=1)
    return np.where(spread > 0, spread, unit * np.sqrt(2 / (n + 1))) / np.sqrt(n)


def sign_flip_test(differences_T: ArrayLike, seed: int = 0) -> float:
    """The two-sided p-value of the paired differences under "each task's difference could as well be the opposite"
    (Fisher and Pitman's test for pairs). Of successes with one sample it is McNemar's exact test.

    It is exact where the differences are multiples of some unit, as means of successes and of most graders' rewards
    are: the distribution of the sum is then a convolution. Otherwise it is (1 + extreme) / (1 + drawn) of `SIGN_FLIPS`
    seeded draws (Phipson and Smyth, 2010).

    Args:
        differences_T: (T,)
    """
    differences = np.asarray(differences_T, np.float64)
    differences = differences[differences != 0]
    if not differences.size:
        return 1.0
    units = _in_units(differences)
    if units is not None:
        total = int(np.abs(units).sum())
        # probability[k]: that the differences with a positive sign add up to k
        probability = np.zeros(total + 1)
        probability[0] = 1.0
        for size in np.abs(units):
            probability[size:] += probability[:-size]
            probability /= 2
        sums = np.abs(2 * np.arange(total + 1) - total)
        return float(min(1.0, probability[sums >= abs(int(units.sum()))].sum()))
    rng = np.random.default_rng(seed)
    extreme = abs(float(differences.sum())) * (1 - 1e-12)
    drawn = 0
    for _ in range(50):
        signs = rng.choice((-1.0, 1.0), (SIGN_FLIPS // 50, differences.size))
        drawn += int((np.abs(signs @ differences) >= extreme).sum())
    return (1 + drawn) / (1 + SIGN_FLIPS)


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """The probability that of `k` samples of a task at least one succeeds: 1 - C(n-c, k) / C(n, k) (Chen et al.,
    arXiv 2107.03374), unbiased.

    Args:
        n: samples per task, (T,).
        c: successes among them, (T,).
        k: at most the smallest n.

    Raises:
        ConfigError: `k` is above n, or below 1.
    """
    successes = np.asarray(c)
    return 1.0 - _all_of_k(n, np.asarray(n) - successes, k)


def pass_hat_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """The probability that all of `k` samples of a task succeed, pass^k: C(c, k) / C(n, k) (tau-bench, arXiv
    2406.12045), unbiased. Arguments and errors as `pass_at_k`."""
    return _all_of_k(n, c, k)


def _all_of_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """C(c, k) / C(n, k) as a product, which neither overflows nor cancels."""
    samples, chosen = np.broadcast_arrays(np.asarray(n, np.float64), np.asarray(c, np.float64))
    if k < 1 or (samples.size and k > samples.min()):
        raise ConfigError(
            f"k={k} cannot be estimated from {int(samples.min()) if samples.size else 0} samples per task",
            hint="k is at least 1 and at most the number of samples: raise samples=, or lower k",
        )
    i = np.arange(k)
    return np.prod(np.maximum(chosen[..., None] - i, 0.0) / (samples[..., None] - i), -1)


@cache
def t_quantile(df: int) -> float:
    """Student's quantile for the interval's upper end. With t = sqrt(df) tan(a), the density of a is cos(a)^(df-1)."""
    df = min(max(df, 1), 10_000)  # from there on the normal distribution's, to four digits
    angle = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angle) ** (df - 1)
    cumulative = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(df) * np.tan(np.interp(CONFIDENCE, cumulative / cumulative[-1], angle)))


def _in_units(values: Floats) -> NDArray[np.int64] | None:
    """The values as multiples of 1/u for the smallest u up to 1,000 that fits; None if none does or there are too many
    sums."""
    for u in range(1, 1001):
        scaled = values * u
        whole = np.rint(scaled)
        if np.all(np.abs(scaled - whole) < 1e-6):
            if np.abs(whole).sum() * whole.size > 5e7:
                return None
            return whole.astype(np.int64)
    return None
