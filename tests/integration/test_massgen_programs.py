"""`agl.massgen` across processes: a program that is killed, the command line, and a config that trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import AGL
from paths import pythonpath

from agl.errors import ConfigError
from agl.massgen import AlgorithmConfig, ContentSpan, LightningStore, RLConfig, read_traces

KILLED = """
import asyncio, sys
from agl.massgen import RLAgentMixin, RLConfig, StoreConfig, ContentSpan

class Agent:
    agent_id = "me"
    async def chat(self, messages):
        yield {"type": "content", "content": "first"}
        yield {"type": "tool_calls", "tool_calls": []}
        yield {"type": "content", "content": "second"}

class Watched(RLAgentMixin, Agent):
    pass

async def main():
    agent = Watched(enable_rl=True, rl_config=RLConfig(enable_rl=True, store_config=StoreConfig(path=sys.argv[1])))
    async for chunk in agent.chat([{"role": "user", "content": "whole"}]):
        pass
    stream = agent.chat([{"role": "user", "content": "?"}])
    await anext(stream); await anext(stream)
    assert agent.trace_collector.flush()
    print("stored", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_kill_9_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": pythonpath()},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "stored\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = LightningStore(tmp_path)
    whole, cut = store.query_traces()
    assert (whole.status, cut.status) == ("completed", "running")
    assert [s.content for s in cut.spans if isinstance(s, ContentSpan)] == ["first"]
    assert [t.task for t in read_traces(tmp_path)] == ["whole"], "the files of the other were not written"
    assert store.write_files() == 2
    assert {t.task for t in read_traces(tmp_path)} == {"whole", "?"}

    out = tmp_path / "out"
    done = subprocess.run(
        [*AGL, "export", "--format", "massgen", "--store", str(tmp_path), "--out", str(out)],
        env=os.environ | {"PYTHONPATH": pythonpath()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 rollouts" in done.stdout
    assert list(read_traces(out)) == list(read_traces(tmp_path))


def test_the_config_trains(tmp_path: Path) -> None:
    config = RLConfig(
        checkpoint_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "l"),
        algorithm_config=AlgorithmConfig(learning_rate=1e-4, batch_size=8, num_epochs=3),
    )  # fmt: skip
    built = config.algorithm_config.build("model", group_size=4)
    assert (type(built).__name__, built.learning_rate, built.batch_size, built.epochs) == ("GRPO", 1e-4, 8, 3)
    assert config.algorithm_config.build("model", steps=5).epochs is None
    trainer = config.trainer("model", n_workers=2)
    assert str(trainer.directory) == str(tmp_path / "c")
    with pytest.raises(ConfigError, match="apo"):
        AlgorithmConfig(algorithm="apo").build("model")
