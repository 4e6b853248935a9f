"""The surroundings of user code: what its program has set up reaches agl's threads, and what it sets stays with it.

Every thread of agl's in which user code runs begins with `start_thread`, every task on another loop in `copied()`.
What belongs to a thread (`threading.local`, `torch.no_grad`, a SQLite connection) or to a process cannot be carried.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable


def copied() -> contextvars.Context:
    """A copy of this context for code that runs elsewhere: it sees what is set here, and sets nothing here."""
    context = contextvars.copy_context()
    # The variable of `decimal` holds an object that programs change in place.
    if (decimal := sys.modules.get("decimal")) is not None:
        context.run(lambda: decimal.setcontext(decimal.getcontext().copy()))
    # anyio notes in a variable which event loop runs here. There it is another one, or none.
    if (sniffio := sys.modules.get("sniffio")) is not None:
        context.run(sniffio.current_async_library_cvar.set, None)
    return context


def start_thread(function: Callable[[], object], name: str) -> threading.Thread:
    """Run a function in a daemon thread, in a copy of this context; a thread that hangs keeps no process alive."""
    thread = threading.Thread(target=copied().run, args=(function,), name=name, daemon=True)
    thread.start()
    return thread
