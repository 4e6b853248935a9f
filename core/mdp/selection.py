"""Which agents are trained, and by which policy, chosen by names, globs, regular expressions or a callable.

Invariant: a text that is somebody's name selects that one and nobody else. Names may hold a glob's characters
("worker [1]"), so a text is read as a glob only while nobody is known by it: `knowing` adds the names that have been
seen, and more names only ever make a selection smaller.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from agl.errors import ConfigError, NoAgentMatchedError
from agl.names import require_short

DEFAULT_POLICY = "policy"

AgentPattern = str | re.Pattern[str] | Callable[[str], bool]
AgentFilter = AgentPattern | Iterable[AgentPattern] | Mapping[Any, str] | None


@dataclass(frozen=True, slots=True)
class Selection:
    """Agent name -> policy: by the rule that is this name, otherwise by the first pattern that matches.

    Attributes:
        rules: (pattern, policy) in order. A string is a name or a glob (`rewrit*`, case matters).
        names: those strings with a glob's characters that are known to be names.
    """

    rules: tuple[tuple[AgentPattern, str], ...]
    names: frozenset[str] = frozenset()

    def policy_for(self, agent: str) -> str | None:
        """The policy that trains this agent; None if the agent is not selected."""
        for pattern, policy in self.rules:
            if isinstance(pattern, str) and pattern == agent:
                return policy
        for pattern, policy in self.rules:
            if not (isinstance(pattern, str) and pattern in self.names) and _matches(pattern, agent):
                return policy
        return None

    def knowing(self, agents: Iterable[str | None]) -> Selection:
        """The selection where agents of these names exist: a rule that is one of them is no glob."""
        globs = {pattern for pattern, _ in self.rules if isinstance(pattern, str) and _is_glob(pattern)}
        names = self.names.union(globs.intersection(agents)) if globs else self.names
        return self if names == self.names else replace(self, names=names)

    def unmatched(self, agents: Iterable[str]) -> tuple[str, ...]:
        """The rules, as texts, that select none of these agents, not even next to another rule."""
        agents = list(agents)
        known = self.knowing(agents)
        alone = [replace(known, rules=(rule,)) for rule in known.rules]
        return tuple(str(rule) for rule in alone if all(rule.policy_for(agent) is None for agent in agents))

    def require_matched(self, agents: Iterable[str], place: str) -> None:
        """Refuse names that are none of these agents'. A pattern may be for agents that are seldom called.

        Args:
            agents: those that made calls.
            place: where they were seen, as in "in 8 rollouts".

        Raises:
            NoAgentMatchedError: a name is nobody's.
        """
        agents = list(dict.fromkeys(agents))
        rules = tuple(r for r in self.rules if isinstance(r[0], str) and not _is_glob(r[0]))
        if unmatched := replace(self, rules=rules).unmatched(agents):
            raise NoAgentMatchedError(
                f"agents= names {', '.join(unmatched)}, but no agent of that name made a call {place}; those that did: "
                f"{', '.join(map(repr, agents)) or 'none'}",
                hint="use one of those names, or leave it out; a pattern, such as a glob, may match nobody",
            )

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
        require_short(policy, f"a policy in {option}=", ConfigError)
    return Selection(rules)


def _is_glob(text: str) -> bool:
    return any(character in text for character in "*?[")


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
