"""The environment and the verl settings of a run on CPU; imports neither verl nor torch."""

from __future__ import annotations

from typing import Any

PLATFORM = "agl-cpu"
"""Our platform's name in verl's registry."""

CHECKPOINT_BACKEND = "gloo"
"""Our weight transfer's name in verl's registry."""

_PACKAGE = "agl.trainer.verl.cpu"


def environment() -> dict[str, str]:
    """Environment variables of the driver and of every Ray worker, to be set before verl is imported.

    A local Ray started by the driver inherits the driver's; an existing cluster needs them in `runtime_env`.
    """
    return {
        "VERL_USE_EXTERNAL_MODULES": f"{_PACKAGE}.platform",
        "VERL_PLATFORM": PLATFORM,
        # verl registers its FSDP engines for "cuda" and "npu"; nothing in them needs CUDA itself.
        "VERL_ENGINE_DEVICE": "cuda",
        # Ten processes share the cores: OpenMP's waiting threads would starve each other.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Lets vLLM's CPU platform run the model in its engine's process. The engine has a separate process either way.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def overrides(ranks: int = 1, *, separate: bool = False) -> dict[str, Any]:
    """The settings that a verl config needs on CPU, as a nested dict; they take precedence over the config's.

    Some keys are not in verl's defaults (`mixed_precision`, `ray_init.num_gpus`, ...): merge with OmegaConf's struct
    flag off.

    Args:
        ranks: processes that count as a GPU each, over all resource pools of the machine.
        separate: whether rollout servers have separate ranks (`trainer.v1.trainer_mode=separate_async`).
    """
    return {
        "actor_rollout_ref": {
            "model": _model(),
            # FSDP 1 refuses parameters on the CPU.
            "actor": {"strategy": "fsdp2", "fsdp_config": _fsdp()},
            "ref": {"strategy": "fsdp2", "fsdp_config": _fsdp()},
            "rollout": {
                "name": "vllm",
                "dtype": "float32",
                "tensor_model_parallel_size": 1,
                "enforce_eager": True,
                "free_cache_engine": False,
                "enable_sleep_mode": False,
                "checkpoint_engine": {
                    "backend": CHECKPOINT_BACKEND if separate else "naive",
                    "custom_backend_module": f"{_PACKAGE}.separate_async" if separate else None,
                },
                "engine_kwargs": {
                    "vllm": {
                        "worker_extension_cls": f"{_PACKAGE}.vllm_worker.CpuWorkerExtension",
                        "distributed_executor_backend": "uni",
                    }
                },
            },
        },
        "critic": {"strategy": "fsdp2", "fsdp": _fsdp(), "model": _model()},
        "trainer": {"device": "cpu"},
        "ray_kwargs": {"ray_init": {"num_gpus": ranks, "num_cpus": 16 * ranks}},
    }


def defaults() -> dict[str, Any]:
    """Settings that make a small model start and step faster on CPU, as a nested dict; the config has precedence."""
    return {
        "actor_rollout_ref": {
            "model": {"enable_gradient_checkpointing": False},
            "rollout": {
                "agent": {"num_workers": 1},
                # The buffer lies in shared memory, and must hold the largest single weight.
                "checkpoint_engine": {"update_weights_bucket_megabytes": 64},
                # With a size, vLLM neither measures the machine's memory nor runs the model to warm it up.
                "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 512 * 2**20}},
            },
        },
        "critic": {"model": {"enable_gradient_checkpointing": False}},
        "reward": {"num_workers": 1},
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}},
        "ray_kwargs": {"ray_init": {"include_dashboard": False}},
    }


def _model() -> dict[str, Any]:
    """Without flash attention and the rows packed for it, which are CUDA kernels."""
    return {"use_remove_padding": False, "override_config": {"attn_implementation": "eager"}}


def _fsdp() -> dict[str, Any]:
    """Everything in float32, in which vLLM samples too."""
    return {
        "model_dtype": "fp32",
        "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "use_torch_compile": False,
    }
