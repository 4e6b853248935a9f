"""The usual learning rates: what `learning_rate` is where nobody has chosen one, and the table in the documentation.

They are for AdamW with batches of the usual size. Measured were those for all weights where a policy samples: with
SmolLM2-135M, and with policies of half a million weights. The largest are those of papers and of verl's examples; LoRA
is given ten times as much, and imitation is not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of models of one size.

    Attributes:
        parameters: the sizes in words.
        below: the number of parameters that is too large for them.
        sampled: where a policy learns from what it samples: all weights, and a LoRA adapter.
        imitated: where it imitates, and every token pulls the same way: all weights, and a LoRA adapter.
    """

    parameters: str
    below: float
    sampled: tuple[float, float]
    imitated: tuple[float, float]


USUAL_RATES = (
    Rates("up to 20M", 20e6, sampled=(1e-4, 1e-3), imitated=(1e-3, 2e-3)),
    Rates("20M to 400M", 400e6, sampled=(2e-5, 2e-4), imitated=(2e-5, 2e-4)),
    Rates("400M and more", math.inf, sampled=(1e-6, 1e-5), imitated=(1e-5, 1e-4)),
)


def usual_rate(parameters: int, *, lora: bool, imitates: bool) -> float:
    """The learning rate for a model of so many parameters.

    Args:
        lora: whether an adapter is trained instead of all weights.
        imitates: whether the loss is that of `agl.SFT`.
    """
    rates = next(rates for rates in USUAL_RATES if parameters < rates.below)
    whole, adapter = rates.imitated if imitates else rates.sampled
    return adapter if lora else whole


def table() -> str:
    """The rates as a Markdown table."""
    lines = [
        "| parameters of the model | all weights | LoRA | imitation (`SFT`, `RFT`), all weights | imitation, LoRA |",
        "|---|---|---|---|---|",
    ]
    for rates in USUAL_RATES:
        numbers = " | ".join(f"{rate:.0e}".replace("e-0", "e-") for rate in (*rates.sampled, *rates.imitated))
        lines.append(f"| {rates.parameters} | {numbers} |")
    return "\n".join(lines)
