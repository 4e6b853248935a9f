"""Graders of an agent's tool calls: their success, the use of required tools, and their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from agl import semconv
from agl.errors import ConfigError
from agl.mdp.selection import AgentFilter
from agl.mdp.spans import Span
from agl.messages.tool_output import reports_failure
from agl.options import checked_options
from agl.rewards.trace import Trace
from agl.trainer.graders.base import Grader


@dataclass(frozen=True, kw_only=True)
class _OfTrace(Grader):
    agents: AgentFilter = None

    def _spans(self, trace: Trace | None) -> Trace:
        return self._trace(trace).of(self.agents)


@checked_options
@dataclass(frozen=True, kw_only=True)
class ToolSuccess(_OfTrace):
    """The mean value of the agent's tool calls: with the defaults, the share that succeeded, 0 to 1.

    A call failed if the tool raised, or if the framework or the result says so (`failed`). With
    `capture_content=False` the result is unknown. `ToolSuccess(failure=-1, empty=-0.5)` gives -1 to 1.

    Attributes:
        success, failure, empty: the value of a call that succeeded, failed, or has an empty result (None = a success).
        without_calls: the value if no tool was called.
        failed: result text -> whether it reports a failure, where nothing was raised or marked as failed. If None,
            these do: an object with "error", "isError" or the like, and a text that begins with "Error" or a traceback.
        agents: the agents whose calls count: a name, glob, pattern, callable or several; all if None.
    """

    success: float = 1.0
    failure: float = 0.0
    empty: float | None = None
    without_calls: float = 0.0
    failed: Callable[[str], bool] | None = None

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest of the options' values."""
        values = [self.success, self.failure, self.without_calls, *(() if self.empty is None else (self.empty,))]
        return min(values), max(values)

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """The mean over the calls.

        Raises:
            RewardError: outside a rollout.
        """
        tools = self._spans(trace).tools
        return sum(map(self._value, tools)) / len(tools) if tools else self.without_calls

    def _value(self, tool: Span) -> float:
        if not succeeded(tool, self.failed):
            return self.failure
        is_empty = str(tool.attributes.get(semconv.TOOL_CALL_RESULT, "?")).strip() in ("", "[]", "{}", "null", "None")
        return self.empty if is_empty and self.empty is not None else self.success


@checked_options
@dataclass(frozen=True)
class RequiredTools(_OfTrace):
    """The share of the named tools that were called successfully, 0 to 1.

    Attributes:
        tools: their names.
        ordered: whether only the longest part of them that was called in this order counts.
        agents: as in `ToolSuccess`.
    """

    tools: tuple[str, ...] | list[str]
    _: KW_ONLY
    ordered: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tools, str) or not self.tools:
            raise ConfigError(f"RequiredTools({self.tools!r})", hint='give the names: RequiredTools(["search"])')

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """The share of names.

        Raises:
            RewardError: outside a rollout.
        """
        used = [name(tool) for tool in self._spans(trace).tools if succeeded(tool)]
        if self.ordered:
            return _in_order(list(self.tools), used) / len(self.tools)
        return len({*self.tools} & {*used}) / len({*self.tools})


@checked_options
@dataclass(frozen=True)
class ToolBudget(_OfTrace):
    """1 for at most `most` tool calls, and `most / calls` for more: above 0, at most 1.

    Attributes:
        most: number of calls, at least 1.
        tools: the tools whose calls count; all if None.
        agents: as in `ToolSuccess`.
    """

    most: int
    _: KW_ONLY
    tools: tuple[str, ...] | list[str] | None = None

    def __post_init__(self) -> None:
        if not self.most >= 1:
            raise ConfigError(f"ToolBudget({self.most!r})", hint="give at least 1")

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """1, or less for more calls.

        Raises:
            RewardError: outside a rollout.
        """
        calls = sum(self.tools is None or name(tool) in self.tools for tool in self._spans(trace).tools)
        return min(1.0, self.most / calls) if calls else 1.0


def name(tool: Span) -> str:
    """The tool's name."""
    return str(tool.attributes.get(semconv.TOOL_NAME, ""))


def succeeded(tool: Span, failed: Callable[[str], bool] | None = None) -> bool:
    """Whether neither the status of a tool's span nor its result (`failed`, or `reports_failure`) reports a failure."""
    by_result_alone = tool.attributes.get(semconv.FAILED_BY_RESULT) is True
    if tool.status == "error" and not (by_result_alone and failed is not None):
        return False
    result = tool.attributes.get(semconv.TOOL_CALL_RESULT)
    return result is None or not (failed or reports_failure)(str(result))


def _in_order(required: list[str], used: list[str]) -> int:
    """Length of the longest common subsequence."""
    best = [0] * (len(used) + 1)
    for one in required:
        before = 0
        for i, other in enumerate(used):
            before, best[i + 1] = best[i + 1], before + 1 if one == other else max(best[i + 1], best[i])
    return best[-1]
