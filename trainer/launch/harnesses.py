"""Coding agents, which read their provider from configurations of their own: `agl_harnesses` knows these."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl import extras

PROGRAMS = ("aider", "claude", "codex", "mini", "opencode", "pi", "qwen")
Harness = Any
"""An `agl_harnesses.Session`."""


def find(command: Sequence[str]) -> Harness | None:
    """What starts this command if it is a coding agent; without the package, a line on stderr names it."""
    if find_spec("agl_harnesses") is not None:
        return import_module("agl_harnesses").find(command)
    if (program := Path(command[0]).name) in PROGRAMS:
        line = f"agl: {program} may read its provider from files; to record it then: {extras.install_line('harnesses')}"
        print(line, file=sys.stderr)
    return None
