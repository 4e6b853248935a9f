"""What stands for a strong model behind an API: it uses the calculator and reads its result."""

from __future__ import annotations

import re
from typing import Any

from agl.testing.provider import Reply, last_said


def strong(body: dict[str, Any]) -> Reply:
    """Its next message."""
    role, text = last_said(body)
    if role == "tool":
        return Reply(text)
    problem = re.search(r"\d+ [-+*/] \d+", text)
    return Reply(tools=(("calculator", {"expression": problem[0] if problem else ""}),))
