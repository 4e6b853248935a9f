"""A proxy for a program: takes its spans, and passes its model calls to their own provider and records them.

Invariant: a call passes byte for byte, except for a system prompt that is replaced, and a stream as it comes, with the
program's own key, which is never stored. The URL holds a secret, so that no other program can use it, and is valid
while the program runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agl import semconv
from agl.mdp.evaluations import evaluated
from agl.mdp.order import next_number
from agl.mdp.spans import Span
from agl.messages import google
from agl.tracing import otlp, propagation
from agl.tracing.inferred import SpanInference
from agl.tracing.provider_formats import ResponseAccumulator, request_messages, settings, tool_results
from agl.tracing.sdk_hooks import COUNTS, GENERATION_PATHS
from agl.tracing.system_prompts import NamedTexts, Replaced, SystemPrompts, replace_system_prompts
from agl.trainer.gateway.errors import RequestError
from agl.trainer.http import agent_name as agent_name  # for `call_routes`
from agl.trainer.http import numbers as numbers  # likewise
from agl.trainer.http.bodies import body_in_turn, json_value, unpacked
from agl.trainer.http.limits import Limits, Refused, limits_of
from agl.trainer.http.responses import answer
from agl.trainer.http.turns import Turns
from agl.trainer.runners.provider_calls import leads_out
from agl.trainer.wire.methods import loads

log = logging.getLogger("agl.recorder")

RECORDED_BYTES = 16 * 1024 * 1024
"""How much of an answer is recorded; all of it passes."""
HELD_BYTES = 256 * 1024 * 1024
"""How much of all answers is held that one program awaits, until they are recorded."""
ANSWER_VALUES = 2_000_000
"""JSON values of an answer that are looked at, in all of its events; fewer in each."""
CONNECT_SECONDS = 20.0
SILENT_SECONDS = 900.0
"""How long a provider may take to accept a connection, and how long it may be silent."""
PROVIDERS = {
    "openai": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "google": "https://generativelanguage.googleapis.com",
}
"""Base URLs of providers for which the environment names no other."""
URLS = {"openai": propagation.OPENAI_URL, "anthropic": propagation.ANTHROPIC_URL, "google": propagation.GOOGLE_URL}
"""The environment variables that name them."""
AZURE = "azure"
"""The provider of Azure's OpenAI clients. It has no URL but the user's own endpoint."""
OLD_OPENAI = "openai-api-base"
"""The provider of clients that read OPENAI_API_BASE. It has no URL but the user's own."""
_USERS = {AZURE: propagation.AZURE_URL, OLD_OPENAI: propagation.OPENAI_OLD_URL}
"""Providers that have no URL but the user's own -> the environment variables that name it."""
_MOUNTS = {
    AZURE: "azure-endpoint",
    OLD_OPENAI: "api-base/v1",
    "openai": "openai/v1",
    "anthropic": "anthropic",
    "google": "google",
}
"""Provider -> what follows the agent's name in the URLs of its calls."""
_CALLS = GENERATION_PATHS | {name: GENERATION_PATHS["openai"] for name in _USERS}
_OTEL_NAMES = {AZURE: "azure.ai.openai", OLD_OPENAI: "openai"}
"""Provider -> its `gen_ai.provider.name`, where that is another."""

_ATTEMPT = "/rollouts/{rollout}/attempts/{attempt:number}"
_CONNECTION_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that belong to one connection and are not forwarded (RFC 9110, section 7.6.1)."""
KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""Headers in which a provider's key can be."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
"""A text in JSON."""
_READABLE_ENCODINGS = ("gzip", "deflate", "identity")
"""Encodings of answers that can be recorded."""


class SpanStore(Protocol):
    """Where spans are added: a `Store`, for one."""

    async def add_spans(self, spans: Sequence[Span]) -> None: ...


def provider_bases(environment: Mapping[str, str]) -> dict[str, str]:
    """Provider -> the base URL that a program with these variables uses."""
    bases = {name: environment.get(URLS[name]) or base for name, base in PROVIDERS.items()}
    return bases | {name: url for name, variable in _USERS.items() if (url := environment.get(variable))}


def client_variables(
    environment: Mapping[str, str], urls: Mapping[str, str], dotenv: Collection[str] = ()
) -> dict[str, str]:
    """The variables that point the clients of a program with this environment at `urls` (`provider_urls`).

    OpenAI's Azure client for JavaScript reads OPENAI_BASE_URL, too: it raises if it also has an endpoint, and sends
    Azure's key there if it has none. LiteLLM prefers it to OPENAI_API_BASE, and would send the key of that server to
    OpenAI. Where that may happen, the variable is not set.

    Args:
        dotenv: the names that a file of the program's sets (`dotenv_names`). Which address the program uses is unknown
            where such a file names it: these are not set either.
    """
    names = URLS | _USERS
    variables = {names[name]: url for name, url in urls.items() if name in names}
    if _without_openai(environment, dotenv) is not None:
        del variables[propagation.OPENAI_URL]
    return {name: url for name, url in variables.items() if name not in _only_in_file(environment, dotenv)}


def left_alone(environment: Mapping[str, str], dotenv: Collection[str] = ()) -> str | None:
    """Which clients of a program with this environment are not redirected, in a sentence; None if all are."""
    reasons = [_without_openai(environment, dotenv)]
    if unknown := _only_in_file(environment, dotenv):
        reasons.append(
            f"clients that read {', '.join(unknown)} from a .env file are not recorded: whether the program reads it "
            "is not known, so nothing else was set; set it in the environment of agl run"
        )
    return "; ".join(filter(None, reasons)) or None


def _only_in_file(environment: Mapping[str, str], dotenv: Collection[str]) -> list[str]:
    """The variables with providers' addresses that a file of the program's sets, and its environment does not."""
    return [name for name in (URLS | _USERS).values() if name in dotenv and not environment.get(name)]


def _without_openai(environment: Mapping[str, str], dotenv: Collection[str]) -> str | None:
    """Why OPENAI_BASE_URL is not set, in a sentence; None if it is."""
    known = {*environment, *dotenv}
    azure = sorted(n for n in known if n.startswith("AZURE_OPENAI_") or n == "OPENAI_API_VERSION")
    if environment.get(propagation.OPENAI_URL):
        return None
    if not azure and (environment.get(propagation.OPENAI_OLD_URL) or propagation.OPENAI_OLD_URL in dotenv):
        return (
            f"clients of OpenAI that do not read {propagation.OPENAI_OLD_URL} are not recorded: some read "
            f"{propagation.OPENAI_URL} in its place, so that was not set; set it to the address that they use"
        )
    if not azure:
        return None
    which = "clients of OpenAI itself"
    if not environment.get(propagation.AZURE_URL):
        which += f" and, without {propagation.AZURE_URL}, of Azure"
    return (
        f"{which} are not recorded: with {', '.join(azure)} in the environment or in .env, the program may have an "
        f"Azure client, which fails with {propagation.OPENAI_URL}. It was not set; set it to {PROVIDERS['openai']} if "
        "there is none"
    )


class RecordingProxy:
    """What one program talks to: takes its spans and forwards its calls to providers.

    Args:
        store: where spans are added.
        inference: makes the spans of the attempt's calls.
        providers: name -> base URL.
        system_prompts: what is put in the place of agents' own.

    Attributes:
        secret: proves that a request is the program's.
        sends_spans: whether agl in the program itself records its calls.
    """

    def __init__(
        self,
        store: SpanStore,
        inference: SpanInference,
        providers: Mapping[str, str],
        system_prompts: SystemPrompts | None = None,
    ) -> None:
        self.store, self.inference, self.providers = store, inference, dict(providers)
        self.system_prompts = system_prompts or {}
        self.secret = secrets.token_urlsafe(24)
        self._hash = hashlib.sha256(self.secret.encode()).digest()
        self._open = True
        self.sends_spans = False
        self._records: set[asyncio.Task[None]] = set()
        self._held_bytes = 0
        self._requests, self._answers = Turns(), Turns()
        timeout = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, follow_redirects=False)
        # Only the program's headers are sent, no defaults of this client.
        self._client.headers.clear()

    def routes(self) -> list[Route]:
        """Routes that are served in addition to the gateway's: those of calls, and one for spans."""
        return [Route(f"{_ATTEMPT}/v1/traces", self._spans, methods=["POST"]), *self.call_routes()]

    def call_routes(self) -> list[Route]:
        """The routes of calls. A program that has no others cannot send spans, and so no rewards."""
        calls = f"{_ATTEMPT}/keys/{{key}}/agents/{{agent:agent}}"
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
        # Azure's first: what follows its endpoint may begin with `openai/v1`.
        return [
            Route(f"{calls}/{mount}/{{path:path}}", partial(self._forward, provider=provider), methods=methods)
            for provider, mount in _MOUNTS.items()
            if provider in self.providers
        ]

    def spans_url(self, base_url: str) -> str:
        """The URL for the program's spans; the secret is the bearer key."""
        return f"{base_url}/rollouts/{self.inference.rollout_id}/attempts/{self.inference.attempt}/v1/traces"

    def provider_urls(self, base_url: str, agent: str) -> dict[str, str]:
        """Provider -> the base URL that the program uses in its place."""
        name = urllib.parse.quote(agent, safe="")
        attempt = f"{base_url}/rollouts/{self.inference.rollout_id}/attempts/{self.inference.attempt}"
        url = f"{attempt}/keys/{self.secret}/agents/{name}"
        return {provider: f"{url}/{_MOUNTS[provider]}" for provider in self.providers}

    async def close(self) -> None:
        """Admit no more requests, and wait until all calls are recorded."""
        self._open = False
        while self._records:
            await asyncio.gather(*self._records)
        await self._client.aclose()

    def _check(self, request: Request, key: str) -> None:
        path = request.path_params
        key_matches = hmac.compare_digest(hashlib.sha256(key.encode()).digest(), self._hash)
        attempt = (self.inference.rollout_id, self.inference.attempt)
        if not (self._open and key_matches and (path["rollout"], path["attempt"]) == attempt):
            raise RequestError(401, "this URL is good for one program only, while it runs", code="invalid_api_key")

    async def _spans(self, request: Request) -> Response:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        self._check(request, key if scheme.lower() == "bearer" else "")
        self.sends_spans = True
        if "json" not in request.headers.get("content-type", ""):
            raise RequestError(415, "spans are taken as JSON: OTEL_EXPORTER_OTLP_PROTOCOL=http/json")
        try:
            async with body_in_turn(request, self._requests) as body:
                # A tool's result may hold half of a character, which JSON can express and UTF-8 cannot.
                spans = await body.json(loads, self._decoded)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        await self.store.add_spans([*spans, *evaluated(spans)])
        return answer({})

    def _decoded(self, export: Any) -> list[Span]:
        return otlp.decode(export, rollout_id=self.inference.rollout_id, attempt=self.inference.attempt)

    async def _forward(self, request: Request, provider: str) -> Response:
        self._check(request, request.path_params["key"])
        _refuse_azure(provider, self.providers[provider], request)
        # The path with the program's own escapes. What follows the agent's name may repeat any part of the URL.
        raw = request.scope.get("raw_path", request.url.path.encode()).decode("ascii", "replace")
        name, _, tail = raw.partition("/agents/")[2].partition(f"/{_MOUNTS[provider]}/")
        place = _Place(provider, urllib.parse.unquote(name), f"/{urllib.parse.unquote(tail)}")
        self._admit(request, provider, f"/{tail}")
        async with body_in_turn(request, self._requests) as body:
            base, headers, content, call = await body.read(self._prepare, request, place)
        if call is not None:
            await self._add(self.inference.tools(call.tool_results, call.started, call.sequence, began=call.sequence))
        url = f"{base}/{tail}" + (f"?{request.url.query}" if request.url.query else "")
        try:
            answer = await self._client.send(
                self._client.build_request(request.method, url, headers=headers, content=content),
                stream=True,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"agl run could not reach {_without_credentials(base)}: {type(error).__name__}: {error}"
            if call is not None:
                await self._add([call.span(why)])
            raise RequestError(502, why, code="provider_unreachable") from None
        response = StreamingResponse(self._relay(answer, call), answer.status_code)
        response.raw_headers = [
            (name.lower(), value)
            for name, value in answer.headers.raw
            if name.lower().decode() not in _CONNECTION_HEADERS
        ]
        return response

    def _admit(self, request: Request, provider: str, path: str) -> None:
        """Refuse a request that is not to be forwarded, before its body is read.

        Args:
            path: what follows the provider's base URL, as it was sent.

        Raises:
            RequestError: it is one.
        """
        if leads_out(path):
            raise RequestError(404, f"{request.method} {path[:200]} leads out of the provider's URL", code="not_found")

    def _prepare(
        self, content: bytes, request: Request, place: _Place
    ) -> tuple[str, list[tuple[bytes, bytes]], bytes, _Call | None]:
        """Base URL, headers and body of the request to the provider, and the call that it is, if it is one.

        Raises:
            RequestError: 413, a system prompt is to be replaced, and the body has too many values; or as `_route`.
        """
        is_call = request.method == "POST" and place.path.endswith(_CALLS[place.provider])
        value, refused = _value(content, request) if is_call else (None, None)
        base, headers, content = self._route(place.provider, request, content, value)
        replaced = None
        if is_call and (texts := self.system_prompts.get(place.agent)) is not None:
            if refused is not None:
                raise RequestError(refused.status, refused.message, code=refused.code)
            content, replaced = _with_system_prompts(content, value, texts)
            value = value if replaced is None else replaced.body
        if not is_call or place.path.endswith(COUNTS):
            return base, headers, content, None
        return base, headers, content, _Call(self.inference, request, place, base, value, replaced)

    def _route(
        self, provider: str, request: Request, content: bytes, value: Any
    ) -> tuple[str, list[tuple[bytes, bytes]], bytes]:
        """The provider's base URL, and the headers and the body to send there. `value`: of a call's JSON."""
        return self.providers[provider].rstrip("/"), forwarded_headers(request), content

    def _further_facts(self, call: _Call, answer: httpx.Response, body: bytes) -> dict[str, Any]:
        """Further attributes of the call's span, of its answer, whose body may be incomplete."""
        return {}

    async def _relay(self, answer: httpx.Response, call: _Call | None) -> AsyncIterator[bytes]:
        recorded = bytearray()
        error: str | None = None
        finished = False
        try:
            async for chunk in answer.aiter_raw():
                if call is not None and len(recorded) < RECORDED_BYTES and self._held_bytes < HELD_BYTES:
                    recorded += chunk
                    self._held_bytes += len(chunk)
                yield chunk
            finished = True
        except httpx.HTTPError as broken:
            error = f"the answer broke off: {type(broken).__name__}: {broken}"
            raise
        finally:
            # A cancelled request cannot await anything, so a task does.
            if call is not None:
                if error is None and not finished:
                    error = "the client left before the answer's end"
                task = asyncio.ensure_future(self._record(call, answer, bytes(recorded), error))
                self._records.add(task)
                task.add_done_callback(self._records.discard)
                if finished:
                    await asyncio.shield(task)
            await asyncio.shield(asyncio.ensure_future(answer.aclose()))

    async def _record(self, call: _Call, answer: httpx.Response, body: bytes, error: str | None) -> None:
        call.ended = call.started + time.monotonic() - call.began
        try:
            async with self._answers as turn:
                await turn.run(self._read_answer, call, answer, body)
        finally:
            self._held_bytes -= len(body)
        await self._add([call.span(error)])

    def _read_answer(self, call: _Call, answer: httpx.Response, body: bytes) -> None:
        plain = httpx.Response(answer.status_code, headers={"content-type": answer.headers.get("content-type", "")})
        try:
            body = unpacked(body, answer.headers.get("content-encoding", ""), call.limits.body_bytes, whole=False)
        except ValueError as unreadable:
            log.warning("an answer of %s is not recorded: %s", call.provider, unreadable)
            body = b""
        call.read_answer(plain, body)
        call.further = self._further_facts(call, plain, body)

    async def _add(self, spans: list[Span]) -> None:
        if spans:
            await self.store.add_spans(spans)


class _Place(NamedTuple):
    """Where a request goes: the provider, the agent whose it is, and the path, without escapes."""

    provider: str
    agent: str
    path: str


class _Call:
    """One forwarded call: its request, and its answer once that is read."""

    def __init__(
        self,
        inference: SpanInference,
        request: Request,
        place: _Place,
        base: str,
        value: Any,
        replaced: Replaced | None,
    ) -> None:
        self.inference = inference
        self.base = base
        self.replaced = replaced
        self.provider = place.provider
        self.agent = place.agent
        self.limits = limits_of(request)
        self.started = self.ended = time.time()
        self.began, self.sequence = time.monotonic(), next_number()
        self.client = request.headers.get("user-agent")
        self.status: int | None = None
        self.answer = ResponseAccumulator()
        self.further: dict[str, Any] = {}
        sent = [request.headers.get(name, "").rpartition(" ")[2] for name in KEY_HEADERS]
        self.keys = [key for key in (*sent, request.query_params.get("key", "")) if len(key) > 3]
        self.settings = settings(value, request.url.path) if isinstance(value, dict) else {}
        body: dict[str, Any] = dict(google.common(value)) if isinstance(value, dict) else {}
        if place.provider == "google":
            body["model"] = place.path.rpartition("/")[2].partition(":")[0]
        self.model = str(body.get("model") or "")
        self.tool_results = tool_results(body)
        self.messages = request_messages(body) if inference.capture_content else {}

    def read_answer(self, answer: httpx.Response, body: bytes) -> None:
        """Read the answer, whose body may be incomplete."""
        self.status = answer.status_code
        self.answer.received(answer, body, answer_reader(self.limits))

    def span(self, error: str | None) -> Span:
        """The call's span, with the error of forwarding it or else the provider's own."""
        content = self.inference.capture_content
        reported = self.answer.error
        if reported is not None and not content:
            reported = "the provider reported an error"
        why = error or reported
        if why is None and self.status is not None and self.status >= 400:
            why = "the provider refused the request"
        if why is not None and self.status is not None and self.status >= 400:
            why = f"{self.status}: {why}"
        facts = {
            semconv.REQUEST_MODEL: self.model,
            **self.settings,
            semconv.PROVIDER_NAME: _OTEL_NAMES.get(self.provider, self.provider),
            semconv.CLIENT: self.client,
            semconv.URL: _without_credentials(self.base),
            semconv.WIRE_CALLS: 1,
            "http.response.status_code": self.status,
            **(self.replaced.facts(content) if self.replaced is not None else {}),
            **self.messages,
            **self.answer.facts(content),
            **self.further,
        }
        facts = {k: self._without_keys(v) if isinstance(v, str) else v for k, v in facts.items()}
        why = None if why is None else self._without_keys(why)
        span = self.inference.chat(self.agent, self.model, self.started, self.ended, facts, why, sequence=self.sequence)
        self.inference.asks(span, self.answer.tool_calls())
        return span

    def _without_keys(self, text: str) -> str:
        """The text without the program's keys, which a provider may repeat in an error."""
        for key in self.keys:
            text = text.replace(key, "[key]")
        return text


def _value(content: bytes, request: Request) -> tuple[Any, Refused | None]:
    """The value of a call's body, and why it is not looked at although it may be JSON; None for either."""
    if "content-encoding" in request.headers:
        return None, None
    try:
        return json_value(content, limits_of(request)), None
    except Refused as refused:
        return None, refused if refused.status == 413 else None


def answer_reader(limits: Limits) -> Callable[[bytes], Any]:
    """What gives the value of each JSON text of one answer, until there are too many: a provider may be hostile, too.

    It raises ValueError.
    """
    left = ANSWER_VALUES

    def load(text: bytes) -> Any:
        nonlocal left
        left -= text.count(b",") + text.count(b"{") + text.count(b"[") + 1
        if left < 0:
            raise ValueError(f"the answer has more than {ANSWER_VALUES} values")
        try:
            return json_value(text, limits, partial(loads, nan=True))
        except Refused as refused:
            raise ValueError(refused.message) from None

    return load


def _with_system_prompts(body: bytes, data: Any, texts: NamedTexts) -> tuple[bytes, Replaced]:
    """The bytes of a request, whose value is `data`, with its system prompts replaced, and what was."""
    replaced = replace_system_prompts(data, texts)
    if not replaced.names:
        return body, replaced
    # The n-th text of the bytes is the n-th of the value, keys included: no other byte has to change.
    strings = [*_strings(data)], [*_strings(replaced.body)]
    literals = [*_STRING.finditer(body)]
    if not len(literals) == len(strings[0]) == len(strings[1]):
        # A prompt in several parts became one, or an object has a key twice.
        return orjson.dumps(replaced.body), replaced
    pieces = []
    end = 0
    for literal, old, new in zip(literals, *strings, strict=True):
        if old != new:
            pieces += [body[end : literal.start()], orjson.dumps(new)]
            end = literal.end()
    return b"".join([*pieces, body[end:]]), replaced


def _strings(value: Any) -> Iterator[str]:
    """Every text of a JSON value with the keys of its objects, in the order in which they are written."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            stack.extend(x for pair in reversed(value.items()) for x in reversed(pair))
        elif isinstance(value, list):
            stack.extend(reversed(value))


def _refuse_azure(provider: str, base: str, request: Request) -> None:
    """Refuse an Azure client's request to OpenAI: Azure's key must not get there.

    Raises:
        RequestError: it is one.
    """
    is_azure = "api-key" in request.headers or "api-version" in request.query_params
    if is_azure and provider == "openai" and base == PROVIDERS["openai"]:
        raise RequestError(
            400,
            f"this is a request of an Azure client, which {propagation.OPENAI_URL} of agl run has pointed here. It was "
            f"not forwarded: set {propagation.AZURE_URL} for agl run, to have it recorded, or AZURE_OPENAI_API_KEY, to "
            "have it left alone",
            code="azure_client",
        )


def forwarded_headers(request: Request) -> list[tuple[bytes, bytes]]:
    """Headers of the request to the provider."""
    connection = {h.strip().lower() for h in request.headers.get("connection", "").split(",")}
    headers = []
    for name, value in request.headers.raw:
        lower = name.lower().decode("latin-1")
        if lower in _CONNECTION_HEADERS or lower in connection or lower in ("host", "content-length"):
            continue
        if lower == "accept-encoding":
            encodings = [e.strip() for e in value.decode("latin-1").split(",")]
            encodings = [e for e in encodings if e.partition(";")[0] in _READABLE_ENCODINGS]
            value = ", ".join(encodings).encode() or b"identity"
        headers.append((name, value))
    return headers


def _without_credentials(url: str) -> str:
    """The URL without user, password and query."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
