"""The process that validates for `agl.rewards.JSONSchema`: a JSON line in, a JSON line out."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from agl.errors import ConfigError
from agl.trainer.processes.limited_worker import serve


def checked(schema: Any) -> Any:
    """The schema.

    Raises:
        ConfigError: it is none.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"this is not a JSON schema: {error.message}", hint=f"see {error.json_path}") from error
    return schema


@functools.lru_cache(maxsize=64)
def _validator(text: str) -> Any:
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    def unique(validator: Any, wanted: Any, items: Any, _: Any) -> Iterator[Any]:
        # jsonschema compares each with each.
        if wanted and validator.is_type(items, "array") and len(set(map(_canonical, items))) < len(items):
            yield ValidationError("there are equal items")

    schema = json.loads(text)
    kind = validator_for(schema)
    return extend(kind, {"uniqueItems": unique})(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)


def _canonical(value: Any) -> str:
    """Equal for equal JSON values, of which 1 and 1.0 are one, and 1 and true are not."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def _share(schema: Any, value: Any, errors: list[Any]) -> float:
    named = {*schema.get("properties", ()), *schema.get("required", ())} if isinstance(schema, Mapping) else set()
    if not named or not isinstance(value, Mapping):
        return 0.0
    wrong = set()
    whole = False
    for error in errors:
        if error.absolute_path:
            wrong.add(error.absolute_path[0])
        elif error.validator == "required":
            wrong |= {name for name in schema.get("required", ()) if name not in value}
        else:
            whole = True
    right = sum(name in value and name not in wrong for name in named)
    return min(right + (not whole), len(named)) / (len(named) + 1)


def grade(job: dict[str, Any]) -> dict[str, Any]:
    """{"share": from 0 to 1}, or {"failed": why the schema cannot be followed}."""
    from referencing.exceptions import Unresolvable

    validator = _validator(json.dumps(job["schema"]))
    try:
        errors = list(validator.iter_errors(job["value"]))
    except Unresolvable as error:
        return {"failed": str(error)}
    except ArithmeticError:  # numbers that no float holds
        return {"share": 0.0}
    if not errors:
        return {"share": 1.0}
    return {"share": _share(validator.schema, job["value"], errors) if job["partial"] else 0.0}


def main() -> None:
    """Serve until standard input ends."""
    import jsonschema  # noqa: F401

    serve(grade, {"share": 0.0})
