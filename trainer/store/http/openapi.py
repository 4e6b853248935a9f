"""The OpenAPI 3.1 schema of a store's server, made from the models that validate its requests."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from agl.trainer.http.openapi import REFERENCE, bearer, document, json_content, model_content, operation
from agl.trainer.store.http import protocol

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "hint": {"type": ["string", "null"]},
                "where": {"type": "object"},
            },
        }
    },
}
_FAILURES = {
    "400": "the body is not JSON",
    "401": "the key is unknown",
    "403": "the key does not permit this",
    "408": "the body came too slowly",
    "409": "the store refused it",
    "413": "the body is too large",
    "415": "the content type is not JSON",
    "503": "too much to do, or stopping; try again",
}


@functools.cache
def schema(keyed: bool) -> dict[str, Any]:
    """The OpenAPI document. `keyed`: whether the server requires a key."""
    models = [(method.arguments, "validation") for method in protocol.METHODS.values()]
    references, defined = models_json_schema(models, ref_template=REFERENCE)  # type: ignore[arg-type]
    schemas: dict[str, Any] = {**defined.get("$defs", {}), "Error": _ERROR}
    paths: dict[str, Any] = {}
    for name, method in protocol.METHODS.items():
        result = method.result.json_schema(mode="validation", ref_template=REFERENCE)
        schemas.update(result.pop("$defs", {}))
        response = {"type": "object", "required": ["result"], "properties": {"result": result}}
        request = references[method.arguments, "validation"]
        paths[f"{protocol.PREFIX}/{name}"] = {"post": _operation(name, method.summary, request, response)}
    one = {
        "type": "object",
        "required": ["method"],
        "properties": {"method": {"enum": sorted(protocol.METHODS)}, "arguments": {"type": "object"}},
    }
    many = {"type": "array", "items": one, "maxItems": protocol.MOST_OPERATIONS}
    batch = {"type": "object", "required": ["operations"], "properties": {"operations": many}}
    results = {"type": "object", "required": ["results"], "properties": {"results": {"type": "array"}}}
    summary = "Several operations at once, in no order; each has its result or error."
    paths[protocol.BATCH_PATH] = {"post": _operation("batch", summary, batch, results)}
    return document("agl store", paths, schemas, security=bearer(keyed))


def _operation(name: str, summary: str, request: Any, result: Any) -> dict[str, Any]:
    first, _, rest = summary.partition("\n")
    return operation(
        first,
        operationId=name,
        description=rest.strip(),
        body=json_content(request),
        result=json_content(result),
        failures=_FAILURES,
        error=model_content("Error"),
    )
