"""Policies as the models that each API lists: one form for each provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Model = dict[str, Any]


class ModelForms(NamedTuple):
    """What an API says of models.

    Attributes:
        one: the name of a policy and the length of its context in tokens -> the model.
        all: models -> their list, on one page.
    """

    one: Callable[[str, int], Model]
    all: Callable[[Sequence[Model]], Mapping[str, Any]]


def _openai(name: str, context: int) -> Model:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agl"}


def _openai_list(models: Sequence[Model]) -> Mapping[str, Any]:
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


def _anthropic_list(models: Sequence[Model]) -> Mapping[str, Any]:
    ids = [model["id"] for model in models]
    return {"data": models, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


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


def _google_list(models: Sequence[Model]) -> Mapping[str, Any]:
    return {"models": models}


OPENAI_MODELS = ModelForms(_openai, _openai_list)
ANTHROPIC_MODELS = ModelForms(_anthropic, _anthropic_list)
GOOGLE_MODELS = ModelForms(_google, _google_list)
