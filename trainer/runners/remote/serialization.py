"""Leases and reports as JSON: what passes between a desk and workers in other processes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agl import errors
from agl.agents.resources import resource_from_json, resource_to_json
from agl.errors import AglError, ConfigError, RolloutError
from agl.mdp.selection import Selection
from agl.tracing import otlp
from agl.trainer.runners.protocol import Lease, Report
from agl.trainer.store.base import Attempt, AttemptedRollout, Rollout, RolloutConfig


def lease_to_json(lease: Lease, *, selection: bool = True, resources: bool = True) -> dict[str, Any]:
    """A lease, but for the gateway's address, which the worker knows by the way it came.

    Args:
        selection, resources: whether they are in it; where not, the worker has them already.

    Raises:
        ConfigError: a function in `agents=`, which cannot pass.
    """
    return {
        "rollout": dataclasses.asdict(lease.rollout),
        "attempt": dataclasses.asdict(lease.leased.attempt),
        "selection": selection_to_json(lease.selection) if selection else None,
        "resources": {n: resource_to_json(value) for n, value in lease.resources.items()} if resources else None,
        "routed": lease.gateway is not None,
        "key": lease.key,
        "model": lease.model,
        "sampling": dict(lease.sampling),
        "capture_content": lease.capture_content,
    }


def lease_from_json(
    data: Mapping[str, Any],
    base_url: str,
    selection: Selection | None = None,
    resources: Mapping[str, Any] | None = None,
) -> Lease:
    """The lease, with `base_url` for its gateway's address, and with these where it comes without.

    Raises:
        ConfigError: it comes without a selection, and there is none here.
    """
    if data["selection"] is not None:
        selection = selection_from_json(data["selection"])
    if selection is None:
        raise ConfigError(
            "the server's rollouts are for worker processes of its own",
            hint='start the trainer with runners="remote" for runners elsewhere',
        )
    if data["resources"] is not None:
        resources = {name: resource_from_json(value) for name, value in data["resources"].items()}
    config = RolloutConfig(**{**data["rollout"]["config"], "retry_on": tuple(data["rollout"]["config"]["retry_on"])})
    rollout = Rollout(**{**data["rollout"], "config": config})
    attempt = Attempt(**data["attempt"])
    path = f"/rollouts/{rollout.rollout_id}/attempts/{attempt.attempt}"
    return Lease(
        AttemptedRollout(rollout, attempt),
        selection,
        resources or {},
        gateway=base_url if data["routed"] else None,
        url=f"{base_url}{path}" if data["routed"] else "",
        key=data["key"],
        model=data["model"],
        sampling=data["sampling"],
        capture_content=data["capture_content"],
    )


def selection_to_json(selection: Selection) -> list[Any]:
    """The rules in order: [name or glob, null or a regular expression's flags, policy].

    Raises:
        ConfigError: one is a function.
    """
    rules = []
    for pattern, policy in selection.rules:
        if isinstance(pattern, re.Pattern):
            rules.append([pattern.pattern, pattern.flags, policy])
        elif isinstance(pattern, str):
            rules.append([pattern, None, policy])
        else:
            raise ConfigError(
                f"agents= holds the function {getattr(pattern, '__name__', pattern)!r}, which cannot be sent to "
                "runners in other processes",
                hint="use names, globs or re.compile(...) there",
            )
    return rules


def selection_from_json(rules: Sequence[Any]) -> Selection:
    """What `selection_to_json` wrote."""
    return Selection(
        tuple((pattern if flags is None else re.compile(pattern, flags), policy) for pattern, flags, policy in rules)
    )


def report_to_json(report: Report) -> dict[str, Any]:
    """A report; an error of the agent's own is its text."""
    error = report.error
    known = None
    if error is not None:
        own = isinstance(error, AglError)
        known = {
            "kind": type(error).__name__ if own else "RolloutError",
            "message": error.message if own else f"{type(error).__name__}: {error}",
            "hint": error.hint if own else None,
            "where": {k: v if isinstance(v, int) else str(v) for k, v in error.where.items()} if own else {},
            "text": report.traceback,
        }
    return {"spans": otlp.encode(report.spans), "error": known}


def report_from_json(data: Mapping[str, Any], lease: Lease) -> Report:
    """What `report_to_json` wrote, as the report of this lease; ValueError or KeyError for anything else."""
    rollout_id, attempt = lease.id
    spans, error = tuple(otlp.decode(data["spans"], rollout_id=rollout_id, attempt=attempt)), data["error"]
    if error is None:
        return Report(spans)
    kind = getattr(errors, str(error["kind"]), None)
    kind = kind if isinstance(kind, type) and issubclass(kind, AglError) else RolloutError
    where = {str(k): v for k, v in dict(error["where"]).items() if k not in ("message", "hint")}
    return Report(spans, kind(str(error["message"]), hint=error["hint"], **where), str(error["text"]))
