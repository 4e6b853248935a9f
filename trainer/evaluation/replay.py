"""`agl replay`: what another policy answers to the calls of a recorded rollout, each with the history that it had."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from agl.errors import ContextLengthError, NoTrainableDataError, StoreError
from agl.mdp.selection import DEFAULT_POLICY, AgentFilter, select
from agl.mdp.types import Call
from agl.texts import printable, shortened
from agl.trainer.engines.base import Request, Sampling
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.policies.frozen import FrozenPolicy
from agl.trainer.report import terminal
from agl.trainer.report.export.rows import record
from agl.trainer.report.progress import Progress
from agl.trainer.store.base import Store
from agl.trainer.traces.conversations import Conversation
from agl.trainer.traces.student import RecordedAttempt


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """A call, answered again.

    Attributes:
        call, agent: its id, and who made it.
        message: the last message that it sent.
        recorded: the answer of then.
        answer: that of the policy.
        finish_reason: how it ended.
        same: whether the two are the same message.
        recorded_logprob: mean log-prob of a token of the recorded answer
            under the policy, at temperature 1, in nats.
    """

    call: str
    agent: str
    message: Mapping[str, Any]
    recorded: Mapping[str, Any]
    answer: Mapping[str, Any]
    finish_reason: str
    same: bool
    recorded_logprob: float | None


@dataclass(frozen=True, slots=True)
class Replay:
    """A rollout's calls, answered again by `model`. `left_out`: reason -> calls that cannot be put to it."""

    rollout_id: str
    model: str
    calls: Sequence[ReplayedCall]
    left_out: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """The replay as JSON values."""
        return asdict(self)


async def replay(
    store: Store,
    rollout_id: str,
    model: str,
    *,
    attempt: int | None = None,
    agents: AgentFilter = None,
    temperature: float = 0.0,
    max_response_tokens: int = 512,
    seed: int = 0,
    progress: bool = True,
) -> Replay:
    """Ask a policy what it would answer to each call of a rollout.

    Each call has the messages that were recorded, not the policy's own answers, so its agent and tools are not run.

    Args:
        rollout_id: or its beginning.
        model: as for `agl run --model`.
        attempt: its number; the last one if None.
        agents: whose calls; everybody's if None.
        temperature: 0 takes the most likely tokens.

    Raises:
        StoreError: no such rollout or attempt.
        NoTrainableDataError: it has no call that can be put to a policy.
        ModelLoadError: there is no such model.
    """
    rollout = await store.get_rollout(rollout_id)
    stored = await record(store, rollout)
    selection = select() if agents is None else select(agents)
    if attempt is not None and not 1 <= attempt <= rollout.attempts:
        what = f"the rollout has {rollout.attempts} attempts, and no number {attempt}"
        raise StoreError(what, rollout=rollout.rollout_id)
    selection = selection.knowing([*(s.agent for s in stored.spans), *(call.agent for call in stored.calls)])
    recorded = RecordedAttempt(stored, attempt or rollout.attempts, selection)
    # Before the model is loaded.
    as_texts = recorded.with_texts()
    _require(as_texts.conversations, as_texts.refused, rollout.rollout_id)
    policy = await FrozenPolicy.load(PolicySpec(model, DEFAULT_POLICY), progress=Progress(progress))
    try:
        candidate = await asyncio.to_thread(recorded.with_tokens, dict.fromkeys(selection.policies, policy.rendering))
        texts = as_texts.conversations
        transitions = candidate.attempt.trajectory.transitions
        calls = [t.call for t in transitions if t.call.id in texts]
        _require(calls, candidate.refused, rollout.rollout_id)
        stops = tuple(dict.fromkeys((*policy.rendering.stop_token_ids, *policy.stop_token_ids)))
        sampling = Sampling(max_response_tokens, temperature=temperature, stop_token_ids=stops, seed=seed)
        replayed = await asyncio.gather(*(_answer(policy, call, texts[call.id], sampling) for call in calls))
    finally:
        await policy.close()
    return Replay(rollout.rollout_id, model, replayed, {r: n for r, n in candidate.refused.items() if n})


def _require(calls: Collection[Any], refused: Mapping[str, int], rollout_id: str) -> None:
    if not calls:
        reasons = ", ".join(f"{n} {reason}" for reason, n in refused.items() if n) or "it made none"
        raise NoTrainableDataError(
            f"no call of the rollout can be put to another policy ({reasons})",
            hint="agl explain shows what was recorded of it",
            rollout=rollout_id,
        )


async def _answer(policy: FrozenPolicy, call: Call, texts: Conversation, sampling: Sampling) -> ReplayedCall:
    tools = list(texts.tools) or None
    engine = policy.engine
    try:
        completion = await engine.generate(Request(call.prompt_ids, sampling))
    except ContextLengthError as error:
        answer = {"role": "assistant", "content": ""}
        reason = error.message
    else:
        parsed = policy.rendering.parse(completion.token_ids, tools, prompt_ids=call.prompt_ids)
        calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in parsed.tool_calls]
        answer = {"role": "assistant", "content": parsed.content, **({"tool_calls": calls} if calls else {})}
        reason = completion.finish_reason
    logprob = None
    ids = np.concatenate([call.prompt_ids, call.response_ids])
    if isinstance(engine, LocalPolicy) and call.response_ids.size and ids.size <= engine.max_context:
        logprob = float((await engine.engine_logprobs(ids))[-call.response_ids.size :].mean())
    message = texts.messages[-1] if texts.messages else {}
    same = _essence(answer) == _essence(texts.answer)
    return ReplayedCall(call.id, call.agent, message, texts.answer, answer, reason, same, logprob)


def _essence(message: Mapping[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """What tells two answers apart: the text without space around it, and the tools with their arguments."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return str(message.get("content") or "").strip(), [(call["name"], _value(call["arguments"])) for call in calls]


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments


def show(replayed: Replay) -> None:
    """Print the two answers of each call."""
    panels = []
    for number, call in enumerate(replayed.calls):
        lines = [Text(f"{'message':10}{_line(call.message)}", "dim"), Text(f"{'recorded':10}{_line(call.recorded)}")]
        if call.same:
            lines.append(Text(f"{'now':10}the same", "dim"))
        else:
            lines.append(Text(f"{'now':10}{_line(call.answer)}", "bold"))
        facts = [] if call.recorded_logprob is None else [f"recorded answer {call.recorded_logprob:.3f} nats per token"]
        lines.append(Text(" · ".join((*facts, call.finish_reason)), "dim"))
        panels.append(Panel(Group(*lines), title=printable(f"call {number}  {call.agent}"), title_align="left"))
    same = sum(call.same for call in replayed.calls)
    panels.append(Text(printable(f"{same} of {len(replayed.calls)} answers of {replayed.model} are the recorded ones")))
    for reason, n in replayed.left_out.items():
        panels.append(Text(printable(f"left out: {n} calls, {reason}"), "yellow"))
    terminal.console().print(Group(*panels))


def _line(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    words = (text.strip(), *(f"{c['name']}({c['arguments']})" for c in calls))
    return printable(shortened(" ".join(filter(None, words))))
