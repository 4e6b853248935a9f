"""A clock that tests set: of real programs and all that they start, by a library that they load (`clock_shift.c`)."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
HOUR = 3600


class ShiftedClock:
    """The clock of programs with this `environment`."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("a C compiler is needed to set a program's clock")
        library, file = directory / "clock_shift.so", directory / "clock"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True, timeout=120)
        file.write_bytes(struct.pack("=q", 0))
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(file)}
        with file.open("r+b") as opened:
            self._mapped = mmap.mmap(opened.fileno(), 8)

    def set(self, seconds: int) -> None:
        """So many seconds ahead of this machine's clock, or behind it."""
        self._mapped[:] = struct.pack("=q", seconds)

    @contextmanager
    def jumping(self, seconds: Sequence[int], every: float) -> Iterator[None]:
        """Within the block it is set to each of these in turn, again and again."""
        over = threading.Event()

        def jump() -> None:
            while True:
                for each in seconds:
                    self.set(each)
                    if over.wait(every):
                        return

        jumping = threading.Thread(target=jump, daemon=True)
        jumping.start()
        try:
            yield
        finally:
            over.set()
            jumping.join()
