"""verl's own V1 trainer with what we add at its hooks: one probe per update, and word of every step to the run.

Imports verl; in the trainer's process alone.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from agl.trainer.verl.messages import Begun, Saved, Stepped, Tell
from agl.trainer.verl.probe import Probe

POLL_SECONDS = 0.1
"""How often the trainer looks for finished groups. verl's own 2 s rounds every step up by a second on average."""


class _SavedCallback(CheckpointCallback):
    """The user's callback, then ours."""

    def __init__(self, own: CheckpointCallback, tell: Tell) -> None:
        super().__init__()
        self._own, self._tell = own, tell

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **kwargs: Any) -> None:
        self._own.on_save(trainer=trainer, global_step=global_step, checkpoint_dir=checkpoint_dir, **kwargs)
        self._tell(Saved(global_step, checkpoint_dir))


def _trainer_class(mode: str, tell: Tell, probe_ids: Sequence[int]) -> type[Any]:
    """verl's trainer for a mode, with what we add at the hooks that it has for it."""
    base: Any = get_trainer_cls(mode)

    class Trainer(base):
        def __init__(self, config: DictConfig) -> None:
            super().__init__(config)
            self.checkpoint_callback = _SavedCallback(self.checkpoint_callback, tell)
            self.replay_buffer.poll_interval = POLL_SECONDS
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

        def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            keys = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
            tell(Stepped(self.global_steps, tuple(keys), scalars(metrics)))

    return Trainer


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
