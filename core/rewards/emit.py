"""Rewards and other values that an agent reports while it runs; each belongs to the span it was emitted in."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl import semconv, tracing
from agl.errors import RewardError
from agl.mdp.spans import Span
from agl.mdp.types import Reward
from agl.names import require_short


def as_rewards(
    value: Any,
    *,
    primary: str | None = None,
    source: str = "return",
    span_id: str | None = None,
    agents: Collection[str] = (),
    **where: object,
) -> tuple[Reward, ...]:
    """A number or a dict of numbers as rewards.

    Args:
        value: a real number (bool counts as 0 or 1), or {name: number}. Entries named after agents are those agents'
            own rewards and count towards returns.
        primary: the other entry of the dict that counts; the only one, or the one named "reward", if None.
        source, span_id: as in `Reward`.
        agents: names of the agents that took part.
        **where: rollout, agent, ... for the error.

    Raises:
        RewardError: not a number, not finite, an empty dict, a name that is too long, no unique primary entry, or
            `primary` for a number.
    """
    if isinstance(value, Mapping):
        if not value:
            raise RewardError("the reward is an empty dict", hint="give at least one named number", **where)
        for name in value:
            require_short(str(name), "a reward", RewardError, **where)
        names = [str(k) for k in value if k not in agents]
        main = primary or (names[0] if len(names) == 1 else "reward" if "reward" in names else None)
        if main not in names and (primary is not None or len(names) == len(value)):
            raise RewardError(
                f"cannot tell which of {', '.join(names)} is the reward to train on"
                if primary is None
                else f"primary={primary!r} is none of {', '.join(names)}",
                hint='name one entry "reward", or use agl.emit_reward({...}, primary="name")',
                **where,
            )
        return tuple(
            Reward(
                str(k),
                _finite(v, str(k), where),
                source,
                span_id,
                primary=k in agents or str(k) == main,
                agent=str(k) if k in agents else None,
            )
            for k, v in value.items()
        )
    if primary is not None:
        raise RewardError(
            f"primary={primary!r} names an entry of a dict, but the reward is {value!r}",
            hint=f"report {{{primary!r}: ...}}, or leave primary= out",
            **where,
        )
    return (Reward("reward", _finite(value, "reward", where), source, span_id),)


def _finite(value: Any, name: str, where: Mapping[str, object]) -> float:
    item = getattr(value, "item", None)
    if callable(item) and not isinstance(value, numbers.Real):
        with contextlib.suppress(ValueError, RuntimeError):
            value = item()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"the reward {name!r} is {value!r}, a {type(value).__name__}", hint="return a finite number", **where
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"the reward {name!r} is {number}", hint="return a finite number", **where)
    return number


def emit_reward(value: float | Mapping[str, float], primary: str | None = None, *, agent: str | None = None) -> None:
    """Report a reward for the current span: inside a tool for the call that issued it, otherwise for the agent.

    Does nothing outside a rollout, so an instrumented agent runs unchanged in production.

    Args:
        value: a number, or {name: number}.
        primary: the entry of the dict that counts towards returns.
        agent: the agent that earned it, wherever it is emitted: a player of a game, a member of a team.

    Raises:
        RewardError: as in `as_rewards`.
    """
    scope = tracing.current()
    if scope is None:
        return
    where = {"rollout": scope.rollout.rollout_id, "attempt": scope.rollout.attempt, "agent": scope.agent}
    require_short(agent or "", "the agent of a reward", RewardError, **where)
    for reward in as_rewards(value, primary=primary, source="emit", **where):
        record(replace(reward, agent=agent))


def record(reward: Reward) -> None:
    """Record a reward in the current span."""
    scope = tracing.start(semconv.REWARD, reward.name, attributes=reward.attributes)
    if scope is not None:
        scope.span.add_event(semconv.EVALUATION, evaluation(reward))
        tracing.end(scope)


def evaluation(reward: Reward, call_id: str | None = None) -> dict[str, Any]:
    """The attributes of OpenTelemetry's `gen_ai.evaluation.result` event, by which any viewer shows a reward.

    Args:
        call_id: of the call that earned it, if one did.
    """
    facts: dict[str, Any] = {semconv.EVALUATION_NAME: reward.name, semconv.EVALUATION_SCORE: reward.value}
    if reward.explanation is not None:
        facts[semconv.EVALUATION_EXPLANATION] = reward.explanation
    return facts if call_id is None else {**facts, semconv.RESPONSE_ID: call_id}


def only_last(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans of an attempt; of the rewards of which the last alone counts (`semconv.REWARD_LAST`), the others count
    no more, and none of them where the agent returned a reward."""
    rewards = [s for s in spans if s.operation == semconv.REWARD and s.attributes.get(semconv.REWARD_PRIMARY, True)]
    marked = [s for s in rewards if s.attributes.get(semconv.REWARD_LAST)]
    returned = any(s.attributes.get(semconv.REWARD_SOURCE) == "return" for s in rewards)
    superseded = {s.span_id for s in (marked if returned else marked[:-1])}
    return tuple(
        replace(s, attributes={**s.attributes, semconv.REWARD_PRIMARY: False}) if s.span_id in superseded else s
        for s in spans
    )


def emit_message(text: str) -> None:
    """Report a text in the current span."""
    with tracing.span(semconv.MESSAGE, "", attributes={semconv.VALUE: str(text)}):
        pass


def emit_object(value: Any) -> None:
    """Report a JSON value in the current span.

    Raises:
        TypeError: it is not JSON.
    """
    with tracing.span(semconv.OBJECT, "", attributes={semconv.VALUE: json.dumps(value)}):
        pass


def emit_exception(error: BaseException) -> None:
    """Report an exception that the agent handled, in the current span."""
    scope = tracing.start(semconv.EXCEPTION, type(error).__name__)
    if scope is not None:
        tracing.end(scope, error=error)


@contextlib.contextmanager
def _operation(name: str) -> Iterator[None]:
    with tracing.span(semconv.OPERATION, name):
        yield


def operation(name_or_function: str | Callable[..., Any]) -> Any:
    """A custom span: `@agl.operation` on a function, or `with agl.operation("name"):`."""
    if isinstance(name_or_function, str):
        return _operation(name_or_function)
    function = name_or_function
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with _operation(function.__name__):
                return await function(*args, **kwargs)

        return run_async

    return _operation(function.__name__)(function)
