"""Which API a request is of, also where the gateway does not serve what it asks for.

The path decides where only one API has it; the headers of the providers' clients decide where several do, such as
`models`.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import HTTPConnection

from agl.trainer.gateway.dialects.base import Dialect
from agl.trainer.gateway.dialects.chat import CHAT
from agl.trainer.gateway.dialects.google import GOOGLE
from agl.trainer.gateway.dialects.messages import MESSAGES
from agl.trainer.gateway.dialects.responses import RESPONSES

_VERSIONED = re.compile(r".*/(v[0-9][a-z0-9]*)/([^/]+)", re.S)
"""Up to the last version in a path, since an agent's name can contain one."""

_BY_SEGMENT: dict[str, Dialect[Any]] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
"""By what follows the version."""


def dialect_of(request: HTTPConnection) -> Dialect[Any]:
    """The API that a request is of; Chat Completions if nothing tells."""
    path = request.scope["path"]
    version, segment = found.groups() if (found := _VERSIONED.match(path)) else ("v1", "")
    if segment in _BY_SEGMENT:
        return _BY_SEGMENT[segment]
    if version != "v1" or ":" in path.rpartition("/")[2]:
        return GOOGLE
    if "anthropic-version" in request.headers:
        return MESSAGES
    if "x-goog-api-key" in request.headers or "key" in request.query_params:
        return GOOGLE
    return CHAT
