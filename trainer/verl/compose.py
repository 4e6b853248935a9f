"""verl's whole config for a plan: its own defaults, what was given, and what the bridge sets."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError
from agl.trainer.verl.plan import Plan

if TYPE_CHECKING:
    from omegaconf import DictConfig


def config_folder() -> Path:
    """Where verl keeps its defaults; found without importing verl.

    Raises:
        ConfigError: verl is not installed.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed", hint='pip install "agl[verl]"')
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def defaults(engine: str = "dp") -> DictConfig:
    """verl's own `ppo_trainer` config, interpolations unresolved.

    Args:
        engine: verl's `model_engine`: "dp" (FSDP), "megatron", "veomni" or "torchtitan".
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton
    from hydra.version import VersionBase

    # Hydra keeps one application per process. That of a surrounding @hydra.main is put aside, not cleared.
    aside = {
        kind: Singleton._instances.pop(kind) for kind in (GlobalHydra, VersionBase) if kind in Singleton._instances
    }
    try:
        with hydra.initialize_config_dir(str(config_folder()), version_base=None):
            return hydra.compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    finally:
        for kind in (GlobalHydra, VersionBase):
            Singleton._instances.pop(kind, None)
        Singleton._instances.update(aside)


def compose(plan: Plan, fixed: Mapping[str, Any]) -> DictConfig:
    """verl's defaults, then `plan.given`, then `fixed`, each winning over what is before it.

    Args:
        fixed: dotted key -> value, or nested; what the bridge has to set.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or one that verl or the bridge would ignore.
    """
    from omegaconf import OmegaConf, open_dict

    from agl.trainer.verl.plan import flatten

    config = defaults()
    with open_dict(config):
        for values in (plan.given, flatten(fixed)):
            for key, value in values.items():
                OmegaConf.update(config, key, value, force_add=True)
    return config
