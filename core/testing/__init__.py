"""What adapters are tested with, ours and those of others: `agl.testing.conformance` (docs/write-an-adapter.md).

Needs pytest, which nothing else of agl imports.
"""

import pytest

pytest.register_assert_rewrite("agl.testing.conformance")
