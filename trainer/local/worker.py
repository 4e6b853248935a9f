"""The policy process, `python -m agl.trainer.local.worker FD [prepare]`: one base model after the other, sampled and
trained in turn.

Invariant: it lives no longer than its parent. It reads commands from the socket FD, samples while it has requests, and
ends when the socket closes. Where the engine has a copy of the weights (`max_staleness`), the learner computes in a
thread of its own and never touches that copy.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl.child_environment import hide_process
from agl.errors import AglError, CheckpointError, EngineError, ModelLoadError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray, IntArray
from agl.trainer.engines.frames import FrameReader, exit_with_parent, to_frame
from agl.trainer.local.loading import LoadingProgress
from agl.trainer.local.protocol import (
    PATIENCE,
    Abort,
    Command,
    Done,
    Failed,
    Generate,
    Loading,
    PolicyInfo,
    PolicySpec,
    Shutdown,
    Waiting,
)

if TYPE_CHECKING:
    from agl.trainer.local.engine.engine import LocalEngine
    from agl.trainer.local.learner.learner import Learner
    from agl.trainer.local.model import LoadedPolicy

LEARNER_COMMANDS = {"train", "logprobs", "sequence_logprobs", "save_model", "save_state"}
"""Commands that read or write the weights in training, and do not touch the engine."""
_RECEIVE = 1 << 20


@dataclass(slots=True, eq=False)
class _Policy:
    """A policy of this process."""

    learner: Learner
    adapter: str | None
    version: int = 0


class Worker:
    """Serves the policies of one base model over a connected socket."""

    def __init__(self, connection: socket.socket, reader: FrameReader) -> None:
        self._connection = connection
        self._reader = reader
        self._inbox: list[Any] = []
        self._policies: dict[str, _Policy] = {}
        self._sending = threading.Lock()
        self._learning: ThreadPoolExecutor | None = None
        self._commands: dict[str, Callable[..., Any]] = {
            "train": self.train,
            "publish": self.publish,
            "logprobs": self.logprobs,
            "sequence_logprobs": self.sequence_logprobs,
            "engine_logprobs": self.engine_logprobs,
            "save_model": self.save_model,
            "export_weights": self.export_weights,
            "save_state": self.save_state,
            "load_state": self.load_state,
        }

    def run(self, patience: float | None = None) -> bool:
        """Load the policies that a message names, then serve until `Shutdown` or until the parent is gone.

        Args:
            patience: how long to wait for the policies, in seconds; None = until the parent is gone.

        Returns:
            Whether others can be served in this process. What they take of a GPU is given back when it ends.
        """
        specs = self._receive_specs(patience)
        if specs is None:
            return False
        try:
            with LoadingProgress(lambda text: self._send([Loading(text)])):
                info = self.load(specs)
        except Exception as error:
            self._send([Failed(0, _to_agl_error(error, f"cannot load {specs[0].model}", ModelLoadError))])
            return False
        self._send([Done(0, info)])
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        engine = self._engine
        while True:
            while self._inbox or poller.poll(0 if engine.has_work else None):
                if not self._inbox and not self._receive():
                    return False
                inbox, self._inbox = self._inbox, []
                for message in inbox:
                    if isinstance(message, Shutdown):
                        return self._learning is None and self._loaded.device.type == "cpu"
                    self._handle(message)
            if events := engine.step():
                self._send(events)

    def load(self, specs: Sequence[PolicySpec]) -> dict[str, PolicyInfo]:
        """Load the model and set up one engine, and a learner for each policy, on the same weights."""
        import torch

        from agl.trainer.local.engine.engine import LocalEngine
        from agl.trainer.local.learner.learner import Learner
        from agl.trainer.local.lora import Adapters
        from agl.trainer.local.model import add_adapter, declared_stops, load_policy

        first = specs[0]
        if first.threads is not None:
            torch.set_num_threads(first.threads)
        torch.set_flush_denormal(True)
        loaded = load_policy(
            first.model,
            device=first.device,
            dtype=first.dtype,
            lora=first.lora,
            seed=first.seed,
            attention=first.attention,
        )
        for spec in specs[1:]:
            if spec.lora is None:
                raise EngineError(f"policy {spec.name!r} has no adapter", hint="whole models take a process each")
            loaded = add_adapter(loaded, spec.lora, spec.seed)
        self._loaded: LoadedPolicy = loaded
        names = dict(zip([spec.name for spec in specs], loaded.adapters, strict=False))
        copied = first.max_staleness > 0 and first.engine == "torch"
        self._served: Any = served_copy(loaded.model) if copied else loaded.model
        adapters = Adapters(loaded.model, names) if names else None
        served_adapters = adapters
        if copied:
            served_adapters = Adapters(self._served, names) if names else None
            # Flushing of denormals is a setting of each thread.
            self._learning = ThreadPoolExecutor(1, initializer=torch.set_flush_denormal, initargs=(True,))
        model, device = loaded.model, loaded.device
        for spec in specs:
            use = functools.partial(adapters.use, spec.name) if adapters is not None else None
            self._policies[spec.name] = _Policy(Learner(model, spec.learner, device, use), names.get(spec.name))
        self._engine: LocalEngine = LocalEngine(
            self._served,
            loaded.tokenizer,
            device=device,
            max_context=min(first.max_context or loaded.max_context, loaded.max_context),
            max_batch=first.max_batch,
            # On CPU casting the weights at every step costs more than computing in half the width saves.
            autocast=self._policies[first.name].learner.autocast if device.type == "cuda" else None,
            adapters=served_adapters,
            trained=model,
        )
        total = sum(p.numel() for p in model.parameters())
        trainable = {name: policy.learner.n_parameters for name, policy in self._policies.items()}
        shared = total - sum(trainable.values()) if adapters is not None else 0
        return {
            name: PolicyInfo(
                parameters=shared + trainable[name],
                trainable_parameters=trainable[name],
                device=str(device),
                dtype=str(loaded.dtype).removeprefix("torch."),
                max_context=self._engine.max_context,
                vocab_size=self._engine.vocabulary,
                stop_token_ids=declared_stops(getattr(model, "generation_config", None), loaded.tokenizer),
            )
            for name in self._policies
        }

    # -- commands -----------------------------------------------------------------------------------------------

    def train(
        self, policy: str, sequences: list[TrainingRow], lr_scale: float, pairs: Sequence[tuple[str, str]]
    ) -> dict[str, float]:
        """One update; the engine serves the new weights from its next step on, or, with a copy, from `publish` on."""
        if self._learning is None:
            self._engine.drop_caches()
        metrics = self._policies[policy].learner.update(sequences, lr_scale=lr_scale, pairs=pairs)
        self._policies[policy].version += 1
        if self._learning is None:
            self.publish(policy)
        return metrics

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

    # -- messages -----------------------------------------------------------------------------------------------

    def _handle(self, message: Any) -> None:
        match message:
            case Generate():
                try:
                    self._engine.submit(
                        message.request_id,
                        message.prompt_ids,
                        message.sampling,
                        message.stream,
                        message.policy,
                    )
                except Exception as error:
                    self._send([Failed(message.request_id, _to_agl_error(error, "cannot sample", EngineError))])
            case Abort():
                self._engine.abort(message.request_id)
            case Command():
                if self._learning is not None and message.name in LEARNER_COMMANDS:
                    self._learning.submit(self._execute, message)
                else:
                    self._execute(message)

    def _execute(self, command: Command) -> None:
        try:
            result = self._commands[command.name](command.policy, **command.arguments)
        except Exception as error:
            self._send([Failed(command.request_id, _to_agl_error(error, f"{command.name} failed", EngineError))])
        else:
            self._send([Done(command.request_id, result, self._policies[command.policy].version)])

    def _receive_specs(self, patience: float | None) -> Sequence[PolicySpec] | None:
        while True:
            if not select.select([self._connection], [], [], patience)[0] or not self._receive():
                return None
            while self._inbox:
                message = self._inbox.pop(0)
                if isinstance(message, tuple):
                    return message
                # Else an answer of the last policies was aborted as they ended.

    def _receive(self) -> bool:
        """Wait for bytes; False when the parent is gone."""
        data = self._connection.recv(_RECEIVE)
        self._inbox += self._reader.feed(data)
        return bool(data)

    def _send(self, messages: list[Any]) -> None:
        with self._sending:
            self._connection.sendall(to_frame(messages))


def served_copy(model: Any) -> Any:
    """A copy of a model to sample from while it is trained. Weights that are not trained are shared."""
    # Adapters other than the active one are frozen only for now.
    frozen = {id(p): p for name, p in model.named_parameters() if not p.requires_grad and "lora_" not in name}
    return copy.deepcopy(model, frozen).requires_grad_(False)


def _to_agl_error(error: Exception, what: str, kind: type[AglError]) -> AglError:
    """The error for the parent: ours unchanged, others with their type's name; their traceback goes to the log."""
    if isinstance(error, AglError):
        return error
    traceback.print_exception(error)
    return kind(f"{what}: {type(error).__name__}: {error}")


def import_libraries() -> None:
    """Import what `Worker.load` needs, before it is known what is loaded."""
    from transformers import AutoModelForCausalLM  # noqa: F401

    from agl.trainer.local.engine.engine import LocalEngine  # noqa: F401
    from agl.trainer.local.learner.learner import Learner  # noqa: F401


def main() -> None:
    """Entry point."""
    # Ctrl-C reaches the whole process group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hide_process()
    connection = socket.socket(fileno=int(sys.argv[1]))
    exit_with_parent(connection, functools.partial(os._exit, 0))
    if sys.argv[2:] == ["prepare"]:
        import_libraries()
    reader = FrameReader()
    try:
        waits = Worker(connection, reader).run()
        while waits:
            connection.sendall(to_frame([Waiting()]))
            gc.collect()
            waits = Worker(connection, reader).run(PATIENCE)
    except (BrokenPipeError, ConnectionResetError):
        pass
    sys.stderr.flush()
    # All that was requested is on disk; taking the libraries down in order would take about a second.
    os._exit(0)


if __name__ == "__main__":
    main()
