"""Why a request cannot be served: one error, which each dialect writes in its API's form."""

from __future__ import annotations

import logging

from agl.errors import AglError, ContextLengthError, EngineError, RefusedAnswerError
from agl.mdp.faults import ANSWER_REFUSED, CONTEXT_LENGTH

log = logging.getLogger("agl.gateway")


class RequestError(Exception):
    """A request that cannot be served.

    Attributes:
        status: HTTP status. message: for the client. code: machine-readable. param: the field at fault.
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
        self.status, self.message, self.code, self.param, self.answer = status, message, code, param, answer

    @property
    def kind(self) -> str:
        """The error's type in OpenAI's terms."""
        return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )


def invalid_key(rollout_id: str, attempt: int) -> RequestError:
    """The refusal of a wrong key; an attempt that is not open gets the same, so that nothing can be probed."""
    return RequestError(
        401,
        f"the key is not valid for rollout {rollout_id}, attempt {attempt}; keys end with their attempt",
        code="invalid_api_key",
    )


def prompt_too_long(message: str) -> RequestError:
    """The refusal of a prompt that does not fit into the context; `agl.mdp.faults` knows it by its code."""
    return RequestError(400, message, code=CONTEXT_LENGTH, param="messages")


def refusal(error: Exception) -> RequestError:
    """An error as the client gets it."""
    match error:
        case RequestError():
            return error
        case ContextLengthError():
            return prompt_too_long(error.message)
        case EngineError():
            return RequestError(503, error.message, code="engine_error")
        case RefusedAnswerError():
            call = str(error.where["call"])
            return RequestError(400, str(error), code=ANSWER_REFUSED, param="messages", answer=call)
        case AglError():
            return RequestError(400, str(error), code="invalid_request")
        case RecursionError():
            return RequestError(400, "the request is nested too deep", code="invalid_request")
    log.exception("a request failed", exc_info=error)
    return RequestError(500, f"{type(error).__name__}: {error}", code="internal_error")
