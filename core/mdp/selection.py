"""Which agents are trained, and by which policy, chosen by names, globs, regular expressions or a callable."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from agl.errors import ConfigError

DEFAULT_POLICY = "policy"

AgentPattern = str | re.Pattern[str] | Callable[[str], bool]
AgentFilter = AgentPattern | Iterable[AgentPattern] | Mapping[Any, str] | None


@dataclass(frozen=True, slots=True)
class Selection:
    """Agent name -> policy, by the first rule that matches.

    Attributes:
        rules: (pattern, policy) in order. A string is a name or a glob (`rewrit*`, case matters).
    """

    rules: tuple[tuple[AgentPattern, str], ...]

    def policy_for(self, agent: str) -> str | None:
        """The policy that trains this agent; None if the agent is not selected."""
        for pattern, policy in self.rules:
            if _matches(pattern, agent):
                return policy
        return None

    @property
    def policies(self) -> tuple[str, ...]:
        """Every policy of the rules, in order."""
        return tuple(dict.fromkeys(policy for _, policy in self.rules))

    def __str__(self) -> str:
        return ", ".join(_show(pattern) for pattern, _ in self.rules)


def select(agents: AgentFilter = None, *, option: str = "agents") -> Selection:
    """The selection that `agents=` describes; None selects every agent.

    Args:
        agents: one pattern, several, or pattern -> policy.
        option: the option's name in errors.

    Raises:
        ConfigError: an empty filter, or a pattern of another type.
    """
    if agents is None:
        return Selection((("*", DEFAULT_POLICY),))
    if isinstance(agents, Mapping):
        rules = tuple((pattern, policy) for pattern, policy in agents.items())
    elif isinstance(agents, str | re.Pattern) or callable(agents):
        rules = ((cast(AgentPattern, agents), DEFAULT_POLICY),)
    elif isinstance(agents, Iterable):
        rules = tuple((pattern, DEFAULT_POLICY) for pattern in agents)
    else:
        raise ConfigError(
            f"{option}= is {agents!r}", hint="use a name, a glob, re.compile(...), a function of the name, or several"
        )
    if not rules:
        raise ConfigError(f"{option}= selects no agent", hint="leave it out (None) for all")
    for pattern, policy in rules:
        if not (isinstance(pattern, str | re.Pattern) or callable(pattern)):
            raise ConfigError(
                f"{option}= holds {pattern!r}, a {type(pattern).__name__}",
                hint="use a name, a glob, re.compile(...), or a function of the name",
            )
        if not isinstance(policy, str):
            raise ConfigError(f"{option}= maps {pattern!r} to {policy!r}", hint="map it to a policy's name")
    return Selection(rules)


def _matches(pattern: AgentPattern, agent: str) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(agent, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(agent) is not None
    return bool(pattern(agent))


def _show(pattern: AgentPattern) -> str:
    if isinstance(pattern, str):
        return repr(pattern)
    if isinstance(pattern, re.Pattern):
        return f"/{pattern.pattern}/"
    return getattr(pattern, "__name__", repr(pattern))
