"""Runs a test, which is trusted, in a process that has the program's functions as proxies only.

Invariants: what a test compares is plain data of builtin types or a `Remote`, and no comparison of the two is asked of
the program. What a test evaluates or unpickles (`eval`, `exec`, `pickle.loads`), the program's process evaluates.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import pickle
import sys
import types
from typing import Any

from agl.trainer.graders.programs.inside import plain

VERDICT = b"V"
"""What a message with a verdict begins with; those to the program begin otherwise."""
MAX_TEXT = 2000
MODULE = "tests"
_PACKAGES = {"np": "numpy", "pd": "pandas"} | {name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy")}
_UNPICKLED = (pickle.PicklingError, TypeError, AttributeError)
_DATA_METHODS = frozenset(
    name for kind in (str, bytes, list, tuple, dict, set, int, float) for name in dir(kind) if name[0] != "_"
)


class Lost(BaseException):
    """The program ended, or answered what is no answer."""


class Broken(BaseException):
    """The test cannot be run, whatever the program."""


class Program:
    """The program's process, asked through whoever started both.

    Attributes:
        ending: the error that ended the test, which its own `except` cannot undo.
    """

    def __init__(self, answers: int, requests: int) -> None:
        self._answers = answers
        self._requests = requests
        self._functions: list[types.FunctionType] = []
        self.ending: BaseException | None = None

    def names(self, names: set[str]) -> dict[str, Any]:
        """The values of those of its global names that it has; a capital letter says that one is a class."""
        values = self.ask("names", sorted(names)) if names else {}
        if type(values) is not dict or not values.keys() <= names:
            raise self._end(Lost("answered with other names"))
        for name, value in values.items():
            if type(value) is Remote:
                value._class = name.lstrip("_")[:1].isupper()
        return values

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Have the program do something; the value, or the error that it raised."""
        if self.ending is not None:
            raise self.ending
        try:
            try:
                request = self._dumped((operation, *arguments))
            except _UNPICKLED as error:
                hint = "only data, functions and the program's own objects can be passed to it"
                raise self._end(
                    Broken(f"a test passes to the program what cannot be passed: {error}; {hint}")
                ) from error
            plain.send(self._requests, b"Q" + request)
            while "call" in (answer := self._receive()):
                plain.send(self._requests, b"R" + self._called(answer))
        except OSError as error:
            raise self._end(Lost("ended early")) from error
        return self._value(answer, operation)

    def _receive(self) -> dict[str, Any]:
        try:
            return plain.parse(plain.receive(self._answers))
        except (plain.Malformed, MemoryError) as error:
            raise self._end(Lost(f"gave no answer that can be read: {error}")) from error

    def _value(self, answer: dict[str, Any], operation: str) -> Any:
        match answer:
            case {"value": value}:
                try:
                    return plain.unpack(value, self._resolve)
                except (plain.Malformed, MemoryError) as error:
                    raise self._end(Lost(f"gave no answer that can be read: {error}")) from error
            case {"stop": True} if operation == "next":
                raise StopIteration
            case {"error": [str(name), str(text)]}:
                raise _error(name, text)
            case _:
                raise self._end(Lost("gave no answer that can be read"))

    def _resolve(self, data: list[Any]) -> Remote:
        match data:
            case ["object", int(number), str(kind)]:
                return Remote(self, number, kind)
            case _:
                raise ValueError("an unknown kind of value")

    def _called(self, answer: dict[str, Any]) -> bytes:
        """Call one of the tests' functions for the program."""
        try:
            function = self._functions[plain.unpack(answer["call"], self._resolve)]
            positional, named = plain.unpack(answer["arguments"], self._resolve)
        except (plain.Malformed, KeyError, IndexError, TypeError, ValueError) as error:
            raise self._end(Lost("gave no call that can be read")) from error
        try:
            return self._dumped((function(*positional, **named), None))
        except Exception as error:
            try:
                return self._dumped((None, error))
            except _UNPICKLED:
                return self._dumped((None, Exception(f"{type(error).__name__}: {error}")))

    def _dumped(self, message: Any) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self._functions).dump(message)
        return buffer.getvalue()

    def _end(self, error: BaseException) -> BaseException:
        self.ending = self.ending or error
        return error


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, functions: list[types.FunctionType]) -> None:
        super().__init__(file)
        self._functions = functions

    def persistent_id(self, value: Any) -> tuple[str, int | str] | None:
        if type(value) is Remote:
            return "object", value._number
        if type(value) is types.FunctionType and value.__module__ == MODULE:
            self._functions.append(value)
            return "function", len(self._functions) - 1
        return ("module", value.__name__) if type(value) is types.ModuleType else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is types.GeneratorType:
            return iter, (list(value),)
        return NotImplemented


def _asks(operation: str) -> Any:
    return lambda self, *arguments: self._program.ask(operation, self, *arguments)


class Remote:
    """An object of the program's that is no plain data: a function, a class, an instance, an iterator.

    It has no operators that get to see what a test compares it with, so it equals no data and holds no data: `in`
    iterates. What methods of data are called (`startswith`, `issubset`) it has only if it is what a class of a name
    with a capital letter made.
    """

    def __init__(self, program: Program, number: int, kind: str) -> None:
        self._program = program
        self._number = number
        self._kind = kind
        self._class = self._instance = False
        self._held: list[Any] | None = None
        self._sized = False

    def __call__(self, *positional: Any, **named: Any) -> Any:
        value = self._program.ask("call", self, positional, named)
        if self._class and type(value) is Remote:
            value._instance = True
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__qualname__"):
            raise AttributeError(name)
        if name in _DATA_METHODS and not (self._instance or self._class):
            raise AttributeError(f"the program's object of type {self._kind!r} is no plain data: {name}")
        return self._program.ask("getattr", self, name)

    def __eq__(self, other: object) -> Any:
        return self._program.ask("eq", self, other) is True if type(other) is Remote else NotImplemented

    def __hash__(self) -> int:
        return hash(self._number)

    def __len__(self) -> int:
        if self._instance:
            return self._of(int, "len")
        if (items := self._items()) is None:
            raise TypeError(f"the program's object of type {self._kind!r} has no len()")
        return len(items)

    def __iter__(self) -> Any:
        if self._instance or (items := self._items()) is None:
            return self._program.ask("iter", self)
        return iter(items)

    def _items(self) -> list[Any] | None:
        """All items of what has a length, read once, so that length and items agree; None of what has none."""
        if self._held is None:
            items = self._program.ask("items", self)
            if type(items) is not list and items is not None:
                raise TypeError("items() gave no list")
            self._sized = items is not None
            self._held = items or []
        return self._held if self._sized else None

    def __bool__(self) -> bool:
        return self._of(bool, "bool")

    def __str__(self) -> str:
        return self._of(str, "str")

    def __repr__(self) -> str:
        return self._of(str, "repr")

    def _of(self, kind: type, operation: str) -> Any:
        value = self._program.ask(operation, self)
        if type(value) is not kind:
            raise TypeError(f"{operation}() gave no {kind.__name__}")
        return value

    __next__ = _asks("next")
    __getitem__ = _asks("getitem")
    __module__ = property(lambda self: self._program.ask("getattr", self, "__module__"))  # type: ignore[assignment]
    __doc__ = property(lambda self: self._program.ask("getattr", self, "__doc__"))  # type: ignore[assignment]


def evaluate(program: Program, test: dict[str, Any]) -> None:
    """Run a test's code, and its function if it names one.

    Raises:
        BaseException: whatever the test raises: it has not passed.
        Broken: it cannot pass.
    """
    tree = ast.parse(test["code"])
    space: dict[str, Any] = {"__name__": MODULE}
    modules, wanted = _needed(tree, test.get("argument"))
    for name, module in modules.items():
        try:
            space[name] = importlib.import_module(module)
        except ImportError as error:
            raise Broken(f"the tests use {name!r}: {error}") from error
    space |= program.names(wanted)
    space |= _evaluating(program)
    solution = types.ModuleType("solution")
    solution.__getattr__ = lambda name: _member(program, name)  # type: ignore[method-assign]
    sys.modules["solution"] = solution
    exec(compile(tree, "tests.py", "exec"), space)
    if test["call"]:
        argument = test.get("argument")
        if argument and argument not in space:
            raise NameError(f"name {argument!r} is not defined")
        space[test["call"]](*([space[argument]] if argument else []))
    if program.ending is not None:
        raise program.ending


def _evaluating(program: Program) -> dict[str, Any]:
    """`eval` and `exec` for a test, which ask the program's process; `pickle.loads` does so from now on."""

    def named(text: Any, namespace: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """(where names are set, those of it that a text uses)."""
        if not isinstance(text, str | bytes):
            raise program._end(Broken("a test evaluates what is no text"))
        frame = sys._getframe(2)
        space = namespace if namespace is not None else frame.f_globals
        known = namespace if namespace is not None else frame.f_globals | frame.f_locals
        used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        return space, {name: known[name] for name in used & known.keys()}

    def evaluate(text: Any, globals: Any = None, locals: Any = None, /) -> Any:
        if isinstance(text, str | bytes):
            text = text.strip()
        return program.ask("eval", text, named(text, globals if locals is None else (globals or {}) | locals)[1])

    def execute(text: Any, globals: Any = None, locals: Any = None, /) -> None:
        space, used = named(text, globals if locals is None else locals)
        values = program.ask("exec", text, used)
        if type(values) is not dict:
            raise program._end(Lost("gave no answer that can be read"))
        space.update(values)

    pickle.loads = lambda data, /, **_: program.ask("loads", data, {})  # type: ignore[assignment]
    return {"eval": evaluate, "exec": execute}


def _needed(tree: ast.Module, entry_point: str | None) -> tuple[dict[str, str], set[str]]:
    """(name -> module that the tests use without importing it, names that are the program's).

    The program cannot shadow a builtin function, but for one that is named as the tested function.
    """
    nodes = list(ast.walk(tree))
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    owners = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    others = loaded - bound - imported - vars(builtins).keys()
    modules = {
        name: _PACKAGES.get(name, name)
        for name in others
        if (name in sys.stdlib_module_names or name in _PACKAGES)
        and owners.count(name) == sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
    }
    # A name that only some function of the tests binds may be the program's elsewhere.
    wanted = (loaded - imported - vars(builtins).keys() - modules.keys()) | ({entry_point} if entry_point else set())
    if not entry_point and not others - modules.keys() and "solution" not in _imports(nodes):
        shadowed = called & vars(builtins).keys()
        if len(shadowed) > 1:
            raise Broken(
                f"a test names only builtin functions ({', '.join(sorted(shadowed))}): which one is the program's? "
                "write it as check(candidate), with an entry_point"
            )
        wanted |= shadowed
    return modules, wanted


def _imports(nodes: list[ast.AST]) -> set[str]:
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return modules | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def run(answers: int, requests: int, job: dict[str, Any]) -> None:
    """Run a test, and write its verdict: `VERDICT`, the job's nonce, and as JSON the kind and the outcome.

    The kind is "passed", "failed", or "broken" for a test that cannot be run.
    """
    for stream, mode in ((0, "r"), (1, "w"), (2, "w")):
        setattr(sys, ("stdin", "stdout", "stderr")[stream], os.fdopen(stream, mode, encoding="utf-8", errors="replace"))
    nonce = job.pop("nonce")
    program = Program(answers, requests)
    sys.addaudithook(_refuse)
    try:
        evaluate(program, job["test"])
        kind = "passed"
        text = "passed"
    except BaseException as error:
        error = program.ending or error
        kind = "broken" if isinstance(error, Broken) else "failed"
        text = str(error) if isinstance(error, Broken | Lost) else f"{type(error).__name__}: {_text(error)}"
    plain.send(requests, VERDICT + nonce.encode() + json.dumps([kind, text[:MAX_TEXT]]).encode())
    os._exit(0)


def _refuse(event: str, _: Any) -> None:
    if event == "pickle.find_class":
        raise Broken("a test unpickles what a program gave, which could make anything: use pickle.loads")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return type(failed).__name__


def _member(program: Program, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    values = program.names({name})
    if name not in values:
        raise AttributeError(f"the program has no {name!r}")
    return values[name]


def _error(name: str, text: str) -> Exception:
    """The builtin error of a name, or one that is only called so; never one that ends a loop of the tests."""
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        try:
            return kind(text)
        except TypeError:
            pass
    return type(name if name.isidentifier() else "Exception", (Exception,), {})(text)
