"""Replaces verl's agent-loop manager: it passes prompts to the run, and the run's runners execute the agent.

It lives in the process of verl's trainer. The run lives in the process that called `fit`; it answers by putting rows
into TransferQueue, as verl's own workers do. Nothing comes back through this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import agl_verl.estimator  # noqa: F401 - registers itself with verl, in the process that needs it
from agl_verl.events import RolloutRequest, Send, ServerStart
from agl_verl.rows import Prompt


@dataclass
class _Connection:
    send: Send | None = None
    uids: set[str] = field(default_factory=set)


_run = _Connection()


def connect(send: Send) -> None:
    """Set how events reach the run, before verl makes its manager."""
    _run.send = send


def requested() -> set[str]:
    """The uids of all prompts that this process's trainer has requested."""
    return _run.uids


class AgentManager:
    """Implements verl's agent-loop manager.

    Args:
        config: verl's, of the whole job.
        send: sends events to the run.
    """

    def __init__(self, config: Any, send: Send) -> None:
        self._rollout = config.actor_rollout_ref.rollout
        self._send = send

    @classmethod
    def create(cls, config: Any, llm_client: Any, **_: Any) -> AgentManager:
        """Called by verl once its servers are up; sends their client to the run."""
        assert _run.send is not None, "connect() comes first"
        _run.send(ServerStart(llm_client))
        return cls(config, _run.send)

    def generate_sequences(self, prompts: Any) -> None:
        """Request the rollouts of a batch, and return at once.

        Args:
            prompts: TensorDict with `uid`, `index`, `global_steps`, and `validate` in a validation; `__rollout_n__`
                where prompts have different numbers of rollouts.
        """
        validate = bool(_value(prompts, "validate", 0, False))
        n = self._rollout.val_kwargs.n if validate else self._rollout.n
        request = RolloutRequest(
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
        _run.uids.update(p.uid for p in request.prompts)
        self._send(request)


def _value(prompts: Any, name: str, i: int, default: Any = None) -> Any:
    """A prompt's value, whether each prompt has one or they share it."""
    if name not in prompts:
        return default
    column = prompts[name]
    try:
        value = column[i]
    except (TypeError, IndexError, KeyError):
        value = column
    return getattr(value, "data", value) if not hasattr(value, "item") else value.item()
