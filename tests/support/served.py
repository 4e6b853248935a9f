"""Policies behind a real server of their own, which stands for the agents' provider: it samples, and is not trained."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agl.mdp.selection import select
from agl.mdp.types import Call
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.local.policy import PolicySpec, start_policies
from agl.trainer.local.tokenizer import load_tokenizer
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.store import open_store


@dataclass
class ServedPolicy:
    """A provider.

    Attributes:
        url, key: how agents reach it. calls: that it answered, known when it has ended.
        versions: of the weights, by name, at the end. weights: by name, where they were saved before it ended.
    """

    url: str = ""
    key: str = ""
    calls: list[Call] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    weights: dict[str, Path] = field(default_factory=dict)

    def base_url(self, name: str) -> str:
        """Where the model of that name answers."""
        return f"{self.url}/agents/{name}/v1"


@contextlib.contextmanager
def provider_of(models: Mapping[str, Path], directory: Path) -> Iterator[ServedPolicy]:
    """Serve models by name until the end of the block, and save their weights below `directory` then."""
    provider, ready, done = ServedPolicy(), threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def main() -> None:
        specs = [PolicySpec(str(model), name, threads=1, max_context=256) for name, model in models.items()]
        policies = await start_policies(specs)
        store = await open_store("memory")
        try:
            gateway = Gateway(store)
            for name, policy in policies.items():
                rendering = Rendering(load_tokenizer(str(models[name])))
                gateway.serve(name, policy, rendering, policy.info.stop_token_ids)
            server = GatewayServer(gateway)
            await server.start()
            try:
                selection = select({name: name for name in models})
                rules = SamplingRules(max_tokens=48)
                access, provider.key = gateway.open_attempt("provider", 1, selection=selection, seed=1, rules=rules)
                provider.url = access.url
                ready.set()
                await asyncio.to_thread(done.wait)
                provider.calls = await gateway.close_attempt("provider", 1)
            finally:
                await server.stop()
            for name, policy in policies.items():
                provider.versions[name] = policy.version
                provider.weights[name] = directory / name
                await policy.save_model(provider.weights[name])
        finally:
            await store.close()
            for policy in policies.values():
                await policy.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="provider")
    thread.start()
    ready.wait()
    try:
        if not failed:
            yield provider
    finally:
        done.set()
        thread.join()
    if failed:
        raise failed[0]
