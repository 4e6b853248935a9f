"""Policies as the models that each API lists, in pages: one form for each provider.

Source: Anthropic API reference, "List Models"; Gemini API reference, "models.list"; OpenAI's list has one page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.datastructures import QueryParams

from agl.messages.google import camel
from agl.trainer.gateway.errors import RequestError
from agl.trainer.http.numbers import number_of

Model = dict[str, Any]


class ModelForms(NamedTuple):
    """What an API says of models.

    Attributes:
        one: the name of a policy and the length of its context in tokens -> the model.
        page: models, and the query of a request -> the page of their list that it wants; raises RequestError, 400,
            naming the parameter at fault.
    """

    one: Callable[[str, int], Model]
    page: Callable[[Sequence[Model], QueryParams], Mapping[str, Any]]


def _openai(name: str, context: int) -> Model:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agl"}


def _openai_page(models: Sequence[Model], query: QueryParams) -> Mapping[str, Any]:
    return {"object": "list", "data": models}


def _anthropic(name: str, context: int) -> Model:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        # Anthropic's own word for a date that is not known.
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


_STAGES = ("active", "deprecated", "retired")
"""Of a model's life, as Anthropic has them. A policy that is served is active."""


def _anthropic_page(models: Sequence[Model], query: QueryParams) -> Mapping[str, Any]:
    # The SDK of Python writes a list with brackets.
    wanted = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    for stage in wanted:
        if stage not in _STAGES:
            raise _no_page("lifecycle", f"is {stage!r}; it is one of {', '.join(map(repr, _STAGES))}")
    models = [model for model in models if not wanted or model["lifecycle"] in wanted]
    ids = [model["id"] for model in models]
    limit = number_of(query.get("limit", "20"))
    if limit is None or not 1 <= limit <= 1000:
        raise _no_page("limit", f"is {query['limit']!r}; it is 1 to 1000")
    first = 0
    end = len(models)
    if "after_id" in query:
        first = _place(ids, query, "after_id") + 1
    if "before_id" in query:
        # The page is the one right before this model.
        end = _place(ids, query, "before_id")
        page = models[max(first, end - limit) : end]
    else:
        page = models[first : first + limit]
    return {
        "data": page,
        "has_more": len(page) < end - first,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _google(name: str, context: int) -> Model:
    return {
        "name": f"models/{name}",
        "baseModelId": name,
        "version": "1",
        "displayName": name,
        "description": "a policy in training",
        "inputTokenLimit": context,
        "outputTokenLimit": context,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def _google_page(models: Sequence[Model], query: QueryParams) -> Mapping[str, Any]:
    # Either of protobuf's names; its zero and its empty text ask for nothing.
    wanted = {name: value for name, value in camel(query).items() if value not in ("", "0")}
    if "filter" in wanted:
        raise _no_page("filter", f"is {wanted['filter']!r}, which is not supported; list all models")
    size = number_of(wanted.get("pageSize", "50"))
    if size is None:
        raise _no_page("pageSize", f"is {wanted['pageSize']!r}, no number of models")
    # As Google does with a size that is too large.
    size = min(size, 1000)
    names = [model["name"] for model in models]
    first = _place(names, wanted, "pageToken") if "pageToken" in wanted else 0
    following = {"nextPageToken": names[first + size]} if first + size < len(names) else {}
    return {"models": models[first : first + size], **following}


def _place(names: Sequence[str], query: Mapping[str, str], parameter: str) -> int:
    """Where in a list the model is that a parameter names."""
    if query[parameter] not in names:
        raise _no_page(parameter, f"is {query[parameter]!r}, which is no model here")
    return names.index(query[parameter])


def _no_page(parameter: str, why: str) -> RequestError:
    return RequestError(400, f"{parameter} {why}", code="invalid_value", param=parameter)


OPENAI_MODELS = ModelForms(_openai, _openai_page)
ANTHROPIC_MODELS = ModelForms(_anthropic, _anthropic_page)
GOOGLE_MODELS = ModelForms(_google, _google_page)
