"""An engine over HTTP: samples from the model of any `vllm serve`, token ids in and token ids out.

Invariant: it returns the ids that the server drew, and their log-probs under the distribution that they were drawn
from. A request for which the server would report other log-probs is refused.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import orjson
import tenacity

from agl.errors import ConfigError, EngineError, nearest
from agl.mdp.types import FloatArray, IntArray
from agl.options import checked_options
from agl.trainer.engines.base import (
    Completion,
    OnTokens,
    Request,
    Sampling,
    ServedModel,
    check_prompt,
    check_sampling,
)
from agl.trainer.engines.vllm_answers import (
    FLAG,
    PROBE_TOP,
    SEE_LOG,
    LogprobKind,
    Part,
    choice,
    completion,
    logprob_kind,
    refusal,
    shown,
)

CONNECT_SECONDS = 20.0
"""How long connecting may take."""
IDLE_SECONDS = 2.0
"""How long an unused connection stays open: less than the 5 s after which vLLM closes it."""
TRIES = 5
"""How often a request is sent that the server does not accept."""


@checked_options
class VLLMEngine(ServedModel):
    """The model of a `vllm serve` (0.10.2 or newer), as an `agl.trainer.engines.Engine`.

    Requests go to `/v1/completions` with token ids. Only the request's sampling parameters apply: what the server or
    the model's generation_config.json would add (repetition penalty, min-p, an end at the end-of-text token) is
    switched off. An answer is streamed only with `on_tokens`, since streaming costs both sides more. Cancelling a call
    closes its connection, and the server stops sampling.

    **Log-probs.** By default vLLM reports those of the model's unchanged distribution, before temperature, top-k and
    top-p (`--logprobs-mode raw_logprobs`). They cannot be corrected from what is reported. Such a server is therefore
    used only at temperature 1 or 0 without top-k and top-p, where both kinds are the same; other requests are refused.
    Start it with `--logprobs-mode processed_logprobs` to sample with any parameters. Two one-token requests before the
    first answer measure which of the two a server reports; a server that reports logits is refused. vLLM accepts
    temperatures up to 2, and samples those between 0 and 0.01 at 0.01.

    **Stop texts** are matched by the server, with the model's tokenizer. A server with speculative decoding may keep
    tokens after the one that completes the text: those that it accepted in the same step.

    Args:
        url: of the server, with or without `/v1`.
        model: one of the names that it serves (such as a LoRA adapter's); None takes its base model.
        api_key: of `vllm serve --api-key`; VLLM_API_KEY if None.
        version: of the weights; set the attribute when the server has loaded other weights.
        timeout: how long the server may send nothing, in seconds: until a whole answer, or between streamed tokens.
        uds: path of the Unix socket of `vllm serve --uds`, which takes the place of the URL's host and port.

    Attributes:
        url, version: as above.
        model: the served name.
        root: directory or hub id of the base model; None until `connect`.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        version: int = 0,
        timeout: float = 600.0,
        uds: str | None = None,
    ) -> None:
        self.url = _base_url(url)
        self.model = model
        self.root: str | None = None
        self.version = version
        self._key = api_key or os.environ.get("VLLM_API_KEY")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=timeout)
        self._uds = uds
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connect_lock = asyncio.Lock()
        self._max_context: int | None = None
        self._logprob_kind: LogprobKind | None = None

    def __repr__(self) -> str:
        return f"VLLMEngine({self.url!r}, {self.model!r})"

    @property
    def tokenizer(self) -> str | None:
        """`root`."""
        return self.root

    @property
    def max_context(self) -> int:
        """Longest prompt + answer, in tokens.

        Raises:
            EngineError: not connected yet.
        """
        if self._max_context is None:
            raise EngineError(
                f"{self.url} has not been asked yet which model it serves", hint="await engine.connect() first"
            )
        return self._max_context

    async def connect(self) -> None:
        """Ask the server what it serves. Idempotent; `generate` connects if needed.

        Raises:
            ConfigError: it does not serve `model`, or refuses the key.
            EngineError: it cannot be reached, or is not vLLM.
        """
        session = self._connections()
        if self._max_context is not None:
            return
        async with self._connect_lock:
            if self._max_context is None:
                self._choose_model(await self._request(session, "GET", "/v1/models"))

    async def close(self) -> None:
        """Close the connections; calls that use them fail. Idempotent; the engine may be connected again."""
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> VLLMEngine:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        """Sample one answer; see `agl.trainer.engines.Engine.generate`.

        `request.policy` is ignored, since one model is served here. `request.session` is sent as `X-Session-ID`, by
        which routers keep a conversation on one server.

        Raises:
            ConfigError: a parameter that vLLM refuses, or with which it would report other log-probs.
        """
        sampling = request.sampling
        check_sampling(sampling)
        await self.connect()
        prompt = check_prompt(request.prompt_ids, self.max_context)
        await self._check_logprobs(prompt, sampling)
        version = self.version
        body = self._body(prompt, sampling)
        headers = {"X-Session-ID": request.session} if request.session else {}
        if on_tokens is None:
            parts = [Part(await self._whole_choice(body, headers), sampling.top_logprobs)]
        else:
            parts = await self._streamed_parts(body, headers, sampling.top_logprobs, on_tokens)
        if parts and not np.array_equal(parts[0].prompt_ids, prompt):
            raise EngineError(
                f"the server sampled after another prompt ({len(parts[0].prompt_ids)} tokens instead of {prompt.size})",
                hint="something between here and vLLM rewrites requests: give its own URL",
                url=self.url,
            )
        return completion(parts, version)

    async def tokenize(self, text: str) -> list[int] | None:
        """`text` as the server tokenises it, without added tokens; None if it has no such endpoint."""
        await self.connect()
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            return orjson.loads(await self.post("/tokenize", body))["tokens"]
        except (ConfigError, KeyError):
            return None

    async def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]`, T >= 2, under the model's unchanged distribution.

        Raises:
            ContextLengthError: T tokens leave no room in the context for one more.
            EngineError: the server failed, or left some out.
        """
        await self.connect()
        ids = check_prompt(token_ids, self.max_context)
        body = {**self._body(ids, Sampling(max_tokens=1)), "prompt_logprobs": 0}
        positions = (await self._whole_choice(body, {})).get("prompt_logprobs") or []
        try:
            # The first token has none.
            found = [p[str(token)]["logprob"] for p, token in zip(positions[1:], ids[1:].tolist(), strict=True)]
        except (KeyError, TypeError, ValueError):
            raise EngineError("the server returns no log-probs of the prompt", hint=SEE_LOG, url=self.url) from None
        return np.asarray(found, np.float32)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The response to a POST to one of the server's other endpoints.

        Raises:
            ConfigError, EngineError: it refuses or fails.
        """
        return await self._request(self._connections(), "POST", path, orjson.dumps(body or {}))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _connections(self) -> aiohttp.ClientSession:
        """The connections of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            if self._uds is None:
                connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            else:
                connector = aiohttp.UnixConnector(self._uds, limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=headers)
            self._loop, self._connect_lock = loop, asyncio.Lock()
        return self._session

    async def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, data: bytes | None = None, headers: Any = None
    ) -> bytes:
        """The body of a successful response; a request that the server does not accept is sent again."""

        async def once() -> bytes:
            try:
                async with session.request(method, self.url + path, data=data, headers=headers) as response:
                    return await _good_body(response)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise self._connection_error(error) from error

        return await _retrying()(once)

    async def _whole_choice(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """The answer to a request without streaming."""
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return choice(await self._request(self._connections(), "POST", "/v1/completions", data, headers))

    async def _streamed_parts(
        self, body: Mapping[str, Any], headers: Mapping[str, str], top: int, on_tokens: OnTokens
    ) -> list[Part]:
        """The parts of an answer; `on_tokens` is called with each as it comes."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        data = orjson.dumps({**body, **streamed}, option=orjson.OPT_SERIALIZE_NUMPY)
        session = self._connections()
        parts = []

        async def begin() -> aiohttp.ClientResponse:
            try:
                response = await session.post(f"{self.url}/v1/completions", data=data, headers=headers)
                if response.status != 200:
                    async with response:
                        await _good_body(response)
                return response
            except (aiohttp.ClientError, TimeoutError) as error:
                raise self._connection_error(error) from error

        # Leaving a stream before its end closes the connection, which ends the sampling.
        async with await _retrying()(begin) as response:
            try:
                async for event in _events(response.content):
                    part = Part(choice(event), top)
                    parts.append(part)
                    if part.ids:
                        on_tokens(part.ids, part.logprobs, *([part.top] if part.top else ()))
            except (aiohttp.ClientError, TimeoutError) as error:
                n = sum(len(part.ids) for part in parts)
                raise EngineError(
                    f"the answer broke off after {n} tokens: {_describe(error)}", hint=SEE_LOG, url=self.url
                ) from error
        return parts

    def _connection_error(self, error: Exception) -> EngineError:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return _NotAccepted(
                f"{self.url} cannot be reached: {_describe(error)}",
                hint="is `vllm serve` running there, on an address that this machine reaches (--host)?",
            )
        if isinstance(error, TimeoutError):
            return EngineError(
                f"{self.url} was silent for {self._timeout.sock_read:g} s",
                hint="raise VLLMEngine(timeout=), or allow fewer requests at once",
            )
        return EngineError(f"the connection to {self.url} broke: {_describe(error)}", hint=SEE_LOG)

    def _choose_model(self, body: bytes) -> None:
        """Set model, root and context length from the answer of `/v1/models`."""
        try:
            cards = {card["id"]: card for card in orjson.loads(body)["data"]}
            base = next(card for card in cards.values() if card.get("max_model_len"))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, StopIteration):
            raise EngineError(
                f"{self.url}/v1/models is not that of a vLLM server: {shown(body)}",
                hint="give the URL of a `vllm serve`, such as http://gpu:8000",
            ) from None
        name = self.model or base["id"]
        if name not in cards:
            raise ConfigError(f"{self.url} serves no model {name!r}", hint=nearest(name, cards))
        # A LoRA adapter's card has no context length, and its directory no tokenizer.
        card = cards[name] if cards[name].get("max_model_len") else base
        self.model, self.root, self._max_context = name, card.get("root") or card["id"], int(card["max_model_len"])

    def _body(self, prompt: IntArray, sampling: Sampling) -> dict[str, Any]:
        """The request's JSON, with every parameter that has a default in the server or in generation_config.json."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": min(sampling.max_tokens, self.max_context - prompt.size),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "watermarking": False,
            "ignore_eos": True,
            "stop": sampling.stop,
            "stop_token_ids": sampling.stop_token_ids,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "seed": sampling.seed % 2**63,
            "logprobs": sampling.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        } | ({"structured_outputs": {"grammar": sampling.grammar}} if sampling.grammar else {})

    async def _check_logprobs(self, prompt: IntArray, sampling: Sampling) -> None:
        """Refuse sampling parameters for which the server would report other log-probs."""
        kind = self._logprob_kind
        if kind is None:
            async with self._connect_lock:
                kind = self._logprob_kind = self._logprob_kind or await self._measure_logprobs(prompt)
        unchanged = sampling.temperature == 0 or (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
        if kind != "processed" and not unchanged:
            raise ConfigError(
                f"{self.url} reports the model's own log-probs, not those of the distribution that it draws from at "
                f"temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k}",
                hint=f"start it with `vllm serve ... {FLAG}`, or sample at temperature 1 without top-p and top-k",
            )

    async def _measure_logprobs(self, prompt: IntArray) -> LogprobKind | None:
        probes = [Sampling(max_tokens=1, temperature=t, top_logprobs=PROBE_TOP) for t in (1.0, 2.0)]
        parts = [Part(await self._whole_choice(self._body(prompt, probe), {}), PROBE_TOP) for probe in probes]
        return logprob_kind(*parts)


class _NotAccepted(EngineError):
    """A request that the server did not accept, so that nothing was sampled."""


def _retrying() -> tenacity.AsyncRetrying:
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(_NotAccepted),
        stop=tenacity.stop_after_attempt(TRIES),
        wait=tenacity.wait_exponential_jitter(initial=0.2, max=5.0),
        reraise=True,
    )


async def _good_body(response: aiohttp.ClientResponse) -> bytes:
    """The body of a response with status 200.

    Raises:
        AglError: the server refuses the request; `_NotAccepted` where it is too busy or not ready.
    """
    body = await response.read()
    origin = response.url.origin()
    if response.status in (429, 503):
        raise _NotAccepted(
            f"{origin} takes no requests now ({response.status}): {shown(body)}",
            hint="wait until it is ready, or allow fewer requests at once",
        )
    if response.status != 200:
        error = refusal(response.status, body)
        raise type(error)(error.message, hint=error.hint, url=str(origin))
    return body


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The JSON of each server-sent event; vLLM writes each on one line, of any length."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield line[6:]


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is not the URL of a server", hint="for example http://gpu:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
