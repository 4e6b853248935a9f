"""What the tests of the four APIs share."""

from __future__ import annotations

from importlib import import_module

import pytest
from late import installed


@pytest.fixture(scope="session", autouse=True)
def sdks() -> None:
    """Import the SDKs before a test's time limit begins: together that takes seconds."""
    for name in ("openai.types.responses", "anthropic.types.beta", "google.genai.types"):
        if installed(name.partition(".")[0]) and installed(name.rpartition(".")[0]):
            import_module(name)
