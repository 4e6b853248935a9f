"""verl's V1 trainer with two additions at its hooks: a weight check per update, and events to the run.

Imports verl; only the process of verl's trainer imports this module.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import validate_config
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.logging_utils import configure_verl_logging

from agl_verl import manager
from agl_verl.events import Checkpoint, Send, StepResult, TrainingStart, WeightUpdate
from agl_verl.sharing import together
from agl_verl.weight_check import WeightCheck

_MODELS = ("actor_rollout_ref.actor", "critic")
POLL_SECONDS = 0.1
"""How often the trainer looks for finished groups. verl's own 2 s rounds every step up by a second on average."""


def _trainer_class(mode: str, send: Send, goes_on: Callable[[], bool], check_ids: Sequence[int]) -> type[Any]:
    """verl's trainer for a mode, with what we add at its hooks."""
    base: Any = get_trainer_cls(mode)

    class Trainer(base):
        def __init__(self, config: DictConfig) -> None:
            super().__init__(config)
            self.replay_buffer.poll_interval = POLL_SECONDS
            names = _MODELS if self.use_critic else _MODELS[:1]
            self._mini_batches = _mini_batches(config, names, self.parameter_sync_step)
            self._saved_step = 0
            self._weight_check = WeightCheck(self, check_ids, str(config.actor_rollout_ref.rollout.dtype))

        def on_init_end(self) -> None:
            with self._updating():
                super().on_init_end()

        def on_train_begin(self) -> None:
            send(TrainingStart(self.global_steps - 1, self.total_training_steps))
            if goes_on():
                super().on_train_begin()
            else:
                self.total_training_steps = self.global_steps - 1

        def _save_checkpoint(self) -> None:
            super()._save_checkpoint()
            self._saved_step = self.global_steps
            folder = f"{self.config.trainer.default_local_dir}/global_step_{self.global_steps}"
            send(Checkpoint(self.global_steps, folder))

        def on_step_end(self) -> None:
            # Before the servers take their memory back; the sequence is the same each time.
            actor = self._weight_check.actor_logprobs()
            with self._updating():
                super().on_step_end()
                servers = self._weight_check.server_logprobs()
            facts = self._weight_check.compare(actor, servers, self.global_steps)
            self._pending_sync_metrics = {**(getattr(self, "_pending_sync_metrics", None) or {}), **facts}

        @contextlib.contextmanager
        def _updating(self) -> Iterator[None]:
            """The run waits for the end of an update no longer than its limit."""
            send(WeightUpdate(self.global_steps, done=False))
            yield
            send(WeightUpdate(self.global_steps, done=True))

        def _balance_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            _fit_mini_batches(self.config, self._mini_batches, len(batch), self._ranks())
            batch = super()._balance_batch(batch, *args, **kwargs)
            if self.config.actor_rollout_ref.actor.use_prefix_grouper:
                groups = [k.split("_")[0] for k in batch.keys]
                tokens = [tag["seq_len"] for tag in batch.tags]
                batch.reorder(together(groups, tokens, self._ranks()))
            return batch

        def _ranks(self) -> int:
            group = self.actor_rollout_wg
            if "actor" not in group._dispatch_info:
                group._dispatch_info["actor"] = group._query_dispatch_info("actor")
            return max(group._dispatch_info["actor"]) + 1

        def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            keys = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
            send(StepResult(self.global_steps, tuple(keys), scalars(metrics)))
            if not goes_on() and self.global_steps < self.total_training_steps:
                # verl's loop ends here, with a checkpoint of this step as after the last one.
                self.total_training_steps = self.global_steps
                if self._saved_step != self.global_steps:
                    # The servers hold the memory; this hook is where verl takes it back before an update.
                    self.on_sample_end()
                    self._save_checkpoint()

    return Trainer


def _mini_batches(config: DictConfig, names: Sequence[str], parts: int) -> dict[str, int]:
    """Section -> optimiser steps per pass over what is sampled at once."""
    batch = config.data.train_batch_size // parts
    return {name: max(1, batch // OmegaConf.select(config, f"{name}.ppo_mini_batch_size")) for name in names}


def _fit_mini_batches(config: DictConfig, mini_batches: Mapping[str, int], rows: int, ranks: int) -> None:
    """Have verl make as many optimiser steps as it would of as many rows as rollouts.

    verl fills a batch up to whole mini-batches of `ppo_mini_batch_size` x `rollout.n` rows, for the actor and the
    critic. A rollout of several rows would cause a further step with few real rows, at full weight; the place of a
    rollout without rows would be filled.
    """
    n = config.actor_rollout_ref.rollout.n
    units = [steps * math.lcm(n, ranks * _micro_batch(config, name)) for name, steps in mini_batches.items()]
    filled = -(-rows // math.lcm(*units)) * math.lcm(*units)
    for name, steps in mini_batches.items():
        OmegaConf.update(config, f"{name}.ppo_mini_batch_size", filled // (steps * n))


def _micro_batch(config: DictConfig, name: str) -> int:
    """The number of rows that a rank's share has to be a multiple of."""
    if OmegaConf.select(config, f"{name}.use_dynamic_bsz"):
        return 1
    keys = [f"{name}.ppo_micro_batch_size_per_gpu"]
    keys += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"] if name == _MODELS[0] else []
    return math.lcm(*(OmegaConf.select(config, key) or 1 for key in keys))


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float, np.number)) and np.isfinite(v)}


def fit(config: DictConfig, check_ids: Sequence[int], send: Send, goes_on: Callable[[], bool], *, shared: bool) -> None:
    """Train to the end.

    Args:
        config: verl's.
        check_ids: tokens of the weight check.
        send: sends events to the run.
        goes_on: waits for the run's answer to a start or step; False ends training there.
        shared: whether TransferQueue is there already, and other trainers use it, too.
    """
    configure_verl_logging()
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    manager.connect(send)
    tq.init(config.transfer_queue)
    trainer: Any = None
    succeeded = False
    try:
        trainer = _trainer_class(config.trainer.v1.trainer_mode, send, goes_on, check_ids)(config)
        trainer.init()
        agent_manager = load_class_from_fqn(
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager"
        ).create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=trainer.get_teacher_client(),
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        trainer.fit(agent_manager)
        succeeded = True
    finally:
        try:
            if (tracking := getattr(trainer, "logger", None)) is not None:
                tracking.finish(exit_code=0 if succeeded else 1)
        finally:
            if not shared:
                tq.close()
