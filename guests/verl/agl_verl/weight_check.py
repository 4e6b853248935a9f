"""Checks after every update that the servers sample from the new weights."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from agl.errors import StalePolicyError
from agl.mdp.types import FloatArray

_PARTITION = "agl-weight-check"
TOKENS = 32


class WeightCheck:
    """Compares the actor's log-probs of one fixed sequence with the servers'.

    Two things must hold after an update: both differ by no more than rounding explains, and where they differ by more
    than before, the servers are not nearer to the actor's weights from before the update.

    Args:
        trainer: verl's.
        ids: the sequence, at least two tokens.
        dtype: of the servers' arithmetic.
    """

    def __init__(self, trainer: Any, ids: Sequence[int], dtype: str) -> None:
        self._trainer = trainer
        self._ids = [int(i) for i in ids][:TOKENS]
        self._tolerance = 1e-3 if dtype in ("float32", "fp32", "float") else 0.25
        self._before: FloatArray | None = None
        self._usual = 0.0

    def actor_logprobs(self) -> FloatArray:
        """The actor's log-probs, float32 [T - 1], of all tokens but the first. Call it while the servers sleep."""
        group = self._trainer.actor_rollout_wg
        ranks = self._trainer._ranks()
        ids = torch.tensor(self._ids, dtype=torch.int64)
        response = ids[1:]
        ones = torch.ones_like(response)
        row = {
            "prompts": ids[:1],
            "responses": response,
            "input_ids": ids,
            "position_ids": torch.arange(ids.numel()),
            "response_mask": ones,
            "loss_mask": ones,
            "multi_modal_inputs": {},
        }
        # Random, as the trainers of several policies share the queue.
        keys = [f"check{uuid.uuid4().hex}_{k}_0" for k in range(ranks)]
        tags = [{"seq_len": ids.numel(), "global_steps": 0, "status": "success"} for _ in keys]
        tq.kv_batch_put(
            keys=keys, partition_id=_PARTITION, fields=list_of_dict_to_tensordict([dict(row) for _ in keys]), tags=tags
        )
        try:
            options = {
                "calculate_entropy": False,
                "compute_loss": False,
                "temperature": 1.0,
                "use_dynamic_bsz": False,
                "micro_batch_size_per_gpu": 1,
            }
            batch = KVBatchMeta(partition_id=_PARTITION, keys=keys, tags=tags, extra_info=options)
            group.compute_log_prob(batch)
            data = tq.kv_batch_get(keys=keys, partition_id=_PARTITION, select_fields=["log_probs", "response_mask"])
            logprobs = response_from_nested(data["log_probs"], data["response_mask"])
            return np.asarray(logprobs[0].float().cpu().numpy(), dtype=np.float32)
        finally:
            tq.kv_clear(keys=keys, partition_id=_PARTITION)

    def server_logprobs(self) -> FloatArray:
        """The servers' log-probs of the same tokens."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "prompt_logprobs": 0}
        servers = getattr(self._trainer, "standalone_server_manager", None) or self._trainer.llm_server_manager
        output = asyncio.run(
            servers.get_client().generate(
                request_id=uuid.uuid4().hex, prompt_ids=list(self._ids), sampling_params=params
            )
        )
        rows = output.extra_fields["prompt_logprobs"][: len(self._ids) - 1]
        return np.asarray([row[0] for row in rows], dtype=np.float32)

    def compare(self, actor: FloatArray, servers: FloatArray, step: int) -> dict[str, float]:
        """Compare the log-probs of both after an update.

        Args:
            actor, servers: float32 [T - 1].

        Returns:
            "agl/probe/logprob_diff": their mean difference, in nats; "agl/probe/moved": the actor's from before the
            update to after it.

        Raises:
            StalePolicyError: the servers hold other weights.
        """
        before = self._before
        usual = self._usual
        difference = _distance(servers, actor)
        self._before = actor
        self._usual = difference
        facts = {"agl/probe/logprob_diff": difference}
        stale = False
        if before is not None:
            facts["agl/probe/moved"] = _distance(actor, before)
            stale = difference > 3 * usual + 1e-4 and _distance(servers, before) < difference
        if stale or not difference <= self._tolerance:
            raise StalePolicyError(
                f"after the update of step {step} the servers' log-probs differ from the actor's by {difference:.3g} "
                f"nats on average{', and match the weights before it' if stale else ''}",
                hint="the servers do not serve the policy just trained; see the logs of verl's workers",
                step=step,
            )
        return facts


def _distance(a: FloatArray, b: FloatArray) -> float:
    return float(np.mean(np.abs(a - b)))
