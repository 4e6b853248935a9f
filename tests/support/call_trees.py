"""Random call trees: conversations that grow, fork, are compacted, interleave and sample in parallel, over a small
vocabulary."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from agl.mdp.types import Call, FinishReason, Trajectory, Transition, float_array, int_array

VOCABULARY = 24


def call(
    k: int,
    prompt: list[int],
    response: list[int],
    *,
    rollout: str = "r",
    finish: FinishReason = "stop",
    temperature: float = 1.0,
    logprobs: list[float] | None = None,
) -> Call:
    """The k-th call of a rollout. Its log-probs differ from token to token and from call to call."""
    return Call(
        id=f"{rollout}/{k}",
        rollout_id=rollout,
        attempt=1,
        index=k,
        agent="agent",
        policy="policy",
        policy_version=0,
        prompt_ids=int_array(prompt),
        response_ids=int_array(response),
        logprobs=float_array(logprobs if logprobs is not None else [-(k + 1) - i / 100 for i in range(len(response))]),
        temperature=temperature,
        finish_reason=finish,
    )


def trajectory(calls: list[Call], rollout: str = "r") -> Trajectory:
    """The calls of one rollout."""
    return Trajectory(rollout, 1, "policy", "group", tuple(Transition(c) for c in calls))


def random_calls(
    rng: np.random.Generator, n_calls: int, *, rollout: str = "r", vocabulary: int = VOCABULARY, compacts: bool = False
) -> list[Call]:
    """`n_calls` calls: each continues, forks or repeats an earlier context, or starts another; or compacts one."""

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, vocabulary, rng.integers(low, high)).tolist()

    kinds = ["new", "grow", "grow", "grow", "fork", "again", *(("trim", "summary") if compacts else ())]
    system = tokens(1, 24)
    contexts: list[tuple[list[int], list[int]]] = []
    calls: list[Call] = []
    for k in range(n_calls):
        kind = rng.choice(kinds) if contexts else "new"
        prompt, answer = contexts[rng.integers(len(contexts))] if contexts else ([], [])
        match kind:
            case "new":
                prompt = system + tokens(0, 4)
            case "grow":
                prompt = prompt + answer + tokens(0, 4)
            case "fork":
                whole = prompt + answer
                prompt = whole[: rng.integers(1, len(whole) + 1)] + tokens(0, 4)
            case "trim" | "summary":
                # The middle is gone or replaced; what was sampled before and after it stands in the prompt.
                whole = prompt + answer
                start, end = sorted(rng.integers(0, len(whole) + 1, 2))
                between = tokens(1, 4) if kind == "summary" else []
                prompt = whole[:start] + between + whole[end:] + tokens(0, 4) or system
            case "again":
                pass
        response = answer if kind == "again" and rng.random() < 0.5 else tokens(0, 6)
        contexts.append((prompt, response))
        finish: FinishReason = "cancelled" if rng.random() < 0.15 else "stop"
        temperature = float(rng.choice([1.0, 0.7]))
        calls.append(call(k, prompt, response, rollout=rollout, finish=finish, temperature=temperature))
    return calls


@st.composite
def trajectories(draw: st.DrawFn, max_calls: int = 10, rollout: str = "r") -> Trajectory:
    """A rollout of random calls; a small vocabulary makes prefixes meet by chance too."""
    seed = draw(st.integers(0, 2**32 - 1))
    vocabulary = draw(st.sampled_from([2, 4, VOCABULARY]))
    n_calls = draw(st.integers(1, max_calls))
    rng = np.random.default_rng(seed)
    return trajectory(random_calls(rng, n_calls, rollout=rollout, vocabulary=vocabulary, compacts=True), rollout)
