"""Errors in the form of each API: one table of types, and the words that clients look for.

Frameworks know an overflow of the context by the words of the provider: LangChain's summarising middleware, Strands'
conversation managers and Pydantic AI shorten the history where they find them, and go on. What an API has no words for
keeps ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agl.trainer.gateway.errors import HISTORY, OutOfRangeError, PromptTooLongError, RequestError, SchemaError


class Types(NamedTuple):
    """What each API calls the errors of an HTTP status.

    Attributes:
        openai: `error.type` of Chat Completions and Responses.
        anthropic: `error.type` of Messages.
        google: `error.status` of Google's API.
    """

    openai: str
    anthropic: str
    google: str


_REFUSED = Types("invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT")
_FAILED = Types("server_error", "api_error", "INTERNAL")
TYPES = {
    401: Types("invalid_request_error", "authentication_error", "UNAUTHENTICATED"),
    403: Types("invalid_request_error", "permission_error", "PERMISSION_DENIED"),
    404: Types("invalid_request_error", "not_found_error", "NOT_FOUND"),
    409: Types("invalid_request_error", "conflict_error", "ABORTED"),
    413: Types("invalid_request_error", "request_too_large", "INVALID_ARGUMENT"),
    429: Types("requests", "rate_limit_error", "RESOURCE_EXHAUSTED"),
    499: Types("invalid_request_error", "invalid_request_error", "CANCELLED"),
    501: Types("server_error", "api_error", "UNIMPLEMENTED"),
    503: Types("server_error", "api_error", "UNAVAILABLE"),
    504: Types("server_error", "timeout_error", "DEADLINE_EXCEEDED"),
    529: Types("server_error", "overloaded_error", "UNAVAILABLE"),
}
"""HTTP status -> its types; other refusals are invalid requests, and other failures are the server's.

Of OpenAI's, a refused key is an invalid request whose `code` says so, and the type of a 429 is what there are too many
of.
"""

_OPENAI_CODES = {"too_many_requests": "rate_limit_exceeded"}
"""Our codes of errors -> OpenAI's, where it has another."""


def types(status: int) -> Types:
    """The types of an HTTP status."""
    return TYPES.get(status, _REFUSED if status < 500 else _FAILED)


def openai_error(error: RequestError, request_id: str | None = None, *, history: str = "messages") -> dict[str, Any]:
    """The error in OpenAI's form, which has no field for the request's id. Clients look for the words of its newer
    models or for those of its older ones. `history`: what the API calls the field with the conversation."""
    message = _overflow(
        error,
        "Input tokens exceed the configured limit of {limit} tokens, this model's maximum context length. "
        "Your messages resulted in {tokens} tokens.",
        "Input tokens exceed the configured limit, this model's maximum context length.",
    )
    if isinstance(error, SchemaError):
        # In both of its APIs OpenAI calls the schema of an answer that of `response_format`.
        owner = "response_format" if error.tool is None else f"function {error.tool!r}"
        message = f"Invalid schema for {owner}: {message}"
    code = _OPENAI_CODES.get(error.code or "", error.code)
    if isinstance(error, OutOfRangeError):
        message, code = _openai_range(error)
    kind = types(error.status).openai
    param = history if error.param == HISTORY else error.param
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _openai_range(error: OutOfRangeError) -> tuple[str, str]:
    """The message and the code of a value beyond a bound."""
    if error.kind == "array":
        message = (
            f"Invalid '{error.field}': array too long. Expected an array with maximum length {error.bound}, "
            f"but got an array with length {error.actual} instead."
        )
        return message, "array_above_max_length"
    side = "above maximum" if error.above else "below minimum"
    relation = "<=" if error.above else ">="
    message = (
        f"Invalid '{error.field}': {error.kind} {side} value. Expected a value {relation} {error.bound}, "
        f"but got {error.actual!s:.40} instead."
    )
    return message, f"{error.kind}_{'above_max' if error.above else 'below_min'}_value"


def responses_error(error: RequestError, request_id: str | None = None) -> dict[str, Any]:
    """The error in OpenAI's form, of the Responses API."""
    return openai_error(error, request_id, history="input")


def failure_code(error: RequestError) -> str:
    """The `code` of a response that failed: one of the few that OpenAI has."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 499 else "invalid_prompt"


def anthropic_error(error: RequestError, request_id: str | None = None) -> dict[str, Any]:
    """The error in Anthropic's form, with the id that the answer's `request-id` header has."""
    message = _overflow(
        error, "prompt is too long: {tokens} tokens > {limit} maximum", "prompt is too long: no room is left"
    )
    if isinstance(error, OutOfRangeError) and error.kind != "array":
        relation = "less" if error.above else "greater"
        message = f"{error.field}: Input should be {relation} than or equal to {error.bound}, not {error.actual!s:.40}"
    body: dict[str, Any] = {"type": types(error.status).anthropic, "message": message}
    if error.param == "thread":
        # By this the SDK's tool runner knows to go on without, and sends whole histories.
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body, **({} if request_id is None else {"request_id": request_id})}


def google_error(error: RequestError, request_id: str | None = None) -> dict[str, Any]:
    """The error in Google's form, which has no field for the request's id."""
    message = _overflow(
        error,
        "The input token count ({tokens}) exceeds the maximum number of tokens allowed ({limit}).",
        "The input token count exceeds the maximum number of tokens allowed.",
    )
    return {"error": {"code": error.status, "message": message, "status": types(error.status).google}}


def _overflow(error: RequestError, counted: str, uncounted: str) -> str:
    """The message of an error; that of an overflow begins with the words of an API."""
    if not isinstance(error, PromptTooLongError):
        return error.message
    known = error.tokens is not None and error.limit is not None
    words = counted.format(tokens=error.tokens, limit=error.limit) if known else uncounted
    return f"{words} ({error.message})"
