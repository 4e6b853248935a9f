"""Keys of servers that were given none: made at each start, and found by this user's programs on this machine.

A key is kept in a file of mode 0600 in the user's state directory, named after the server's address, until the server
stops.
"""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.parse
from collections.abc import Generator
from pathlib import Path

import httpx

from agl.trainer.http.browsers import is_loopback

log = logging.getLogger("agl.server")

_NAMED = ("127.0.0.1", "::1")
"""What "localhost" stands for."""


def directory() -> Path:
    """Where keys are: `$XDG_STATE_HOME/agl/keys`, or `~/.local/state/agl/keys`.

    Raises:
        RuntimeError: this user has no home.
    """
    state = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(state) if state else Path.home() / ".local" / "state") / "agl" / "keys"


def publish(host: str, port: int, key: str) -> None:
    """Write the key of a server at this address. A directory that cannot be written to is logged."""
    try:
        file = _file(host, port)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = file.with_name(f".{file.name}.{os.getpid()}")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(key)
        part.replace(file)
    except (OSError, RuntimeError) as error:
        log.warning("the server's key cannot be left for other programs (%s); give it to them in the URL", error)


def withdraw(host: str, port: int, key: str) -> None:
    """Remove the file, unless it is another server's by now."""
    with contextlib.suppress(OSError, RuntimeError):
        file = _file(host, port)
        if file.read_text() == key:
            file.unlink()


def find(url: str) -> str | None:
    """The key of a server of this user at this URL; None where there is none, or the URL is not this machine's."""
    parts = urllib.parse.urlsplit(url)
    if not is_loopback(parts.hostname or ""):
        return None
    for host in _NAMED if parts.hostname == "localhost" else (str(parts.hostname),):
        with contextlib.suppress(OSError, RuntimeError, UnicodeDecodeError, ValueError):
            return _file(host, parts.port or 80).read_text().strip() or None
    return None


def with_key(url: str, key: str | None) -> str:
    """The URL with a key in it, as clients take it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://:{urllib.parse.quote(key, safe='')}@{rest}" if key else url


def split_key(url: str) -> tuple[str, str | None]:
    """A URL without its key, and the key in it."""
    parts = urllib.parse.urlsplit(url)
    key = urllib.parse.unquote(parts.password or parts.username or "") or None
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), key


class KeyAuth(httpx.Auth):
    """Sends a key: the given one, else that of this user's server at the URL, which a new start of it replaces."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._key = key
        self._local = None if key else find(url)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        key = self._key or self._local
        if key:
            request.headers["authorization"] = f"Bearer {key}"
        response = yield request
        if response.status_code != 401 or self._key:
            return
        found = find(self._url)
        # Another request may have found the new one while this was under way with the old one.
        if found is not None and found != key:
            self._local = found
            request.headers["authorization"] = f"Bearer {found}"
            yield request


def _file(host: str, port: int) -> Path:
    return directory() / f"{host.replace(':', '_')}-{port}"
