"""What every adapter must do (`agl.testing.conformance`), over all of ours."""

from __future__ import annotations

import pytest
from all_subjects import SUBJECTS

from agl.testing.conformance import Conformance

pytest.mark.slow(Conformance.test_an_mcp_tool_that_says_it_failed_is_a_failure)


class TestAdapters(Conformance):
    subjects = SUBJECTS
