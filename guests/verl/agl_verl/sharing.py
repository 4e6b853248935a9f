"""Prefixes that rows share, computed once by verl's actor and reference: which runs do it, and which rows go together.

verl's own setting for it is `actor.use_prefix_grouper`, for which verl 0.9 has no code; `agl_verl.trees` computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from agl_verl.config.plan import ACTOR, MODEL, Plan

SWITCH = f"{ACTOR}.use_prefix_grouper"
LIBRARY = f"{MODEL}.external_lib"


def shares(plan: Plan) -> bool:
    """Whether a run computes shared prefixes once."""
    return bool(plan.settings.get(SWITCH))


def obstacle(plan: Plan) -> str:
    """What keeps agl's code out of verl's actor, or makes it wrong there; "" if nothing does."""
    settings = plan.settings
    strategy = settings.get(f"{ACTOR}.strategy", "fsdp")
    split = next((k for k, v in settings.items() if k.endswith("ulysses_sequence_parallel_size") and v and v > 1), "")
    reasons = {
        f"{ACTOR}.strategy={strategy!r}: agl's code for the actor is for FSDP only": strategy not in ("fsdp", "fsdp2"),
        f"{MODEL}.use_fused_kernels: they compute log-probs over the whole vocabulary": settings.get(
            f"{MODEL}.use_fused_kernels"
        ),
        f"{split}={settings.get(split)}: a row's logits are spread over several GPUs": split,
        f"{LIBRARY}: agl's own is needed there": settings.get(LIBRARY),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def together(groups: Sequence[str], tokens: Sequence[int], ranks: int) -> list[int]:
    """An order of rows in which each rank's equal share has whole groups, as far as they fit, and about as many tokens.

    Args:
        groups: of each row.
        tokens: of each row.
        ranks: how many share the rows; divides their number.
    """
    of_groups = defaultdict(list)
    for row, group in enumerate(groups):
        of_groups[group].append(row)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    size = len(groups) // ranks
    loads = [0] * ranks
    left = sorted(of_groups.values(), key=lambda rows: sum(tokens[i] for i in rows), reverse=True)
    while left:
        rows = left.pop(0)
        rooms = [size - len(share) for share in shares]
        # The rank with the fewest tokens that has room for all; without one, the part that fits into the most room.
        whole = [k for k in range(ranks) if rooms[k] >= len(rows)]
        rank = min(whole, key=lambda k: loads[k]) if whole else max(range(ranks), key=lambda k: rooms[k])
        taken = rows[: rooms[rank]]
        rest = rows[rooms[rank] :]
        shares[rank] += taken
        loads[rank] += sum(tokens[i] for i in taken)
        left = [rest, *left] if rest else left
    return [row for share in shares for row in share]
