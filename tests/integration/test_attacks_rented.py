"""Rented sandboxes, through their own SDKs and a server that speaks their protocols: they run what others run, hold
what is to be held, and are given back. What is lost in between is nobody's failure."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from rented_machines import Machine, Server, serving

import agl_sandboxes
from agl.errors import ConfigError, MissingExtraError, RewardError
from agl.rewards import PythonTests
from agl.trainer.graders.programs import running

TASK = {"tests": ["assert f(41) == 7341", "assert f(-3) == 905"]}
GOOD = "def f(x): return {41: 7341, -3: 905}[x]"


@dataclass
class Provider:
    """A provider's name in `isolation=`, what we know of it, and our server."""

    name: str
    ours: Any
    server: Server


@pytest.fixture(params=["e2b", "daytona"])
def rented(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    name = request.param
    pytest.importorskip(name, reason=f'{name}\'s SDK is not installed: pip install "./guests/sandboxes[{name}]"')
    if os.getuid() != 0 or not shutil.which("bwrap") or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("the server's machines need root, bubblewrap and a Python in /usr/bin")
    ours = importlib.import_module(f"{name}_server")
    with serving(ours.Handler) as server:
        for variable, value in ours.variables(server.url).items():
            monkeypatch.setenv(variable, value)
        yield Provider(name, ours, server)
        running.pool.cache_clear()


def test_a_rented_machine_runs_a_program_and_holds_it(rented: Provider) -> None:
    grader = PythonTests(isolation=rented.name, timeout=20, cpu_seconds=3)
    assert grader.outcomes(TASK, GOOD) == ["passed"] * 2
    assert grader({"test_cases": [{"input": "1", "output": "2"}]}, "print(int(input()) + 1)") == 1.0
    assert (
        grader({"tests": "assert f(0) == bytes(range(256)) * 300"}, "def f(x): return bytes(range(256)) * 300") == 1.0
    )

    def found(code: str) -> str:
        (outcome,) = grader.outcomes({"tests": "assert f() == 1"}, f"import os\ndef f(): raise Exception({code})")
        return outcome

    assert found("os.getuid() > 0, os.getpid() > 1") == "Exception: (True, True)"
    assert (
        found("sorted(os.environ)")
        == "Exception: ['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']"
    )
    assert found("os.listdir('/proc/1/fd')").startswith("PermissionError")
    assert found("os.kill(1, 9) or 5") in ("Exception: 5", "PermissionError: [Errno 1] Operation not permitted")
    assert found("[p for p in os.listdir('/proc') if p.isdigit()].__len__()") == "Exception: 2"
    assert found("os.setuid(0)").startswith("PermissionError")
    assert found("open('/agl/x', 'w')").startswith("PermissionError")
    big = "def f(x):\n    with open('/tmp/x', 'wb') as file:\n        for _ in range(10**4): file.write(bytes(1 << 20))"
    assert grader.outcomes({"tests": "assert f(1) == 1"}, big)[0].startswith(("OSError", "killed by SIGXFSZ"))
    task = {"test_cases": [{"input": "", "output": "x"}]}
    little = PythonTests(isolation=rented.name, timeout=20, file_mb=1)
    assert little.outcomes(task, "while True: print('x' * 10**6)") == ["printed too much"]
    short = PythonTests(isolation=rented.name, timeout=2)
    assert short.outcomes({"tests": "assert f(1)"}, "import time\ntime.sleep(99)") == ["ran out of time"]
    # Longer than a machine may be silent.
    long = PythonTests(isolation=rented.name, timeout=7, cpu_seconds=20)
    assert long.outcomes({"tests": "assert f(1)"}, "while True: pass") == ["ran out of time"]
    for machine in rented.server.machines.values():
        assert rented.ours.REQUEST.items() <= machine.request.items()
        assert machine.user in ("root", "")


def inside(machine: Machine) -> list[psutil.Process]:
    """The processes of a machine, from outside."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(machine.process.pid).children(recursive=True) if machine.process else []
    return []


def test_a_program_has_a_network_of_its_own(rented: Provider) -> None:
    """On the machine's, a service of the provider's may run any command, for everybody and as root."""
    code = """
import os, socket, threading
def f():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=lambda: listening.accept()[0].sendall(b"heard")).start()
        with socket.create_connection(listening.getsockname()) as connection:
            raise Exception(connection.recv(5).decode(), os.readlink("/proc/self/ns/net"))
"""
    (outcome,) = PythonTests(isolation=rented.name, timeout=20).outcomes({"tests": "assert f() == 1"}, code)
    assert outcome.startswith("Exception: ('heard', 'net:["), outcome
    networks = [path.read_text().strip() for path in rented.server.folder.glob("*/network")]
    assert networks
    assert not any(network in outcome for network in networks if network)


def test_one_answer_finds_nothing_of_another(rented: Provider) -> None:
    grader = PythonTests(isolation=rented.name, timeout=20)
    write = "def f():\n    for p in ('/tmp/x', '/dev/shm/x', '/var/tmp/x'): open(p, 'w').write('905')\n    return 1"
    read = "import os\ndef f(): return sum(os.path.exists(p) for p in ('/tmp/x', '/dev/shm/x', '/var/tmp/x'))"
    assert grader.outcomes({"tests": "assert f() == 1"}, write) == ["passed"]
    assert grader.outcomes({"tests": "assert f() == 0"}, read) == ["passed"]


def test_machines_are_given_back(rented: Provider) -> None:
    grader = PythonTests(isolation=rented.name, timeout=20)
    for _ in range(3):
        assert grader.outcomes(TASK, GOOD) == ["passed"] * 2
    # Each answer had one of its own; a judge and the spares wait for the next.
    for _ in range(100):
        if sum(not machine.ended for machine in rented.server.machines.values()) <= 1 + running.SPARES:
            break
        time.sleep(0.1)
    assert len(rented.server.machines) >= 4
    assert sum(not machine.ended for machine in rented.server.machines.values()) <= 1 + running.SPARES


def command(process: psutil.Process) -> str:
    """Its command line; "" of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_the_end_of_an_answer_is_not_kept_back(rented: Provider) -> None:
    """SDKs may wait for more when a piece of output is short: here pieces are of 1,024 bytes."""
    task = {"tests": "assert all(f(768 * k + n) == 'x' * (768 * k + n) for k in range(10) for n in range(744, 751))"}
    assert PythonTests(isolation=rented.name, timeout=20).outcomes(task, "def f(n): return 'x' * n") == ["passed"]


def test_a_machine_lives_as_long_as_its_bridge_and_little_longer(rented: Provider) -> None:
    rented.server.minute = 3.0  # minutes are the least that some take
    grader = PythonTests(isolation=type(agl_sandboxes.NAMED[rented.name])(seconds=3), timeout=20)
    assert grader(TASK, GOOD) == 1.0
    time.sleep(5)
    waiting = [machine for machine in rented.server.machines.values() if not machine.ended]
    assert grader(TASK, GOOD) == 1.0, "the machines that waited have ended"
    bridges = [p for p in psutil.Process().children() if "it.bridge()" in command(p)]
    assert len(bridges) >= len(waiting) > 0
    time.sleep(2)  # until all of them are ready
    for bridge in bridges:
        bridge.kill()
    psutil.wait_procs(bridges, timeout=10)
    machines = [*rented.server.machines.values()]
    with pytest.raises(RewardError, match="a sandbox ended while it waited"):
        grader(TASK, GOOD)
    for _ in range(100):
        if all(machine.ended for machine in machines):
            break
        time.sleep(0.1)
    assert all(machine.ended for machine in machines)


@pytest.mark.parametrize("lost", ["all", "the program's", "the judge's", "what it says"])
def test_a_machine_that_is_lost_in_the_middle_is_nobodys_failure(rented: Provider, lost: str) -> None:
    code = "import time\ndef f(x):\n    open('/dev/shm/here', 'w').close()\n    time.sleep(5)\n    return 7341"
    machines = rented.server.machines

    def has_program(machine: Machine) -> bool:
        return any(os.path.exists(f"/proc/{process.pid}/root/dev/shm/here") for process in inside(machine))

    def lose() -> None:
        while not (program := {id for id, machine in [*machines.items()] if has_program(machine)}):
            time.sleep(0.1)
        if lost == "all":
            rented.server.die()
        if lost == "what it says":
            rented.server.flows.clear()
        for id in program if lost == "the program's" else machines.keys() - program if lost == "the judge's" else ():
            machines[id].end()

    losing = threading.Thread(target=lose, daemon=True)
    losing.start()
    grader = PythonTests(isolation=rented.name, timeout=30)
    with pytest.raises(RewardError, match=f"cannot run the task's tests: lost a machine of {rented.name}: "):
        grader.outcomes({"tests": "assert f(41) == 7341"}, code)  # alone: the next test might raise, too
    losing.join()
    if lost == "the program's":
        assert grader(TASK, GOOD) == 1.0


def test_what_a_template_lacks_is_named(rented: Provider) -> None:
    rented.server.hidden = "unshare"
    with pytest.raises(RewardError, match=f"lost a machine of {rented.name}: .*Permission denied: 'unshare'"):
        PythonTests(isolation=rented.name, timeout=20)(TASK, GOOD)


def test_what_is_missing_is_said_before_anything_is_rented(rented: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rented.ours.KEY_VARIABLE)
    with pytest.raises(
        ConfigError, match=f"{rented.ours.KEY_VARIABLE} is not set: it is your API key of {rented.name}"
    ):
        PythonTests(isolation=rented.name)
    monkeypatch.setattr("agl_sandboxes.rented.find_spec", lambda name: None)
    line = rf'pip install "\./guests/sandboxes\[{rented.name}\]"'
    with pytest.raises(ConfigError, match=f"{rented.name} is not installed: in the root of the agl clone: {line}"):
        PythonTests(isolation=rented.name)
    assert rented.server.machines == {}


def test_a_key_that_is_refused_is_nobodys_failure(rented: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rented.ours.KEY_VARIABLE, "of somebody else")
    with pytest.raises(RewardError, match=f"no machine of {rented.name}: {rented.ours.REFUSED}"):
        PythonTests(isolation=rented.name, timeout=20)(TASK, GOOD)


@pytest.mark.parametrize("name", ["e2b", "daytona"])
def test_without_the_distribution_the_line_that_installs_it_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install \./guests/sandboxes"):
        PythonTests(isolation=name)
