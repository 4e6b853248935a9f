"""The grader of JSON: whether the output holds a value that its schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from agl.errors import ConfigError, checked_options
from agl.rewards.trace import Trace
from agl.trainer.graders.base import Grader
from agl.trainer.graders.fences import fenced
from agl.trainer.graders.fields import failure, lookup, plain, text_of

_NONE = object()


@checked_options
@dataclass(frozen=True)
class JSONSchema(Grader):
    """1 if the output is JSON that a schema allows, else 0; with `partial`, in between for JSON that is nearly right.

    The output is the value itself (a dict, a list, a pydantic model), or a text that is JSON or has JSON in its last
    code block. References to remote schemas are never fetched.

    Attributes:
        schema: a JSON schema, a pydantic model class, or the field of the task that holds the schema.
        partial: whether JSON that violates the schema gets the share of the named top-level properties that are valid
            (present if required, and allowed); the object as a whole counts as one more. Always less than 1.

    Raises:
        ConfigError: not a schema.
    """

    needs = ("jsonschema", "referencing")

    schema: Any
    _: KW_ONLY
    partial: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.schema, Mapping | str | bool) or hasattr(self.schema, "model_json_schema")):
            raise ConfigError(
                f"JSONSchema cannot make a schema of a {type(self.schema).__name__}",
                hint="give a dict, a pydantic model class, or the task's field that holds the schema",
            )
        if not isinstance(self.schema, str):
            try:
                _ = self._fixed
            except ModuleNotFoundError as missing:
                raise self._uninstalled(missing) from missing

    @cached_property
    def _fixed(self) -> Any:
        dump = getattr(self.schema, "model_json_schema", None)
        return _validator(dump() if dump is not None else self.schema)

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """A value from 0 to 1.

        Raises:
            RewardError: the task holds no schema.
        """
        validator = self._fixed if not isinstance(self.schema, str) else self._of(task, self.schema)
        value = json_of(output)
        if value is _NONE:
            return 0.0
        try:
            errors = list(validator.iter_errors(value))
        except RecursionError:
            return 0.0
        if not errors:
            return 1.0
        return _share(validator.schema, value, errors) if self.partial else 0.0

    def _of(self, task: Any, where: str) -> Any:
        schema = lookup(task, where)
        if not isinstance(schema, Mapping | bool):
            raise failure(f"{self.label} finds no schema in the task at {where!r}", hint="schema= names its field")
        try:
            return _validator(schema)
        except ConfigError as error:
            raise failure(f"the task's schema at {where!r}: {error.message}", hint=error.hint) from error


def json_of(output: Any) -> Any:
    """The JSON value that an output is or holds; `_NONE` if there is none."""
    value = plain(output)
    if value is None:
        return _NONE
    if not isinstance(value, str):
        if isinstance(value, Mapping | list | int | float):
            try:
                return json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError, RecursionError):
                return _NONE
        value = text_of(value)
    blocks = fenced(value, lambda info: info.lower() in ("", "json"))
    for text in (value, *(body for _, body in reversed(blocks))):
        try:
            return json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            continue
    return _NONE


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _validator(schema: Any) -> Any:
    from jsonschema.exceptions import SchemaError, ValidationError
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    def unique(validator: Any, wanted: Any, items: Any, _: Any) -> Iterator[Any]:
        # jsonschema compares each with each.
        if wanted and validator.is_type(items, "array") and len(set(map(_canonical, items))) < len(items):
            yield ValidationError("there are equal items")

    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"this is not a JSON schema: {error.message}", hint=f"see {error.json_path}") from error
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
    wrong, whole = set(), False
    for error in errors:
        if error.absolute_path:
            wrong.add(error.absolute_path[0])
        elif error.validator == "required":
            wrong |= {name for name in schema.get("required", ()) if name not in value}
        else:
            whole = True
    right = sum(name in value and name not in wrong for name in named)
    return min(right + (not whole), len(named)) / (len(named) + 1)
