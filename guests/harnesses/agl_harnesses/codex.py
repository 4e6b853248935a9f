"""Codex (`codex`), OpenAI's: the Responses API.

Read in 0.171.0 and seen on the wire: `$CODEX_HOME/config.toml` (`model_provider`, `model_providers.NAME.base_url`,
`openai_base_url`), `-c key=value` overrides it, `auth.json` holds a key or a login. Each request has the header
`x-codex-turn-metadata` with `request_kind` ("turn", "compaction"); a sub-agent's `x-openai-subagent` ("collab_spawn").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agl.errors import ConfigError
from agl.tracing.propagation import OPENAI_KEY
from agl.trainer.runners.recording_proxy import PROVIDERS
from agl_harnesses.harness import Attempt, Harness, Providers, merged, toml_setting

_STATE = ("sessions", "archived_sessions", "*.sqlite*", "log*", ".tmp", "tmp", "shell_snapshots", "history*", "*locks")
_KEY = "CODEX_API_KEY"
_POLICY = "agl"


class Codex(Harness):
    """Codex with an API key; a login with ChatGPT goes to another server."""

    name = "codex"
    programs = ("codex",)
    install = "npm install -g @openai/codex"
    versions = ("0.171.0",)

    def providers(self, attempt: Attempt) -> Providers:
        name, own, settings = _provider(attempt)
        if own is None and name != "openai":
            raise ConfigError(
                f"codex: config.toml has no [model_providers.{name}], so agl does not know where its calls go",
                hint="write it there with its base_url, or choose another: -c model_provider=NAME",
            )
        auth = attempt.settings(_home(attempt) / "auth.json")
        if own is None and auth.get("tokens") and not (auth.get(OPENAI_KEY) or attempt.variable(_KEY)):
            raise ConfigError(
                "codex is logged in with ChatGPT, and agl run stands in for providers with an API key only",
                hint="set CODEX_API_KEY, or name a provider of your own: -c model_provider=NAME",
            )
        # Codex does not look at OPENAI_BASE_URL.
        base = settings.get("openai_base_url") if own is None else own.get("base_url")
        return {"openai": base or PROVIDERS["openai"]}

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words[1:1] = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        # A policy calls functions only: not the namespace of its sub-agents' tools, nor a search that OpenAI runs.
        attempt.words += ["-c", "features.multi_agent=false", "-c", 'web_search="disabled"', "-m", model, task]

    def point(self, attempt: Attempt) -> None:
        name, own, _ = _provider(attempt)
        url = json.dumps(attempt.urls["openai"])
        changes = ["check_for_update_on_startup=false", "analytics.enabled=false"]
        if attempt.routed:
            if own is None:
                name = _POLICY
                changes += [f"model_provider={name}", f"model_providers.{name}.requires_openai_auth=true"]
            # From a provider called OpenAI or Azure it requests compactions, which no policy writes or reads; with
            # another one it has the model write a summary.
            changes.append(f"model_providers.{name}.name={_POLICY}")
        place = "openai_base_url" if own is None and not attempt.routed else f"model_providers.{name}.base_url"
        changes.append(f"{place}={url}")
        # The last of equal options counts; what follows `--` is no option.
        end = attempt.words.index("--") if "--" in attempt.words else len(attempt.words)
        attempt.words[end:end] = [word for change in changes for word in ("-c", change)]
        attempt.copy(_home(attempt), *_STATE)
        attempt.environment["CODEX_HOME"] = str(attempt.home)
        auth = attempt.settings(attempt.home / "auth.json")
        attempt.placeholder((own or {}).get("env_key") or _KEY, known={_KEY: auth.get(OPENAI_KEY)})

    def sub_agent(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
        kind = json.loads(headers.get("x-codex-turn-metadata") or "{}").get("request_kind", "turn")
        name = headers.get("x-openai-subagent") if kind == "turn" else kind
        return "task" if name == "collab_spawn" else name


def _home(attempt: Attempt) -> Path:
    return attempt.own_home("CODEX_HOME", ".codex")


def _provider(attempt: Attempt) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
    """The provider's name, its entry if it has one, and all that config.toml, a profile and `-c` set."""
    profiles = [f"{name}.config.toml" for name in attempt.options("-p", "--profile")]
    settings: dict[str, Any] = {}
    for file in ("config.toml", *profiles):
        settings = merged(settings, attempt.toml(_home(attempt) / file))
    for change in attempt.options("-c", "--config"):
        settings = merged(settings, toml_setting(change))
    name = settings.get("model_provider", "openai")
    return name, settings.get("model_providers", {}).get(name), settings
