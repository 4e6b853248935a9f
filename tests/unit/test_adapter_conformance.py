"""What every adapter must do (`agl.testing.conformance`), over all of ours."""

from __future__ import annotations

import pytest
from all_subjects import ALL, SUBJECTS

from agl.testing.conformance import Conformance

pytest.mark.slow(Conformance.test_an_mcp_tool_that_says_it_failed_is_a_failure)


class TestAdapters(Conformance):
    subjects = SUBJECTS
    # What fits into no environment with the others; its row of the version matrix runs the suite over it.
    elsewhere = tuple(s for s in ALL if s not in SUBJECTS)
