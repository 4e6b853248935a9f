"""A request's JSON as a dialect's body; what does not fit is refused with the name of the field at fault."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from agl.errors import nearest
from agl.trainer.gateway.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)


def validated(model: type[Body], data: Any) -> Body:
    """`data` as a `model`.

    Raises:
        RequestError: 400: no JSON object, an unknown field (with the nearest known one), or a value that does not fit.
    """
    if not isinstance(data, dict):
        raise RequestError(400, "the body is not a JSON object")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            hint = nearest(field, model.model_fields)
            raise RequestError(400, f"unknown field {field!r}; {hint}", code="unknown_parameter", param=field) from None
        raise RequestError(400, f"{field}: {first['msg']}", code="invalid_value", param=field) from None
