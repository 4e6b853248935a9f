"""What travels to worker processes: the agent, its tracers, hooks, selection and resources, pickled or named.

Functions and classes of `__main__` and of notebooks travel by value (cloudpickle), so no script needs an import guard;
those of modules travel by name, and `sys.path` travels with them.
"""

from __future__ import annotations

import functools
import json
import pickle
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle

from agl.agents.agent import Agent, Tracer
from agl.agents.hooks import Hook
from agl.errors import ConfigError
from agl.mdp.selection import Selection

_MAX_DEPTH = 40


@dataclass(frozen=True, slots=True)
class Payload:
    """All that a worker needs beside its leases.

    Attributes:
        agent: what to run, or "package.module:name" or "file.py:name", which is imported where it runs.
        tracers: to switch on beside the agent's own. hooks: called around every attempt.
        selection: which agents are trained. resources: what rollouts are given beside the policy.
    """

    agent: Agent | str
    tracers: Sequence[Tracer] = ()
    hooks: Sequence[Hook] = ()
    selection: Selection | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)


def pack(payload: Payload) -> bytes:
    """The payload as bytes: a line of JSON, `{"path": sys.path}`, then a pickle.

    Raises:
        ConfigError: something in it cannot be pickled; it names what, and where that is.
    """
    if isinstance(payload.agent, str):
        where, _, name = payload.agent.rpartition(":")
        file = Path(where)
        if where.endswith(".py") and file.is_file():
            payload = replace(payload, agent=f"{file.resolve()}:{name}")
    try:
        pickled = cloudpickle.dumps(payload)
    except Exception as error:
        raise _refusal(payload, error) from error
    return json.dumps({"path": sys.path}).encode() + b"\n" + pickled


def unpack(data: bytes) -> Payload:
    """What `pack` wrote, with its agent imported. Extends `sys.path`.

    Raises:
        ConfigError: the agent that is named cannot be imported. Anything else: that the agent's modules raise.
    """
    line, _, rest = data.partition(b"\n")
    sys.path[:] = list(dict.fromkeys([*json.loads(line)["path"], *sys.path]))
    payload = pickle.loads(rest)
    if isinstance(payload.agent, str):
        from agl.trainer.runners.loading import load_agent

        payload = replace(payload, agent=load_agent(payload.agent, None))
    return payload


def _refusal(payload: Payload, error: Exception) -> ConfigError:
    parts = {
        "agent": payload.agent, "tracer": payload.tracers, "hooks": payload.hooks, "agents": payload.selection,
        "initial_resources": payload.resources,
    }  # fmt: skip
    name, value = next((part for part in parts.items() if not _can_be_pickled(part[1])), ("agent", payload.agent))
    path, holder, culprit = _culprit(name, value)
    held = f"{path}, a {_kind(culprit)}," if holder is None else f"{path} ({_kind(holder)} holds a {_kind(culprit)})"
    return ConfigError(
        f"{name} cannot be sent to worker processes: {held} cannot be pickled: {error}",
        hint="make it inside the agent's function, so that each worker makes its own; or put the agent into a "
        'module and name it: fit("package.module:name") or fit("file.py:name")',
    )


def _kind(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _culprit(path: str, value: Any) -> tuple[str, Any, Any]:
    """The innermost part that cannot be pickled: the path to what holds it, its holder, itself."""
    holder_path, holder, seen = path, None, {id(value)}
    for _ in range(_MAX_DEPTH):
        for step, part in _parts(value):
            if id(part) not in seen and not _can_be_pickled(part):
                seen.add(id(part))
                if step:
                    holder_path, holder = path, value
                path, value = path + step, part
                break
        else:
            break
    return holder_path, holder, value


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object is made of, as pickle sees it, each with its place."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
    if isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif not isinstance(value, type | types.ModuleType | dict):
        slots = [name for cls in type(value).__mro__ for name in _names(cls.__dict__.get("__slots__", ()))]
        for name in dict.fromkeys([*getattr(value, "__dict__", {}), *slots]):
            try:
                part = getattr(value, name)
            except AttributeError:
                continue
            yield f".{name}", part


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue
    yield from ((f".{name}", function.__globals__[name]) for name in _globals(function.__code__, function.__globals__))
    yield ".__defaults__", function.__defaults__
    yield from ((f".{name}", part) for name, part in vars(function).items())


def _globals(code: types.CodeType, known: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in code.co_names if name in known)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant, known)


def _names(slots: str | Sequence[str]) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
