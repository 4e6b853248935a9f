"""The policies of a run: started together, served to agents, trained each on its own rows, saved and restored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agl.errors import ConfigError, EngineError, nearest
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.local.config import Policy
from agl.trainer.local.policy import LocalPolicy, OnProgress, PolicySpec, start_policies
from agl.trainer.local.tokenizer import load_renderings
from agl.trainer.policies.vllm import require_one_model, with_vllm
from agl.trainer.rendering.rendering import Rendering

T = TypeVar("T")


class Policies:
    """Made by `start`, ended by `close`. Iterating gives (name, policy) in order.

    Args:
        policies: by name.
        renderings: by name.

    Attributes:
        names: of the policies, in order.
    """

    def __init__(self, policies: Mapping[str, LocalPolicy], renderings: Mapping[str, Rendering]) -> None:
        self.names = tuple(policies)
        self._policies = dict(policies)
        self._renderings = dict(renderings)

    @classmethod
    async def start(
        cls,
        template: PolicySpec,
        models: Mapping[str, str],
        overrides: Mapping[str, Policy],
        renderer: str | None,
        *,
        on_progress: OnProgress,
    ) -> Policies:
        """Load every policy.

        Args:
            template: the settings that they have in common; its model is not read.
            models: name -> directory or hub id of each.
            overrides: name -> where that policy differs.
            renderer: a name from the `renderers` package; None chooses by the model.
            on_progress: called with what is being loaded.

        Raises:
            ConfigError: one vLLM cannot hold them.
            ModelLoadError, EngineError: none is left running then.
        """
        specs = []
        for name, model in models.items():
            own = overrides.get(name, Policy())
            usual = template.usual_rate and own.lr is None
            rate = own.lr if own.lr is not None else template.learner.learning_rate
            learner = replace(template.learner, learning_rate=rate)
            lora = own.lora or template.lora
            specs.append(replace(template, name=name, model=model, lora=lora, learner=learner, usual_rate=usual))
        if template.engine == "vllm":
            require_one_model(specs)
        started = cls(await start_policies(specs, on_progress=on_progress), {})
        try:
            if template.engine == "vllm":
                started._policies = await with_vllm(started._policies, on_progress=on_progress)
            started._renderings = await asyncio.to_thread(load_renderings, {s.name: s.model for s in specs}, renderer)
        except BaseException:
            await started.close()
            raise
        return started

    def __iter__(self) -> Iterator[tuple[str, LocalPolicy]]:
        return iter(self._policies.items())

    def __len__(self) -> int:
        return len(self._policies)

    def __getitem__(self, name: str) -> LocalPolicy:
        return self._policies[name]

    @property
    def versions(self) -> dict[str, int]:
        """The weights' versions by name."""
        return {name: policy.version for name, policy in self}

    @property
    def parameters(self) -> int:
        """How many parameters are trained, in all policies."""
        return sum(policy.info.trainable_parameters for _, policy in self)

    @property
    def prompt_tokens(self) -> Counter[str]:
        """Prompt tokens of all answers so far: "computed", and "reused" from earlier requests."""
        reused = sum(policy.reused_tokens for _, policy in self)
        return Counter(computed=sum(policy.prompt_tokens for _, policy in self) - reused, reused=reused)

    def serve(self, gateway: Gateway) -> None:
        """Register every policy with a gateway."""
        for name, policy in self:
            gateway.serve(name, policy, self._renderings[name], policy.info.stop_token_ids)

    def on_death(self, callback: Callable[[EngineError], None]) -> None:
        """Have `callback` called with the error when one of their processes dies."""
        for process in self._processes:
            process.on_death(callback)

    def directory(self, root: Path, name: str) -> Path:
        """Where a policy's model goes below `root`: `policy`, or `policies/<name>` where there are several."""
        return root / "policy" if len(self) == 1 else root / "policies" / name

    async def save_models(self, root: Path) -> dict[str, Path]:
        """Write a Hugging Face directory each; returns their paths by name."""
        paths = {name: self.directory(root, name) for name in self.names}
        for name, policy in self:
            await policy.save_model(paths[name])
        return paths

    async def save_states(self, root: Path) -> None:
        """Write the exact state of each policy's training."""
        for name, policy in self:
            await policy.save_state(root / "states" / f"{name}.pt")

    async def load_states(self, root: Path) -> None:
        """Restore what `save_states` wrote.

        Raises:
            CheckpointError: a file is missing, broken or of another model.
        """
        for name, policy in self:
            await policy.load_state(root / "states" / f"{name}.pt")

    async def close(self) -> None:
        """End their processes."""
        await asyncio.gather(*(process.close() for process in self._processes))

    @property
    def _processes(self) -> set[Any]:
        return {process for _, policy in self for process in policy.processes}


def by_policy(option: str, value: T | Mapping[str, T], names: Seq[str]) -> Mapping[str, T]:
    """An option's value for each policy: the same for all, or one each.

    Raises:
        ConfigError: a policy has none, or there is one for a policy that no agent is sent to.
    """
    values = value if isinstance(value, Mapping) else dict.fromkeys(names, value)
    if wrong := set(values) ^ set(names):
        name = min(wrong)
        what = f"has no policy {name!r}" if name in names else f"has {name!r}, to which no agent is sent"
        raise ConfigError(f"{option}= {what}", hint=nearest(name, names))
    return values
