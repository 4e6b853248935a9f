"""OpenAPI 3.1 documents: what those of all servers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl._version import __version__

REFERENCE = "#/components/schemas/{model}"
"""Where a model's schema is, as pydantic's `ref_template`."""


def document(title: str, paths: Mapping[str, Any], schemas: Mapping[str, Any], *, security: Any) -> dict[str, Any]:
    """The whole document. `security`: what the operations require, as `bearer` returns it."""
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": security,
    }


def bearer(keyed: bool) -> list[dict[str, Any]]:
    """The security of a server that asks for a key, or of one that does not."""
    return [{"key": []}] if keyed else []


def operation(
    summary: str, *, result: Any, failures: Mapping[str, str], error: Any, body: Any = None, **others: Any
) -> dict[str, Any]:
    """One operation of a path.

    Args:
        result: content of its answer.
        failures: other statuses, described.
        error: content of these.
        body: content of its request, if it has one.
        others: further fields of the operation.
    """
    responses = {"200": {"description": "done", "content": result}}
    responses |= {status: {"description": text, "content": error} for status, text in failures.items()}
    request = {} if body is None else {"requestBody": {"required": True, "content": body}}
    return {"summary": summary, **others, **request, "responses": responses}


def json_content(schema: Any) -> dict[str, Any]:
    """A body of JSON."""
    return {"application/json": {"schema": schema}}


def model_content(name: str) -> dict[str, Any]:
    """A body of JSON with the schema of that name."""
    return json_content({"$ref": REFERENCE.format(model=name)})
