"""Policies that live in other processes: sampled, trained and saved from here; those on one base model share a process.

Invariant: importing this module loads no torch. Nothing waits for a dead child: when it ends, every waiting call fails
with its exit code and last output.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agl.errors import AglError, ConfigError, EngineError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray, IntArray, int_array
from agl.trainer.engines.base import Completion, OnTokens, Request
from agl.trainer.local.protocol import PolicyInfo, PolicySpec
from agl.trainer.processes.child import Child
from agl.trainer.processes.environment import child_environment
from agl.trainer.processes.peer import Peer

__all__ = ["LocalPolicy", "PolicyInfo", "PolicySpec", "start_policies"]

OF_ONE = ("engine_logprobs", "engine_scores", "save_model", "save_state", "export_weights")
"""Commands that one of several processes executes for all of them, as their weights are equal."""
LOAD_HINT = "check the network and the disk, or raise load_timeout="
OnProgress = Callable[[str], object]
"""Called with what is being loaded."""


class LocalPolicy:
    """A policy in a separate process, in several, or in one shared with other adapters on the same base model.

    An `agl.trainer.engines.Engine`, and the control of its learner. Made by `start` or `start_policies`, ended by
    `close`; every call must come from the event loop that started it.

    Attributes:
        spec: the settings.
        info: what was loaded.
        version: of the weights, grown by each `train`.
        max_context: longest prompt + answer, in tokens.
        process: where it lives.
        processes: all that it needs, each with `on_death` and `close`; others may share them.
        names: under which it is served; a request for another policy is refused.
        grammars: whether answers are held to schemas.
        prompt_tokens: of all answers.
        reused_tokens: those that the engine had computed for earlier requests.
    """

    def __init__(self, spec: PolicySpec, process: PolicyProcess) -> None:
        self.spec = spec
        self.process = process
        self.processes: tuple[Any, ...] = (process,)
        self.names = {spec.name}
        self.info: PolicyInfo = process.info[spec.name]
        self.max_context = self.info.max_context
        self.grammars = importlib.util.find_spec("llguidance") is not None
        self.version = 0
        self.prompt_tokens = self.reused_tokens = 0

    @classmethod
    async def start(cls, spec: PolicySpec, *, on_progress: OnProgress = lambda text: None) -> LocalPolicy:
        """Start a process for this policy alone and load it.

        Args:
            spec: what to load.
            on_progress: called with what is being loaded, such as "downloading model.safetensors:
                1.2 of 988.1 MB", once a second at most.

        Raises:
            ModelLoadError: the model does not load.
            EngineError: the process died, or made no progress for `spec.load_timeout` seconds.
        """
        return cls(spec, await PolicyProcess.start([spec], on_progress=on_progress))

    @property
    def notice(self) -> str:
        """What a user has to know of its context; "" where it is as long as the model's, or as was asked for."""
        if not self.info.shortened:
            return ""
        return f"policy {self.spec.name!r}: a context of {self.max_context:,} tokens: {self.info.shortened}"

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        """Sample one answer; see `agl.trainer.engines.Engine.generate`."""
        self._check_name(request.policy)
        request = replace(request, prompt_ids=int_array(request.prompt_ids), policy=self.spec.name)
        on_event = None if on_tokens is None else lambda tokens: on_tokens(*tokens)
        completion = await self.process.generate(request, on_tokens is not None, on_event)
        self.prompt_tokens += request.prompt_ids.size
        self.reused_tokens += completion.cached_tokens
        return completion

    async def train(
        self, sequences: list[TrainingRow], *, lr_scale: float = 1.0, pairs: Seq[tuple[str, str]] = ()
    ) -> dict[str, float]:
        """One update of the weights; returns the learner's metrics. The version grows by one.

        Args:
            sequences, lr_scale, pairs: see `agl.trainer.local.learner.learner.Learner.update`.

        Raises:
            EngineError: a row belongs to another policy.
        """
        foreign = next((s for s in sequences if s.policy != self.spec.name), None)
        if foreign is not None:
            raise EngineError(
                f"a row of policy {foreign.policy!r} was passed to policy {self.spec.name!r} to train on",
                hint="please report this: a policy is trained only on its own tokens",
                rollout=foreign.rollout_id,
            )
        return await self._command("train", sequences, lr_scale, pairs)

    async def publish(self) -> None:
        """Serve the weights in training from now on. With `max_staleness=0` they always are, and nothing changes."""
        await self._command("publish")

    async def logprobs(self, token_ids: IntArray, *, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]` by the learner's forward pass."""
        return await self._command("logprobs", np.asarray(token_ids, np.int32), temperature)

    async def sequence_logprobs(self, sequences: Seq[TrainingRow]) -> list[FloatArray]:
        """float32 [T] per row: each trained token's log-prob in its own context, by the learner's forward pass; 0
        elsewhere."""
        return await self._command("sequence_logprobs", list(sequences))

    async def engine_logprobs(self, token_ids: IntArray, *, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]` by the engine's cached decoding."""
        return await self._command("engine_logprobs", np.asarray(token_ids, np.int32), temperature)

    async def scored(self, token_ids: IntArray, top: int = 0) -> tuple[FloatArray, IntArray, FloatArray]:
        """float32 [T - 1]: log-probs of `token_ids[1:]`, T >= 2, by the engine's cached decoding; int32 and float32
        [T - 1, top]: the most likely tokens in their places, and those tokens' log-probs."""
        return await self._command("engine_scores", np.asarray(token_ids, np.int32), top)

    async def save_model(self, path: str | Path) -> None:
        """Write model and tokenizer as a Hugging Face directory."""
        await self._command("save_model", os.path.abspath(path))

    async def save_state(self, path: str | Path) -> None:
        """Write weights, optimiser, RNG and version to a file, for an exact resume."""
        await self._command("save_state", os.path.abspath(path))

    async def load_state(self, path: str | Path) -> None:
        """Restore what `save_state` wrote.

        Raises:
            CheckpointError: the file is missing, broken or of another model.
        """
        await self._command("load_state", os.path.abspath(path))

    async def close(self, *, timeout: float = 5.0) -> None:
        """End the policy, and the others of its process; see `PolicyProcess.close`. Idempotent."""
        await self.process.close(timeout=timeout)

    def _check_name(self, policy: str | None) -> None:
        if policy is not None and policy not in self.names:
            serves = ", ".join(map(repr, sorted(self.names)))
            raise EngineError(f"no policy {policy!r} is served here", hint=f"this engine serves {serves}")

    async def _command(self, name: str, *arguments: Any) -> Any:
        result, self.version = await self.process.command(name, self.spec.name, *arguments)
        return result


async def start_policies(
    specs: Seq[PolicySpec], *, on_progress: OnProgress = lambda text: None
) -> dict[str, LocalPolicy]:
    """Load several policies: adapters on the same base in one process, which samples them in one batch; any other in a
    separate process. `on_progress`: as for `LocalPolicy.start`.

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
        *(PolicyProcess.start(group, on_progress=on_progress) for group in groups.values()), return_exceptions=True
    )
    processes = [p for p in started if isinstance(p, PolicyProcess)]
    failed = next((p for p in started if isinstance(p, BaseException)), None)
    if failed is not None:
        await asyncio.gather(*(p.close(timeout=0.0) for p in processes))
        raise failed
    policies = {spec.name: LocalPolicy(spec, process) for process in processes for spec in process.specs}
    return {spec.name: policies[spec.name] for spec in specs}


class PolicyProcess:
    """A child process (`agl.trainer.local.worker`) that serves and trains the policies of one base model; with
    `data_parallel`, several that do so together.

    Made by `start`, ended by `close`; every call must come from the event loop that started it.

    Attributes:
        specs: the policies.
        info: what was loaded, by policy.
    """

    info: dict[str, PolicyInfo]

    def __init__(self, specs: Seq[PolicySpec]) -> None:
        self.specs = tuple(specs)
        n = specs[0].data_parallel
        self._peers = [Peer({}, functools.partial(self._on_loss, rank)) for rank in range(n)]
        self._children: list[Child] = []
        turns = itertools.count()
        # Whoever calls again comes to the process that has computed what it said before.
        self._home = functools.lru_cache(1 << 14)(lambda owner: next(turns) % n)
        self._on_death: Callable[[AglError], None] = lambda error: None

    @classmethod
    async def start(cls, specs: Seq[PolicySpec], *, on_progress: OnProgress = lambda text: None) -> PolicyProcess:
        """Start the process and load the policies.

        Args:
            specs: policies of one `base`; more than one only where each has a LoRA adapter.
            on_progress: as for `LocalPolicy.start`.

        Raises:
            ModelLoadError: the model does not load.
            EngineError: the process died, or made no progress for `load_timeout` seconds.
        """
        process = cls(specs)
        limit = specs[0].load_timeout
        last = "starting"

        def on_loading(text: str) -> None:
            nonlocal last
            last = text
            if limit is not None and not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time() + limit)
            on_progress(text)

        try:
            for peer in process._peers:
                child = Child("agl.trainer.local.worker", env=environment(specs[0].threads, specs[0].data_parallel))
                process._children.append(child)
                await child.connect(peer)
            with tempfile.TemporaryDirectory(prefix="agl-ranks-") as folder:
                async with asyncio.timeout(limit) as deadline:
                    loaded = [
                        peer.call("load", process.specs, rank, f"{folder}/meet", on_event=on_loading)
                        for rank, peer in enumerate(process._peers)
                    ]
                    process.info, *_ = await asyncio.gather(*loaded)
        except TimeoutError:
            error = EngineError(
                f"the policy made no progress for {limit:g} s while it was loaded ({last})",
                hint=f"{LOAD_HINT}; its last output was:\n{process._children[0].last_output()}",
                model=specs[0].model,
            )
            await process.close(timeout=0.0)
            raise error from None
        except BaseException:
            await process.close(timeout=0.0)
            raise
        return process

    def generate(self, request: Request, stream: bool, on_event: Callable[[Any], None] | None) -> asyncio.Future[Any]:
        """Have the process sample that the request's owner is at home in."""
        home = self._home(request.owner or request.session or request.prompt_ids.tobytes())
        return self._peers[home].call("generate", request, stream, on_event=on_event)

    async def command(self, name: str, *arguments: Any) -> Any:
        """Have all processes execute a command that they compute together, or the first one any other."""
        peers = self._peers[:1] if name in OF_ONE else self._peers
        return (await asyncio.gather(*(peer.call(name, *arguments) for peer in peers)))[0]

    @property
    def pid(self) -> int:
        """Process id of the first child."""
        return self._children[0].process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the first child; None while it runs."""
        return self._children[0].process.poll()

    def on_death(self, callback: Callable[[AglError], None]) -> None:
        """Have `callback` called with the error when a process dies; at once if one already has."""
        self._on_death = callback
        if (lost := self._peers[0].lost) is not None:
            callback(lost)

    async def close(self, *, timeout: float = 5.0) -> None:
        """End the policies and the processes. Idempotent.

        What they compute is completed, for at most `timeout` seconds.
        """
        if timeout > 0:
            with contextlib.suppress(AglError, TimeoutError):
                await asyncio.wait_for(self.command("stop"), timeout)
        self._fail("the policy process was closed", "start a new one")
        await asyncio.gather(*(child.end() for child in self._children))

    def _on_loss(self, rank: int) -> None:
        first = self._peers[0].lost is None
        child = self._children[rank]
        ended = child.how_it_ended()
        output = child.last_output()
        which = f", number {rank + 1} of {len(self._peers)}" if len(self._peers) > 1 else ""
        self._fail(
            f"the policy process died ({ended}{which})",
            f"its last output was:\n{output}" if output else "start a new one",
        )
        # Those left would wait for it.
        for other in self._children:
            other.close()
        assert self._peers[0].lost is not None
        if first:
            self._on_death(self._peers[0].lost)

    def _fail(self, what: str, hint: str) -> None:
        for peer in self._peers:
            peer.fail(EngineError(what, hint=hint, model=self.specs[0].model))


def environment(threads: int | None, processes: int = 1) -> dict[str, str]:
    """The environment of each of so many processes: thread pools must be sized before torch is imported."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = str(threads or os.environ.get("OMP_NUM_THREADS") or max(1, (cores - 1) // processes))
    return child_environment(["HF_TOKEN"]) | {
        "OMP_NUM_THREADS": pool,
        "MKL_NUM_THREADS": pool,
        "TOKENIZERS_PARALLELISM": "false",
        # Processes that learn together are on this machine; its name need not resolve.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
