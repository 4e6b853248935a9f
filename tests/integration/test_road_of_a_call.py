"""From a call of a model to the gradient of its tokens: the functions and files that a run enters.

A bound is lowered when a change allows it. Who raises one says why in the commit.
"""

from __future__ import annotations

import pytest
from road import measure

BOUNDS = {
    "call": {"functions": 267, "files": 52, "changes": 78},
    "call_here": {"functions": 200, "files": 42},
    "to_gradient": {"functions": 504, "files": 105},
}


@pytest.mark.slow
def test_the_road_does_not_get_longer() -> None:
    longer: dict[str, int] = {}
    # On a busy machine, what a process does beside its calls may fall into each of them.
    for _ in range(3):
        road = measure()
        longer = {
            f"{stretch}.{figure}": found
            for stretch, bounds in BOUNDS.items()
            for figure, bound in bounds.items()
            if (found := getattr(getattr(road, stretch), figure)) > bound
        }
        if not longer:
            return
    pytest.fail(f"longer than before: {longer}")
