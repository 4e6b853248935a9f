"""Leases and reports as JSON values: what a coordinator and workers in other processes exchange."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from agl import errors
from agl.agents.resources import resource_from_json, resource_to_json
from agl.errors import AglError, ConfigError, RolloutError
from agl.mdp.selection import Selection
from agl.tracing import otlp
from agl.trainer.runners.protocol import Lease, Report
from agl.trainer.store.base import AttemptedRollout


@dataclass(frozen=True, slots=True)
class _Error:
    """An error in a report. `kind` names the class in `agl.errors`; `text` is the error with its traceback."""

    kind: str
    message: str
    hint: str | None
    where: dict[str, Any]
    text: str | None


_ROLLOUT = TypeAdapter(AttemptedRollout)
_ERROR = TypeAdapter(_Error | None)


def lease_to_json(lease: Lease, *, selection: bool = True, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A lease without the gateway's address: the worker uses the address at which it reached the server.

    Args:
        selection: whether to include it; otherwise the worker has it already. known: resources that it has, too.

    Raises:
        ConfigError: `agents=` holds a function, which JSON cannot carry.
    """
    return {
        **_ROLLOUT.dump_python(lease.attempted_rollout, warnings=False),
        "selection": selection_to_json(lease.selection) if selection else None,
        "resources": {
            name: resource_to_json(value)
            for name, value in lease.resources.items()
            if name not in (known or {}) or (known or {})[name] is not value
        },
        "routed": lease.gateway is not None,
        "port": lease.port,
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
    """What `lease_to_json` wrote.

    Args:
        base_url: the address of the coordinator's server, which is the gateway's unless the lease has another port.
        selection: used where `data` has none. resources: those that the worker has, which `data` may replace.

    Raises:
        ConfigError: there is no selection, neither in `data` nor here.
    """
    if data["selection"] is not None:
        selection = selection_from_json(data["selection"])
    if selection is None:
        raise ConfigError(
            "the server's rollouts are for its own worker processes",
            hint='start the trainer with runners="remote" for runners on other machines',
        )
    sent = {name: resource_from_json(value) for name, value in (data["resources"] or {}).items()}
    attempted_rollout = _ROLLOUT.validate_python(data)
    # By the name by which this worker has reached the server. Servers of earlier versions send no port.
    if (port := data.get("port")) is not None:
        parts = urlsplit(base_url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        base_url = parts._replace(netloc=f"{host}:{port}").geturl()
    path = f"/rollouts/{attempted_rollout.rollout.rollout_id}/attempts/{attempted_rollout.attempt.attempt}"
    return Lease(
        attempted_rollout,
        selection,
        {**(resources or {}), **sent},
        gateway=base_url if data["routed"] else None,
        port=port,
        url=f"{base_url}{path}" if data["routed"] else "",
        key=data["key"],
        model=data["model"],
        sampling=data["sampling"],
        capture_content=data["capture_content"],
    )


def selection_to_json(selection: Selection) -> list[Any]:
    """The rules in order: [name, glob or regular expression, flags of a regular expression or null, policy].

    Raises:
        ConfigError: a rule is a function.
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
                "other processes",
                hint="use names, globs or re.compile(...) there",
            )
    return rules


def selection_from_json(rules: Sequence[Any]) -> Selection:
    """What `selection_to_json` wrote."""
    return Selection(
        tuple((pattern if flags is None else re.compile(pattern, flags), policy) for pattern, flags, policy in rules)
    )


def report_to_json(report: Report) -> dict[str, Any]:
    """A report. An error that is not of `agl.errors` travels as a `RolloutError` with its text."""
    error = report.error
    data = None
    if isinstance(error, AglError):
        where = {k: v if isinstance(v, int) else str(v) for k, v in error.where.items()}
        data = _Error(type(error).__name__, error.message, error.hint, where, report.traceback)
    elif error is not None:
        data = _Error("RolloutError", f"{type(error).__name__}: {error}", None, {}, report.traceback)
    return {"spans": otlp.encode(report.spans), "error": _ERROR.dump_python(data)}


def report_from_json(data: Mapping[str, Any], lease: Lease) -> Report:
    """What `report_to_json` wrote, as the report of this lease.

    Raises:
        ValueError, KeyError: it is not a report.
    """
    rollout_id, attempt = lease.id
    spans = tuple(otlp.decode(data["spans"], rollout_id=rollout_id, attempt=attempt))
    error = _ERROR.validate_python(data["error"])
    if error is None:
        return Report(spans)
    cls = getattr(errors, error.kind, None)
    cls = cls if isinstance(cls, type) and issubclass(cls, AglError) else RolloutError
    where = {k: v for k, v in error.where.items() if k not in ("message", "hint")}
    return Report(spans, cls(error.message, hint=error.hint, **where), error.text)
