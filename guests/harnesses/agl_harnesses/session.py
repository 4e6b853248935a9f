"""One start of a coding agent under `agl run`: its directory, its environment, the address that it calls."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import urllib.parse
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.routing import Route

from agl.texts import printable
from agl.tracing import propagation
from agl.trainer.gateway.http import keyed
from agl.trainer.local.prepared import cache_directory
from agl.trainer.runners.recording_proxy import PROVIDERS, URLS
from agl_harnesses.aider import Aider
from agl_harnesses.claude import Claude
from agl_harnesses.codex import Codex
from agl_harnesses.front import Front
from agl_harnesses.gemini import Gemini
from agl_harnesses.harness import Attempt, Harness, Providers
from agl_harnesses.mini import Mini
from agl_harnesses.opencode import OpenCode
from agl_harnesses.pi import Pi
from agl_harnesses.qwen import Qwen

if TYPE_CHECKING:
    from agl.trainer.launch.run import CommandRollout

OWN: tuple[type[Harness], ...] = (Codex, OpenCode, Gemini, Qwen, Pi, Mini, Aider, Claude)
GROUP = "agl.harnesses"
"""The entry points of other packages: each a `Harness` class."""
_KEYS = (propagation.OPENAI_KEY, propagation.ANTHROPIC_KEY, *propagation.GOOGLE_KEYS)


def known() -> list[type[Harness]]:
    """All harnesses: those of this package, and those that others bring."""
    return [*OWN, *(entry.load() for entry in entry_points(group=GROUP))]


def find(command: Sequence[str]) -> Session | None:
    """The session of a command; None if it is no coding agent that is known.

    Raises:
        ConfigError: it cannot be pointed at an attempt as it is configured.
    """
    program = Path(command[0]).name
    return next((Session(kind(), command) for kind in known() if program in kind.programs), None)


def installation(program: str) -> str:
    """How to install a coding agent; "" if it is none that is known."""
    return next((f"; to install it: {kind.install}" for kind in known() if program in kind.programs), "")


class Session:
    """A coding agent's command, before and while it runs.

    Attributes:
        name: of the agent.
        providers: where its calls go in the end.
        routes: of the address that it calls instead.
    """

    def __init__(self, harness: Harness, command: Sequence[str]) -> None:
        self.harness = harness
        self.name = harness.name
        parent = cache_directory() / "harnesses"
        parent.mkdir(parents=True, exist_ok=True)
        # Not in the system's directory for temporary files, where Codex makes no helpers.
        self._folder = tempfile.TemporaryDirectory(dir=parent, prefix=f"{self.name}-", ignore_cleanup_errors=True)
        self._attempt = Attempt(list(command), dict(os.environ), Path(self._folder.name))
        try:
            self.providers: Providers = harness.providers(self._attempt)
        except BaseException:
            self._folder.cleanup()
            raise
        self._front = Front(harness)
        self._started = False
        self._path = f"/harness/{secrets.token_urlsafe(24)}"
        self.routes = [Route(f"{self._path}/{{api}}/{{rest:path}}", self._front, methods=None)]
        check_version(harness, command[0])

    def start(self, rollout: CommandRollout) -> tuple[list[str], dict[str, str]]:
        """The words and the environment with which the command calls the attempt."""

        def addresses(agent: str) -> Providers:
            if not rollout.options.routed or rollout.selection.policy_for(agent) is None:
                return rollout.proxy.provider_urls(rollout.gateway.base_url, agent)
            variables = propagation.gateway_variables(rollout.access.url, agent, rollout.context.key)
            return {api: keyed(variables[variable], rollout.context.key) for api, variable in URLS.items()}

        environment = rollout.environment()
        # Its calls are recorded as they pass; tracing within a program in Python would not know its agents.
        environment.pop(propagation.VARIABLE)
        users = (propagation.AZURE_URL, propagation.OPENAI_OLD_URL)
        for name in ("PYTHONPATH", *URLS.values(), *users, *_KEYS):
            environment.pop(name, None)
            if name in os.environ:
                environment[name] = os.environ[name]
        places = {api: urllib.parse.urlsplit(url) for api, url in (PROVIDERS | self.providers).items()}
        # The provider's host is in the path: by it some decide how they write a request.
        prefixes = {api: f"{self._path}/{api}/{at.hostname}{at.path.rstrip('/')}" for api, at in places.items()}
        self._front.agent, self._front.addresses, self._front.prefixes = rollout.agent, addresses, prefixes
        self._attempt.environment, self._attempt.routed = environment, rollout.options.routed
        self._attempt.urls = {api: rollout.gateway.base_url + prefix for api, prefix in prefixes.items()}
        self.harness.point(self._attempt)
        self._started = True
        return self._attempt.words, self._attempt.environment

    def close(self) -> None:
        """Remove the attempt's directory; say so if no call came."""
        self._folder.cleanup()
        if self._started and not self._front.calls:
            _say(f"no call of {self.name} came by: docs/harnesses.md says where agl looks for its provider")


def check_version(harness: Harness, program: str) -> None:
    """Say so if a program is of a version that nobody has seen."""
    version = harness.version(program)
    seen = harness.versions
    if seen and not any(_minor(version) == _minor(known) for known in seen):
        _say(
            f"{harness.name} {version or 'of an unknown version'} is tried as {', '.join(seen)}, which agl has seen: "
            "whether every call comes by, and the names of its agents, are not known of yours"
        )


def _minor(version: str | None) -> list[str]:
    return (version or "").split(".")[:2]


def _say(text: str) -> None:
    print(printable(f"agl: {text}"), file=sys.stderr)
