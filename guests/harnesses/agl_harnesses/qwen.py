"""Qwen Code (`qwen`): Chat Completions.

Read in 0.15.10, and seen on the wire in 0.24.4 (for Node 22), too: `$QWEN_HOME/settings.json` (`modelProviders`,
`security.auth`) and `.env` there; a base URL comes from the chosen model's entry, `--openai-base-url`, OPENAI_BASE_URL,
the settings, in this order. After a turn it may ask itself, as another agent, what is worth keeping.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agl.errors import ConfigError
from agl.tracing.propagation import OPENAI_KEY, OPENAI_URL
from agl.trainer.runners.recording_proxy import PROVIDERS
from agl_harnesses.harness import Attempt, Harness, Providers, merged

_STATE = ("projects", "debug", "tmp", "history", "todos", "*.lock", "logs", "usage*")


class Qwen(Harness):
    """Qwen Code with a key. A login with Qwen is refused: its calls go where the login says."""

    name = "qwen"
    programs = ("qwen",)
    install = "npm install -g @qwen-code/qwen-code"
    versions = ("0.15.10", "0.24.4")
    sub_agents: ClassVar[Mapping[str, str]] = {
        "memory": "managed memory",
        "recall": "You are selecting memories",
        "skills": "You are reviewing this conversation to extract reusable skills",
        "compression": "You are the component that summarizes internal chat history",
    }
    main_tools = frozenset({"list_agents", "task_stop"})

    def providers(self, attempt: Attempt) -> Providers:
        settings = self._settings(attempt)
        auth = settings.get("security", {}).get("auth", {})
        chosen = next(iter(attempt.options("--auth-type")), auth.get("selectedType", "openai"))
        if chosen != "openai" and not attempt.variable(OPENAI_KEY):
            raise ConfigError(
                f"qwen is set to the login {chosen!r}, and agl run stands in for providers with an API key only",
                hint="set OPENAI_API_KEY and OPENAI_BASE_URL, or choose another with /auth",
            )
        model = next(iter(attempt.options("-m", "--model")), None) or settings.get("model", {}).get("name")
        entries = settings.get("modelProviders", {}).get("openai", [])
        urls = [entry.get("baseUrl") for entry in entries if entry.get("id") == model]
        variables = attempt.dotenv(_home(attempt) / ".env") | attempt.environment
        urls += [*attempt.options("--openai-base-url"), variables.get(OPENAI_URL), auth.get("baseUrl")]
        return {"openai": next(filter(None, urls), PROVIDERS["openai"])}

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["-y", "--auth-type", "openai", "-m", model, "-p", task]

    def point(self, attempt: Attempt) -> None:
        settings = self._settings(attempt)
        url = attempt.urls["openai"]
        attempt.copy(_home(attempt), *_STATE)
        entries = settings.get("modelProviders", {}).get("openai", [])
        quiet: dict[str, Any] = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "modelProviders": {"openai": [{**entry, "baseUrl": url} for entry in entries]} if entries else {},
        }
        (attempt.home / "settings.json").write_text(json.dumps(merged(settings, quiet)))
        attempt.words[1:1] = ["--openai-base-url", url]
        attempt.environment |= {"QWEN_HOME": str(attempt.home), OPENAI_URL: url}
        key = settings.get("security", {}).get("auth", {}).get("apiKey")
        attempt.placeholder(OPENAI_KEY, known={OPENAI_KEY: key, **attempt.dotenv(_home(attempt) / ".env")})

    def _settings(self, attempt: Attempt) -> dict[str, Any]:
        return attempt.settings(_home(attempt) / "settings.json")


def _home(attempt: Attempt) -> Path:
    return attempt.own_home("QWEN_HOME", ".qwen")
