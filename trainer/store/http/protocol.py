"""The store's methods as HTTP requests: all methods, those that wait, and those that a runner may call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl.errors import StoreError
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.store.base import Store
from agl.trainer.store.sql import codec
from agl.trainer.store.types import NewRollout, TrainingRun
from agl.trainer.wire.methods import methods_of

PREFIX = "/v1/store"
BATCH_PATH = f"{PREFIX}/batch"
MOST_OPERATIONS = 256
"""Maximum number of operations in one batch."""
WAITING = {"dequeue_rollout": "wait", "wait_for_rollouts": "timeout"}
"""Methods that wait, and the argument with the seconds that they wait."""
RUNNER_METHODS = frozenset(
    {
        "dequeue_rollout",
        "give_back",
        "update_attempt",
        "heartbeat",
        "get_rollout",
        "get_resources",
        "add_calls",
        "add_spans",
    }
)
"""Methods that a runner may call; what it writes must belong to attempts that are open."""
METHODS = methods_of(Store, error=lambda text: StoreError(text, hint="see /openapi.json"))


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Find the argument that is no JSON value.

    Raises:
        StoreError: as the store itself raises it, with the name of the value and its place.
    """
    for value in arguments.values():
        for item in value if isinstance(value, list | tuple) else ():
            match item:
                case NewRollout():
                    codec.rollout_row(item, item.rollout_id or "", 0.0)
                case Call():
                    codec.call_row(item)
                case Span():
                    codec.span_row(item)
        if isinstance(value, TrainingRun):
            codec.run_row(value, 0.0)
        if isinstance(value, Mapping):
            codec.dumps(dict(value), "the resources")
