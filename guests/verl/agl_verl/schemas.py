"""Answers within a JSON schema: which runs hold to one, and how the grammar reaches verl's vLLM.

Invariant: what vLLM hides when it samples, verl's actor hides when it computes log-probs (`agl_verl.masks`); a request
with a schema is refused where it would not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from agl.extras import install_line
from agl_verl.config.plan import ROLLOUT, Plan
from agl_verl.sharing import LIBRARY, obstacle

_BACKEND = f"{ROLLOUT}.engine_kwargs.vllm.structured_outputs_config"


def refusal(plan: Plan) -> str:
    """Why a run cannot hold answers to a schema, and what to do; "" if it can."""
    settings = plan.settings
    begins_again = "verl samples the rest of an answer as a new request, and its grammar would begin again"
    reasons = {
        f"mode={plan.mode!r}: {begins_again}": plan.mode != "sync",
        obstacle(plan): obstacle(plan),
        f"{_BACKEND}: only vLLM's guidance hides what the actor hides": any(k.startswith(_BACKEND) for k in settings),
        f"this installation: {install_line('structured')}": find_spec("llguidance") is None,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is None:
        return ""
    return (
        f"answers cannot be held to a schema with {why}. Change that; or train on one machine (agl.GRPO, also with "
        "engine='vllm'); or request no schema, describe the JSON in the prompt and parse the text"
    )


def overrides(plan: Plan) -> Mapping[str, Any]:
    """Dotted keys of verl's that a run needs to hold answers to schemas."""
    return {} if refusal(plan) else {LIBRARY: "agl_verl.masks", f"{_BACKEND}.backend": "guidance"}


@dataclass(frozen=True, slots=True)
class Lark:
    """A grammar as a request's `structured_outputs`. vLLM's own class takes its place when it arrives in a process of
    vLLM's, so that the sender need not import vLLM."""

    text: str

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _structured_outputs, (self.text,)


def _structured_outputs(text: str) -> Any:
    from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]

    return StructuredOutputsParams(grammar=text)
