"""Which failures are not tried again: those of the agent's or the reward's own code that happen the same way each time.

What the network, the operating system or a service causes is always tried again, as is a command's failure, of which no
more is known than that it failed.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections import Counter

from agl.errors import AglError
from agl.trainer.runners.command import CommandFailed
from agl.trainer.store.types import Rollout

ENOUGH = 2
"""Rollouts of a step that ended alike at two attempts in a row; the step's others are not tried again then."""

_SERVICES = {"aiohttp", "anthropic", "botocore", "google", "grpc", "httpcore", "httpx", "openai", "requests", "urllib3"}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def raised_at(error: BaseException) -> str | None:
    """The innermost line of the user's own code in which an exception was raised, "file:line". None if something else
    than code may have caused it, or what it was raised from."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        raised = waiting.pop()
        if raised is None or raised in seen:
            continue
        if isinstance(raised, OSError | AglError | CommandFailed):
            return None
        if type(raised).__module__.partition(".")[0] in _SERVICES:
            return None
        seen.append(raised)
        waiting += [raised.__cause__, raised.__context__]
        waiting += raised.exceptions if isinstance(raised, BaseExceptionGroup) else ()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(own or frames)), None)


class Repeats:
    """What the attempts of a run ended with: failures by their type, message and place.

    Invariant: a failure after which another attempt of the same rollout ended otherwise is a matter of chance, such as
    of what was sampled: from then on only a repetition in the same rollout ends that rollout.
    """

    def __init__(self) -> None:
        # Hashes: a message may be long.
        self._last: dict[str, int] = {}
        self._alike = Counter[tuple[int, int]]()
        self._chance: set[int] = set()

    def futile(self, rollout: Rollout, attempt: int, failure: object) -> str | None:
        """Why another attempt would end like this one; None if it may not, or there is none left.

        Args:
            failure: type, message and place; "" of a success, None of what is always tried again.
        """
        if failure is None:
            return None
        this, before = hash(failure), self._last.pop(rollout.rollout_id, None)
        if before is not None and before != this:
            self._chance.add(before)
        if failure == "":
            return None
        step = -1 if rollout.step is None else rollout.step
        left = attempt < rollout.config.max_attempts and "failed" in rollout.config.retry_on
        if before == this:
            self._alike[step, this] += 1
            return "the attempt before it failed in the same way" if left else None
        if left and step >= 0 and this not in self._chance and self._alike[step, this] >= ENOUGH:
            return f"{ENOUGH} rollouts of this step failed in the same way, twice in a row"
        if left:
            self._last[rollout.rollout_id] = this
        return None
