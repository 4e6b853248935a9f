"""The memory of a conversation's prompts grows with its tokens, and no prompt ever changes."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from scripted import in_loop, serving

from agl.mdp.types import IntArray, int_array
from agl.trainer.gateway.sessions import Turn


def test_prompts_are_kept_once_whatever_continues_what():
    rng = random.Random(0)
    turns = [Turn("first", int_array(range(50)), int_array([1, 2]), "s")]
    expected: list[list[int]] = [list(range(50))]
    for n in range(200):
        k = rng.randrange(max(0, len(turns) - 3), len(turns))
        parent = turns[k]
        prompt = [*expected[k], *parent.response_ids.tolist(), *(rng.randrange(99) for _ in range(rng.randrange(1, 9)))]
        buffer, ids = parent.shared(int_array(prompt))
        turns.append(Turn(str(n), ids, int_array([n]), "s", buffer))
        expected.append(prompt)
    assert [turn.prompt_ids.tolist() for turn in turns] == expected
    assert not any(turn.prompt_ids.flags.writeable for turn in turns[1:])


@pytest.mark.full
def test_memory_is_linear_in_the_tokens_of_a_conversation():
    def grown(n_turns: int) -> int:
        tracemalloc.start()
        turn, kept = Turn("0", int_array(range(100)), int_array([1]), "s"), []
        for n in range(n_turns):
            ids: IntArray = int_array([*turn.prompt_ids, *turn.response_ids, *range(100)])
            buffer, ids = turn.shared(ids)
            turn = Turn(str(n), ids, int_array([1]), "s", buffer)
            kept.append(turn)
        memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return memory

    assert grown(400) < 3 * grown(200)
    assert grown(400) < 4 * 4 * 400 * 101 + 400 * 1000


@in_loop
async def test_a_conversation_that_forks_is_recorded_as_it_was_sampled():
    async with serving(["first answer", "second answer", "third answer", "another second answer"]) as rig:
        attempt = await rig.attempt()
        history = [{"role": "user", "content": "one"}]
        for text in ("first answer", "second answer"):
            await attempt.chat(history)
            history = [*history, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        await attempt.chat(history)
        # The first answer is continued a second time.
        await attempt.chat([*history[:2], {"role": "user", "content": "something else"}])
        calls = await attempt.close()
    by_id = {call.id: call for call in calls}
    assert [call.parent_id for call in calls] == [None, calls[0].id, calls[1].id, calls[0].id]
    for call, asked in zip(calls, rig.engine.asked, strict=True):
        assert call.prompt_ids.tolist() == asked.prompt_ids.tolist()
        if call.parent_id is not None:
            parent = by_id[call.parent_id].ids
            assert call.prompt_ids[: parent.size].tolist() == parent.tolist()
