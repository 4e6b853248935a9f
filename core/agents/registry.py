"""Finds adapters by entry point, so that an adapter of a third party needs no change here."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from agl.agents.memory import MemoryUse
from agl.errors import ConfigError, PolicyFault, described
from agl.mdp.faults import REFUSALS
from agl.options import reject_unknown
from agl.tracing.import_hooks import when_imported
from agl.tracing.main_thread import watched
from agl.tracing.threads import carried_across_threads

if TYPE_CHECKING:
    from agl.agents.agent import Agent, RewardFunction, Tracer

log = logging.getLogger("agl")

GROUP = "agl.adapters"
CLIENTS = ("openai", "anthropic", "google_genai")
"""The adapters of SDKs' bare clients."""


class Adapter(Protocol):
    """An entry point of the group `agl.adapters`: a tracer class that also recognises its framework's agents."""

    @classmethod
    def handles(cls, agent: object) -> bool:
        """Whether `agent` belongs to this framework, by its type and without importing the framework."""
        ...

    @classmethod
    def wrap(cls, agent: Any, reward: RewardFunction | None, **options: Any) -> Agent:
        """The framework's agent as an `Agent`."""
        ...

    def instrument(self) -> Any: ...

    def uninstrument(self) -> Any: ...


_broken: list[str] = []
"""Adapters that cannot be imported, and why."""


@functools.cache
def adapters() -> dict[str, Any]:
    """Name -> tracer class of every installed adapter, in order of name, without those that cannot be imported."""
    loaded: dict[str, Any] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        try:
            loaded[entry.name] = entry.load()
        except Exception as error:
            where = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
            _broken.append(f"{entry.name}{where} ({type(error).__name__}: {error})")
            log.warning("an adapter cannot be imported: %s", _broken[-1])
    return loaded


def wrap(agent: Any, reward: RewardFunction | None = None, *, memory: Any = None, **options: Any) -> Agent:
    """Make an agent of any supported framework trainable.

    Args:
        agent: a framework's agent, or a function task -> output.
        reward: (task, output) -> float or dict of floats, sync or async.
        memory: an `agl.Memory`, or its `per("agent")`: what rollouts find in it with `agl.memory.search`, and leave
            in it for those of later steps.
        **options: `name`, `input` (task -> the framework's input), `output` (its result -> what is scored),
            `error_reward` (the reward of a run in which the agent raised).

    Raises:
        ConfigError: no adapter knows this type, or `memory` is none.
    """
    for adapter in adapters().values():
        if adapter.handles(agent):
            known = set(inspect.signature(adapter.wrap).parameters) - {"agent", "reward"}
            reject_unknown(options, known, f"agl.wrap of a {type(agent).__name__}")
            wrapped = adapter.wrap(agent, reward, **options)
            return wrapped if memory is None else replace(wrapped, memory=MemoryUse.of(memory))
    broken = "".join(f"; it cannot import {why}" for why in _broken)
    raise ConfigError(
        f"no adapter knows {type(agent).__module__}.{type(agent).__qualname__}",
        hint=f"agl found the adapters {', '.join(adapters()) or 'none'}{broken}. An adapter for another framework is "
        "found once it is installed; without one, run the agent in a function and use @agl.rollout",
    )


def answer_error_cause(error: BaseException) -> str | None:
    """What an exception says of a model's answer, a key of `agl.mdp.faults.CAUSES`; None of one that says nothing.

    It is `agl.PolicyFault`, or of a class that an adapter names (`answer_errors`), or one of the `REFUSALS`. Also
    looks at what it was raised from, and into groups.
    """
    causes = {name: c for adapter in adapters().values() for name, c in getattr(adapter, "answer_errors", {}).items()}
    for raised in causes_of(error):
        if isinstance(raised, PolicyFault):
            return "declared"
        for cls in type(raised).__mro__:
            if (cause := causes.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
                return cause
    during = (*causes_of(error), *causes_of(error.__context__))
    texts = [described(raised) for raised in during]
    return next((cause for code, cause in REFUSALS.items() if any(code in text for text in texts)), None)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what it was raised from, and the members of groups, outermost first."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        raised = waiting.pop(0)
        if raised is None or id(raised) in seen:
            continue
        seen.add(id(raised))
        yield raised
        waiting += [raised.__cause__, *(raised.exceptions if isinstance(raised, BaseExceptionGroup) else ())]


def switch_on(adapter: Any, report: Callable[[str], None] = log.warning) -> Tracer | None:
    """Switch on the adapter of an imported framework; None if it was on already, or cannot be.

    Args:
        report: gets the reason why it cannot.
    """
    try:
        recognises, tracer = getattr(adapter, "recognises", None), adapter()
        if (recognises is None or recognises()) and not getattr(tracer, "instrumented", False):
            tracer.instrument()
            return tracer
    except ImportError:
        pass  # part of the framework is missing, or another package has its name
    except Exception as error:
        report(f"{adapter.__name__} is off: {type(error).__name__}: {error}")
    return None


class ImportedFrameworks:
    """The tracer of functions: while it is on, so is the adapter of every framework that is imported, before or then.

    Pickling it leaves what is on behind.
    """

    def __init__(self) -> None:
        self._started: list[Tracer] = []
        self._forget: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple[type[ImportedFrameworks], tuple[()]]:
        return type(self), ()

    @property
    def instrumented(self) -> bool:
        """Whether it is on."""
        return bool(self._forget)

    def instrument(self) -> None:
        """Switch it on."""
        for adapter in adapters().values():
            callback = functools.partial(self._imported, adapter)
            self._forget.append(when_imported(tuple(getattr(adapter, "modules", ())), callback))

    def _imported(self, adapter: Any, module: str) -> None:
        tracer = switch_on(adapter)
        if tracer is not None:
            self._started.append(tracer)

    def uninstrument(self) -> None:
        """Switch it off, and the adapters that it has switched on."""
        while self._forget:
            self._forget.pop()()
        while self._started:
            self._started.pop().uninstrument()


@contextlib.contextmanager
def switched_on(tracers: Iterable[Tracer]) -> Iterator[None]:
    """Switch these tracers and those of the bare clients on for a block; those that were on before stay on.

    Where a framework's tracer was chosen, functions switch on no other frameworks.
    """
    clients = tuple(cls for name, cls in adapters().items() if name in CLIENTS)
    wanted = list(tracers)
    if any(not isinstance(t, (ImportedFrameworks, *clients)) for t in wanted):
        wanted = [t for t in wanted if not isinstance(t, ImportedFrameworks)]
    started = []
    with carried_across_threads(), watched():
        try:
            for tracer in (*wanted, *(cls() for cls in clients)):
                if not getattr(tracer, "instrumented", False):
                    tracer.instrument()
                    started.append(tracer)
            yield
        finally:
            for tracer in reversed(started):
                tracer.uninstrument()
