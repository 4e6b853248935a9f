"""Loading a policy takes as long as it takes while it gets on, says so, and ends when it does not."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hub as hubs
import pytest
from rich.console import Console
from untrained import make_untrained

from agl.errors import EngineError
from agl.trainer.local import loading
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.report.progress import Progress

pytestmark = pytest.mark.usefixtures("executed_policies")

LIMIT = 6.0
"""Seconds without progress: importing torch on a busy machine is done in steps shorter than this."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hubs.Hub]:
    with hubs.serving() as hub:
        for name, value in hub.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield hub


def spec(model: str) -> PolicySpec:
    return PolicySpec(model, device="cpu", threads=1, load_timeout=LIMIT)


async def load(model: str) -> list[str]:
    """What loading it says."""
    texts: list[str] = []
    policy = await LocalPolicy.start(spec(model), on_progress=texts.append)
    await policy.close()
    return texts


@pytest.mark.night
@pytest.mark.slow
def test_a_slow_download_takes_longer_than_the_limit(hub: hubs.Hub, tmp_path: Path) -> None:
    model = make_untrained(tmp_path / "model", hidden_size=192)
    hub.add("someone/tiny", model)
    size = (model / "model.safetensors").stat().st_size
    # A pause is a quarter of the limit; together they are twice as long as it. A busy machine does not show each.
    hub.piece_bytes, hub.seconds = size // 8 + 1, LIMIT / 4
    texts = asyncio.run(load("someone/tiny"))
    downloads = [text for text in texts if text.startswith("downloading model.safetensors: ")]
    assert len({*downloads}) >= 4
    assert downloads[-1].endswith(f" of {size / 1e6:.1f} MB")


@pytest.mark.slow
@pytest.mark.night
def test_a_download_that_stands_still_ends_the_run(hub: hubs.Hub, tmp_path: Path) -> None:
    hub.add("someone/tiny", make_untrained(tmp_path / "model", hidden_size=192))
    hub.stop_after = loading.CHUNK_BYTES
    with pytest.raises(EngineError, match=r"no progress for 6 s while it was loaded \(downloading model.safetensors"):
        asyncio.run(load("someone/tiny"))


def test_items_of_bars_count_whether_they_are_drawn_or_not() -> None:
    program = """
import time
from agl.trainer.local import loading

loading.SECONDS = 0.05
with loading.LoadingProgress(print) as progress:
    from tqdm.auto import tqdm

    def shown():
        before = progress._done()
        time.sleep(0.2)
        return before[0]

    for disable in (False, True):
        for _ in tqdm(range(3), desc="Loading weights", disable=disable):
            pass
        with tqdm(total=2_000_000, unit="B", desc="x.bin", disable=disable) as bar:
            bar.update(500_000)
            bar.update(-500_000)
    print("items", shown())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert "items 8" in done.stdout
    assert "downloading x.bin: 0.0 of 2.0 MB" in done.stdout


def test_bars_of_torchs_compiler_are_called_what_they_are() -> None:
    program = """
import time
import torch
from torch import fx
from agl.trainer.local import loading

loading.SECONDS = 0.05
with loading.LoadingProgress(print):
    fx.Interpreter(fx.symbolic_trace(torch.nn.ReLU())).run(torch.zeros(1))
    time.sleep(0.5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert "compiling kernels\n" in done.stdout
    assert "Interpreter" not in done.stdout


def test_a_line_that_was_printed_before_is_no_news(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        lines = loading.NewLines(log)

        def read(text: str) -> str | None:
            log.write(text)
            log.flush()
            return lines.read()

        assert (
            read("(EngineCore pid=7) INFO 11-22 21:00:01 [core.py:3] Waiting for 1 process\n")
            == "Waiting for 1 process"
        )
        assert read("(EngineCore pid=7) INFO 11-22 21:01:01 [core.py:3] Waiting for 1 process\n") is None
        assert read("\rshards: 1/8\rshards: 2/8") == "shards: 2/8"
        assert read("") is None


def test_it_is_shown_in_lines_and_not_while_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), width=100)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: 100.0 + now[0])
    progress = Progress(console=screen)
    for now[0], text in ((0.0, "loading libraries"), (1.0, "downloading a: 1"), (3.0, "downloading a: 2 [MB]")):
        progress.loading(text)
    assert screen.file.getvalue() == "downloading a: 2 [MB]\n"  # type: ignore[attr-defined]
