"""Passing an attempt to another process by environment variables, which any language or agl itself can read."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from agl.errors import ConfigError

VARIABLE = "AGL_HANDOVER"
OPENAI_URL = "OPENAI_BASE_URL"
OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_OLD_URL = "OPENAI_API_BASE"
"""What OpenAI's SDK read before its version 1; LangChain and LiteLLM still do."""
ANTHROPIC_URL = "ANTHROPIC_BASE_URL"
ANTHROPIC_KEY = "ANTHROPIC_API_KEY"
AZURE_URL = "AZURE_OPENAI_ENDPOINT"
GOOGLE_URL = "GOOGLE_GEMINI_BASE_URL"
GOOGLE_KEYS = ("GEMINI_API_KEY", "GOOGLE_API_KEY")


@dataclass(frozen=True, slots=True)
class AttemptEnvironment:
    """The facts of an attempt that agl needs in another process.

    Attributes:
        rollout_id, attempt: identify the attempt.
        agent: the agent of calls for which no adapter gives a name.
        traceparent: of the attempt's root span.
        spans_url, spans_key: where finished spans are posted, as OTLP in JSON, and the bearer key for it.
        gateway_url, key: of the policy that serves selected agents; None and "" when nothing is routed.
        agents: names and globs of the selected agents.
        capture_content: whether texts are recorded.
        prompts: the directory of the prompts that replace the agents' own; None when nothing is replaced.
        replaced: environment variable -> its value before it was pointed at `agl run`; None = it was not set. A process
            in which agl routes the calls itself restores them.
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
    prompts: str | None = None
    replaced: Mapping[str, str | None] = field(default_factory=dict)

    def restore(self, environ: MutableMapping[str, str]) -> None:
        """Restore the replaced variables.

        Where no key was set, a program served by a policy still needs one to make a client: it gets a placeholder.
        """
        for name, value in self.replaced.items():
            if value is not None:
                environ[name] = value
            elif self.gateway_url is not None and name in (OPENAI_KEY, ANTHROPIC_KEY):
                environ[name] = "none"
            else:
                environ.pop(name, None)


def variables(environment: AttemptEnvironment, task: Any = None) -> dict[str, str]:
    """The variables of an attempt, for agl (AGL_HANDOVER) and for the program (see `attempt_variables`)."""
    return {
        VARIABLE: json.dumps(asdict(environment)),
        **attempt_variables(environment.rollout_id, environment.attempt, task),
    }


def attempt_variables(rollout_id: str, attempt: int, task: Any = None) -> dict[str, str]:
    """AGL_ROLLOUT_ID, AGL_ATTEMPT and AGL_TASK (JSON), for programs in any language."""
    ids = {"AGL_ROLLOUT_ID": rollout_id, "AGL_ATTEMPT": str(attempt)}
    return ids if task is None else {**ids, "AGL_TASK": json.dumps(task)}


def from_environment(environ: Mapping[str, str] = os.environ) -> AttemptEnvironment | None:
    """The attempt that this process belongs to; None without AGL_HANDOVER.

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


def gateway_variables(
    attempt_url: str, agent: str, key: str, environ: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The variables that point the clients of any language at the gateway, as one agent.

    Args:
        attempt_url: `<gateway>/rollouts/{rollout}/attempts/{n}`.
        agent: its name.
        key: the attempt's key for the gateway.
        environ: the program's variables; OPENAI_API_BASE is set only where they have it.
    """
    url = f"{attempt_url}/agents/{urllib.parse.quote(agent, safe='')}"
    keys = dict.fromkeys((OPENAI_KEY, ANTHROPIC_KEY, *GOOGLE_KEYS), key)
    old = {OPENAI_OLD_URL: f"{url}/v1"} if environ.get(OPENAI_OLD_URL) else {}
    return {OPENAI_URL: f"{url}/v1", ANTHROPIC_URL: url, GOOGLE_URL: url, **old, **keys}


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep clients from using the environment's proxies for a server on this machine."""
    no_proxy = environ.get("NO_PROXY") or environ.get("no_proxy")
    if no_proxy is None and not any(name.lower().endswith("_proxy") for name in environ):
        return {}
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, [no_proxy, "127.0.0.1"])))
