"""Automatic intermediate rewarding (AIR): rules that reward tool outcomes, calls and handoffs.

Invariant: each rule is called once per event of an attempt, and its reward goes to the LLM call that caused the event.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, overload

from agl import semconv
from agl.errors import ConfigError, RewardError, described, nearest
from agl.mdp import spans
from agl.mdp.builder import AttemptTrajectory, CreditedReward
from agl.mdp.order import number_after
from agl.mdp.outcomes import handoffs, tool_outcomes
from agl.mdp.selection import AgentFilter, Selection, select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, Reward
from agl.rewards import as_rewards
from agl.rewards.emit import evaluation

Rule = TypeVar("Rule", bound=Callable[..., Any])
Event = Literal["on_tool_success", "on_tool_failure", "on_call", "on_handoff"]

_ARGUMENTS: dict[Event, tuple[str, ...]] = {
    "on_tool_success": ("tool_name", "output", "arguments", "agent", "tool_call_id"),
    "on_tool_failure": ("tool_name", "error", "arguments", "agent", "tool_call_id"),
    "on_call": ("transition",),
    "on_handoff": ("from_agent", "to_agent"),
}
"""Event -> the arguments that a rule may name."""
_FILTERS: dict[Event, dict[str, str]] = {
    "on_tool_success": {"tool": "tool_name", "agent": "agent"},
    "on_tool_failure": {"tool": "tool_name", "agent": "agent"},
    "on_call": {"agent": "agent"},
    "on_handoff": {"from_agent": "from_agent", "to_agent": "to_agent"},
}
"""Event -> {option of the decorator: the fact that it filters}."""
_CONTENT = frozenset({"output", "error", "arguments"})
"""Arguments that are not recorded with `capture_content=False`."""


class AIR:
    """A set of rules. Each `on_...` is a decorator, bare or with options, and returns the function unchanged:

        @agl.air.on_tool_success
        def tool_ok(tool_name, output):
            return 0.3

        @agl.air.on_tool_failure(tool="calc*", agent="writer")
        def wrong_sum(error):
            return -0.2

    A rule names those of the documented arguments that it needs, and returns a number, a dict of numbers (as for
    `agl.emit_reward`), or None for no reward. It is called once per event, when the attempt has ended, with what was
    recorded. Registering a function of the same module, qualified name and reward name again replaces it, so that a
    module can be reloaded and a notebook's cell run again.

    Options of every decorator: `name`, the reward's name (the function's if None), and `primary`, whether it counts
    towards returns. Filters are a name, a glob, a `re.Pattern`, a function of the name, or several; None is all.

    Raises:
        ConfigError: an async function, one without a name, or one with an unknown argument.
    """

    def __init__(self) -> None:
        self._rules: dict[tuple[str, ...], _Rule] = {}

    @property
    def on_tool_success(self) -> _Decorator:
        """A tool succeeded. Filters: `tool`, `agent`.

        The rule's arguments: `tool_name`; `output`, what the tool returned as a text or as JSON; `arguments`, JSON
        values; `agent`, the one that called the tool; `tool_call_id`, or None.
        """
        return _Decorator(self._rules, "on_tool_success")

    @property
    def on_tool_failure(self) -> _Decorator:
        """A tool raised, gave a result that says it failed, or could not be run (no such tool, bad arguments).

        Filters: `tool`, `agent`. The rule's arguments: as for `on_tool_success`, with `error`, a text, instead of
        `output`.
        """
        return _Decorator(self._rules, "on_tool_failure")

    @property
    def on_call(self) -> _Decorator:
        """A selected agent's LLM call. Filter: `agent`.

        The rule's argument: `transition`, an `agl.Transition` with the rewards emitted in it and those of the rules for
        tools and handoffs.
        """
        return _Decorator(self._rules, "on_call")

    @property
    def on_handoff(self) -> _Decorator:
        """An agent handed over to another. Filters and the rule's arguments: `from_agent`, `to_agent`."""
        return _Decorator(self._rules, "on_handoff")

    def __len__(self) -> int:
        """How many rules there are."""
        return len(self._rules)

    def __repr__(self) -> str:
        return f"<AIR: {', '.join(r.name for r in self._rules.values()) or 'no rules'}>"

    def clear(self) -> None:
        """Forget every rule."""
        self._rules.clear()

    def require(self, *, capture_content: bool = True) -> None:
        """Check that there are rules, and that the facts they take are recorded.

        Raises:
            ConfigError: otherwise.
        """
        if not self._rules:
            raise ConfigError(
                "air= is on, but there are no rules", hint="decorate one, for example with @agl.air.on_tool_success"
            )
        for rule in self._rules.values():
            content = sorted(_CONTENT.intersection(rule.arguments))
            if content and not capture_content:
                raise ConfigError(
                    f"AIR rule {rule.name!r} reads {', '.join(content)}, which capture_content=False does not record",
                    hint="let the rule name other arguments only, or leave capture_content on",
                )

    def rewards(
        self, trajectory: AttemptTrajectory, index: SpanIndex, selection: Selection
    ) -> tuple[CreditedReward, ...]:
        """The rules' rewards for one attempt; a pure function of the arguments, in any order of calls and spans.

        A tool's outcome is credited to the call that issued its tool call id, where the span has no id to the call or
        the tool call that it lies in; a handoff to the call that decided it. Where that call is unknown or failed, the
        reward counts for the whole rollout. The tools and handoffs of agents that are not selected are not rewarded,
        except for tools that a selected agent's call asked for. Equal tool calls of one answer that ended alike count
        once.

        Args:
            trajectory: of the attempt, with the rewards that were emitted in it.
            index: the calls and spans that it was built from.
            selection: which agents are trained.

        Returns:
            Rewards for `trajectory.with_rewards`. `span_id` is the root's where an event has no span of the attempt;
            () without a root.

        Raises:
            RewardError: a rule raised, or returned no finite number.
        """
        root = index.root
        if root is None:
            return ()
        attempt = {"rollout": trajectory.trajectory.rollout_id, "attempt": trajectory.trajectory.attempt}
        outcomes = tool_outcomes(index)
        handed_over = handoffs(index)
        agents = index.agents.union(*((handoff.from_agent, handoff.to_agent) for handoff in handed_over))
        tools = {outcome.tool for outcome in outcomes} | _offered(index.calls)
        every_rule = [rule.knowing(agents, tools) for rule in self._rules.values()]
        selection = selection.knowing(agents)

        def apply(
            event: Event, facts: Mapping[str, Any], call: Call | None, span_id: str | None, **where: object
        ) -> list[CreditedReward]:
            trained = call is not None and call.policy is not None and call.error is None
            call_id = call.id if call is not None and trained else None
            where = {**attempt, **where, "call": call.id if call else None}
            span_id = span_id if span_id in index.spans else root.span_id
            rules = [rule for rule in every_rule if rule.event == event]
            return [(reward, call_id) for rule in rules for reward in rule.rewards(facts, span_id, **where)]

        credited: list[CreditedReward] = []
        known: dict[tuple[str, ...], str | None] = {}
        for outcome in outcomes:
            if _is_selected(outcome.call, outcome.agent, selection):
                event: Event = "on_tool_success" if outcome.error is None else "on_tool_failure"
                if outcome.call is not None and outcome.arguments is not None:
                    arguments = json.dumps(outcome.arguments, sort_keys=True, default=str)
                    same = (outcome.call.id, outcome.tool, arguments, event)
                    # A framework that tries one tool call again has several outcomes of it.
                    if known.setdefault(same, outcome.tool_call_id) != outcome.tool_call_id:
                        continue
                where = {"agent": outcome.agent, "tool": outcome.tool, "span": outcome.span_id}
                facts = {
                    "tool_name": outcome.tool,
                    "output": outcome.output,
                    "error": outcome.error,
                    "arguments": outcome.arguments,
                    "agent": outcome.agent,
                    "tool_call_id": outcome.tool_call_id,
                }
                credited += apply(event, facts, outcome.call, outcome.span_id, **where)
        for handoff in handed_over:
            if _is_selected(handoff.call, handoff.from_agent, selection):
                facts = {"from_agent": handoff.from_agent, "to_agent": handoff.to_agent}
                credited += apply("on_handoff", facts, handoff.call, handoff.span_id, agent=handoff.from_agent)
        for transition in trajectory.with_rewards(credited).trajectory.transitions:
            call = transition.call
            facts = {"transition": transition, "agent": call.agent}
            credited += apply("on_call", facts, call, call.span_id, agent=call.agent)
        return tuple(credited)


def reward_spans(credited: Sequence[CreditedReward], index: SpanIndex) -> list[Span]:
    """`AIR.rewards` as spans, for the record: `build_trajectory` reads them like those that were emitted."""
    root = index.root
    if root is None:
        return []
    now = time.time()
    made = []
    first = number_after(index.spans.values())
    for i, (reward, call_id) in enumerate(credited):
        parent = index.spans.get(reward.span_id or "", root)
        at = now + i * 1e-6
        facts = {**reward.attributes, semconv.REWARD_CALL: call_id or "", semconv.SEQUENCE: first + i}
        events = (spans.Event(semconv.EVALUATION, at, evaluation(reward, call_id)),)
        agent = parent.agent or root.agent or ""
        where = {"parent_id": parent.span_id, "start": at, "end": at}
        made.append(spans.recorded(root, semconv.REWARD, reward.name, agent, facts, events=events, **where))
    return made


def rule_set(option: bool | AIR | None) -> AIR | None:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Rule:
    """A user's function with the event it is for.

    Attributes:
        event: when it is called.
        function: arguments -> float, {name: float} or None.
        arguments: names of the facts that it takes.
        filters: fact -> the values for which it is called.
        name: of its reward.
        primary: whether its reward counts towards returns.
    """

    event: Event
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    filters: Mapping[str, Selection]
    name: str
    primary: bool

    def knowing(self, agents: Iterable[str], tools: Iterable[str]) -> _Rule:
        """The rule where agents and tools of these names exist, whose filters then select those alone."""
        filters = {f: values.knowing(tools if f == "tool_name" else agents) for f, values in self.filters.items()}
        return replace(self, filters=filters)

    def rewards(self, facts: Mapping[str, Any], span_id: str | None, **where: object) -> tuple[Reward, ...]:
        """The rule's rewards for an event; () if a filter excludes it.

        Raises:
            RewardError: the function raised, or returned no finite number.
        """
        if any(values.policy_for(facts[fact]) is None for fact, values in self.filters.items()):
            return ()
        try:
            value = self.function(**{name: facts[name] for name in self.arguments})
            if value is None:
                return ()
            rewards = as_rewards(value, source="air", span_id=span_id)
        except RewardError as error:
            raise RewardError(
                f"AIR rule {self.name!r} ({self.event}): {error.message}", hint=error.hint, **where
            ) from error
        except Exception as error:
            raise RewardError(
                f"AIR rule {self.name!r} ({self.event}) raised {described(error)}",
                hint="a rule returns a number, a dict of numbers, or None for no reward",
                **where,
            ) from error
        named = isinstance(value, Mapping)
        return tuple(
            replace(r, name=r.name if named else self.name, primary=r.primary and self.primary) for r in rewards
        )


class _Decorator:
    """Registers rules for one event; used bare or with options."""

    def __init__(self, rules: dict[tuple[str, ...], _Rule], event: Event) -> None:
        self._rules = rules
        self._event: Event = event

    @overload
    def __call__(self, rule: Rule, /) -> Rule: ...
    @overload
    def __call__(
        self, rule: None = None, /, *, name: str | None = None, primary: bool = True, **filters: AgentFilter
    ) -> Callable[[Rule], Rule]: ...
    def __call__(
        self, rule: Any = None, /, *, name: str | None = None, primary: bool = True, **filters: AgentFilter
    ) -> Any:
        facts = _FILTERS[self._event]
        for option in filters:
            if option not in facts:
                raise ConfigError(
                    f"{self._event} has no option {option!r}", hint=nearest(option, [*facts, "name", "primary"])
                )
        selections = {facts[o]: select(value, option=o) for o, value in filters.items() if value is not None}
        if not isinstance(primary, bool):
            raise ConfigError(
                f"primary is {primary!r}", hint="True: the reward counts towards returns; False: it does not"
            )

        def register(function: Rule) -> Rule:
            arguments = _arguments(self._event, function)
            own = name or getattr(function, "__name__", "<lambda>")
            if own == "<lambda>":
                hint = f'name its reward: agl.air.{self._event}(name="tool_ok")(...)'
                raise ConfigError("an AIR rule has no name", hint=hint)
            entry = _Rule(self._event, function, arguments, selections, own, primary)
            kind = function if hasattr(function, "__qualname__") else type(function)
            self._rules[(self._event, str(kind.__module__), kind.__qualname__, entry.name)] = entry
            return function

        return register if rule is None else register(rule)


def _offered(calls: Iterable[Call]) -> set[str]:
    """The names of the tools that requests offered to the model."""
    tools = (tool for call in calls for tool in call.request.get("tools") or ())
    return {str((tool.get("function") or tool).get("name")) for tool in tools}


def _is_selected(call: Call | None, agent: str, selection: Selection) -> bool:
    return call.policy is not None if call is not None else selection.policy_for(agent) is not None


def _arguments(event: Event, function: Callable[..., Any]) -> tuple[str, ...]:
    """The documented arguments that a rule names."""
    if not callable(function):
        raise ConfigError(
            f"{event} was given {function!r}", hint=f"decorate a function, or name options: @agl.air.{event}(...)"
        )
    call = getattr(function, "__call__", None)  # noqa: B004
    if any(test(f) for f in (function, call) for test in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)):
        raise ConfigError(
            f"AIR rule {function!r} is async", hint="rules look at what was recorded; make it a plain function"
        )
    known = _ARGUMENTS[event]
    arguments = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments += [k for k in known if k not in arguments]
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            arguments.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"{event} passes a rule no {parameter.name!r} ({getattr(function, '__name__', function)})",
                hint=f"a rule may take {', '.join(known)}",
            )
    return tuple(arguments)


air = AIR()
"""The set that `Trainer(air=True)` uses."""
