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
from running import alive, attempts, fit, gone, say

import agl

ray = pytest.importorskip("ray")

STORE_BYTES = 80 * 2**20
pytestmark = pytest.mark.slow


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
def two_nodes() -> Iterator[Any]:
    """Two nodes on one machine."""
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    cluster.second = cluster.add_node(**common)
    ray.init(address=cluster.address, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@agl.rollout
def meets_the_other(task: Any, llm: agl.LLM, rollout: agl.RolloutInfo) -> float:
    """Waits until both rollouts are running, and notes its node, its process and its actor's process."""
    say(llm, "q")
    directory = Path(task["directory"])
    (directory / f"{task['i']}-{rollout.attempt}").write_text(f"{raylet()} {os.getpid()} {ancestor(3)}")
    while len(list(directory.glob("*-1"))) < 2:
        time.sleep(0.02)
    if rollout.attempt == 1 and task["what"] == "wait" and raylet() == (directory / "doomed").read_text():
        time.sleep(1000)
    if rollout.attempt == 1 and task["what"] == "kill" and task["i"] == 0:
        os.kill(ancestor(3), signal.SIGKILL)
        time.sleep(1000)
    if rollout.attempt == 1 and task["what"] == "stick" and task["i"] == 0:
        ctypes.PyDLL(None).sleep(1000)
    return 1.0


def notes(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Rollout and attempt -> node, processes."""
    found = {p.name: p.read_text().split() for p in directory.glob("*-*")}
    return {name: (words[0], [int(pid) for pid in words[1:]]) for name, words in found.items() if words}


def tasks(directory: Path, what: str) -> list[Any]:
    directory.mkdir()
    return [{"directory": str(directory), "what": what, "i": i} for i in range(2)]


def test_a_killed_actor_and_a_stuck_agent(two_nodes: Any, tmp_path: Path) -> None:
    options = agl.RayRunners(num_cpus=0.5, per_actor=1)
    for what, status in (("kill", "failed"), ("stick", "timeout")):
        given = tasks(tmp_path / what, what)
        done = fit(meets_the_other, given, tmp_path / f"run-{what}", runners=options, timeout=4.0)
        assert done.rewards == [1.0, 1.0]
        (first, second), (other,) = attempts(tmp_path / f"run-{what}")
        assert (first.status, second.status, other.status) == (status, "succeeded", "succeeded"), first.error
        where = notes(tmp_path / what)
        assert len({node for node, _ in where.values()}) == 2, "both nodes had work"
        assert all(gone(pid) for _, pids in where.values() for pid in pids)
    assert ray.is_initialized()


def test_the_rollouts_of_a_dead_node_are_run_elsewhere(two_nodes: Any, tmp_path: Path) -> None:
    given = tasks(tmp_path / "notes", "wait")
    doomed = str(two_nodes.second.all_processes["raylet"][0].process.pid)
    (tmp_path / "notes" / "doomed").write_text(doomed)

    def kill_the_node() -> None:
        while len(notes(tmp_path / "notes")) < 2:
            time.sleep(0.02)
        two_nodes.remove_node(two_nodes.second, allow_graceful=False)

    killing = threading.Thread(target=kill_the_node)
    killing.start()
    options = agl.RayRunners(num_cpus=0.5, per_actor=1)
    done = fit(meets_the_other, given, tmp_path / "run", runners=options)
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
from running import say
from scripted import ScriptedRollouts

@agl.rollout
def agent(task, llm: agl.LLM) -> float:
    say(llm, "q")
    print("worker", os.getpid())
    time.sleep(task["seconds"])
    return 1.0

algorithm = ScriptedRollouts(["four"])
agl.Trainer(algorithm, runners="ray", n_workers=2, directory=sys.argv[1], progress=False).fit(
    agent, [{{"seconds": float(sys.argv[2])}}] * 2
)
print("rewards", algorithm.rewards, "ray", ray.is_initialized())
"""


def ray_processes(marker: str) -> list[int]:
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


def program(directory: Path, seconds: float) -> tuple[subprocess.Popen[str], str]:
    file = directory / "program.py"
    file.write_text(textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent))))
    marker = f"AGL_TEST_MARKER={directory}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= dict([marker.split("=", 1)])
    started = subprocess.Popen(
        [sys.executable, str(file), str(directory / "run"), str(seconds)], text=True, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    return started, marker


def all_gone(marker: str) -> bool:
    return all(gone(pid, 15) for pid in ray_processes(marker))


def test_a_ray_of_our_own_is_shut_down(tmp_path: Path) -> None:
    started, marker = program(tmp_path, 0.0)
    output, _ = started.communicate(timeout=60)
    assert "rewards [1.0, 1.0] ray False" in output
    assert output.count("worker ") >= 2, "what workers print is not lost"
    assert all_gone(marker)


def test_ctrl_c_leaves_nothing_of_ray(tmp_path: Path) -> None:
    started, marker = program(tmp_path, 1000.0)
    assert started.stdout is not None
    for line in started.stdout:
        if "worker " in line:
            break
    started.send_signal(signal.SIGINT)
    assert started.wait(30) != 0
    assert all_gone(marker), ray_processes(marker)
