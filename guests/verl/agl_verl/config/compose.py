"""Composes verl's whole config for a plan: verl's defaults, the user's settings, what follows from them, overrides."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError, nearest
from agl_verl.config.checks import UNUSED, Get, check, matches
from agl_verl.config.derived import complete
from agl_verl.config.plan import ACTOR, NUMBERS, Plan, flatten
from agl_verl.config.schema import Schema, folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

ENGINES: Mapping[str, str] = {
    "fsdp": "dp",
    "fsdp2": "dp",
    "fsdp_turbo": "dp",
    "megatron": "megatron",
    "veomni": "veomni",
    "torchtitan": "torchtitan",
}
"""`actor.strategy` -> verl's `model_engine`, which names the files that its defaults are in."""

OWN = "agl."
"""A section for the bridge's use, which verl passes to its workers and does not read."""


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
    singletons = Singleton._instances
    saved = {kind: singletons.pop(kind) for kind in (GlobalHydra, VersionBase) if kind in singletons}
    try:
        with hydra.initialize_config_dir(str(folder() / "trainer" / "config"), version_base=None):
            return hydra.compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    finally:
        for kind in (GlobalHydra, VersionBase):
            singletons.pop(kind, None)
        singletons.update(saved)


def compose(plan: Plan, overrides: Mapping[str, Any]) -> DictConfig:
    """verl's defaults, then `plan.settings`, then `overrides`; each takes precedence over what is before it.

    Args:
        overrides: dotted key -> value, or nested; what the bridge has to set. Keys under "agl." are the bridge's.

    Returns:
        The config that verl's trainer takes; verl resolves the interpolations.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of the wrong type, one that verl or the bridge
            would ignore, or one that `overrides` contradicts.
    """
    from omegaconf import OmegaConf, open_dict

    schema = verl_schema(_engine(plan))
    values = _checked_settings(plan, schema)
    for key, value in flatten(overrides).items():
        if not key.startswith(OWN):
            schema.check(key, value)
        # What the plan reads of a config is honoured by the code that reads the plan.
        read = key in NUMBERS or matches(key, UNUSED)
        if not read and plan.settings.get(key, value) != value:
            raise ConfigError(
                f"{key}={plan.settings[key]!r} cannot be honoured: it has to be {value!r} here", hint="leave it out"
            )
        values[key] = value
    config = OmegaConf.create(dict(schema.defaults))
    with open_dict(config):
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.to_container(config, resolve=True)  # so that a broken interpolation shows here
    OmegaConf.set_struct(config, True)
    return config


def notes(plan: Plan) -> tuple[str, ...]:
    """Keys of the config that have no effect, and those that get another value.

    Raises:
        ConfigError: as `compose`.
    """
    schema = verl_schema(_engine(plan))
    values = _checked_settings(plan, schema)
    unused = [k for k, v in plan.settings.items() if matches(k, UNUSED) and v != schema.default(k)]
    changed = [f"{k} (taken as {values[k]!r})" for k, v in plan.settings.items() if values.get(k, v) != v]
    return (*unused, *changed)


@functools.cache
def verl_schema(engine: str = "dp") -> Schema:
    """verl's keys, types and defaults for one of its engines."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(defaults(engine), resolve=False)
    assert isinstance(plain, dict)
    return Schema({str(key): value for key, value in plain.items()})


def _checked_settings(plan: Plan, schema: Schema) -> dict[str, Any]:
    """All settings that are verl's, completed."""
    for key, value in plan.settings.items():
        if not _is_foreign(key):
            schema.check(key, value)
    check(plan, _default(plan, schema))
    values = complete(plan, schema.default)
    return {key: value for key, value in values.items() if not _is_foreign(key)}


def _is_foreign(key: str) -> bool:
    """Whether a key is none of verl's settings: Agent Lightning's, or the class that verl makes of a section."""
    return key.startswith("agentlightning.") or key.endswith("._target_")


def _default(plan: Plan, schema: Schema) -> Get:
    """Dotted key -> verl's own value; one that follows another key is resolved with the plan's settings."""
    from omegaconf import OmegaConf

    follows = {k for k in plan.settings if isinstance(text := schema.default(k), str) and "${" in text}
    if not follows:
        return schema.default
    config = OmegaConf.create(dict(schema.defaults))
    for key, value in plan.settings.items():
        if key not in follows and not _is_foreign(key):
            OmegaConf.update(config, key, value, force_add=True)

    def value_of(key: str) -> Any:
        if key not in follows:
            return schema.default(key)
        value = OmegaConf.select(config, key)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    return value_of


def _engine(plan: Plan) -> str:
    strategy = plan.settings.get(f"{ACTOR}.strategy", plan.settings.get("model_engine", "fsdp"))
    engine = ENGINES.get("fsdp" if strategy == "dp" else strategy)
    if engine is None:
        raise ConfigError(f"{ACTOR}.strategy={strategy!r} is not known", hint=nearest(str(strategy), ENGINES))
    if plan.settings.get("model_engine", engine) != engine:
        raise ConfigError(
            f"model_engine={plan.settings['model_engine']!r} and {ACTOR}.strategy={strategy!r} contradict each other",
            hint="leave out model_engine",
        )
    for other, name in ENGINES.items():
        stray = next((k for k in plan.settings if k.startswith(f"{ACTOR}.{other}.") and name != engine), None)
        if stray is not None:
            raise ConfigError(f"{stray} needs another engine than {strategy!r}", hint=f"set {ACTOR}.strategy={other!r}")
    return engine
