"""What a policy itself caused: the agent raised because of a trained agent's own answer.

Such an attempt is no failure of the infrastructure. It is not repeated, its calls are trained like any others, and its
reward is the lowest of its group.

Invariant: an exception is the policy's only where the exception itself says so. Either what it could not read is an
answer of a policy, or its class says that its framework could not use an answer, or that the user blames the policy
(`agl.PolicyFault`), or that a prompt outgrew the context, and the last call of the agent that raised was sampled by a
policy; or its last prompt was refused by the chat template because of an answer of a policy. Whether an answer was cut
is no evidence: a fault of the user's code may come after any answer.
"""

from __future__ import annotations

import builtins
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agl import semconv
from agl.mdp.evidence import answer_texts, is_answer
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span, recorded
from agl.mdp.types import Call

CAUSES: Final = {
    "length": "its answer was cut at its longest",
    "unparsable": "its framework could not parse its answer",
    "turns": "it used up its turns",
    "context": "its conversation outgrew the context (max_context)",
    "template": "the chat template refuses its answer in a later prompt",
    "limit": "what it ran exceeded a limit of its sandbox",
    "declared": "its agent raised agl.PolicyFault",
}
"""The causes, and what each says of an agent."""
CONTEXT_LENGTH: Final = "context_length_exceeded"
"""What the recorded error of a call begins with whose prompt did not fit into the context; OpenAI's code."""
ANSWER_REFUSED: Final = "answer_refused"
"""What it begins with if the chat template refuses an earlier answer in the prompt. Under the same name the call's
request has the id of the call that gave this answer."""
REFUSALS: Final = {CONTEXT_LENGTH: "context", ANSWER_REFUSED: "template"}
"""The codes of refused requests that can be a policy's doing, and their causes."""
_SHOWN = 160
"""Characters of an exception in one line."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an attempt ended with an exception that a policy caused.

    Attributes:
        cause: a key of `CAUSES`.
        agent: whose answer it was.
        call_id: the call that gave it.
        error: what was raised.
    """

    cause: str
    agent: str
    call_id: str
    error: str

    def __str__(self) -> str:
        raised = textwrap.shorten(self.error, _SHOWN, placeholder=" ...")
        return f"the policy's own failure ({self.cause}): agent {self.agent!r}, {CAUSES[self.cause]}: {raised}"

    @classmethod
    def of_spans(cls, spans: Iterable[Span]) -> Fault | None:
        """The fault that an attempt's spans record; None if there was none."""
        for span in spans:
            if span.operation == semconv.POLICY_FAULT:
                cause = span.attributes[semconv.FAULT_CAUSE]
                call_id = span.attributes[semconv.FAULT_CALL]
                return cls(str(cause), span.agent or "", str(call_id), span.status_message or "")
        return None

    def span(self, root: Span, sequence: int) -> Span:
        """The record of this fault, with this number, in the attempt with this root span."""
        now = time.time()
        facts = {semconv.FAULT_CAUSE: self.cause, semconv.FAULT_CALL: self.call_id, semconv.SEQUENCE: sequence}
        where = {"parent_id": root.span_id, "start": now, "end": now}
        return recorded(root, semconv.POLICY_FAULT, self.cause, self.agent, facts, error=self.error, **where)


def find_fault(index: SpanIndex) -> Fault | None:
    """The policy fault behind an agent's exception; None if the agent did not raise, or nothing shows that a policy
    caused it: then it is the agent's own or its surroundings', whatever the answer looked like. What a reward function
    raises is never a policy's.

    The cause of an exception after an answer that was cut is that it was cut ("length").
    """
    root = index.root
    if root is None or semconv.AGENT_ERROR not in root.attributes or semconv.REWARD_ERROR in root.attributes:
        return None
    error = str(root.attributes[semconv.AGENT_ERROR])
    cause = root.attributes.get(semconv.AGENT_ERROR_CAUSE)
    inputs = root.attributes.get(semconv.AGENT_ERROR_INPUTS, ())
    sampled = [c for c in index.calls if c.policy is not None and c.error is None]
    call = _last_call(index, root, error)
    refusal = next((code for code in REFUSALS if call is not None and (call.error or "").startswith(code)), None)
    if call is not None and refusal is not None:
        call = _refused_answer(index, call, refusal)
        cause = cause or (None if _is_builtin(error) else REFUSALS[refusal])
    elif cause in REFUSALS.values():
        return None
    elif cause == "declared" and sampled and call not in sampled:
        call = sampled[-1]
    elif cause is None and inputs:
        call = next((c for c in reversed(sampled) if is_answer(inputs, answer_texts(c.response))), None)
        cause = "unparsable"
    if call is None or call.policy is None or call.error is not None or cause is None:
        return None
    if cause not in ("limit", *REFUSALS.values()) and call.finish_reason == "length":
        cause = "length"
    return Fault(str(cause), call.agent, call.id, error)


def _refused_answer(index: SpanIndex, refused: Call, code: str) -> Call | None:
    """The call that gave the answer because of which a later call was refused; None if there is none."""
    if code == ANSWER_REFUSED:
        return next((c for c in index.calls if c.id == refused.request.get(ANSWER_REFUSED)), None)
    answered = [c for c in index.calls if c.agent == refused.agent and c.error is None]
    return answered[-1] if answered else None


def _is_builtin(error: str) -> bool:
    """Whether an exception's text begins with a class of Python's, which frameworks do not raise for a full context."""
    raised = getattr(builtins, error.partition(":")[0], None)
    return isinstance(raised, type) and issubclass(raised, Exception) and not issubclass(raised, ExceptionGroup)


def _last_call(index: SpanIndex, root: Span, error: str) -> Call | None:
    """The last call of the agent that raised this error: of the innermost agent's span that it left."""
    left = [
        s
        for s in index.spans.values()
        if s.operation == semconv.INVOKE_AGENT and s.status == "error" and s.status_message == error
    ]
    raised_in = left[0] if left else root
    chats = [s for s in index.spans.values() if s.operation == semconv.CHAT]
    if not chats:
        return index.calls[-1] if index.calls else None
    agent_spans = ((s for s in index.upwards(c.parent_id) if s.operation == semconv.INVOKE_AGENT) for c in chats)
    own = [chat for chat, above in zip(chats, agent_spans, strict=True) if next(above, None) is raised_in]
    within = [s for s in chats if index.within(s.span_id, raised_in.span_id)]
    last = next(reversed(own or within), None)
    return None if last is None else index.by_span.get(last.span_id)
