"""0.3's `Trainer`: its arguments over `agl.Trainer`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError, reject_unknown
from agl.trainer.compat.adapter import TraceAdapter, TracerTraceToTriplet
from agl.trainer.compat.algorithm import Algorithm, Baseline, StoreAlgorithm
from agl.trainer.compat.litagent import LitAgent
from agl.trainer.compat.missing import refuse
from agl.trainer.compat.runner import HookAdapter, LitAgentRunner
from agl.trainer.compat.store import LightningStore, as_store
from agl.trainer.compat.tracer import AgentOpsTracer

if TYPE_CHECKING:
    from agl.trainer.run.trainer import Result
    from agl.trainer.store.base import Store

__all__ = ["SharedMemoryExecutionStrategy", "Trainer"]

_TRAINER_OPTIONS = ("agents", "credit", "directory", "seed", "max_attempts", "timeout", "capture_content", "progress")


class SharedMemoryExecutionStrategy:
    """Runners in this process, which is the only strategy."""

    def __init__(self, n_runners: int = 1, **_: Any) -> None:
        self.n_runners = n_runners


class Trainer:
    """`agl.Trainer` under 0.3's arguments; each component may be an instance, a class, a factory, "module.Class", or
    {"type": "module.Class", ...}.

    Args:
        algorithm: `VERL(config)`, `agl.GRPO(...)`, `Baseline()`, an `@algo` function or an `Algorithm`.
        tracer: default: every framework that the program has imported is traced.
        adapter: `TracerTraceToTriplet(agent_match=...)` selects the agents that are trained.
        n_runners, n_workers: rollouts at once; 1 if neither is given.
        store: a `LightningStore`, or a URL; None keeps it in the run's directory.
        initial_resources: for algorithms, and for agents in addition to the policy's `main_llm`.
        hooks: one or several. port: where the gateway listens. dev: `fit` is a dry run.
        **options: other options of `agl.Trainer`: agents, credit, directory, seed, max_attempts, timeout, ...
    """

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: Mapping[str, Any] | None = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        algorithm: Any = None,
        llm_proxy: Any = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        daemon: bool = True,
        triplet_exporter: Any = None,
        hooks: Any = None,
        **options: Any,
    ) -> None:
        reject_unknown(options, _TRAINER_OPTIONS, "Trainer")
        if max_rollouts is not None or max_tasks is not None:
            raise refuse("Trainer(max_rollouts=)", "say how long to train: total_epochs, or GRPO(steps=...)")
        if llm_proxy is not None:
            raise refuse("Trainer(llm_proxy=)", "leave it out: the trainer starts its own gateway")
        if not daemon:
            raise refuse("Trainer(daemon=False)", "leave it out: runners end with the trainer")
        if runner is not None and not isinstance(_build(runner), LitAgentRunner):
            raise refuse("Trainer(runner=)", "leave it out")
        kind = strategy.get("type") if isinstance(strategy, Mapping) else strategy
        if kind not in (None, "shm") and not isinstance(_build(kind), SharedMemoryExecutionStrategy):
            raise refuse(f"Trainer(strategy={kind!r})", "leave it out: runners share this process")
        self._dev = dev
        self.n_runners = n_runners or n_workers or getattr(strategy, "n_runners", 1)
        self.n_workers = self.n_runners
        self.algorithm = _build(algorithm)
        self.tracer = _build(tracer) or AgentOpsTracer()
        self.adapter: TraceAdapter[Any] = _adapter(adapter if adapter is not None else triplet_exporter)
        self.initial_resources = None if initial_resources is None else dict(initial_resources)
        self.hooks = () if hooks is None else tuple(hooks) if isinstance(hooks, Iterable) else (hooks,)
        self.port = port
        self.llm_proxy = None
        self.result: Result | None = None
        self._users_store = None if store is None else as_store(_build_store(store))
        self._bound: LightningStore | None = None
        self._options = options

    @property
    def store(self) -> LightningStore:
        """The store of `Trainer(store=)`, else that of the latest run."""
        if self._bound is None:
            if self._users_store is None and self.result is None:
                raise ConfigError("there is no store yet", hint="give Trainer(store=...), or ask after fit()")
            self._bound = self._users_store or LightningStore(self.result.store if self.result else None)
        return self._bound

    def bind(self, store: Store, run_id: str) -> LightningStore:
        """The store as this run's algorithm sees it."""
        self._bound = self._users_store.bound(run_id) if self._users_store else LightningStore(store, run_id=run_id)
        return self._bound

    def fit(
        self,
        agent: Any,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        val_data: Any = None,
        resume: bool = False,
    ) -> Result:
        """Train; arguments and errors as `agl.Trainer.fit`."""
        if self._dev:
            return self.dev(agent, train_dataset, val_dataset)
        if self.algorithm is None:
            raise ConfigError("there is nothing to train with", hint="give algorithm=, for example VERL(config)")
        trainer = self._trainer(agent, self.algorithm)
        val = val_dataset if val_dataset is not None else val_data
        return self._run(agent, lambda: trainer.fit(agent, train_dataset or [], val, resume=resume))

    def dev(self, agent: Any, train_dataset: Any = None, val_dataset: Any = None) -> Result:
        """A dry run over a few tasks, without an update; `Baseline()` if there is no algorithm."""
        trainer = self._trainer(agent, self.algorithm or Baseline())
        return self._run(agent, lambda: trainer.dev(agent, train_dataset or []))

    def _trainer(self, agent: Any, algorithm: Any) -> Any:
        from agl.trainer.run.trainer import Trainer as AglTrainer

        options = dict(self._options)
        options.setdefault("agents", self._selection(agent))
        runner = LitAgentRunner(self.tracer)
        runner._agent, runner._store = agent, self._users_store
        return AglTrainer(
            StoreAlgorithm(algorithm, self, agent) if isinstance(algorithm, Algorithm) else algorithm,
            tracer=self.tracer,
            n_workers=self.n_runners,
            store=self._users_store.agl_store if self._users_store else None,
            port=self.port or 0,
            initial_resources=self.initial_resources,
            hooks=[HookAdapter(hook, agent, runner) for hook in self.hooks],
            **options,
        )

    def _selection(self, agent: Any) -> Any:
        selection = self.adapter.selection if isinstance(self.adapter, TracerTraceToTriplet) else None
        trained = getattr(agent, "trained_agents", None)
        return selection or (re.compile(trained) if isinstance(trained, str) else None)

    def _run(self, agent: Any, run: Callable[[], Result]) -> Result:
        self._bound = None
        if isinstance(agent, LitAgent):
            agent.set_trainer(self)
        try:
            self.result = run()
        finally:
            if isinstance(agent, LitAgent):
                agent._store = None
            self._bound = None  # the run's store is closed now; `store` opens it again
        return self.result


def _adapter(spec: Any) -> TraceAdapter[Any]:
    if spec is None:
        return TracerTraceToTriplet()
    if isinstance(spec, Mapping) and "type" not in spec:
        return TracerTraceToTriplet(**spec)
    return _build(spec)


def _build_store(spec: Any) -> Any:
    is_url = isinstance(spec, str) and (":" in spec or spec.endswith(".db"))
    return spec if is_url else _build(spec)


def _build(spec: Any) -> Any:
    """A component from its specification; ConfigError for a name that does not exist."""
    if isinstance(spec, Mapping):
        options = dict(spec)
        return _class_named(options.pop("type"))(**options)
    if isinstance(spec, str):
        return _class_named(spec)()
    if isinstance(spec, type) or (callable(spec) and not _is_component(spec)):
        return spec()
    return spec


def _is_component(spec: Any) -> bool:
    return isinstance(spec, Algorithm | LightningStore | TraceAdapter) or hasattr(spec, "instrument")


def _class_named(name: str) -> Any:
    module, _, attribute = name.replace("agentlightning", "agl.trainer.compat", 1).rpartition(".")
    try:
        return getattr(importlib.import_module(module or "agl.trainer.compat"), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} names no class", hint="write it as module.Class, or give an instance") from error
