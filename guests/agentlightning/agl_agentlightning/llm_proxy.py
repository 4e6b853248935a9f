"""0.3's `LLMProxy`: passes calls to models' own servers, and records them as spans of the attempts in their URLs.

It is the proxy of `agl run`, behind 0.3's URLs and names of models. Calls of policies that are trained go through the
trainer's gateway instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import urllib.parse
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from agl.errors import ConfigError, GatewayError
from agl.mdp.spans import Span
from agl.tracing.inferred import SpanInference
from agl.tracing.provider_formats import json_values
from agl.trainer.gateway.errors import RequestError
from agl.trainer.http.aio import LoopThread
from agl.trainer.http.browsers import is_loopback
from agl.trainer.http.errors import error_handlers
from agl.trainer.http.limits import Limits
from agl.trainer.http.server import HttpServer
from agl.trainer.runners.command_recorder import describe
from agl.trainer.runners.model_requests import NotPermitted, permitted_headers, permitted_query
from agl.trainer.runners.provider_calls import RefusedCalls, is_permitted
from agl.trainer.runners.recording_proxy import RecordingProxy, forwarded_headers
from agl_agentlightning import types as T
from agl_agentlightning.lightning_store import LightningStore
from agl_agentlightning.missing import refuse
from agl_agentlightning.store_server import PythonServerLauncherArgs

__all__ = ["LLMProxy", "get_active_llm_proxy", "set_active_llm_proxy"]

AGENT = "llm_proxy"
"""The agent's name of calls that the proxy records."""
_VLLM = "hosted_vllm"
_BASES = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com/v1"}
_VARIABLES = {"openai": ("OPENAI_BASE_URL", "OPENAI_API_BASE"), "anthropic": ("ANTHROPIC_API_BASE",)}
"""Provider -> the variables that LiteLLM, and so 0.3's proxy, reads its address from."""
_MOST_ATTEMPTS = 256
"""Attempts that are remembered between their calls; beyond that the one that was idle longest is forgotten. Their names
are whatever a URL says."""
_CALLBACKS = ("return_token_ids", "opentelemetry", "logprobs")
_MIDDLEWARES = ("rollout_attempt", "stream_conversion", "message_inspection")


class LLMProxy:
    """A server between agents and models.

    `http://HOST:PORT/rollout/<rollout>/attempt/<attempt>/v1/...` takes OpenAI's and Anthropic's requests, streams too.
    The request's model is looked up in `model_list`; the answer passes unchanged. Of a model behind vLLM the span has
    the token ids that vLLM reports.

    Args:
        port: None takes a free one.
        store: where spans go.
        host: other than this machine's own, the address of the
            resource holds a secret.
        model_list: {"model_name": name, "litellm_params": {"model": "provider/model", "api_base": URL, "api_key": key}}
            each. Providers: openai, anthropic, hosted_vllm and other servers with OpenAI's interface and an api_base.
        launcher_args: host and port, otherwise.
        middlewares, callbacks: 0.3's names, without effect; classes are
            refused.
        litellm_config, num_retries: refused, unless empty: LiteLLM is not used.

    Attributes:
        refused: the calls that were not passed on: those that are no model's.
    """

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[Mapping[str, Any]] | None = None,
        store: LightningStore | None = None,
        host: str | None = None,
        litellm_config: Mapping[str, Any] | None = None,
        num_retries: int = 0,
        num_workers: int = 1,
        launch_mode: str = "thread",
        launcher_args: PythonServerLauncherArgs | None = None,
        middlewares: Sequence[Any] | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> None:
        for name, values, known in (("middlewares", middlewares, _MIDDLEWARES), ("callbacks", callbacks, _CALLBACKS)):
            if unknown := [v for v in values or () if v not in known]:
                raise refuse(f"LLMProxy({name}=[{unknown[0]!r}])", f"the names are {', '.join(known)}")
        if litellm_config or num_retries:
            raise refuse("LLMProxy(litellm_config=, num_retries=)", "set retries in the agent's client")
        if launcher_args is not None and (port is not None or host is not None):
            raise ValueError("host and port stand in launcher_args")
        self.server_launcher_args = launcher_args or PythonServerLauncherArgs(port, host)
        self.store = store
        self.model_list: list[Mapping[str, Any]] = []
        self.update_model_list(model_list or [])
        self.refused = RefusedCalls()
        self._secret = secrets.token_urlsafe(24)
        self._limits = Limits.of_environment()
        self._loop: LoopThread | None = None
        self._server: HttpServer | None = None
        self._attempts: OrderedDict[tuple[str, str], _Attempt] = OrderedDict()

    # -- settings -----------------------------------------------------------------------------------------------------
    def get_store(self) -> LightningStore | None:
        return self.store

    def set_store(self, store: LightningStore) -> None:
        self.store = store

    def update_model_list(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Other models, from now on.

        Raises:
            ConfigError: an entry without a name or a model, or of a provider without an api_base.
        """
        for entry in model_list:
            if not entry.get("model_name") or not dict(entry.get("litellm_params") or {}).get("model"):
                raise ConfigError(f"the model {dict(entry)} has no name", hint="give model_name and litellm_params")
            _destination(entry)
        self.model_list = list(model_list)

    def initialize(self) -> None:
        """Nothing is to be initialised."""

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> T.LLM:
        """The resource of agents: an `LLM` of that attempt, or without ids a `ProxyLLM`, which knows each attempt's.

        Raises:
            ValueError: one id alone, or no model where there are none or several.
        """
        names = {entry["model_name"] for entry in self.model_list}
        if model is None and len(names) != 1:
            raise ValueError(f"{'Multiple' if names else 'No'} models in model_list. Please specify the model.")
        resource = T.ProxyLLM(self.endpoint, model or names.pop(), None, dict(sampling_parameters or {}))
        if rollout_id is None and attempt_id is None:
            return resource
        url = resource.get_base_url(rollout_id, attempt_id)
        return T.LLM(url, resource.model, None, resource.sampling_parameters)

    # -- the server ---------------------------------------------------------------------------------------------------
    @property
    def endpoint(self) -> str:
        """Its address; ConfigError before `start`."""
        if self._server is None:
            raise ConfigError("the proxy has not been started", hint="await llm_proxy.start()")
        return self._server.url if self._is_local else f"{self._server.url}/keys/{self._secret}"

    @property
    def _is_local(self) -> bool:
        return is_loopback(self.server_launcher_args.host or "127.0.0.1")

    def is_running(self) -> bool:
        """Whether it listens."""
        return self._server is not None

    async def start(self) -> None:
        """Listen.

        Raises:
            ValueError: there is no store.
            GatewayError: the port is taken.
        """
        if self.store is None:
            raise ValueError("Store is not set. Please set the store before starting the LLMProxy.")
        args = self.server_launcher_args
        server = HttpServer(
            self._serve, error=GatewayError, host=args.host or "127.0.0.1", port=args.port or 0, limits=self._limits
        )
        # On a separate loop: an agent in this process may block the caller's while it waits for its answer.
        self._loop = LoopThread("agl-llm-proxy")
        try:
            await self._on_loop(server.start())
        except BaseException:
            self._loop.stop()
            raise
        self._server = server
        args.port = server.port
        set_active_llm_proxy(self)

    async def stop(self) -> None:
        """Stop listening, when all calls are recorded. Idempotent."""
        server = self._server
        self._server = None
        if server is not None and self._loop is not None:
            for entry in [*self._attempts.values()]:
                await self._on_loop(entry.forwarder.close())
            self._attempts.clear()
            await self._on_loop(server.stop())
            await asyncio.to_thread(self._loop.stop)

    async def restart(self, *, _port: int | None = None) -> None:
        """Stop, and listen again."""
        await self.stop()
        if _port is not None:
            self.server_launcher_args.port = _port
        await self.start()

    async def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return await asyncio.wrap_future(self._loop.submit(work))

    # -- requests -----------------------------------------------------------------------------------------------------
    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = str(scope.get("path", "")).strip("/").split("/")
        given = "".join(parts[1:2]).encode(errors="backslashreplace")
        known = parts[0] == "keys" and secrets.compare_digest(given, self._secret.encode())
        if known:
            parts = parts[2:]
        if not (known or self._is_local):
            await JSONResponse({"error": {"message": "the proxy's address holds a secret"}}, 401)(scope, receive, send)
            return
        rollout = attempt = "-"  # of no attempt
        if parts[:1] == ["rollout"] and len(parts) > 4 and parts[2] == "attempt":
            rollout = parts[1]
            attempt = parts[3]
            parts = parts[4:]
        if parts[:1] == ["v1"]:
            parts = parts[1:]
        if parts == ["health"]:
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif parts == ["models"]:
            data = [{"id": entry["model_name"], "object": "model"} for entry in self.model_list]
            await JSONResponse({"object": "list", "data": data})(scope, receive, send)
        else:
            entry = self._attempt(rollout, attempt)
            provider = "anthropic/v1" if parts[:1] == ["messages"] else "openai/v1"
            url = entry.forwarder.provider_urls("", AGENT)["openai"]
            base = urllib.parse.urlsplit(url).path.removesuffix("/openai/v1")
            path = f"{base}/{provider}/{'/'.join(parts)}"
            entry.calls += 1
            try:
                await entry.app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
            finally:
                entry.calls -= 1
                await self._forget_idle()

    def _attempt(self, rollout_id: str, attempt_id: str) -> _Attempt:
        key = rollout_id, attempt_id
        if key not in self._attempts:
            try:
                number = T.attempt_number(attempt_id)
            except ConfigError:
                number = 0
            forwarder = _Forwarder(self, rollout_id, number)
            app = Starlette(
                routes=forwarder.call_routes(), exception_handlers=error_handlers(describe, RequestError, HTTPException)
            )
            app.state.limits = self._limits
            self._attempts[key] = _Attempt(forwarder, app)
        self._attempts.move_to_end(key)
        return self._attempts[key]

    async def _forget_idle(self) -> None:
        """Forget the attempts that were idle longest, where there are too many."""
        while len(self._attempts) > _MOST_ATTEMPTS:
            idle = next((key for key, entry in self._attempts.items() if not entry.calls), None)
            if idle is None:
                return
            await self._attempts.pop(idle).forwarder.close()

    def entry(self, model: Any) -> Mapping[str, Any]:
        """The entry of the request's model.

        Raises:
            RequestError: 404, there is none.
        """
        for entry in self.model_list:
            if entry["model_name"] == model:
                return entry
        names = ", ".join(sorted({entry["model_name"] for entry in self.model_list})) or "none"
        raise RequestError(404, f"the proxy has no model {model!r}; it has {names}", code="model_not_found")


@dataclass(eq=False)
class _Attempt:
    """An attempt whose calls come.

    Attributes:
        forwarder: the proxy of its calls.
        app: its routes.
        calls: how many are under way.
    """

    forwarder: _Forwarder
    app: Starlette
    calls: int = 0


class _Forwarder(RecordingProxy):
    """The proxy of one attempt; of no attempt (0), it records nothing."""

    def __init__(self, owner: LLMProxy, rollout_id: str, attempt: int) -> None:
        trace_id = hashlib.sha256(f"{rollout_id}/{attempt}".encode()).hexdigest()[:32]
        super().__init__(self, SpanInference(rollout_id, attempt, trace_id, None), _BASES)
        self._owner = owner

    async def add_spans(self, spans: Sequence[Span]) -> None:
        """Add spans to those of the attempt."""
        if self.inference.attempt and self._owner.store is not None:
            await self._owner.store.agl_store.add_spans(spans)

    def _admit(self, request: Request, provider: str, path: str) -> None:
        # The keys are the proxy's: whoever may call the models has none of them.
        if not is_permitted(provider, request.method, path):
            raise self._owner.refused.refuse(request.method, path)
        try:
            permitted_query(provider, request.url.query)
        except NotPermitted as refused:
            self._owner.refused.note(refused.names)
            raise

    def _route(
        self, provider: str, request: Request, content: bytes, value: Any
    ) -> tuple[str, list[tuple[bytes, bytes]], bytes]:
        data = value if isinstance(value, dict) else {}
        entry = self._owner.entry(data.get("model"))
        base, model, is_vllm = _destination(entry)
        body = orjson.dumps({**data, "model": model, **({"return_token_ids": True} if is_vllm else {})})
        if provider == "anthropic":
            base = base.removesuffix("/v1")
        # One that is not known may choose another of the key's accounts.
        headers, _ = permitted_headers(forwarded_headers(request))
        key = str(entry["litellm_params"].get("api_key") or "none").encode()
        headers.append((b"x-api-key", key) if provider == "anthropic" else (b"authorization", b"Bearer " + key))
        return base, headers, body

    def _further_facts(self, call: Any, answer: httpx.Response, body: bytes) -> dict[str, Any]:
        prompt: list[int] = []
        response: list[int] = []
        for part in json_values(answer, body):
            choices = part.get("choices") if isinstance(part, dict) else None
            if choices:
                prompt = part.get("prompt_token_ids") or choices[0].get("prompt_token_ids") or prompt
                response += choices[0].get("token_ids") or []
        return {T.PROMPT_TOKEN_IDS: prompt, T.RESPONSE_TOKEN_IDS: response} if prompt and response else {}


def _destination(entry: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Base URL and name of a model at its provider, and whether that is vLLM.

    Raises:
        ConfigError: an unknown provider without an api_base.
    """
    options = entry["litellm_params"]
    provider, slash, model = str(options["model"]).partition("/")
    if not slash or provider not in (*_BASES, _VLLM):
        provider = "openai" if not slash else ""
        model = str(options["model"])
    base = options.get("api_base") or next(filter(None, map(os.environ.get, _VARIABLES.get(provider, ()))), None)
    base = base or _BASES.get(provider)
    if base is None:
        raise ConfigError(f"the model {options['model']!r} has no address", hint="give api_base in litellm_params")
    return str(base).rstrip("/"), model, provider == _VLLM


_active: LLMProxy | None = None


def get_active_llm_proxy() -> LLMProxy:
    """The proxy that was started last; ValueError if there is none."""
    if _active is None:
        raise ValueError("Global LLMProxy is not set. Please call llm_proxy.start() first.")
    return _active


def set_active_llm_proxy(proxy: LLMProxy) -> None:
    global _active
    _active = proxy
