"""Turns a group's trajectories into verl's training rows: chains of tokens that train each sampled token once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agl.credit import Credit
from agl.mdp.sequence import BoolArray, TrainingRow, merge
from agl.mdp.types import Call, FloatArray, IntArray, Trajectory
from agl.trainer.objectives.advantages import StepAdvantages, compute_advantages
from agl.trainer.runners.protocol import RolloutResult

ADVANTAGES = "agl_advantages"
"""The field of a row that holds its advantages, one per token."""
GRAMMARS = "agl_grammars"
"""The field of a row that says what its answers were held to: "" for nothing, or the JSON of `Chain.grammars`."""
SOURCE = "agl"
"""verl's `data_source` of every row."""


LongArray = npt.NDArray[np.int64]
"""Token ids as torch has them."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """One training row as verl has them: a prompt, and a response of which some tokens were sampled.

    Attributes:
        rollout_id: identifies the rollout.
        tokens: call id -> how many of its tokens are trained here.
        prompt_ids: int64 [P], P >= 1.
        response_ids: int64 [R], from the first trained token on.
        response_mask: bool [R], True where the token is trained.
        logprobs: float32 [R], behaviour log-probs; 0 where not trained.
        rewards: float32 [R]: their sum from a token on is that token's call's return (without discount).
        advantages: float32 [R]; 0 where not trained.
        grammars: (first index in `ids`, end, grammar) of each answer that was held to one.
    """

    rollout_id: str
    tokens: Mapping[str, int]
    prompt_ids: LongArray
    response_ids: LongArray
    response_mask: BoolArray
    logprobs: FloatArray
    rewards: FloatArray
    advantages: FloatArray
    grammars: tuple[tuple[int, int, str], ...] = ()

    @property
    def ids(self) -> LongArray:
        """int64 [P + R]."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def calls(self) -> tuple[str, ...]:
        """Ids of the calls that it trains."""
        return tuple(self.tokens)


def chains(row: TrainingRow, returns: Mapping[str, float]) -> Iterator[Chain]:
    """Split a row into chains, since verl's attention is causal.

    A row that does not branch is one chain. Of a row that branches, each leaf's path is a chain; tokens that several
    paths share are trained in the first of them alone, with the ancestors that they have in the row.

    Args:
        row: merged, with advantages.
        returns: call id -> return, for each call of the row.
    """
    last = np.ones(len(row), dtype=bool)
    last[row.parents[row.parents >= 0]] = False
    covered = np.zeros(len(row), dtype=bool)
    for leaf in np.flatnonzero(last).tolist():
        path = _path(row, leaf)
        mask = row.action_mask[path] & ~covered[path]
        covered[path] = True
        if not mask.any():
            continue
        first = int(np.argmax(mask))
        response = path[first:]
        mask = mask[first:]
        trained = row.calls[response[mask]]
        calls = list(dict.fromkeys(trained.tolist()))
        yield Chain(
            rollout_id=row.rollout_id,
            tokens={row.call_ids[c]: int(np.sum(trained == c)) for c in calls},
            prompt_ids=row.token_ids[path[:first]].astype(np.int64),
            response_ids=row.token_ids[response].astype(np.int64),
            response_mask=mask,
            logprobs=np.where(mask, row.logprobs[response], np.float32(0)),
            rewards=_rewards(row.calls[response], mask, {c: returns[row.call_ids[c]] for c in calls}),
            advantages=np.where(mask, row.advantages[response], np.float32(0)),
            grammars=tuple(_grammars(row, path)),
        )


def _path(row: TrainingRow, leaf: int) -> Any:
    """Row indices from the first token to a leaf, int64."""
    if row.is_chain:
        return np.arange(leaf + 1)
    path = []
    index = leaf
    while index >= 0:
        path.append(index)
        index = int(row.parents[index])
    return np.asarray(path[::-1])


def _grammars(row: TrainingRow, path: Any) -> Iterator[tuple[int, int, str]]:
    """As in `Chain`, for the tokens of a path."""
    for c, grammar in enumerate(row.grammars):
        places = np.flatnonzero(row.calls[path] == c)
        if grammar and places.size:
            yield int(places[0]), int(places[-1]) + 1, grammar


def _rewards(owner: IntArray, mask: BoolArray, returns: Mapping[int, float]) -> FloatArray:
    """Float32 [R]: each call's return less the next one's, at the call's last token."""
    ends = {int(owner[i]): i for i in np.flatnonzero(mask).tolist()}
    rewards = np.zeros(mask.size, dtype=np.float32)
    after = 0.0
    for call, end in sorted(ends.items(), key=lambda item: -item[1]):
        rewards[end] = returns[call] - after
        after = returns[call]
    return rewards


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A chain in the form of TransferQueue.

    Attributes:
        key: `{uid}_{session}_{index}`.
        fields, tag: as verl's trainer reads them, arrays for tensors.
        chain: the chain.
    """

    key: str
    fields: dict[str, Any]
    tag: dict[str, Any]
    chain: Chain


@dataclass(frozen=True, slots=True, eq=False)
class GroupRows:
    """The rows of a prompt's rollouts.

    Attributes:
        rows: to train; of a validation, one per rollout.
        scored: the numbers of every call; None for a validation.
    """

    rows: tuple[Row, ...]
    scored: StepAdvantages | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as verl's trainer asks for it.

    Attributes:
        uid: verl's id.
        index: of the task.
        n: how many rollouts.
        step: verl's global step, from 1 in training.
        validate: whether it belongs to a validation.
    """

    uid: str
    index: int
    n: int
    step: int
    validate: bool

    @property
    def partition(self) -> str:
        """Name of the partition in TransferQueue."""
        return "val" if self.validate else "train"


Newest = Callable[[Call], int]


def _one_version(call: Call) -> int:
    return call.policy_version


def train_rows(
    prompt: Prompt,
    results: Seq[RolloutResult],
    credit: Credit,
    *,
    policy: str,
    estimator: str,
    normalize_std: bool,
    own: bool,
    newest: Newest = _one_version,
) -> GroupRows:
    """Rows of a group of rollouts, credited and merged.

    Args:
        results: of the group; failed rollouts are left out.
        policy: the one that is trained.
        own: whether our advantages are used. If False, verl's estimator computes its own from the rewards, and finds a
            prompt's rows by its uid.
        newest: call -> the newest weights that sampled a part of it.
    """
    sessions = {r.rollout.rollout_id: k for k, r in enumerate(results)}
    trajectories = [r.attempt_trajectory.trajectory for r in results if r.attempt_trajectory is not None]
    # verl computes any other estimator; it needs the returns alone from here.
    scored = compute_advantages(
        trajectories,
        credit,
        estimator=estimator if own else "gae",  # type: ignore[arg-type]
        normalize_std=normalize_std,
    )
    returns = {c.call_id: c.return_ for c in scored.calls}
    rows = []
    for trajectory in scored.of(policy):
        session = sessions[trajectory.rollout_id]
        versions = _versions(trajectory, newest)
        row_chains = [c for row in merge(trajectory, scored.advantages) for c in chains(row, returns)]
        for i, chain in enumerate(row_chains):
            key = f"{prompt.uid}_{session}_{i}"
            uid = key if own else prompt.uid
            rows.append(_row(prompt, key, uid, chain, versions, len(trajectory.transitions)))
    return GroupRows(tuple(rows), scored)


def val_rows(prompt: Prompt, results: Seq[RolloutResult], *, policy: str) -> GroupRows:
    """One row per rollout, with the rollout's reward, which is all that verl's validation reads."""
    rows = []
    for session, result in enumerate(results):
        if result.attempt_trajectory is None:
            continue
        trajectory = result.attempt_trajectory.trajectory.of(policy)
        chain = _last_call(trajectory, result.attempt_trajectory.reward or 0.0)
        if chain is not None:
            versions = _versions(trajectory, _one_version)
            key = f"{prompt.uid}_{session}_0"
            rows.append(_row(prompt, key, prompt.uid, chain, versions, len(trajectory.transitions)))
    return GroupRows(tuple(rows), None)


def _versions(trajectory: Trajectory, newest: Newest) -> tuple[int, int]:
    """The oldest and the newest weights that sampled a part of it."""
    calls = [t.call for t in trajectory.transitions]
    return min(c.policy_version for c in calls), max(newest(c) for c in calls)


def _last_call(trajectory: Trajectory, reward: float) -> Chain | None:
    """The last call of a trajectory, as a row with the whole reward."""
    if not trajectory.transitions:
        return None
    call = trajectory.transitions[-1].call
    size = max(1, call.response_ids.size)
    # An answer without tokens still has a reward, which needs a token.
    response = call.response_ids if call.response_ids.size else call.prompt_ids[-1:]
    rewards = np.zeros(size, dtype=np.float32)
    rewards[-1] = reward
    return Chain(
        trajectory.rollout_id,
        {call.id: size},
        call.prompt_ids.astype(np.int64),
        response.astype(np.int64),
        np.ones(size, dtype=bool),
        np.zeros(size, dtype=np.float32),
        rewards,
        np.zeros(size, dtype=np.float32),
    )


def _row(prompt: Prompt, key: str, uid: str, chain: Chain, versions: tuple[int, int], turns: int) -> Row:
    ids = chain.ids
    steps = dict(zip(("min_global_steps", "max_global_steps"), versions, strict=True))
    mask = chain.response_mask.astype(np.int64)
    fields = {
        "uid": uid,
        "index": prompt.index,
        "data_source": SOURCE,
        "reward_model": {"ground_truth": None},
        "num_turns": 2 * turns,
        "multi_modal_inputs": {},
        "extra_fields": {**steps, "reward_extra_info": {}},
        "prompts": chain.prompt_ids,
        "responses": chain.response_ids,
        "input_ids": ids,
        "position_ids": np.arange(ids.size, dtype=np.int64),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": chain.logprobs,
        "rm_scores": chain.rewards,
        ADVANTAGES: chain.advantages,
        GRAMMARS: json.dumps(chain.grammars) if chain.grammars else "",
    }
    tag = {
        "status": "success",
        "prompt_len": int(chain.prompt_ids.size),
        "response_len": int(chain.response_ids.size),
        "seq_len": int(ids.size),
        "global_steps": prompt.step,
        **steps,
    }
    return Row(key, fields, tag, chain)
