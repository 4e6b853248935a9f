"""Tests that run programs in a sandbox, on machines that have none."""

from __future__ import annotations

import pytest

from agl.errors import ConfigError
from agl.trainer.processes.sandboxes import chosen


def needs_a_sandbox() -> None:
    """Skip the module that calls this where no program can be sandboxed."""
    try:
        chosen("auto")
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)
