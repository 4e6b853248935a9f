"""Labels: what a person thinks of a rollout, afterwards. A label is a reward in its trace that counts for nothing by
itself, so whatever reads rewards reads it: conditions, exports, pages, viewers of OpenTelemetry."""

from __future__ import annotations

import math
import sys
import time

from agl import semconv
from agl.errors import ConfigError, StoreError
from agl.mdp import spans
from agl.mdp.order import number_after
from agl.mdp.types import Reward
from agl.rewards.emit import evaluation
from agl.trainer.store.base import Store


async def label(
    store: Store, rollout_id: str, value: float | None, *, name: str = semconv.LABEL, note: str | None = None
) -> str:
    """Label the last attempt of a rollout, in place of its label of that name; a value of None withdraws it.

    Returns:
        The rollout's whole id.

    Raises:
        ConfigError: the value is not finite, there is no name, or the rollout has another reward of that name.
        StoreError: no such rollout, or nothing ran of it.
    """
    # An integer may be too large for a float.
    if value is not None and not -sys.float_info.max <= value <= sys.float_info.max:
        raise ConfigError(f"a label of {value}", hint="give a finite number: 1 for good and 0 for bad, for example")
    if not name:
        raise ConfigError("a label without a name", hint=f"leave the name out for {semconv.LABEL!r}")
    rollout = await store.get_rollout(rollout_id)
    known = await store.query_spans(rollout.rollout_id, rollout.attempts)
    root = next((span for span in known if span.parent_id is None), None)
    if root is None:
        raise StoreError(
            "the rollout has no trace, so there is nothing to label",
            hint="it has not run yet, or its spans were pruned",
            rollout=rollout.rollout_id,
        )
    for span in known:
        if span.attributes.get(semconv.REWARD_NAME) == name and (
            span.attributes.get(semconv.REWARD_SOURCE) != semconv.LABEL
        ):
            raise ConfigError(
                f"the rollout has a reward {name!r} of its own, to which a label would be added",
                hint=f"take another name, or leave it out for {semconv.LABEL!r}",
                rollout=rollout.rollout_id,
            )
    now = time.time()
    reward = Reward(name, math.nan if value is None else value, semconv.LABEL, primary=False, explanation=note)
    attributes = {**reward.attributes, semconv.REWARD_VALUE: value, semconv.REWARD_CALL: ""}
    # The newest label counts, whatever the clock said at each.
    attributes[semconv.SEQUENCE] = number_after(known)
    events = () if value is None else (spans.Event(semconv.EVALUATION, now, evaluation(reward)),)
    made = spans.recorded(
        root,
        semconv.REWARD,
        name,
        root.agent or "",
        attributes,
        parent_id=root.span_id,
        start=now,
        end=now,
        events=events,
    )
    await store.add_spans([made])
    return rollout.rollout_id
