"""Limits on a chat template, which comes with a model and is a program: how long it may compute, and how much it makes.

Jinja compiles a template to a Python function, whose lines are counted while it runs.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from agl.errors import ModelLoadError

LINES = 2_000_000
"""Lines of a compiled template that one rendering may execute; real templates take some thousands."""
MEMORY_BYTES = 1 << 30
"""How much the process may grow meanwhile."""
_TEMPLATE = "<template>"
"""The file of the code that Jinja compiles."""
_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes that `ru_maxrss` counts in."""


@contextlib.contextmanager
def within_limits() -> Iterator[None]:
    """Within the block, in this thread, a template that exceeds a limit is ended.

    Raises:
        ModelLoadError: it does, or there is not enough memory for what it makes.
    """
    lines, before = 0, _peak()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines > LINES:
            raise _refusal(f"executes more than {LINES:,} lines to render a short conversation")
        if _peak() - before > MEMORY_BYTES:
            raise _refusal(f"takes more than {MEMORY_BYTES >> 20} MiB to render a short conversation")
        return count

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename == _TEMPLATE else None

    debugger = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except MemoryError:
        raise _refusal("takes more memory than there is to render a short conversation") from None
    finally:
        sys.settrace(debugger)
    if _peak() - before > MEMORY_BYTES:
        raise _refusal(f"takes more than {MEMORY_BYTES >> 20} MiB to render a short conversation")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def _refusal(what: str) -> ModelLoadError:
    return ModelLoadError(
        f"the model's chat template {what}", hint="look at it: it is no usual one; another is set by chat_template="
    )
