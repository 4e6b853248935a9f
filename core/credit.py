"""Credit: how a rollout's rewards become one return per LLM call. Pure functions of a trajectory.

A rule gets the trajectory of the whole rollout: every trained agent's calls, of all policies, in order of arrival;
`call.agent` and `call.policy` identify the caller. Only primary rewards count. An agent's *own* rewards are those of
its calls and those of the rollout that name it (`Reward.agent`); all others of the rollout are *shared*.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agl.errors import ConfigError, RewardError
from agl.mdp.types import Trajectory, Transition

Credit = Callable[[Trajectory], Sequence[float]]
"""Trajectory of C transitions -> C returns, float64."""


@dataclass(frozen=True, slots=True)
class Level:
    """One comparison of a rollout's calls with those of the other rollouts of its task.

    Attributes:
        weight: of this comparison in the advantage.
        returns: float64 [C], the values that are compared.
        keys: [C]; a call is compared with those of the same task, policy and key.
    """

    weight: float
    returns: Sequence[float]
    keys: Sequence[Hashable]


@runtime_checkable
class Leveled(Protocol):
    """A credit rule with comparisons other than agent by agent."""

    def __call__(self, trajectory: Trajectory, /) -> Sequence[float]: ...

    def levels(self, trajectory: Trajectory, /) -> Sequence[Level]:
        """The comparisons; a call without another to compare with in the first one is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every call gets its policy's whole reward: the shared rewards plus the own rewards of the policy's agents."""

    def __call__(self, trajectory: Trajectory) -> list[float]:
        agents = {t.call.policy: set[str]() for t in trajectory.transitions}
        for t in trajectory.transitions:
            agents[t.call.policy].add(t.call.agent)
        own = {policy: math.fsum(own_reward(trajectory, a) for a in sorted(names)) for policy, names in agents.items()}
        shared = _shared(trajectory)
        return [shared + own[t.call.policy] for t in trajectory.transitions]


@dataclass(frozen=True, slots=True)
class Discounted:
    """Return-to-go: a call gets its own rewards and, discounted once per call in between, those of later calls of its
    policy. The rewards of the rollout as a whole count as earned by the policy's last call.

    Attributes:
        gamma: discount per call, in [0, 1].

    Source: the return of an MDP, Sutton and Barto (2018), eq. 3.8, with one LLM call as one step.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        _in_unit("gamma", self.gamma)

    def __call__(self, trajectory: Trajectory) -> list[float]:
        shared = _shared(trajectory)
        next_return: dict[str | None, float] = {}
        returns_C = [0.0] * len(trajectory.transitions)
        for i, transition in reversed(list(enumerate(trajectory.transitions))):
            policy = transition.call.policy
            if policy in next_return:
                later = self.gamma * next_return[policy]
            else:
                later = shared + _named(trajectory, _agents(trajectory, policy))
            returns_C[i] = next_return[policy] = transition.reward + later
        return returns_C


@dataclass(frozen=True, slots=True)
class PerCall:
    """A call gets its own rewards alone; those of the rollout as a whole train nothing by default.

    Attributes:
        shared: weight of the rewards of the rollout as a whole, added to every call.
    """

    shared: float = 0.0

    def __call__(self, trajectory: Trajectory) -> list[float]:
        whole = self.shared * trajectory.final_reward if self.shared else 0.0
        return [t.reward + whole for t in trajectory.transitions]


@dataclass(frozen=True, slots=True)
class PerAgent:
    """Every call gets the weighted sum of the shared rewards and its agent's own rewards.

    Attributes:
        shared: weight of the shared rewards.
        own: weight of the agent's own rewards.
    """

    shared: float = 1.0
    own: float = 1.0

    def __call__(self, trajectory: Trajectory) -> list[float]:
        value = {
            agent: self.shared * _shared(trajectory) + self.own * own_reward(trajectory, agent)
            for agent in _agents(trajectory)
        }
        return [value[t.call.agent] for t in trajectory.transitions]


@dataclass(frozen=True, slots=True)
class Cooperative:
    """A team: every call of every agent gets all rewards of the rollout and of all its agents."""

    def __call__(self, trajectory: Trajectory) -> list[float]:
        return [trajectory.total_reward] * len(trajectory.transitions)


@dataclass(frozen=True, slots=True)
class Competitive:
    """A game: each agent gets its own rewards minus the mean of its opponents', so that the agents' returns sum to 0.

    The players are the agents that made calls and those that a reward of the rollout names, trained or not; shared
    rewards cancel out. With fewer than two players there is no game.

    Raises:
        RewardError: (when called) one player alone.
    """

    def __call__(self, trajectory: Trajectory) -> list[float]:
        named = (r.agent for r in trajectory.rewards if r.agent is not None)
        players = list(dict.fromkeys([*_agents(trajectory), *named]))
        if len(players) < 2:
            raise RewardError(
                f"credit Competitive() needs two players, but only {', '.join(players) or 'nobody'} played",
                hint="train both agents, or name the other in a reward: agl.emit_reward(-1, agent='opponent')",
                rollout=trajectory.rollout_id,
                attempt=trajectory.attempt,
            )
        own = {agent: own_reward(trajectory, agent) for agent in players}
        total = math.fsum(own.values())
        value = {agent: r - (total - r) / (len(players) - 1) for agent, r in own.items()}
        return [value[t.call.agent] for t in trajectory.transitions]


Anchor = Callable[[Transition], Hashable]


def same_prompt(transition: Transition) -> Hashable:
    """The state of a call: its agent and its prompt's token ids."""
    return transition.call.agent, hashlib.blake2b(transition.call.prompt_ids.tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class TurnGroups:
    """Groups within groups: whole rollouts are compared with each other, and so are the calls that different rollouts
    of a task made in the same state, by their discounted return-to-go.

    Attributes:
        gamma: discount per call of the return-to-go.
        weight: of the comparison of calls; that of rollouts has weight 1.
        anchor: transition -> its state; calls of one state are compared. By default the same prompt, token for token.

    A rollout that was in a state several times counts once there, with the mean. A state that only one rollout was in
    adds nothing.

    Source: GiGPO, arXiv 2505.10978, eqs. 3 to 8.
    """

    gamma: float = 0.95
    weight: float = 1.0
    anchor: Anchor = same_prompt

    def __post_init__(self) -> None:
        _in_unit("gamma", self.gamma)

    def __call__(self, trajectory: Trajectory) -> list[float]:
        return Discounted(self.gamma)(trajectory)

    def levels(self, trajectory: Trajectory) -> list[Level]:
        agents = [t.call.agent for t in trajectory.transitions]
        states = [self.anchor(t) for t in trajectory.transitions]
        return [Level(1.0, Uniform()(trajectory), agents), Level(self.weight, self(trajectory), states)]


def returns(credit: Credit, trajectory: Trajectory) -> list[float]:
    """The returns of a credit rule, checked: float64 [C].

    Raises:
        RewardError: not one finite number per transition.
    """
    return _checked(credit, credit(trajectory), trajectory)


def levels(credit: Credit, trajectory: Trajectory) -> list[Level]:
    """The comparisons of a credit rule, checked; a rule without `levels` compares agent by agent.

    Raises:
        RewardError: not one finite return per transition, or not one key.
    """
    if not isinstance(credit, Leveled):
        return [Level(1.0, returns(credit, trajectory), [t.call.agent for t in trajectory.transitions])]
    checked = [
        Level(x.weight, _checked(credit, x.returns, trajectory), list(x.keys)) for x in credit.levels(trajectory)
    ]
    if not checked or any(len(x.keys) != len(trajectory.transitions) for x in checked):
        raise RewardError(
            f"the levels of credit rule {credit!r} do not have one key per call",
            hint="give at least one level, with one key per transition",
            rollout=trajectory.rollout_id,
            attempt=trajectory.attempt,
        )
    return checked


def _checked(credit: Credit, returns_C: Sequence[float], trajectory: Trajectory) -> list[float]:
    values = [float(v) for v in returns_C]
    where = {"rollout": trajectory.rollout_id, "attempt": trajectory.attempt}
    if len(values) != len(trajectory.transitions):
        raise RewardError(
            f"credit rule {credit!r} gave {len(values)} returns for {len(trajectory.transitions)} calls",
            hint="return one number per transition",
            **where,
        )
    for transition, value in zip(trajectory.transitions, values, strict=True):
        if not math.isfinite(value):
            raise RewardError(f"credit rule {credit!r} gave the return {value}", agent=transition.call.agent, **where)
    return values


_EVERY = object()


def _agents(trajectory: Trajectory, policy: object = _EVERY) -> list[str]:
    """The agents that made calls, of one policy or of all, in order of appearance."""
    calls = (t.call for t in trajectory.transitions)
    return list(dict.fromkeys(c.agent for c in calls if policy is _EVERY or c.policy == policy))


def _shared(trajectory: Trajectory) -> float:
    """Sum of the rollout's rewards that name no agent."""
    return math.fsum(r.value for r in trajectory.rewards if r.primary and r.agent is None)


def _named(trajectory: Trajectory, agents: Sequence[str]) -> float:
    """Sum of the rollout's rewards that name one of these agents."""
    return math.fsum(r.value for r in trajectory.rewards if r.primary and r.agent in agents)


def own_reward(trajectory: Trajectory, agent: str) -> float:
    """Sum of an agent's own rewards: those of its calls and those of the rollout that name it."""
    calls = math.fsum(t.reward for t in trajectory.transitions if t.call.agent == agent)
    return calls + _named(trajectory, [agent])


def _in_unit(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(
            f"{name}={value!r} is not between 0 and 1", hint=f"choose another {name}; 1 does not discount"
        )
