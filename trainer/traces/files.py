"""Chosen calls as files for other trainers: JSON Lines that TRL's trainers and OpenAI's fine-tuning read directly.

Sources: TRL 1.16, "Dataset formats and types"; OpenAI API reference, "Supervised fine-tuning" (chat format, `weight`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from agl.errors import ConfigError, ExportError, NoTrainableDataError, nearest
from agl.mdp.selection import DEFAULT_POLICY
from agl.mdp.sequence import TrainingRow, merge
from agl.mdp.types import IntArray, Trajectory
from agl.trainer.rendering.digests import digest
from agl.trainer.rendering.normalise import normalise, rename_call_ids
from agl.trainer.report.export.json_files import to_json
from agl.trainer.report.export.to_files import atomic_folder
from agl.trainer.traces.choice import Choice, Chosen
from agl.trainer.traces.conversations import Conversation
from agl.trainer.traces.pairs import Pair, pairs
from agl.trainer.traces.stored import Traces

What = Literal["sft", "pairs", "rewards"]
FORMATS: Mapping[str, tuple[str, ...]] = {
    "sft": ("tokens", "messages"),
    "pairs": ("messages",),
    "rewards": ("messages",),
}
"""What is exported -> its formats, the default first."""

IGNORED = -100
"""The label of a token that is not trained, in PyTorch and TRL."""


async def write(
    data: Traces,
    what: What,
    out: Path,
    *,
    format: str | None = None,
    model: str | None = None,
    renderer: str | None = None,
    margin: float = 0.0,
) -> dict[str, Any]:
    """Write `<what>.jsonl` into the folder `out`, or nothing at all.

    Args:
        data: the rollouts and calls.
        what: "sft": each chosen call once, with the calls before it as context. "pairs": a better and a worse rollout
            of one task; here `data.per_task` counts pairs, and `data.where` says which rollouts may be the better one.
            "rewards": the chosen rollouts with their rewards.
        format: "tokens" or "messages"; None for the first in `FORMATS`.
        model: whose tokenizer and chat template make the tokens: a Hugging Face directory or hub id, or the directory
            of a run. For tokens alone. renderer: a name from the `renderers` package; None chooses by the model.
        margin: smallest difference of a pair's rewards.

    Returns:
        The `file`, its `format` and number of `rows`, what was `chosen` in a sentence, and the `counts` of that.

    Raises:
        ConfigError: an option has an impossible value, or `model` is missing.
        NoTrainableDataError: nothing was chosen; says why.
        ExportError: writing fails.
    """
    if what not in FORMATS:
        raise ConfigError(f"there is no export {what!r}", hint=nearest(what, get_args(What)))
    format = format or FORMATS[what][0]
    if format not in FORMATS[what]:
        raise ConfigError(f"{what} has no format {format!r}", hint=nearest(format, FORMATS[what]))
    if format == "tokens" and model is None:
        raise ConfigError(
            "no model given: the calls are written with the tokenizer of the model to train",
            hint="pass --model DIR, or write texts with --format messages",
        )
    rows: Iterable[dict[str, Any]]
    counts: Mapping[str, int]
    if what == "pairs":
        found = pairs(
            [c async for c in data.candidates()], where=data.where, per_task=data.per_task, margin=margin
        ).require()
        rows, counts = pair_rows(found.pairs)
        summary = str(found)
    else:
        if format == "tokens":
            chosen = (await data.choose({DEFAULT_POLICY: str(model)}, renderer=renderer)).require()
        else:
            choice = Choice(where=data.where, per_task=data.per_task, weight=data.weight)
            async for candidate in data.candidates():
                choice.add(candidate)
            chosen = choice.chosen().require()
        made = {"sft": token_rows if format == "tokens" else message_rows, "rewards": reward_rows}[what]
        rows = made(chosen)
        counts = chosen.counts
        summary = str(chosen)
    n_rows = 0
    try:
        with atomic_folder(out) as folder, (folder / f"{what}.jsonl").open("wb") as file:
            for row in rows:
                file.write(to_json(row) + b"\n")
                n_rows += 1
            if not n_rows:
                raise NoTrainableDataError(
                    f"none of the chosen rollouts has a reward:\n{summary}", hint="agl trace ls shows what they have"
                )
    except OSError as error:
        raise ExportError(
            f"cannot write the export: {error}", hint="choose a folder on a disk with free space, with --out", path=out
        ) from error
    return {
        "file": str(out / f"{what}.jsonl"),
        "format": format,
        "rows": n_rows,
        "chosen": summary,
        "counts": dict(counts),
    }


# -- tokens -----------------------------------------------------------------------------------------------------------


def token_rows(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Rows that `SFTTrainer` reads directly: `input_ids`, and `labels` with -100 for what is not trained; each
    call's tokens are labels once. `weight` is for trainers that weigh rows."""
    for trajectory in chosen.trajectories:
        for row in merge(trajectory, chosen.weights):
            for token_ids, trained in chains(row):
                yield {
                    "input_ids": token_ids,
                    "labels": np.where(trained, token_ids, np.int32(IGNORED)),
                    "weight": chosen.weights[row.call_ids[0]],
                    "rollout_id": trajectory.rollout_id,
                }


def chains(row: TrainingRow) -> Iterator[tuple[IntArray, npt.NDArray[np.bool_]]]:
    """A row's paths from the first token to each last one, for trainers without trees: token ids and trained
    tokens, [N] each. A token that is on several paths is trained on the first."""
    if row.is_chain:
        yield row.token_ids, row.action_mask
        return
    is_last = np.ones(len(row), bool)
    is_last[row.parents[row.parents >= 0]] = False
    left = row.action_mask.copy()
    for last in np.flatnonzero(is_last):
        path = [int(last)]
        while row.parents[path[-1]] >= 0:
            path.append(int(row.parents[path[-1]]))
        places = np.array(path[::-1])
        trained = left[places]
        left[places] = False
        if trained.any():
            yield row.token_ids[places], trained


# -- messages ---------------------------------------------------------------------------------------------------------


def message_rows(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Rows in OpenAI's chat format: `messages`, `tools`; `weight` 0 on assistant messages that are not trained."""
    conversations = _conversations(chosen)
    for trajectory in chosen.trajectories:
        for one in dialogues(trajectory, conversations):
            messages = [_openai(m, i in one.trained) for i, m in enumerate(one.messages)]
            yield {"messages": messages, **({"tools": list(one.tools)} if one.tools else {})}


class Dialogue:
    """A conversation with all its turns, of which some are trained.

    Attributes:
        messages: whole.
        tools: of its requests.
        trained: indices of the assistant messages to train.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.tools = conversation.tools
        self.messages: list[Mapping[str, Any]] = []
        self._digests: list[bytes] = []
        self.trained: set[int] = set()

    def continued_by(self, conversation: Conversation) -> bool:
        """Whether a call's request begins with all of this conversation."""
        n = len(self._digests)
        same_tools = json.dumps(list(self.tools)) == json.dumps(list(conversation.tools))
        return (
            same_tools
            and n <= len(conversation.messages)
            and all(digest(m) == d for m, d in zip(conversation.messages, self._digests, strict=False))
        )

    def add(self, conversation: Conversation) -> None:
        """Append a call: its new messages, and its answer, which is trained."""
        new = [*conversation.messages[len(self.messages) :], conversation.answer]
        self.messages += new
        self._digests += map(digest, new)
        self.trained.add(len(self.messages) - 1)


def dialogues(trajectory: Trajectory, conversations: Mapping[str, Conversation]) -> list[Dialogue]:
    """The conversations of a trajectory, each call in one of them: the longest that it continues, or a new one."""
    rows: list[Dialogue] = []
    for transition in trajectory.transitions:
        conversation = conversations[transition.call.id]
        longest = max((d for d in rows if d.continued_by(conversation)), key=lambda d: len(d.messages), default=None)
        if longest is None:
            longest = Dialogue(conversation)
            rows.append(longest)
        longest.add(conversation)
    return rows


def pair_rows(found: Sequence[Pair]) -> tuple[list[dict[str, Any]], Mapping[str, int]]:
    """Rows for `DPOTrainer` and `RewardTrainer`, in TRL's conversational form: `prompt`, the messages that both
    rollouts have; `chosen` and `rejected`, from the first answer that differs to the end; `tools` as JSON text.

    Returns:
        The rows, and counts: "pairs", "rows", and "left_out/<reason>".
    """
    counts: Counter[str] = Counter(pairs=len(found), rows=0)
    rows: list[dict[str, Any]] = []
    for pair in found:
        sides = [
            dialogues(trajectory, candidate.conversations)
            for trajectory, candidate in zip((pair.chosen, pair.rejected), pair.candidates, strict=True)
        ]
        if any(len(side) != 1 for side in sides):
            counts["left_out/several conversations in a rollout"] += 1
            continue
        tools = [list(one.tools) for (one,) in sides]
        # Two rollouts have other ids for the same tool calls.
        better, worse = (rename_call_ids(_trl(one.messages), lambda _, name, n: f"call{n:05d}") for (one,) in sides)
        split = _first_different_answer(better, worse)
        if split is None or json.dumps(tools[0]) != json.dumps(tools[1]):
            counts["left_out/the same answers, or another request"] += 1
            continue
        counts["rows"] += 1
        rows.append(
            {
                "prompt": better[:split],
                "chosen": better[split:],
                "rejected": worse[split:],
                **_trl_tools(tools[0]),
                "margin": pair.margin,
                "chosen_reward": pair.candidates[0].attempt.reward,
                "rejected_reward": pair.candidates[1].attempt.reward,
            }
        )
    if not rows:
        reasons = ", ".join(f"{n} {name.partition('/')[2]}" for name, n in counts.items() if "left_out/" in name)
        raise NoTrainableDataError(
            f"none of {len(found)} pairs can be written as one conversation ({reasons})",
            hint="choose one agent with --agents; agl.DPO trains on pairs of any shape",
        )
    return rows, counts


def reward_rows(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Rows for reward models: `prompt` and `completion` in TRL's conversational form, `tools` as JSON text, the total
    `reward`, and `rewards` by name as JSON text; one per conversation of a rollout."""
    conversations = _conversations(chosen)
    attempts = {c.attempt.trajectory.rollout_id: c.attempt for c in chosen.candidates}
    for trajectory in chosen.trajectories:
        attempt = attempts[trajectory.rollout_id]
        if attempt.reward is None:
            continue
        named: dict[str, float] = {}
        for reward, _ in attempt.credited:
            named[reward.name] = named.get(reward.name, 0.0) + reward.value
        for one in dialogues(trajectory, conversations):
            split = min(one.trained)
            yield {
                "prompt": _trl(one.messages[:split]),
                "completion": _trl(one.messages[split:]),
                **_trl_tools(one.tools),
                "reward": attempt.reward,
                "rewards": to_json(named).decode(),
                "rollout_id": trajectory.rollout_id,
            }


def _conversations(chosen: Chosen) -> dict[str, Conversation]:
    return {call_id: c for candidate in chosen.candidates for call_id, c in candidate.conversations.items()}


def _first_different_answer(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> int | None:
    """Index of the last assistant message before which the two conversations are equal; None if there is none."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if same is None:
        return None
    both = [i for i in range(same + 1) if a[i].get("role") == b[i].get("role") == "assistant"]
    return both[-1] if both else None


def _openai(message: Mapping[str, Any], trained: bool) -> dict[str, Any]:
    """A message as OpenAI takes it, with arguments as JSON text."""
    (normal,) = normalise([message], parse_arguments=False, developer=True)
    normal.pop("reasoning_content", None)
    if normal["role"] == "assistant" and not trained:
        normal["weight"] = 0
    return normal


def _trl(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them, with arguments as objects."""
    return normalise(messages, parse_arguments=True, developer=False)


def _trl_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {"tools": json.dumps(list(tools))} if tools else {}
