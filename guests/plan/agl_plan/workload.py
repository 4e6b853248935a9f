"""What agents do: rollouts of turns, drawn from a description or a finished run; the same ones for each seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from agl.errors import ConfigError
from agl.options import checked_options
from agl.trainer.store.base import Store


class Turn(NamedTuple):
    """A call: tokens that are new in its prompt, tokens of its answer, seconds until the next call can start."""

    new: int
    sampled: int
    tool: float


@checked_options
@dataclass(frozen=True, slots=True)
class Workload:
    """A step's rollouts: of `batch_size` tasks, `group_size` each.

    Tokens of a task's `prompt`, an `answer` and a tool's `result`, and `turns`, are means; `spread` is the standard
    deviation of the logarithms of answers and turns. `tools`: (seconds, share of the tool calls) each. `recorded`:
    rollouts of a finished run to draw from instead.
    """

    batch_size: int = 16
    group_size: int = 8
    prompt: int = 500
    answer: float = 200
    result: int = 200
    turns: float = 5
    spread: float = 0.5
    max_answer: int = 8192
    max_turns: int = 100
    max_context: int = 8192
    tools: tuple[tuple[float, float], ...] = ((0.5, 1.0),)
    recorded: Sequence[Sequence[Turn]] = field(default=(), repr=False)

    def rollout(self, seed: int, group: int, member: int) -> Sequence[Turn]:
        """The turns of one rollout."""
        random = np.random.default_rng([seed, group, member])
        if self.recorded:
            return self.recorded[int(random.integers(len(self.recorded)))]

        def drawn(mean: float, most: int) -> int:
            value = mean * np.exp(self.spread * random.standard_normal() - self.spread**2 / 2)
            return max(1, min(most, round(value)))

        seconds, shares = zip(*self.tools, strict=True)
        turns: list[Turn] = []
        context = 0
        new = self.prompt
        for left in reversed(range(drawn(self.turns, self.max_turns))):
            sampled = min(drawn(self.answer, self.max_answer), self.max_context - context - new)
            if sampled < 1:
                break
            turns.append(Turn(new, sampled, float(random.choice(seconds, p=shares)) if left else 0.0))
            context = context + new + sampled
            new = self.result
        return turns


def tool_times(text: str) -> tuple[tuple[float, float], ...]:
    """The mixture of "0.05,5:0.02": 5 s in 2 % of the calls, 0.05 s in all others; `ConfigError` for no mixture."""
    try:
        pairs = [[float(number) for number in part.split(":")] for part in text.split(",")]
        rest = 1.0 - sum(share for _, share in (pair for pair in pairs if len(pair) > 1))
        times = tuple((pair[0], pair[1] if len(pair) > 1 else rest) for pair in pairs)
        if min(map(min, times)) >= 0 and abs(sum(share for _, share in times) - 1) < 1e-9:
            return times
    except ValueError:
        pass
    hint = "--tool 0.05,5:0.02 is 0.05 s, and 5 s in 2 % of the calls"
    raise ConfigError(f"--tool {text}: no seconds whose shares add up to 1", hint=hint)


async def recorded(store: Store) -> tuple[Any, dict[str, float], Workload]:
    """(the newest run of a store, means of its steps' metrics, its rollouts); `ConfigError` if it is not synchronous.

    Turns have no tokens, but the milliseconds from tool to tool, in which engine, gateway or agent compute; "busy"
    among the means is how many seconds pass for each, since rollouts compute at once.
    """
    hint = "--from DIRECTORY of a run that trained some steps with max_staleness=0, so that its phases do not overlap"
    run = next((run for run in await store.query_runs() if run.step and "algorithm.batch_size" in run.config), None)
    if run is None or run.config.get("algorithm.max_staleness"):
        raise ConfigError("there is no such run" if run is None else f"{run.run_id} is not synchronous", hint=hint)
    means: dict[str, float] = {}
    for metric in await store.query_metrics([run.run_id]):
        means[metric.name] = means.get(metric.name, 0.0) + (metric.value or 0.0) / run.step
    rollouts = []
    edges = []
    for rollout in await store.query_rollouts(run_id=run.run_id, mode="train", status=["succeeded"]):
        spans = await store.query_spans(rollout.rollout_id, rollout.attempts)
        turns = []
        since = min((s.start for s in spans), default=0.0)
        end = max((s.end for s in spans), default=0.0)
        for began, ended in [*((s.start, s.end) for s in spans if s.operation == "execute_tool"), (end, end)]:
            # Tools that run at once are one.
            turns.append(Turn(0, round(1000 * max(0.0, began - since)), max(0.0, ended - max(since, began))))
            edges += [(since, 1), (max(since, began), -1)]
            since = max(since, ended)
        rollouts.append([turn._replace(sampled=max(1, turn.sampled)) for turn in turns])
    if not any(sampled for turns in rollouts for _, sampled, _ in turns):
        raise ConfigError(f"{run.run_id} has no rollouts in this store", hint=hint)
    busy = 0.0
    at_once = 0
    since = 0.0
    for at, sign in sorted(edges):
        busy = busy + (at - since) * (at_once > 0)
        at_once = at_once + sign
        since = at
    means["busy"] = busy / sum(turn.sampled for turns in rollouts for turn in turns)
    return (
        run,
        means,
        Workload(run.config["algorithm.batch_size"], run.config["algorithm.group_size"], recorded=rollouts),
    )
