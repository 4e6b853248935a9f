"""Policies that vLLM samples in a separate process, and the policy process trains: `engine="vllm"`.

Invariant: outside of an update vLLM holds the learner's weights, rounded to its own dtype. They are handed over as
files in memory, the whole model's or the adapter's. vLLM listens on a Unix socket in a folder that only this user can
enter, since its control endpoints ask for no key, and ends with this process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agl.errors import AglError, ConfigError, EngineError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray, IntArray
from agl.trainer.engines.base import Completion, OnTokens, Request
from agl.trainer.engines.vllm import VLLMEngine
from agl.trainer.local.loading import NewLines
from agl.trainer.local.policy import LOAD_HINT, LocalPolicy, OnProgress, environment
from agl.trainer.local.protocol import PolicyInfo, PolicySpec
from agl.trainer.local.tokenizer import load_tokenizer
from agl.trainer.processes.child import Child

if TYPE_CHECKING:
    from agl.trainer.local.grammar import Grammars

GPU_MEMORY = 0.4
"""vLLM's share of the GPU's memory, where `gpu_memory` says nothing: the learner's state stays beside it."""
STOP_SECONDS = 10.0
RESET_SECONDS = 30.0
"""How long requests that were cancelled may hold blocks of the prefix cache."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's choices of --max-lora-rank."""
_URL = "http://vllm"
_POLL_SECONDS = 0.5


class VLLMServer:
    """A `vllm serve` for the policies of one base model. Made by `start`, ended by `close`.

    Attributes:
        dtype: of its computation.
        lock: held while weights are handed over or compared.
    """

    def __init__(self, model: str, folder: Path, device: str) -> None:
        self.dtype = "bfloat16" if device.startswith("cuda") else "float32"
        self.lock = asyncio.Lock()
        self._model = model
        self._folder = folder
        self._sleeps = device.startswith("cuda")
        self._engines: list[VLLMEngine] = []
        self._names = itertools.count(1)
        self._closed = False
        self._control = self.engine()
        self._watcher: asyncio.Task[None] | None = None
        self._on_death: Callable[[EngineError], None] = lambda error: None
        self._child: Child | None = None

    @classmethod
    async def start(
        cls, specs: Sequence[PolicySpec], info: PolicyInfo, *, on_progress: OnProgress = lambda text: None
    ) -> VLLMServer:
        """Start it and wait until it serves: it loads the model, compiles it and captures CUDA graphs.

        Args:
            specs: the policies, on one base model.
            info: what the learner loaded of it; of an adapter that changes its
                embeddings, vLLM gets all weights.
            on_progress: called with what vLLM prints about it.

        Raises:
            ConfigError: an adapter of a rank that vLLM does not have.
            EngineError: it died, or printed nothing new for `load_timeout` seconds.
        """
        lora = [] if info.changes_embeddings else _lora_options(specs)
        size = info.parameters * 4
        # Weights go through memory where it has room; a container's is small.
        memory = "/dev/shm"
        fits = os.path.isdir(memory) and shutil.disk_usage(memory).free > 2 * size
        folder = Path(tempfile.mkdtemp(prefix="agl-vllm-", dir=memory if fits else None))
        server = cls(specs[0].model, folder, info.device)
        try:
            # vLLM's own sockets go with the folder, however it ends.
            server._child = Child(
                "agl.trainer.local.vllm_main",
                *(folder, server._model, "--uds", folder / "socket", *_options(specs[0], info, server.dtype), *lora),
                env=_environment(specs[0], info.device) | {"VLLM_RPC_BASE_PATH": str(folder)},
                new_session=True,
            )
            await server._until_ready(server._child, specs[0].load_timeout, on_progress)
        except BaseException:
            await server.close()
            raise
        server._watcher = asyncio.create_task(server._watch(server._child))
        return server

    def engine(self) -> VLLMEngine:
        """A new client of it."""
        engine = VLLMEngine(_URL, uds=str(self._folder / "socket"))
        self._engines.append(engine)
        return engine

    def on_death(self, callback: Callable[[EngineError], None]) -> None:
        """Have `callback` called with the error when the server dies."""
        self._on_death = callback

    @contextlib.asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Give its GPU memory to the learner while the block runs; its weights move to the machine's memory. Does
        nothing on CPU, where vLLM cannot sleep."""
        if not self._sleeps:
            yield
            return
        await self._post("/sleep?level=1")
        try:
            yield
        finally:
            await self._post("/wake_up")

    def weights_folder(self, policy: str) -> Path:
        """A new path for a policy's weights; its name is that of the adapter."""
        return self._folder / f"{policy}-{next(self._names)}"

    async def load_model(self, path: Path) -> None:
        """Load all weights from a Hugging Face directory, and delete it."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._post("/collective_rpc", reload)
        shutil.rmtree(path)
        deadline = time.monotonic() + RESET_SECONDS
        # Before 0.21 the response has no body.
        while (body := await self._post("/reset_prefix_cache")) and not orjson.loads(body).get("success", True):
            if time.monotonic() > deadline:
                raise EngineError(
                    "vLLM does not clear what it computed with the earlier weights",
                    hint="requests still run on it; please report this",
                    model=self._model,
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def load_adapter(self, path: Path, previous: Path | None) -> None:
        """Serve the adapter of a directory under the directory's name, and no longer the previous one."""
        await self._post("/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path)})
        if previous is not None:
            await self._post("/v1/unload_lora_adapter", {"lora_name": previous.name})
            shutil.rmtree(previous)

    async def close(self) -> None:
        """End it with all its processes: terminate, wait, kill. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        for engine in self._engines:
            await engine.close()
        if self._child is not None:
            process = self._child.process
            process.terminate()
            deadline = time.monotonic() + STOP_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)
            self._child.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The response of one of the control endpoints; an error shows what the server printed."""
        try:
            return await self._control.post(path, body)
        except AglError as error:
            await asyncio.sleep(_POLL_SECONDS)  # it may be dying
            assert self._child is not None
            if self._child.process.poll() is not None:
                raise self._death(self._child) from error
            raise EngineError(
                f"vLLM failed at {path}: {error.message}",
                hint=f"its last output was:\n{self._child.last_output()}",
                model=self._model,
            ) from error

    # -- the process --------------------------------------------------------------------------------------------------

    async def _until_ready(self, child: Child, timeout: float | None, on_progress: OnProgress) -> None:
        lines = NewLines(child.log)
        last = time.monotonic()
        while True:
            with contextlib.suppress(AglError):
                return await self._control.connect()
            if child.process.poll() is not None:
                raise self._death(child)
            if (new := lines.read()) is not None:
                last = time.monotonic()
                on_progress(f"vLLM: {new}")
            elif timeout is not None and time.monotonic() > last + timeout:
                raise EngineError(
                    f"vLLM printed nothing new for {timeout:g} s and does not serve",
                    hint=f"{LOAD_HINT}; its last output was:\n{child.last_output()}",
                    model=self._model,
                )

    async def _watch(self, child: Child) -> None:
        while child.process.poll() is None:
            await asyncio.sleep(_POLL_SECONDS)
        self._on_death(self._death(child))

    def _death(self, child: Child) -> EngineError:
        return EngineError(
            f"vLLM died (exit code {child.process.returncode})",
            hint=f"its last output was:\n{child.last_output()}",
            model=self._model,
        )


class VLLMPolicy(LocalPolicy):
    """A policy that vLLM samples and its own process trains.

    Made by `with_vllm`.

    Attributes:
        server: what samples it.
        info: as the policy process loaded it, with the server's dtype.
    """

    def __init__(self, policy: LocalPolicy, server: VLLMServer) -> None:
        super().__init__(policy.spec, policy.process)
        self.server = server
        self._grammars: asyncio.Future[Grammars] | None = None
        self.processes = (*self.processes, server)
        self.info = replace(policy.info, dtype=server.dtype)
        self._engine = server.engine()
        self._adapter: Path | None = None
        self._trained: Path | None = None

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        self._check_name(request.policy)
        if request.sampling.grammar:
            if self._grammars is None:
                self._grammars = asyncio.ensure_future(asyncio.to_thread(self._make_grammars))
            grammars = await asyncio.shield(self._grammars)
            compiled = await grammars.admitted(request.sampling.grammar, request.owner)
            request = replace(request, sampling=replace(request.sampling, grammar=compiled.text))
        return await self._engine.generate(request, on_tokens=on_tokens)

    def _make_grammars(self) -> Grammars:
        from agl.trainer.local.grammar import Grammars  # imports torch

        return Grammars(load_tokenizer(self.spec.model), self.info.vocab_size)

    async def train(
        self, sequences: list[TrainingRow], *, lr_scale: float = 1.0, pairs: Sequence[tuple[str, str]] = ()
    ) -> dict[str, float]:
        # With staleness it samples meanwhile.
        asleep = contextlib.nullcontext() if self.spec.max_staleness else self.server.asleep()
        async with self.server.lock, asleep:
            metrics = await super().train(sequences, lr_scale=lr_scale, pairs=pairs)
            self._trained = await self._export()
        return metrics

    async def publish(self) -> None:
        async with self.server.lock:
            if self._trained is not None:
                await self._hand_over(self._trained)
                self._trained = None

    async def engine_logprobs(self, token_ids: IntArray, *, temperature: float = 1.0) -> FloatArray:
        if temperature != 1.0:
            raise EngineError("vLLM reports a prompt's log-probs at temperature 1 only", hint="ask the learner")
        async with self.server.lock:
            return await self._engine.prompt_logprobs(token_ids)

    async def load_state(self, path: str | Path) -> None:
        async with self.server.lock:
            await super().load_state(path)
            await self._hand_over(await self._export())

    async def _export(self) -> Path:
        """Have the learner write the weights as they are now."""
        path = self.server.weights_folder(self.spec.name)
        await self._command("export_weights", str(path), self.server.dtype)
        return path

    async def _hand_over(self, path: Path) -> None:
        if self.spec.lora is None or self.info.changes_embeddings:
            await self.server.load_model(path)
        else:
            await self.server.load_adapter(path, self._adapter)
            self._adapter, self._engine.model = path, path.name
        self._engine.version = self.version


async def with_vllm(
    policies: Mapping[str, LocalPolicy], *, on_progress: OnProgress = lambda text: None
) -> dict[str, LocalPolicy]:
    """The same policies, which share a base model, sampled by a vLLM that is started here.

    Args:
        on_progress: as for `VLLMServer.start`.

    Raises:
        ConfigError: an adapter of a rank that vLLM does not have.
        EngineError: it does not start.
    """
    first = next(iter(policies.values()))
    server = await VLLMServer.start([policy.spec for policy in policies.values()], first.info, on_progress=on_progress)
    return {name: VLLMPolicy(policy, server) for name, policy in policies.items()}


def require_one_model(specs: Sequence[PolicySpec]) -> None:
    """Raise `ConfigError` for policies that one vLLM cannot hold."""
    if len({spec.base for spec in specs}) > 1 or (len(specs) > 1 and any(spec.lora is None for spec in specs)):
        raise ConfigError(
            "engine='vllm' serves one model, and these policies have several",
            hint="give them LoRA on the same model (lora=agl.LoraSpec()), or leave engine at 'torch'",
            policies=", ".join(spec.name for spec in specs),
        )


def _options(spec: PolicySpec, info: PolicyInfo, dtype: str) -> list[object]:
    """`vllm serve`'s, for a model and a device."""
    options: list[object] = [
        "--dtype",
        dtype,
        "--max-model-len",
        info.max_context,
        "--max-num-seqs",
        spec.max_batch,
        "--seed",
        spec.seed,
        "--logprobs-mode",
        "processed_logprobs",
        "--disable-uvicorn-access-log",
        "--disable-log-stats",
        "--enable-prompt-tokens-details",
        "--structured-outputs-config",
        '{"backend": "guidance"}',
    ]
    if info.device.startswith("cuda"):
        return [*options, "--gpu-memory-utilization", spec.gpu_memory or GPU_MEMORY, "--enable-sleep-mode"]
    # The whole model runs in the engine's process, a process less. Prompts are computed in one piece: vLLM on CPU dies
    # ("CPU Generator does not use offset") where that of a request with a seed is not.
    options += ["--enforce-eager", "--distributed-executor-backend", "uni", "--no-enable-chunked-prefill"]
    options += ["--max-num-batched-tokens", max(8192, info.max_context)]
    return options if "VLLM_CPU_KVCACHE_SPACE" in os.environ else [*options, "--kv-cache-memory-bytes", "1G"]


def _lora_options(specs: Sequence[PolicySpec]) -> list[object]:
    ranks = [spec.lora.rank for spec in specs if spec.lora is not None]
    if not ranks:
        return []
    rank = next((size for size in LORA_RANKS if size >= max(ranks)), None)
    if rank is None:
        raise ConfigError(f"vLLM has no adapters of rank {max(ranks)}", hint=f"use at most {LORA_RANKS[-1]}")
    # One more than there are policies: the next one is loaded before the last one is dropped.
    return ["--enable-lora", "--max-lora-rank", rank, "--max-loras", len(ranks) + 1]


def _environment(spec: PolicySpec, device: str) -> dict[str, str]:
    own = {name: v for name, v in os.environ.items() if name.startswith("VLLM_") and name != "VLLM_API_KEY"}
    env = {"VLLM_NO_USAGE_STATS": "1", **environment(spec.threads), **own}
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if device == "cpu":
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env}
    if ":" in device:
        index = int(device.rpartition(":")[2])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        env["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) and visible[index] else str(index)
    return env
