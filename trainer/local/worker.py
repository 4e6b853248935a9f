"""The policy process, `python -m agl.trainer.local.worker FD`: one base model, sampled and trained in turn.

Invariant: it lives no longer than its parent. It handles calls from the socket FD, and samples while it has requests.
Where the engine has a copy of the weights (`max_staleness`), the learner computes in a separate thread and never
touches that copy.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import functools
import itertools
import os
import traceback
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl.errors import AglError, CheckpointError, EngineError, ModelLoadError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray, IntArray
from agl.trainer.engines.base import Completion, Request
from agl.trainer.local.loading import LoadingProgress
from agl.trainer.local.protocol import Failed, Finished, PolicyInfo, PolicySpec, Tokens
from agl.trainer.local.rates import usual_rate
from agl.trainer.processes.child import serve_parent
from agl.trainer.processes.peer import Emit, Peer

if TYPE_CHECKING:
    import torch

    from agl.trainer.local.engine.engine import LocalEngine
    from agl.trainer.local.grammar import Compiled
    from agl.trainer.local.learner.learner import Learner
    from agl.trainer.local.learner.ranks import Ranks
    from agl.trainer.local.model import LoadedPolicy

LEARNER_COMMANDS = ("train", "logprobs", "sequence_logprobs", "save_model", "save_state")
"""Commands that read or write the weights in training, and do not touch the engine."""
COMMANDS = (*LEARNER_COMMANDS, "publish", "engine_logprobs", "engine_scores", "export_weights", "load_state")


@dataclass(slots=True, eq=False)
class _Policy:
    """A policy of this process."""

    learner: Learner
    adapter: str | None
    version: int = 0


class Worker:
    """Serves the policies of one base model. The parent calls `load`, once, then `generate` and the commands; each of
    these returns its result and the policy's version after it."""

    def __init__(self) -> None:
        self._policies: dict[str, _Policy] = {}
        self._learning: ThreadPoolExecutor | None = None
        self._ids = itertools.count(1)
        self._answers: dict[int, tuple[asyncio.Future[Completion], Emit]] = {}
        self._work = asyncio.Event()
        commands = {name: functools.partial(self._command, name) for name in COMMANDS}
        self.peer = Peer(
            {"load": self.load, "generate": self.generate, "stop": lambda emit: None, **commands}, lambda: os._exit(0)
        )

    async def load(
        self, emit: Emit, specs: Sequence[PolicySpec], rank: int = 0, rendezvous: str = ""
    ) -> dict[str, PolicyInfo]:
        """Load the policies in a thread, so that what is being loaded is emitted meanwhile.

        Args:
            rank: of this process among those with `data_parallel`.
            rendezvous: the file by which they find each other.
        """
        loop = asyncio.get_running_loop()
        try:
            with LoadingProgress(lambda text: loop.call_soon_threadsafe(emit, text)):
                info = await asyncio.to_thread(self._load, specs, rank, rendezvous)
        except AglError:
            raise
        except Exception as error:
            traceback.print_exception(error)
            raise ModelLoadError(f"cannot load {specs[0].model}: {type(error).__name__}: {error}") from None
        _prepare_thread(self._loaded.device)
        return info

    def generate(self, emit: Emit, request: Request, stream: bool) -> Awaitable[Completion]:
        """Sample one answer; its tokens are emitted as they come, if `stream`."""
        if request.sampling.grammar:
            return self._generate_held(emit, request, stream)
        return self._submit(emit, request, stream, None)

    async def _generate_held(self, emit: Emit, request: Request, stream: bool) -> Completion:
        grammar = await self._engine.grammars.admitted(request.sampling.grammar, request.owner)
        return await self._submit(emit, request, stream, grammar)

    def _submit(
        self, emit: Emit, request: Request, stream: bool, grammar: Compiled | None
    ) -> asyncio.Future[Completion]:
        request_id = next(self._ids)
        assert request.policy is not None
        self._engine.submit(
            request_id, request.prompt_ids, request.sampling, stream, request.policy, request.owner, grammar
        )
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: self._engine.abort(request_id) if done.cancelled() else None)
        self._answers[request_id] = answer, emit
        self._work.set()
        return answer

    async def sample(self) -> None:
        """Sample while there are requests; does not return."""
        while await self._work.wait():
            while self._engine.has_work:
                for event in self._engine.step():
                    answer, emit = self._answers[event.request_id]
                    if isinstance(event, Tokens):
                        emit((event.token_ids, event.logprobs, *([event.top] if event.top else ())))
                        continue
                    del self._answers[event.request_id]
                    if isinstance(event, Finished) and not answer.done():
                        answer.set_result(event.completion)
                    elif isinstance(event, Failed) and not answer.done():
                        answer.set_exception(event.error)
                # In the first turn of the event loop calls come in and answers are completed, in the second they leave.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            self._work.clear()

    def _command(self, name: str, emit: Emit, policy: str, *arguments: Any) -> Any:
        def execute() -> tuple[Any, int]:
            return getattr(self, name)(policy, *arguments), self._policies[policy].version

        if self._learning is not None and name in LEARNER_COMMANDS:
            return asyncio.get_running_loop().run_in_executor(self._learning, execute)
        return execute()

    def _load(self, specs: Sequence[PolicySpec], rank: int, rendezvous: str) -> dict[str, PolicyInfo]:
        """Load the model and set up one engine, and a learner for each policy, on the same weights."""
        from agl.trainer.local.agreement import refusing_unknown, require_agreement
        from agl.trainer.local.embeddings import changes_embeddings
        from agl.trainer.local.engine.engine import LocalEngine
        from agl.trainer.local.learner.learner import Learner
        from agl.trainer.local.lora import Adapters
        from agl.trainer.local.memory import n_weights
        from agl.trainer.local.model import add_adapter, load_policy
        from agl.trainer.local.tokenizer import declared_stops

        first = specs[0]
        _prepare_thread()
        ranks, device = _joined(first, rank, rendezvous)
        _require_adapters(specs)
        loaded = load_policy(
            first.model,
            device=device,
            dtype=first.dtype,
            quantize=first.quantize,
            lora=first.lora,
            seed=first.seed,
            attention=first.attention,
            trained=first.trained,
        )
        for spec in specs[1:]:
            if spec.lora is None:
                raise EngineError(f"policy {spec.name!r} has no adapter", hint="whole models take a process each")
            loaded = add_adapter(loaded, spec.lora, spec.seed)
        self._loaded: LoadedPolicy = loaded
        _prepare_thread(loaded.device)
        names = dict(zip([spec.name for spec in specs], loaded.adapters, strict=False))
        copied = first.max_staleness > 0 and first.engine == "torch"
        self._served: Any = served_copy(loaded.model) if copied else loaded.model
        adapters = Adapters(loaded.model, names) if names else None
        served_adapters = adapters
        if copied:
            served_adapters = Adapters(self._served, names) if names else None
            self._learning = ThreadPoolExecutor(1, initializer=_prepare_thread, initargs=(loaded.device,))
        model = loaded.model
        device = loaded.device
        total = sum(map(n_weights, model.parameters()))
        context = min(first.max_context or loaded.max_context, loaded.max_context)
        with refusing_unknown(model, first.model):
            for spec in specs:
                use = functools.partial(adapters.use, spec.name) if adapters is not None else None
                config = spec.learner
                if spec.usual_rate:
                    imitates = config.policy_loss == "nll"
                    rate = usual_rate(total, lora=spec.lora is not None, imitates=imitates)
                    config = replace(config, learning_rate=rate)
                self._policies[spec.name] = _Policy(
                    Learner(model, config, device, use, loaded.tokenizer, ranks, context), names.get(spec.name)
                )
            learner = self._policies[first.name].learner
            self._engine: LocalEngine = LocalEngine(
                self._served,
                loaded.tokenizer,
                device=device,
                max_context=context,
                max_batch=first.max_batch,
                # On CPU casting the weights at every step costs more than computing in half the width saves.
                autocast=learner.autocast if device.type == "cuda" else None,
                adapters=served_adapters,
                trained=model,
            )
            require_agreement(model, self._engine, learner, first.name, first.model)
            # What was tried for a request need not be tried again for its rows.
            for policy in self._policies.values():
                if policy.learner.grammars is not None and policy.learner.grammars.fits(self._engine.grammars):
                    policy.learner.grammars = self._engine.grammars
        shortened = ""
        if self._engine.max_context < (first.max_context or loaded.positions):
            shortened = loaded.shortened or f"the model has {loaded.positions:,} positions"
        trainable = {name: policy.learner.n_parameters for name, policy in self._policies.items()}
        shared = total - sum(trainable.values()) if adapters is not None else 0
        return {
            name: PolicyInfo(
                parameters=shared + trainable[name],
                trainable_parameters=trainable[name],
                learning_rate=policy.learner.config.learning_rate,
                device=str(device),
                dtype=str(loaded.dtype).removeprefix("torch."),
                max_context=self._engine.max_context,
                vocab_size=self._engine.vocabulary,
                stop_token_ids=declared_stops(getattr(model, "generation_config", None), loaded.tokenizer),
                shortened=shortened,
                changes_embeddings=adapters is not None and changes_embeddings(model),
            )
            for name, policy in self._policies.items()
        }

    # -- commands -----------------------------------------------------------------------------------------------

    def train(
        self, policy: str, sequences: list[TrainingRow], lr_scale: float, pairs: Sequence[tuple[str, str]]
    ) -> dict[str, float]:
        """One update; the engine serves the new weights from its next step on, or, with a copy, from `publish` on."""
        if self._learning is None:
            self._engine.drop_caches()
            _trim()
        learner = self._policies[policy].learner
        try:
            metrics = learner.update(sequences, lr_scale=lr_scale, pairs=pairs)
        finally:
            learner.drop_gradients()
            _trim()
        self._policies[policy].version += 1
        if self._learning is None:
            self.publish(policy)
        return metrics | _gpu_memory(self._loaded.device)

    def publish(self, policy: str) -> None:
        """Have the engine serve the policy's weights as they are now."""
        import torch

        with torch.no_grad():
            for served, trained in zip(self._served.parameters(), self._loaded.model.parameters(), strict=True):
                if served is not trained:
                    served.copy_(trained)
        self._engine.on_weights_changed(self._policies[policy].version, policy)

    def logprobs(self, policy: str, token_ids: IntArray, temperature: float) -> FloatArray:
        """Log-probs by the learner's forward pass."""
        return self._policies[policy].learner.logprobs(token_ids, temperature)

    def sequence_logprobs(self, policy: str, sequences: list[TrainingRow]) -> list[FloatArray]:
        """Log-probs of the rows' trained tokens by the learner's forward pass."""
        return self._policies[policy].learner.sequence_logprobs(sequences, trained_only=True)

    def engine_logprobs(self, policy: str, token_ids: IntArray, temperature: float) -> FloatArray:
        """Log-probs by the engine's cached decoding."""
        return self._engine.logprobs(token_ids, temperature, policy)

    def engine_scores(self, policy: str, token_ids: IntArray, top: int) -> tuple[FloatArray, IntArray, FloatArray]:
        """The same at temperature 1, with the most likely tokens."""
        return self._engine.scores(token_ids, policy=policy, top=top)

    def save_model(self, policy: str, path: str) -> None:
        """Write a Hugging Face directory."""
        from agl.trainer.local.model import save_model

        save_model(self._loaded, path, self._policies[policy].adapter)

    def export_weights(self, policy: str, path: str, dtype: str) -> None:
        """Write what another engine needs for the policy's weights of now."""
        import torch

        from agl.trainer.local.model import export_weights

        export_weights(self._loaded, path, self._policies[policy].adapter, getattr(torch, dtype))

    def save_state(self, policy: str, path: str) -> None:
        """Write the exact state of training; the file appears whole or not at all."""
        import torch

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        trained = self._policies[policy]
        torch.save({"version": trained.version, "learner": trained.learner.state_dict()}, partial)
        os.replace(partial, target)

    def load_state(self, policy: str, path: str) -> None:
        """Restore what `save_state` wrote."""
        import torch

        if not Path(path).is_file():
            raise CheckpointError(
                "no such checkpoint", hint="give the file that save_state wrote, or start a new run", path=path
            )
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            version = int(state["version"])
            learner = state["learner"]
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint cannot be read: {error}", hint="take an earlier checkpoint", path=path
            ) from error
        self._policies[policy].learner.load_state_dict(learner)
        self._policies[policy].version = version
        self.publish(policy)


def _require_adapters(specs: Sequence[PolicySpec]) -> None:
    """Refuse adapters that cannot be had, by the model's configuration alone."""
    loras = [spec.lora for spec in specs if spec.lora is not None]
    vllm = specs[0].engine == "vllm"
    if not loras or (len(loras) == 1 and not vllm):
        return
    from agl.trainer.local.embeddings import require_adapters
    from agl.trainer.local.memory import model_of_shapes
    from agl.trainer.local.model import check_files
    from agl.trainer.local.tokenizer import load_config

    model = os.path.expanduser(specs[0].model)
    check_files(model)
    require_adapters(model_of_shapes(load_config(model)), loras, vllm=vllm)


def _joined(spec: PolicySpec, rank: int, rendezvous: str) -> tuple[Ranks | None, str]:
    """The processes that share the updates, once all are there, and this one's device."""
    if spec.data_parallel == 1:
        return None, spec.device
    import torch

    from agl.trainer.local.learner.ranks import Ranks

    device = "cpu"
    if spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available()):
        if (there := torch.cuda.device_count()) < spec.data_parallel:
            raise ModelLoadError(f"data_parallel={spec.data_parallel}, but there are {there} GPUs", hint="lower it")
        device = f"cuda:{rank}"
    return Ranks.join(rank, spec.data_parallel, rendezvous, torch.device(device)), device


def served_copy(model: Any) -> Any:
    """A copy of a model to sample from while it is trained. Weights that are not trained are shared."""
    from agl.trainer.local.lora import adapter_weights

    # Adapters other than the active one are frozen only for now.
    adapters = adapter_weights(model)
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad and id(p) not in adapters}
    return copy.deepcopy(model, frozen).requires_grad_(False)


def _gpu_memory(device: torch.device) -> dict[str, float]:
    """The most that tensors have taken since the last time, in 10^9 bytes; nothing without a GPU."""
    import torch

    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"gpu_memory_gb": peak / 1e9}


def _trim() -> None:
    """Give freed memory back to the system. glibc keeps what lies below a block in use: 0.8 GB after an update of
    SmolLM2."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _prepare_thread(device: torch.device | None = None) -> None:
    """Settings that each thread has of its own: computing with denormals takes many times as long, and a GPU other than
    the first would record graphs and synchronise on the first."""
    import torch

    torch.set_flush_denormal(True)
    if device is not None and device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


async def _main() -> None:
    worker = Worker()
    await asyncio.gather(serve_parent(worker.peer), worker.sample())


if __name__ == "__main__":
    asyncio.run(_main())
