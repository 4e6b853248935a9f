"""Keys, which identify the sender of a request: kept as SHA-256 hashes, compared in constant time, never written.

An operator may do everything. A runner leases work, and reports on attempts whose lease's secret it shows. An attempt's
key (`gateway.access`) permits calls of the model for that attempt only, and expires with it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agl.errors import ConfigError
from agl.trainer.http.browsers import is_loopback

Role = Literal["operator", "runner"]

OPERATOR_VARIABLE = "AGL_OPERATOR_KEY"
RUNNER_VARIABLE = "AGL_RUNNER_KEY"
CLIENT_VARIABLE = "AGL_KEY"
"""The variable of the key that a client sends if its URL has none."""
LEASE_HEADER = "agl-lease"
"""The header with the secrets of the leases that a runner's request is about, separated by commas."""
MOST_SECRETS = 256
SHORTEST_KEY = 16
"""In characters; a shorter key could be guessed."""


def key_hash(key: str) -> bytes:
    """The hash that is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def matches(key: str, digest: bytes) -> bool:
    """Whether the hash is of this key, compared in constant time."""
    return hmac.compare_digest(key_hash(key), digest)


def key_of(headers: Mapping[str, str]) -> str:
    """The key that a request carries: a bearer token or, from other clients, `x-api-key` or `x-goog-api-key`; "" for
    none.

    A request that has the header twice has no key: a proxy may have checked the other one.
    """
    bearer = _only(headers, "authorization")
    own = _only(headers, "x-api-key") or _only(headers, "x-goog-api-key")
    return bearer[7:] if bearer[:7].lower() == "bearer " else own


def lease_secrets(headers: Mapping[str, str]) -> list[str]:
    """The secrets of leases that a request shows, at most `MOST_SECRETS`."""
    return [secret for part in headers.get(LEASE_HEADER, "").split(",") if (secret := part.strip())][:MOST_SECRETS]


def _only(headers: Mapping[str, str], name: str) -> str:
    several: Any = getattr(headers, "getlist", None)
    values = several(name) if several is not None else [headers[name]] if name in headers else []
    return values[0] if len(values) == 1 else ""


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """The hashes of a server's keys; without any, everyone on this machine is an operator.

    Attributes:
        minted: the operator's key itself, where it was made for the server (`agl.trainer.http.local_key`).
    """

    operator: bytes | None = None
    runner: bytes | None = None
    minted: str | None = None

    @classmethod
    def of(cls, operator: str | None = None, runner: str | None = None) -> Keys:
        """From the keys themselves.

        Raises:
            ConfigError: a key is too short, both are equal, or there is a runner key but no operator key.
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
    def mint(cls) -> Keys:
        """A new operator key, for a server that got none."""
        key = secrets.token_urlsafe(32)
        return cls(key_hash(key), minted=key)

    @classmethod
    def find(cls, key_file: str | Path | None = None) -> Keys:
        """From a file (the operator's key on the first line, the runner's on the second), else from the environment,
        else a new one.

        Raises:
            ConfigError: the file cannot be read or has no key; or as `of`.
        """
        if key_file is None:
            keys = cls.of(os.environ.get(OPERATOR_VARIABLE) or None, os.environ.get(RUNNER_VARIABLE) or None)
            return keys if keys.operator is not None else cls.mint()
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
        if (self.operator is None or self.minted is not None) and not is_loopback(host):
            raise ConfigError(
                f"without a key, anyone who can reach {host} could use this server",
                hint=f"set {OPERATOR_VARIABLE} or --key-file, or listen on 127.0.0.1",
            )

    def role(self, headers: Mapping[str, str]) -> Role | None:
        """The role of the sender of a request with these headers (Starlette's); None if the key is unknown."""
        if self.operator is None:
            # A web page that is open on this machine reaches loopback too; it sends its origin.
            return "operator" if "origin" not in headers else None
        key = key_of(headers)
        # Always both comparisons, so that the time tells nothing.
        is_operator = matches(key, self.operator)
        is_runner = matches(key, self.runner or b"")
        return "operator" if is_operator else "runner" if is_runner else None
