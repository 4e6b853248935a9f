"""Exceptions of agents, and what they say of the model's answer."""

from __future__ import annotations

from collections.abc import Iterator

from agl.agents.frameworks import adapters
from agl.errors import PolicyFault, described
from agl.mdp.faults import REFUSALS


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
