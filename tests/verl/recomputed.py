"""The rows that the local trainer would make of a step's stored calls, and verl's in the same layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from agl.credit import Uniform
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.sequence import merge
from agl.mdp.span_index import SpanIndex
from agl.trainer.objectives.advantages import compute_advantages
from agl.trainer.store import open_store
from agl_verl.rows import chains


async def local_rows(url: str, step: int, agents: Mapping[str, str] | None = None) -> dict[tuple[int, ...], list[Any]]:
    """ids -> (mask, log-probs, advantages) of each row that the local trainer would make of a step.

    Args:
        agents: those of one policy, as `agl.Trainer` takes them; None: every agent.
    """
    selection = select(agents)
    (policy,) = selection.policies
    store = await open_store(url)
    try:
        built = []
        for r in await store.query_rollouts(mode="train", step=step - 1):
            calls = await store.query_calls(r.rollout_id, r.attempts)
            spans = await store.query_spans(r.rollout_id, r.attempts)
            built.append(build_trajectory(r.rollout_id, r.attempts, r.group, SpanIndex(calls, spans), selection))
    finally:
        await store.close()
    scored = compute_advantages([b.trajectory for b in built], Uniform())
    returns = {c.call_id: c.return_ for c in scored.calls}
    rows: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for trajectory in scored.of(policy):
        for row in merge(trajectory, scored.advantages):
            if row.is_chain:
                rows[tuple(row.token_ids.tolist())].append((row.action_mask, row.logprobs, row.advantages))
            else:
                for chain in chains(row, returns):
                    lead = np.zeros(chain.prompt_ids.size)
                    full = [np.concatenate([lead, x]) for x in (chain.response_mask, chain.logprobs, chain.advantages)]
                    rows[tuple(chain.ids.tolist())].append((full[0].astype(bool), *full[1:]))
    return rows


def ids_of(row: dict[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple(torch.cat([row["prompts"], row["responses"]]).tolist())


def whole(row: dict[str, torch.Tensor], field: str, n: int) -> np.ndarray:
    """A field of the response in the row's own places."""
    out = np.zeros(n, dtype=np.float32)
    out[n - row["responses"].numel() :] = row[field].float().numpy()
    return out
