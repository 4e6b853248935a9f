"""Rollouts in worker processes: the stuck are killed, the dead fail at once, and nothing stays."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from paths import SUPPORT
from running import alive, attempts, fit, gone, say

import agl
from agl.errors import ConfigError, RolloutError
from agl.trainer.runners.loading import load_agent

# -- stuck and dead ---------------------------------------------------------------------------------------------------


def hold_the_interpreter() -> None:
    """Block in C without letting go of the interpreter's lock: no thread of this process runs any more."""
    ctypes.PyDLL(None).sleep(1000)


def loop_for_ever() -> None:
    signal_is_ignored = True
    while signal_is_ignored:
        pass


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def crash() -> None:
    ctypes.string_at(0)


def end_the_process() -> None:
    os._exit(7)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KINDS = {
    hold_the_interpreter: ("timeout", "could not be stopped"),
    loop_for_ever: ("timeout", "ran past its limit of 2 s"),
    deadlock: ("timeout", "ran past its limit of 2 s"),
    crash: ("failed", "was ended by SIGSEGV"),
    end_the_process: ("failed", "ended with exit status 7"),
    be_killed: ("failed", "was ended by SIGKILL"),
}


@agl.rollout
def stuck_once(task: Any, llm: agl.LLM, rollout: agl.RolloutInfo) -> float:
    say(llm, "first")
    if rollout.attempt == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        # A child in a session of its own, as an agent's tools may start.
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(task["child"]).write_text(str(child.pid))
        next(kind for kind in KINDS if kind.__name__ == task["kind"])()
    return 1.0


def test_the_stuck_are_killed_and_the_dead_are_noticed(tmp_path: Path, no_process_left: None) -> None:
    tasks = [{"kind": kind.__name__, "child": str(tmp_path / kind.__name__)} for kind in KINDS]
    done = fit(stuck_once, tasks, tmp_path, runners="process", n_workers=3, timeout=2.0)
    assert done.rewards == [1.0] * len(KINDS)
    for (first, *others), (kind, (status, error)) in zip(attempts(tmp_path), KINDS.items(), strict=True):
        assert (first.status, [a.status for a in others]) == (status, ["succeeded"]), kind
        assert error in (first.error or ""), kind
        assert gone(int((tmp_path / kind.__name__).read_text())), f"{kind} left its child"
    for spans in done.spans:
        assert {s.operation for s in spans if s.attempt == 1} >= {"chat"}, "what the attempt had done is known"


@agl.rollout
async def blocks_its_loop(task: Any, llm: agl.LLM, rollout: agl.RolloutInfo) -> float:
    say(llm, "first")
    if rollout.attempt == 1:
        time.sleep(1000)
    return float(os.getpid())


@pytest.mark.night
def test_a_worker_whose_agent_overran_is_replaced(tmp_path: Path, no_process_left: None) -> None:
    done = fit(blocks_its_loop, [{}], tmp_path, runners="process", n_workers=1, timeout=1.5)
    [[first, second]] = attempts(tmp_path)
    assert (first.status, second.status) == ("timeout", "succeeded")
    assert first.worker_id != second.worker_id
    assert done.rewards[0] not in (None, float(os.getpid()))


def test_workers_that_die_without_a_rollout_break_the_run(tmp_path: Path, no_process_left: None) -> None:
    """An agent whose module cannot be used twice, say; here one that ends each worker from a thread at once."""
    (tmp_path / "deadly.py").write_text(
        textwrap.dedent("""
        import os, agl
        os.register_at_fork(after_in_child=lambda: os.getppid() != guard and os._exit(9))
        guard = os.getpid()

        @agl.rollout
        def agent(task) -> float:
            return 1.0
        """)
    )
    with pytest.raises(RolloutError, match="in a row died before they had a rollout"):
        fit(f"{tmp_path / 'deadly.py'}:agent", [{}], tmp_path / "run", runners="process", n_workers=1)


# -- how the agent travels --------------------------------------------------------------------------------------------


def test_what_cannot_be_pickled_is_named(tmp_path: Path, no_process_left: None) -> None:
    client = OpenAI(api_key="k")
    lock = threading.Lock()

    @agl.rollout
    def holds_a_client(task: Any) -> float:
        return float(client.max_retries)

    class HoldsALock(agl.LitAgent):
        def __init__(self) -> None:
            self.cache = {"by_task": [lock]}

        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    held = r"agent\.run\.run\.function\.client\.[\w.]+ \([\w.]+ holds a .*RLock\).*\n.*inside the agent's function"
    with pytest.raises(ConfigError, match=held):
        fit(holds_a_client, [{}], tmp_path, runners="process")
    with pytest.raises(ConfigError, match=re.escape("cache['by_task'] (list holds a _thread.lock)")):
        fit(HoldsALock(), [{}], tmp_path, runners="process")
    with pytest.raises(ConfigError, match=r"initial_resources\['db'\]|initial_resources \(dict holds"):
        fit(stuck_once, [{}], tmp_path, runners="process", initial_resources={"db": lock})
    assert not (tmp_path / "run.db").exists(), "nothing was started"


def test_what_a_command_line_named_in_a_file_travels_by_value(tmp_path: Path) -> None:
    """The command line has loaded it already, with its reward; a worker could not import the module that this made."""
    (tmp_path / "of_a_file.py").write_text(
        textwrap.dedent("""
        import agl
        from openai import OpenAI

        LIMIT = 3.0

        def ask(llm):
            client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
            client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "q"}])

        @agl.rollout
        def agent(task, llm: agl.LLM) -> float:
            ask(llm)
            return LIMIT
        """)
    )
    agent = load_agent(f"{tmp_path / 'of_a_file.py'}:agent", None)
    done = fit(agent, [{}], tmp_path / "run", runners="process", n_workers=1)
    assert done.rewards == [3.0]


def test_an_agent_that_cannot_be_imported_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match=r"(?s)cannot be imported.*nothing_of_this_name"):
        fit(f"{tmp_path / 'broken.py'}:agent", [{}], tmp_path / "run", runners="process")


@pytest.mark.night
def test_an_agent_whose_import_starts_a_thread(tmp_path: Path, no_process_left: None) -> None:
    """It cannot be forked safely, so every worker imports it for itself."""
    (tmp_path / "threaded.py").write_text(
        textwrap.dedent("""
        import threading, time
        from openai import OpenAI
        import agl

        beats = []

        def beat():
            while True:
                beats.append(1)
                time.sleep(0.01)

        threading.Thread(target=beat, daemon=True).start()

        @agl.rollout
        def agent(task, llm: agl.LLM) -> float:
            client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
            client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "q"}])
            before = len(beats)
            time.sleep(0.1)
            return float(len(beats) > before)
        """)
    )
    done = fit(f"{tmp_path / 'threaded.py'}:agent", [{}] * 2, tmp_path / "run", runners="process")
    assert done.rewards == [1.0, 1.0]


SCRIPT = """
import os, sys, time
sys.path.insert(0, {tests!r})
import agl
from openai import OpenAI
from scripted import ScriptedRollouts

class Answer:
    def __init__(self, text):
        self.text = text

@agl.rollout
def agent(task, llm: agl.LLM) -> float:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    text = client.chat.completions.create(model=llm.model, messages=[{{"role": "user", "content": "q"}}])
    print("worker", os.getpid(), flush=False)
    time.sleep(task["seconds"])
    return float(Answer(text.choices[0].message.content).text == "four")

algorithm = ScriptedRollouts(["four"])
agl.Trainer(algorithm, runners="process", n_workers=2, directory=sys.argv[1], progress=False).fit(
    agent, [{{"seconds": {seconds}}}] * 2
)
print("rewards", algorithm.rewards)
"""


def script(directory: Path, seconds: float) -> subprocess.Popen[str]:
    file = directory / "program.py"
    file.write_text(SCRIPT.format(tests=str(SUPPORT), seconds=seconds))
    environment = os.environ | {"TMPDIR": str(directory / "tmp")}
    (directory / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, str(file), str(directory / "run")], text=True, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def test_a_script_needs_no_import_guard(tmp_path: Path) -> None:
    """Its functions and classes travel by value, and what workers print is not lost."""
    output, _ = script(tmp_path, 0.0).communicate(timeout=60)
    assert "rewards [1.0, 1.0]" in output
    assert len(re.findall(r"^worker \d+$", output, re.M)) == 2


@pytest.mark.parametrize("how", [pytest.param("SIGINT", marks=pytest.mark.night), "SIGKILL"])
def test_nothing_outlives_the_program(how: str, tmp_path: Path) -> None:
    program = script(tmp_path, 1000.0)
    assert program.stdout is not None
    lines = iter(program.stdout.readline, "")
    said = (int(line.split()[1]) for line in lines if line.startswith("worker"))
    workers = [next(said), next(said)]
    below = descendants(program.pid)
    assert set(workers) <= below
    os.kill(program.pid, getattr(signal, how))
    assert program.wait(30) != 0
    assert all(gone(pid, 10) for pid in below), [Path(f"/proc/{p}/cmdline").read_bytes() for p in below if alive(p)]
    assert not list((tmp_path / "tmp").iterdir())


def descendants(pid: int) -> set[int]:
    children = {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    for task in Path(f"/proc/{pid}/task").iterdir():
        children |= {int(p) for p in (task / "children").read_text().split()}
    return children | {p for child in children for p in descendants(child)}


@pytest.mark.night
def test_a_fork_server_that_is_killed_is_replaced(tmp_path: Path, no_process_left: None) -> None:
    killed = tmp_path / "killed"

    @agl.rollout
    def kills_the_fork_server_once(task: Any, llm: agl.LLM, rollout: agl.RolloutInfo) -> float:
        say(llm, "q")
        if not killed.exists():
            killed.touch()
            supervisor = os.getppid()
            os.kill(int(Path(f"/proc/{supervisor}/stat").read_text().split()[3]), signal.SIGKILL)
            time.sleep(1000)
        return 1.0

    done = fit(kills_the_fork_server_once, [{}], tmp_path / "run", runners="process", n_workers=2)
    assert done.rewards == [1.0]
    [[first, second]] = attempts(tmp_path / "run")
    assert (first.status, second.status) == ("failed", "succeeded")


# -- in containers: tests/integration/test_images.py has those that need an image --------------------------------------


def test_containers_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"lxc.*\n.*podman"):
        agl.ProcessRunners(container="localhost/agent", engine="lxc")  # type: ignore[arg-type]
    runners = agl.ProcessRunners(container="localhost/agent")
    with pytest.raises(ConfigError, match="gateways=2"):
        agl.Trainer(agl.Baseline(), runners=runners, gateways=2)
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(ConfigError, match="podman is not installed"):
        agl.Trainer(agl.Baseline(), runners=runners).fit("agent.py:agent", [{"q": "1"}])
