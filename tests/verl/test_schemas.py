"""Answers within a schema, trained by verl: what was hidden when they were sampled is hidden from the actor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from jobs import algorithm, train
from schema_agent import WAYS, structured
from scripted import serving
from tiny_engine import VOCABULARY, engine_for, finish, prompts, tiny_model, tiny_tokenizer

from agl.mdp.sequence import merge
from agl.mdp.types import Call, Trajectory, Transition
from agl.trainer.engines.base import Sampling, json_grammar
from agl.trainer.local.grammar import Grammars
from agl.trainer.store import open_store
from agl_verl.engine import VerlEngine
from agl_verl.masks import hide
from agl_verl.rows import Chain, chains
from agl_verl.schemas import refusal

pytestmark = pytest.mark.timeout(900)
SCHEMA = WAYS[0]["response_format"]["json_schema"]["schema"]


def sampled() -> list[Chain]:
    """Rows of the local engine's answers, every other one within the schema, one of them of two turns."""
    engine, made = engine_for(tiny_model()), []
    grammar = json_grammar([("", SCHEMA, "")], [0])

    def answer(i: int, prompt: Any, held: bool) -> Call:
        engine.submit(i, prompt, Sampling(40, seed=i, stop_token_ids=(0,), grammar=grammar if held else ""))
        done = finish(engine)[i]
        used = {"used": {"grammar": grammar if held else ""}}
        return Call(f"c{i}", f"r{i}", 1, i, "a", "p", 0, prompt, done.token_ids, done.logprobs, request=used)

    for i, prompt in enumerate(prompts(4)):
        calls = [answer(i, prompt, i % 2 == 0)]
        if i == 0:
            again = np.concatenate([calls[0].ids, np.int32([7, 8, 9])])
            second = answer(10, again, True)
            calls.append(second)
        trajectory = Trajectory(f"r{i}", 1, "p", "g", tuple(map(Transition, calls)))
        ones = {call.id: 1.0 for call in calls}
        made += [chain for row in merge(trajectory, ones) for chain in chains(row, ones)]
    return made


@pytest.mark.parametrize("packed", [True, False])
def test_the_actors_logprobs_are_those_that_were_sampled(packed: bool) -> None:
    rows, model = sampled(), tiny_model()
    assert [len(row.grammars) for row in rows] == [2, 0, 1, 0]
    texts = [torch.from_numpy(row.ids) for row in rows]
    nested = torch.nested.as_nested_tensor(texts, layout=torch.jagged)
    with torch.no_grad():
        each = [model(ids[None]).logits[0] for ids in texts]
    logits = torch.cat(each)[None] if packed else torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
    free = logits.clone()
    hide(logits, Grammars(tiny_tokenizer(), VOCABULARY), [row.grammars for row in rows], nested)

    def logprobs(of: torch.Tensor) -> list[Any]:
        split = of[0].split([len(ids) for ids in texts]) if packed else of
        distributions = [torch.log_softmax(one[: len(ids) - 1], -1) for one, ids in zip(split, texts, strict=True)]
        return [d.gather(1, ids[1:, None])[:, 0].numpy() for d, ids in zip(distributions, texts, strict=True)]

    differences = []
    for row, held, plain in zip(rows, logprobs(logits), logprobs(free), strict=True):
        first, mask = row.prompt_ids.size - 1, row.response_mask
        np.testing.assert_allclose(held[first:][mask], row.logprobs[mask], atol=2e-5)
        differences.append(float(np.abs(plain[first:][mask] - row.logprobs[mask]).max()))
    assert differences[0] > 1
    assert differences[1] < 2e-5


@pytest.mark.parametrize(
    ("options", "config", "why"),
    [
        ({"mode": "colocate_async"}, {}, "its grammar would begin again"),
        ({}, {"actor_rollout_ref.model.use_fused_kernels": True}, "over the whole vocabulary"),
        ({}, {"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 2}, "spread over several GPUs"),
        ({}, {"actor_rollout_ref.model.external_lib": "json"}, "agl's own is needed"),
    ],
)
def test_a_request_with_a_schema_is_refused_where_the_actor_would_not_know_it(
    tmp_path: Path, options: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    """Before anything is sampled, in the words of what to do."""
    engine = VerlEngine(None, 256, grammars=refusal(algorithm(tmp_path, config, steps=1, **options).plan))  # type: ignore[arg-type]

    async def scenario() -> str:
        async with serving(engine, tiny_tokenizer()) as rig:
            attempt = await rig.attempt()
            with pytest.raises(openai.BadRequestError) as refused:
                await attempt.chat("hello", **WAYS[0])
            await attempt.close()
            return str(refused.value)

    text = asyncio.run(scenario())
    assert why in text
    assert "agl.GRPO" in text


def test_no_setting_of_the_default_is_in_the_way(tmp_path: Path) -> None:
    assert refusal(algorithm(tmp_path, steps=1, gpus=2).plan) == ""


@pytest.mark.slow
def test_a_training_within_schemas(cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path) -> None:
    result = train(
        structured,
        algorithm(
            tiny_policy, {"trainer.checkpoint_callback_class": "captured.Captured"}, steps=2, checkpoint_every=1,
            batch_size=8, val_before_train=False, entropy_coef=0.01,
        ),
        tmp_path / "run", max_attempts=1, heldout=4,
    )  # fmt: skip
    assert [h["train/failed_rollouts"] for h in result.history] == [0, 0]
    for entry in result.history:
        assert entry["verl/training/rollout_probs_diff_max"] < 1e-2
        assert np.isfinite(entry["verl/actor/entropy"])

    async def look() -> list[Call]:
        store = await open_store(result.store)
        try:
            return [c for r in await store.query_rollouts(mode="train") for c in await store.query_calls(r.rollout_id)]
        finally:
            await store.close()

    calls = asyncio.run(look())
    assert {bool(call.tool_call_ids) for call in calls} == {True, False}
    assert all(call.grammar for call in calls)
    forced = 0
    for step in (1, 2):
        rows = torch.load(tmp_path / "run" / "checkpoints" / f"global_step_{step}" / "rows.pt")
        assert rows
        for row in rows.values():
            mask = row["response_mask"].bool()
            rollout, old = row["rollout_log_probs"][mask], row["old_log_probs"][mask]
            assert (rollout - old).abs().max() < 5e-3
            forced += int((rollout == 0).sum())
    assert forced > 1000, "no token was forced, so this shows nothing"
