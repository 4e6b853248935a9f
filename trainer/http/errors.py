"""How errors cross HTTP: a server answers every exception as JSON with a status, and a client raises it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from agl import errors
from agl.errors import AglError, ForbiddenError, StoreError
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


def to_error(facts: Mapping[str, Any], default: type[AglError] = AglError) -> AglError:
    """The error of which `error_json` has sent the facts {type, message, hint, where}.

    Args:
        default: its class if there is none of that name in `agl.errors`.
    """
    cls = getattr(errors, str(facts.get("type")), None)
    if not (isinstance(cls, type) and issubclass(cls, AglError)):
        cls = default
    if cls is ForbiddenError and not issubclass(cls, default):
        cls = default  # of another server than a store's
    where = facts.get("where")
    where = (
        {k: v for k, v in where.items() if k not in ("self", "message", "hint")} if isinstance(where, Mapping) else {}
    )
    hint = facts.get("hint")
    return cls(str(facts.get("message")), hint=None if hint is None else str(hint), **where)


def refusal(refused: Refused) -> StoreError:
    """The error of a request that a server of ours refuses."""
    cls = ForbiddenError if refused.status == 403 else StoreError
    return cls(refused.message)


def describe_error(
    request: Request, error: Exception, *, unexpected: type[AglError] = StoreError
) -> tuple[dict[str, Any], int]:
    """The body and status of an error as `error_json` shapes it; an exception of no known kind is `unexpected`."""
    match error:
        case AglError():
            return error_json(error), 409
        case Refused():
            return error_json(refusal(error)), error.status
        case HTTPException():
            text = f"{request.method} {request.url.path}: {error.detail}"
            return error_json(StoreError(text, hint="see /openapi.json")), error.status_code
    return error_json(unexpected(f"{type(error).__name__}: {error}")), 500
