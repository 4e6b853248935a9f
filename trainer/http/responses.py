"""What routes share: answers in JSON, and work that is cancelled when the client hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

RETRY_SECONDS = 1
"""The `Retry-After` of a refusal because of too much load."""


def answer(data: Any, status: int = 200) -> Response:
    """A JSON answer."""
    headers = {"retry-after": str(RETRY_SECONDS)} if status in (429, 503) else None
    try:
        body = orjson.dumps(data)
    except TypeError:
        # orjson refuses lone surrogates, which an error's text may have.
        body = json.dumps(data).encode()
    return Response(body, status, headers, "application/json")


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Await `work`, but cancel it when the client hangs up. The request's body must have been read.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait((task,))
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
