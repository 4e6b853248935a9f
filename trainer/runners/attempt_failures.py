"""Why an attempt failed: as its report says when it ends, or as the store has it afterwards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agl import errors, semconv
from agl.errors import (
    AglError,
    CaptureError,
    MainThreadError,
    RewardError,
    UserCodeError,
)
from agl.mdp.spans import Span
from agl.trainer.runners.blame import SURROUNDINGS
from agl.trainer.runners.protocol import Failure, Lease, Report
from agl.trainer.store.base import Store
from agl.trainer.store.types import Attempt, AttemptStatus, Rollout

_FAILED: tuple[AttemptStatus, ...] = ("failed", "timeout", "unresponsive")
_RAISED = re.compile(r"^(?:agl\.errors\.)?(\w+)(?:: |$)", re.MULTILINE)
"""The beginning of an exception in a traceback, with the name of its type."""
_EXCEPTION_FACTS = {semconv.AGENT_ERROR, semconv.AGENT_ERROR_PLACE, semconv.AGENT_ERROR_OF_SERVICE}
_PLACE = re.compile(r" \(\w+=[^()]*\)$")
"""The end of an `AglError`'s message: where it happened."""


def reported_failure(lease: Lease, report: Report, *, content: bool) -> Failure:
    """Why an attempt failed, by its report.

    Args:
        content: whether its traceback has texts.
    """
    error = report.error
    facts = _exception_facts(report.spans)
    return Failure(
        *lease.id,
        kind=_kind(report.status, type(error), facts),
        message=str(getattr(error, "message", error)),
        place=str(facts.get(semconv.AGENT_ERROR_PLACE, "")),
        traceback=report.traceback(content=content) or "",
    )


async def stored_failures(store: Store, rollout: Rollout) -> tuple[Failure, ...]:
    """The failures of all attempts of a rollout, which another process has executed."""
    failed = [a for a in await store.query_attempts(rollout.rollout_id) if a.status in _FAILED]
    return tuple([_stored(a, await store.query_spans(a.rollout_id, a.attempt)) for a in failed])


def _stored(attempt: Attempt, spans: Sequence[Span]) -> Failure:
    text = attempt.error or ""
    facts = _exception_facts(spans)
    error, message = _of_text(text)
    return Failure(
        attempt.rollout_id,
        attempt.attempt,
        kind=_kind(attempt.status, error, facts),
        message=message,
        place=str(facts.get(semconv.AGENT_ERROR_PLACE, "")),
        traceback=text,
    )


def _of_text(text: str) -> tuple[type[AglError], str]:
    """The type and the message of the error in an attempt's text: a traceback, or the message alone."""
    kind = AglError
    message = text
    for found in _RAISED.finditer(text):
        named = getattr(errors, found[1], None)
        if isinstance(named, type) and issubclass(named, AglError):
            kind = named
            message = text[found.end() :]
    return kind, _PLACE.sub("", message.partition("\n  -> ")[0])


def _exception_facts(spans: Sequence[Span]) -> Mapping[str, Any]:
    """What an attempt's root span says of the exception that ended it."""
    return next((s.attributes for s in spans if not _EXCEPTION_FACTS.isdisjoint(s.attributes)), {})


def _kind(status: AttemptStatus, error: type, facts: Mapping[str, Any]) -> str:
    """One of `agl.trainer.runners.protocol.FAILURES`."""
    if status == "timeout":
        return "timeout"
    if issubclass(error, SURROUNDINGS) or facts.get(semconv.AGENT_ERROR_OF_SERVICE):
        return "infrastructure"
    if semconv.REWARD_ERROR in facts or issubclass(error, RewardError):
        return "reward"
    if facts or issubclass(error, (CaptureError, MainThreadError, UserCodeError)):
        return "agent"
    return "infrastructure"
