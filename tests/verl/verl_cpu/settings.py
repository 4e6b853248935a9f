"""The environment and the verl settings of a run on CPU; imports neither agl, verl nor torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PLATFORM = "agl-cpu"
"""This platform's name in verl's registry."""

CHECKPOINT_BACKEND = "gloo"
"""This weight transfer's name in verl's registry."""

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_RAY = "ray_kwargs.ray_init"


def environment() -> dict[str, str]:
    """Environment variables of the driver and of every Ray worker, to be set before verl is imported.

    A local Ray started by the driver inherits the driver's; an existing cluster needs them in `runtime_env`.
    """
    folders = (str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, folders))),
        "VERL_USE_EXTERNAL_MODULES": f"{__package__}.platform",
        "VERL_PLATFORM": PLATFORM,
        # verl registers its FSDP engines for "cuda" and "npu"; nothing in them needs CUDA itself.
        "VERL_ENGINE_DEVICE": "cuda",
        # Ten processes share the cores: OpenMP's waiting threads would starve each other.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Lets vLLM's CPU platform run the model in its engine's process. The engine has a separate process either way.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def config(ranks: int = 1, *, separate: bool = False, critic: bool = False) -> dict[str, Any]:
    """The settings that a verl config needs on CPU, and some that make a small model start and step faster; dotted.

    Args:
        ranks: processes that count as a GPU each, over all resource pools of the machine.
        separate: whether rollout servers have separate ranks (`trainer.v1.trainer_mode=separate_async`).
        critic: whether a critic is trained (`algorithm.adv_estimator=gae`).
    """
    return {
        "trainer.device": "cpu",
        **_model("actor_rollout_ref.model"),
        **_fsdp(_ACTOR, "fsdp_config"),
        **_fsdp(_REF, "fsdp_config"),
        **({**_fsdp("critic", "fsdp"), **_model("critic.model")} if critic else {}),
        f"{_ROLLOUT}.dtype": "float32",
        f"{_ROLLOUT}.enforce_eager": True,
        f"{_ROLLOUT}.free_cache_engine": False,
        f"{_ROLLOUT}.enable_sleep_mode": False,
        # The buffer lies in shared memory, and must hold the largest single weight.
        f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 64,
        **(_separate() if separate else {}),
        **{f"{_ROLLOUT}.engine_kwargs.vllm.{key}": value for key, value in vllm().items()},
        # With a size, vLLM neither measures the machine's memory nor runs the model to warm it up.
        f"{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 512 * 2**20,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        f"{_RAY}.num_gpus": ranks,
        f"{_RAY}.num_cpus": 16 * ranks,
    }


def vllm() -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    extension = f"{__package__}.vllm_worker.CpuWorkerExtension"
    return {"worker_extension_cls": extension, "distributed_executor_backend": "uni"}


def _separate() -> dict[str, Any]:
    engine = f"{_ROLLOUT}.checkpoint_engine"
    return {f"{engine}.backend": CHECKPOINT_BACKEND, f"{engine}.custom_backend_module": f"{__package__}.separate_async"}


def _model(section: str) -> dict[str, Any]:
    """Without flash attention and the rows packed for it, which are CUDA kernels."""
    return {
        f"{section}.use_remove_padding": False,
        f"{section}.override_config.attn_implementation": "eager",
        f"{section}.enable_gradient_checkpointing": False,
    }


def _fsdp(section: str, name: str) -> dict[str, Any]:
    """FSDP 2, since FSDP 1 refuses parameters on the CPU; everything in float32, in which vLLM samples too."""
    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return {
        f"{section}.strategy": "fsdp2",
        f"{section}.{name}.model_dtype": "fp32",
        **{f"{section}.{name}.mixed_precision.{key}": dtype for key, dtype in dtypes.items()},
        f"{section}.{name}.use_torch_compile": False,
    }
