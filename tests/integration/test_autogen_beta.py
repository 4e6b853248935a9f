"""`autogen.beta`, which ag2 was before its release 1.0: what every adapter must do."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("autogen.beta.middleware")

from subject_ag2 import AutoGenBeta

from agl.testing.conformance import Conformance


class TestAutoGenBeta(Conformance):
    subjects = (AutoGenBeta(),)


def test_it_is_traced_once_a_program_imports_it() -> None:
    """Importing it takes seconds, which users of classic AutoGen do not wait for."""
    program = """
import sys
from agl.adapters.autogen import AutoGenTracer

with AutoGenTracer():
    assert "autogen.beta" not in sys.modules
    from autogen.beta import Agent

    assert hasattr(Agent._turn_scope, "__wrapped__")
    patched = Agent._turn_scope
assert Agent._turn_scope is not patched
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
