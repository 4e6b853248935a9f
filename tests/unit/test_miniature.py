"""A real agent gets better in a miniature of training.

`tests/learning/test_learning.py` proves that this test fails where the mask is shifted, the gradient removed, rewards
are swapped or stale weights served.
"""

from __future__ import annotations

from pathlib import Path

from miniature import GAIN, gain, train


def test_heldout_reward_rises(tiny_policy: Path, tmp_path: Path, no_process_left: None) -> None:
    result = train(tiny_policy, tmp_path)
    assert gain(result) >= GAIN
    assert all(h["train/forks"] == 0 for h in result.history if "train/forks" in h)
    first = next(h for h in result.history if h["step"] == 1)
    assert first["learner/max_abs_log_ratio"] < 1e-3, "what is trained is what was sampled"
    assert first["train/tokens"] < first["train/tokens_unmerged"]
