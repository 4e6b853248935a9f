"""examples/customer_service: an assistant learns to keep the shop's policy.

Not shortened, hence at night: before a policy from scratch copies names and orders, which takes most of the minutes,
nothing else can be learned.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("strands")

from examples.customer_service.__main__ import main

pytestmark = pytest.mark.night


def test_the_policy_of_the_shop_is_kept(tmp_path: Path) -> None:
    result = main(["--tiny", "--seed", "2", "--out", str(tmp_path / "out")])
    assert result is not None
    before, after = (result["policies"][name]["success"] for name in ("before", "after"))
    assert before["high"] < after["low"], (before, after)
    assert after["low"] > 0.4, after
