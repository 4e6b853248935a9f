"""What only a main thread may do, while rollouts run in other threads.

Of the standard library these are what signals call, `signal.signal` and `signal.set_wakeup_fd`, whatever is made of
them (`loop.add_signal_handler`, asyncio's child watchers, `unittest.installHandler`), and the timers whose signals the
main thread gets. Python refuses the handler. A reward that takes every exception for a wrong answer would then score
each answer 0. So a refusal inside a rollout is noted where it happens, and whoever runs the code asks for it afterwards
(`require_none_refused`). math-verify's limits work: there they are kept without a signal. So does
`asyncio.get_event_loop()`, which makes a loop in a main thread alone: a rollout's thread gets one, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from agl.errors import MainThreadError, own_lines
from agl.tracing import context
from agl.tracing.import_hooks import when_imported

_OF_PROGRAMS = frozenset(
    getattr(signal, name)
    for name in (
        "SIGBREAK",
        "SIGCONT",
        "SIGHUP",
        "SIGINT",
        "SIGPIPE",
        "SIGQUIT",
        "SIGTERM",
        "SIGTSTP",
        "SIGTTIN",
        "SIGTTOU",
        "SIGWINCH",
    )
    if hasattr(signal, name)
)
"""The signals of a whole program and its terminal. Whoever handles these does without where it may not; code that
handles any other, such as the signal of a limit, needs it for what it computes."""
_MATH_VERIFY = ("math_verify.utils", "math_verify.parser", "math_verify.grader", "math_verify.metric")
_ORIGINAL = "_agl_original"
"""The attribute of a replacement that holds what it replaces."""

_refused: ContextVar[list[str] | None] = ContextVar("agl_refused", default=None)
"""What was refused in a block outside rollouts (`watched_outside`)."""
_lock = threading.Lock()
_users = 0
_restore: list[Callable[[], None]] = []


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While open, refusals inside rollouts are noted, and math-verify's limits work. May be nested, in any thread."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _patch()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                while _restore:
                    _restore.pop()()


@contextlib.contextmanager
def watched_outside() -> Iterator[None]:
    """The same for a block outside of rollouts, in which `require_none_refused` may be asked, too."""
    token = _refused.set([])
    try:
        with watched():
            yield
    finally:
        _refused.reset(token)


def require_none_refused(who: str, error: BaseException | None = None, **where: Any) -> None:
    """Raise if something was refused in the current rollout since this was asked last.

    Args:
        who: whose code ran, for the message.
        error: what it raised, if it did not handle the refusal itself.
        where: outside a rollout, where it ran.

    Raises:
        MainThreadError: it was.
    """
    noted = _noted()
    if not noted:
        return
    refused = ", ".join(dict.fromkeys(noted))
    noted.clear()
    if (scope := context.current()) is not None:
        where = {"rollout": scope.rollout.rollout_id, "attempt": scope.rollout.attempt}
    raise MainThreadError(
        f"{who} needs {refused}, which only a main thread may do, and rollouts run in others",
        hint="a limit that a signal sets works in no other thread, and what the code did instead may be wrong. Leave "
        "the limit to Trainer(timeout=), run the work in a subprocess with timeout=, or use a grader of agl.rewards: "
        "MathAnswer and PythonTests have limits of their own",
        **where,
    ) from error


def _noted() -> list[str] | None:
    scope = context.current()
    return _refused.get() if scope is None else scope.rollout.refused


def _note(what: str) -> None:
    if (noted := _noted()) is not None:
        frames = own_lines(traceback.extract_stack(sys._getframe(2)))
        noted.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}" if frames else what)


def _patch() -> None:
    _replace(sys.modules["_signal"], "signal", _noting_signal)
    _replace(signal, "set_wakeup_fd", _noting_wakeup)
    for name in ("alarm", "setitimer"):
        if hasattr(signal, name):
            _replace(signal, name, functools.partial(_refusing_timer, name))
    _restore.append(when_imported(_MATH_VERIFY, _limit_without_signals))
    _restore.append(when_imported(("asyncio.events",), _loop_in_each_thread))
    _restore.append(when_imported(("asyncio.unix_events",), _signals_of_loops))


def _replace(module: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    # A module that imports the name from another one may have ours already.
    found = getattr(module, name)
    original = getattr(found, _ORIGINAL, found)
    replacement: Any = functools.wraps(original)(around(original))
    setattr(replacement, _ORIGINAL, original)
    setattr(module, name, replacement)

    def restore() -> None:
        # Where another library patched over ours, ours stays inside; outside a rollout it does nothing.
        if getattr(module, name) is replacement:
            setattr(module, name, original)

    _restore.append(restore)


def _noting_signal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of `_signal.signal`, which `signal.signal` calls, however it was imported."""

    def noting(number: int, handler: Any) -> Any:
        try:
            return original(number, handler)
        except ValueError:
            if number not in _OF_PROGRAMS and _in_other_thread():
                _note(f"signal.signal({_signal_name(number)})")
            raise

    return noting


def _noting_wakeup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `signal.set_wakeup_fd`, through which event loops hear of signals."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError:
            if _in_other_thread():
                _note("signal.set_wakeup_fd")
            raise

    return noting


def _noting_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loop's `add_signal_handler`, which calls `set_wakeup_fd` whatever the signal is."""

    def noting(loop: Any, number: int, *args: Any) -> Any:
        noted = _noted()
        before = 0 if noted is None else len(noted)
        try:
            return original(loop, number, *args)
        except RuntimeError:
            if noted is not None and _in_other_thread():
                del noted[before:]
                if number not in _OF_PROGRAMS:
                    _note(f"loop.add_signal_handler({_signal_name(number)})")
            raise

    return noting


def _in_other_thread() -> bool:
    return threading.current_thread() is not threading.main_thread()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return str(number)


def _refusing_timer(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Python does not refuse a timer in another thread; but its signal goes to the main one, or ends the process."""

    def refusing(*args: Any) -> Any:
        if _in_other_thread() and any(args[-2:]) and _noted() is not None:
            _note(f"signal.{name}")
            raise ValueError(f"signal.{name} only works in main thread of the main interpreter")
        return original(*args)

    return refusing


def _signals_of_loops(module: str) -> None:
    _replace(sys.modules[module]._UnixSelectorEventLoop, "add_signal_handler", _noting_loop)


def _loop_in_each_thread(module: str) -> None:
    """Have `asyncio.get_event_loop()` make a loop in a rollout's threads, as it does in a main thread."""
    policies = getattr(sys.modules[module], "BaseDefaultEventLoopPolicy", None)
    if policies is None:
        return

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_event_loop(policy: Any) -> Any:
            try:
                return original(policy)
            except RuntimeError:
                if context.current() is None or not _in_other_thread():
                    raise
                loop = policy.new_event_loop()
                policy.set_event_loop(loop)
                weakref.finalize(threading.current_thread(), loop.close)
                return loop

        return get_event_loop

    _replace(policies, "get_event_loop", around)


def _limit_without_signals(module: str) -> None:
    """Have math-verify's `timeout` use a timer in threads that are not the main one."""
    namespace = sys.modules[module]
    if not hasattr(namespace, "timeout"):
        return

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def timeout(timeout_seconds: float | None = 10) -> Callable[..., Any]:
            if not timeout_seconds or timeout_seconds <= 0:
                return original(timeout_seconds)

            def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
                by_signal = original(timeout_seconds)(function)

                def wrapper(*args: Any, **kwargs: Any) -> Any:
                    if not _in_other_thread():
                        return by_signal(*args, **kwargs)
                    from math_verify.errors import TimeoutException

                    with _raised_after(timeout_seconds, TimeoutException):
                        return function(*args, **kwargs)

                return wrapper

            return decorator

        return timeout

    _replace(namespace, "timeout", around)


@contextlib.contextmanager
def _raised_after(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise an exception in this thread's block once it has taken longer, between two instructions of Python."""
    thread = threading.get_ident()
    lock = threading.Lock()
    over = False

    def fire() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))

    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # The exception that has fired is raised here at the latest, as Python looks for one after each call. It is
        # never withdrawn: the interpreter would keep its mark that one waits, check more slowly from then on, and under
        # a profiler or a debugger Python 3.11 would turn for ever.
        with lock:
            over = True
