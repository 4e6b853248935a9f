"""Which keys verl's config has, and of which types, read from verl's own files: its YAML defaults and its dataclasses.

verl is not imported: that takes seconds, and fixes which device it computes on.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl.errors import ConfigError
from agl.extras import missing

FREE = ("ray_kwargs.ray_init", "global_profiler.global_tool_config", "transfer_queue.backend")
"""Sections that verl passes on to other programs unchanged."""

Types = tuple[type, ...] | None
"""The types that a value may have; None for any."""

WIDER: Mapping[str, Types] = {
    "trainer.logger": (str, list),
    "trainer.v1.colocate_async.num_warmup_batches": (int, float),
    "trainer.v1.separate_async.num_warmup_batches": (int, float),
    "algorithm.rollout_correction.rollout_is_threshold": (int, float, str),
    "data.gen_batch_size": (int, type(None)),
    "data.train_files": (str, list),
    "data.val_files": (str, list),
}
"""Where verl takes more types than its default shows and no dataclass says so."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
    "tuple": (list,),
    "dict": (dict,),
    "None": (type(None),),
}


class Schema:
    """The keys of a verl config.

    Args:
        defaults: verl's whole config as nested dicts, interpolations as their text.
    """

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self.defaults = defaults
        self._classes: dict[str, _Dataclass] = {}
        for module in sorted({target.rpartition(".")[0] for target in _targets(defaults)}):
            self._classes |= _dataclasses(module)
        self._sections: set[str] = set()
        self._open: set[str] = set(FREE)
        self._types: dict[str, Types] = {}
        self._add(defaults, None, "")
        self._types |= WIDER

    def check(self, key: str, value: Any) -> None:
        """Raise `ConfigError` unless verl has this key and its value may be of this type."""
        if not self.has(key):
            raise self._unknown(key)
        if key in self._sections:
            hint = f"it has {_some_names(self.default(key))}"
            raise ConfigError(f"{key} is a section of verl's config and cannot be one value", hint=hint)
        types = self._types.get(key)
        interpolated = isinstance(value, str) and "${" in value
        if (
            types is None
            or interpolated
            or (isinstance(value, types) and (not isinstance(value, bool) or bool in types))
        ):
            return
        names = " or ".join(dict.fromkeys("null" if t is type(None) else t.__name__ for t in types))
        raise ConfigError(f"{key}={value!r} is of type {type(value).__name__}; verl takes {names}")

    def has(self, key: str) -> bool:
        """Whether verl has this key, or takes any key in its section."""
        if key in self._types or key in self._sections:
            return True
        while key := key.rpartition(".")[0]:
            if key in self._open:
                return True
            if key in self._types or key in self._sections:
                return False
        return False

    def default(self, key: str) -> Any:
        """verl's own value, text where it is an interpolation; None where there is none."""
        node: Any = self.defaults
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def _add(self, node: Mapping[str, Any], owner: str | None, prefix: str) -> None:
        """Add the keys of a section: those of its YAML `node`, and those of its dataclass, by default `owner`."""
        fields = self._fields(node.get("_target_", owner or "").rpartition(".")[2])
        for name in {**node, **fields}:
            key = f"{prefix}{name}"
            default = node.get(name)
            types = _type_names(fields.get(name))
            inner = next((t for t in types if t in self._classes), None)
            section = default if isinstance(default, Mapping) and default else None
            if section is not None:
                self._sections.add(key)
            else:
                self._types[key] = _types(default, types)
            if key in FREE:
                continue
            if "dict" in types or (section is None and inner is None and (default == {} or "Any" in types)):
                self._open.add(key)
            if section is not None or inner is not None:
                self._add(section or {}, inner, f"{key}.")

    def _fields(self, name: str) -> dict[str, ast.expr]:
        """The fields of a dataclass, those of its bases included: name -> annotation."""
        if name not in self._classes:
            return {}
        fields: dict[str, ast.expr] = {}
        for base in reversed(self._classes[name].bases):
            fields |= self._fields(base)
        return fields | self._classes[name].fields

    def _unknown(self, key: str) -> ConfigError:
        """The error for a key that verl does not have, with the nearest that it has."""
        known = list(_leaves(self.defaults, ""))
        last = key.rpartition(".")[2]
        namesakes = [k for k in known if k.rpartition(".")[2] == last]
        close = difflib.get_close_matches(key, namesakes or known, n=1, cutoff=0.0 if namesakes else 0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {_some_names(self.defaults)}"
        return ConfigError(f"the verl config has no key {key!r}", hint=hint)


def folder() -> Path:
    """The directory of the installed verl, without importing it.

    Raises:
        ConfigError: verl is not installed.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise missing("a verl config", "verl", "verl")
    return Path(spec.submodule_search_locations[0])


# -- verl's dataclasses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dataclass:
    """One of verl's dataclasses, as written.

    Attributes:
        bases: names of its base classes.
        fields: name -> annotation.
    """

    bases: tuple[str, ...]
    fields: dict[str, ast.expr]


@functools.cache
def _dataclasses(module: str) -> dict[str, _Dataclass]:
    """The classes of one of verl's modules, and of the modules next to it if it is a package."""
    path = folder().parent.joinpath(*module.split("."))
    classes = {}
    for file in sorted(path.glob("*.py")) or [path.with_suffix(".py")]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else ():
            if isinstance(node, ast.ClassDef):
                fields = {
                    line.target.id: line.annotation
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                }
                classes[node.name] = _Dataclass(tuple(b.id for b in node.bases if isinstance(b, ast.Name)), fields)
    return classes


def _types(default: Any, names: list[str]) -> Types:
    """The types of a value with this default and annotation.

    Args:
        names: the types that the annotation allows; empty without one.
    """
    follows = isinstance(default, str) and "${" in default  # another key, which may be null
    if not names:
        return None if default is None or follows else _TYPES.get(type(default).__name__)
    if any(name not in _TYPES for name in names):
        return None
    types = tuple(t for name in names for t in _TYPES[name])
    return (*types, type(None)) if default is None or follows else types


def _type_names(annotation: ast.expr | None) -> list[str]:
    """The types that an annotation allows, by name: `Optional[dict[str, int]]` is dict and None."""
    match annotation:
        case None:
            return []
        case ast.Constant(value=None):
            return ["None"]
        case ast.Constant(value=str(text)):
            return _type_names(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
        case ast.BinOp(left=left, right=right):
            return [*_type_names(left), *_type_names(right)]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return [*_type_names(inner), "None"]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=inner)):
            return [n for i in inner for n in _type_names(i)]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            options = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [type(o.value).__name__ for o in options if isinstance(o, ast.Constant)]
        case ast.Subscript(value=outer):
            return [n.lower() for n in _type_names(outer)]
    return ["Any"]


# -- nested dicts -----------------------------------------------------------------------------------------------------


def _some_names(node: Mapping[str, Any]) -> str:
    names = [name for name in node if name != "_target_"]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def _leaves(node: Any, prefix: str) -> Iterator[str]:
    if not isinstance(node, Mapping) or not node:
        yield prefix
        return
    for name in node:
        if name != "_target_":
            yield from _leaves(node[name], f"{prefix}.{name}" if prefix else name)


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)
