"""A policy that is sampled but not trained: loaded here, or on a server elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from agl.errors import ConfigError, ModelLoadError
from agl.trainer.engines.base import Engine, ServedModel
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.local.prepared import model_directory
from agl.trainer.local.tokenizer import PROBE, load_renderings, load_tokenizer, stop_token_ids
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.report.progress import Progress


@dataclass(frozen=True, slots=True, eq=False)
class FrozenPolicy:
    """Made by `load` or `connect`, ended by `close`.

    Attributes:
        engine: what samples.
        rendering: messages to tokens and back.
        stop_token_ids: what ends an answer in addition
            to the rendering's. model: where tokenizer and chat template come from. version: of the weights.
    """

    engine: Engine
    rendering: Rendering
    stop_token_ids: tuple[int, ...]
    model: str
    version: int
    close: Callable[[], Awaitable[None]]

    @classmethod
    async def load(
        cls,
        spec: PolicySpec,
        renderer: str | None = None,
        chat_template: str | None = None,
        *,
        progress: Progress,
    ) -> FrozenPolicy:
        """Load it into a separate process.

        Args:
            spec: what to load; its model may be whatever `model_directory` takes.
            renderer: a name from the `renderers` package; None chooses by the model.
            chat_template: as for `model_directory`.
            progress: shows the loading.

        Raises:
            ModelLoadError, EngineError: nothing is left running then.
        """
        model = await asyncio.to_thread(model_directory, spec.model, chat_template)
        spec = replace(spec, model=model, trained=False)
        try:
            policy = await LocalPolicy.start(spec, on_progress=progress.loading)
        finally:
            progress.stop()
        if policy.notice:
            progress.note(policy.notice)
        try:
            renderings = await asyncio.to_thread(load_renderings, {spec.name: spec.model}, renderer)
        except BaseException:
            await policy.close()
            raise
        return cls(policy, renderings[spec.name], policy.info.stop_token_ids, spec.model, policy.version, policy.close)

    @classmethod
    async def connect(
        cls,
        engine: ServedModel,
        model: str | None = None,
        renderer: str | None = None,
        chat_template: str | None = None,
    ) -> FrozenPolicy:
        """Use a policy that a server holds.

        Args:
            engine: the server.
            model: a Hugging Face directory or hub id with its tokenizer and chat template; if
                None, the one that `engine` names. renderer, chat_template: as for `load`.

        Raises:
            ConfigError: its tokenizer differs.
            ModelLoadError, EngineError: nothing is left open then.
        """
        try:
            await engine.connect()
            directory = model or str(engine.tokenizer)
            try:
                directory = await asyncio.to_thread(model_directory, directory, chat_template)
                tokenizer = await asyncio.to_thread(load_tokenizer, directory)
                rendering = Rendering(tokenizer, renderer=renderer)
                stops = await asyncio.to_thread(stop_token_ids, directory, tokenizer)
            except ModelLoadError as error:
                if model is not None:
                    raise
                raise ModelLoadError(
                    f"the tokenizer of what {engine!r} serves cannot be read here: {error.message}",
                    hint="pass a directory or hub id that has it: model=, or --model",
                    path=directory,
                ) from error
            server_ids = await engine.tokenize(PROBE)
            ids = rendering.encode(PROBE)
            if server_ids is not None and server_ids != ids:
                raise ConfigError(
                    f"{engine!r} has a different tokenizer from {directory}: a probe text is {len(server_ids)} tokens "
                    f"there and {len(ids)} here",
                    hint="name the directory or hub id of the model that it serves: model=, or --model",
                )
        except BaseException:
            await engine.close()
            raise
        return cls(engine, rendering, stops, directory, engine.version, engine.close)

    def serve(self, gateway: Gateway, name: str) -> None:
        """Register it with a gateway as the policy of that name; one model may have several."""
        if isinstance(self.engine, LocalPolicy):
            self.engine.names.add(name)
        gateway.serve(name, self.engine, self.rendering, self.stop_token_ids)
