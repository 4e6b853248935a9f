"""What a module about a coding agent says, and what it is handed: the command on its way to its start."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any, ClassVar

from agl.errors import ConfigError, UnreadableMessageError
from agl.messages import google, read
from agl.tracing.propagation import ANTHROPIC_KEY, ANTHROPIC_URL, OPENAI_KEY, OPENAI_URL

Providers = dict[str, str]
"""API ("openai", "anthropic", "google") -> base URL; that of "openai" ends where `/chat/completions` follows, that of
"anthropic" where `/v1/messages` does, that of "google" where `/v1beta/models` does."""


@dataclass(eq=False)
class Attempt:
    """A command that will be started.

    Attributes:
        words: the command's, which may be changed.
        environment: likewise; at first as the user has it.
        home: an empty directory that ends with the attempt, for the agent's configuration.
        urls: what replaces the providers of `Harness.providers`, in the same form; empty before the start.
        routed: whether a policy answers, so that no key of a provider is needed.
    """

    words: list[str]
    environment: dict[str, str]
    home: Path
    urls: Providers = field(default_factory=dict)
    routed: bool = False

    def options(self, *names: str) -> list[str]:
        """The values of a command-line option, `--name value` or `--name=value`, in order."""
        values = []
        for word, following in zip(self.words, [*self.words[1:], None], strict=True):
            name, equals, joined = word.partition("=")
            if word in names and following is not None:
                values.append(following)
            elif equals and name.startswith("--") and name in names:
                values.append(joined)
        return values

    def variable(self, *names: str) -> str | None:
        """The first of these environment variables that is set."""
        return next((self.environment[name] for name in names if self.environment.get(name)), None)

    def own_home(self, variable: str, usual: str) -> Path:
        """The user's directory for the agent: where an environment variable says, or the usual one."""
        home = self.environment.get("HOME") or str(Path.home())
        return Path(self.environment.get(variable) or Path(home, usual))

    def copy(self, directory: Path, *without: str, to: str = ".") -> None:
        """Copy the user's directory for the agent to `home`, without what these globs name: state, not settings.

        Args:
            to: the copy's place below `home`, which is made even where the user has no such directory.
        """
        (self.home / to).mkdir(exist_ok=True)
        if directory.is_dir():
            ignored = shutil.ignore_patterns(*without)
            shutil.copytree(directory, self.home / to, ignore=ignored, dirs_exist_ok=True, symlinks=True)

    def placeholder(self, *names: str, known: Mapping[str, Any] | None = None) -> None:
        """Set keys that the user has not, where a policy answers: without any an agent makes no call.

        Args:
            known: those of files, which the environment would override.
        """
        if self.routed:
            missing = {name: "none" for name in names if not (known or {}).get(name)}
            self.environment = {**missing, **self.environment}

    def dotenv(self, path: Path) -> dict[str, str]:
        """The variables of a `.env` file; {} where there is none."""
        lines = path.read_text().splitlines() if path.is_file() else []
        found = (
            re.match(r"\s*(?:export\s+)?([\w.]+)\s*=\s*(?:'([^']*)'|\"([^\"]*)\"|([^#\s]*))", line) for line in lines
        )
        return {match[1]: match[2] or match[3] or match[4] or "" for match in found if match}

    def settings(self, path: Path) -> dict[str, Any]:
        """What a file of JSON holds, which may have comments; {} where there is none.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            text = path.read_text()
        except FileNotFoundError:
            return {}
        # Comments and commas before a closing bracket, neither within a text.
        text = re.sub(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', lambda m: m[1] or "", text, flags=re.DOTALL)
        text = re.sub(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', lambda m: m[1] or "", text)
        try:
            settings = json.loads(text)
        except ValueError:
            settings = None
        if isinstance(settings, dict):
            return settings
        raise ConfigError(f"{path} is no JSON object", hint="mend it: the agent reads it, too")

    def toml(self, path: Path) -> dict[str, Any]:
        """What a file of TOML holds; {} where there is none.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return tomllib.loads(path.read_text()) if path.is_file() else {}
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no TOML: {error}", hint="mend it: the agent reads it, too") from None


class Harness:
    """One coding agent.

    Attributes:
        name: of its calls' agent.
        programs: what its command may be called.
        install: a command that installs it.
        versions: those that the suite has seen.
        sub_agents: name -> what the system prompt of such a call holds; or its last message, where it has none.
        main_tools: what only the main agent has; a call that has tools, but none of these, is a sub-agent's ("task").
        task_tools: what only a sub-agent has, where that is known.
    """

    name: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    install: ClassVar[str]
    versions: ClassVar[tuple[str, ...]] = ()
    sub_agents: ClassVar[Mapping[str, str]] = {}
    main_tools: ClassVar[frozenset[str]] = frozenset()
    task_tools: ClassVar[frozenset[str]] = frozenset()

    def providers(self, attempt: Attempt) -> Providers:
        """Where its calls go, as far as its configuration says; nothing is written.

        Raises:
            ConfigError: it cannot be pointed elsewhere: a login in place of a key, for one.
        """
        urls = {"openai": attempt.variable(OPENAI_URL), "anthropic": attempt.variable(ANTHROPIC_URL)}
        return {name: url for name, url in urls.items() if url}

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        """Have it do one task without a person to ask, and everything allowed: further words, environment, files in
        its HOME, which holds nothing of the user's.

        Args:
            model: the name that its calls have.
        """
        raise ConfigError(f"how {self.name} is started without a person is not known", hint="override Harness.alone")

    def point(self, attempt: Attempt) -> None:
        """Point it at `attempt.urls`: its environment, further words, files in `attempt.home`."""
        raise NotImplementedError

    def sub_agent(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
        """Which of its agents made a call; None = the main one."""
        try:
            messages = read.body(body)
        except UnreadableMessageError:
            return None
        system = [m.text for m in messages if m.role in ("system", "developer")]
        about = "\n".join(system or [m.text for m in messages[-1:]])
        for name, phrase in self.sub_agents.items():
            if phrase in about:
                return name
        tools = {tool.get("name") or (tool.get("function") or {}).get("name") for tool in _tools(body)}
        other = tools and self.main_tools and not tools & self.main_tools
        return "task" if other or tools & self.task_tools else None

    def version(self, program: str) -> str | None:
        """The version of a program, of its package or as it says itself; None if neither is known."""
        path = Path(shutil.which(program) or program).resolve()
        for folder in path.parents:
            package = self.install.split()[-1]
            with contextlib.suppress(OSError, ValueError):
                manifest = json.loads((folder / "package.json").read_text())
                if manifest["name"] == package:
                    return manifest["version"]
            package = package.replace("-", "_")
            for info in folder.glob(f"lib/python3*/site-packages/{package}-*.dist-info"):
                return PathDistribution(info).version
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
            found = re.search(r"\d+\.\d+[\w.+-]*", done.stdout)
            return found and found[0]
        return None


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, of which those of `other` count where both have one."""
    both = {
        k: merged(one[k], v) for k, v in other.items() if isinstance(v, Mapping) and isinstance(one.get(k), Mapping)
    }
    return {**one, **other, **both}


def toml_setting(text: str) -> dict[str, Any]:
    """A setting `key=value` whose value is TOML, or else a text."""
    key, _, value = text.partition("=")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return tomllib.loads(f"{key} = {json.dumps(value)}")


def litellm_providers(values: Mapping[str, str]) -> Providers:
    """Where litellm's calls go by these environment variables."""
    openai = values.get("OPENAI_BASE_URL") or values.get("OPENAI_API_BASE")
    anthropic = values.get("ANTHROPIC_API_BASE") or values.get("ANTHROPIC_BASE_URL")
    return {name: url for name, url in (("openai", openai), ("anthropic", anthropic)) if url}


def point_litellm(attempt: Attempt, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Point litellm at the attempt by the variables that are returned; it fetches no list of prices.

    Args:
        known: keys of files, as of `Attempt.placeholder`.
    """
    openai = attempt.urls["openai"]
    anthropic = attempt.urls["anthropic"]
    variables: dict[str, str] = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), openai)
    variables |= dict.fromkeys(("ANTHROPIC_API_BASE", "ANTHROPIC_BASE_URL"), anthropic)
    attempt.environment |= {**variables, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    attempt.placeholder(OPENAI_KEY, ANTHROPIC_KEY, known=known)
    return variables


def _tools(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    tools = google.common(body).get("tools")
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
