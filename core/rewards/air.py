"""Automatic intermediate rewarding: rules that reward tool outcomes, calls and handoffs, credited to the LLM call that
caused each. `agl.air` is the set that every trainer with `air=True` uses."""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, overload

from agl import semconv
from agl.errors import ConfigError, RewardError, nearest
from agl.mdp.builder import build
from agl.mdp.outcomes import ToolOutcome, handoffs, tool_outcomes
from agl.mdp.selection import AgentFilter, Selection, select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, Reward, Transition
from agl.rewards import as_rewards

Rule = TypeVar("Rule", bound=Callable[..., Any])
Credited = tuple[Reward, str | None]
"""A reward and the id of the call that it goes to; None for the whole rollout."""
On = Literal["on_tool_success", "on_tool_failure", "on_call", "on_handoff"]

_ARGUMENTS: dict[On, tuple[str, ...]] = {
    "on_tool_success": ("tool_name", "output", "arguments", "agent", "tool_call_id"),
    "on_tool_failure": ("tool_name", "error", "arguments", "agent", "tool_call_id"),
    "on_call": ("transition",),
    "on_handoff": ("from_agent", "to_agent"),
}
_CONTENT = frozenset({"output", "error", "arguments"})
"""Arguments that are not recorded with `capture_content=False`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rule:
    """A function, when it is asked, what it is told, and what becomes of its answer.

    Attributes:
        on: the event. function: arguments -> float, {name: float} or None. takes: the arguments that it names.
        filters: fact -> which values of it. name: of its reward. primary: whether that counts towards returns.
    """

    on: On
    function: Callable[..., Any]
    takes: tuple[str, ...]
    filters: Mapping[str, Selection]
    name: str
    primary: bool

    def rewards(self, facts: Mapping[str, Any], span_id: str | None, **where: object) -> tuple[Reward, ...]:
        """What the rule gives for an event; () if it does not concern it.

        Raises:
            RewardError: the function raised, or gave no finite number.
        """
        if any(allowed.policy_for(facts[fact]) is None for fact, allowed in self.filters.items()):
            return ()
        try:
            value = self.function(**{name: facts[name] for name in self.takes})
            if value is None:
                return ()
            given = as_rewards(value, source="air", span_id=span_id)
        except RewardError as error:
            raise RewardError(
                f"AIR rule {self.name!r} ({self.on}): {error.message}", hint=error.hint, **where
            ) from error
        except Exception as error:
            raise RewardError(
                f"AIR rule {self.name!r} ({self.on}) raised {type(error).__name__}: {error}",
                hint="a rule returns a number, a dict of numbers, or None for no reward",
                **where,
            ) from error
        named = isinstance(value, Mapping)
        return tuple(replace(r, name=r.name if named else self.name, primary=r.primary and self.primary) for r in given)


class AIR:
    """A set of rules. Each method is a decorator, bare or with options, and gives the function back unchanged:

        @agl.air.on_tool_success
        def tool_ok(tool_name, output):
            return 0.3

        @agl.air.on_tool_failure(tool="calc*", agent="writer")
        def wrong_sum(error):
            return -0.2

    A rule names those of the documented arguments that it needs, and returns a number, a dict of numbers (as for
    `agl.emit_reward`), or None for no reward. It is asked once per event, when the attempt has ended, with what was
    recorded. Registering a function of the same module, qualified name and reward name again replaces it, so that a
    module can be reloaded and a notebook's cell run again.

    Options of every decorator: `name`, the reward's name (the function's if None), and `primary`, whether it counts
    towards returns. Filters are a name, a glob, a `re.Pattern`, a function of the name, or several; None is all.

    Raises:
        ConfigError: an async function, one without a name, or one that asks for something else.
    """

    def __init__(self) -> None:
        self._rules: dict[tuple[str, ...], _Rule] = {}

    @overload
    def on_tool_success(self, rule: Rule, /) -> Rule: ...
    @overload
    def on_tool_success(
        self,
        rule: None = None,
        /,
        *,
        tool: AgentFilter = None,
        agent: AgentFilter = None,
        name: str | None = None,
        primary: bool = True,
    ) -> Callable[[Rule], Rule]: ...
    def on_tool_success(
        self, rule: Any = None, /, *, tool: AgentFilter = None, agent: AgentFilter = None, **options: Any
    ) -> Any:
        """A tool did what it was asked.

        The rule's arguments: `tool_name`; `output`, the text that the model was told; `arguments`, JSON values;
        `agent`, who asked for it; `tool_call_id`, or None.
        """
        return self._register("on_tool_success", rule, {"tool_name": tool, "agent": agent}, **options)

    @overload
    def on_tool_failure(self, rule: Rule, /) -> Rule: ...
    @overload
    def on_tool_failure(
        self,
        rule: None = None,
        /,
        *,
        tool: AgentFilter = None,
        agent: AgentFilter = None,
        name: str | None = None,
        primary: bool = True,
    ) -> Callable[[Rule], Rule]: ...
    def on_tool_failure(
        self, rule: Any = None, /, *, tool: AgentFilter = None, agent: AgentFilter = None, **options: Any
    ) -> Any:
        """A tool raised, gave a result that says it failed, or could not be run (no such tool, bad arguments).

        The rule's arguments: as for `on_tool_success`, with `error`, a text, instead of `output`.
        """
        return self._register("on_tool_failure", rule, {"tool_name": tool, "agent": agent}, **options)

    @overload
    def on_call(self, rule: Rule, /) -> Rule: ...
    @overload
    def on_call(
        self, rule: None = None, /, *, agent: AgentFilter = None, name: str | None = None, primary: bool = True
    ) -> Callable[[Rule], Rule]: ...
    def on_call(self, rule: Any = None, /, *, agent: AgentFilter = None, **options: Any) -> Any:
        """A selected agent's LLM call.

        The rule's argument: `transition`, an `agl.Transition` with what was emitted in it and what the tool and handoff
        rules gave.
        """
        return self._register("on_call", rule, {"agent": agent}, **options)

    @overload
    def on_handoff(self, rule: Rule, /) -> Rule: ...
    @overload
    def on_handoff(
        self,
        rule: None = None,
        /,
        *,
        from_agent: AgentFilter = None,
        to_agent: AgentFilter = None,
        name: str | None = None,
        primary: bool = True,
    ) -> Callable[[Rule], Rule]: ...
    def on_handoff(
        self, rule: Any = None, /, *, from_agent: AgentFilter = None, to_agent: AgentFilter = None, **options: Any
    ) -> Any:
        """An agent gave over to another. The rule's arguments: `from_agent`, `to_agent`."""
        return self._register("on_handoff", rule, {"from_agent": from_agent, "to_agent": to_agent}, **options)

    def __len__(self) -> int:
        """How many rules there are."""
        return len(self._rules)

    def __repr__(self) -> str:
        return f"<AIR: {', '.join(r.name for r in self._rules.values()) or 'no rules'}>"

    def clear(self) -> None:
        """Forget every rule."""
        self._rules.clear()

    def require(self, *, capture_content: bool = True) -> None:
        """Check that there are rules, and that what they ask for is recorded.

        Raises:
            ConfigError: otherwise.
        """
        if not self._rules:
            raise ConfigError(
                "air= is on, but there are no rules", hint="decorate one, for example with @agl.air.on_tool_success"
            )
        for rule in self._rules.values():
            wants = sorted(_CONTENT.intersection(rule.takes))
            if wants and not capture_content:
                raise ConfigError(
                    f"AIR rule {rule.name!r} reads {', '.join(wants)}, which capture_content=False does not record",
                    hint="let the rule name other arguments only, or leave capture_content on",
                )

    def rewards(self, calls: Sequence[Call], spans: Sequence[Span], selection: Selection) -> tuple[Credited, ...]:
        """What the rules give for one attempt. Depends on nothing but what is given, and on no order.

        A tool's outcome is credited to the call that issued its tool call id, where the span has no id to the call or
        the tool call that it lies in; a handoff to the call that decided it. Where that call is unknown or failed, the
        reward counts for the whole rollout. The tools and handoffs of agents that are not selected are not rewarded,
        but for tools that a selected agent's call asked for.

        Raises:
            RewardError: a rule raised, or gave no finite number.
        """
        join = SpanIndex(calls, spans)
        place = {"rollout": spans[0].rollout_id, "attempt": spans[0].attempt} if spans else {}
        credited: list[Credited] = []

        def give(on: On, facts: Mapping[str, Any], call: Call | None, span_id: str | None, **where: object) -> None:
            trained = call is not None and call.policy is not None and call.error is None
            for rule in self._of(on):
                for reward in rule.rewards(facts, span_id, **place, **where, call=call.id if call else None):
                    credited.append((reward, call.id if call is not None and trained else None))

        for outcome in tool_outcomes(join):
            if not _is_selected(outcome.call, outcome.agent, selection):
                continue
            on: On = "on_tool_success" if outcome.error is None else "on_tool_failure"
            where = {"agent": outcome.agent, "tool": outcome.tool, "span": outcome.span_id}
            give(on, _tool_facts(outcome), outcome.call, outcome.span_id, **where)
        for handoff in handoffs(join):
            if _is_selected(handoff.call, handoff.from_agent, selection):
                facts = {"from_agent": handoff.from_agent, "to_agent": handoff.to_agent}
                give("on_handoff", facts, handoff.call, handoff.span_id, agent=handoff.from_agent)
        if self._of("on_call"):
            earned = [*credited]
            for transition in _transitions(calls, spans, selection):
                call = transition.call
                seen = Transition(call, (*transition.rewards, *(r for r, call_id in earned if call_id == call.id)))
                give("on_call", {"transition": seen, "agent": call.agent}, call, call.span_id, agent=call.agent)
        return tuple(credited)

    def _of(self, on: On) -> list[_Rule]:
        return [rule for rule in self._rules.values() if rule.on == on]

    def _register(
        self,
        on: On,
        rule: Callable[..., Any] | None,
        filters: Mapping[str, AgentFilter],
        *,
        name: str | None = None,
        primary: bool = True,
        **unknown: Any,
    ) -> Any:
        if unknown:
            known = [
                f for f in inspect.signature(getattr(type(self), on)).parameters if f not in ("self", "rule", "options")
            ]
            word = next(iter(unknown))
            raise ConfigError(f"{on} has no option {word!r}", hint=nearest(word, [*known, "name", "primary"]))
        chosen = {
            fact: select(value, option="tool" if fact == "tool_name" else fact)
            for fact, value in filters.items()
            if value is not None
        }
        if not isinstance(primary, bool):
            raise ConfigError(
                f"primary is {primary!r}", hint="True: the reward counts towards returns; False: it does not"
            )

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            made = _Rule(on, function, _takes(on, function), chosen, name or _name(on, function), primary)
            kind = function if hasattr(function, "__qualname__") else type(function)
            self._rules[(on, str(kind.__module__), kind.__qualname__, made.name)] = made
            return function

        return register if rule is None else register(rule)


def as_spans(credited: Sequence[Credited], spans: Sequence[Span]) -> list[Span]:
    """Rewards as spans of their attempt, which `build` reads like those that were emitted.

    Args:
        credited: of `AIR.rewards`. spans: of the attempt, its root among them.
    """
    root = next((s for s in spans if s.parent_id is None), None)
    if root is None:
        return []
    agents, now = {s.span_id: s.agent for s in spans}, time.time()
    return [
        Span(
            trace_id=root.trace_id,
            span_id=secrets.token_hex(8),
            parent_id=reward.span_id if reward.span_id in agents else root.span_id,
            rollout_id=root.rollout_id,
            attempt=root.attempt,
            name=f"{semconv.REWARD} {reward.name}",
            # Stores give spans back by their time; a microsecond each keeps the order.
            start=now + i * 1e-6,
            end=now + i * 1e-6,
            attributes={
                semconv.OPERATION_NAME: semconv.REWARD,
                semconv.AGENT_NAME: agents.get(reward.span_id or root.span_id) or root.agent or "",
                semconv.ROLLOUT_ID: root.rollout_id,
                semconv.ATTEMPT: root.attempt,
                semconv.REWARD_NAME: reward.name,
                semconv.REWARD_VALUE: reward.value,
                semconv.REWARD_PRIMARY: reward.primary,
                semconv.REWARD_SOURCE: reward.source,
                semconv.REWARD_CALL: call_id or "",
            },
        )
        for i, (reward, call_id) in enumerate(credited)
    ]


def chosen(option: bool | AIR | None) -> AIR | None:
    """The rules that `Trainer(air=...)` names: True = `agl.air`; None and False = none.

    Raises:
        ConfigError: something else.
    """
    if option is None or option is False:
        return None
    if option is True:
        return air
    if not isinstance(option, AIR):
        raise ConfigError(f"air= is {option!r}", hint="True for the rules of agl.air, or an agl.AIR() of your own")
    return option


def _is_selected(call: Call | None, agent: str, selection: Selection) -> bool:
    return call.policy is not None if call is not None else selection.policy_for(agent) is not None


def _transitions(calls: Sequence[Call], spans: Sequence[Span], selection: Selection) -> list[Transition]:
    built = build("", 0, "", calls, spans, selection)
    found = [t for trajectory in built.trajectories.values() for t in trajectory.transitions]
    return sorted(found, key=lambda t: (t.call.index, t.call.id))


def _tool_facts(outcome: ToolOutcome) -> dict[str, Any]:
    return {
        "tool_name": outcome.tool,
        "output": outcome.output,
        "error": outcome.error,
        "arguments": outcome.arguments,
        "agent": outcome.agent,
        "tool_call_id": outcome.tool_call_id,
    }


def _takes(on: On, function: Callable[..., Any]) -> tuple[str, ...]:
    """The documented arguments that a rule names."""
    if not callable(function):
        raise ConfigError(
            f"{on} was given {function!r}", hint=f"decorate a function, or name options: @agl.air.{on}(...)"
        )
    call = getattr(function, "__call__", None)  # noqa: B004
    if any(test(f) for f in (function, call) for test in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)):
        raise ConfigError(
            f"AIR rule {function!r} is async", hint="rules look at what was recorded; make it a plain function"
        )
    known, takes = _ARGUMENTS[on], []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes += [k for k in known if k not in takes]
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            takes.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"{on} does not tell a rule its {parameter.name!r} ({getattr(function, '__name__', function)})",
                hint=f"a rule may take {', '.join(known)}",
            )
    return tuple(takes)


def _name(on: On, function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "<lambda>")
    if name == "<lambda>":
        raise ConfigError("an AIR rule has no name", hint=f'name its reward: agl.air.{on}(name="tool_ok")(...)')
    return name


air = AIR()
"""The set that `Trainer(air=True)` uses."""
