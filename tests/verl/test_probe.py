"""The weight check: weights that were not handed over are told from rounding, in every dtype."""

from __future__ import annotations

import numpy as np
import pytest

from agl.errors import StalePolicyError

RNG = np.random.default_rng(0)
BEFORE = RNG.normal(-3, 1, 31).astype(np.float32)
AFTER = (BEFORE + RNG.normal(0, 0.1, 31)).astype(np.float32)


def noisy(logprobs: np.ndarray, scale: float) -> np.ndarray:
    return (logprobs + RNG.normal(0, scale, logprobs.size)).astype(np.float32)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-5), ("bfloat16", 0.01)])
def test_servers_with_the_old_weights_are_told(dtype: str, scale: float) -> None:
    from agl_verl.weight_check import WeightCheck

    weight_check = WeightCheck(None, range(32), dtype)
    assert weight_check.compare(BEFORE, noisy(BEFORE, scale), 1)["agl/probe/logprob_diff"] < 2 * scale
    with pytest.raises(StalePolicyError, match="after the update of step 2") as raised:
        weight_check.compare(AFTER, noisy(BEFORE, scale), 2)
    assert raised.value.hint


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_rounding_is_not_taken_for_old_weights(dtype: str, scale: float) -> None:
    """Not either where the update moved them by much less than rounding does."""
    from agl_verl.weight_check import WeightCheck

    weight_check = WeightCheck(None, range(32), dtype)
    for step in range(1, 200):
        trained = BEFORE + np.float32(step * 1e-6)
        weight_check.compare(trained, noisy(trained, scale), step)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 0.01), ("bfloat16", 1.0), ("bfloat16", np.nan)])
def test_servers_with_other_weights_altogether_are_told_at_once(dtype: str, off: float) -> None:
    from agl_verl.weight_check import WeightCheck

    with pytest.raises(StalePolicyError, match="differ from the actor's"):
        WeightCheck(None, range(32), dtype).compare(AFTER, AFTER + np.float32(off), 1)
