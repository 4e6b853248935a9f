"""Watches a process load a model: whether it makes progress, and on what.

Invariant: only work that was done counts: bytes that arrived, blocks that were read, modules that were imported, items
of a progress bar. Computing and waiting do not, so a process that hangs or spins is found.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

SECONDS = 1.0
"""Seconds between two checks."""
CHUNK_BYTES = 1 << 18
"""Pieces in which a download is written and counted; `huggingface_hub`'s own take minutes on a slow line."""

_PREFIX = re.compile(r"\(\w+ pid=\d+\)|\b[A-Z]+ [\d-]+ [\d:.]+ \[[^\]]*\]")
"""In vLLM's log: process, level, time and place."""


class LoadingProgress(AbstractContextManager["LoadingProgress"]):
    """Calls `report` while the block runs, at most once in `SECONDS`, if loading has progressed since the last call.

    Progress bars are those of `tqdm`, with which `huggingface_hub` counts bytes and `transformers` tensors. They are
    counted whether they are drawn or not.

    Args:
        report: called in a thread, with what is being loaded.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._bars: dict[int, _Bar] = {}
        self._text = "loading libraries"
        self._items = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LoadingProgress:
        self._thread.start()
        self._uncount = self._count_bars()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._uncount()

    def _watch(self) -> None:
        before = self._done()
        while not self._over.wait(SECONDS):
            if (now := self._done()) != before:
                before = now
                self._report(self._text)

    def _done(self) -> tuple[int, ...]:
        """Grows with each piece of work, and with nothing else."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return self._items, len(sys.modules), usage.ru_inblock, usage.ru_majflt

    def _count_bars(self) -> Callable[[], None]:
        """Count progress bars; returns the function that stops it."""
        import huggingface_hub.constants
        from tqdm import std

        tqdm: Any = std.tqdm

        huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
        init = tqdm.__init__
        update = tqdm.update
        iterate = tqdm.__iter__

        def __init__(bar: Any, *args: Any, **options: Any) -> None:
            init(bar, *args, **options)
            if bar.total == 0:
                return
            # A bar that is not drawn keeps neither.
            what = (options.get("desc") or "").rstrip(": ")
            self._bars[id(bar)] = _Bar(what, options.get("unit") == "B", bar.total)
            self._add(bar, options.get("initial") or 0)

        def counted_update(bar: Any, n: float | None = 1) -> bool | None:
            self._add(bar, 1 if n is None else n)
            return update(bar, n)

        def __iter__(bar: Any) -> Any:
            for item in bar.iterable:
                yield item
                bar.update(1)
            bar.close()

        def uncount() -> None:
            tqdm.__init__ = init
            tqdm.update = update
            tqdm.__iter__ = iterate

        tqdm.__init__ = __init__
        tqdm.update = counted_update
        tqdm.__iter__ = __iter__
        return uncount

    def _add(self, bar: Any, n: float) -> None:
        if (seen := self._bars.get(id(bar))) is not None:
            seen.done += n
            # Minus where a download begins again.
            self._items += n > 0
            self._text = str(seen)


class NewLines:
    """The lines of a growing log that say something new.

    A line that differs from an earlier one only in time and place is not new; waiting processes repeat theirs.

    Args:
        log: an open file.
    """

    def __init__(self, log: Any) -> None:
        self._log, self._at, self._seen = log, 0, set[str]()

    def read(self) -> str | None:
        """The last of the new lines since the last call; None if there is none."""
        data = os.pread(self._log.fileno(), 1 << 20, self._at)
        self._at += len(data)
        new = None
        for line in re.split(r"[\r\n]+", data.decode(errors="replace")):
            said = _PREFIX.sub("", line).strip()
            if said and said not in self._seen:
                self._seen.add(said)
                new = said
        return new


class _Bar:
    """What a progress bar has counted."""

    def __init__(self, what: str, is_bytes: bool, total: float | None) -> None:
        self.what = what
        self.is_bytes = is_bytes
        self.total = total
        self.done = 0.0

    def __str__(self) -> str:
        if self.what in ("Interpreter", "Inductor Compilation"):  # torch's, while it compiles FlexAttention
            return "compiling kernels"
        if not self.is_bytes:
            return f"{self.what or 'loading'}: {self.done:.0f}{'' if self.total is None else f' of {self.total:.0f}'}"
        total = "" if self.total is None else f" of {self.total / 1e6:.1f}"
        # The hub's client gives the end of the URL.
        return f"downloading {self.what.rpartition('/')[2]}: {self.done / 1e6:.1f}{total} MB"


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """transformers draws no progress bars inside the block."""
    from transformers.utils import logging

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bar:
            logging.enable_progress_bar()
