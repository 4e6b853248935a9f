"""What agents remember: `agl.memory.search` and `tools` inside a rollout, ranks, and the founding guide's names.

`agl.Memory` is the memory itself; docs/memory.md has examples. Names load on first use.
"""

from agl._lazy import lazy_names

_NAMES = {
    "agl.agents.memory": ("Hit", "MemoryUse", "put", "quoted", "search", "tools"),
    "agl_massgen.memory_manager": ("MemoryManager",),
    "agl.trainer.memory.memory": ("Memory",),
    "agl.trainer.memory.ranking": ("Hybrid", "Rank"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
