"""The methods of a coordinator over HTTP, and what of a lease they send.

Invariant: a worker names its lease by rollout and attempt, and proves it by the lease's secret in a header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Protocol, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from agl._version import __version__
from agl.agents.resources import resource_from_json, resource_to_json
from agl.errors import AglError, ConfigError, RolloutError
from agl.mdp.selection import Selection
from agl.trainer.http.errors import to_error
from agl.trainer.runners.protocol import LEASE_WAIT_SECONDS, Coordinator, Lease
from agl.trainer.wire.methods import Id, methods_of

PREFIX = "/runner"


class RemoteCoordinator(Coordinator, Protocol):
    """A coordinator whose requests for a lease have ids, so that they can be repeated and withdrawn."""

    async def lease(self, worker_id: str, wait: float = LEASE_WAIT_SECONDS, *, request_id: str = "") -> Lease | None:
        """The next rollout; for a request with the same id, the same lease."""
        ...

    async def forget(self, request_id: str) -> None:
        """Withdraw a request for a lease, whose worker has gone."""
        ...


class LeaseId(BaseModel):
    """A lease as a worker names it."""

    model_config = ConfigDict(extra="forbid")
    rollout_id: Id
    attempt: Annotated[int, Field(gt=0, lt=2**31)]


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


def selection_from_json(facts: Mapping[str, Any]) -> Selection:
    """What `sent_lease` wrote: without rules, where the worker has them already."""
    rules = tuple(
        (pattern if flags is None else re.compile(pattern, flags), policy) for pattern, flags, policy in facts["rules"]
    )
    return Selection(rules, frozenset(facts["names"]))


def _read_error(facts: Any) -> AglError:
    if not isinstance(facts, Mapping) or not isinstance(facts.get("message"), str):
        raise ValueError("not an error: {type, message, hint, where}")
    return to_error(facts, RolloutError)


METHODS = methods_of(
    RemoteCoordinator,
    error=lambda text: ConfigError(
        f"not what a runner of this server's release, agl {__version__}, sends ({text}); upgrade agl where it runs"
    ),
    arguments={Lease: LeaseId, BaseException: Annotated[Any, BeforeValidator(_read_error)]},
    results={Selection: Annotated[Any, BeforeValidator(selection_from_json)]},
)


def sent_lease(lease: Lease, *, selection: bool = True, known: Mapping[str, Any]) -> Lease:
    """A lease whose fields are JSON values.

    Args:
        selection: whether to include its rules; otherwise the worker has them already.
        known: resources that it has,
            too.

    Raises:
        ConfigError: `agents=` holds a function, which JSON cannot carry.
    """
    resources = {
        name: resource_to_json(value)
        for name, value in lease.resources.items()
        if name not in known or known[name] is not value
    }
    rules = selection_to_json(lease.selection) if selection else []
    facts = {"rules": rules, "names": sorted(lease.selection.names)}
    return replace(lease, selection=cast(Selection, facts), resources=resources)


def received_lease(lease: Lease, base_url: str, selection: Selection | None, resources: Mapping[str, Any]) -> Lease:
    """The lease that `sent_lease` prepared.

    Args:
        base_url: the address at which this worker has reached the coordinator, which is the gateway's unless the lease
            has another port. selection: whose rules are used where the lease has none. resources: those that the worker
            has, which the lease may replace.

    Raises:
        ConfigError: there is no selection, neither in the lease nor here.
    """
    if lease.selection.rules:
        selection = lease.selection
    if selection is None:
        raise ConfigError(
            "the server's rollouts are for its own worker processes",
            hint='start the trainer with runners="remote" for runners on other machines',
        )
    if lease.port is not None:
        parts = urlsplit(base_url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        base_url = parts._replace(netloc=f"{host}:{lease.port}").geturl()
    return replace(
        lease,
        selection=replace(selection, names=lease.selection.names),
        resources={**resources, **{name: resource_from_json(value) for name, value in lease.resources.items()}},
        gateway=None if lease.gateway is None else base_url,
        url="" if lease.gateway is None else base_url + lease.url.removeprefix(lease.gateway),
    )
