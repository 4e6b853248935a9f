"""`agl serve DIR`: policies at one address for applications, until Ctrl-C or another stop signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl.errors import AglError
from agl.trainer.gateway import completions
from agl.trainer.gateway.application import MOST_REQUESTS, ApplicationGateway, ApplicationPaths
from agl.trainer.gateway.metrics import MEDIA_TYPE
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.aio import unhurried
from agl.trainer.http.application_keys import ApplicationKeys
from agl.trainer.http.responses import answer
from agl.trainer.launch.recording import Recording
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.policies.frozen import FrozenPolicy
from agl.trainer.report.progress import Progress
from agl.trainer.store import open_store
from agl.trainer.store.location import store_url

END_SECONDS = 600.0
"""How long open answers have to end once the server is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to serve, and to whom.

    Attributes:
        policies: name -> directory, hub id or GGUF file, whatever `model_directory` takes.
        keys: of the applications.
        host, port: where to listen; port 0 takes a free one.
        engine: the URL of a `vllm serve` that answers; the policy then only names tokenizer and chat template.
        record: store in which what applications send is kept; None keeps nothing.
        most_requests: of one application at once.
        loading: settings of `PolicySpec`: device, dtype, max_context, threads.
        renderer, chat_template: as for `FrozenPolicy.load`.
        capture_content: whether texts are recorded in addition to tokens.
        quiet: show no progress.
    """

    policies: Mapping[str, str]
    keys: ApplicationKeys
    host: str = "127.0.0.1"
    port: int = 8000
    engine: str | None = None
    record: str | None = None
    most_requests: int = MOST_REQUESTS
    loading: Mapping[str, Any]
    renderer: str | None = None
    chat_template: str | None = None
    capture_content: bool = True
    quiet: bool = False


@dataclass(eq=False)
class ApplicationServer:
    """Policies that are served at an address.

    Attributes:
        url: the address.
        gateway: what answers.
        store: the URL of where calls are recorded; None for nowhere.
        died: gets the error of a policy whose process dies.
    """

    gateway: ApplicationGateway
    died: asyncio.Future[None]
    store: str | None = None
    url: str = ""
    stopping: bool = False

    def routes(self) -> list[Route]:
        """What the server has in addition to the APIs."""

        async def health(_: Request) -> Response:
            ended = self.died.done()
            status = "a policy's process died" if ended else "stopping" if self.stopping else "ok"
            return answer({"status": status, "models": self.gateway.models}, 200 if status == "ok" else 503)

        async def metrics(request: Request) -> Response:
            self.gateway.application_of(request.headers)
            return Response(self.gateway.metrics.text(), media_type=MEDIA_TYPE)

        return [Route("/health", health), Route("/metrics", metrics), *completions.routes(self.gateway)]


@contextlib.asynccontextmanager
async def serving(options: ServeOptions) -> AsyncIterator[ApplicationServer]:
    """A server that listens within the block. At its end it takes no more requests, and open answers are completed.

    Raises:
        ConfigError, ModelLoadError, EngineError, StoreError, GatewayError: it cannot serve.
    """
    options.keys.check_host(options.host)
    async with contextlib.AsyncExitStack() as stack:
        url = None if options.record is None else store_url(options.record)
        recording = None
        if url is not None:
            store = await open_store(url)
            stack.push_async_callback(store.close)
            recording = Recording(store, dict(options.policies))
        gateway = ApplicationGateway(
            options.keys, recording, most_requests=options.most_requests, capture_content=options.capture_content
        )
        server = ApplicationServer(
            gateway,
            asyncio.get_running_loop().create_future(),
            # Without a database's password: it is printed.
            url and re.sub(r"//[^/@]*@", "//", url),
        )
        for name, model in options.policies.items():
            policy = await _policy(options, name, model)
            stack.push_async_callback(policy.close)
            policy.serve(gateway, name)
            if isinstance(policy.engine, LocalPolicy):
                policy.engine.process.on_death(lambda error: _fail(server.died, error))
        http = GatewayServer(
            gateway,
            host=options.host,
            port=options.port,
            extra_routes=server.routes(),
            minted_key=options.keys.minted,
            middleware=ApplicationPaths,
        )
        server.url = await http.start()
        try:
            yield server
        finally:
            server.stopping = True
            # The one who stops the server waits for open answers, but not for those of a policy that is gone.
            with unhurried():
                await http.stop(seconds=0.0 if server.died.done() else END_SECONDS)
                await gateway.written()


async def serve(options: ServeOptions, on_start: Callable[[ApplicationServer], None]) -> None:
    """Serve until cancelled.

    Args:
        on_start: called once it listens.

    Raises:
        AglError: as `serving`; or a policy's process died.
    """
    async with serving(options) as server:
        # Else every full collection visits the libraries' objects, which stops all requests for 100 ms.
        gc.collect()
        gc.freeze()
        on_start(server)
        # Shielded, since a cancellation of this wait must not look like a death.
        await asyncio.shield(server.died)


async def _policy(options: ServeOptions, name: str, model: str) -> FrozenPolicy:
    if options.engine is not None:
        from agl.trainer.engines.vllm import VLLMEngine

        return await FrozenPolicy.connect(VLLMEngine(options.engine), model, options.renderer, options.chat_template)
    spec = PolicySpec(model, name, **options.loading)
    progress = Progress(not options.quiet)
    return await FrozenPolicy.load(spec, options.renderer, options.chat_template, progress=progress)


def _fail(died: asyncio.Future[None], error: AglError) -> None:
    if not died.done():
        died.set_exception(error)
