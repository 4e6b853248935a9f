"""pi (`pi`, pi-coding-agent): Chat Completions, Responses or Messages.

Read in 0.73.1 and seen on the wire: `$PI_CODING_AGENT_DIR/models.json`, whose `providers.NAME.baseUrl` also overrides a
built-in provider's. Sub-agents, where an extension brings them, are further processes of `pi` with its environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agl.errors import ConfigError
from agl.tracing.propagation import ANTHROPIC_KEY, OPENAI_KEY
from agl.trainer.runners.recording_proxy import PROVIDERS
from agl_harnesses.harness import Attempt, Harness, Providers, merged

_BUILT_IN = {"openai": "openai", "anthropic": "anthropic"}
_APIS = {"openai-completions": "openai", "openai-responses": "openai", "anthropic-messages": "anthropic"}


class Pi(Harness):
    """pi. Providers that have no base URL in `models.json` are `openai` and `anthropic`."""

    name = "pi"
    programs = ("pi",)
    install = "npm install -g @mariozechner/pi-coding-agent"
    versions = ("0.73.1",)
    sub_agents: ClassVar[Mapping[str, str]] = {"compaction": "You are a context summarization assistant"}

    def providers(self, attempt: Attempt) -> Providers:
        found: Providers = {}
        self.pointed: dict[str, str] = {}
        chosen = attempt.options("--provider")
        own = self._models(attempt).get("providers", {})
        names = dict.fromkeys([*chosen, *own, *_BUILT_IN])
        for name in names:
            settings = own.get(name, {})
            api = _APIS.get(settings.get("api", "")) or _BUILT_IN.get(name)
            base = settings.get("baseUrl") or PROVIDERS.get(name)
            # One address for an API: a provider with another one is left alone.
            if api and base and found.setdefault(api, base) == base:
                self.pointed[name] = api
        if missing := [name for name in chosen if name not in self.pointed]:
            raise ConfigError(
                f"pi: agl does not know where the calls of the provider {missing[0]!r} go",
                hint=f"write its baseUrl and its api into models.json; known are {', '.join(_APIS)}",
            )
        return found

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["-p", "--provider", "policy", "--model", model, task]
        policy = {"baseUrl": PROVIDERS["openai"], "api": "openai-completions", "apiKey": "none"}
        _home(attempt).mkdir(parents=True)
        models = {"providers": {"policy": {**policy, "models": [{"id": model}]}}}
        (_home(attempt) / "models.json").write_text(json.dumps(models))

    def point(self, attempt: Attempt) -> None:
        attempt.copy(_home(attempt), "sessions", "*.log")
        providers: dict[str, Any] = {name: {"baseUrl": attempt.urls[api]} for name, api in self.pointed.items()}
        models = merged(self._models(attempt), {"providers": providers})
        (attempt.home / "models.json").write_text(json.dumps(models))
        quiet = {"PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}
        attempt.environment |= {"PI_CODING_AGENT_DIR": str(attempt.home), **quiet}
        attempt.placeholder(OPENAI_KEY, ANTHROPIC_KEY)

    def _models(self, attempt: Attempt) -> dict[str, Any]:
        return attempt.settings(_home(attempt) / "models.json")


def _home(attempt: Attempt) -> Path:
    return attempt.own_home("PI_CODING_AGENT_DIR", ".pi/agent")
