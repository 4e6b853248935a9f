"""Why a request cannot be served: one error, which each dialect writes in its API's form."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from agl.errors import AglError, ContextLengthError, EngineError, RefusedAnswerError
from agl.mdp.faults import ANSWER_REFUSED, CONTEXT_LENGTH

log = logging.getLogger("agl.gateway")

HISTORY = "messages"
"""What errors call the field with the conversation, whatever the API; each API's error form has its own name."""


class RequestError(Exception):
    """A request that cannot be served; `dialects.error_forms` has the words of each API.

    Attributes:
        status: HTTP status.
        message: for the client.
        code: machine-readable.
        param: the field at fault.
        answer: id of the call that gave the answer at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        answer: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.answer = answer


class PromptTooLongError(RequestError):
    """A prompt that does not fit into the context; `agl.mdp.faults` knows it by its code.

    Attributes:
        tokens: of the prompt; None where they were not counted.
        limit: the context's length in tokens; None where only an engine knows it.
    """

    def __init__(
        self, message: str, tokens: int | None = None, limit: int | None = None, *, param: str = HISTORY
    ) -> None:
        super().__init__(400, message, code=CONTEXT_LENGTH, param=param)
        self.tokens = tokens
        self.limit = limit


class OutOfRangeError(RequestError):
    """A number beyond a bound, or a list with more items than it can have.

    Attributes:
        field: its name.
        kind: "integer", "decimal" or "array".
        actual: the number, or how many items there are.
        above: whether that is above the bound.
        bound: the largest or the smallest that is possible.
    """

    def __init__(self, field: str, value: float | Sequence[Any], bound: float, *, above: bool) -> None:
        self.field = field
        self.above = above
        self.bound = _plain(bound)
        if isinstance(value, int | float):
            self.kind = "decimal" if isinstance(bound, float) else "integer"
            self.actual = _plain(value)
            has = f"is {self.actual!s:.40}; it is"
        else:
            self.kind = "array"
            self.actual = len(value)
            has = f"has {self.actual} items; it can have"
        side = "most" if above else "least"
        super().__init__(400, f"{field} {has} at {side} {self.bound}", code="invalid_value", param=field)


_ALL_WHOLE = 2**53
"""From here on, every float is a whole number."""


def _plain(number: float) -> float:
    """A number as one writes it: 2 for 2.0."""
    return int(number) if isinstance(number, float) and number.is_integer() and abs(number) < _ALL_WHOLE else number


class SchemaError(RequestError):
    """A schema that answers cannot be held to.

    Attributes:
        tool: the name of the tool whose arguments the schema is for; None where it is for the answer.
    """

    def __init__(self, message: str, *, code: str | None = None, param: str, tool: str | None = None) -> None:
        super().__init__(400, message, code=code, param=param)
        self.tool = tool


def invalid_key(rollout_id: str, attempt: int) -> RequestError:
    """The refusal of a wrong key; an attempt that is not open gets the same, so that nothing can be probed."""
    return RequestError(
        401,
        f"the key is not valid for rollout {rollout_id}, attempt {attempt}; keys end with their attempt",
        code="invalid_api_key",
    )


def refusal(error: Exception, request: str = "without an id") -> RequestError:
    """An error as the client gets it; one that nobody expected is logged as that of this request."""
    match error:
        case RequestError():
            return error
        case ContextLengthError():
            return PromptTooLongError(error.message)
        case EngineError():
            return RequestError(503, error.message, code="engine_error")
        case RefusedAnswerError():
            call = str(error.where["call"])
            return RequestError(400, str(error), code=ANSWER_REFUSED, param=HISTORY, answer=call)
        case AglError():
            return RequestError(400, str(error), code="invalid_request")
        case RecursionError():
            return RequestError(400, "the request is nested too deep", code="invalid_request")
    log.exception("request %s failed", request, exc_info=error)
    return RequestError(500, f"{type(error).__name__}: {error}", code="internal_error")
