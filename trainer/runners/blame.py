"""Whose failure an exception is: that of the user's own code, or that of a service, the network or the machine.

Invariant: the type of an exception decides, not where it was caught. A file that is missing, an address that is none
and a client without a key are faults of the program, which would only happen again. A connection that broke, a full
disk and whatever a service answered are not, and what a service could not answer is never a reward.
"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import traceback
import urllib.error
from collections.abc import Iterator
from typing import Any

from agl.agents.causes import causes_of
from agl.errors import (
    AglError,
    AttemptOverError,
    ConfigError,
    DatasetError,
    EngineError,
    GatewayError,
    JudgeError,
    LostCallError,
    ServiceError,
    StoreError,
    UnreadableMessageError,
    is_own_file,
    own_lines,
)
from agl.rewards.function import raised_by
from agl.trainer.runners.command import CommandFailed

SURROUNDINGS = (GatewayError, AttemptOverError, EngineError, JudgeError, LostCallError, ServiceError, StoreError)
"""Errors of agl's that say that something around the user's code failed."""
_WRONG_CALLS = (ConfigError, DatasetError, UnreadableMessageError)
"""Errors of agl's that say what the program has asked of it wrongly."""
_URLLIB = "urllib.error"
_SERVICES = frozenset(
    {
        "aiohttp",
        "anthropic",
        "botocore",
        "google.api_core",
        "google.auth",
        "google.genai",
        "grpc",
        "httpcore",
        "httpcore2",
        "httpx",
        "httpx2",
        "litellm",
        "openai",
        "requests",
        _URLLIB,
        "urllib3",
        "websockets",
    }
)
"""The modules of exceptions that clients of services raise."""
_NOTHING_SENT = frozenset(
    {
        "CookieConflict",
        "CredentialsError",
        "DefaultCredentialsError",
        "InvalidURI",
        "InvalidURL",
        "LocalProtocolError",
        "NoCredentialsError",
        "NonHttpUrlClientError",
        "NoRegionError",
        "ParamValidationError",
        "UnsupportedProtocol",
        "URLRequired",
    }
)
"""Their classes for requests that the program made wrongly. Those that are a `ValueError`, a `TypeError`, a
`LookupError` or a `RuntimeError` too need no name here."""
_BASES = frozenset({"AnthropicError", "OpenAIError"})
"""Classes that mean the same where they are raised themselves, as for a client without a key, and not a subclass."""
_ANSWERS = frozenset({"JSONDecodeError", "RedirectClientError", "UnknownApiResponseError"})
"""Classes that look like the program's fault, and say that a service's answer is of no use."""
_SDK_UNANSWERED = frozenset({"APIConnectionError", "AuthenticationError", "InternalServerError", "RateLimitError"})
"""Classes of SDKs made alike, whatever their module, that say that a model's provider gave no answer."""
_UNANSWERED = frozenset(
    {
        "ChunkedEncodingError",
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectionClosed",
        "ConnectionError",
        "HTTPClientError",
        "NetworkError",
        "ProtocolError",
        "Timeout",
        "TimeoutException",
        "TransportError",
    }
)
"""Such classes of other clients."""
_REFUSED_STATUS = frozenset({401, 403, 407, 408, 429})
"""HTTP status codes of services that might have answered at another time, or with another key; 5xx are the others."""
_NETWORK = (ConnectionError, TimeoutError, socket.gaierror, socket.herror, ssl.SSLError)
_CUT_ANSWERS = (http.client.IncompleteRead, http.client.BadStatusLine)
_OF_MACHINE = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN",
        "EDQUOT",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "EIO",
        "EMFILE",
        "ENETDOWN",
        "ENETRESET",
        "ENETUNREACH",
        "ENFILE",
        "ENOBUFS",
        "ENOMEM",
        "ENOSPC",
        "ESTALE",
    )
    if hasattr(errno, name)
)
"""What the operating system answers when the network or the machine has nothing left; other codes say that the program
has asked for something that is not there, or that it may not have."""


def is_infrastructure(error: BaseException) -> bool:
    """Whether the network or the machine failed, or a service gave no answer, rather than the agent; such a failure
    must never become a reward."""
    if _is_misuse(error):
        return False
    return any(_is_surroundings(raised) or _is_unanswered(raised) for raised in causes_of(error))


def of_service(error: BaseException) -> bool:
    """Whether that is so, or a service answered so, or the exception was raised while that was handled.

    A service that refuses what a reward function asks for (status 404, 422) is right: no policy chose the request.
    """
    if _is_misuse(error) or (raised_by(error) is not None and _is_refused_request(error)):
        return False
    return any(_is_surroundings(raised) or _service(raised) is not None for raised in _involved(error))


def raised_at(error: BaseException) -> str | None:
    """The innermost line of the user's own code that raised, "file:line"; None if more than it may be the cause.

    That is a service, the network or the machine; a command, of which no more is known than that it failed; and agl,
    unless the line itself has raised agl's exception.
    """
    involved = tuple(_involved(error))
    if of_service(error) or any(isinstance(raised, (CommandFailed, *SURROUNDINGS)) for raised in involved):
        return None
    raised = [error]
    while isinstance(group := raised[-1], BaseExceptionGroup):
        raised.append(group.exceptions[0])
    frames = [frame for each in raised for frame in traceback.extract_tb(each.__traceback__)]
    if any(isinstance(raised, AglError) for raised in involved) and not (frames and is_own_file(frames[-1].filename)):
        return None
    own = own_lines(frames)
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def place_of_own(error: AglError) -> str | None:
    """The line of the user's code that raised an exception of agl's, "" if it called agl wrongly; None for neither."""
    return raised_at(error) or ("" if isinstance(error, _WRONG_CALLS) else None)


def _involved(error: BaseException) -> Iterator[BaseException]:
    yield from causes_of(error)
    yield from causes_of(error.__context__)


def _is_surroundings(raised: BaseException) -> bool:
    """Whether the network or the machine failed, as Python tells it."""
    if isinstance(raised, urllib.error.URLError):
        return isinstance(raised.reason, BaseException) and _is_surroundings(raised.reason)
    if isinstance(raised, (*_NETWORK, *_CUT_ANSWERS)):
        return True
    return isinstance(raised, OSError) and raised.errno in _OF_MACHINE


def _is_unanswered(raised: BaseException) -> bool:
    """Whether a service gave no answer, or one that says: not now, or not with this key."""
    names = {cls.__name__ for cls in type(raised).__mro__}
    if names & _SDK_UNANSWERED:
        return True
    if _service(raised) is None:
        return False
    status = _status(raised)
    return bool(names & _UNANSWERED) or (status is not None and (status in _REFUSED_STATUS or status >= 500))


def _is_misuse(error: BaseException) -> bool:
    """Whether a client refused to send what the program asked it to, in one of an exception's causes."""
    for raised in causes_of(error):
        service = _service(raised)
        if service is None:
            continue
        if service == _URLLIB and not isinstance(raised, urllib.error.HTTPError):
            return not _is_surroundings(raised)
        names = {cls.__name__ for cls in type(raised).__mro__}
        if names & _ANSWERS:
            continue
        if names & _NOTHING_SENT or type(raised).__name__ in _BASES:
            return True
        of_program = isinstance(raised, (ValueError, TypeError, LookupError, RuntimeError))
        if of_program and not isinstance(raised, _NETWORK) and _status(raised) is None:
            return True
    return False


def _is_refused_request(error: BaseException) -> bool:
    """Whether a service answered that the request itself is wrong."""
    statuses = [_status(raised) for raised in causes_of(error) if _service(raised) is not None]
    return any(s is not None and 400 <= s < 500 and s not in _REFUSED_STATUS for s in statuses)


def _service(raised: BaseException) -> str | None:
    """The one of `_SERVICES` that an exception's class, or a base of it, comes from; None if there is none."""
    for cls in type(raised).__mro__:
        parts = cls.__module__.split(".")
        for name in (parts[0], ".".join(parts[:2])):
            if name in _SERVICES:
                return name
    return None


def _status(raised: BaseException) -> int | None:
    """The HTTP status that a service answered with, as far as its client's exception says so."""
    response: Any = getattr(raised, "response", None)
    candidates = [getattr(raised, name, None) for name in ("status_code", "status", "code")]
    candidates += [getattr(response, name, None) for name in ("status_code", "status")]
    return next((value for value in candidates if isinstance(value, int)), None)
