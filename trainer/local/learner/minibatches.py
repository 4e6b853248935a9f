"""Which rollouts share an optimiser step.

Invariant: the same rollouts do, however their calls were merged into rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np

from agl.mdp.sequence import TrainingRow
from agl.trainer.local.learner.targets import LossRow, Pairs


def minibatches(rows: Seq[LossRow], n: int, rng: np.random.Generator, pairs: Pairs) -> Iterator[list[LossRow]]:
    """Mini-batches of whole rollouts, so that merging cannot move a call from one to another, and of whole pairs.

    Rollouts that begin with the same prompt, as those of a group do, stay next to each other: what they share is then
    forwarded once per group, not once per mini-batch. A group is cut where mini-batches would otherwise differ in size
    by more than one rollout (or pair).

    Args:
        n: of them, or as many as there are rollouts or pairs.
        rng: draws the order.
        pairs: (chosen, rejected) rollouts
            that are compared, and so kept together.
    """
    together = {row.sequence.rollout_id: {row.sequence.rollout_id} for row in rows}
    for chosen, rejected in pairs:
        joined = together[chosen] | together[rejected]
        together |= dict.fromkeys(joined, joined)
    # In the order of the rows: ids of rollouts differ between two runs of one seed.
    first_of: dict[str, tuple[str, set[str]]] = {}
    for rollout, unit in together.items():
        first_of.setdefault(min(unit), (rollout, unit))
    units = list(first_of.values())
    prompts = {row.sequence.rollout_id: _first_prompt(row.sequence) for row in reversed(rows)}
    keys = [prompts[rollout] for rollout, _ in units]
    drawn = rng.permutation(len(units))
    places = {keys[i]: place for place, i in reversed([*enumerate(drawn)])}
    order = sorted(drawn, key=lambda i: places[keys[i]])
    for part in np.array_split(order, min(n, len(units))):
        members = {rollout for i in part for rollout in units[i][1]}
        yield [row for row in rows if row.sequence.rollout_id in members]


def _first_prompt(row: TrainingRow) -> bytes:
    """The tokens that the row's first trained token was sampled after."""
    at = int(row.action_mask.argmax())
    if row.is_chain:
        return row.token_ids[:at].tobytes()
    places = []
    while (at := int(row.parents[at])) >= 0:
        places.append(at)
    return row.token_ids[places[::-1]].tobytes()
