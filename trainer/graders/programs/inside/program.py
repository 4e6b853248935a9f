"""Runs a program, and serves its functions to the test that judges it: calls in, plain data out.

All of this runs in the program's process and may be changed by the program; its answers are judged elsewhere.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from agl.trainer.graders.programs.inside import plain

MAX_MESSAGE = 2000
END = b"E"
"""The message after which a program's process ends."""
_BASES: tuple[Any, ...] = (int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)


class Candidate:
    """A program's module, and the objects of it that the tests refer to."""

    def __init__(self, requests: int, answers: int, module: types.ModuleType) -> None:
        self._requests = requests
        self._answers = answers
        self._module = module
        self._objects: list[Any] = []

    def serve(self) -> bytes:
        """Answer requests until the reply to a call of one of the tests' functions comes, and return that."""
        while True:
            data = plain.receive(self._requests)
            if data[:1] == END:
                os._exit(0)
            if data[:1] == b"R":
                return data[1:]
            try:
                answer = {"value": plain.pack(self._do(*self._load(data[1:])), self._refer)}
            except StopIteration:
                answer = {"stop": True}
            except BaseException as error:
                answer = failed(error)
            plain.send(self._answers, answer)

    def _do(self, operation: str, target: Any, *arguments: Any) -> Any:
        match operation:
            case "names":
                return {name: vars(self._module)[name] for name in target if name in vars(self._module)}
            case "call":
                positional, named = arguments
                try:
                    value = target(*positional, **named)
                    made = isinstance(target, type) and target.__module__ == self._module.__name__
                    return _Object(value) if made else value
                except StopIteration as error:  # it would end an iteration of the tests
                    raise RuntimeError("StopIteration") from error
            case "eval" | "exec" | "loads":
                return _evaluated(operation, target, *arguments)
            case "getattr":
                return getattr(target, *arguments)
            case "next":
                return next(target)
            case "iter":
                return _Iteration(iter(target))
            case "items":
                return list(target) if hasattr(target, "__len__") else None
            case "getitem":
                return target[arguments[0]]
            case "eq":
                return bool(target == arguments[0])
            case _:
                return {"len": len, "str": str, "repr": repr, "bool": bool}[operation](target)

    def _refer(self, value: Any) -> list[Any]:
        """Plain data that is of a subclass as its base; anything else by a number.

        What a class of the program's made is no data, even if the class is a list's: tests call its methods.
        """
        if type(value) is _Object:
            return self._number(value.value)
        for base in _BASES:
            if isinstance(value, base):
                exact = base.__str__(value) if base is str else base(value)
                return plain.pack(exact, self._refer) if type(exact) is base else self._number(value)
        if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:  # a number of NumPy's
            return plain.pack(value.item(), self._refer)
        return self._number(value)

    def _number(self, value: Any) -> list[Any]:
        self._objects.append(value)
        return ["object", len(self._objects) - 1, type(value).__name__]

    def _load(self, data: bytes) -> Any:
        return _Unpickler(data, self._resolve).load()

    def _resolve(self, reference: tuple[str, Any]) -> Any:
        kind, number = reference
        if kind == "object":
            return self._objects[number]
        if kind == "module":
            return importlib.import_module(number)

        def function(*positional: Any, **named: Any) -> Any:
            arguments = plain.pack([list(positional), named], self._refer)
            plain.send(self._answers, {"call": number, "arguments": arguments})
            value, error = self._load(self.serve())
            if error is not None:
                raise error
            return value

        return function


class _Unpickler(pickle.Unpickler):
    """Python 3.13.0 allows no `persistent_load` on an instance."""

    def __init__(self, data: bytes, resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)


class _Object:
    """What is to be referred to by a number."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Iteration:
    """An iterator of a separate type, so that it is never taken for data."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._items)


def _evaluated(operation: str, text: Any, space: dict[str, Any]) -> Any:
    """What a test would evaluate: the value, or the names that it sets."""
    if operation == "loads":
        return pickle.loads(text)
    before = dict(space)
    if operation == "eval":
        return eval(text, space)
    exec(text, space)
    return {name: value for name, value in space.items() if name != "__builtins__" and value is not before.get(name)}


def failed(error: BaseException) -> dict[str, Any]:
    """The message that says which error a program raised."""
    try:
        text = str(error)[:MAX_MESSAGE]
    except BaseException:
        text = ""
    return {"error": [type(error).__name__, text]}


def run(requests: int, answers: int, errors: int, job: dict[str, Any]) -> None:
    """Run a program, and serve its functions unless it is one that reads standard input and prints.

    Args:
        requests, answers, errors: descriptors of the pipes; `errors` takes the error that ends it.
    """
    # A trainer under nohup ignores SIGHUP, and so would this; the two are ignored by Python itself.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if number == signal.SIGINT or signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for stream, mode in ((0, "r"), (1, "w"), (2, "w")):
        opened = os.fdopen(stream, mode, encoding="utf-8", errors="replace")
        setattr(sys, ("stdin", "stdout", "stderr")[stream], opened)
    prints = job["kind"] == "stdin"
    module = types.ModuleType("__main__" if prints else "solution")
    sys.modules[module.__name__] = module
    sys.argv = ["solution.py"]
    try:
        try:
            exec(compile(job["code"], "solution.py", "exec"), module.__dict__)
        except SystemExit as ending:
            if not prints or ending.code not in (None, 0):
                raise
        sys.stdout.flush()
    except BaseException as error:
        name, text = failed(error)["error"]
        os.write(errors, f"{name}: {text}".encode(errors="replace"))
        os._exit(1)
    if prints:
        os._exit(0)
    os.close(errors)
    try:
        plain.send(answers, {"value": True})
        Candidate(requests, answers, module).serve()
    except EOFError:
        os._exit(0)
    finally:
        os._exit(1)
