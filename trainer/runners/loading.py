"""Loads what a command line names: agents and rewards in Python files and modules, and commands as agents."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agl.agents.agent import Agent, FunctionAgent, LitAgent, as_agent
from agl.agents.wrapping import wrap
from agl.errors import ConfigError, nearest
from agl.rewards.air import air
from agl.rewards.function import GroupReward, is_group_reward
from agl.trainer.runners.command import CommandAgent

_FILE_MODULE = "agl_user_"
"""How the modules of files are named, which no other process can import."""


def file_modules() -> list[ModuleType]:
    """The modules that `load_object` made of files."""
    return [module for name, module in sys.modules.items() if name.startswith(_FILE_MODULE)]


def load_object(spec: str, what: str) -> Any:
    """The object that `file.py:name` or `package.module:name` names.

    Raises:
        ConfigError: there is no such file, module or name, or importing it failed.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name:
        raise ConfigError(f"{what} is {spec!r}", hint="write it as file.py:name or package.module:name")
    try:
        if module_name.endswith(".py"):
            path = Path(module_name).resolve()
            if not path.is_file():
                raise ConfigError(
                    f"there is no file {module_name}", hint=f"{what} is looked up from the current directory"
                )
            known = sys.modules.get(f"{_FILE_MODULE}{path.stem}")
            module = known if known is not None and getattr(known, "__file__", None) == str(path) else _load(path)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{module_name} has no {name!r}", hint=nearest(name, names))
    return getattr(module, name)


def load_group_reward(spec: str | None) -> GroupReward | None:
    """What a command line names as its reward, if that compares the rollouts of a task."""
    value = load_object(spec, "--reward") if spec else None
    return value if is_group_reward(value) else None


def load_agent(spec: str, reward: str | None) -> Agent:
    """The agent that a command line names, wrapped with its reward if it needs one.

    Raises:
        ConfigError: it cannot be loaded, or it needs a reward and `reward` is None.
    """
    value = load_object(spec, "--agent")
    if load_group_reward(reward) is not None:
        return as_agent(value) if isinstance(value, Agent | FunctionAgent | LitAgent) else wrap(value)
    reward_function = load_object(reward, "--reward") if reward else None
    if isinstance(value, Agent | FunctionAgent | LitAgent):
        if reward_function is not None:
            raise ConfigError(f"{spec} gives its own reward", hint="leave --reward out")
        return as_agent(value)
    if reward_function is None:
        raise ConfigError(f"{spec} needs a reward", hint="add --reward file.py:function, (task, output) -> float")
    return wrap(value, reward_function)


def load_command(text: str, reward: str | None, env: Sequence[str] = ()) -> Agent:
    """A command as an agent. `env`: names of variables that it gets.

    Raises:
        ConfigError: `reward` is None, or the command cannot be parsed.
    """
    if reward is None:
        raise ConfigError(
            "--agent-command needs a reward", hint="add --reward file.py:function, (task, output) -> float"
        )
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--agent-command cannot be read: {error}", hint="check its quotes") from None
    function = None if load_group_reward(reward) is not None else load_object(reward, "--reward")
    return CommandAgent(words, reward=function, env=env)


def load_rules(path: str) -> None:
    """Run the file whose decorators register AIR's rules.

    Raises:
        ConfigError: it cannot be run, or registers none.
    """
    try:
        runpy.run_path(path)
    except Exception as error:
        raise ConfigError(f"air_rules: {path} cannot be run: {type(error).__name__}: {error}") from error
    air.require()


def _load(path: Path) -> Any:
    name = f"{_FILE_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module
