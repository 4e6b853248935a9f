"""What the bridge sets in verl's configuration and on the cluster, regardless of the user's config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agl_verl import schemas, sharing
from agl_verl.checkpoints import folder
from agl_verl.config.checks import PER_CALL
from agl_verl.config.plan import ACTOR, ROLLOUT, Plan

if TYPE_CHECKING:
    from agl.trainer.run.run import Run

ESTIMATOR = "agl"
"""`algorithm.adv_estimator` of runs whose advantages are ours."""
_RUNTIME_ENV = "runtime_env."


def environment() -> dict[str, str]:
    """Set what verl and TransferQueue read from the environment when they are imported.

    Returns:
        The variables, which the processes of a Ray cluster that already runs need too.
    """
    # TransferQueue warns at every transfer when this is more than there are cores.
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARN")
    ours = {name: os.environ[name] for name in ("TQ_NUM_THREADS", "VLLM_LOGGING_LEVEL")}
    ours["TRANSFER_QUEUE_ENABLE"] = "1"
    os.environ.update(ours)
    return ours


def total_gpus(plan: Plan) -> int:
    """GPUs that the run needs, including those of separate servers."""
    servers = 0
    if plan.mode == "separate_async":
        nodes, per_node = (plan.settings.get(f"{ROLLOUT}.{name}", 0) for name in ("nnodes", "n_gpus_per_node"))
        servers = int(nodes) * int(per_node)
    return plan.gpus * plan.nodes + servers


def ray_init(plans: Mapping[str, Plan]) -> dict[str, Any]:
    """`ray.init`'s arguments for a Ray that is started for the run of these policies."""
    prefix = "ray_kwargs.ray_init."
    settings = next(iter(plans.values())).settings  # policies differ in nothing of Ray's
    options = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix) and v is not None}
    return {"include_dashboard": False, **{k: v for k, v in options.items() if not k.startswith(_RUNTIME_ENV)}}


def runtime_env(plan: Plan) -> dict[str, Any]:
    """Ray's `runtime_env` of the trainer's process; everything that verl starts inherits it."""
    prefix = f"ray_kwargs.ray_init.{_RUNTIME_ENV}"
    options = {k.removeprefix(prefix): v for k, v in plan.settings.items() if k.startswith(prefix) and v is not None}
    variables = {k.removeprefix("env_vars."): str(v) for k, v in options.items() if k.startswith("env_vars.")}
    others = {k: v for k, v in options.items() if not k.startswith("env_vars.")}
    return {**others, "env_vars": {**_defaults(plan), **environment(), **variables}}


def _defaults(plan: Plan) -> dict[str, str]:
    """What verl's own entry point sets, unless the environment has another value."""
    # `verl.trainer.constants_ppo` would have to be imported here, and verl with it.
    variables = {
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
    }
    if plan.settings.get(f"{ACTOR}.strategy") == "megatron":
        # Hopper and Ampere need it, and later ones do not mind.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return {name: value for name, value in variables.items() if name not in os.environ}


def bridge_overrides(run: Run, plan: Plan, *, first_step: int, policy: str | None = None) -> Mapping[str, Any]:
    """Dotted keys that the bridge decides.

    Args:
        first_step: how many steps are done already.
        policy: whose trainer it is, if there are several.
    """
    steps = plan.total_steps(len(run.train))
    keys: dict[str, Any] = {
        # verl drops an epoch's incomplete batch, so an epoch repeats a dataset that is smaller than one batch.
        "data.train_files": [len(run.train), max(len(run.train), plan.batch_size)],
        "data.val_files": [max(1, len(run.val))],
        "data.custom_cls.path": "pkg://agl_verl.dataset",
        "data.custom_cls.name": "TaskPositions",
        "data.dataloader_num_workers": 0,
        "data.validation_shuffle": False,
        "data.seed": run.seed,
        f"{ROLLOUT}.agent.agent_loop_manager_class": "agl_verl.manager.AgentManager",
        f"{ROLLOUT}.agent.num_workers": 1,
        f"{ROLLOUT}.calculate_log_probs": True,
        "reward.num_workers": 1,
        "transfer_queue.enable": True,
        "trainer.default_local_dir": str(folder(run, policy).resolve()),
        "trainer.resume_mode": "auto" if run.resume else "disable",
        "trainer.total_training_steps": steps,
        # verl counts epochs too, and would end after them.
        "trainer.total_epochs": 1_000_000,
        "trainer.save_freq": plan.checkpoint_every or steps,
        "trainer.test_freq": plan.val_every if run.val and plan.val_every else -1,
        "trainer.val_before_train": bool(run.val) and plan.val_before_train and first_step == 0,
    }
    if policy is not None:
        # verl would resume from its own last one, which the other policies may not have.
        last = folder(run, policy) / f"global_step_{first_step}"
        resumed = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(last.resolve())}
        keys |= resumed if first_step else {"trainer.resume_mode": "disable"}
        keys["trainer.v1.sampler.custom_sampler.path"] = "pkg://agl_verl.replay"
        keys["trainer.v1.sampler.custom_sampler.name"] = "OwnPrompts"
    if plan.adv_estimator in PER_CALL:
        keys["algorithm.adv_estimator"] = ESTIMATOR
    contents = f"{ACTOR}.checkpoint.save_contents"
    if contents not in plan.settings:
        keys[contents] = ["model", "optimizer", "extra", "hf_model"]
    keys |= schemas.overrides(plan)
    if sharing.shares(plan):
        keys[sharing.LIBRARY] = "agl_verl.trees"
    return keys
