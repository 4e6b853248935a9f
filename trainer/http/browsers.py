"""ASGI middleware in front of every application that refuses requests of other sites' web pages.

A page whose name its owner points at 127.0.0.1 (DNS rebinding) is of the server's own origin to a browser, and only
the `Host` header shows it. Other pages' requests say `Sec-Fetch-Site: cross-site`.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from agl.trainer.http.limits import Refused

HOSTS_VARIABLE = "AGL_ALLOWED_HOSTS"
"""The variable with further names of a server on loopback, separated by commas, such as a reverse proxy's."""
_LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
"""Names of this machine that no DNS server of others can answer for."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d*)?")


class BrowserCheck:
    """Refuses what other sites' pages send.

    Args:
        app: the application.
        loopback: whether it listens on loopback, where `Host` must be a name of this machine; at
            other addresses, which have keys, it can be any.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool) -> None:
        self.app = app
        self._loopback = loopback
        self._names = {n.strip().lower() for n in os.environ.get(HOSTS_VARIABLE, "").split(",") if n.strip()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refused(scope) if scope["type"] == "http" else None
        if refused is not None:
            raise refused
        await self.app(scope, receive, send)

    def _refused(self, scope: Scope) -> Refused | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if self._loopback and not (len(hosts) == 1 and self._is_known(hosts[0].decode("latin-1"))):
            named = " and ".join(repr(h.decode("latin-1"))[:100] for h in hosts) or "none"
            return Refused(
                403,
                f"the Host header names {named}, not this machine; {HOSTS_VARIABLE} allows further names",
                "forbidden",
            )
        if any(
            name == b"sec-fetch-site" and value.strip().lower() == b"cross-site" for name, value in scope["headers"]
        ):
            return Refused(403, "this server answers no pages of other sites", "forbidden")
        return None

    def _is_known(self, host: str) -> bool:
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return False
        name = match[1].strip("[]")
        return name in _LOCAL_NAMES or name in self._names or is_loopback(name)


@functools.lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
