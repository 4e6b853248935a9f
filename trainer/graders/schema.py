"""The grader of JSON: whether the output holds a value that its schema allows."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from agl.errors import ConfigError
from agl.options import checked_options
from agl.rewards.trace import Trace
from agl.trainer.graders.base import Grader
from agl.trainer.graders.fences import fenced
from agl.trainer.graders.fields import failure, lookup, plain, text_of
from agl.trainer.graders.schema_worker import checked
from agl.trainer.processes.workers import WorkerDied, Workers, WorkerStuck, WorkerUnavailable

STUCK_SECONDS = 120.0
"""Wall-clock limit of a validation, which normally ends at once."""
_NONE = object()


@checked_options
@dataclass(frozen=True)
class JSONSchema(Grader):
    """1 if the output is JSON that a schema allows, else 0; with `partial`, in between for JSON that is nearly right.

    The output is the value itself (a dict, a list, a pydantic model), or a text that is JSON or has JSON in its last
    code block. References to remote schemas are never fetched. The validation runs in a separate process (a few are
    shared), within limits of processor time and memory, since a schema's patterns can take any time; a value that
    exceeds them is wrong. Needs a POSIX system.

    Attributes:
        schema: a JSON schema, a pydantic model class, or the field of the task that holds the schema.
        partial: whether JSON that violates the schema gets the share of the named top-level properties that are valid
            (present if required, and allowed); the object as a whole counts as one more. Always less than 1.
        timeout: seconds of processor time.

    Raises:
        ConfigError: not a schema.
    """

    waits = True
    needs = ("jsonschema", "referencing")

    schema: Any
    _: KW_ONLY
    partial: bool = False
    timeout: float = 5.0

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ConfigError(f"JSONSchema(timeout={self.timeout!r})", hint="give seconds, more than 0")
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
        return checked(dump() if dump is not None else self.schema)

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """A value from 0 to 1.

        Raises:
            RewardError: the task holds no schema, the schema cannot be followed, or no process to validate in.
        """
        schema = self._fixed if not isinstance(self.schema, str) else self._of(task, self.schema)
        value = json_of(output)
        if value is _NONE:
            return 0.0
        job = {"schema": schema, "value": value, "partial": self.partial, "limit": self.timeout}
        try:
            result = _workers().ask(job, STUCK_SECONDS)
        except WorkerDied:
            return 0.0
        except WorkerStuck as error:
            raise failure(f"validating took more than {STUCK_SECONDS:g} s") from error
        except WorkerUnavailable as error:
            raise failure(f"the process that validates does not start: {error}") from error
        if "failed" in result:
            raise failure(f"{self.label} cannot follow its schema: {result['failed']}")
        return float(result["share"])

    def _of(self, task: Any, where: str) -> Any:
        schema = lookup(task, where)
        if not isinstance(schema, Mapping | bool):
            raise failure(f"{self.label} finds no schema in the task at {where!r}", hint="schema= names its field")
        try:
            return checked(schema)
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


@functools.cache
def _workers() -> Workers:
    return Workers.of_module("agl.trainer.graders.schema_worker")
