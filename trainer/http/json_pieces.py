"""JSON text that is parsed piece by piece: a parser in C keeps the interpreter until it has ended, and 250,000 values
take it a tenth of a second, in which nobody else is answered.

Invariant: the value, or the error, is that of parsing the text at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PIECE = 4_000
"""Brackets and commas of a piece, which takes a few milliseconds."""
_SPACE = b" \t\r\n"
_OPENING, _CLOSING, _COMMA = (np.frombuffer(marks, np.uint8) for marks in (b"[{", b"]}", b","))
_PAIRS = {ord("["): ord("]"), ord("{"): ord("}")}

Load = Callable[[bytes], Any]
"""JSON text -> its value; raises ValueError."""


def parse_in_pieces(body: bytes, depth: int, load: Load, piece: int = PIECE) -> Any:
    """The value of JSON text.

    Args:
        depth: of nesting, at most.
        load: parses a piece.
        piece: brackets and commas of one.

    Raises:
        ValueError: it is not JSON, or nested deeper than `depth`.
    """
    plain = body
    if b"\\" in body:
        plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    text = np.frombuffer(plain, np.uint8)
    # An even number of quotes before a character: it is outside of strings. Parity survives the overflow.
    outside = (np.cumsum(text == ord('"'), dtype=np.uint8) & 1) == 0
    opens = outside & np.isin(text, _OPENING)
    closes = outside & np.isin(text, _CLOSING)
    places = np.flatnonzero(opens | closes | (outside & (text == _COMMA)))
    levels = np.cumsum(opens[places].astype(np.int32) - closes[places])
    if places.size and int(levels.max()) > depth:
        raise ValueError(f"nested more than {depth} deep")
    if places.size <= piece:
        return load(body)
    if levels[-1] != 0 or not outside[-1] or int(levels[:-1].min()) < 1:
        raise ValueError("its brackets do not match")
    if body[: places[0]].strip(_SPACE) or body[places[-1] + 1 :].strip(_SPACE):
        raise ValueError("there is text around its value")
    return _Pieces(body, places, levels, load, piece).container(0, places.size - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """JSON text whose brackets match.

    Attributes:
        body: the text.
        places: of its brackets and commas, int [n].
        levels: of nesting after each, int32 [n].
        load: parses a piece.
        piece: how many brackets and commas it has.
    """

    body: bytes
    places: npt.NDArray[np.intp]
    levels: npt.NDArray[np.int32]
    load: Load
    piece: int

    def container(self, first: int, last: int) -> Any:
        """The list or object between two brackets, by their numbers."""
        opening = self.body[self.places[first]]
        closing = self.body[self.places[last]]
        if _PAIRS.get(opening) != closing:
            raise ValueError("its brackets do not match")
        within = slice(first + 1, last)
        is_comma = np.frombuffer(self.body, np.uint8)[self.places[within]] == _COMMA
        commas = first + 1 + np.flatnonzero(is_comma & (self.levels[within] == self.levels[first]))
        ends = np.concatenate(([first], commas, [last]))
        is_list = opening == ord("[")
        values: Any = [] if is_list else {}
        at = 0
        while at < ends.size - 1:
            # As many members as make a piece; one that has more is parsed in pieces itself.
            until = int(np.searchsorted(ends, ends[at] + self.piece, "right")) - 1
            if until > at:
                members = self._text(ends[at], ends[until])
                if ends.size > 2 and not members.strip(_SPACE):
                    raise ValueError("a value is missing")
                found = self.load(b"[%b]" % members if is_list else b"{%b}" % members)
            else:
                until = at + 1
                found = self._large(int(ends[at]), int(ends[until]), is_list)
            values.extend(found) if is_list else values.update(found)
            at = until
        return values

    def _large(self, before: int, after: int, is_list: bool) -> Any:
        """A list or an object with the one member between two commas or brackets, which is a container."""
        first = before + 1
        last = after - 1
        name = self._text(before, first).strip(_SPACE)
        alone = (self.levels[first:last] > self.levels[before]).all() and not self._text(last, after).strip(_SPACE)
        if not alone or (bool(name) if is_list else not name.endswith(b":")):
            raise ValueError("a comma is missing")
        if is_list:
            return [self.container(first, last)]
        ((key, _),) = self.load(b"{%b0}" % name).items()
        return {key: self.container(first, last)}

    def _text(self, before: int, after: int) -> bytes:
        return self.body[self.places[before] + 1 : self.places[after]]
