"""examples/customer_service: an assistant learns to keep the shop's policy.

Shortened, of cancellations; and at night the whole: three kinds of request, strangers, all four rules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("strands")

from examples.customer_service.__main__ import main


@pytest.mark.night
@pytest.mark.slow
def test_the_policy_for_cancellations_is_kept(tmp_path: Path) -> None:
    before, after = successes("--short", "--out", str(tmp_path / "out"))
    assert before["high"] < after["low"], (before, after)


@pytest.mark.night
def test_the_policy_of_the_shop_is_kept(tmp_path: Path) -> None:
    before, after = successes("--seed", "2", "--out", str(tmp_path / "out"))
    assert before["high"] < after["low"], (before, after)
    assert after["low"] > 0.4, after


def successes(*options: str) -> list[Any]:
    """Of the policy before and after its training."""
    result = main(["--tiny", *options])
    assert result is not None
    return [result["policies"][name]["success"] for name in ("before", "after")]
