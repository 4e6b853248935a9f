"""Methods as HTTP routes, one POST route each: {"result": ...}, or {"error": {"type", "message", "hint", "where"}}."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl.errors import AglError
from agl.trainer.http.bodies import body_in_turn
from agl.trainer.http.errors import describe_error
from agl.trainer.http.limits import Refused
from agl.trainer.http.responses import answer
from agl.trainer.http.turns import Turns
from agl.trainer.wire.methods import Method, dumps, loads, portable


def method_routes(
    methods: Mapping[str, Method],
    prefix: str,
    call: Callable[[Request, Method, dict[str, Any]], Awaitable[Any]],
    *,
    admit: Callable[[Request], object],
    turns: Callable[[Request], Awaitable[Turns]],
    waiting: Container[str] = (),
    status: Callable[[AglError], int] = lambda error: 409,
) -> list[Route]:
    """The routes `<prefix>/<method>`.

    Args:
        call: does what a method does with these arguments, and returns its result.
        admit: raises `Refused` for a request whose body is not read.
        turns: of the sender of an admitted one.
        waiting: methods that wait for something, which they do after their turn.
        status: the HTTP status of an error.
    """

    async def handle(method: Method, request: Request) -> Response:
        try:
            admit(request)
            async with body_in_turn(request, functools.partial(turns, request)) as body:
                arguments = await body.json(loads, method.read)
                if method.name not in waiting:
                    return json_response({"result": portable(await call(request, method, arguments))})
            return json_response({"result": portable(await call(request, method, arguments))})
        except AglError as error:
            return answer(describe_error(request, error)[0], status(error))
        except Refused as refused:
            return answer(*describe_error(request, refused))

    return [
        Route(f"{prefix}/{name}", functools.partial(handle, method), methods=["POST"])
        for name, method in methods.items()
    ]


def json_response(data: Any) -> Response:
    """An answer that may contain dataclasses and numpy arrays."""
    return Response(dumps(data), media_type="application/json")
