"""VERL: training by verl's workers on Ray with vLLM where they are installed, else the same on one machine."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal, Unpack, get_args

from agl.errors import ConfigError, nearest
from agl.extras import TRAINING, install_line, require
from agl.trainer.local.gguf import gguf_file
from agl.trainer.local.prepared import model_directory, template_text
from agl.trainer.run.config import require_positive
from agl.trainer.run.results import require_tasks
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.runners.protocol import RolloutResult
from agl_verl.adapters import check_tokens
from agl_verl.config import local, loggers, policies
from agl_verl.config.compose import notes
from agl_verl.config.plan import MODEL, Plan, flatten, read
from agl_verl.config.renamed import rename
from agl_verl.config.shorthand import Common, expand
from agl_verl.overrides import environment

Backend = Literal["auto", "cluster", "local"]
REQUIRED = ("verl", "ray", "vllm", "transfer_queue")
"""Modules without which there is no cluster."""


class VERL(Algorithm):
    """Training by verl: its own config, a few arguments for the common case, or both.

    On the "cluster" verl's workers and vLLM's servers do the work, on any number of GPUs; "local" is GRPO on this
    machine with the config's numbers, and refuses what would change one. A run's notes say which it is and why.
    Several policies (`agl.Trainer(agents={pattern: policy})`) have a verl trainer each, with GPUs of its own.
    On both, agl logs to the trackers in `trainer.logger` that it knows, as those in `agl.Trainer(log=)`.

    Args:
        config: the hydra-style dict that verl takes, nested or dotted: `{"data": {...}, "actor_rollout_ref": {...},
            ...}`. It takes precedence over the arguments.
        chat_template: chat template to give the model: "hermes", "llama3", "mistral", "qwen3" or a Jinja file; None =
            its own.
        backend: "cluster" or "local"; "auto" is the cluster where verl, Ray, vLLM and TransferQueue are installed.
        update_timeout: seconds that giving vLLM's servers new weights may take on the cluster; a run whose update
            takes longer fails with an error that names it.
        **common: `model`, `group_size`, `batch_size`, `learning_rate`, `gpus`, `steps`, ...; see
            `agl_verl.config.shorthand.Common`.

    Raises:
        ConfigError: an unknown key or argument, a value that would have to be ignored, or a backend that is not
            installed.
        ModelLoadError: there is no such GGUF file.
    """

    plan: Plan
    backend: Literal["cluster", "local"]

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        chat_template: str | None = None,
        backend: Backend = "auto",
        update_timeout: float = 1800.0,
        **common: Unpack[Common],
    ) -> None:
        require_positive(update_timeout=update_timeout)
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"config is a {type(config).__name__}", hint='pass the dict that verl takes: {"data": {...}, ...}'
            )
        if config is None and not common:
            raise ConfigError(
                "VERL has neither arguments nor a config", hint="pass model=... and steps=..., or verl's config"
            )
        self.update_timeout = update_timeout
        self.backend, self._why = _choose(backend)
        if self.backend == "local" and backend == "auto" and (gpus := common.get("gpus")):
            raise ConfigError(
                f"gpus={gpus} is for verl, Ray, vLLM and TransferQueue; {self._why}",
                hint=f"{install_line('verl')}; or leave gpus out: backend='local' trains as GRPO on this machine",
            )
        self._tracking, settings = loggers.split({**expand(common), **rename(flatten(config or {}))})
        self.plan = read(settings)
        self.chat_template = chat_template
        gguf_file(self.plan.model)
        if chat_template is not None:
            template_text(chat_template)
        if self.backend == "local":
            require(f"agl.VERL on this machine ({self._why})", "local", TRAINING)
            self._unused = local.check(self.plan)
            local.as_grpo(self.plan, 1, chat_template)  # so that a number out of range is refused here
        else:
            self._unused = notes(self.plan)

    def tracking(self) -> loggers.Tracking:
        return self._tracking

    def recorded_settings(self) -> Mapping[str, Any]:
        return self.plan.settings

    async def run(self, run: Run) -> None:
        self._begin(run)
        if self.plan.val_every is None and not self.plan.val_before_train:
            run.val = []
        if self.backend == "cluster":
            await self._bridge().train(run, await self._plans(run), self.update_timeout)
            return
        await local.as_grpo(self.plan, len(run.train), self.chat_template).run(run)

    async def dev(self, run: Run, n_tasks: int) -> list[RolloutResult]:
        self._begin(run)
        if self.backend == "cluster":
            return await self._bridge().dev(run, await self._plans(run), self.update_timeout, n_tasks)
        return await local.as_grpo(self.plan, len(run.train), self.chat_template).dev(run, n_tasks)

    async def prepared(self, plan: Plan) -> Plan:
        """The plan for the cluster, whose processes load a Hugging Face directory or hub id and nothing else: a GGUF
        file, or a model with another chat template, becomes a directory in the cache."""
        directory = await asyncio.to_thread(model_directory, plan.model, self.chat_template)
        check_tokens(plan, directory)
        if directory == plan.model:
            return plan
        return replace(plan, model=directory, settings={**plan.settings, f"{MODEL}.path": directory})

    async def _plans(self, run: Run) -> dict[str, Plan]:
        """The plan of each policy."""
        of_policies = policies.plans(self.plan, run.config.selection.policies, run.config.policies)
        return {name: await self.prepared(plan) for name, plan in of_policies.items()}

    def _bridge(self) -> Any:
        """The module that trains on the cluster. TransferQueue, imported with it, reads the environment at import."""
        environment()
        return importlib.import_module("agl_verl.bridge")

    def _begin(self, run: Run) -> None:
        require_tasks(run.train, "the training dataset")
        if self.plan.seed is not None:
            run.seed = self.plan.seed
        where = "on the cluster by verl" if self.backend == "cluster" else "as GRPO on this machine"
        tail = f"; without effect here: {', '.join(self._unused)}" if self._unused else ""
        run.progress.note(f"the verl config is trained {where} ({self._why}){tail}")


def _choose(backend: Backend) -> tuple[Literal["cluster", "local"], str]:
    """The backend, and the reason."""
    if backend not in get_args(Backend):
        raise ConfigError(f"backend={backend!r} is not known", hint=nearest(backend, get_args(Backend)))
    absent = [name for name in REQUIRED if find_spec(name) is None]
    if backend == "local":
        return "local", "backend='local'"
    if not absent:
        return "cluster", f"{', '.join(REQUIRED)} are installed" if backend == "auto" else "backend='cluster'"
    missing = f"not installed: {', '.join(absent)}"
    if backend == "auto":
        return "local", missing
    raise ConfigError(
        f"backend='cluster' needs verl, Ray, vLLM and TransferQueue; {missing}",
        hint=f"{install_line('verl')}; `agl doctor` says which versions fit each other",
    )
