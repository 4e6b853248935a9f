"""Run an agent, on its own model or on a frozen policy, and report its rewards; nothing is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agl.extras import TRAINING, require
from agl.options import checked_options
from agl.trainer.engines.base import ServedModel, require_served_model
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.local.config import policy_directory
from agl.trainer.local.policy import PolicySpec
from agl.trainer.policies.frozen import FrozenPolicy
from agl.trainer.policies.policies import by_policy
from agl.trainer.run.config import require_positive
from agl.trainer.run.results import measurement, require_tasks
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.store.types import Mode


@checked_options
@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline(Algorithm):
    """Measures an agent without training it.

    With `model` or `engine` the selected agents are answered by that policy, with the sampling parameters that they ask
    for, and what is sampled is in the store with its tokens, for `agl explain` and `agl export`. Without, nothing is
    routed: every agent keeps its own model. `history` has one entry: "train/reward" and "val/reward", for each dataset
    that `fit` has. Either may be empty. `agl.evaluate` adds intervals and comparisons.

    Attributes:
        repeats: rollouts per task.
        engine: what holds the policy, such as `agl.VLLMEngine(url)`; of several policies one each, by name.
        model: a Hugging Face directory or hub id, or the directory of a run or checkpoint: loaded here, or with
            `engine`, where tokenizer and chat template come from (if None, those that it names). Of
            several policies one each, by name.
        renderer: a name from the `renderers` package; None chooses by the model.
        chat_template: chat template to give the model: "hermes", "llama3", "mistral", "qwen3" or a Jinja file.
        temperature, max_response_tokens: where a policy answers, they replace the agent's temperature and bound its
            answers; None leaves that to the agent.
        loaded: policies that are loaded already, by directory; those that this loads are added and stay open, until
            `agl.evaluate` closes them. None: they are closed at the end.
    """

    needs_tasks: ClassVar[bool] = False

    repeats: int = 1
    engine: ServedModel | Mapping[str, ServedModel] | None = None
    model: str | Mapping[str, str] | None = None
    renderer: str | None = None
    chat_template: str | None = None
    temperature: float | None = None
    max_response_tokens: int | None = None
    loaded: dict[str, FrozenPolicy] | None = field(default=None, repr=False, metadata={"recorded": False})

    def __post_init__(self) -> None:
        require_positive(repeats=self.repeats, max_response_tokens=self.max_response_tokens)
        if self.model is not None and self.engine is None:
            require("agl.Baseline(model=)", "local", TRAINING)
        if self.engine is None:
            return
        for engine in self.engine.values() if isinstance(self.engine, Mapping) else [self.engine]:
            require_served_model("engine", engine)

    def local_model(self) -> str | None:
        return self.model if isinstance(self.model, str) else None

    async def run(self, run: Run) -> None:
        await self._measure(run, run.train, run.val, self.repeats)

    async def dev(self, run: Run, n_tasks: int) -> None:
        await self._measure(run, run.train[:n_tasks], [], 1)

    async def _measure(self, run: Run, train: Sequence[Any], val: Sequence[Any], repeats: int) -> None:
        require_tasks([*train, *val], "the dataset")
        await run.begin(0)
        policies, workplace = await self._policies(run), Workplace(run)

        def register(gateway: Gateway) -> None:
            for name, policy in policies.items():
                policy.serve(gateway, name)

        try:
            if run.resume:
                await workplace.resume_from(0, {name: policy.version for name, policy in policies.items()})
            await workplace.start(
                lambda mode: SamplingRules(temperature=self.temperature, max_tokens=self.max_response_tokens),
                next(iter(policies), ""),
                register=register,
                routed=bool(policies),
            )
            entry: dict[str, Any] = {"step": 0}
            if train:
                entry |= await _rewards(workplace, "train", "dev", train, repeats)
            if val:
                entry |= await _rewards(workplace, "val", "val", val, repeats)
            await run.record(entry)
        finally:
            try:
                await workplace.stop()
            finally:
                await self._close(policies.values())
                run.progress.stop()

    async def _policies(self, run: Run) -> dict[str, FrozenPolicy]:
        """The policies that answer, by name."""
        if self.engine is None and self.model is None:
            return {}
        names = run.config.selection.policies
        engines = by_policy("engine", self.engine, names)
        models = by_policy("model", self.model, names)
        policies: dict[str, FrozenPolicy] = {}
        loaded = {} if self.loaded is None else self.loaded
        try:
            for name, engine in engines.items():
                model = models[name]
                directory = None if model is None else policy_directory(model)
                if engine is not None:
                    policies[name] = await FrozenPolicy.connect(engine, directory, self.renderer, self.chat_template)
                    continue
                # Several names may have one model, as where a trained policy plays against the others' start.
                directory = str(directory)
                if directory not in loaded:
                    spec = PolicySpec(directory, name)
                    loaded[directory] = await FrozenPolicy.load(
                        spec, self.renderer, self.chat_template, progress=run.progress
                    )
                policies[name] = loaded[directory]
        except BaseException:
            await self._close(policies.values())
            raise
        return policies

    async def _close(self, policies: Iterable[FrozenPolicy]) -> None:
        kept = () if self.loaded is None else self.loaded.values()
        await asyncio.gather(*(policy.close() for policy in set(policies) - set(kept)))


async def _rewards(workplace: Workplace, name: str, mode: Mode, tasks: Sequence[Any], repeats: int) -> dict[str, Any]:
    """Run the tasks; returns what was measured, under `name`."""
    results = await workplace.rollouts(list(enumerate(tasks)), mode=mode, step=0, group_size=repeats)
    return measurement(results, name, "the run")
