"""MassGen's RL document, each name a part of agl: traces of agents and orchestrators, kept in agl's store.

A mixin needs of an agent that `chat()` is an async generator and that it has an id, of an orchestrator a list of events
besides (`agl_massgen.mixins`): MassGen is one user of that protocol. `install()` makes `from massgen.rl import
...` work. Names load on first use.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from agl._lazy import lazy_names
from agl.errors import ConfigError

_NAMES = {
    "agl_massgen.collector": ("AgentRun", "TraceCollector"),
    "agl_massgen.config": ("AlgorithmConfig", "RLConfig", "StoreConfig"),
    "agl_massgen.mixins": ("RLAgentMixin", "RLOrchestratorMixin"),
    "agl_massgen.rewards": ("RewardComputer",),
    "agl_massgen.store": ("LightningStore",),
    "agl_massgen.files": (
        "ContentSpan",
        "CoordinationSpan",
        "PromptSpan",
        "ReasoningSpan",
        "RewardSpan",
        "ToolSpan",
        "Trace",
        "TraceSpan",
        "read_traces",
    ),
}
"""Module -> its names that are names of this package too."""

__getattr__, __dir__, _all = lazy_names(__name__, _NAMES)
__all__ = [*_all, "install"]  # pyright: ignore[reportUnsupportedDunderAll]


def install() -> None:
    """Serve `import massgen.rl` in this process; where massgen is not installed, `massgen` is an empty module.

    Raises:
        ConfigError: massgen has its own module `rl`.
    """
    this = sys.modules[__name__]
    package = sys.modules.get("massgen")
    if sys.modules.get("massgen.rl") is this:
        return
    # Its files are looked at: importing it here would load all of MassGen.
    spec = find_spec("massgen") if package is None else None
    places = list(getattr(package, "__path__", ()) if spec is None else spec.submodule_search_locations or ())
    if "massgen.rl" in sys.modules or any(Path(p, "rl").is_dir() or Path(p, "rl.py").is_file() for p in places):
        raise ConfigError("this massgen has a module rl of its own", hint="import these names from agl.massgen")
    if package is None and spec is None:
        package = sys.modules["massgen"] = ModuleType("massgen", "Stands for MassGen, which is not installed.")
        package.__path__ = []
    sys.modules["massgen.rl"] = this
    if package is not None:
        package.rl = this  # type: ignore[attr-defined]
