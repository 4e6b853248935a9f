"""A client's connection to a server: requests that are repeated until they are answered, and errors as exceptions."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from typing import Any, TypeVar

import httpx
import tenacity

from agl.errors import AglError, ConfigError
from agl.trainer.http.auth import LEASE_HEADER
from agl.trainer.http.errors import to_error
from agl.trainer.http.local_key import KeyAuth, split_key
from agl.trainer.wire.methods import loads

T = TypeVar("T")

CONNECT_SECONDS = 10.0
RESPONSE_SECONDS = 60.0
RETRIED = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the same request can succeed."""
_DEPTH = 250
"""How deep the JSON of an answer may be nested."""


class Unreachable(Exception):
    """There was no response, or one that asks for a retry."""


class Connection:
    """Sends requests to one server. `open` and everything after it run on one event loop.

    Args:
        url: the server's; a key in it is removed.
        key: the default is the URL's, then `default_key`, then the one that
            a server of this user on this machine has made for itself.
        name: what the server is called in errors ("the store").
        error: type of an error that the server does not name.
        hint: what to do if it cannot be reached.
        hints: status -> what to do about that refusal.
        retry_seconds: how long the server may be unreachable.
        retried: statuses after which a request is repeated.
        proxied: whether the proxies that the environment names are used.

    Raises:
        ConfigError: this is no URL of a server.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        name: str,
        error: type[AglError],
        hint: str,
        log: logging.Logger,
        hints: Mapping[int, str] | None = None,
        retry_seconds: float = 60.0,
        retried: Container[int] = RETRIED,
        default_key: str | None = None,
        proxied: bool = False,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"this is not the URL of {name}", hint="http://HOST:PORT, the key in AGL_KEY", host=parts.hostname
            )
        address, key_in_url = split_key(url)
        self.url = address.rstrip("/")
        self.host = parts.hostname
        self.key = (key or key_in_url or default_key or "").strip() or None
        self.name = name
        self.error = error
        self.hint = hint
        self.hints = hints or {}
        self.log = log
        self.retry_seconds = retry_seconds
        self.retried = retried
        self.proxied = proxied
        self._unreachable_since: float | None = None
        self._http: httpx.AsyncClient | None = None

    @property
    def unreachable(self) -> bool:
        """Whether the last request was not answered."""
        return self._unreachable_since is not None

    def open(self) -> None:
        """Make the connection pool, on the event loop that uses it."""
        self._http = httpx.AsyncClient(
            auth=KeyAuth(self.url, self.key),
            timeout=httpx.Timeout(RESPONSE_SECONDS, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
            trust_env=self.proxied,
        )

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def __aenter__(self) -> Connection:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def request(self, method: str, path: str, body: bytes | None = None, **options: Any) -> Any:
        """The response's JSON. `options` as of `send`.

        Raises:
            AglError: the error that the server answered with, or the server cannot be reached.
        """
        return await self.repeated(functools.partial(self.send, method, path, body, **options))

    async def repeated(self, once: Callable[[], Awaitable[T]]) -> T:
        """The result of `once`, which is repeated while it raises `Unreachable`.

        Raises:
            AglError: what `once` raises, or the server cannot be reached.
        """
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Unreachable),
            # Counted from the loss of the server, not per request: a request that waits behind others waits no longer.
            stop=lambda _: (
                self._unreachable_since is not None and time.monotonic() - self._unreachable_since >= self.retry_seconds
            ),
            wait=tenacity.wait_exponential_jitter(initial=0.05, max=3.0, jitter=0.5),
            reraise=True,
        )
        try:
            return await retrying(once)
        except Unreachable as error:
            raise self.lost(error) from None

    def lost(self, why: object) -> AglError:
        """The error to raise for a server that has been unreachable for too long."""
        return self.error(f"{self.name} does not answer: {why}", hint=self.hint, server=self.url)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        wait: float = 0.0,
        secrets: frozenset[str] = frozenset(),
        content_type: str = "application/json",
    ) -> Any:
        """The JSON of the response to one request.

        Args:
            wait: how many seconds the server may wait before it answers.
            secrets: of the leases that it is about.

        Raises:
            Unreachable: there was no response, or one that asks for a retry.
            AglError: the error that the server answered with.
        """
        headers = {"content-type": content_type} | ({LEASE_HEADER: ",".join(sorted(secrets))} if secrets else {})
        async with self.stream(method, path, body, headers=headers, wait=wait) as response:
            data = await response.aread()
        try:
            return loads(data, _DEPTH)
        except ValueError:
            return None

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> AsyncIterator[httpx.Response]:
        """A response whose body is read in the block. Raises as `send`."""
        assert self._http is not None
        timeout = httpx.Timeout(RESPONSE_SECONDS + wait, connect=CONNECT_SECONDS, pool=None)
        url = f"{self.url}{path}"
        try:
            async with self._http.stream(method, url, content=body, headers=headers, timeout=timeout) as response:
                if response.status_code in self.retried:
                    await response.aread()
                    raise Unreachable(f"it answers {response.status_code} {response.reason_phrase}")
                if self._unreachable_since is not None:
                    seconds = time.monotonic() - self._unreachable_since
                    self.log.warning("%s at %s is back after %.1f s", self.name, self.url, seconds)
                    self._unreachable_since = None
                if response.status_code >= 300:
                    await response.aread()
                    raise self._refusal(response)
                yield response
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise self.error(f"{self.url} cannot be asked: {error}", hint="check the address and the key") from None
        except (httpx.TransportError, Unreachable) as error:
            why = str(error) or type(error).__name__
            if self._unreachable_since is None:
                self._unreachable_since = time.monotonic()
                text = "%s at %s does not answer (%s); trying again for %g s"
                self.log.warning(text, self.name, self.url, why, self.retry_seconds)
            raise Unreachable(why) from None

    def result(self, response: Any) -> Any:
        """The result in a method's response.

        Raises:
            AglError: the error in it, or it is none of a method.
        """
        if isinstance(response, Mapping) and "result" in response:
            return response["result"]
        facts = response.get("error") if isinstance(response, Mapping) else None
        if not isinstance(facts, Mapping):
            raise self.error(f"the answer of {self.name} was not understood", hint=f"is {self.url} its URL?")
        raise to_error(facts, self.error)

    def _refusal(self, response: httpx.Response) -> AglError:
        """The error of an answer."""
        try:
            facts = loads(response.content, _DEPTH)["error"]
        except (ValueError, KeyError, TypeError):
            facts = None
        if response.status_code == 401:
            facts = {"message": f"{self.name} does not know this key", "where": {"server": self.url}}
        if not isinstance(facts, Mapping):
            text = f"{self.url} answers {response.status_code}: {response.text[:200]}"
            return self.error(text, hint=f"is this the URL of {self.name}?")
        hint = self.hints.get(response.status_code, facts.get("hint"))
        # A `StoreError` of a server says which server refused something, no more.
        kind = None if facts.get("type") == "StoreError" else facts.get("type")
        return to_error({**facts, "type": kind, "hint": hint}, self.error)
