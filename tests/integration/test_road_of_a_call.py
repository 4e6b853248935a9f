"""From a call of a model to the gradient of its tokens: the functions and files that a run enters.

A bound is lowered when a change allows it. Who raises one says why in the commit.
"""

from __future__ import annotations

import pytest
from road import measure


@pytest.mark.slow
def test_the_road_does_not_get_longer() -> None:
    road = measure()
    assert road.call.functions <= 267
    assert road.call.files <= 52
    assert road.call.changes <= 78
    assert road.call_here.functions <= 200
    assert road.call_here.files <= 42
    assert road.to_gradient.functions <= 504
    assert road.to_gradient.files <= 105
