"""Keys: who a request comes from. They are kept as SHA-256 hashes, compared in constant time, and written nowhere.

An operator may do everything. A runner leases work and reports on the attempts that it holds. An attempt's key
(`gateway.access`) calls the model for that attempt alone and dies with it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agl.errors import ConfigError
from agl.trainer.http.server import is_loopback

Role = Literal["operator", "runner"]

OPERATOR_VARIABLE, RUNNER_VARIABLE = "AGL_OPERATOR_KEY", "AGL_RUNNER_KEY"
CLIENT_VARIABLE = "AGL_KEY"
"""What a client sends where its URL holds no key."""
SHORTEST_KEY = 16
"""Characters; a shorter key could be guessed."""


def key_hash(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def matches(key: str, kept: bytes) -> bool:
    """Whether it is the key, found out in constant time."""
    return hmac.compare_digest(key_hash(key), kept)


def key_of(headers: Mapping[str, str]) -> str:
    """The key that a request carries: a bearer token or, from Anthropic's clients, `x-api-key`; "" for none.

    A request with two of the same header has none: who stands between could have read the other one.
    """
    bearer = _only(headers, "authorization")
    return bearer[7:] if bearer[:7].lower() == "bearer " else _only(headers, "x-api-key")


def _only(headers: Mapping[str, str], name: str) -> str:
    several: Any = getattr(headers, "getlist", None)
    values = several(name) if several is not None else [headers[name]] if name in headers else []
    return values[0] if len(values) == 1 else ""


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """The hashes of a server's keys; without any, everybody who reaches it is the operator."""

    operator: bytes | None = None
    runner: bytes | None = None

    @classmethod
    def of(cls, operator: str | None = None, runner: str | None = None) -> Keys:
        """From the keys themselves.

        Raises:
            ConfigError: a key is too short, both are the same, or there is a runner's but no operator's.
        """
        for name, key in (("operator", operator), ("runner", runner)):
            if key is not None and len(key) < SHORTEST_KEY:
                raise ConfigError(
                    f"the {name} key has {len(key)} characters, fewer than {SHORTEST_KEY}",
                    hint="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
                )
        if runner is not None and operator is None:
            raise ConfigError("there is a runner key but no operator key", hint=f"set {OPERATOR_VARIABLE} too")
        if runner is not None and runner == operator:
            raise ConfigError("the runner key is the operator key", hint="a runner should not be able to do everything")
        return cls(operator and key_hash(operator), runner and key_hash(runner))  # type: ignore[arg-type]

    @classmethod
    def find(cls, key_file: str | Path | None = None) -> Keys:
        """From a file (the operator's key on the first line, the runner's on the second), else from the environment.

        Raises:
            ConfigError: the file cannot be read or holds no key; or as `of`.
        """
        if key_file is None:
            return cls.of(os.environ.get(OPERATOR_VARIABLE) or None, os.environ.get(RUNNER_VARIABLE) or None)
        try:
            lines = [line.strip() for line in Path(key_file).read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file cannot be read: {error}", path=key_file) from None
        if not 1 <= len(lines) <= 2:
            raise ConfigError(
                f"the key file has {len(lines)} lines",
                hint="the operator's key on the first line, the runner's on a second one",
                path=key_file,
            )
        return cls.of(*lines)

    def check_host(self, host: str) -> None:
        """Refuse to listen to other machines without an operator key.

        Raises:
            ConfigError: `host` is not loopback, and there is no key.
        """
        if self.operator is None and not is_loopback(host):
            raise ConfigError(
                f"without a key this would let everybody in who reaches {host}",
                hint=f"set {OPERATOR_VARIABLE} or --key-file, or listen on 127.0.0.1",
            )

    def role(self, headers: Mapping[str, str]) -> Role | None:
        """Who sent a request with these headers (Starlette's); None for a stranger."""
        if self.operator is None:
            # A web page that is open on this machine sends its origin, and reaches loopback too.
            return "operator" if "origin" not in headers else None
        key = key_of(headers)
        # Both are compared, whichever it is.
        is_operator, is_runner = matches(key, self.operator), matches(key, self.runner or b"")
        return "operator" if is_operator else "runner" if is_runner else None
