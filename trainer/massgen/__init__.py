"""MassGen's RL document, each name a part of agl: traces of agents and orchestrators, kept in agl's store.

A mixin needs of an agent that `chat()` is an async generator and that it has an id, of an orchestrator a list of events
besides (`agl.trainer.massgen.mixins`): MassGen is one user of that protocol. `install()` makes `from massgen.rl import
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
    "agl.trainer.massgen.collector": ("AgentRun", "TraceCollector"),
    "agl.trainer.massgen.config": ("AlgorithmConfig", "RLConfig", "StoreConfig"),
    "agl.trainer.massgen.mixins": ("RLAgentMixin", "RLOrchestratorMixin"),
    "agl.trainer.massgen.rewards": ("RewardComputer",),
    "agl.trainer.massgen.store": ("LightningStore",),
    "agl.trainer.report.export.massgen": (
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
    """Serve `import massgen.rl` in this process; without the package massgen, `massgen` is an empty module.

    Raises:
        ConfigError: massgen has a module `rl` of its own.
    """
    loaded = sys.modules.get("massgen.rl")
    if loaded is sys.modules[__name__]:
        return
    if "massgen" not in sys.modules and find_spec("massgen") is None:
        sys.modules["massgen"] = ModuleType("massgen", "Stands for MassGen, which is not installed.")
        sys.modules["massgen"].__path__ = []
    elif loaded is not None or ("massgen.rl" not in sys.modules and _has_rl()):
        raise ConfigError("this massgen has a module rl of its own", hint="import these names from agl.massgen")
    sys.modules["massgen.rl"] = sys.modules[__name__]
    # Not an attribute of the package: importing it here would load all of MassGen.
    if (package := sys.modules.get("massgen")) is not None:
        package.rl = sys.modules[__name__]  # type: ignore[attr-defined]


def _has_rl() -> bool:
    """Whether the installed massgen has `rl`; looks at its files, and does not import it."""
    spec = find_spec("massgen")
    places = spec.submodule_search_locations if spec is not None else None
    return any(Path(p, "rl").is_dir() or Path(p, "rl.py").is_file() for p in places or ())
