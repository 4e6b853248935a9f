"""What stopped verl's trainer, as an error of agl's that says where to look."""

from __future__ import annotations

import ray.exceptions

from agl.errors import AglError, TrainingError


def as_agl(error: BaseException, log: str) -> AglError:
    """The original error if it is ours, else a `TrainingError`.

    Args:
        error: as the trainer raised it, or as Ray passed it on.
        log: the file or folder with the trainer's output.
    """
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, AglError):
        return cause
    first = _innermost(cause if isinstance(cause, BaseException) else error)
    return TrainingError(f"verl stopped: {first}", hint=f"the trainer's own log has the rest: {log}")


def _innermost(error: BaseException) -> str:
    """The first cause in one line: Ray, hydra and verl each wrap the errors that they pass on."""
    while (cause := error.__cause__ or getattr(error, "cause", None)) is not None and cause is not error:
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    messages = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return messages[-1] if messages else f"{type(error).__name__}: {lines[0] if lines else ''}"
