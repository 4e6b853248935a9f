"""Run a block of code as one attempt of a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from agl import semconv
from agl.tracing.context import RolloutContext, Scope, close, end, start
from agl.tracing.threads import carried_across_threads


@contextlib.contextmanager
def running(rollout: RolloutContext) -> Iterator[Scope]:
    """Run a block as this rollout's attempt; its root span is `invoke_agent <agent>`."""
    with carried_across_threads():
        scope = start(semconv.INVOKE_AGENT, rollout.agent, agent=rollout.agent, rollout=rollout)
        assert scope is not None
        try:
            yield scope
        except BaseException as error:
            end(scope, error=error)
            raise
        finally:
            close(rollout)
