"""0.3's client-server strategy: the same program as algorithm and as runner, in two processes; and with its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from paths import pythonpath
from processes import free_port

from agl.trainer.store import open_store
from agl.trainer.store.types import Rollout

PROGRAM = """
import os, socket, sys
import agentlightning as agl
from openai import OpenAI

class Speaker(agl.LitAgent[dict]):
    def rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        client = OpenAI(base_url=llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id), api_key=llm.api_key)
        said = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["q"]}])
        agl.emit_object({"pid": os.getpid()})
        return float(len(said.choices[0].message.content or "") % 2)

if __name__ == "__main__":
    model, directory = sys.argv[1:]
    algorithm = agl.GRPO(model=model, steps=1, group_size=4, batch_size=2, max_response_tokens=8, learning_rate=1e-4)
    trainer = agl.Trainer(algorithm=algorithm, strategy="cs", n_runners=2, directory=directory)
    trainer.fit(Speaker(), [{"q": "a"}, {"q": "b"}])
"""


def start(program: Path, model: Path, directory: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agl.compat", str(program), str(model), str(directory)]
    variables = {**os.environ, "PYTHONPATH": pythonpath(), **environment}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_in(directory: Path) -> tuple[Sequence[Rollout], set[int], int]:
    """The training rollouts, the processes that ran them, and how many calls were trained."""

    async def read() -> Any:
        store = await open_store(str(directory / "run.db"))
        rollouts = await store.query_rollouts(mode="train")
        spans = [s for r in rollouts for s in await store.query_spans(r.rollout_id)]
        trained = [t for r in rollouts for t in await store.query_trained_calls(r.rollout_id)]
        await store.close()
        values = [json.loads(str(s.attributes["agl.value"])) for s in spans if "agl.value" in s.attributes]
        pids = {value["pid"] for value in values}
        return rollouts, pids, len(trained)

    return asyncio.run(read())


@pytest.mark.night
@pytest.mark.slow
def test_an_algorithm_and_a_runner_in_two_processes(tiny_policy: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    port = str(free_port())
    algorithm = start(program, tiny_policy, tmp_path / "run", AGL_CURRENT_ROLE="algorithm", AGL_SERVER_PORT=port)
    runner = start(program, tiny_policy, tmp_path / "unused", AGL_CURRENT_ROLE="runner", AGL_SERVER_PORT=port)
    try:
        said, _ = algorithm.communicate(timeout=300)
        assert algorithm.returncode == 0, said
        assert runner.poll() is None
        runner.send_signal(signal.SIGINT)
        runner.communicate(timeout=60)
    finally:
        for process in (algorithm, runner):
            if process.poll() is None:
                process.kill()
                process.wait()
    rollouts, pids, trained = left_in(tmp_path / "run")
    assert [r.status for r in rollouts] == ["succeeded"] * 8
    assert pids == {runner.pid}
    assert trained == 8
    assert not (tmp_path / "unused").exists()


@pytest.mark.night  # its runners are those of runners="process", which have their own tests
def test_with_the_role_both_the_trainer_starts_its_runners(tiny_policy: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    trainer = start(program, tiny_policy, tmp_path / "run", AGL_SERVER_PORT=str(free_port()))
    said, _ = trainer.communicate(timeout=300)
    assert trainer.returncode == 0, said
    rollouts, pids, _ = left_in(tmp_path / "run")
    assert [r.status for r in rollouts] == ["succeeded"] * 8
    assert pids
    assert trainer.pid not in pids
