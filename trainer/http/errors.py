"""How servers answer errors: every exception becomes a JSON body and a status, in the shape of that server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from agl.errors import AglError, StoreError
from agl.trainer.http.limits import Refused
from agl.trainer.http.responses import answer


def error_handlers(
    describe: Callable[[Request, Exception], tuple[Any, int]], *kinds: type[Exception]
) -> dict[Any, Any]:
    """Starlette's `exception_handlers` of a server.

    Args:
        describe: the JSON body and the status of an error.
        kinds: exceptions that are answered in addition to `Refused` and to unexpected ones.
    """

    async def handle(request: Request, error: Exception) -> Response:
        response = answer(*describe(request, error))
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    async def disconnected(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    return {**dict.fromkeys((*kinds, Refused, Exception), handle), ClientDisconnect: disconnected}


def error_json(error: AglError) -> dict[str, Any]:
    """The body of an answer with this error."""
    where = {k: v if isinstance(v, str | int | float | bool) else str(v) for k, v in error.where.items()}
    return {
        "error": {"type": type(error).__name__, "message": error.message, "hint": error.hint, "where": where},
    }


def describe_error(
    request: Request, error: Exception, *, unexpected: type[AglError] = StoreError
) -> tuple[dict[str, Any], int]:
    """The body and status of an error as `error_json` shapes it; an exception of no known kind is `unexpected`."""
    match error:
        case AglError():
            return error_json(error), 409
        case Refused():
            return error_json(StoreError(error.message)), error.status
        case HTTPException():
            text = f"{request.method} {request.url.path}: {error.detail}"
            return error_json(StoreError(text, hint="see /openapi.json")), error.status_code
    return error_json(unexpected(f"{type(error).__name__}: {error}")), 500
