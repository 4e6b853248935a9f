"""OpenCode (`opencode`): Chat Completions, Responses or Messages, by the package that its provider names.

Read in 1.18.33 and seen on the wire: `opencode debug config` prints the settings that count; OPENCODE_CONFIG_CONTENT
overrides all files; OPENCODE_DB says where sessions are kept. A sub-agent's calls have the header
`x-parent-session-id`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any, ClassVar

from agl.errors import ConfigError
from agl.tracing.propagation import ANTHROPIC_KEY, OPENAI_KEY
from agl.trainer.runners.recording_proxy import PROVIDERS
from agl_harnesses.harness import Attempt, Harness, Providers, merged

_CONTENT = "OPENCODE_CONFIG_CONTENT"
_APIS = {"@ai-sdk/openai": "openai", "@ai-sdk/openai-compatible": "openai", "@ai-sdk/anthropic": "anthropic"}


class OpenCode(Harness):
    """OpenCode. Providers that have no base URL in its settings are `openai` and `anthropic`."""

    name = "opencode"
    programs = ("opencode",)
    install = "npm install -g opencode-ai"
    versions = ("1.18.33",)
    sub_agents: ClassVar[Mapping[str, str]] = {
        "title": "You are a title generator",
        "compaction": "You are a context summarization agent",
        "summary": "Summarize what was done in this conversation",
    }

    def providers(self, attempt: Attempt) -> Providers:
        self.apis: dict[str, str] = {}
        found: Providers = {}
        for name, settings in _settings(attempt).get("provider", {}).items():
            api = _APIS.get(settings.get("npm", f"@ai-sdk/{name}"))
            base = str((settings.get("options") or {}).get("baseURL") or PROVIDERS.get(name) or "")
            base = base.removesuffix("/v1") if api == "anthropic" else base
            # One address for an API: a provider with another one is left alone.
            if api and base and found.setdefault(api, base) == base:
                self.apis[name] = api
        for name in dict.fromkeys(_APIS.values()):
            if found.setdefault(name, PROVIDERS[name]) == PROVIDERS[name]:
                self.apis.setdefault(name, name)
        return found

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words[1:1] = ["run", "-m", f"policy/{model}"]
        attempt.words.append(task)
        options = {"baseURL": PROVIDERS["openai"], "apiKey": "none"}
        policy = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {model: {"name": model}}}
        attempt.environment[_CONTENT] = json.dumps({"provider": {"policy": policy}})
        attempt.environment["OPENCODE_DISABLE_MODELS_FETCH"] = "1"

    def point(self, attempt: Attempt) -> None:
        urls = {"openai": attempt.urls["openai"], "anthropic": f"{attempt.urls['anthropic']}/v1"}
        providers: dict[str, Any] = {name: {"options": {"baseURL": urls[api]}} for name, api in self.apis.items()}
        own = json.loads(attempt.environment.get(_CONTENT) or "{}")
        content = merged(own, {"provider": providers, "autoupdate": False, "share": "disabled"})
        attempt.environment[_CONTENT] = json.dumps(content)
        attempt.environment |= {"OPENCODE_DB": str(attempt.home / "opencode.db"), "OPENCODE_DISABLE_AUTOUPDATE": "1"}
        attempt.placeholder(OPENAI_KEY, ANTHROPIC_KEY)

    def sub_agent(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
        return super().sub_agent(headers, body) or ("task" if "x-parent-session-id" in headers else None)


def _settings(attempt: Attempt) -> dict[str, Any]:
    """What counts of all its files, in this directory."""
    command = [attempt.words[0], "debug", "config"]
    done = subprocess.run(command, capture_output=True, text=True, env=attempt.environment, stdin=subprocess.DEVNULL)
    try:
        return json.loads(done.stdout)
    except ValueError:
        why = (done.stderr or done.stdout).strip()[-400:]
        raise ConfigError(f"opencode cannot read its settings: {why}", hint="see `opencode debug config`") from None
