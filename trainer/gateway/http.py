"""What the gateway's routes need of HTTP: the attempt of a request, its body, and the endpoint of any dialect."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agl.tracing.arrivals import RESPONSE_HEADER
from agl.tracing.system_prompts import NamedTexts, replace_system_prompts
from agl.trainer.gateway.access import Access, PendingRequest
from agl.trainer.gateway.calls import Choice, Reply
from agl.trainer.gateway.dialects.base import Dialect, DialectRequest
from agl.trainer.gateway.errors import PromptTooLongError, RequestError, refusal
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http import agent_name as agent_name  # for PREFIX
from agl.trainer.http.auth import key_of
from agl.trainer.http.bodies import media_type, received
from agl.trainer.http.limits import Limits, Refused, check_json, parse_json, setting
from agl.trainer.http.numbers import number_of  # also for PREFIX
from agl.trainer.http.responses import answer as answer
from agl.trainer.http.responses import unless_gone
from agl.trainer.http.turns import LARGE_BYTES

PREFIX = "/rollouts/{rollout}/attempts/{attempt:number}/agents/{agent:agent}/v1"
"""Precedes the path of each route: it identifies the attempt and the agent."""

_KEYED = re.compile(r"(/rollouts/[^/]+/attempts/[0-9]+)/bearer/([^/]+)(/agents/.*)", re.S)

_PLACE = re.compile(r"^/rollouts/[^/]+/attempts/[0-9]+/agents/[^/]*(?=/v1)")

_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-([0-9a-f]{16})-[0-9a-f]{2}$")

_AGL_HEADER = "x-agl-traceparent"
"""Agl's own client sends it."""

_OTHER_BYTES = 64 * 1024
"""What a body may hold in addition to its prompt."""

Endpoint = Callable[[Request], Awaitable[Response]]
Read = TypeVar("Read", bound=DialectRequest[Any])


class KeyInPath:
    """Lets a URL carry its attempt's key, for clients that cannot be given one.

    It is `/rollouts/{rollout}/attempts/{n}/bearer/{key}/agents/...`, and takes precedence over the keys in the headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := _KEYED.fullmatch(scope["path"])):
            attempt, key, rest = found.groups()
            headers = [(n, v) for n, v in scope["headers"] if n not in (b"authorization", b"x-api-key")]
            headers.append((b"authorization", b"Bearer " + key.encode()))
            scope = {**scope, "path": attempt + rest, "raw_path": None, "headers": headers}
        await self.app(scope, receive, send)


def keyed(endpoint: str, key: str) -> str:
    """An endpoint of an attempt, `.../attempts/{n}/agents/...`, with the attempt's key in its path."""
    return endpoint.replace("/agents/", f"/bearer/{key}/agents/", 1)


def generation_endpoint(gateway: Gateway, dialect: Dialect[Any]) -> Endpoint:
    """The endpoint that answers a dialect's requests, whole or as a stream."""

    async def generate(request: Request) -> Response:
        pending = _begin_request(gateway, request, dialect.id_prefix + uuid.uuid4().hex)
        request.state.request_id = pending.response_id
        try:
            dialect_request = await read(gateway, request, pending.access, pending.policy, dialect.read)
            pending.policy = gateway.policy_named(_model(request, dialect_request), pending.policy)
        except Exception as error:
            gateway.refuse(pending, error)
            raise
        if dialect_request.stream:
            return await _stream(gateway, request, dialect, pending, dialect_request)
        replies = await unless_gone(request, gateway.complete(pending, dialect_request.chat))
        body = dialect.answer(pending, gateway.served(pending.policy), dialect_request, replies)
        return Response(body, headers={RESPONSE_HEADER: pending.response_id}, media_type="application/json")

    return generate


async def stored_response(gateway: Gateway, request: Request) -> Response:
    """The endpoint of a stored response: GET returns it, DELETE forgets it.

    Raises:
        RequestError: as `attempt_of`; 404, there is no such response; 400, it is wanted as a stream.
    """
    responses = attempt_of(gateway, request).responses
    response_id = request.path_params["response"]
    if request.method == "DELETE":
        responses.delete(response_id)
        return answer({"id": response_id, "object": "response", "deleted": True})
    if request.query_params.get("stream", "false") != "false":
        why = "stream is not supported for a response that is stored; ask for it whole"
        raise RequestError(400, why, code="unsupported_parameter", param="stream")
    return answer(responses.find(response_id).response)


async def input_items(gateway: Gateway, request: Request) -> Response:
    """The endpoint of what a stored response was asked: a page of its input's items.

    Raises:
        RequestError: as `attempt_of`; 404, there is no such response; 400, the page is not one.
    """
    items = [*attempt_of(gateway, request).responses.find(request.path_params["response"]).input]
    query = request.query_params
    limit = number_of(query.get("limit", "20"))
    if limit is None or not 1 <= limit <= 100:
        why = f"limit is {query['limit']!r}; it is 1 to 100"
        raise RequestError(400, why, code="invalid_value", param="limit")
    if query.get("order", "desc") != "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    if (after := query.get("after")) is not None and after not in ids:
        raise RequestError(400, f"after is {after!r}, which is no item here", code="invalid_value", param="after")
    first = 0 if after is None else ids.index(after) + 1
    page = items[first : first + limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return answer({"object": "list", "data": page, **ends, "has_more": first + len(page) < len(items)})


async def count_tokens(gateway: Gateway, request: Request, reader: Callable[[Any, Access], DialectRequest[Any]]) -> int:
    """How many tokens the policy's rendering makes of a request's prompt; the request is no call.

    Raises:
        RequestError: as `attempt_of`, `read`, and where the messages cannot be rendered.
    """
    access = attempt_of(gateway, request)
    policy = access.selection.policy_for(request.path_params["agent"])
    dialect_request = await read(gateway, request, access, policy, reader)
    chat = dialect_request.chat
    render = gateway.served(gateway.policy_named(_model(request, dialect_request), policy)).rendering.prompt
    try:
        async with access.turns as turn:
            prompt = await turn.run(render, chat.messages, chat.tools, force_tool=chat.force_tool)
    except Exception as error:
        raise refusal(error, request.url.path) from error
    return int(prompt.ids.size)


def attempt_of(gateway: Gateway, request: Request) -> Access:
    """The attempt that a request belongs to.

    Raises:
        RequestError: 401, the key is not that of an open attempt.
    """
    in_query = {"x-goog-api-key": "".join(request.query_params.getlist("key"))}  # where Google's clients may have it
    in_query |= {"origin": page} if (page := request.headers.get("origin")) else {}
    headers = request.headers if key_of(request.headers) else in_query
    return gateway.find_attempt(request.path_params["rollout"], request.path_params["attempt"], headers)


async def read(
    gateway: Gateway, request: Request, access: Access, policy: str | None, reader: Callable[[Any, Access], Read]
) -> Read:
    """A request's body, read by a dialect once its size is known to be within the limits.

    Args:
        access: the request's attempt.
        policy: what will answer.
        reader: `Dialect.read`.

    Raises:
        RequestError: 413 or 400, it is too large or too deep; 415 or 400, it is not JSON; or as `reader`.
        ClientDisconnect: the client hung up.
    """
    limits: Limits = request.app.state.limits
    if media_type(request) != "application/json":
        raise RequestError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
    max_context = gateway.served(policy).engine.max_context
    # Without this header the body can have any size.
    length = int(request.headers.get("content-length", LARGE_BYTES))
    texts = None
    # What agl's own client sends has been replaced before.
    if access.system_prompts is not None and _AGL_HEADER not in request.headers:
        texts = access.system_prompts.get(request.path_params["agent"])
    capture = gateway.capture_content
    if length < LARGE_BYTES:
        return _parse(await _body(request, limits, max_context), limits, access, reader, texts, capture)
    async with access.turns as turn:
        return await turn.run(_parse, await _body(request, limits, max_context), limits, access, reader, texts, capture)


def shown_path(request: Request) -> str:
    """The path of a request as its client knows it: what its base URL adds is left out."""
    return _PLACE.sub("", request.url.path)


def _model(request: Request, dialect_request: DialectRequest[Any]) -> str:
    """The model that a request names: in its URL, as Google's have it, or in its body; "" for none."""
    return request.path_params.get("model") or getattr(dialect_request.body, "model", "") or ""


async def _body(request: Request, limits: Limits, max_context: int) -> bytes:
    try:
        # In the attempt's turn, its uploads come one by one.
        return await received(request, lambda size: _too_large(size, limits, max_context))
    except Refused as refused:
        raise RequestError(refused.status, refused.message, code=refused.code) from None


def _too_large(size: int, limits: Limits, max_context: int) -> RequestError | None:
    if size > limits.request_bytes:
        return RequestError(
            413,
            f"the request has {size} bytes, the limit is {limits.request_bytes}: {setting('request_bytes')}",
            code="request_too_large",
        )
    longest = max_context * limits.bytes_per_token + _OTHER_BYTES
    if size > longest:
        return PromptTooLongError(
            f"the request has {size} bytes; even with {limits.bytes_per_token} bytes in a token it does not fit into a "
            f"context of {max_context} tokens: shorten the history; {setting('bytes_per_token')}",
            limit=max_context,
        )
    return None


def _parse(
    body: bytes,
    limits: Limits,
    access: Access,
    reader: Callable[[Any, Access], Read],
    texts: NamedTexts | None,
    capture_content: bool,
) -> Read:
    try:
        if len(body) >= LARGE_BYTES:
            check_json(body, limits.json_depth, limits.json_values)
        data = parse_json(body, limits.json_depth)
    except Refused as refused:
        raise RequestError(refused.status, refused.message, code=refused.code) from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON that can be read: {error}") from None
    if isinstance(data, dict):
        check_counts(data, limits)
    replaced = None if texts is None else replace_system_prompts(data, texts)
    request = reader(data if replaced is None else replaced.body, access)
    if replaced is not None:
        request = replace(request, chat=replace(request.chat, replaced=replaced.facts(capture_content)))
    # It can continue a stored response.
    _check_count(len(request.chat.messages), "messages", limits)
    return request


def check_counts(data: Mapping[str, Any], limits: Limits) -> None:
    """Refuse a conversation with too many messages or tools.

    Raises:
        RequestError: 413, it has.
    """
    for fields, name in ((("messages", "input", "contents"), "messages"), (("tools",), "tools")):
        _check_count(sum(_count(data.get(field)) for field in fields), name, limits)


def _check_count(count: int, name: str, limits: Limits) -> None:
    most = getattr(limits, name)
    if count > most:
        raise RequestError(
            413,
            f"the request has {count} {name}, the limit is {most}: {setting(name)}",
            code="request_too_large",
            param=name,
        )


def _count(items: Any) -> int:
    """Messages or tools, with the messages' parts and tool calls; Google's API takes one alone."""
    items = [items] if isinstance(items, dict) else items
    if not isinstance(items, list):
        return 0
    names = ("content", "tool_calls", "parts", "functionDeclarations", "function_declarations")
    inner = (item.get(name) for item in items if isinstance(item, dict) for name in names)
    return len(items) + sum(len(value) for value in inner if isinstance(value, list))


def _begin_request(gateway: Gateway, request: Request, response_id: str) -> PendingRequest:
    """Register the arrival of a request; `Gateway.complete` or `refuse` must follow.

    Raises:
        RequestError: 401, the key is not that of an open attempt; 429, the attempt has too many requests running.
    """
    access = attempt_of(gateway, request)
    most = request.app.state.limits.requests_per_attempt
    if len(access.pending) >= most:
        raise RequestError(429, f"the attempt has {most} requests running; try again", code="too_many_requests")
    # Instrumentation of an HTTP client can put its own span into `traceparent`.
    headers = request.headers
    span = _TRACEPARENT.match(headers.get(_AGL_HEADER) or headers.get("traceparent", ""))
    span_id = span.group(1) if span else None
    return gateway.begin_request(access, request.path_params["agent"], response_id, span_id, _retry(headers))


def _retry(headers: Mapping[str, str]) -> int:
    """How often a client had sent a request before, as the SDKs of OpenAI and Anthropic say in every language."""
    return number_of(headers.get("x-stainless-retry-count", "")) or 0


async def _stream(
    gateway: Gateway,
    request: Request,
    dialect: Dialect[Any],
    pending: PendingRequest,
    dialect_request: DialectRequest[Any],
) -> Response:
    """Answer while the tokens are sampled.

    Raises:
        RequestError: the request cannot be served, and nothing was sampled yet; later errors are sent in the stream.
        ClientDisconnect: the client hung up before the first token.
    """
    queue: asyncio.Queue[Choice | None] = asyncio.Queue()

    def on_tokens(choice: Choice, _: Sequence[int]) -> None:
        queue.put_nowait(choice)

    work: asyncio.Task[list[Reply]] = asyncio.ensure_future(gateway.complete(pending, dialect_request.chat, on_tokens))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        # The first tokens decide between a stream and an error with a status code.
        first = await unless_gone(request, queue.get())
        if first is None:
            await work
    except BaseException:
        work.cancel()
        raise
    stream = dialect.stream(pending, gateway.served(pending.policy), dialect_request)

    async def events() -> AsyncIterator[bytes]:
        choice = first
        try:
            while choice is not None:
                for event in stream.push(choice):
                    yield event
                choice = await queue.get()
            for event in stream.finish(await work):
                yield event
        except RequestError as error:
            for event in stream.fail(error):
                yield event

    return _EventResponse(events(), work, dialect.stream_type, pending.response_id)


class _EventResponse(StreamingResponse):
    """A stream; when its events are no longer read, the task that makes them is cancelled."""

    def __init__(
        self, events: AsyncIterator[bytes], work: asyncio.Task[Any], media_type: str, response_id: str
    ) -> None:
        super().__init__(events, headers={RESPONSE_HEADER: response_id}, media_type=media_type)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()
