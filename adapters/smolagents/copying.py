"""A copy of a smolagents agent for each rollout, because an agent keeps its memory, its state and its variables."""

from __future__ import annotations

import copy
from typing import Any

from agl.errors import ConfigError


def fresh_copy(agent: Any) -> Any:
    """A copy of an agent, and of those that it manages, that shares nothing with it that a run changes.

    Raises:
        ConfigError: its code is executed in another process, and all rollouts would share its variables.
    """
    new = copy.copy(agent)
    new.memory = copy.copy(agent.memory)
    new.memory.steps = [*agent.memory.steps]
    new.state = {**agent.state}
    new.logger = _quiet(agent.logger)
    new.monitor = type(agent.monitor)(agent.model, new.logger)
    # The agent's own callback counts in its monitor; the user's callbacks are shared.
    new.step_callbacks = copy.copy(agent.step_callbacks)
    new.step_callbacks._callbacks = {
        step: [new.monitor.update_metrics if call == agent.monitor.update_metrics else call for call in calls]
        for step, calls in agent.step_callbacks._callbacks.items()
    }
    new.managed_agents = {name: fresh_copy(managed) for name, managed in agent.managed_agents.items()}
    if hasattr(agent, "python_executor"):
        new.python_executor = _copy_executor(agent, agent.python_executor)
    return new


def _quiet(logger: Any) -> Any:
    """A silent logger with a separate console: only one agent can stream to a shared one."""
    from rich.console import Console
    from smolagents.monitoring import AgentLogger, LogLevel

    return AgentLogger(LogLevel.OFF, Console(quiet=True)) if type(logger) is AgentLogger else logger


def _copy_executor(agent: Any, executor: Any) -> Any:
    from smolagents.local_python_executor import LocalPythonExecutor

    if not isinstance(executor, LocalPythonExecutor):
        raise ConfigError(
            f"cannot make a copy of this {type(agent).__name__} for each rollout: its code is executed by a "
            f"{type(executor).__name__}, whose variables all rollouts would share",
            hint="build the agent inside a function, and make the function trainable with @agl.rollout",
        )
    new = copy.copy(executor)
    new.state = {**executor.state}
    new.custom_tools = {**executor.custom_tools}
    return new
