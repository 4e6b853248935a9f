"""The CPU as a verl platform, registered when verl imports this module (`VERL_USE_EXTERNAL_MODULES`).

A rank is a process with gloo; Ray counts ranks as logical GPUs, since verl requests accelerator ids by that name.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_cpu import device, distributed, value_model
from verl_cpu.settings import PLATFORM


@PlatformRegistry.register(platform=PLATFORM)
class CpuPlatform(PlatformBase):
    """verl's interface to a device, on the CPU."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return device.current_device()

    def device_count(self) -> int:
        return device.device_count()

    def set_device(self, device_index: int) -> None:
        device.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        device.synchronize()

    def manual_seed(self, seed: int) -> None:
        device.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        device.manual_seed_all(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The CPU's allocator has none."""

    def empty_cache(self) -> None:
        device.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its logical GPUs

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield

    def profiler_start(self) -> None:
        """There is no device profiler."""

    def profiler_stop(self) -> None:
        """There is no device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # so that weights go to vLLM through shared memory

    def cudart(self) -> None:
        return None


distributed.install()
value_model.install()

# Eight processes import some 5,000 modules each; at the default threshold a quarter of that time is the collector's.
gc.set_threshold(200_000, 20, 100)
