"""mini-swe-agent (`mini`): one agent, one tool, by litellm.

Read in 2.4.6: `minisweagent/__init__.py` (MSWEA_GLOBAL_CONFIG_DIR and the `.env` in it, which the environment
overrides), `run/mini.py` (`-c` names files or `key=value`), and litellm's variables for base URLs. It has no sub-agents
and no telemetry, and does not update itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agl_harnesses.harness import Attempt, Harness, Providers, litellm_providers, point_litellm

_BASE = "model.model_kwargs.api_base="


class Mini(Harness):
    """mini-swe-agent. A base URL in a YAML file of `-c` is not looked at, one on the command line is."""

    name = "mini"
    programs = ("mini", "mini-swe-agent")
    install = "pip install mini-swe-agent"
    versions = ("2.4.6",)

    def providers(self, attempt: Attempt) -> Providers:
        named = [word.removeprefix(_BASE) for word in attempt.words if word.startswith(_BASE)]
        found = litellm_providers(attempt.dotenv(_folder(attempt) / ".env") | attempt.environment)
        return found | ({"openai": named[-1]} if named else {})

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["-y", "--exit-immediately", "-l", "0", "-m", f"openai/{model}", "-t", task]
        attempt.environment |= {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
        # Ten by default, over five minutes.
        attempt.environment["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"

    def point(self, attempt: Attempt) -> None:
        attempt.copy(_folder(attempt), "*.traj.json")
        attempt.environment["MSWEA_GLOBAL_CONFIG_DIR"] = str(attempt.home)
        point_litellm(attempt, attempt.dotenv(_folder(attempt) / ".env"))
        pointed = f"{_BASE}{attempt.urls['openai']}"
        attempt.words = [pointed if word.startswith(_BASE) else word for word in attempt.words]


def _folder(attempt: Attempt) -> Path:
    usual = "Library/Application Support" if sys.platform == "darwin" else ".config"
    return attempt.own_home("MSWEA_GLOBAL_CONFIG_DIR", f"{usual}/mini-swe-agent")
