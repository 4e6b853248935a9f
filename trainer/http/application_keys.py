"""Keys of applications, which call a policy and may do nothing else: kept as hashes, compared in constant time."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agl.errors import ConfigError
from agl.trainer.http.auth import CLIENT_VARIABLE, SHORTEST_KEY, key_hash, key_of, matches
from agl.trainer.http.browsers import is_loopback

APPLICATION = "application"
"""The application's name where its key has none."""


@dataclass(frozen=True, slots=True, repr=False)
class ApplicationKeys:
    """Which application has which key.

    Attributes:
        hashes: application -> the hash of its key; empty where none is needed.
        minted: the key itself, where it was made for the server (`agl.trainer.http.local_key`).
    """

    hashes: Mapping[str, bytes]
    minted: str | None = None

    @classmethod
    def find(cls, key_file: Path | None = None, *, needed: bool = True) -> ApplicationKeys:
        """The keys in a file (a line each: an application's name, a space, its key; or a key alone), else `AGL_KEY` of
        the environment, else a new one.

        Args:
            needed: False for a server that needs none.

        Raises:
            ConfigError: the file cannot be read or has no key, a key is too short, or an application or key is there
                twice; or there is one though none is needed.
        """
        if not needed:
            if key_file is not None:
                raise ConfigError("--no-key and --key-file", hint="leave one of them out")
            return cls({})
        if key_file is not None:
            return cls(_hashes(_lines(key_file), str(key_file)))
        if key := os.environ.get(CLIENT_VARIABLE):
            return cls(_hashes([(APPLICATION, key)], CLIENT_VARIABLE))
        minted = secrets.token_urlsafe(32)
        return cls({APPLICATION: key_hash(minted)}, minted)

    def check_host(self, host: str) -> None:
        """Refuse to listen to other machines without a key that was chosen for them.

        Raises:
            ConfigError: `host` is not loopback, and there is no key.
        """
        if (not self.hashes or self.minted is not None) and not is_loopback(host):
            raise ConfigError(
                f"without a key, anyone who can reach {host} could use this server",
                hint=f"set {CLIENT_VARIABLE} or --key-file, or listen on 127.0.0.1",
            )

    def application(self, headers: Mapping[str, str]) -> str | None:
        """The application that sent a request with these headers (Starlette's); None if the key is unknown."""
        if not self.hashes:
            # A web page that is open on this machine reaches loopback too; it sends its origin.
            return APPLICATION if "origin" not in headers else None
        key = key_of(headers)
        # Always all comparisons, so that the time tells nothing.
        found = [name for name, digest in self.hashes.items() if matches(key, digest)]
        return found[0] if found else None


def _lines(file: Path) -> list[tuple[str, str]]:
    """(application, key) of each line of a key file; empty lines and those that begin with # are left out."""
    try:
        lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file cannot be read: {error}", path=file) from None
    pairs = []
    for number, words in enumerate(lines, 1):
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(
                f"line {number} of the key file has {len(words)} words",
                hint="write an application's name, a space and its key",
                path=file,
            )
        pairs.append((words[0] if len(words) == 2 else APPLICATION, words[-1]))
    if not pairs:
        raise ConfigError("the key file has no key", hint="write an application's name and its key", path=file)
    return pairs


def _hashes(pairs: list[tuple[str, str]], source: str) -> dict[str, bytes]:
    hashes: dict[str, bytes] = {}
    for name, key in pairs:
        if len(key) < SHORTEST_KEY:
            raise ConfigError(
                f"{source}: the key of {name!r} has {len(key)} characters, fewer than {SHORTEST_KEY}",
                hint="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
        digest = key_hash(key)
        if name in hashes:
            raise ConfigError(f"{source}: {name!r} has two keys", hint="give each application a name of its own")
        if digest in hashes.values():
            raise ConfigError(f"{source}: {name!r} has another application's key", hint="give each its own")
        hashes[name] = digest
    return hashes
