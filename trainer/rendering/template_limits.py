"""Limits on a chat template, which comes with a model and is a program: how long it may compute, and how much it makes.

Jinja compiles a template to a Python function, and computes what is constant in it meanwhile. So a template is compiled
with guards in its loops, its operators and what it calls. While a model is loaded, its lines are counted as they run,
too, which takes longer than rendering itself.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.utils import generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

from agl.errors import ConfigError, ModelLoadError

LINES = 2_000_000
"""Lines of a compiled template that one rendering may execute; real templates take some thousands."""
MEMORY_BYTES = 1 << 30
"""How much the process may grow meanwhile."""
ROUNDS = 1_000_000
"""Rounds of loops, and macros, that the rendering of a request may take."""
TEXT = 1 << 26
"""The longest text, in characters, or list that it may make."""
ALL_TEXT = 1 << 28
"""The length of all that it makes."""
SECONDS = 10.0
"""Of processor time, which is looked at in its loops."""
_ROUNDS_PER_LOOK = 64
_BITS = 1024
_WIDTH = 1 << 20
"""The largest number that it may give to methods of texts and to filters, which take it as a width."""
_PARAGRAPHS = 100
_TEMPLATE = "<template>"
"""The file of the code that Jinja compiles."""
_HINT = "look at it: it is no usual one; another is set by chat_template="
_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes that `ru_maxrss` counts in."""


@contextlib.contextmanager
def within_limits() -> Iterator[None]:
    """Within the block, in this thread, a template that exceeds a limit is ended.

    Raises:
        ModelLoadError: it does, or there is not enough memory for what it makes.
    """
    lines, before = 0, _peak()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines > LINES:
            raise _refusal(f"executes more than {LINES:,} lines to render a short conversation")
        if _peak() - before > MEMORY_BYTES:
            raise _refusal(f"takes more than {MEMORY_BYTES >> 20} MiB to render a short conversation")
        return count

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename == _TEMPLATE else None

    debugger = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except ConfigError as error:
        raise ModelLoadError(error.message, hint=_HINT) from None
    except MemoryError:
        raise _refusal("takes more memory than there is to render a short conversation") from None
    finally:
        sys.settrace(debugger)
    if _peak() - before > MEMORY_BYTES:
        raise _refusal(f"takes more than {MEMORY_BYTES >> 20} MiB to render a short conversation")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def _refusal(what: str) -> ModelLoadError:
    return ModelLoadError(f"the model's chat template {what}", hint=_HINT)


class GuardedTemplate:
    """A chat template whose renderings have limits. Thread-safe.

    Args:
        source: the template's text.
    """

    def __init__(self, source: str) -> None:
        # Imported here, since it takes long and most of this module's users have done so.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self._source = source
        base: Environment = _compile_jinja_template("").environment
        environment: Any = base.overlay()
        environment.call = _guarded_call(base)
        filters = {name: _guarded_filter(name, one) for name, one in environment.filters.items()}
        environment.filters = {**filters, **_GUARDS}
        tree = _Guards().visit(environment.parse(source))
        self._template = Template.from_code(environment, environment.compile(tree), environment.make_globals(None))

    def __reduce__(self) -> tuple[type[GuardedTemplate], tuple[str]]:
        return GuardedTemplate, (self._source,)

    def render(self, variables: dict[str, Any]) -> str:
        """The text of the template.

        Raises:
            TemplateError: it refuses its variables.
            ConfigError: it exceeds a limit.
        """
        _THREAD.budget = _Budget()
        return self._template.render({**variables, _BUDGET: _THREAD.budget})


_THREAD = threading.local()
"""Whose `budget` is that of the last rendering in this thread."""
_BUDGET = "agl_budget"
"""The variable that holds what one rendering has used."""


class _Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.rounds = 0
        self.length = 0
        self.began = time.thread_time()

    def take(self, length: int) -> None:
        """Count what is about to be made."""
        self.length += length
        if length > TEXT or self.length > ALL_TEXT:
            raise _exceeded(
                f"makes a text of more than {TEXT:,} characters, or {ALL_TEXT:,} in all, from this conversation"
            )


def _round(length: int, budget: _Budget) -> str:
    """A round of a loop, or a macro, that writes so many characters of its own."""
    budget.rounds += 1
    if budget.rounds > ROUNDS:
        raise _exceeded(f"takes more than {ROUNDS:,} rounds of its loops to render this conversation")
    if budget.rounds % _ROUNDS_PER_LOOK == 0 and time.thread_time() - budget.began > SECONDS:
        raise _exceeded(f"takes more than {SECONDS:g} s of processor time to render this conversation")
    budget.take(length)
    return ""


def _write(value: Any, budget: _Budget) -> Any:
    if isinstance(value, str):
        budget.take(len(value))
    return value


def _join(first: Any, budget: _Budget, *others: Any) -> str:
    texts = [str(value) for value in (first, *others)]
    budget.take(sum(map(len, texts)))
    return "".join(texts)


def _add(left: Any, budget: _Budget, right: Any) -> Any:
    budget.take(_size(left) + _size(right))
    return left + right


def _multiply(left: Any, budget: _Budget, right: Any) -> Any:
    for one, times in ((left, right), (right, left)):
        if isinstance(times, int):
            budget.take(_size(one) * max(0, times))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _BITS:
        raise _exceeded(f"computes a number of more than {_BITS:,} bits")
    return left * right


def _power(left: Any, budget: _Budget, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _BITS:
        raise _exceeded(f"computes a number of more than {_BITS:,} bits")
    return left**right


def _modulo(left: Any, budget: _Budget, right: Any) -> Any:
    if isinstance(left, str):
        values = right if isinstance(right, tuple) else [*right.values()] if isinstance(right, dict) else [right]
        _require_possible("format", left, values)
    return _made(left % right)


_GUARDS: Mapping[str, Callable[..., Any]] = {
    "agl_round": _round,
    "agl_write": _write,
    "agl_join": _join,
    "agl_add": _add,
    "agl_multiply": _multiply,
    "agl_power": _power,
    "agl_modulo": _modulo,
}
"""What stands in a guarded template for the beginning of a round, a value that is written, and operators."""


class _Guards(NodeTransformer):
    """Puts the guards into a template."""

    def _guarded(self, node: Any, method: str, first: Any, *others: Any) -> nodes.Filter:
        # As a filter, since the sandbox takes long to call anything else.
        arguments = [nodes.Name(_BUDGET, "load"), *others]
        return nodes.Filter(first, f"agl_{method}", arguments, [], None, None, lineno=node.lineno)

    def _counted(self, node: Any) -> Any:
        """A node with a body, each run of which is a round."""
        length = sum(len(text.data) for part in node.body for text in part.find_all(nodes.TemplateData))
        self.generic_visit(node)
        round_ = self._guarded(node, "round", nodes.Const(length))
        node.body = [nodes.Output([round_]).set_lineno(node.lineno), *node.body]
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            one if isinstance(one, nodes.TemplateData) else self._guarded(node, "write", one) for one in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return self._guarded(node, "join", *node.nodes)

    def _operator(self, node: Any, method: str) -> Any:
        self.generic_visit(node)
        return self._guarded(node, method, node.left, node.right)

    def visit_Add(self, node: nodes.Add) -> Any:
        return self._operator(node, "add")

    def visit_Mul(self, node: nodes.Mul) -> Any:
        return self._operator(node, "multiply")

    def visit_Pow(self, node: nodes.Pow) -> Any:
        return self._operator(node, "power")

    def visit_Mod(self, node: nodes.Mod) -> Any:
        return self._operator(node, "modulo")


def _guarded_call(environment: Environment) -> Callable[..., Any]:
    """What calls functions for a template of this environment."""
    call: Callable[..., Any] = environment.call  # type: ignore[attr-defined]

    def guarded(context: Any, function: Any, *arguments: Any, **options: Any) -> Any:
        # Jinja wraps the methods that format.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            _require_possible(function.__name__, owner, [*arguments, *options.values()])
            _require_small(_WIDTH, *arguments, *options.values())
        elif function is generate_lorem_ipsum:
            _require_small(_PARAGRAPHS, *arguments, *options.values())
        return _made(call(context, function, *arguments, **options))

    return guarded


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with limits on what it is given."""

    def guarded(*arguments: Any, **options: Any) -> Any:
        # Those that take their context have it first, and the value after it.
        values = [one for one in arguments if isinstance(one, str | int | list | tuple)]
        if values and (isinstance(values[0], str) or name == "join"):
            _require_possible(name, values[0], values[1:])
        _require_small(_WIDTH, *values[1:], *options.values())
        return _made(function(*arguments, **options))

    guarded.__dict__.update(getattr(function, "__dict__", {}))
    return guarded


def _require_possible(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Refuse a method or filter of a text whose result is too long."""
    length = 0
    if name == "replace" and len(arguments) >= 2:
        length = len(value) + value.count(str(arguments[0])) * len(str(arguments[1]))
    elif name == "join":
        texts = value if isinstance(value, list | tuple) else next(iter(arguments), ())
        glue = value if isinstance(value, str) else str(next(iter(arguments), ""))
        if isinstance(texts, list | tuple):
            length = sum(len(one) + len(glue) if isinstance(one, str) else len(glue) for one in texts)
    elif name in ("format", "format_map"):
        _require_narrow(value)
        given = [one for each in arguments for one in (each.values() if isinstance(each, dict) else [each])]
        longest = max((len(one) for one in given if isinstance(one, str)), default=0)
        length = len(value) + (value.count("%") + value.count("{")) * longest
    if length > TEXT:
        raise _exceeded(f"makes a text of more than {TEXT:,} characters to render this conversation")


def _size(value: Any) -> int:
    """How many characters a value takes, about."""
    if isinstance(value, list | tuple):
        return 8 * len(value)
    return len(value) if isinstance(value, str) else 0


def _require_narrow(form: str) -> None:
    """Refuse a format with a width that is no text's."""
    if "*" in form or re.search(r"\d{7}", form):
        raise _exceeded("formats a text with a width of more than six digits, or of a variable")


def _require_small(most: int, *values: Any) -> None:
    """Refuse numbers that may be meant as widths."""
    if any(isinstance(value, int) and abs(value) > most for value in values):
        raise _exceeded(f"calls something with a number of more than {most:,}")


def _made(value: Any) -> Any:
    """What a function or filter has returned, counted."""
    if isinstance(value, str):
        _THREAD.budget.take(len(value))
    return value


def _exceeded(what: str) -> ConfigError:
    return ConfigError(
        f"the model's chat template {what}",
        hint="shorten the conversation, or look at the template: it is no usual one",
    )
