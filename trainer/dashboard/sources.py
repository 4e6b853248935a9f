"""The stores that a dashboard shows, each opened when it is first looked at."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from agl.errors import CheckpointError, StoreError
from agl.trainer.http.auth import CLIENT_VARIABLE
from agl.trainer.http.local_key import split_key
from agl.trainer.run.history import import_history
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.location import DEFAULT_STORE, find_store

_log = logging.getLogger("agl.dashboard")
_PATTERNS = ("run.db", "store.db", "*/run.db", "*/store.db", DEFAULT_STORE)
_HERE = ("agl-*/run.db", "agl-*/store.db", "agl-*/*/run.db", "runs/*/run.db", "run.db", DEFAULT_STORE)
"""Where runs are below a directory that is named, and below the present one if none is."""
MOST_STORES = 50
_RETRY_SECONDS = 5.0
"""How long a store's server may be unreachable before the page says so."""


class Source:
    """One store.

    Args:
        name: what the page calls it.
        url: where it is.
        store: an open one, which `close` leaves open.
    """

    def __init__(self, name: str, url: str = "", store: Store | None = None) -> None:
        self.name = name
        self.url = url
        self._store = store
        self._own = store is None
        # agl's own programs remove it from their environment before the store is opened.
        self._key = split_key(url)[1] or os.environ.get(CLIENT_VARIABLE)
        self._opening = asyncio.Lock()

    async def store(self) -> Store:
        """The store, opened if it is not yet.

        Raises:
            AglError: it cannot be opened: there is none yet, its server does not answer, a newer agl wrote it, ...
        """
        async with self._opening:
            if self._store is None:
                self._store = await self._open()
            return self._store

    async def close(self) -> None:
        """Close the store, if it was opened here. Idempotent."""
        if self._own and self._store is not None:
            store = self._store
            self._store = None
            await store.close()

    async def _open(self) -> Store:
        if self.url.startswith(("http://", "https://")):
            from agl.trainer.store.http.client import HttpStore

            return await HttpStore.open(self.url, key=self._key, retry_seconds=_RETRY_SECONDS)
        path = Path(self.url.removeprefix("sqlite:///"))
        if "://" not in str(path) and not path.exists():
            # Opening it would make it, and the run that is about to begin would find a store that it did not make.
            raise StoreError("there is no store here yet", hint="it is made when the run begins", path=path)
        store = await open_store(self.url)
        if path.name == "run.db":
            try:
                await import_history(store, path.parent)
            except CheckpointError as error:
                _log.warning("no curves of the last checkpoint: %s", error)
        return store


def find_sources(places: Sequence[str]) -> list[Source]:
    """The stores at these places: run directories, directories of runs, files and URLs; those below the working
    directory if there are none. The newest `MOST_STORES` of a directory.

    Raises:
        StoreError: there is no store at a place.
    """
    if not places:
        files = _newest(Path(), _HERE)
        if not files:
            raise StoreError(
                "there is no run below this directory", hint="name a run's directory, or a store's file or URL"
            )
        return [_source_of(file) for file in files]
    sources = []
    for place in places:
        path = Path(place.removeprefix("sqlite:///"))
        if "://" not in str(path) and path.is_dir():
            files = _newest(path, _PATTERNS)
            if not files:
                raise StoreError("there is no run in this directory", hint="name one that has a run.db", path=path)
            sources += [_source_of(file) for file in files]
        else:
            url = find_store(place)
            sources.append(Source(split_key(url)[0].removeprefix("sqlite:///"), url))
    return list({source.url: source for source in sources}.values())


def _newest(directory: Path, patterns: Sequence[str]) -> list[Path]:
    files = {file for pattern in patterns for file in directory.glob(pattern)}
    return sorted(files, key=lambda file: -file.stat().st_mtime)[:MOST_STORES]


def _source_of(file: Path) -> Source:
    name = str(file.parent if file.name == "run.db" else file)
    return Source(name if name != "." else file.name, f"sqlite:///{file}")
