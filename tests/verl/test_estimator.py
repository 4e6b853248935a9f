"""agl's estimator inside verl's own advantage code, with rows in a real TransferQueue and verl's own padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from call_trees import call, trajectory
from verl_rows import result

from agl.credit import PerCall
from agl.mdp.types import Reward
from agl_verl.rows import ADVANTAGES, Prompt, Row, train_rows

PROMPTS = [Prompt("first", 0, 3, 1, False), Prompt("second", 1, 3, 1, False)]


@pytest.fixture
def queue(cluster: None) -> Iterator[None]:
    import transfer_queue as tq
    from omegaconf import OmegaConf

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()


def rows() -> list[Row]:
    """Two groups of three rollouts of two calls, some of which fork; calls earn different rewards."""
    made: list[Row] = []
    for p, prompt in enumerate(PROMPTS):
        results = []
        for k in range(3):
            calls = [call(0, [1, 2], [3, 4 + k], rollout=f"{p}{k}")]
            grown = [1, 2, 3, 4 + k, 9] if k else [1, 9]
            calls.append(call(1, grown, [5, 6, 7][: k + 1], rollout=f"{p}{k}"))
            t = trajectory(calls, f"{p}{k}")
            earned = replace(t.transitions[1], rewards=(Reward("reward", float(k * (p + 1))),))
            results.append(result(replace(t, transitions=(t.transitions[0], earned)), k))
        group = train_rows(prompt, results, PerCall(), policy="policy", estimator="grpo", normalize_std=False, own=True)
        made += group.rows
    return made


def test_verl_uses_the_advantages_of_the_rows(queue: None) -> None:
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta
    from verl.protocol import DataProto
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    import agl_verl.estimator  # noqa: F401
    from agl_verl.overrides import ESTIMATOR
    from agl_verl.transfer import put

    made = rows()
    put("train", made)
    shuffled = [made[i] for i in np.random.default_rng(0).permutation(len(made))]
    batch = KVBatchMeta(partition_id="train", keys=[r.key for r in shuffled], tags=[r.tag for r in shuffled])
    batch = upsample_batch_to_divisible_size(batch, 16, 0)
    assert len(batch) == 16 > len(made)
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["uid", "response_mask", "rm_scores"])
    data = DataProto(batch=data.to_padded_tensor())
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data.non_tensor_batch["uid"] = np.array(data.batch.pop("uid").tolist(), dtype=object)
    out = compute_advantage_for_multi_trajectories(data, batch_keys=batch.keys, adv_estimator=ESTIMATOR, config={})
    got = out.batch["advantages"]
    for i, row in enumerate(shuffled):
        due = row.fields[ADVANTAGES]
        torch.testing.assert_close(got[i, : due.size], torch.from_numpy(due), rtol=0, atol=0)
        assert not got[i, due.size :].any()
    assert not got[len(made) :].any(), "verl's padding rows are trained"
    assert len({round(float(x), 5) for x in got[got != 0]}) > 4


@pytest.mark.parametrize(
    ("rows", "mini_batches", "ranks", "micro", "mini", "filled"),
    [
        (128, 1, 1, None, 16, 128),  # a row for every rollout: as verl would have it
        (130, 1, 1, None, 17, 136),  # two rollouts of two rows: one optimiser step still, not two
        (130, 2, 1, None, 9, 144),
        (120, 1, 1, None, 15, 120),  # eight rollouts failed: nothing to fill up
        (130, 1, 4, 8, 20, 160),  # four GPUs with micro-batches of eight rows
    ],
)
def test_there_are_as_many_optimiser_steps_as_for_whole_rollouts(
    rows: int, mini_batches: int, ranks: int, micro: int | None, mini: int, filled: int
) -> None:
    from omegaconf import OmegaConf

    from agl_verl.trainer_hooks import _fit_mini_batches

    part = {"use_dynamic_bsz": micro is None, "ppo_mini_batch_size": 16, "ppo_micro_batch_size_per_gpu": micro}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"n": 8, "log_prob_micro_batch_size_per_gpu": micro}, "actor": part}}
    )
    _fit_mini_batches(config, {"actor_rollout_ref.actor": mini_batches}, rows, ranks)
    chosen = config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert chosen == mini
    assert -(-rows // (chosen * 8)) == mini_batches
    assert -(-rows // (chosen * 8)) * chosen * 8 == filled


def test_actor_and_critic_are_filled_up_alike() -> None:
    """Each to its own number of steps, and both to one number of rows: verl fills up to a multiple of both."""
    from omegaconf import OmegaConf

    from agl_verl.trainer_hooks import _fit_mini_batches

    dynamic = {"use_dynamic_bsz": True, "ppo_mini_batch_size": 16}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"n": 8}, "actor": dynamic}, "critic": {**dynamic, "ppo_mini_batch_size": 8}}
    )
    _fit_mini_batches(config, {"actor_rollout_ref.actor": 1, "critic": 2}, 130, 1)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 18
    assert config.critic.ppo_mini_batch_size == 9
