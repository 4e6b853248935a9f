"""What the bridge itself sets in verl's configuration and on the cluster, whatever the user's says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agl.trainer.run.checkpoints import checkpoints_folder
from agl.trainer.verl.config.checks import PER_CALL
from agl.trainer.verl.config.plan import ACTOR, ROLLOUT, Plan, flatten
from agl.trainer.verl.cpu import settings as cpu

if TYPE_CHECKING:
    from agl.trainer.run.run import Run

ESTIMATOR = "agl"
"""`algorithm.adv_estimator` of runs whose advantages are ours."""
_RUNTIME_ENV = "runtime_env."


def environment(plan: Plan) -> dict[str, str]:
    """Set what verl and TransferQueue read from the environment when they are imported.

    Returns:
        What the processes of a Ray cluster that is there already have to be given, too.
    """
    # TransferQueue warns at every transfer when this is more than there are cores.
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARN")
    ours = {name: os.environ[name] for name in ("TQ_NUM_THREADS", "VLLM_LOGGING_LEVEL")}
    ours["TRANSFER_QUEUE_ENABLE"] = "1"
    if plan.device == "cpu":
        ours |= cpu.environment()
    os.environ.update(ours)
    return ours


def total_gpus(plan: Plan) -> int:
    """GPUs that the run needs, those of servers on machines of their own included."""
    own = 0
    if plan.mode == "separate_async":
        own = int(plan.settings.get(f"{ROLLOUT}.nnodes", 0)) * int(plan.settings.get(f"{ROLLOUT}.n_gpus_per_node", 0))
    return plan.gpus * plan.nodes + own


def ray_init(plan: Plan) -> dict[str, Any]:
    """`ray.init`'s arguments for a Ray that is started for the run."""
    given: dict[str, Any] = {}
    prefix = "ray_kwargs.ray_init."
    if plan.device == "cpu":
        given |= {k.removeprefix(prefix): v for k, v in flatten(_cpu_overrides(plan)).items() if prefix in k}
    given |= {k.removeprefix(prefix): v for k, v in plan.settings.items() if k.startswith(prefix) and v is not None}
    return {"include_dashboard": False, **{k: v for k, v in given.items() if not k.startswith(_RUNTIME_ENV)}}


def runtime_env(plan: Plan) -> dict[str, Any]:
    """Ray's `runtime_env` of the trainer's process, which all that verl starts inherits from it."""
    prefix = f"ray_kwargs.ray_init.{_RUNTIME_ENV}"
    given = {k.removeprefix(prefix): v for k, v in plan.settings.items() if k.startswith(prefix) and v is not None}
    variables = {k.removeprefix("env_vars."): str(v) for k, v in given.items() if k.startswith("env_vars.")}
    others = {k: v for k, v in given.items() if not k.startswith("env_vars.")}
    return {**others, "env_vars": {**_defaults(plan), **environment(plan), **variables}}


def _defaults(plan: Plan) -> dict[str, str]:
    """What verl's own entry point sets, where the shell says nothing else."""
    # `verl.trainer.constants_ppo` would have to be imported here, and verl with it.
    verls = {
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
    }
    if plan.settings.get(f"{ACTOR}.strategy") == "megatron":
        # Hopper and Ampere need it, and later ones do not mind.
        verls["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return {name: value for name, value in verls.items() if name not in os.environ}


def fixed(run: Run, plan: Plan, *, first_step: int) -> Mapping[str, Any]:
    """Dotted keys that are the bridge's own business."""
    steps = plan.total_steps(len(run.train))
    keys: dict[str, Any] = {
        # verl drops an epoch's incomplete batch, so a dataset below one batch is gone through several times in it.
        "data.train_files": [len(run.train), max(len(run.train), plan.batch_size)],
        "data.val_files": [max(1, len(run.val))],
        "data.custom_cls.path": "pkg://agl.trainer.verl.dataset",
        "data.custom_cls.name": "TaskPositions",
        "data.dataloader_num_workers": 0,
        "data.validation_shuffle": False,
        "data.seed": run.seed,
        f"{ROLLOUT}.agent.agent_loop_manager_class": "agl.trainer.verl.manager.AgentManager",
        f"{ROLLOUT}.agent.num_workers": 1,
        f"{ROLLOUT}.calculate_log_probs": True,
        "reward.num_workers": 1,
        "transfer_queue.enable": True,
        "trainer.default_local_dir": str(checkpoints_folder(run.directory).resolve()),
        "trainer.resume_mode": "auto" if run.resume else "disable",
        "trainer.total_training_steps": steps,
        # verl counts epochs, too, and would end by them.
        "trainer.total_epochs": 1_000_000,
        "trainer.save_freq": plan.checkpoint_every or steps,
        "trainer.test_freq": plan.val_every if run.val and plan.val_every else -1,
        "trainer.val_before_train": bool(run.val) and plan.val_before_train and first_step == 0,
    }
    if plan.adv_estimator in PER_CALL:
        keys["algorithm.adv_estimator"] = ESTIMATOR
    saved = f"{ACTOR}.checkpoint.save_contents"
    if saved not in plan.settings:
        keys[saved] = ["model", "optimizer", "extra", "hf_model"]
    return {**cpu_keys(plan), **keys}


def _cpu_overrides(plan: Plan) -> dict[str, Any]:
    return cpu.overrides(total_gpus(plan), separate=plan.mode == "separate_async")


def cpu_keys(plan: Plan) -> dict[str, Any]:
    """Dotted keys that a run on the CPU needs, or that make it start faster and the user's says nothing of."""
    if plan.device != "cpu":
        return {}
    faster = {k: v for k, v in flatten(cpu.defaults()).items() if k not in plan.settings}
    return {**faster, **flatten(_cpu_overrides(plan))}
