"""The part of pydantic's interface that users of 0.3's data classes call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

__all__ = ["PydanticMethods"]


class PydanticMethods:
    """`model_dump`, `model_dump_json`, `model_copy`, `model_validate` for a dataclass."""

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(self.model_dump(), default=str)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, **_: Any) -> Self:
        return dataclasses.replace(self, **(update or {}))  # type: ignore[type-var]

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """`obj` itself, or one with its items as fields; nested values are checked where pydantic is installed."""
        if isinstance(obj, cls):
            return obj
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(obj)
