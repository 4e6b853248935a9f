"""What verl's trainer takes for its agent loops: it passes prompts on to the run, whose runners execute the agent.

It lives in the trainer's process. The run, in the process of who called `fit`, answers by putting rows into
TransferQueue, as verl's own workers do; nothing comes back through here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import agl.trainer.verl.estimator  # noqa: F401 - registers itself with verl, in the process that needs it
from agl.trainer.verl.events import Asked, Serving, Tell
from agl.trainer.verl.rows import Prompt


@dataclass
class _Connected:
    tell: Tell | None = None


_run = _Connected()


def connect(tell: Tell) -> None:
    """Say how the run is reached, before verl makes its manager."""
    _run.tell = tell


class AgentManager:
    """Implements verl's agent-loop manager.

    Args:
        config: of the whole job. tell: how the run is reached.
    """

    def __init__(self, config: Any, tell: Tell) -> None:
        self._rollout, self._tell = config.actor_rollout_ref.rollout, tell

    @classmethod
    def create(cls, config: Any, llm_client: Any, **_: Any) -> AgentManager:
        """Called by verl once its servers are up; hands their client to the run."""
        assert _run.tell is not None, "connect() comes first"
        _run.tell(Serving(llm_client))
        return cls(config, _run.tell)

    def generate_sequences(self, prompts: Any) -> None:
        """Ask for the rollouts of a batch, and return at once.

        Args:
            prompts: TensorDict with `uid`, `index`, `global_steps`, and `validate` in a validation; `__rollout_n__`
                where the number of rollouts is the prompt's own.
        """
        validate = bool(_value(prompts, "validate", 0, False))
        n = self._rollout.val_kwargs.n if validate else self._rollout.n
        self._tell(
            Asked(
                tuple(
                    Prompt(
                        uid=str(_value(prompts, "uid", i)),
                        index=int(_value(prompts, "index", i)),
                        n=int(_value(prompts, "__rollout_n__", i, n)),
                        step=int(_value(prompts, "global_steps", i)),
                        validate=validate,
                    )
                    for i in range(len(prompts))
                )
            )
        )


def _value(prompts: Any, name: str, i: int, default: Any = None) -> Any:
    """A prompt's value, whether each has its own or they share one."""
    if name not in prompts:
        return default
    column = prompts[name]
    try:
        value = column[i]
    except (TypeError, IndexError, KeyError):
        value = column
    return getattr(value, "data", value) if not hasattr(value, "item") else value.item()
