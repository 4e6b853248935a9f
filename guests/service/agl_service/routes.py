"""The HTTP API of a training server: data, runs, their progress as server-sent events, and its OpenAPI schema."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from agl.errors import AglError, StoreError
from agl.trainer.http.bodies import body_in_turn, check_json_lines
from agl.trainer.http.errors import describe_error, error_handlers
from agl.trainer.http.limits import Limits, Refused
from agl.trainer.http.openapi import REFERENCE, document, json_content, model_content, operation
from agl.trainer.http.responses import answer
from agl.trainer.http.turns import Turns
from agl_service.run_record import LAST, RunRecord
from agl_service.service import Service

ALIVE_SECONDS = 10.0
"""How often a stream of events sends a comment when nothing else is sent."""


class TrainBody(BaseModel):
    """A request for a run: options that override the server's (docs/service.md lists them)."""

    model_config = ConfigDict(extra="forbid")
    settings: dict[str, Any] = Field(default_factory=dict)
    join: bool = Field(False, description="Join the current run, if its settings agree.")
    resume: bool = Field(False, description="Resume the last run, which was stopped or failed.")


class DataFacts(BaseModel):
    """How many tasks are uploaded."""

    train: int
    test: int


_FACTS = get_type_hints(RunRecord) | {"directory": str} | dict.fromkeys(LAST, float | None)
_FIELDS: Any = {name: (kind, ...) for name, kind in _FACTS.items()} | {"history": (list[dict[str, Any]] | None, None)}
RunFacts = create_model("RunFacts", __doc__="A run.", **_FIELDS)


class ErrorFacts(BaseModel):
    """The one shape of all errors."""

    class Error(BaseModel):
        type: str
        message: str
        hint: str | None = None
        code: str | None = None
        where: dict[str, Any] = Field(default_factory=dict)

    error: Error


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """A route and its description. `body` and `result` are models, media types or None."""

    method: str
    path: str
    summary: str
    handle: Handler
    body: type[BaseModel] | str | None = None
    result: type[BaseModel] | str | None = None
    public: bool = False


def operations(service: Service, facts: Mapping[str, Any], store_schema: Mapping[str, Any]) -> list[Operation]:
    """The API of a service.

    Args:
        facts: for `/health`, in addition to the run's.
        store_schema: the schema of the store's routes.
    """

    turns = Turns()

    async def health(request: Request) -> Response:
        if service.mount.keys.role(request.headers) != "operator":
            return answer({"status": "ok"})
        run = service.current
        return answer({"status": "ok", **facts, "run": run.facts() if run is not None else None})

    async def data(_: Request) -> Response:
        return answer(await asyncio.to_thread(service.data))

    async def upload(request: Request) -> Response:
        split = request.path_params["split"]
        name = request.query_params.get("name") or f"{split}.jsonl"

        def store(content: bytes, limits: Limits) -> int:
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise Refused(400, f"the tasks are not UTF-8: {error}", "invalid_text") from None
            check_json_lines(content, limits)
            return service.upload(split, text, name)

        # It writes a file, however small it is.
        async with body_in_turn(request, turns, large=True) as body:
            return answer({"split": split, "tasks": await body.read(store, body.limits)})

    async def drop(request: Request) -> Response:
        service.drop(request.path_params["split"])
        return answer(await asyncio.to_thread(service.data))

    async def train(request: Request) -> Response:
        async with body_in_turn(request, turns) as body:
            wanted = await body.json(depth=32)
        try:
            train_body = TrainBody.model_validate(wanted)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise Refused(400, f"{where}: {first['msg'].lower()}", "invalid_request") from None
        current = service.current
        run = service.train(train_body.settings, join=train_body.join, resume=train_body.resume)
        return answer(run.facts(), 200 if run is current else 201)

    async def runs(_: Request) -> Response:
        return answer({"runs": [r.facts() for r in service.records.values()]})

    async def run(request: Request) -> Response:
        return answer(service.find(request.path_params["run_id"]).facts(history=True))

    async def result(request: Request) -> Response:
        record = service.find(request.path_params["run_id"])
        if not record.over:
            raise Refused(
                409, f"run {record.run_id} is running, at step {record.step} of {record.steps or '?'}", "run_goes_on"
            )
        return answer(record.facts(history=True))

    async def stop(request: Request) -> Response:
        return answer((await service.stop(request.path_params["run_id"])).facts())

    async def events(request: Request) -> Response:
        record = service.find(request.path_params["run_id"])
        seen = request.headers.get("last-event-id", "")
        return StreamingResponse(
            _events(service, record.run_id, int(seen) if re.fullmatch(r"\d{1,9}", seen) else -1),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    async def policy(request: Request) -> Response:
        root = service.policy_file(request.path_params["run_id"], request.path_params["policy"])
        return answer({"files": {f.name: f.stat().st_size for f in sorted(root.iterdir()) if f.is_file()}})

    async def policy_file(request: Request) -> Response:
        return FileResponse(service.policy_file(**request.path_params))

    async def schema(_: Request) -> Response:
        return answer(openapi(listed, store_schema))

    one = "/runs/{run_id}"
    listed = [
        Operation("GET", "/health", "Whether the server is up; to an operator, its state, too.", health, public=True),
        Operation("GET", "/openapi.json", "This document.", schema, public=True),
        Operation("GET", "/data", "How many tasks there are.", data, result=DataFacts),
        Operation(
            "PUT",
            "/data/{split}",
            "Upload the tasks of `train` or `test`, one JSON value per line.",
            upload,
            body="application/x-ndjson",
        ),
        Operation("DELETE", "/data/{split}", "Delete the tasks of `train` or `test`.", drop, result=DataFacts),
        Operation(
            "POST",
            "/train",
            "Start a run on the tasks, join the current run, or resume the last.",
            train,
            body=TrainBody,
            result=RunFacts,
        ),
        Operation("GET", "/runs", "All runs, oldest first.", runs),
        Operation("GET", one, "A run with its history; `latest` is the last one.", run, result=RunFacts),
        Operation("GET", f"{one}/result", "The same for a run that has ended; 409 before.", result, result=RunFacts),
        Operation("POST", f"{one}/stop", "End a run at its last completed step.", stop, result=RunFacts),
        Operation(
            "GET",
            f"{one}/events",
            "Its progress: events `step`, `state` and, last, `end`.",
            events,
            result="text/event-stream",
        ),
        Operation("GET", f"{one}/policies/{{policy}}", "The files of a trained policy.", policy),
        Operation(
            "GET", f"{one}/policies/{{policy}}/{{name}}", "One of them.", policy_file, result="application/octet-stream"
        ),
    ]
    return listed


def build_app(service: Service, listed: Sequence[Operation], other_routes: Sequence[BaseRoute] = ()) -> Starlette:
    """The ASGI application of an API; every error is JSON of one shape.

    Args:
        service: checks keys.
        listed: its operations.
        other_routes: routes that check keys themselves.
    """

    def route(operation: Operation) -> Route:
        async def handle(request: Request) -> Response:
            if not operation.public:
                service.mount.check(request, "operator")
            return await operation.handle(request)

        return Route(operation.path, handle, methods=[operation.method])

    handlers = error_handlers(_describe, AglError, HTTPException)
    return Starlette(routes=[*map(route, listed), *other_routes], exception_handlers=handlers)


def openapi(listed: Sequence[Operation], store_schema: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAPI 3.1 schema of the operations and the store's routes."""
    paths: dict[str, Any] = dict(store_schema["paths"])
    schemas: dict[str, Any] = dict(store_schema["components"]["schemas"])
    error = _content(ErrorFacts, schemas)
    for listing in listed:
        paths.setdefault(listing.path, {})[listing.method.lower()] = operation(
            listing.summary,
            parameters=[
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)}", listing.path)
            ],
            body=None if listing.body is None else _content(listing.body, schemas),
            result=_content(listing.result or "application/json", schemas),
            failures={"default": "refused"},
            error=error,
            **{"security": []} if listing.public else {},
        )
    return document("agl serve", paths, schemas, security=store_schema["security"])


def _content(kind: type[BaseModel] | str, schemas: dict[str, Any]) -> dict[str, Any]:
    match kind:
        case "application/json":
            return json_content({"type": "object"})
        case str():
            return {kind: {"schema": {} if kind == "application/octet-stream" else {"type": "string"}}}
    schema = kind.model_json_schema(ref_template=REFERENCE)
    schemas.update(schema.pop("$defs", {}))
    schemas[kind.__name__] = schema
    return model_content(kind.__name__)


async def _events(service: Service, run_id: str, seen: int) -> AsyncIterator[bytes]:
    """Steps after `seen`, the run's state when it changes, and the end of the run."""
    record = service.records[run_id]
    sent = None
    while not service.ending:
        stream = service.streams[run_id]
        for entry in [h for h in record.facts(history=True)["history"] if h.get("step", 0) > seen]:
            seen = int(entry["step"])
            yield _event("step", entry, seen)
        state = record.facts()
        if record.over:
            yield _event("end", state)
            return
        yield _event("state", state) if state != sent else b": alive\n\n"
        sent = state
        await stream.changed(ALIVE_SECONDS)


def _event(name: str, data: Any, number: int | None = None) -> bytes:
    head = f"event: {name}\n" if number is None else f"event: {name}\nid: {number}\n"
    return head.encode() + b"data: " + orjson.dumps(data) + b"\n\n"


def _describe(request: Request, error: Exception) -> tuple[Any, int]:
    body, status = describe_error(request, error, unexpected=AglError)
    if isinstance(error, Refused):
        body["error"] |= {"type": "Refused", "code": error.code}
    return body, 400 if isinstance(error, AglError) and not isinstance(error, StoreError) else status
