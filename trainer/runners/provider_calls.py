"""Which calls of a provider's API are passed on for a program with a key that it does not have itself.

These are the calls that the gateway answers for a policy, less what deletes: everything else that the key can do at the
provider (files, batches, fine-tuning, other accounts) is not the program's. `test_attacks_bodies.py` holds the table to
the gateway's own routes.
"""

from __future__ import annotations

import re
import urllib.parse
from collections import Counter
from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from agl.tracing.sdk_hooks import GENERATION_PATHS
from agl.trainer.gateway.dialects.error_forms import anthropic_error, google_error, openai_error
from agl.trainer.gateway.errors import RequestError
from agl.trainer.http.limits import Refused

_NAME = r"[A-Za-z0-9_@+:-][A-Za-z0-9._@+:-]*"
"""A segment of a path as clients write it: no escape, no parameter, no dots alone."""
_MODEL = rf"{_NAME}(?:/{_NAME})*"
_VERSION = r"v[0-9][a-z0-9]*"
_FORMS = {
    "openai": [
        ("POST", "|".join(map(re.escape, GENERATION_PATHS["openai"]))),
        ("POST", "/responses/(?:input_tokens|compact)"),
        ("GET", rf"/responses/{_NAME}(?:/input_items)?"),
        ("GET", rf"/models(?:/{_MODEL})?"),
    ],
    "anthropic": [
        ("POST", "|".join(f"/v1{re.escape(path)}" for path in GENERATION_PATHS["anthropic"])),
        ("GET", rf"/v1/models(?:/{_MODEL})?"),
    ],
    "google": [
        ("POST", rf"/{_VERSION}/models/{_MODEL}(?:{'|'.join(map(re.escape, GENERATION_PATHS['google']))})"),
        ("GET", rf"/{_VERSION}/models(?:/{_MODEL})?"),
    ],
}
_CALLS = {api: [(method, re.compile(form)) for method, form in forms] for api, forms in _FORMS.items()}
_MOST_NAMES = 100
_NAME_CHARACTERS = 200


def is_permitted(api: str, method: str, path: str) -> bool:
    """Whether a call is one of a model.

    Args:
        path: what follows the API's base URL, as it was sent: an escape in it is refused, for each server reads those
            in its own way.
    """
    return any(method == known and form.fullmatch(path) for known, form in _CALLS.get(api, ()))


def leads_out(path: str) -> bool:
    """Whether a path, as it was sent, has segments that some server reads as a way up, out of its base URL."""
    plain = path
    # Escaped twice, it is unescaped by a server behind a server.
    for _ in range(3):
        plain = urllib.parse.unquote(plain)
    segments = (segment.partition(";")[0] for segment in re.split(r"[/\\]", plain))
    return any(segment in (".", "..") for segment in segments)


class RefusedCalls(Counter[str]):
    """How often each call, or each thing that a call held, was refused: a hundred by name, further ones together."""

    def note(self, names: Iterable[str]) -> None:
        """Count what was refused, by its names."""
        for name in names:
            short = name[:_NAME_CHARACTERS]
            self[short if short in self or len(self) < _MOST_NAMES else "others"] += 1

    def refuse(self, method: str, path: str) -> RequestError:
        """Count a call; returns its refusal."""
        self.note([f"{method} {path}"])
        return RequestError(
            404, f"{method} {path[:_NAME_CHARACTERS]} is no call of a model, and is not passed on", code="not_found"
        )


def provider_error(api: str, error: Exception) -> tuple[dict[str, Any], int]:
    """The body of an error in the form of an API, and its status."""
    match error:
        case RequestError():
            pass
        case Refused():
            error = RequestError(error.status, error.message, code=error.code)
        case HTTPException():
            error = RequestError(error.status_code, error.detail)
        case _:
            error = RequestError(500, f"{type(error).__name__}: {error}")
    form = {"anthropic": anthropic_error, "google": google_error}.get(api, openai_error)
    return form(error), error.status


def api_of(request: Request) -> str:
    """The API of a request to an address of a recording proxy, by its path."""
    place = request.url.path.partition("/agents/")[2].split("/")[1:2]
    return place[0] if place else "openai"
