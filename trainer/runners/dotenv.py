"""The names that a program's `.env` file sets, which libraries such as dotenv read when it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*[=:]", re.MULTILINE)
_OPTION = "--env-file"
"""With which Node, uv and others are told of such a file."""
MOST_BYTES = 1024 * 1024


def dotenv_names(command: Sequence[str], folder: Path) -> frozenset[str]:
    """The variables that `.env` in a folder sets, or a file that the command names."""
    names: set[str] = set()
    for path in (folder / ".env", *(folder / named for named in _named(command))):
        try:
            with path.open("rb") as file:
                text = file.read(MOST_BYTES).decode(errors="replace")
        except OSError:
            continue
        names.update(_ASSIGNED.findall(text))
    return frozenset(names)


def _named(command: Sequence[str]) -> Iterator[str]:
    for word, following in zip(command, [*command[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option in (_OPTION, f"{_OPTION}-if-exists"):
            yield value if equals else following
