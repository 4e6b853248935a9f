"""What the bridge itself sets in verl's configuration and on the cluster, whatever the user's says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agl.trainer.verl import checkpoints
from agl.trainer.verl.plan import Plan

if TYPE_CHECKING:
    from agl.trainer.run import Run

_ROLLOUT = "actor_rollout_ref.rollout"


def environment(plan: Plan) -> None:
    """Set what verl reads from the environment when it is imported, here and in all that is started from here."""
    if plan.device == "cpu":
        from agl.trainer.verl.cpu import settings

        os.environ.update(settings.environment())


def ray_init(plan: Plan) -> dict[str, Any]:
    """`ray.init`'s arguments for a Ray that is started for the run."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    runtime_env = dict(get_ppo_ray_runtime_env(None))
    runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), "TRANSFER_QUEUE_ENABLE": "1", **_passed_on(plan)}
    wanted: dict[str, Any] = {"include_dashboard": False, "runtime_env": runtime_env}
    if plan.device == "cpu":
        from agl.trainer.verl.cpu import settings

        wanted |= settings.overrides(plan.total_gpus)["ray_kwargs"]["ray_init"]
    return {**wanted, **plan.ray_init}


def _passed_on(plan: Plan) -> dict[str, str]:
    if plan.device != "cpu":
        return {}
    from agl.trainer.verl.cpu import settings

    return settings.environment()


def fixed(run: Run, plan: Plan, *, first_step: int) -> Mapping[str, Any]:
    """Dotted keys that are the bridge's own business."""
    # Imported by name only: the class is made in the trainer's process.
    keys: dict[str, Any] = {
        # verl drops an epoch's incomplete batch, so a dataset below one batch is gone through several times in it.
        "data.train_files": [len(run.train), max(len(run.train), plan.batch_size)],
        "data.val_files": [max(1, len(run.val))],
        "data.custom_cls.path": "pkg://agl.trainer.verl.tasks",
        "data.custom_cls.name": "TaskPositions",
        "data.dataloader_num_workers": 0,
        "data.validation_shuffle": False,
        "data.return_raw_chat": True,
        "data.seed": plan.seed if plan.seed is not None else run.seed,
        f"{_ROLLOUT}.agent.agent_loop_manager_class": "agl.trainer.verl.manager.AgentManager",
        f"{_ROLLOUT}.agent.num_workers": 1,
        f"{_ROLLOUT}.calculate_log_probs": True,
        "reward.num_workers": 1,
        "transfer_queue.enable": True,
        "trainer.default_local_dir": str(checkpoints.folder(run.directory).resolve()),
        "trainer.resume_mode": "auto" if run.resume else "disable",
        "trainer.total_training_steps": plan.total_steps(len(run.train)),
        # verl counts by epochs, too, and drops an epoch's incomplete batch.
        "trainer.total_epochs": 1_000_000,
        "trainer.save_freq": plan.checkpoint_every or plan.total_steps(len(run.train)),
        "trainer.test_freq": plan.val_every if run.val and plan.val_every else -1,
        "trainer.val_before_train": bool(run.val) and plan.val_before_train and first_step == 0,
    }
    if plan.credited:
        keys["algorithm.adv_estimator"] = "agl"
    return keys
