"""Coding agents, which read their provider from configurations of their own: `agl_harnesses` knows these."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl import extras

PROGRAMS = ("aider", "claude", "codex", "gemini", "mini", "opencode", "pi", "qwen")


def find(command: Sequence[str]) -> Any:
    """The `agl_harnesses.Session` of a coding agent's command, or None; without the package, a line names it."""
    if find_spec("agl_harnesses") is not None:
        return import_module("agl_harnesses").find(command)
    if (program := Path(command[0]).name) in PROGRAMS:
        print(f"agl: to record {program} by its own settings, {extras.install_line('harnesses')}", file=sys.stderr)
    return None


def installation(program: str) -> str:
    """How to install a coding agent, to be added to "command not found"; "" if it is none that is known."""
    return import_module("agl_harnesses").installation(program) if find_spec("agl_harnesses") is not None else ""
