"""Rollouts on Ray: spread over nodes, run elsewhere when a node or an actor dies, and nothing of ours stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import SUPPORT
from running import alive, attempts, fit, gone, say

import agl

ray = pytest.importorskip("ray")

STORE_BYTES = 80 * 2**20
ONE_EACH = agl.RayRunners(num_cpus=0.5, per_actor=1)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]


def raylet() -> str:
    """What tells a node from another of the same machine."""
    return os.environ["RAY_RAYLET_PID"]


def ancestor(generations: int) -> int:
    """1 is the parent."""
    pid = os.getpid()
    for _ in range(generations):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return pid


@pytest.fixture(scope="module")
def two_nodes(one_ray: None) -> Iterator[Any]:
    """Two nodes on one machine."""
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    cluster.second = cluster.add_node(**common)
    ray.init(address=cluster.address, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    # Ray keeps a handler of its own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    cluster.shutdown()


@agl.rollout
def meets_the_other(task: Any, llm: agl.LLM, rollout: agl.RolloutInfo) -> float:
    """Waits until both rollouts are running, and notes its node, its process and its actor's process."""
    say(llm, "q")
    directory = Path(task["directory"])
    (directory / f"{task['i']}-{rollout.attempt}").write_text(f"{raylet()} {os.getpid()} {ancestor(3)}")
    while len(list(directory.glob("*-1"))) < 2:
        time.sleep(0.02)
    if rollout.attempt > 1:
        return 1.0
    if task["what"] == "wait" and raylet() == (directory / "doomed").read_text():
        time.sleep(1000)
    if task["what"] == "kill":
        os.kill(ancestor(3), signal.SIGKILL)
        time.sleep(1000)
    if task["what"] == "stick":
        ctypes.PyDLL(None).sleep(1000)
    return 1.0


def notes(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Rollout and attempt -> node, processes."""
    found = {p.name: p.read_text().split() for p in directory.glob("*-*")}
    return {name: (words[0], [int(pid) for pid in words[1:]]) for name, words in found.items() if words}


def tasks(directory: Path, *what: str) -> list[Any]:
    directory.mkdir()
    return [{"directory": str(directory), "what": one, "i": i} for i, one in enumerate(what)]


@pytest.mark.night
def test_a_killed_actor_and_a_stuck_agent(two_nodes: Any, tmp_path: Path) -> None:
    given = tasks(tmp_path / "notes", "kill", "stick")
    done = fit(meets_the_other, given, tmp_path / "run", runners=ONE_EACH, timeout=6.0)
    assert done.rewards == [1.0, 1.0]
    killed, stuck = attempts(tmp_path / "run")
    assert [a.status for a in killed] == ["failed", "succeeded"], killed[0].error
    assert [a.status for a in stuck] == ["timeout", "succeeded"], stuck[0].error
    where = notes(tmp_path / "notes")
    assert where["0-1"][0] != where["1-1"][0], "both nodes had work"
    assert all(gone(pid) for _, pids in where.values() for pid in pids)
    assert ray.is_initialized()


@pytest.mark.night
def test_the_rollouts_of_a_dead_node_are_run_elsewhere(two_nodes: Any, tmp_path: Path) -> None:
    given = tasks(tmp_path / "notes", "wait", "wait")
    doomed = str(two_nodes.second.all_processes["raylet"][0].process.pid)
    (tmp_path / "notes" / "doomed").write_text(doomed)

    def kill_the_node() -> None:
        while len(notes(tmp_path / "notes")) < 2:
            time.sleep(0.02)
        two_nodes.remove_node(two_nodes.second, allow_graceful=False)

    killing = threading.Thread(target=kill_the_node)
    killing.start()
    done = fit(meets_the_other, given, tmp_path / "run", runners=ONE_EACH)
    killing.join()
    assert done.rewards == [1.0, 1.0]
    where = notes(tmp_path / "notes")
    [lost] = [name for name, (node, _) in where.items() if node == doomed]
    assert where[lost.replace("-1", "-2")][0] != doomed
    assert all(gone(pid) for _, pids in where.values() for pid in pids), "a worker outlives its node"
    assert "Ray actor" in " ".join(str(a.error) for rollout in attempts(tmp_path / "run") for a in rollout)


SCRIPT = """
import os, sys, time
sys.path.insert(0, {tests!r})
import agl, ray
from openai import OpenAI
from scripted import ScriptedRollouts

@agl.rollout
def agent(task, llm: agl.LLM) -> float:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    client.chat.completions.create(model=llm.model, messages=[{{"role": "user", "content": "q"}}])
    print("worker", os.getpid())
    time.sleep(task["seconds"])
    return 1.0

for seconds in (0, 1000):
    algorithm = ScriptedRollouts(["four"])
    agl.Trainer(algorithm, runners="ray", n_workers=2, directory=f"{{sys.argv[1]}}-{{seconds}}", progress=False).fit(
        agent, [{{"seconds": seconds}}] * 2
    )
    print("rewards", algorithm.rewards, "ray", ray.is_initialized(), flush=True)
"""


def marked(marker: str) -> list[int]:
    """Processes with a marker in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.night
def test_a_ray_of_our_own_is_shut_down_at_the_end_and_on_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(SCRIPT.format(tests=str(SUPPORT))))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    program = subprocess.Popen(
        [sys.executable, str(file), str(tmp_path / "run")], env=environment | {"TEST_MARKER_OF_AGL": str(tmp_path)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert program.stdout is not None
    lines = iter(program.stdout.readline, "")
    first = [""]
    while not first[-1].startswith("rewards"):
        first.append(next(lines))
    assert first[-1].strip() == "rewards [1.0, 1.0] ray False"
    assert sum("worker " in line for line in first) == 2, "what workers print is not lost"
    second = next(line for line in lines if "worker " in line or line.startswith("rewards"))
    assert "worker " in second
    program.send_signal(signal.SIGINT)
    assert program.wait(30) != 0
    marker = f"TEST_MARKER_OF_AGL={tmp_path}"
    assert all(gone(pid, 15) for pid in marked(marker)), marked(marker)
