"""verl's whole config for a plan: its own defaults, what was given, what goes with it, and what the bridge sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError, nearest
from agl.trainer.verl.config.checks import UNUSED, check, matches
from agl.trainer.verl.config.derived import filled
from agl.trainer.verl.config.plan import ACTOR, NUMBERS, Plan, flatten
from agl.trainer.verl.config.schema import Schema, folder, schema

if TYPE_CHECKING:
    from omegaconf import DictConfig

ENGINES: Mapping[str, str] = {
    "fsdp": "dp", "fsdp2": "dp", "fsdp_turbo": "dp", "megatron": "megatron", "veomni": "veomni",
    "torchtitan": "torchtitan",
}  # fmt: skip
"""`actor.strategy` -> verl's `model_engine`, which names the files that its defaults are in."""

OWN = "agl."
"""A section of the bridge's own, which verl carries to its workers and does not read."""


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
    kept = Singleton._instances
    aside = {kind: kept.pop(kind) for kind in (GlobalHydra, VersionBase) if kind in kept}
    try:
        with hydra.initialize_config_dir(str(folder() / "trainer" / "config"), version_base=None):
            return hydra.compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    finally:
        for kind in (GlobalHydra, VersionBase):
            kept.pop(kind, None)
        kept.update(aside)


def compose(plan: Plan, fixed: Mapping[str, Any]) -> DictConfig:
    """verl's defaults, then `plan.given`, then `fixed`, each winning over what is before it.

    Args:
        fixed: dotted key -> value, or nested; what the bridge has to set. Keys under "agl." are its own.

    Returns:
        The config that verl's trainer takes; interpolations are left to verl.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of the wrong type, one that verl or the bridge
            would ignore, or one that `fixed` contradicts.
    """
    from omegaconf import OmegaConf, open_dict

    known = verls(_engine(plan))
    values = _checked(plan, known)
    for key, value in flatten(fixed).items():
        if not key.startswith(OWN):
            known.check(key, value)
        # What the plan reads of a config is honoured by whoever reads the plan.
        read = key in NUMBERS or matches(key, UNUSED)
        if not read and plan.given.get(key, value) != value:
            raise ConfigError(
                f"{key}={plan.given[key]!r} cannot be honoured: it has to be {value!r} here", hint="leave it out"
            )
        values[key] = value
    config = OmegaConf.create(dict(known.defaults))
    with open_dict(config):
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.to_container(config, resolve=True)  # so that a broken interpolation shows here
    OmegaConf.set_struct(config, True)
    return config


def notes(plan: Plan) -> tuple[str, ...]:
    """What a reader of the config should know: keys without effect, and values that are taken otherwise.

    Raises:
        ConfigError: as `compose`.
    """
    known = verls(_engine(plan))
    values = _checked(plan, known)
    said = [k for k, v in plan.given.items() if matches(k, UNUSED) and v != known.default(k)]
    return tuple(said) + tuple(f"{k} (taken as {values[k]!r})" for k, v in plan.given.items() if values.get(k, v) != v)


def validate(config: DictConfig) -> None:
    """verl's own checks of a composed config; they import verl, and load the tokenizer of a critic.

    Raises:
        ConfigError: what verl says about it.
    """
    import contextlib
    import io

    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError, TypeError, InstantiationException) as error:
        raise ConfigError(f"verl refuses the config: {error}") from error


def _checked(plan: Plan, known: Schema) -> dict[str, Any]:
    """What is set: all that was given and that verl has, and what goes with it."""
    for key, value in plan.given.items():
        if not _beside(key):
            known.check(key, value)
    check(plan, _default(plan, known))
    values = filled(plan, known.default)
    return {key: value for key, value in values.items() if not _beside(key)}


def _beside(key: str) -> bool:
    """Whether a key is not one of verl's settings: Agent Lightning's own, or the class that verl makes of a section."""
    return key.startswith("agentlightning.") or key.endswith("._target_")


def _default(plan: Plan, known: Schema) -> Callable[[str], Any]:
    """Dotted key -> verl's own value: where that follows another key, what it comes to with those that were given."""
    from omegaconf import OmegaConf

    follows = {k for k in plan.given if isinstance(text := known.default(k), str) and "${" in text}
    if not follows:
        return known.default
    config = OmegaConf.create(dict(known.defaults))
    for key, value in plan.given.items():
        if key not in follows and not _beside(key):
            OmegaConf.update(config, key, value, force_add=True)

    def value_of(key: str) -> Any:
        if key not in follows:
            return known.default(key)
        found = OmegaConf.select(config, key)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    return value_of


def _engine(plan: Plan) -> str:
    strategy = plan.given.get(f"{ACTOR}.strategy", plan.given.get("model_engine", "fsdp"))
    engine = ENGINES.get("fsdp" if strategy == "dp" else strategy)
    if engine is None:
        raise ConfigError(f"{ACTOR}.strategy={strategy!r} is not known", hint=nearest(str(strategy), ENGINES))
    if plan.given.get("model_engine", engine) != engine:
        raise ConfigError(
            f"model_engine={plan.given['model_engine']!r} and {ACTOR}.strategy={strategy!r} contradict each other",
            hint="leave out model_engine",
        )
    for other, name in ENGINES.items():
        stray = next((k for k in plan.given if k.startswith(f"{ACTOR}.{other}.") and name != engine), None)
        if stray is not None:
            raise ConfigError(f"{stray} needs another engine than {strategy!r}", hint=f"set {ACTOR}.strategy={other!r}")
    return engine


@functools.cache
def verls(engine: str = "dp") -> Schema:
    """verl's keys, types and defaults for one of its engines."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(defaults(engine), resolve=False)
    assert isinstance(plain, dict)
    return schema({str(key): value for key, value in plain.items()})
