"""What looks wrong in a run's numbers: one set of rules for the terminal, callbacks, webhooks and pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from agl.mdp.faults import CAUSES
from agl.trainer.report.statistics import CONFIDENCE

Entry = Mapping[str, Any]

ALPHA = 0.05
"""The level at which a held-out reward has fallen, for all validations of a run together. Intervals of few tasks are
approximate: of 100 simulated runs of 20 validations, in which nothing changed, up to 14 are said to have fallen."""
ENTROPY_SHARE = 0.1
"""Of the entropy of the first step, below which a policy hardly tries anything else."""
FLAT_SHARE = 0.75
"""Of the groups of a step, from which on too few have a spread of rewards to learn from."""
KL_NATS = 0.1
"""Of the old policy from the new one in one update; trust regions are 0.01 to 0.05 in Schulman et al., 2015."""
LOST_SHARE = 0.2
"""Of the rollouts of a step that failed, or that the policy ended itself."""

NAMES = (
    "train/rollouts",
    "train/groups",
    "train/zero_variance_groups",
    "train/failed_rollouts",
    *(f"train/policy_faults/{cause}" for cause in CAUSES),
    "learner/entropy",
    "learner/approx_kl",
    "val/reward",
    "val/reward_low",
    "val/reward_high",
)
"""The numbers that the rules read; those of the learner also after the name of a policy."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that looks wrong.

    Attributes:
        kind: "entropy", "kl", "flat", "failed", "faults" or "held-out".
        policy: whose, if there are several.
        since: the step from which on it has been so.
        step: the last one at which it was.
        text: what was seen then.
    """

    kind: str
    policy: str
    since: int
    step: int
    text: str


class Watch:
    """Reads a run's entries, one after the other.

    Attributes:
        alerts: in the order in which they began. One that ended and came back is two.
    """

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self._latest: dict[tuple[str, str, str], int] = {}
        self._steps: dict[str, int] = {}
        self._entropy: dict[str, float] = {}
        self._validations = 0
        self._best: Entry | None = None

    def add(self, entry: Entry) -> list[Alert]:
        """The alerts that begin with this entry: "step" and some of the numbers of `NAMES`."""
        began = []
        for kind, policy, number, text in self._found(entry):
            place = self._latest.get((kind, policy, number))
            if place is not None and self.alerts[place].step == self._steps.get(number):
                self.alerts[place] = replace(self.alerts[place], step=entry["step"], text=text)
                continue
            self._latest[kind, policy, number] = len(self.alerts)
            self.alerts.append(Alert(kind, policy, entry["step"], entry["step"], text))
            began.append(self.alerts[-1])
        self._steps |= {number: entry["step"] for number, value in entry.items() if _finite(value)}
        return began

    def _found(self, entry: Entry) -> Iterator[tuple[str, str, str, str]]:
        """(kind, policy, the number that it is about, text) of what looks wrong."""
        rollouts = entry.get("train/rollouts") or 0
        groups = entry.get("train/groups") or 0
        flat = entry.get("train/zero_variance_groups") or 0
        failed = entry.get("train/failed_rollouts") or 0
        if groups > 1 and flat / groups >= FLAT_SHARE:
            text = f"{flat:.0f} of {groups:.0f} groups had equal rewards, and taught nothing"
            yield "flat", "", "train/zero_variance_groups", text
        if rollouts and failed / rollouts > LOST_SHARE:
            yield "failed", "", "train/failed_rollouts", f"{failed:.0f} of {rollouts:.0f} rollouts failed"
        for cause, what in CAUSES.items():
            number = f"train/policy_faults/{cause}"
            if rollouts and (n := entry.get(number) or 0) / rollouts > LOST_SHARE:
                yield "faults", "", number, f"the policy ended {n:.0f} of {rollouts:.0f} rollouts: {what}"
        for number, value in entry.items():
            policy, learner, name = number.rpartition("learner/")
            if not learner or not _finite(value):
                continue
            if name == "entropy":
                first = self._entropy.setdefault(number, value)
                if value < ENTROPY_SHARE * first:
                    text = f"entropy fell from {first:.2f} to {value:.2g} nats per token: answers hardly vary any more"
                    yield "entropy", policy.rstrip("/"), number, text
            if name == "approx_kl" and abs(value) > KL_NATS:
                text = f"the update moved the policy by {abs(value):.2f} nats per token (KL)"
                yield "kl", policy.rstrip("/"), number, text
        low, value, high = (entry.get(f"val/reward{end}") for end in ("_low", "", "_high"))
        if _finite(low) and _finite(high):
            best = self._best
            self._validations += 1
            if best is not None and _fell(best, entry, self._validations):
                before = f"{best['val/reward']:.3f} after step {best['step']}"
                text = (
                    f"held-out reward fell from {before} to {value:.3f}, which chance does not explain. Try a "
                    "third of the learning_rate, fewer minibatches or update_epochs, or kl_coef=0.001; "
                    'agl.EarlyStopping("val/reward") stops in time'
                )
                yield "held-out", "", "val/reward", text
            if best is None or low > best["val/reward_low"]:
                self._best = entry


def _fell(best: Entry, now: Entry, validations: int) -> bool:
    """Whether a held-out reward is below the best one by more than chance explains, at `ALPHA` for all of them.

    The best of many is a lucky one, and each that follows is another chance to be unlucky; so the level is divided by
    the number of pairs (Bonferroni). Where all tasks were worth the same, nothing is known of the spread.
    """
    lower_half = best["val/reward"] - best["val/reward_low"]
    upper_half = now["val/reward_high"] - now["val/reward"]
    if not lower_half or not upper_half:
        return False
    pairs = validations * (validations - 1) / 2
    wider = NormalDist().inv_cdf(1 - ALPHA / 2 / pairs) / NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return best["val/reward"] - now["val/reward"] > wider * math.hypot(lower_half, upper_half)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
