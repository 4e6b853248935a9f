"""How long things took is right although the wall clock was set meanwhile: forward by 51 hours, or back by 48."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl import semconv, tracing
from agl.mdp.order import beginnings, next_number
from agl.mdp.selection import select
from agl.mdp.spans import recorded
from agl.messages.types import ToolCall, ToolResult
from agl.stop_signals import interrupted_by_stop_signals, stop_signals_to
from agl.tracing.inferred import SpanInference
from agl.trainer.launch.child import ForwardedSignals, run_with
from agl.trainer.report.progress import Progress
from agl.trainer.run.recorder import Recorder
from agl.trainer.store import open_store
from agl.trainer.store.collect import moment
from agl.trainer.store.types import TrainingRun

JUMPS = [51 * 3600.0, -48 * 3600.0]


@pytest.fixture(params=JUMPS, ids=["forward", "back"])
def jump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets this process's wall clock, once."""
    state, now, now_ns = SimpleNamespace(ahead=0.0), time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + state.ahead)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(state.ahead * 1e9))

    def set_it() -> None:
        state.ahead = request.param

    return set_it


def test_a_run(jump: Any, tmp_path: Path) -> None:
    async def scenario() -> TrainingRun:
        store = await open_store(str(tmp_path / "s.db"))
        recorder = Recorder(store, Progress(enabled=False), TrainingRun("run"))
        await recorder.start()
        jump()
        await recorder.end("succeeded")
        [run] = await store.query_runs()
        await store.close()
        return run

    run = asyncio.run(scenario())
    assert run.ended_at is not None
    assert 0 <= run.ended_at - run.created_at < 60


def test_a_process_that_began_before_it_had_a_span(jump: Any) -> None:
    began = time.monotonic()
    jump()
    ended: list[Any] = []
    rollout = tracing.RolloutContext("ro-1", 1, "agent", select())
    rollout.on_span_end = ended.append
    root = tracing.root(rollout, began=began - 7.0)
    tracing.end(root)
    [span] = ended
    assert 7.0 <= span.seconds < 60
    assert abs(time.time() - moment(began)) < 60


@pytest.mark.parametrize("numbered", [True, False])
def test_a_tool_between_an_answer_and_the_next_request(jump: Any, numbered: bool) -> None:
    """Without numbers, nothing but the time of the whole attempt says how long it took at most."""
    of = SpanInference("ro-1", 1, "a" * 32, None)
    number = next_number()
    start = time.time()
    chat = of.chat("agent", "m", start, start + 0.5, {}, sequence=number if numbered else None)
    of.asks(chat, [ToolCall("c1", "add", "{}")])
    jump()
    request = number + 2_500_000_000
    [tool] = of.tools({"c1": ToolResult("c1", "5")}, time.time(), request, began=request, most=40.0)
    assert tool.seconds == pytest.approx(2.0, abs=0.01) if numbered else 0 <= tool.seconds <= 40
    if numbered:
        # On the page, it is where it was: after the answer, and before the request.
        assert beginnings([chat, tool])[1] - beginnings([chat, tool])[0] == pytest.approx(0.5, abs=0.01)


def test_spans_without_numbers_begin_when_they_say(jump: Any) -> None:
    of = SpanInference("ro-1", 1, "a" * 32, None)
    spans = [recorded(of, semconv.CHAT, "m", "a", {}, parent_id=None, start=s, end=s + 1) for s in (5.0, 9.0)]
    assert beginnings(spans) == [5.0, 9.0]


# -- signals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_before_the_command_runs_is_not_lost(number: signal.Signals, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    command = [sys.executable, "-c", f"open({str(touched)!r}, 'w')"]
    with ForwardedSignals() as signals:
        os.kill(os.getpid(), number)
        ended = run_with(signals, command, os.environ)
    assert ended.exit_status == 128 + number
    assert ended.error == f"{number.name} came before the command was started"
    assert not touched.exists()


def test_what_nohup_ignores_stays_ignored_by_the_command() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ForwardedSignals() as signals:
            command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"]
            assert run_with(signals, command, os.environ).status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_inner_block_has_the_signals_and_the_outer_one_has_them_back() -> None:
    inner: list[signal.Signals] = []
    with interrupted_by_stop_signals():
        with stop_signals_to(inner.append), contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert inner == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)  # A further one changes nothing.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


STOPPED = """
import os, signal
from agl.stop_signals import end_when_stopped, interrupted_by_stop_signals

end_when_stopped()
try:
    with interrupted_by_stop_signals():
        raise SystemExit(130)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_program_that_ends_keeps_its_exit_status() -> None:
    """`agl sweep` ended with 143: the first SIGTERM had gone to its run, the second came when that had ended."""
    assert subprocess.run([sys.executable, "-c", STOPPED], timeout=60, check=False).returncode == 130
