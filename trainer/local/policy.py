"""A policy that lives in another process: samples it, trains it, saves it; policies on one base model share a process.

Invariant: importing this module loads no torch.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from agl.errors import ConfigError, EngineError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray, IntArray
from agl.trainer.engines.base import Completion, OnTokens, Sampling
from agl.trainer.local.process import PolicyProcess
from agl.trainer.local.protocol import PolicyInfo, PolicySpec

__all__ = ["LocalPolicy", "PolicyInfo", "PolicySpec", "start_policies"]


class LocalPolicy:
    """A policy in a separate process, or in one shared with other adapters on the same base model.

    An `agl.trainer.engines.Engine`, and the control of its learner. Made by `start` or `start_policies`, ended by
    `close`; every call must come from the event loop that started it.

    Attributes:
        spec: the settings. info: what was loaded. version: of the weights, grown by each `train`.
        process: where it lives.
    """

    def __init__(self, spec: PolicySpec, process: PolicyProcess) -> None:
        self.spec = spec
        self.process = process
        self.info: PolicyInfo = process.info[spec.name]
        self.version = 0

    @classmethod
    async def start(cls, spec: PolicySpec, *, timeout: float = 120.0) -> LocalPolicy:
        """Start a process for this policy alone and load it.

        Args:
            spec: what to load.
            timeout: seconds.

        Raises:
            ModelLoadError: the model does not load.
            EngineError: the process died or was not ready in time.
        """
        return cls(spec, await PolicyProcess.start([spec], timeout=timeout))

    @property
    def max_context(self) -> int:
        """Longest prompt + answer, in tokens."""
        return self.info.max_context

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: Sampling,
        *,
        policy: str | None = None,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one answer; see `agl.trainer.engines.Engine.generate`."""
        if policy not in (None, self.spec.name):
            raise EngineError(f"no policy {policy!r} is served here", hint=f"this engine serves {self.spec.name!r}")
        return await self.process.generate(self.spec.name, prompt_ids, sampling, session, on_tokens)

    async def train(self, sequences: list[TrainingRow], *, lr_scale: float = 1.0) -> dict[str, float]:
        """One update of the weights; returns the learner's metrics. The version grows by one.

        Raises:
            EngineError: a row belongs to another policy.
        """
        foreign = next((s for s in sequences if s.policy != self.spec.name), None)
        if foreign is not None:
            raise EngineError(
                f"a row of policy {foreign.policy!r} was passed to policy {self.spec.name!r} to train on",
                hint="please report this: a policy is trained on its own tokens alone",
                rollout=foreign.rollout_id,
            )
        return await self._command("train", sequences=sequences, lr_scale=lr_scale)

    async def logprobs(self, token_ids: IntArray, *, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]` by the learner's forward pass."""
        return await self._command("logprobs", token_ids=np.asarray(token_ids, np.int32), temperature=temperature)

    async def engine_logprobs(self, token_ids: IntArray, *, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]` by the engine's cached decoding."""
        return await self._command(
            "engine_logprobs", token_ids=np.asarray(token_ids, np.int32), temperature=temperature
        )

    async def save_model(self, path: str | Path) -> None:
        """Write model and tokenizer as a Hugging Face directory."""
        await self._command("save_model", path=os.path.abspath(path))

    async def save_state(self, path: str | Path) -> None:
        """Write weights, optimiser, RNG and version to a file, for an exact resume."""
        await self._command("save_state", path=os.path.abspath(path))

    async def load_state(self, path: str | Path) -> None:
        """Restore what `save_state` wrote.

        Raises:
            CheckpointError: the file is missing, broken or of another model.
        """
        await self._command("load_state", path=os.path.abspath(path))

    async def close(self, *, timeout: float = 5.0) -> None:
        """End the process: ask, wait `timeout` seconds, terminate, kill. Idempotent. Ends its other policies, too."""
        await self.process.close(timeout=timeout)

    async def _command(self, name: str, **arguments: Any) -> Any:
        done = await self.process.command(self.spec.name, name, **arguments)
        self.version = done.version
        return done.result


async def start_policies(specs: Seq[PolicySpec], *, timeout: float = 120.0) -> dict[str, LocalPolicy]:
    """Load several policies: adapters on the same base in one process, which samples them in one batch; any other in a
    separate process.

    Returns:
        Policies by name, in the order of `specs`.

    Raises:
        ConfigError: two have the same name.
        ModelLoadError, EngineError: as `LocalPolicy.start`; none is left running then.
    """
    groups: dict[object, list[PolicySpec]] = {}
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise ConfigError(f"two policies are named {spec.name!r}", hint="give each its own name")
        names.add(spec.name)
        groups.setdefault(spec.base if spec.lora is not None else spec.name, []).append(spec)
    started = await asyncio.gather(
        *(PolicyProcess.start(group, timeout=timeout) for group in groups.values()), return_exceptions=True
    )
    processes = [p for p in started if isinstance(p, PolicyProcess)]
    failed = next((p for p in started if isinstance(p, BaseException)), None)
    if failed is not None:
        await asyncio.gather(*(p.close(timeout=0.0) for p in processes))
        raise failed
    policies = {spec.name: LocalPolicy(spec, process) for process in processes for spec in process.specs}
    return {spec.name: policies[spec.name] for spec in specs}
