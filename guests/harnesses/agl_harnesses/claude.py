"""Claude Code (`claude`), proprietary: the Messages API.

Where it reads its provider follows its documentation (settings, environment variables, LLM gateways): variables of its
settings override those of the shell, and `--settings` both. The phrases of `sub_agents` were not seen on the wire. The
suite runs it where a user has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from agl.tracing.propagation import ANTHROPIC_KEY, ANTHROPIC_URL
from agl_harnesses.harness import Attempt, Harness, Providers

_STATE = ("projects", "todos", "statsig", "shell-snapshots", "history*", "debug", "file-history", "ide", "local")
_QUIET = {
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


class Claude(Harness):
    """Claude Code. Not for Bedrock or Vertex, which have addresses of their own."""

    name = "claude"
    programs = ("claude",)
    install = "npm install -g @anthropic-ai/claude-code"
    sub_agents: ClassVar[Mapping[str, str]] = {
        "title": "Generate a concise, sentence-case title",
        "topic": "Analyze if this message indicates a new conversation topic",
        "compaction": "You are a helpful AI assistant tasked with summarizing conversations",
    }

    def providers(self, attempt: Attempt) -> Providers:
        own = attempt.settings(_home(attempt) / "settings.json").get("env", {}).get(ANTHROPIC_URL)
        base = own or attempt.variable(ANTHROPIC_URL)
        return {"anthropic": base.removesuffix("/v1")} if base else {}

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["--dangerously-skip-permissions", "--model", model, "-p", task]

    def point(self, attempt: Attempt) -> None:
        attempt.copy(_home(attempt), *_STATE)
        variables = {ANTHROPIC_URL: attempt.urls["anthropic"], **_QUIET}
        attempt.environment |= {"CLAUDE_CONFIG_DIR": str(attempt.home), **variables}
        attempt.words[1:1] = ["--settings", json.dumps({"env": variables})]
        attempt.placeholder(ANTHROPIC_KEY)


def _home(attempt: Attempt) -> Path:
    return attempt.own_home("CLAUDE_CONFIG_DIR", ".claude")
