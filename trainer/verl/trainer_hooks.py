"""verl's own V1 trainer with what we add at its hooks: one probe per update, and word of every step to the run.

Imports verl; in the trainer's process alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import validate_config
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.logging_utils import configure_verl_logging

from agl.trainer.verl import manager
from agl.trainer.verl.events import Begun, Saved, Stepped, Tell
from agl.trainer.verl.weight_check import Probe

_TRAINED = ("actor_rollout_ref.actor", "critic")
POLL_SECONDS = 0.1
"""How often the trainer looks for finished groups. verl's own 2 s rounds every step up by a second on average."""


class _SavedCallback(CheckpointCallback):
    """The user's callback, then ours."""

    def __init__(self, own: CheckpointCallback, tell: Tell) -> None:
        super().__init__()
        self._own, self._tell = own, tell

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        self._own.on_save(
            trainer=trainer, global_step=global_step, checkpoint_dir=checkpoint_dir, async_save=async_save, **kwargs
        )
        self._tell(Saved(global_step, checkpoint_dir))


def _trainer_class(mode: str, tell: Tell, probe_ids: Sequence[int]) -> type[Any]:
    """verl's trainer for a mode, with what we add at the hooks that it has for it."""
    base: Any = get_trainer_cls(mode)

    class Trainer(base):
        def __init__(self, config: DictConfig) -> None:
            super().__init__(config)
            self.checkpoint_callback = _SavedCallback(self.checkpoint_callback, tell)
            self.replay_buffer.poll_interval = POLL_SECONDS
            names = _TRAINED if self.use_critic else _TRAINED[:1]
            self._mini_batches = _mini_batches(config, names, self.parameter_sync_step)
            self._probe = Probe(self, probe_ids, str(config.actor_rollout_ref.rollout.dtype))

        def on_train_begin(self) -> None:
            tell(Begun(self.global_steps - 1, self.total_training_steps))
            super().on_train_begin()

        def on_step_end(self) -> None:
            # Before the servers take their memory back; the sequence is the same each time.
            trained = self._probe.trained()
            super().on_step_end()
            facts = self._probe.check(trained, self._probe.served(), self.global_steps)
            self._pending_sync_metrics = {**(getattr(self, "_pending_sync_metrics", None) or {}), **facts}

        def _balance_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            _fit_mini_batches(self.config, self._mini_batches, len(batch), self._ranks())
            return super()._balance_batch(batch, *args, **kwargs)

        def _ranks(self) -> int:
            group = self.actor_rollout_wg
            if "actor" not in group._dispatch_info:
                group._dispatch_info["actor"] = group._query_dispatch_info("actor")
            return max(group._dispatch_info["actor"]) + 1

        def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            keys = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
            tell(Stepped(self.global_steps, tuple(keys), scalars(metrics)))

    return Trainer


def _mini_batches(config: DictConfig, names: Sequence[str], parts: int) -> dict[str, int]:
    """Section -> optimiser steps per pass over what is sampled at once."""
    batch = config.data.train_batch_size // parts
    return {name: max(1, batch // OmegaConf.select(config, f"{name}.ppo_mini_batch_size")) for name in names}


def _fit_mini_batches(config: DictConfig, mini_batches: Mapping[str, int], rows: int, ranks: int) -> None:
    """Have verl make as many optimiser steps as it would of as many rows as rollouts.

    verl fills a batch up to whole mini-batches of `ppo_mini_batch_size` x `rollout.n` rows, actor's and critic's both.
    A rollout of several rows would bring about a further step of few real ones, at full weight, and one of none has
    its place filled.
    """
    n = config.actor_rollout_ref.rollout.n
    units = [steps * math.lcm(n, ranks * _micro_batch(config, name)) for name, steps in mini_batches.items()]
    filled = -(-rows // math.lcm(*units)) * math.lcm(*units)
    for name, steps in mini_batches.items():
        OmegaConf.update(config, f"{name}.ppo_mini_batch_size", filled // (steps * n))


def _micro_batch(config: DictConfig, name: str) -> int:
    """Rows that a rank's share has to be a multiple of."""
    if OmegaConf.select(config, f"{name}.use_dynamic_bsz"):
        return 1
    keys = [f"{name}.ppo_micro_batch_size_per_gpu"]
    keys += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"] if name == _TRAINED[0] else []
    return math.lcm(*(OmegaConf.select(config, key) or 1 for key in keys))


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float, np.number)) and np.isfinite(v)}


def fit(config: DictConfig, probe_ids: Sequence[int], tell: Tell) -> None:
    """Train to the end."""
    configure_verl_logging()
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    manager.connect(tell)
    tq.init(config.transfer_queue)
    trainer: Any = None
    succeeded = False
    try:
        trainer = _trainer_class(config.trainer.v1.trainer_mode, tell, probe_ids)(config)
        trainer.init()
        made = load_class_from_fqn(
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager"
        ).create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=trainer.get_teacher_client(),
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        trainer.fit(made)
        succeeded = True
    finally:
        try:
            if (tracking := getattr(trainer, "logger", None)) is not None:
                tracking.finish(exit_code=0 if succeeded else 1)
        finally:
            tq.close()
