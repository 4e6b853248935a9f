"""What worker processes receive: the agent, its tracers, hooks, selection and resources, pickled or named.

Functions and classes of `__main__`, of notebooks and of files that a command line named travel by value (cloudpickle),
so no script needs an import guard; those of modules travel by name, and `sys.path` travels with them.
"""

from __future__ import annotations

import contextlib
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
from agl.trainer.runners.loading import file_modules, load_agent

_MAX_DEPTH = 40


@dataclass(frozen=True, slots=True)
class Payload:
    """All that a worker needs in addition to its leases.

    Attributes:
        agent: what to run, or "package.module:name" or "file.py:name", which is imported where it runs.
        tracers: to switch on in addition to the agent's own.
        hooks: called around every attempt.
        selection: which agents are trained.
        resources: named values for the agent, in addition to the policy.
    """

    agent: Agent | str
    tracers: Sequence[Tracer] = ()
    hooks: Sequence[Hook] = ()
    selection: Selection | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)


def pack(payload: Payload, *, here: bool = True) -> bytes:
    """The payload as bytes: a line of JSON, `{"path": sys.path}`, then a pickle.

    Args:
        here: whether it is unpacked where this program's files are.

    Raises:
        ConfigError: something in it cannot be pickled; the message says what, and where it is.
    """
    if isinstance(payload.agent, str):
        module, _, name = payload.agent.rpartition(":")
        file = Path(module)
        if here and file.suffix == ".py" and file.is_file():
            payload = replace(payload, agent=f"{file.resolve()}:{name}")
    for module in file_modules():
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps(payload)
    except Exception as error:
        raise _refusal(payload, error) from error
    return json.dumps({"path": sys.path if here else []}).encode() + b"\n" + pickled


def unpack(data: bytes) -> Payload:
    """What `pack` wrote, with its agent imported. Extends `sys.path`.

    Raises:
        ConfigError: the agent that is named cannot be imported. Anything else: raised by the agent's modules.
    """
    line, _, rest = data.partition(b"\n")
    sys.path[:] = list(dict.fromkeys([*json.loads(line)["path"], *sys.path]))
    payload = pickle.loads(rest)
    if isinstance(payload.agent, str):
        payload = replace(payload, agent=load_agent(payload.agent, None))
    return payload


def _refusal(payload: Payload, error: Exception) -> ConfigError:
    parts = {
        "agent": payload.agent,
        "tracer": payload.tracers,
        "hooks": payload.hooks,
        "agents": payload.selection,
        "initial_resources": payload.resources,
    }
    name, value = next((part for part in parts.items() if not _can_be_pickled(part[1])), ("agent", payload.agent))
    path, holder, culprit = _culprit(name, value)
    if holder is None:
        description = f"{path}, a {_kind(culprit)},"
    else:
        description = f"{path} ({_kind(holder)} holds a {_kind(culprit)})"
    return ConfigError(
        f"{name} cannot be sent to worker processes: {description} cannot be pickled: {error}",
        hint="make it inside the agent's function, so that each worker makes its own; or put the agent into a "
        'module and name it: fit("package.module:name") or fit("file.py:name")',
    )


def _kind(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _culprit(path: str, value: Any) -> tuple[str, Any, Any]:
    """The innermost part that cannot be pickled: (path to its holder, its holder, the part itself)."""
    inner = path
    holder = None
    seen = {id(value)}
    for _ in range(_MAX_DEPTH):
        parts = ((place, part) for place, part in _parts(value) if id(part) not in seen and not _can_be_pickled(part))
        if (first := next(parts, None)) is None:
            break
        path = inner
        holder = value
        inner = path + first[0]
        value = first[1]
        seen.add(id(value))
    return path, holder, value


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What pickle would save of an object: (place in the object, part)."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
        return
    if isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
        return
    attributes: dict[str, Any] = {}
    if isinstance(value, functools.partial):
        attributes = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, types.MethodType):
        attributes = {"__self__": value.__self__}
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        empty = types.CellType()
        attributes = {name: cell.cell_contents for name, cell in cells if cell != empty}
        names = _global_names(value.__code__)
        attributes |= {name: part for name, part in value.__globals__.items() if name in names}
        attributes |= {"__defaults__": value.__defaults__, **vars(value)}
    elif not isinstance(value, type | types.ModuleType):
        with contextlib.suppress(TypeError):
            state: Any = object.__getstate__(value)
            # `__dict__`, or with slots (`__dict__`, slots).
            for values in state if isinstance(state, tuple) else (state,):
                attributes |= values or {}
    yield from ((f".{name}", part) for name, part in attributes.items())


def _global_names(code: types.CodeType) -> set[str]:
    """Names that the code and the functions within it look up."""
    inner = (_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)
