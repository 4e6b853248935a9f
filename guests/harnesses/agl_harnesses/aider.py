"""aider: no tools, edits in its answers; by litellm.

Read in 0.86.2: `aider/main.py` (`.env` files of the home, the git root and the working directory override the
environment, `--set-env` overrides these), `aider/args.py` (each option is also AIDER_OPTION, or a line of
`.aider.conf.yml` in the same places), `aider/prompts.py`. `~/.aider` (caches, an installation's id) cannot be moved:
it and `.aider.*` in the working directory are written as ever.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import yaml

from agl.errors import ConfigError
from agl_harnesses.harness import Attempt, Harness, Providers, litellm_providers, point_litellm


class Aider(Harness):
    """aider."""

    name = "aider"
    programs = ("aider",)
    install = "pip install aider-chat"
    versions = ("0.86.2",)
    sub_agents: ClassVar[Mapping[str, str]] = {
        "commit": "generates concise, one-line Git commit messages",
        "summary": "*Briefly* summarize this partial conversation",
        "editor": "Act as an expert software developer who edits source code.",
    }

    def providers(self, attempt: Attempt) -> Providers:
        folders = [Path(attempt.environment.get("HOME") or Path.home()), *_git_root(), Path.cwd()]
        files = [folder / ".env" for folder in folders] + [Path(file) for file in attempt.options("--env-file")]
        values = dict(attempt.environment)
        for file in files:
            values |= attempt.dotenv(file)
        values |= dict(setting.split("=", 1) for setting in attempt.options("--set-env") if "=" in setting)
        bases = [_settings(folder / ".aider.conf.yml").get("openai-api-base") for folder in folders]
        bases += [values.get("AIDER_OPENAI_API_BASE"), *attempt.options("--openai-api-base")]
        for base in filter(None, bases):
            values["OPENAI_API_BASE"] = base
        return litellm_providers(values)

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["--yes-always", "--no-pretty", "--no-git", "--model", f"openai/{model}", "--message", task]

    def point(self, attempt: Attempt) -> None:
        words = [word for name, url in point_litellm(attempt).items() for word in ("--set-env", f"{name}={url}")]
        # The last of equal options counts.
        attempt.words += [*words, "--openai-api-base", attempt.urls["openai"]]
        attempt.environment |= {"AIDER_ANALYTICS": "false", "AIDER_CHECK_UPDATE": "false"}


def _settings(file: Path) -> dict[str, str]:
    try:
        settings = yaml.safe_load(file.read_text()) if file.is_file() else None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {error}", hint="mend it: aider reads it, too") from None
    return settings if isinstance(settings, dict) else {}


def _git_root() -> list[Path]:
    try:
        done = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    return [Path(done.stdout.strip())] if done.returncode == 0 else []
