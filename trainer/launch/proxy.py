"""What a launched program talks to: it posts spans here, and its model calls pass through to their own provider.

A call passes byte for byte, streams as they come, with the program's own key, which is kept nowhere. The URL holds a
secret, so that no other program can use it, and is good for as long as the program runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agl import semconv
from agl.mdp.spans import Span
from agl.tracing import otlp
from agl.tracing.inferred import SpanInference
from agl.tracing.provider_formats import ResponseAccumulator, asked, settings, tool_results
from agl.tracing.sdk_hooks import GENERATION_PATHS
from agl.trainer.gateway import http
from agl.trainer.gateway.errors import RequestError
from agl.trainer.http.limits import Refused
from agl.trainer.store.base import Store

KEPT_BYTES = 16 * 1024 * 1024
"""How much of an answer is kept for the record; all of it passes."""
CONNECT_SECONDS, SILENT_SECONDS = 20.0, 900.0
"""How long a provider may take to be reached, and to say nothing."""
PROVIDERS = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com"}
"""Where calls go that the environment sends nowhere else."""

_ATTEMPT = "/rollouts/{rollout}/attempts/{attempt:int}"
_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers of one connection (RFC 9110, section 7.6.1), which end here."""
_KEYS = ("authorization", "x-api-key", "api-key")
_READABLE = ("gzip", "deflate", "identity")
"""Encodings of answers that the record can be made from."""


class RecordingProxy:
    """The program's side of an attempt: its secret, its spans, and its calls to providers.

    Args:
        store: where spans go. wire: of the attempt. providers: name -> base URL that calls pass to.
    """

    def __init__(self, store: Store, wire: SpanInference, providers: Mapping[str, str]) -> None:
        self.store, self.wire, self.providers = store, wire, dict(providers)
        self.secret = secrets.token_urlsafe(24)
        self._hash = hashlib.sha256(self.secret.encode()).digest()
        self._open = True
        self._records: set[asyncio.Task[None]] = set()
        timeout = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, follow_redirects=False)
        # Only what the program sends passes, none of this client's own defaults.
        self._client.headers.clear()

    def routes(self) -> list[Route]:
        """What is served beside the gateway."""
        through = f"{_ATTEMPT}/keys/{{key}}/agents/{{agent:path}}"
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
        return [
            Route(f"{_ATTEMPT}/v1/traces", self._spans, methods=["POST"]),
            Route(f"{through}/openai/v1/{{path:path}}", self._openai, methods=methods),
            Route(f"{through}/anthropic/{{path:path}}", self._anthropic, methods=methods),
        ]

    def spans_url(self, base_url: str) -> str:
        """Where the program's spans are posted, with the secret for a bearer key."""
        return f"{base_url}/rollouts/{self.wire.rollout_id}/attempts/{self.wire.attempt}/v1/traces"

    def provider_urls(self, base_url: str, agent: str) -> dict[str, str]:
        """Provider -> the base URL that stands for it."""
        who = urllib.parse.quote(agent, safe="")
        attempt = f"{base_url}/rollouts/{self.wire.rollout_id}/attempts/{self.wire.attempt}"
        url = f"{attempt}/keys/{self.secret}/agents/{who}"
        return {"openai": f"{url}/openai/v1", "anthropic": f"{url}/anthropic"}

    async def close(self) -> None:
        """Let nothing in any more; what passed is in the store."""
        self._open = False
        while self._records:
            await asyncio.gather(*self._records)
        await self._client.aclose()

    def _check(self, request: Request, key: str) -> None:
        path = request.path_params
        good = hmac.compare_digest(hashlib.sha256(key.encode()).digest(), self._hash)
        if not (
            self._open and good and path["rollout"] == self.wire.rollout_id and path["attempt"] == self.wire.attempt
        ):
            raise RequestError(401, "this URL is good for one program only, while it runs", code="invalid_api_key")

    async def _spans(self, request: Request) -> Response:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        self._check(request, key if kind.lower() == "bearer" else "")
        if "json" not in request.headers.get("content-type", ""):
            raise RequestError(415, "spans are taken as JSON: OTEL_EXPORTER_OTLP_PROTOCOL=http/json")
        try:
            spans = otlp.decode(await http.body_of(request), rollout_id=self.wire.rollout_id, attempt=self.wire.attempt)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        await self.store.add_spans(spans)
        return http.answer({})

    async def _openai(self, request: Request) -> Response:
        return await self._pass(request, "openai")

    async def _anthropic(self, request: Request) -> Response:
        return await self._pass(request, "anthropic")

    async def _pass(self, request: Request, provider: str) -> Response:
        self._check(request, request.path_params["key"])
        base = self.providers[provider].rstrip("/")
        body = await _body(request)
        path = f"/{request.path_params['path']}"
        is_call = request.method == "POST" and path.endswith(GENERATION_PATHS[provider])
        call = None
        if is_call and not path.endswith("/count_tokens"):
            call = _Call(self.wire, request, provider, base, body)
            await self._add(call.tools())
        raw = request.scope.get("raw_path", request.url.path.encode()).decode("ascii", "replace")
        # The path as it was written, with its own escapes.
        tail = raw.split("/openai/v1/" if provider == "openai" else "/anthropic/", 1)[1]
        url = f"{base}/{tail}" + (f"?{request.url.query}" if request.url.query else "")
        try:
            answer = await self._client.send(
                self._client.build_request(request.method, url, headers=_onward(request), content=body), stream=True
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"agl run could not reach {_plain(base)}: {type(error).__name__}: {error}"
            if call is not None:
                await self._add([call.span(why)])
            raise RequestError(502, why, code="provider_unreachable") from None
        passed = StreamingResponse(self._relay(answer, call), answer.status_code)
        passed.raw_headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.lower().decode() not in _HOP
        ]
        return passed

    async def _relay(self, answer: httpx.Response, call: _Call | None) -> AsyncIterator[bytes]:
        kept = bytearray()
        error: str | None = None
        finished = False
        try:
            async for chunk in answer.aiter_raw():
                if call is not None and len(kept) < KEPT_BYTES:
                    kept += chunk
                yield chunk
            finished = True
        except httpx.HTTPError as broken:
            error = f"the answer broke off: {type(broken).__name__}: {broken}"
            raise
        finally:
            # Within a request that was cancelled nothing can be awaited.
            if call is not None:
                gone = None if finished else "the client left before the answer's end"
                task = asyncio.ensure_future(self._record(call, answer, bytes(kept), error or gone))
                self._records.add(task)
                task.add_done_callback(self._records.discard)
                if finished:
                    await asyncio.shield(task)
            await asyncio.shield(asyncio.ensure_future(answer.aclose()))

    async def _record(self, call: _Call, answer: httpx.Response, kept: bytes, error: str | None) -> None:
        call.ended = time.time()
        await asyncio.to_thread(call.answered, answer, kept)
        await self._add([call.span(error)])

    async def _add(self, spans: list[Span]) -> None:
        if spans:
            await self.store.add_spans(spans)


class _Call:
    """One call on its way: what it asks, and what its answer says."""

    def __init__(self, wire: SpanInference, request: Request, provider: str, base: str, body: bytes) -> None:
        self.wire, self.provider, self.base = wire, provider, base
        self.agent = request.path_params["agent"]
        self.started = self.ended = time.time()
        self.client = request.headers.get("user-agent")
        self.status: int | None = None
        self.answer = ResponseAccumulator()
        self.keys = [k for name in _KEYS if len(k := request.headers.get(name, "").rpartition(" ")[2]) > 3]
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError:
            parsed = None
        self.body: dict[str, Any] = parsed if isinstance(parsed, dict) else {}

    def tools(self) -> list[Span]:
        """The tools whose results it brings."""
        return self.wire.tools(tool_results(self.body), self.started)

    def answered(self, answer: httpx.Response, kept: bytes) -> None:
        """Read the answer, as much of it as there is."""
        self.status = answer.status_code
        try:
            encoding = answer.headers.get("content-encoding", "identity")
            text = httpx.Response(200, headers={"content-encoding": encoding}, content=kept).content
        except httpx.DecodingError:
            return
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            for data in _events(text):
                self.answer.event(data)
            return
        try:
            self.answer.whole(orjson.loads(text))
        except orjson.JSONDecodeError:
            pass

    def span(self, error: str | None) -> Span:
        """The call's span, with the error of the passage or else the provider's own."""
        content = self.wire.capture_content
        why = error or self.answer.error
        if why is None and self.status is not None and self.status >= 400:
            why = "the provider refused the request"
        if why is not None and self.status is not None and self.status >= 400:
            why = f"{self.status}: {why}"
        facts = {
            **settings(self.body),
            semconv.PROVIDER_NAME: self.provider,
            semconv.CLIENT: self.client,
            semconv.URL: _plain(self.base),
            semconv.WIRE_CALLS: 1,
            "http.response.status_code": self.status,
            **(asked(self.body) if content else {}),
            **self.answer.facts(content),
        }
        facts = {k: self._clean(v) if isinstance(v, str) else v for k, v in facts.items()}
        model = str(self.body.get("model") or "")
        why = None if why is None else self._clean(why)
        span = self.wire.chat(self.agent, model, self.started, max(self.started, self.ended), facts, why)
        self.wire.asks(span, self.answer.tool_calls())
        return span

    def _clean(self, text: str) -> str:
        """Without the program's key, which a provider may repeat in an error."""
        for key in self.keys:
            text = text.replace(key, "[key]")
        return text


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except Refused as refused:
        raise RequestError(refused.status, refused.message, code=refused.code) from None


def _onward(request: Request) -> list[tuple[bytes, bytes]]:
    named = {h.strip().lower() for h in request.headers.get("connection", "").split(",")}
    headers = []
    for name, value in request.headers.raw:
        lower = name.lower().decode("latin-1")
        if lower in _HOP or lower in named or lower in ("host", "content-length"):
            continue
        if lower == "accept-encoding":
            asked_for = [e.strip() for e in value.decode("latin-1").split(",")]
            value = ", ".join(e for e in asked_for if e.partition(";")[0] in _READABLE).encode() or b"identity"
        headers.append((name, value))
    return headers


def _events(stream: bytes) -> list[Any]:
    """The JSON of each server-sent event (WHATWG HTML, section 9.2)."""
    found = []
    for block in stream.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = b"\n".join(line[5:].lstrip() for line in block.split(b"\n") if line.startswith(b"data:"))
        try:
            found.append(orjson.loads(data))
        except orjson.JSONDecodeError:
            continue
    return found


def _plain(url: str) -> str:
    """A URL without the user, password and query that it may hold."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
