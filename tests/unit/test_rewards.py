"""What counts as a reward, what the errors say, and where an emitted one belongs."""

from __future__ import annotations

import asyncio
import decimal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import agl
from agl import semconv, tracing
from agl.errors import ConfigError, RewardError
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, Reward, float_array, int_array
from agl.rewards import as_rewards
from agl.tracing.context import RolloutContext
from agl.tracing.threads import carried_across_threads


@pytest.mark.parametrize("name", ["x" * 257, "ü" * 129, "a name " * 2000])
@pytest.mark.parametrize("way", ["emitted", "emitted for an agent", "returned", "made"])
def test_a_name_that_is_too_long_is_said_where_it_is_given(name: str, way: str) -> None:
    ways: dict[str, Callable[[str], Any]] = {
        "emitted": lambda text: agl.emit_reward({text: 1.0}),
        "emitted for an agent": lambda text: agl.emit_reward(1.0, agent=text),
        "returned": lambda text: as_rewards({"reward": 1.0, text: 2.0}, rollout="r"),
        "made": lambda text: Reward(text, 1.0),
    }
    with tracing.running(context := rollout()):
        ways[way]("ü" * 128)
        emitted = len(context.spans)
        size = len(name.encode())
        with pytest.raises(RewardError, match=rf"is {size} bytes long: .* \.\.\.(.|\n)*at most 256 bytes"):
            ways[way](name)
        assert len(context.spans) == emitted


def test_a_policys_name_that_is_too_long_is_refused() -> None:
    assert select({"a": "p" * 256}).policies == ("p" * 256,)
    with pytest.raises(ConfigError, match=r"a policy in agents= is 257 bytes long"):
        select({"a": "p" * 257})


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0), (0.5, 0.5), (True, 1.0), (Fraction(1, 4), 0.25), (np.float32(0.5), 0.5), (np.int64(2), 2.0),
        (np.bool_(True), 1.0), (np.array(0.5), 0.5), (np.array([0.5]), 0.5), (torch.tensor(0.5), 0.5),
        (torch.tensor([[2]]), 2.0), (torch.tensor(True), 1.0), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ],
)  # fmt: skip
def test_a_real_number_of_any_kind_is_a_reward(value: Any, number: float) -> None:
    assert as_rewards(value) == (Reward("reward", number),)
    assert type(as_rewards(value)[0].value) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "the reward 'reward' is nan"),
        (float("inf"), "the reward 'reward' is inf"),
        (np.float32("-inf"), "the reward 'reward' is -inf"),
        (torch.tensor(float("nan")), "the reward 'reward' is nan"),
        (10**400, "the reward 'reward' is inf"),
        ("1.0", "the reward 'reward' is '1.0', a str"),
        (None, "the reward 'reward' is None, a NoneType"),
        (1j, "the reward 'reward' is 1j, a complex"),
        ([1.0], r"the reward 'reward' is \[1.0\], a list"),
        (np.zeros(3), r"the reward 'reward' is array\(\[0., 0., 0.\]\), a ndarray"),
        (torch.zeros(2), r"the reward 'reward' is tensor\(\[0., 0.\]\), a Tensor"),
        (decimal.Decimal("nan"), "the reward 'reward' is Decimal"),
        ({"a": 1, "reward": "x"}, "the reward 'reward' is 'x', a str"),
        ({}, "the reward is an empty dict"),
        ({"a": 1, "b": 2}, "cannot tell which of a, b is the reward to train on"),
    ],
)
def test_anything_else_is_refused_with_its_value_and_place(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        as_rewards(value, rollout="ro-7", agent="writer")
    assert "rollout=ro-7, agent=writer" in str(caught.value)
    assert caught.value.hint


def test_a_dict_has_one_primary_entry() -> None:
    assert [(r.name, r.primary) for r in as_rewards({"accuracy": 1})] == [("accuracy", True)]
    assert [(r.name, r.primary) for r in as_rewards({"style": 1, "reward": 0})] == [("style", False), ("reward", True)]
    chosen = as_rewards({"style": 1, "reward": 0}, primary="style")
    assert [(r.name, r.primary) for r in chosen] == [("style", True), ("reward", False)]
    with pytest.raises(RewardError, match="primary='stil' is none of style, reward"):
        as_rewards({"style": 1, "reward": 0}, primary="stil")
    with pytest.raises(RewardError, match="primary='style' names an entry of a dict, but the reward is 1"):
        as_rewards(1.0, primary="style")


def rollout() -> RolloutContext:
    return RolloutContext("ro", 1, "main", select(None))


def of(context: RolloutContext, operation: str) -> list[Span]:
    return [s for s in context.spans if s.operation == operation]


def test_outside_a_rollout_nothing_happens() -> None:
    agl.emit_reward(1.0)
    agl.emit_message("m")
    agl.emit_object({"a": 1})
    agl.emit_exception(ValueError())
    with agl.operation("op"):
        pass


def test_a_reward_belongs_to_the_span_it_was_emitted_in() -> None:
    with tracing.running(context := rollout()) as root:
        agl.emit_reward(1.0)
        with tracing.span(semconv.EXECUTE_TOOL, "t") as tool:
            agl.emit_reward({"speed": 2.0, "reward": 3.0})
            thread = threading.Thread(target=agl.emit_reward, args=(4.0,))
            thread.start()
            thread.join()

            async def later() -> None:
                await asyncio.to_thread(agl.emit_reward, 5.0)

            asyncio.run(later())
    assert tool is not None
    got = [(s.attributes[semconv.REWARD_VALUE], s.parent_id) for s in of(context, semconv.REWARD)]
    for span in of(context, semconv.REWARD):
        facts = span.attributes
        shown = {
            "gen_ai.evaluation.name": facts[semconv.REWARD_NAME],
            "gen_ai.evaluation.score.value": facts[semconv.REWARD_VALUE],
        }
        assert [(e.name, dict(e.attributes)) for e in span.events] == [("gen_ai.evaluation.result", shown)]
    assert got == [(1.0, root.span_id), *((v, tool.span_id) for v in (2.0, 3.0, 4.0, 5.0))]
    names = [(s.attributes[semconv.REWARD_NAME], s.attributes[semconv.REWARD_PRIMARY]) for s in of(context, "reward")]
    assert names[1:3] == [("speed", False), ("reward", True)]


def test_tools_that_run_at_once_keep_their_rewards_apart() -> None:
    """In tasks and in a pool's threads, each emits while the others are open, and they end in the reverse order."""
    calls = [
        Call(f"c{i}", "ro", 1, i, "main", "policy", 0, int_array([1]), int_array([2]), float_array([-0.5]),
             tool_call_ids=(f"call_{i}", f"pool_{i}"))
        for i in range(6)
    ]  # fmt: skip
    began, barrier = asyncio.Event(), threading.Barrier(6)

    def attributes(call_id: str) -> dict[str, str]:
        return {semconv.TOOL_CALL_ID: call_id}

    async def tool(i: int) -> None:
        with tracing.span(semconv.EXECUTE_TOOL, "t", attributes=attributes(f"call_{i}")):
            if i == 5:
                began.set()
            await began.wait()
            await asyncio.sleep((5 - i) / 100)
            await asyncio.to_thread(agl.emit_reward, {f"late {i}": i})
            agl.emit_reward({f"here {i}": i})

    def pooled(i: int) -> None:
        with tracing.span(semconv.EXECUTE_TOOL, "t", attributes=attributes(f"pool_{i}")):
            barrier.wait(10)

            async def inside() -> None:
                agl.emit_reward({f"pool {i}": i})

            asyncio.run(inside())

    async def main() -> None:
        await asyncio.gather(*(tool(i) for i in range(6)))

    with carried_across_threads(), tracing.running(context := rollout()):
        asyncio.run(main())
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(pooled, range(6)))
    built = build_trajectory("ro", 1, "g", SpanIndex(calls, context.spans), select(None))
    got = {reward.name: call_id for reward, call_id in built.credited}
    assert got == {f"{kind} {i}": f"c{i}" for kind in ("late", "here", "pool") for i in range(6)}


def test_a_bad_emitted_reward_tells_the_place() -> None:
    with (
        pytest.raises(RewardError, match="rollout=ro, attempt=1, agent=main"),
        tracing.running(context := rollout()),
    ):
        agl.emit_reward(float("nan"))
    assert of(context, semconv.REWARD) == []


def test_messages_objects_and_exceptions() -> None:
    with tracing.running(context := rollout()):
        agl.emit_message("hello")
        agl.emit_object({"a": [1, None]})
        agl.emit_exception(ValueError("handled"))
        with pytest.raises(TypeError):
            agl.emit_object(object())
    assert of(context, semconv.MESSAGE)[0].attributes[semconv.VALUE] == "hello"
    assert of(context, semconv.OBJECT)[0].attributes[semconv.VALUE] == '{"a": [1, null]}'
    [error] = of(context, semconv.EXCEPTION)
    assert (error.status, error.status_message) == ("error", "ValueError: handled")


def test_an_operation_is_a_span_of_ones_own() -> None:
    @agl.operation
    def plan(x: int) -> int:
        agl.emit_reward(1.0)
        return x + 1

    @agl.operation
    async def search() -> None:
        raise KeyError("nothing")

    with tracing.running(context := rollout()):
        assert plan(1) == 2
        with pytest.raises(KeyError):
            asyncio.run(search())
        with agl.operation("by hand"):
            pass
    first, second, third = of(context, semconv.OPERATION)
    assert [s.name for s in (first, second, third)] == ["operation plan", "operation search", "operation by hand"]
    assert second.status == "error"
    assert of(context, semconv.REWARD)[0].parent_id == first.span_id
    assert plan.__name__ == "plan"
