"""Gemini CLI (`gemini`): the Gemini API. Read in 0.61.0 and seen on the wire.

Read: `$GEMINI_CLI_HOME/.gemini/settings.json`, the working directory's, the first `.env`, GOOGLE_GEMINI_BASE_URL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from agl.errors import ConfigError
from agl.tracing.propagation import GOOGLE_KEYS, GOOGLE_URL
from agl.trainer.runners.recording_proxy import PROVIDERS
from agl_harnesses.harness import Attempt, Harness, Providers, merged

_KEY = "gemini-api-key"
_SETTINGS = ".gemini/settings.json"
_QUIET = {"privacy": {"usageStatisticsEnabled": False}, "telemetry": {"enabled": False}}
_UPDATES = {"general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False}}
# Google's servers search, for which no policy stands in; and what fails would be tried ten times.
_ALONE = {"tools": {"exclude": ["google_web_search", "web_fetch"]}, "general": {"maxAttempts": 1}}
_PATIENT = {"flags": [{"flagId": 45773134, "intValue": "86400"}]}  # it gives an answer a minute to begin
_LOGINS = {"GOOGLE_GENAI_USE_GCA": "oauth-personal", "GOOGLE_GENAI_USE_VERTEXAI": "vertex-ai"}


class Gemini(Harness):
    """Gemini CLI with an API key; a login with Google, and Vertex AI, go to other servers."""

    name = "gemini"
    programs = ("gemini",)
    install = "npm install -g @google/gemini-cli"
    versions = ("0.61.0",)
    sub_agents: ClassVar[Mapping[str, str]] = {
        "compression": "responsible for distilling chat history into a structured XML",
        "loop": "You are a diagnostic agent that determines whether",
        "edit": "You are an expert code-editing assistant",
        "router": "Task Routing AI",
        "speaker": "Analyze *only* the content and structure of your immediately preceding response",
        "title": "Summarize the user's primary intent or goal in this conversation",
    }
    task_tools = frozenset({"complete_task"})

    def providers(self, attempt: Attempt) -> Providers:
        settings = merged(*map(attempt.settings, (_home(attempt) / _SETTINGS, Path(_SETTINGS))))
        variables = _variables(attempt)
        named = [login for name, login in _LOGINS.items() if variables.get(name) == "true"]
        self.login = settings.get("security", {}).get("auth", {}).get("selectedType") or [*named, _KEY][0]
        if self.login not in (_KEY, "gateway"):
            raise ConfigError(
                f"gemini is set to the login {self.login!r}, and agl run stands in for the Gemini API with a key only",
                hint='set GEMINI_API_KEY, and choose "Use Gemini API Key" with /auth',
            )
        return {"google": variables.get(GOOGLE_URL) or PROVIDERS["google"]}

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["-y", "--skip-trust", "-m", model, "-p", task]
        for variable, content in (("GEMINI_CLI_SYSTEM_DEFAULTS_PATH", _ALONE), ("GEMINI_EXP", _PATIENT)):
            attempt.environment[variable] = str(file := _home(attempt) / f"{variable}.json")
            file.write_text(json.dumps(content))

    def point(self, attempt: Attempt) -> None:
        for name in (".gemini", ".agents"):
            attempt.copy(_home(attempt) / name, "tmp", "history", to=name)
        if (env := _home(attempt) / ".env").is_file():
            (attempt.home / ".env").write_bytes(env.read_bytes())
        # With a URL in the environment and no login in the settings it does not start without a person.
        own = _QUIET | _UPDATES | {"security": {"auth": {"selectedType": self.login}}}
        (attempt.home / _SETTINGS).write_text(json.dumps(merged(attempt.settings(_home(attempt) / _SETTINGS), own)))
        attempt.placeholder(GOOGLE_KEYS[0], known=_variables(attempt))
        attempt.environment |= {"GEMINI_CLI_HOME": str(attempt.home), GOOGLE_URL: attempt.urls["google"]}


def _home(attempt: Attempt) -> Path:
    return attempt.own_home("GEMINI_CLI_HOME", "")


def _variables(attempt: Attempt) -> dict[str, str]:
    """Those of the first `.env` that it finds, and the environment's."""
    folders = [Path.cwd(), *Path.cwd().parents, _home(attempt)]
    first = next((f for folder in folders for f in (folder / ".gemini/.env", folder / ".env") if f.is_file()), None)
    return (attempt.dotenv(first) if first else {}) | attempt.environment
