"""The MDP: an LLM call of a selected agent is a transition, a rollout's transitions are a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from agl import semconv
from agl.errors import RewardError
from agl.names import require_short

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

T = TypeVar("T")

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


def int_array(values: Iterable[int] | npt.NDArray[Any]) -> IntArray:
    """`values` as a read-only int32 array, shape [n]."""
    return _read_only(values, np.int32)


def float_array(values: Iterable[float] | npt.NDArray[Any]) -> FloatArray:
    """`values` as a read-only float32 array, shape [n]."""
    return _read_only(values, np.float32)


def _read_only(values: Iterable[float] | npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=dtype)
    array = array.copy() if array.flags.writeable else array
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True)
class Reward:
    """A named reward and where it was earned.

    Attributes:
        name: what is rewarded; "reward" if the user named nothing. See `agl.names.NAME_BYTES`.
        value: a finite number, float64.
        source: where it comes from: "return" (the result of the agent or of `reward=`), "emit" (`agl.emit_reward`),
            "air", "group" (`Trainer(group_reward=)`) or "label" (a person, afterwards).
        span_id: the span it was emitted in (hex, 16 digits); None for a reward of the whole rollout.
        primary: whether it counts towards returns; a dict of rewards has one primary entry.
        agent: the only agent that it is for, where a reward of the whole rollout names one.
        explanation: why, in words.

    Raises:
        RewardError: the reward's name or the agent's is too long.
    """

    name: str
    value: float
    source: str = "return"
    span_id: str | None = None
    primary: bool = True
    agent: str | None = None
    explanation: str | None = None

    def __post_init__(self) -> None:
        require_short(self.name, "a reward", RewardError)
        require_short(self.agent or "", "the agent of a reward", RewardError)

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of a span that reports it, which `of_span` reads; None for what is left out."""
        return {
            semconv.REWARD_NAME: self.name,
            semconv.REWARD_VALUE: self.value,
            semconv.REWARD_PRIMARY: self.primary,
            semconv.REWARD_SOURCE: self.source,
            semconv.REWARD_AGENT: self.agent,
            semconv.EVALUATION_EXPLANATION: self.explanation,
        }

    @classmethod
    def of_span(cls, attributes: Mapping[str, Any], parent_id: str | None) -> Reward | None:
        """The reward that a span with these attributes and this parent reports; None if it is not a reward's span.

        Raises:
            RewardError: it has no name, its value is not a number, or its name is too long.
        """
        if attributes.get(semconv.OPERATION_NAME) != semconv.REWARD:
            return None
        agent = attributes.get(semconv.REWARD_AGENT)
        explanation = attributes.get(semconv.EVALUATION_EXPLANATION)
        withdrawn = attributes.get(semconv.REWARD_SOURCE) == semconv.LABEL and semconv.REWARD_VALUE not in attributes
        try:
            name = str(attributes[semconv.REWARD_NAME])
            value = math.nan if withdrawn else float(attributes[semconv.REWARD_VALUE])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            # agl writes none: another program did, or somebody changed the store.
            raise RewardError(
                "a span says that it is a reward, and has no name, or no number as its value",
                hint="agl.emit_reward writes spans of rewards",
                attribute=semconv.REWARD_NAME if semconv.REWARD_NAME not in attributes else semconv.REWARD_VALUE,
            ) from error
        return cls(
            name,
            value,
            str(attributes.get(semconv.REWARD_SOURCE, "emit")),
            parent_id,
            bool(attributes.get(semconv.REWARD_PRIMARY, True)),
            agent=None if agent is None else str(agent),
            explanation=None if explanation is None else str(explanation),
        )


def without_superseded(entries: Sequence[T], reward_of: Callable[[T], Reward]) -> list[T]:
    """Every reward but labels that a later one of the same name replaces or withdraws.

    Args:
        entries: of an attempt, in order of time.
        reward_of: the reward in each.
    """
    labels = {reward.name: reward for reward in map(reward_of, entries) if reward.source == semconv.LABEL}
    standing = {id(reward) for reward in labels.values() if not math.isnan(reward.value)}
    return [e for e in entries if reward_of(e).source != semconv.LABEL or id(reward_of(e)) in standing]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One LLM call as the gateway saw it: token ids in, token ids out, nothing re-tokenised.

    Attributes:
        id: unique; `<response id>` for a response's first choice, `<response id>:<k>` for the others.
        rollout_id, attempt, agent: the caller.
        index: position among the attempt's requests, from 0, in order of arrival.
        policy: the policy that sampled it; None when the agent is not selected, so it is never trained.
        policy_version: the version of the weights that sampled it; the oldest, where an update came in the middle.
        prompt_ids: int32 [P].
        response_ids: int32 [R], sampled; with the stop token where one was sampled.
        logprobs: float32 [R], of the sampled ids under the distribution they were drawn from.
        temperature: of that distribution; 1.0 is the model's unscaled one.
        finish_reason: "length" and "cancelled" mark a response cut short; "error" one that never came.
        parent_id: the call whose prompt + response this prompt extends token for token; None if there is none.
        fork_cause: why the prompt extends no earlier call although the conversation continued; None when it does
            or when the conversation is new.
        tool_call_ids: the ids minted for the tool calls in the response.
        span_id: the client's `chat` span (hex), from `traceparent`.
        request: the new messages of this call (those after `parent_id`'s response) and the sampling options.
        response: the assistant message as the client received it.
        error: what went wrong, for finish_reason "error".
        started_at, ended_at: seconds since the epoch.
    """

    id: str
    rollout_id: str
    attempt: int
    index: int
    agent: str
    policy: str | None
    policy_version: int
    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray
    temperature: float = 1.0
    finish_reason: FinishReason = "stop"
    parent_id: str | None = None
    fork_cause: str | None = None
    tool_call_ids: tuple[str, ...] = ()
    span_id: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    response: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, self.ended_at - self.started_at)

    @property
    def grammar(self) -> str:
        """What the answer was held to while it was sampled; "" for nothing."""
        return str(self.request.get("used", {}).get("grammar", ""))

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(first token, version of the weights) of each stretch of the response that one version has sampled."""
        stretches = self.request.get("used", {}).get("versions") or [[0, self.policy_version]]
        return tuple((int(first), int(version)) for first, version in stretches)

    @property
    def newest_version(self) -> int:
        """The version of the weights that sampled the last token."""
        return self.versions[-1][1]

    def __post_init__(self) -> None:
        if self.response_ids.shape != self.logprobs.shape:
            raise ValueError(f"call {self.id}: {self.response_ids.size} sampled ids but {self.logprobs.size} log-probs")

    @property
    def ids(self) -> IntArray:
        """int32 [P + R]: prompt and response."""
        return np.concatenate([self.prompt_ids, self.response_ids])


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """One decision of a selected agent: state = `call.prompt_ids`, action = `call.response_ids`.

    Attributes:
        call: the gateway's record.
        rewards: the rewards of this call alone, with those of its tool calls.
    """

    call: Call
    rewards: tuple[Reward, ...] = ()

    @property
    def reward(self) -> float:
        """Sum of this call's primary rewards."""
        return float(sum(r.value for r in self.rewards if r.primary))

    @property
    def trainable(self) -> bool:
        """Whether tokens were sampled and the response is complete; a cancelled one is masked."""
        return self.call.response_ids.size > 0 and self.call.finish_reason not in ("cancelled", "error")


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The transitions of one attempt of a rollout, in order of arrival.

    Attributes:
        rollout_id, attempt: identify the attempt.
        policy: the policy of these transitions; None if they are of every trained agent.
        group: the task's group in this step; rollouts of one group are compared with each other.
        transitions: in order of arrival.
        rewards: the rewards of the rollout as a whole.
    """

    rollout_id: str
    attempt: int
    policy: str | None
    group: str
    transitions: tuple[Transition, ...]
    rewards: tuple[Reward, ...] = ()

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that sampled its calls, in order of appearance."""
        return tuple(dict.fromkeys(t.call.policy for t in self.transitions if t.call.policy is not None))

    def of(self, policy: str) -> Trajectory:
        """The same trajectory with the transitions of one policy alone."""
        return replace(self, policy=policy, transitions=tuple(t for t in self.transitions if t.call.policy == policy))

    @property
    def final_reward(self) -> float:
        """Sum of the primary rewards of the rollout as a whole, without those of single calls."""
        return float(sum(r.value for r in self.rewards if r.primary))

    @property
    def total_reward(self) -> float:
        """`final_reward` plus the primary rewards of every call."""
        return self.final_reward + float(sum(t.reward for t in self.transitions))
