"""Recorded calls with the tokens of the student: exact where they are its own, else made from the texts.

Invariant: tokens are taken over only where the student's chat template writes the same prompt from the same messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from agl import semconv
from agl.errors import ConfigError, UnreadableMessageError
from agl.mdp.builder import build_trajectory
from agl.mdp.order import in_order
from agl.mdp.selection import Selection
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, float_array, int_array
from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.calls import ChatRequest, rendered_prompt
from agl.trainer.gateway.sessions import Sessions
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.report.export.json_files import to_json
from agl.trainer.report.export.rows import Record
from agl.trainer.traces.choice import Candidate
from agl.trainer.traces.conversations import Conversation, NoConversationError, finish_reason, of_calls, of_span


class RecordedAttempt:
    """One attempt of a recorded rollout, every agent's calls: those that a gateway sampled, and those of other models.

    Args:
        record: of the rollout.
        attempt: its number.
        selection: agent -> the policy that is to learn from its calls.

    Attributes:
        candidate: its calls without the student's tokens, enough to judge its rewards.
    """

    def __init__(self, record: Record, attempt: int, selection: Selection) -> None:
        self._record = record
        self._selection = selection
        self._spans = [s for s in record.spans if s.attempt == attempt]
        recorded = sorted((c for c in record.calls if c.attempt == attempt), key=lambda c: (c.index, c.id))
        self._conversations: dict[str, Conversation | NoConversationError] = of_calls(recorded)
        self._attempt = attempt
        self._sampled = {c.id for c in recorded if c.response_ids.size}
        known = {c.span_id for c in recorded} | {c.id for c in recorded}
        chats = [
            s
            for s in in_order(self._spans)
            if s.operation == semconv.CHAT
            and not s.attributes.get(semconv.UNTRAINED)
            and not s.attributes.get(semconv.ROUTED)
            and known.isdisjoint((s.span_id, s.attributes.get(semconv.RESPONSE_ID)))
        ]
        first = recorded[-1].index + 1 if recorded else 0
        self._calls = [
            replace(call, policy=selection.policy_for(call.agent))
            for call in (*recorded, *(self._of_span(span, first + k) for k, span in enumerate(chats)))
        ]
        self._others = {"other agent": sum(c.policy is None for c in self._calls)}
        self.candidate = self._candidate(self._calls, frozenset(), self._others)

    def with_tokens(self, renderings: Mapping[str, Rendering]) -> Candidate:
        """The attempt with the tokens of the students, by policy."""
        sessions: dict[str, Sessions] = {policy: Sessions() for policy in renderings}
        refused = Counter(self._others)
        exact: dict[str, bool] = {}
        made: set[str] = set()
        calls: list[Call] = []
        for call in self._calls:
            if call.policy is None:
                continue
            if call.error is not None:
                calls.append(call)
                continue
            rendering = renderings[call.policy]
            conversation = self._conversations[call.id]
            # A continuation has its parent's tokens, so what is shown of that holds for it.
            if call.parent_id in exact:
                exact[call.id] = exact[call.parent_id]
            else:
                exact[call.id] = call.id in self._sampled and _is_own(rendering, call, conversation)
            if exact[call.id]:
                calls.append(call)
                continue
            try:
                if isinstance(conversation, NoConversationError):
                    raise conversation
                calls.append(_rendered(rendering, sessions[call.policy], call, conversation))
                made.add(call.id)
            except NoConversationError as reason:
                refused[str(reason)] += 1
        return self._candidate(calls, frozenset(made), refused)

    def with_texts(self) -> Candidate:
        """The attempt with the texts of its calls. In place of tokens, calls that no gateway sampled have the bytes of
        their texts, which tell calls apart."""
        refused = Counter(self._others)
        calls: list[Call] = []
        texts: dict[str, Conversation] = {}
        for call in self._calls:
            if call.policy is None:
                continue
            conversation = self._conversations[call.id]
            if call.error is not None:
                calls.append(call)
            elif isinstance(conversation, NoConversationError):
                refused[str(conversation)] += 1
            else:
                texts[call.id] = conversation
                calls.append(call if call.id in self._sampled else _as_bytes(call, conversation))
        return replace(self._candidate(calls, frozenset(), refused), conversations=texts)

    def _candidate(self, calls: Sequence[Call], made: frozenset[str], refused: Mapping[str, int]) -> Candidate:
        rollout = self._record.rollout
        index = SpanIndex(calls, self._spans)
        built = build_trajectory(rollout.rollout_id, self._attempt, rollout.group, index, self._selection)
        return Candidate(built, rollout.task, rollout.created_at, made, refused)

    def _of_span(self, span: Span, index: int) -> Call:
        conversation: Conversation | NoConversationError
        try:
            conversation = of_span(span)
        except NoConversationError as error:
            conversation = error
        except UnreadableMessageError:
            if span.status != "error" and self._selection.policy_for(span.agent or "") is not None:
                raise
            conversation = NoConversationError("in no known form")
        self._conversations[span.span_id] = conversation
        answer = {} if isinstance(conversation, NoConversationError) else conversation.answer
        reason = finish_reason(span)
        return Call(
            id=span.span_id,
            rollout_id=span.rollout_id,
            attempt=span.attempt,
            index=index,
            agent=span.agent or "",
            policy=None,
            policy_version=0,
            prompt_ids=int_array([]),
            response_ids=int_array([]),
            logprobs=float_array([]),
            finish_reason=reason,
            tool_call_ids=tuple(c["id"] for c in answer.get("tool_calls") or ()),
            span_id=span.span_id,
            response=answer,
            error=(span.status_message or "failed") if reason == "error" else None,
            started_at=span.start,
            ended_at=span.end,
        )


def _is_own(rendering: Rendering, call: Call, conversation: Conversation | NoConversationError) -> bool:
    """Whether a sampled call's tokens are the student's; checked for a conversation's first call.

    Without texts only the prompt is checked: another tokenizer's tokens change when they are decoded and encoded.
    """
    if isinstance(conversation, NoConversationError):
        return np.array_equal(rendering.encode(rendering.decode(call.prompt_ids)), call.prompt_ids)
    try:
        prompt = rendering.prompt(conversation.messages, conversation.tools).ids
    except ConfigError:
        return False
    # A tool that was forced is begun in the prompt.
    return np.array_equal(prompt, call.prompt_ids[: prompt.size])


def _as_bytes(call: Call, conversation: Conversation) -> Call:
    prompt, response = (
        np.frombuffer(to_json(texts), np.uint8).astype(np.int32)
        for texts in ([conversation.messages, conversation.tools], conversation.answer)
    )
    logprobs = float_array(np.zeros(response.size, np.float32))
    return replace(call, prompt_ids=int_array(prompt), response_ids=int_array(response), logprobs=logprobs)


def _rendered(rendering: Rendering, sessions: Sessions, call: Call, conversation: Conversation) -> Call:
    """The call with tokens made from its texts; its prompt continues the call before it wherever the template can.

    The student's probability of sampling them is unknown: the log-probs are 0, for losses that read none.

    Raises:
        NoConversationError: the chat template does not write this answer.
    """
    messages = conversation.messages
    tools = list(conversation.tools) or None
    match = sessions.match(str(call.policy), messages, tools, call.agent)
    request = ChatRequest(messages, tools, None, Sampling(max_tokens=0))
    try:
        prompt_ids, _, match = rendered_prompt(rendering, request, match)
    except ConfigError as error:
        raise NoConversationError("the chat template refuses the messages") from error
    try:
        response_ids = rendering.response(prompt_ids, messages, conversation.answer, tools)
    except ConfigError as error:
        called = bool(conversation.answer.get("tool_calls"))
        raise NoConversationError(
            "tools not recorded"
            if called and not tools
            else "a tool call does not survive the chat template"
            if called
            else "the answer does not survive the chat template"
        ) from error
    sessions.remember(match, call.id, call.id, prompt_ids, response_ids, conversation.answer)
    return replace(
        call,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        logprobs=float_array(np.zeros(response_ids.size, np.float32)),
        temperature=1.0,
        parent_id=match.parent.call_id if match.parent else None,
        fork_cause=match.cause.value if match.cause else None,
        request={"messages": messages[match.new :], **({} if match.parent else {"tools": list(tools or ())})},
        response=conversation.answer,
    )
