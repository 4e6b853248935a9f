"""OpenAI Responses, as a dialect over the token-level call."""

from __future__ import annotations

import functools

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl.trainer.gateway import http
from agl.trainer.gateway.dialects.responses_answer import finished, new_id
from agl.trainer.gateway.dialects.responses_body import read
from agl.trainer.gateway.dialects.responses_items import Histories
from agl.trainer.gateway.dialects.responses_stream import Streamer
from agl.trainer.gateway.gateway import Gateway


def responses_routes(gateway: Gateway) -> list[Route]:
    """The routes of the dialect."""
    histories = Histories()

    async def create(request: Request) -> Response:
        wire = http.begin_request(gateway, request, new_id())
        history = histories.of(wire.access)
        try:
            asked = read(await http.body_of(request), history)
        except Exception as error:
            gateway.refuse(wire, error)
            raise
        if asked.body.stream:
            begin = functools.partial(Streamer, wire.response_id, asked, history)
            return await http.stream(gateway, request, wire, asked.chat, begin)
        (reply,) = await http.unless_gone(request, gateway.complete(wire, asked.chat))
        served = gateway.served(wire.policy)
        return http.answer(finished(wire.response_id, served, asked, history, reply, created=wire.started))

    return [Route(f"{http.PREFIX}/responses", create, methods=["POST"])]
