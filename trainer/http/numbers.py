"""Numbers that clients write: `{name:number}` in a route, and those of queries and headers.

Python refuses to read numbers of thousands of digits, by an error that would be the server's.
"""

from __future__ import annotations

import re

from starlette.convertors import IntegerConvertor, register_url_convertor

_DIGITS = "[0-9]{1,18}"


class Number(IntegerConvertor):
    """A number of at most 18 digits; a path with another is not served."""

    regex = _DIGITS


register_url_convertor("number", Number())


def number_of(text: str) -> int | None:
    """The number that a text is; None for any other text, and for one of more than 18 digits."""
    return int(text) if re.fullmatch(_DIGITS, text) else None
