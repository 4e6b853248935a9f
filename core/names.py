"""The limit of names that people and programs choose: of rewards, agents with rewards of their own, and policies.

Databases index what is called by them, and an entry of PostgreSQL's index holds 2,704 bytes.
"""

from __future__ import annotations

from agl.errors import AglError

NAME_BYTES = 256
"""The longest name, in UTF-8."""


def is_too_long(name: str) -> bool:
    """Whether a name is beyond the limit."""
    return len(name) > NAME_BYTES or len(name.encode(errors="surrogatepass")) > NAME_BYTES


def require_short(name: str, what: str, error: type[AglError], **where: object) -> None:
    """Raise `error` for a name that is beyond the limit; `what` has it, and `where` it was given."""
    if is_too_long(name):
        n = len(name.encode(errors="surrogatepass"))
        raise error(
            f"the name of {what} is {n} bytes long: {name[:40]!r} ...",
            hint=f"a name has at most {NAME_BYTES} bytes; long texts belong in an explanation, a message or metadata",
            **where,
        )
