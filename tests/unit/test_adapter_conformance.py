"""What every adapter must do (`agl.testing.conformance`), over all of ours."""

from __future__ import annotations

import pytest
from all_subjects import ALL, SUBJECTS

from agl.testing.conformance import Conformance

pytest.mark.slow(Conformance.test_an_mcp_tool_that_says_it_failed_is_a_failure)
# Each looks through everything that is alive, or runs every agent nineteen times.
pytest.mark.full(Conformance.test_a_stream_that_is_left_leaves_nothing_open)
pytest.mark.full(Conformance.test_a_cancelled_call_ends_and_what_follows_is_its_callers)
pytest.mark.full(Conformance.test_what_a_tool_returned_tells_its_outcome)


class TestAdapters(Conformance):
    subjects = SUBJECTS
    # What fits into no environment with the others; its row of the version matrix runs the suite over it.
    elsewhere = tuple(s for s in ALL if s not in SUBJECTS)
