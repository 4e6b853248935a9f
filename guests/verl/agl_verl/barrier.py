"""Brings the trainers of several policies together: what each of them reports or requests counts once all have."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TypeVar

from agl.errors import TrainingError
from agl_verl.events import Checkpoint, RolloutRequest, StepResult, TrainingStart

E = TypeVar("E")


class Barrier:
    """One event of a kind from every policy makes a set; those of one policy keep their order.

    Args:
        policies: names, in order.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self._policies = tuple(policies)
        self._waiting: dict[type, dict[str, deque[object]]] = defaultdict(
            lambda: {name: deque() for name in self._policies}
        )

    def arrive(self, policy: str, event: E) -> dict[str, E] | None:
        """The events by policy, in their order, once each policy has one of this kind; None until then.

        Raises:
            TrainingError: they are not about the same step or the same prompts.
        """
        waiting = self._waiting[type(event)]
        waiting[policy].append(event)
        if not all(waiting.values()):
            return None
        events = {name: queue.popleft() for name, queue in waiting.items()}
        places = {name: _place(e) for name, e in events.items()}
        first, *others = places
        for other in others:
            if places[other] != places[first]:
                raise TrainingError(
                    f"verl's trainers are not at the same place: policy {first!r} {_words(places[first])}, policy "
                    f"{other!r} {_words(places[other])}",
                    hint="they train the same rollouts, so their data and steps must agree: resume with resume=True "
                    "from the last checkpoint that all of them have; if it happens again, please report it",
                )
        return events  # type: ignore[return-value]


def _place(event: object) -> tuple[object, ...]:
    """What must be equal for all policies."""
    match event:
        case RolloutRequest(prompts):
            return ("requests", *((p.validate, p.step, p.index, p.n) for p in prompts))
        case TrainingStart(step, steps):
            return ("begins", step, steps)
        case Checkpoint(step):
            return ("has saved", step)
        case StepResult(step):
            return ("has trained", step)
    return ()


def _words(place: tuple[object, ...]) -> str:
    what, *rest = place
    if what != "requests":
        return f"{what} step {' of '.join(map(str, rest))}"
    if not rest:
        return "requests no rollouts"
    (validate, step, _, n), *_ = rest  # type: ignore[misc]
    tasks = ", ".join(str(index) for _, _, index, _ in rest[:8])  # type: ignore[misc]
    kind = f"the validation after step {step}" if validate else f"step {step}"
    return f"requests {n} rollouts each of tasks {tasks}{', ...' if len(rest) > 8 else ''} for {kind}"
