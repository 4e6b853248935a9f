"""Runs programs as a user would, in processes of their own, and reads back what was recorded of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agl import semconv
from agl.testing.provider import Provider
from agl.trainer.cli.app import app

PROGRAMS = Path(__file__).parent / "programs"
AGL = [sys.executable, "-c", "from agl.trainer.cli import main; main()"]
OPENAI_KEY, ANTHROPIC_KEY = "sk-provider-openai-0123456789", "sk-ant-provider-0123456789"
SECONDS = 300

Trace = list[dict[str, Any]]


def environment(provider: Provider, **more: str) -> dict[str, str]:
    """What a user has set: where the models are, and the keys."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AGL_", "OTEL_"))},
        "OPENAI_BASE_URL": provider.url,
        "OPENAI_API_KEY": OPENAI_KEY,
        "ANTHROPIC_BASE_URL": provider.root,
        "ANTHROPIC_API_KEY": ANTHROPIC_KEY,
        "GOOGLE_GEMINI_BASE_URL": provider.root,
        "GEMINI_API_KEY": ANTHROPIC_KEY,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        **more,
    }


def launch(cwd: Path, env: Mapping[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """`agl run` with these words; facts go to facts.json."""
    command = [*AGL, "run", "--json", "facts.json", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=SECONDS)


def instrumented(cwd: Path, env: Mapping[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """`opentelemetry-instrument` with these words."""
    tool = Path(sys.executable).with_name("opentelemetry-instrument")
    command = [str(tool) if tool.exists() else shutil.which("opentelemetry-instrument") or "", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=SECONDS)


def facts(cwd: Path) -> dict[str, Any]:
    """What `agl run` wrote."""
    return json.loads((cwd / "facts.json").read_text())


def listed(cwd: Path) -> list[dict[str, Any]]:
    """`agl trace ls`."""
    show(cwd, "trace", "ls", "--json", "list.json")
    return json.loads((cwd / "list.json").read_text())


def trace(cwd: Path, rollout_id: str | None = None) -> Trace:
    """`agl trace show` of a rollout; of the only one if None."""
    if rollout_id is None:
        (only,) = listed(cwd)
        rollout_id = only["rollout_id"]
    show(cwd, "trace", "show", str(rollout_id), "--json", "trace.json")
    return json.loads((cwd / "trace.json").read_text())


def show(cwd: Path, *words: str) -> str:
    """What a command of agl prints that only reads. It runs in this process: what it reads was written by others."""
    with contextlib.chdir(cwd), pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AGL_")]:
            patch.delenv(name)
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def outline(spans: Trace) -> list[str]:
    """The spans as an indented list of what happened, in order: `agent name`, `chat`, `tool name`."""
    known = {s["span_id"] for s in spans}
    lines: list[str] = []

    def grow(parent: str | None, depth: int) -> None:
        for span in sorted(spans, key=lambda s: (s["start"], s["end"])):
            if (span["parent_id"] if span["parent_id"] in known else None) != parent:
                continue
            facts = span["attributes"]
            match facts[semconv.OPERATION_NAME]:
                case semconv.CHAT:
                    name = "chat"
                case semconv.EXECUTE_TOOL:
                    name = f"tool {facts[semconv.TOOL_NAME]}"
                case semconv.INVOKE_AGENT:
                    name = f"agent {facts[semconv.AGENT_NAME]}"
                case _:
                    name = span["name"]
            lines.append(f"{'  ' * depth}{name}")
            grow(span["span_id"], depth + 1)

    grow(None, 0)
    return lines


def chats(spans: Trace) -> Trace:
    """The `chat` spans in order."""
    return sorted(
        (s for s in spans if s["attributes"][semconv.OPERATION_NAME] == semconv.CHAT), key=lambda s: s["start"]
    )


def holds(cwd: Path, text: str) -> bool:
    """Whether any file below a directory holds a text."""
    return any(text.encode() in p.read_bytes() for p in cwd.rglob("*") if p.is_file())
