"""Every error that agl raises on purpose: what happened, where, and what to do next."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from types import TracebackType

_SHOWN_MEMBERS = 3
"""Of a group of exceptions."""
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), os.path.dirname(__file__))
)
"""Where files are nobody's own: those of Python, of what is installed, and of agl."""
_TYPED = ("<stdin>", "<console>", "<ipython-input-", "<python-input-")
"""How the names of code begin that a person has typed into an interpreter."""


class AglError(Exception):
    """Base class. `hint` says what to do next; it is part of the message.

    Args:
        message: what happened.
        hint: what the reader can do about it.
        **where: the place, as known: rollout, attempt, agent, span, step, path, ...
    """

    def __init__(self, message: str, *, hint: str | None = None, **where: object) -> None:
        self.message = message
        self.hint = hint
        self.where = {k: v for k, v in where.items() if v is not None}
        super().__init__(str(self))

    def __str__(self) -> str:
        place = ", ".join(f"{k}={v}" for k, v in self.where.items())
        text = f"{self.message} ({place})" if place else self.message
        return f"{text}\n  -> {self.hint}" if self.hint else text

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.hint, self.where)


def _rebuild(cls: type[AglError], message: str, hint: str | None, where: dict[str, object]) -> AglError:
    return cls(message, hint=hint, **where)


class ConfigError(AglError):
    """An option that does not exist, or a value that it cannot take."""


class RefusedAnswerError(ConfigError):
    """A conversation that the chat template refuses because of an answer in it: that of the call `where["call"]`."""


class MissingExtraError(ConfigError, ModuleNotFoundError):
    """Something needs a package that is not installed; the hint has the line that installs it."""


class DatasetError(AglError):
    """A dataset that is empty or cannot be read."""


class ModelLoadError(AglError):
    """A model directory that does not hold a loadable model, tokenizer and chat template."""


class CaptureError(AglError):
    """An attempt that gives no transitions: no call, no match, or a bypassed gateway."""


class NoLLMCallError(CaptureError):
    """The agent made no LLM call at all."""


class NoAgentMatchedError(CaptureError):
    """The agent filter matched none of the agents that made calls."""


class BypassedGatewayError(CaptureError):
    """A selected agent's call went to a provider instead of the gateway."""


class MisroutedCallError(CaptureError):
    """A policy answered an agent that only seemed to be selected: a text was read as a glob, and is a name."""


class LostCallError(CaptureError):
    """The calls that were sent and the transitions do not agree."""


class UnreadableMessageError(AglError):
    """A message in an unknown form, or with another part where text is needed."""


class RewardError(AglError):
    """A reward that is missing or not a finite number."""


class JudgeError(RewardError):
    """The judge's endpoint cannot be reached, or refuses every request."""


class RolloutError(AglError):
    """A rollout that failed: the agent raised, or its output could not be scored."""


class RolloutTimeoutError(RolloutError):
    """A rollout that ran past its time limit."""


class MainThreadError(RolloutError):
    """Something that only a main thread may do was tried in a rollout, and Python refused it."""


class UserCodeError(RolloutError):
    """One fault of the user's code ended so many attempts of a step that the others would be a selection, or it left a
    group without the rewards that compare its rollouts."""


class PolicyFault(Exception):
    """For an agent to raise: the policy's own answer is why it cannot finish, so that the policy is to learn from it.

    The attempt counts as one that the policy ended: its calls are trained, with the lowest reward of their group. What
    a reward function raises is never the policy's; it returns a low reward instead.
    """


class NoTrainableDataError(AglError):
    """A training step that would train on nothing."""


class TrainingError(AglError):
    """An update that failed, for example with a loss or gradient that is not finite; the weights are unchanged."""


class CallbackError(AglError):
    """A callback of a run that raised; the run was ended after the step, with its checkpoint."""


class StalePolicyError(AglError):
    """The engine does not serve the policy that was just trained, or a sample is older than allowed."""


class GatewayError(AglError):
    """The gateway could not be started or reached."""


class EngineError(AglError):
    """The engine failed while sampling, or is closed."""


class ContextLengthError(EngineError):
    """A prompt that does not fit the model's context."""


class ServiceError(AglError):
    """A training server that cannot be reached or refuses, or a run on it that failed."""


class StoreError(AglError):
    """The store refused a request or failed."""


class ForbiddenError(StoreError):
    """The store's server does not permit this with this key."""


class AttemptOverError(StoreError):
    """The attempt is no longer open: cancelled, given up, or already reported. A retry changes nothing."""


class NotStoredError(StoreError):
    """There is no such rollout or attempt in the store."""


class StoreGoneError(StoreError):
    """The store's file was deleted, moved or replaced while it was open: nothing can be kept there any more."""


class StoreVersionError(StoreError):
    """The store was made by another version of agl, whose tables this one does not read."""


class ExportError(AglError):
    """Rollouts, traces or a policy that could not be written, or that the receiver refused."""


class CheckpointError(AglError):
    """A checkpoint that is missing, broken or belongs to another run."""


class HubError(AglError):
    """The Hugging Face hub or PyPI refuses a request, or cannot be reached."""


def described(error: BaseException, *, content: bool = True) -> str:
    """`Type: message`; the type alone without `content`, and of an exception whose message cannot be had.

    A group's own message says only how many there are, so the first few of its members follow.
    """
    if not content:
        return type(error).__qualname__
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        text = f"{text}: {'; '.join(described(member) for member in error.exceptions[:_SHOWN_MEMBERS])}"
    return text


class AsException(contextlib.AbstractContextManager[None]):
    """What user code raises in the block leaves it as an `Exception` that a future can hold.

    A `StopIteration` (`next` of an empty iterator) is lost in a future, whose waiter then waits for ever. A
    `SystemExit`, or whatever else is no `Exception`, would end the event loop that runs other rollouts. They become the
    cause of a `RuntimeError`. A task's cancellation, a coroutine's end, and what interrupts a main thread stay.
    """

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or isinstance(error, GeneratorExit):
            return
        if isinstance(error, Exception):
            if not isinstance(error, StopIteration):
                return
        elif threading.current_thread() is threading.main_thread() or _task_is_cancelled():
            return
        raise RuntimeError(f"user code raised {described(error)}").with_traceback(tb) from error


def _task_is_cancelled() -> bool:
    asyncio = sys.modules.get("asyncio")  # a third of the core's time to import
    if asyncio is None:
        return False
    with contextlib.suppress(RuntimeError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def outlined(error: BaseException) -> str:
    """The traceback of an exception and of its causes, without their messages and the lines of source code."""
    parts: list[str] = []
    raised: BaseException | None = error
    seen: set[int] = set()
    while raised is not None and id(raised) not in seen:
        seen.add(id(raised))
        frames = traceback.extract_tb(raised.__traceback__)
        places = [f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}' for frame in frames]
        parts.append("\n".join([*places, described(raised, content=False)]))
        raised = raised.__cause__ or (None if raised.__suppress_context__ else raised.__context__)
    return "\n\n".join(reversed(parts))


def own_lines(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that are lines of the user's own code, in their order.

    Code without a file is not: what a program has executed as a text ("<string>") can be a policy's answer, and what is
    generated or frozen is a library's. The line that executed it is.
    """
    return [f for f in frames if is_own_file(f.filename)]


def is_own_file(filename: str) -> bool:
    """Whether code with this name is the user's own, as `own_lines` has it."""
    if filename.startswith("<"):
        return filename.startswith(_TYPED)
    return not filename.startswith(_LIBRARIES)


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that names the options nearest to an unknown one (or all of them)."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
