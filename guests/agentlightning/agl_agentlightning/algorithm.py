"""0.3's algorithms: functions and classes that drive rollouts through the store, and VERL, Baseline and APO by
name."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agl._alias import make_callable
from agl.errors import ConfigError
from agl.options import reject_unknown
from agl_agentlightning.lightning_store import LightningStore
from agl_agentlightning.missing import refuse, require

if TYPE_CHECKING:
    from agl_agentlightning.prompts import APO

__all__ = ["APO", "VERL", "Algorithm", "Baseline", "FastAlgorithm", "FunctionalAlgorithm", "algo"]

log = logging.getLogger("agl.compat")

_INJECTED = ("store", "adapter", "llm_proxy", "initial_resources", "train_dataset", "val_dataset")


def __getattr__(name: str) -> Any:
    # It brings the training loop with it.
    if name != "APO":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agl_agentlightning.prompts import APO

    return APO


class Algorithm:
    """0.3's base class: override `run(train_dataset, val_dataset)`, sync or async; runners serve what it enqueues."""

    _trainer: Any = None
    _store: LightningStore | None = None
    _adapter: Any = None
    _llm_proxy: Any = None
    _initial_resources: Mapping[str, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def is_async(self) -> bool:
        """Whether `run` is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not override run(train_dataset, val_dataset)")

    def set_trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    def get_trainer(self) -> Any:
        return require(self._trainer, "algorithm", "trainer")

    def set_store(self, store: LightningStore) -> None:
        self._store = store

    def get_store(self) -> LightningStore:
        return require(self._store, "algorithm", "store")

    def set_adapter(self, adapter: Any) -> None:
        self._adapter = adapter

    def get_adapter(self) -> Any:
        """The one that was set, else the trainer's."""
        return self._adapter if self._adapter is not None else self.get_trainer().adapter

    def set_initial_resources(self, resources: Mapping[str, Any]) -> None:
        self._initial_resources = resources

    def get_initial_resources(self) -> Mapping[str, Any] | None:
        """Those that were set, else the trainer's."""
        return self._initial_resources or (None if self._trainer is None else self._trainer.initial_resources)

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        self._llm_proxy = llm_proxy

    def get_llm_proxy(self) -> Any:
        """The one that was set, else the trainer's; None if there is none."""
        return self._llm_proxy or getattr(self._trainer, "llm_proxy", None)

    def get_client(self) -> Any:
        """0.2's client; algorithms that used it are to use `get_store`."""
        raise refuse("Algorithm.get_client", "use get_store()")


class FastAlgorithm(Algorithm):
    """An algorithm that `Trainer.dev` may run."""


class DatasetArgumentError(ConfigError, TypeError):
    """A dataset for an algorithm that takes none; 0.3 raised a TypeError."""


class FunctionalAlgorithm(Algorithm):
    """A function as an algorithm; still callable as that function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._parameters = inspect.signature(function).parameters
        functools.update_wrapper(self, function)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        """Call the function with those of its arguments that exist.

        Raises:
            DatasetArgumentError: a dataset that the function does not take.
        """
        values: dict[str, Any] = {"train_dataset": train_dataset, "val_dataset": val_dataset}
        values["llm_proxy"] = self.get_llm_proxy()
        for name in ("train_dataset", "val_dataset"):
            if values[name] is not None and name not in self._parameters:
                raise DatasetArgumentError(
                    f"{name} is provided but not supported by the algorithm {self._function.__name__!r}",
                    hint=f"add the argument {name}, or leave it out of fit()",
                )
        if self._store is not None:
            values["store"] = self._store
        if self._trainer is not None or self._adapter is not None:
            values["adapter"] = self.get_adapter()
        if (resources := self.get_initial_resources()) is not None or self._trainer is not None:
            values["initial_resources"] = resources
        return self._function(**{name: value for name, value in values.items() if name in self._parameters})


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of a function, sync or async, that takes any of `store`, `train_dataset`, `val_dataset`,
    `adapter`, `initial_resources` and `llm_proxy` by name.

    Raises:
        ConfigError: an argument of another name without a default.
    """
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty and parameter.name not in _INJECTED:
            raise ConfigError(
                f"the algorithm {function.__name__!r} has an argument {parameter.name!r} that agl cannot fill",
                hint=f"use any of {', '.join(_INJECTED)}",
            )
    return FunctionalAlgorithm(function)


algorithm = algo
"""Its name as `agl.algorithm`."""


def VERL(config: Mapping[str, Any], trainer_cls: Any = None, daemon_cls: Any = None) -> Any:
    """`agl.VERL(config)`, for a config with 0.3's own keys, too.

    Raises:
        ConfigError: a key of 0.3's that would change what is trained and cannot be followed; otherwise as `agl.VERL`.
    """
    if trainer_cls is not None or daemon_cls is not None:
        raise refuse("VERL(trainer_cls=, daemon_cls=)", "write an algorithm as a class with run() and dev()")
    from agl_verl.algorithm import VERL as AglVERL

    return AglVERL(_without_own_keys(config))


def _without_own_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A verl config without the keys that 0.3 added to verl's."""
    from agl_verl.config.plan import flatten

    settings = flatten(config)
    if settings.get("data.image_base_dir") is not None:
        raise refuse("data.image_base_dir: training on images", "agl trains on text; describe the images to the policy")
    own = [key for key in settings if key.startswith("agentlightning.trace_aggregator.")]
    if own:
        log.warning(
            "%s: without effect; calls that continue one another are always trained as one sequence, whose length "
            "data.max_prompt_length and data.max_response_length bound",
            ", ".join(own),
        )
    return {key: value for key, value in settings.items() if key not in own}


def Baseline(*, n_epochs: int = 1, **polling: Any) -> Any:
    """`agl.Baseline(repeats=n_epochs)`; the options for polling the queue have no effect."""
    reject_unknown(polling, ("train_split", "polling_interval", "max_queue_length", "span_verbosity"), "Baseline")
    from agl.trainer.algorithms import Baseline as AglBaseline

    return AglBaseline(repeats=n_epochs)


make_callable(__name__, algo)
