"""A store over HTTP: one POST route per method of `Store`, with validation and a schema.

An operator may call every method. A runner may lease, and report on and read the rollouts whose lease's secret it
shows; the calls and spans that it writes must belong to attempts that are open.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agl.errors import AglError, NotStoredError, StoreError
from agl.trainer.http.auth import LEASE_HEADER, Keys, Role, lease_secrets
from agl.trainer.http.bodies import body_in_turn
from agl.trainer.http.errors import describe_error, error_handlers, error_json, refusal
from agl.trainer.http.limits import Limits, Refused
from agl.trainer.http.responses import answer, unless_gone
from agl.trainer.http.server import HttpServer
from agl.trainer.http.turns import Turns, TurnsByLease
from agl.trainer.store.base import Store
from agl.trainer.store.http import protocol
from agl.trainer.store.http.openapi import schema
from agl.trainer.store.http.otlp import Traces
from agl.trainer.store.leases import is_open_lease
from agl.trainer.store.types import ATTEMPT_TERMINAL, Attempt, AttemptedRollout
from agl.trainer.wire.methods import Method, loads, portable
from agl.trainer.wire.server import json_response, method_routes

PORT = 4747
_KEPT_REQUESTS = 10_000
"""Ids of abandoned requests that are kept, so that none of these is leased a rollout later."""


class StoreServer:
    """A store that listens.

    Args:
        store: the store to serve; `stop` does not close it.
        host, port: as of `HttpServer`.
        keys: the keys that are accepted; `Keys.find()` if None.
        limits: bounds on requests.
        extra_routes: other routes of this server.

    Raises:
        ConfigError: `host` is not loopback, and there is no operator key.
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        keys: Keys | None = None,
        limits: Limits | None = None,
        extra_routes: Sequence[BaseRoute] = (),
    ) -> None:
        self.keys, self.limits = keys or Keys.find(), limits or Limits.of_environment()
        self.keys.check_host(host)
        self._routes = StoreRoutes(store, self.keys, self.limits)
        app = build_app([*extra_routes, *self._routes.routes()])
        self._server = HttpServer(
            app, error=StoreError, host=host, port=port, limits=self.limits, minted_key=self.keys.minted
        )

    @property
    def url(self) -> str:
        """The base URL; "" while the server does not listen."""
        return self._server.url

    async def start(self) -> str:
        """Start to listen; returns the base URL.

        Raises:
            StoreError: the port is taken or the address cannot be bound.
        """
        url = await self._server.start()
        self._routes.start()
        return url

    async def stop(self) -> None:
        """Stop listening. Requests that wait are answered with 503. Idempotent."""
        self._routes.stop()
        await self._server.stop()


def build_app(routes: Sequence[BaseRoute]) -> Starlette:
    """The ASGI application of these routes. Errors are answered in JSON."""
    return Starlette(routes=routes, exception_handlers=error_handlers(describe_error, AglError, HTTPException))


class StoreRoutes:
    """The routes of a store's methods.

    Args:
        store: the store to serve.
        keys: the keys that are accepted.
        limits: bounds on requests.
    """

    def __init__(self, store: Store, keys: Keys, limits: Limits) -> None:
        self.store = store
        self.keys = keys
        self.limits = limits
        self._waiting: set[asyncio.Future[Any]] = set()
        self._stopping = False
        self._abandoned: OrderedDict[str, None] = OrderedDict()
        self._turns = TurnsByLease(functools.partial(is_open_lease, store))
        self._traces = Traces(store, self.role, self.is_leased, self.turns)

    def routes(self) -> list[Route]:
        """Routes of the methods, of batches, of OTLP spans, and of what describes the server."""
        return [
            *method_routes(
                protocol.METHODS,
                protocol.PREFIX,
                self._one,
                admit=self.role,
                turns=self.turns,
                waiting=protocol.WAITING,
            ),
            Route(protocol.BATCH_PATH, self._batch, methods=["POST"]),
            self._traces.route(),
            Route(f"{protocol.PREFIX}/about", self._about),
            Route("/openapi.json", self._schema),
            Route("/health", self._health),
        ]

    def start(self) -> None:
        """Begin what runs without a request."""
        self._traces.start()

    def stop(self) -> None:
        """Cancel the requests that wait, so that the server can stop, and what runs without one."""
        self._stopping = True
        self._traces.stop()
        for waiting in list(self._waiting):
            waiting.cancel()

    def role(self, request: Request) -> Role:
        """The role of a request's sender.

        Raises:
            Refused: 401, the key is unknown.
        """
        role = self.keys.role(request.headers)
        if role is None:
            raise Refused(401, "this store takes requests with one of its keys only", "invalid_api_key")
        return role

    async def turns(self, request: Request) -> Turns:
        """The turns of a request's sender.

        Raises:
            Refused: 401, the key is unknown.
        """
        return await self._turns.of(request, self.role(request))

    async def _one(self, request: Request, method: Method, arguments: dict[str, Any]) -> Any:
        await self._allow(self.role(request), request, method, arguments)
        work = asyncio.ensure_future(self._call(method, arguments))
        if method.name in protocol.WAITING:
            self._waiting.add(work)
            work.add_done_callback(self._waiting.discard)
        try:
            return await unless_gone(request, work)
        except asyncio.CancelledError:
            if self._stopping:
                raise Refused(503, "the store is stopping; try again", "stopping") from None
            raise

    async def _batch(self, request: Request) -> Response:
        role = self.role(request)
        async with body_in_turn(request, functools.partial(self.turns, request)) as body:
            operations = await body.json(loads, _operations)
            return json_response(
                {"results": await asyncio.gather(*(self._operation(role, request, each) for each in operations))}
            )

    async def _operation(
        self, role: Role, request: Request, operation: tuple[Method, dict[str, Any]] | AglError
    ) -> dict[str, Any]:
        try:
            if isinstance(operation, AglError):
                raise operation
            method, arguments = operation
            await self._allow(role, request, method, arguments)
            if method.name in protocol.WAITING:
                arguments[protocol.WAITING[method.name]] = 0.0
            return {"result": portable(await self._call(method, arguments))}
        except AglError as error:
            return error_json(error)
        except Refused as refused:
            return error_json(refusal(refused))

    async def _call(self, method: Method, arguments: dict[str, Any]) -> Any:
        name = protocol.WAITING.get(method.name)
        if name is not None:
            seconds = arguments[name]
            longest = self.limits.wait_seconds
            arguments[name] = longest if seconds is None else max(0.0, min(seconds, longest))
        request_id = arguments.get("request_id")
        if method.name == "give_back" and request_id is not None:
            self._abandoned[request_id] = None
            while len(self._abandoned) > _KEPT_REQUESTS:
                self._abandoned.popitem(last=False)
        result = await getattr(self.store, method.name)(**arguments)
        if method.name == "dequeue_rollout" and result is not None and request_id in self._abandoned:
            await self.store.give_back(request_id)
            return None
        if isinstance(result, AttemptedRollout):
            self._turns.know(result.secret, result.rollout.rollout_id, result.attempt.attempt)
        return result

    async def _allow(self, role: Role, request: Request, method: Method, arguments: Mapping[str, Any]) -> None:
        """Refuse a method or an argument that is not for runners, or not for this one.

        Raises:
            Refused: 403.
        """
        if role == "operator":
            return
        if method.name not in protocol.RUNNER_METHODS:
            raise Refused(403, f"a runner's key is not good for {method.name}", "forbidden")
        if arguments.get("begun"):
            raise Refused(403, "a runner's key is not good for giving back what has begun", "forbidden")
        written = {(w.rollout_id, w.attempt) for name in ("calls", "spans") for w in arguments.get(name) or ()}
        named = set(written)
        if method.name in ("update_attempt", "heartbeat"):
            named = {(arguments["rollout_id"], arguments["attempt"])}
        for rollout_id, attempt in named:
            if not await self.is_leased(request, rollout_id, attempt):
                raise _not_leased(rollout_id)
        attempts = {rollout_id: await self._attempts(rollout_id) for rollout_id, _ in written}
        for rollout_id, attempt in written:
            if attempt not in (a.attempt for a in attempts[rollout_id] if a.status not in ATTEMPT_TERMINAL):
                raise Refused(403, f"rollout {rollout_id} has no such attempt open", "forbidden")
        if method.name == "get_rollout":
            rollout_id = arguments["rollout_id"]
            leased = [await self.is_leased(request, rollout_id, a.attempt) for a in await self._attempts(rollout_id)]
            if not any(leased):
                raise _not_leased(rollout_id)

    async def is_leased(self, request: Request, rollout_id: str, attempt: int) -> bool:
        """Whether a request shows the secret of an attempt's lease."""
        secrets = lease_secrets(request.headers)
        leased = bool(secrets) and await self.store.is_leased_with(rollout_id, attempt, secrets)
        if leased and len(secrets) == 1:
            self._turns.know(secrets[0], rollout_id, attempt)
        return leased

    async def _attempts(self, rollout_id: str) -> list[Attempt]:
        try:
            return await self.store.query_attempts(rollout_id)
        except NotStoredError:
            return []

    async def _about(self, request: Request) -> Response:
        return answer({"store": "agl", "role": self.role(request)})

    async def _schema(self, _: Request) -> Response:
        return answer(schema(self.keys.operator is not None))

    async def _health(self, _: Request) -> Response:
        return answer({"status": "ok"})


def _operations(batch: Any) -> list[tuple[Method, dict[str, Any]] | AglError]:
    """The methods of a batch with their arguments, or why one cannot be called.

    Raises:
        StoreError: it is no batch.
    """
    operations = batch.get("operations") if isinstance(batch, Mapping) else None
    if not isinstance(operations, list) or len(operations) > protocol.MOST_OPERATIONS:
        raise StoreError(f"operations: not a list of at most {protocol.MOST_OPERATIONS}", hint="see /openapi.json")
    return [_read(operation) for operation in operations]


def _read(operation: Any) -> tuple[Method, dict[str, Any]] | AglError:
    name = operation.get("method") if isinstance(operation, Mapping) else None
    method = protocol.METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        return StoreError(f"the store has no method {name!r}", hint="see /openapi.json")
    try:
        return method, method.read(operation.get("arguments", {}))
    except AglError as error:
        return error


def _not_leased(rollout_id: str) -> Refused:
    return Refused(
        403, f"a runner's key is good for its own leases: {LEASE_HEADER} shows none of {rollout_id}", "forbidden"
    )
