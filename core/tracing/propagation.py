"""How an attempt is handed to another process: environment variables, read by any language or by agl itself."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agl.errors import ConfigError

VARIABLE = "AGL_HANDOVER"
OPENAI_URL, OPENAI_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
ANTHROPIC_URL, ANTHROPIC_KEY = "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"


@dataclass(frozen=True, slots=True)
class AttemptEnvironment:
    """What agl in another process needs of an attempt.

    Attributes:
        rollout_id, attempt: which. agent: the name for calls that no adapter names.
        traceparent: of the attempt's root span.
        spans_url, spans_key: where finished spans are posted, as OTLP in JSON, and the bearer key for it.
        gateway_url, key: of the policy that answers selected agents; None and "" when nothing is routed.
        agents: names and globs of the selected agents.
        capture_content: whether texts are recorded.
        replaced: environment variable -> what it was before it was pointed at us; None = it was not set. A process
            whose calls agl sees by itself puts them back.
    """

    rollout_id: str
    attempt: int
    agent: str
    traceparent: str
    spans_url: str
    spans_key: str
    gateway_url: str | None = None
    key: str = ""
    agents: tuple[str, ...] = ("*",)
    capture_content: bool = True
    replaced: Mapping[str, str | None] = field(default_factory=dict)

    def restore(self, environ: MutableMapping[str, str]) -> None:
        """Put back what was replaced. Where there was no key at all, a program that is answered by a policy still
        needs one to make a client with, so it keeps a word that is no key."""
        for name, value in self.replaced.items():
            if value is not None:
                environ[name] = value
            elif self.gateway_url is not None and name in (OPENAI_KEY, ANTHROPIC_KEY):
                environ[name] = "none"
            else:
                environ.pop(name, None)


def variables(handover: AttemptEnvironment, task: Any = None) -> dict[str, str]:
    """The variables that carry it; AGL_ROLLOUT_ID, AGL_ATTEMPT and AGL_TASK (JSON) are for whoever asks."""
    return {VARIABLE: json.dumps(asdict(handover)), **described(handover.rollout_id, handover.attempt, task)}


def described(rollout_id: str, attempt: int, task: Any = None) -> dict[str, str]:
    """The variables that say which attempt runs, and on which task."""
    named = {"AGL_ROLLOUT_ID": rollout_id, "AGL_ATTEMPT": str(attempt)}
    return named if task is None else {**named, "AGL_TASK": json.dumps(task)}


def received(environ: Mapping[str, str] = os.environ) -> AttemptEnvironment | None:
    """The attempt that was handed to this process; None if none was.

    Raises:
        ConfigError: the variable holds something else.
    """
    text = environ.get(VARIABLE)
    if not text:
        return None
    try:
        fields = json.loads(text)
        return AttemptEnvironment(**{**fields, "agents": tuple(fields["agents"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{VARIABLE} does not hold an attempt: {error}", hint="agl run sets it; do not set it yourself"
        ) from error


def gateway_variables(attempt_url: str, agent: str, key: str) -> dict[str, str]:
    """What points the clients of any language at the gateway, as one agent.

    Args:
        attempt_url: `<gateway>/rollouts/{rollout}/attempts/{n}`. key: the attempt's.
    """
    url = f"{attempt_url}/agents/{urllib.parse.quote(agent, safe='')}"
    return {OPENAI_URL: f"{url}/v1", ANTHROPIC_URL: url, OPENAI_KEY: key, ANTHROPIC_KEY: key}


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """What keeps clients from asking the environment's proxies for a server on this machine."""
    listed = environ.get("NO_PROXY") or environ.get("no_proxy")
    if listed is None and not any(name.lower().endswith("_proxy") for name in environ):
        return {}
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, [listed, "127.0.0.1"])))
