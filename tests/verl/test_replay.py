"""Replay buffers of two policies' trainers over one TransferQueue: each samples what its own trainer has requested."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def queue(cluster: None) -> Iterator[None]:
    import transfer_queue as tq
    from omegaconf import OmegaConf

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()


def test_each_trainer_samples_its_own_prompts(queue: None) -> None:
    """verl's own buffer would take the first that are finished, whosever they are."""
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.utils import tensordict_utils

    from agl_verl.manager import AgentManager
    from agl_verl.replay import OwnPrompts

    sent: list[Any] = []
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 2, "val_kwargs": {"n": 1}}}})
    own, others = ["own-1", "own-2"], ["other-1", "other-2", "other-3"]
    batch = {"uid": np.array(own, dtype=object), "index": np.array([4, 7], dtype=object)}
    prompts = tensordict_utils.get_tensordict(batch)
    tensordict_utils.assign_non_tensor_data(prompts, "global_steps", 1)
    AgentManager(config, sent.append).generate_sequences(prompts)
    assert [(p.uid, p.index) for p in sent[0].prompts] == [("own-1", 4), ("own-2", 7)]
    for uid in (*others, *own):
        tag = {"is_prompt": True, "status": "failure" if uid == "own-2" else "finished", "global_steps": 1}
        tq.kv_put(key=uid, partition_id="train", tag=tag)
        if uid != "own-2":
            tq.kv_put(key=f"{uid}_0_0", partition_id="train", tag={"status": "success"})

    common = (OmegaConf.create({}), None, "drop", OmegaConf.create({}))
    buffer = OwnPrompts("sync", *common, poll_interval=0.05)
    sampled, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert sampled.keys == ["own-1_0_0"]
    left = tq.kv_list("train")["train"]
    assert sorted(left) == sorted([*others, *(f"{uid}_0_0" for uid in (*others, "own-1"))])
