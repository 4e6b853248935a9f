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
from agl_verl.config.plan import ACTOR, MODEL, ROLLOUT, Plan

_BACKEND = f"{ROLLOUT}.engine_kwargs.vllm.structured_outputs_config"
_LIBRARY = f"{MODEL}.external_lib"


def refusal(plan: Plan) -> str:
    """Why a run cannot hold answers to a schema, and what to do; "" if it can."""
    settings = plan.settings
    strategy = settings.get(f"{ACTOR}.strategy", "fsdp")
    split = next((k for k, v in settings.items() if k.endswith("ulysses_sequence_parallel_size") and v and v > 1), "")
    reasons = {
        f"mode={plan.mode!r}: verl samples the rest of an answer as a new request, and its grammar would begin again":
            plan.mode != "sync",
        f"{ACTOR}.strategy={strategy!r}: the log-probs within a schema are computed by FSDP only":
            strategy not in ("fsdp", "fsdp2"),
        f"{MODEL}.use_fused_kernels: they compute log-probs over the whole vocabulary":
            settings.get(f"{MODEL}.use_fused_kernels"),
        f"{split}={settings.get(split)}: a row's logits are spread over several GPUs": split,
        f"{_LIBRARY}: agl's own is needed there": settings.get(_LIBRARY),
        f"{_BACKEND}: only vLLM's guidance hides what the actor hides": any(k.startswith(_BACKEND) for k in settings),
        f"this installation: {install_line('structured')}": find_spec("llguidance") is None,
    }  # fmt: skip
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is None:
        return ""
    return (
        f"answers cannot be held to a schema with {why}. Change that; or train on one machine (agl.GRPO, also with "
        "engine='vllm'); or request no schema, describe the JSON in the prompt and parse the text"
    )


def overrides(plan: Plan) -> Mapping[str, Any]:
    """Dotted keys of verl's that a run needs to hold answers to schemas."""
    return {} if refusal(plan) else {_LIBRARY: "agl_verl.masks", f"{_BACKEND}.backend": "guidance"}


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
