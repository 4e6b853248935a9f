"""0.3's `Trainer`: its arguments over `agl.Trainer`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agl.agents.agent import as_agent
from agl.agents.resources import as_tasks
from agl.errors import ConfigError
from agl.options import reject_unknown
from agl_agentlightning.adapter import TraceAdapter, TracerTraceToTriplet
from agl_agentlightning.algorithm import Algorithm, Baseline, FastAlgorithm
from agl_agentlightning.components import build_component, instantiate_from_spec
from agl_agentlightning.execution import (
    STRATEGIES,
    ClientServerExecutionStrategy,
    ExecutionStrategy,
    SharedMemoryExecutionStrategy,
)
from agl_agentlightning.lightning_store import LightningStore, as_store
from agl_agentlightning.litagent import LitAgent
from agl_agentlightning.missing import refuse
from agl_agentlightning.runner import HookAdapter, LitAgentRunner
from agl_agentlightning.tracer import AgentOpsTracer
from agl_agentlightning.utils import ExecutionEvent

if TYPE_CHECKING:
    from agl.trainer.run.trainer import Result
    from agl.trainer.store.base import Store

__all__ = ["Trainer"]

V = TypeVar("V")
_TRAINER_OPTIONS = ("agents", "credit", "directory", "seed", "max_attempts", "timeout", "capture_content", "progress")


class AlgorithmTypeError(ConfigError, TypeError):
    """An algorithm that cannot be run so."""


class Trainer(Generic[V]):
    """`agl.Trainer` under 0.3's arguments; each component may be an instance, a class, a factory, "module.Class", or
    {"type": "module.Class", ...}.

    Args:
        algorithm: `VERL(config)`, `agl.GRPO(...)`, `Baseline()`, an `@algo` function or an `Algorithm`.
        tracer: default: every framework that the program has imported is traced.
        adapter: `TracerTraceToTriplet(agent_match=...)` selects the agents that are trained.
        n_runners, n_workers: rollouts at once; 1 if neither is given.
        store: a `LightningStore`, or a URL; None keeps it in the run's directory.
        initial_resources: for algorithms, and for agents in addition to the policy's `main_llm`.
        runner: a `LitAgentRunner`, which hooks and agents see.
        strategy: "shm" (runners in this process, the default),
            "cs" (`ClientServerExecutionStrategy`), a dict of the latter's arguments, or an `ExecutionStrategy`.
        max_rollouts, max_tasks: of so many training tasks for each runner alone.
        hooks: one or several.
        port: where the gateway listens.
        dev: `fit` is a dry run.
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
        if not daemon:
            raise refuse("Trainer(daemon=False)", "leave it out: runners end with the trainer")
        self._dev = dev
        self.n_runners = n_runners or n_workers or 1
        self.strategy: ExecutionStrategy = build_component(
            strategy,
            expected_type=ExecutionStrategy,
            spec_name="strategy",
            default_factory=lambda: SharedMemoryExecutionStrategy(self.n_runners),
            optional_defaults={"n_runners": self.n_runners, **({} if port is None else {"server_port": port})},
            dict_requires_type=False,
            dict_default_cls=ClientServerExecutionStrategy,
            registry=STRATEGIES,
        )
        if isinstance(self.strategy, ClientServerExecutionStrategy) and port is not None:
            self.strategy.server_port = port
        # That of a strategy that was made before counts.
        self.n_runners = self.n_workers = self.strategy.n_runners
        self.max_rollouts = self.max_tasks = max_rollouts if max_rollouts is not None else max_tasks
        self.algorithm = _build(algorithm)
        self.tracer = _build(tracer) or AgentOpsTracer()
        self.runner: LitAgentRunner[Any] = build_component(
            runner,
            expected_type=LitAgentRunner,
            spec_name="runner",
            default_factory=lambda: LitAgentRunner(self.tracer, self.max_rollouts),
            optional_defaults={"tracer": self.tracer, "max_rollouts": self.max_rollouts},
            dict_requires_type=False,
            dict_default_cls=LitAgentRunner,
        )
        self.adapter: TraceAdapter[Any] = _adapter(adapter if adapter is not None else triplet_exporter)
        self.initial_resources = None if initial_resources is None else dict(initial_resources)
        self.hooks = () if hooks is None else tuple(hooks) if isinstance(hooks, Iterable) else (hooks,)
        self.port = port
        self.llm_proxy = _build(llm_proxy)
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
    ) -> Result | None:
        """Train; arguments and errors as `agl.Trainer.fit`. None where this is a runner, or a strategy of one's own."""
        if self._dev:
            return self.dev(agent, train_dataset, val_dataset)
        if self.algorithm is None:
            raise ConfigError("there is nothing to train with", hint="give algorithm=, for example VERL(config)")
        val = val_dataset if val_dataset is not None else val_data
        if self._is_elsewhere(agent, self.algorithm, train_dataset, val):
            return None
        trainer = self._trainer(agent, self.algorithm)
        return self._run(agent, lambda: trainer.fit(agent, self._some(train_dataset), val, resume=resume))

    def dev(self, agent: Any, train_dataset: Any = None, val_dataset: Any = None) -> Result | None:
        """A dry run over a few tasks, without an update; `Baseline()` if there is no algorithm.

        Raises:
            TypeError: an algorithm that may train.
        """
        algorithm = self.algorithm or Baseline()
        if isinstance(algorithm, Algorithm) and not isinstance(algorithm, FastAlgorithm):
            raise AlgorithmTypeError(
                f"dev() cannot run {type(algorithm).__name__}: it may train", hint="use algorithm=Baseline()"
            )
        if self._is_elsewhere(agent, algorithm, train_dataset, val_dataset):
            return None
        trainer = self._trainer(agent, algorithm)
        return self._run(agent, lambda: trainer.dev(agent, self._some(train_dataset)))

    def _some(self, dataset: Any) -> Any:
        """The tasks: at most `max_rollouts` for each runner."""
        if dataset is None or self.max_rollouts is None:
            return dataset if dataset is not None else []
        return as_tasks(dataset)[: self.max_rollouts * self.n_runners]

    def _is_elsewhere(self, agent: Any, algorithm: Any, train: Any, val: Any) -> bool:
        """Whether the strategy runs what is to be run, and has done so now."""
        strategy = self.strategy
        if isinstance(strategy, ClientServerExecutionStrategy) and strategy.role == "runner":
            from agl.trainer.http.aio import run_in_thread
            from agl.trainer.runners.remote.worker import run_worker

            with self.tracer.lifespan():
                key = os.environ.get("AGL_RUNNER_KEY")
                run_in_thread(run_worker(as_agent(agent), strategy.url, key=key, n_workers=self.n_runners))
            return True
        if isinstance(strategy, ClientServerExecutionStrategy | SharedMemoryExecutionStrategy):
            return False

        async def run_algorithm(store: LightningStore, event: ExecutionEvent) -> None:
            if not isinstance(algorithm, Algorithm):
                raise AlgorithmTypeError(
                    f"{type(algorithm).__name__} needs agl's own runners", hint='use strategy="shm" or "cs"'
                )
            algorithm.set_trainer(self)
            algorithm.set_store(store)
            result = algorithm.run(train, val)
            if inspect.isawaitable(result):
                await result

        async def run_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
            with self.runner.run_context(agent=agent, store=store, hooks=self.hooks, worker_id=worker_id) as runner:
                await runner.iter(event=event)

        strategy.execute(run_algorithm, run_runner, self._users_store or LightningStore())
        return True

    def _trainer(self, agent: Any, algorithm: Any) -> Any:
        from agl.trainer.run.trainer import Trainer as AglTrainer
        from agl_agentlightning.store_algorithm import StoreAlgorithm

        if self.llm_proxy is not None and not isinstance(algorithm, Algorithm):
            raise refuse(
                f"Trainer(llm_proxy=) with {type(algorithm).__name__}",
                "leave it out: the trainer starts its own gateway",
            )
        options = dict(self._options)
        options.setdefault("agents", self._selection(agent))
        runner = self.runner
        runner._agent = agent
        runner._store = self._users_store
        if isinstance(self.strategy, ClientServerExecutionStrategy):
            if self.strategy.role == "algorithm":
                host = self.strategy.server_host.replace("localhost", "127.0.0.1")
                options |= {"runners": "remote", "host": host}
            else:
                options["runners"] = "process"
        return AglTrainer(
            StoreAlgorithm(algorithm, self, agent) if isinstance(algorithm, Algorithm) else algorithm,
            tracer=self.tracer,
            n_workers=self.n_runners,
            store=self._users_store.agl_store if self._users_store else None,
            port=getattr(self.strategy, "server_port", self.port or 0),
            initial_resources=self.initial_resources or {},
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
    if isinstance(spec, Mapping | str):
        return instantiate_from_spec(spec, spec_name="component")
    if isinstance(spec, type) or (callable(spec) and not _is_component(spec)):
        return spec()
    return spec


def _is_component(spec: Any) -> bool:
    return isinstance(spec, Algorithm | LightningStore | TraceAdapter) or hasattr(spec, "instrument")
