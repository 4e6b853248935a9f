"""A store behind a real server, on a loop and thread of its own, that tests can stop and start again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agl.trainer.http.auth import Keys
from agl.trainer.http.limits import Limits
from agl.trainer.store import open_store
from agl.trainer.store.http.server import StoreServer

OPERATOR, RUNNER = "operator-key-of-this-test", "runner-key-of-this-test"
KEYS = Keys.of(OPERATOR, RUNNER)


class ServedStore:
    """A SQLite file that is served; without keys, to everyone.

    Attributes:
        url: where. port: likewise; the same after `start` again.
    """

    def __init__(self, file: Path, *, keys: Keys | None = None, limits: Limits | None = None) -> None:
        self.file, self.keys, self.limits = file, keys or Keys(), limits
        self.url, self.port = "", 0
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        ready, self.over = threading.Event(), threading.Event()
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(30)
        if self.failed is not None:
            raise self.failed

    def stop(self) -> None:
        if self.thread is not None:
            self.over.set()
            self.thread.join(30)
            assert not self.thread.is_alive()
            self.thread = None

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            self.failed = error
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        store = await open_store(f"sqlite:///{self.file}")
        try:
            server = StoreServer(store, port=self.port, keys=self.keys, limits=self.limits)
            self.url = await server.start()
            self.port = int(self.url.rpartition(":")[2])
            ready.set()
            await asyncio.to_thread(self.over.wait)
            await server.stop()
        finally:
            await store.close()


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[ServedStore]:
    """A server for as long as the block runs."""
    server = ServedStore(folder / "store.db", **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
