"""Rented sandboxes, through their own SDKs and a server that speaks their protocols: they run what others run, hold
what is to be held, and are given back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import psutil
import pytest
from e2b_server import KEY, Server, serving

from agl.errors import ConfigError, MissingExtraError, RewardError
from agl.rewards import PythonTests
from agl.trainer.graders.programs import running

TASK = {"tests": ["assert f(41) == 7341", "assert f(-3) == 905"]}
GOOD = "def f(x): return {41: 7341, -3: 905}[x]"


@pytest.fixture
def e2b(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("e2b", reason="e2b's SDK is not installed: pip install ./guests/sandboxes")
    if os.getuid() != 0 or not shutil.which("bwrap") or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("the server's machines need root, bubblewrap and a Python in /usr/bin")
    with serving() as server:
        monkeypatch.setenv("E2B_API_KEY", KEY)
        monkeypatch.setenv("E2B_API_URL", server.url)
        monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
        monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
        yield server
        running.pool.cache_clear()


def test_a_rented_machine_runs_a_program_and_holds_it(e2b: Server) -> None:
    grader = PythonTests(isolation="e2b", timeout=20, cpu_seconds=3)
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
    assert grader.outcomes(task, "while True: print('x' * 10**6)") == ["printed too much"]
    short = PythonTests(isolation="e2b", timeout=2)
    assert short.outcomes({"tests": "assert f(1)"}, "import time\ntime.sleep(99)") == ["ran out of time"]
    for machine in e2b.machines.values():
        assert machine.request["allow_internet_access"] is False
        assert 0 < machine.request["timeout"] <= 600
        assert machine.user in ("root", "")


def test_one_answer_finds_nothing_of_another(e2b: Server) -> None:
    grader = PythonTests(isolation="e2b", timeout=20)
    write = "def f():\n    for p in ('/tmp/x', '/dev/shm/x', '/var/tmp/x'): open(p, 'w').write('905')\n    return 1"
    read = "import os\ndef f(): return sum(os.path.exists(p) for p in ('/tmp/x', '/dev/shm/x', '/var/tmp/x'))"
    assert grader.outcomes({"tests": "assert f() == 1"}, write) == ["passed"]
    assert grader.outcomes({"tests": "assert f() == 0"}, read) == ["passed"]


def test_machines_are_given_back(e2b: Server) -> None:
    grader = PythonTests(isolation="e2b", timeout=20)
    for _ in range(3):
        assert grader.outcomes(TASK, GOOD) == ["passed"] * 2
    # Each answer had one of its own; a judge and the spares wait for the next.
    for _ in range(100):
        if sum(not machine.ended for machine in e2b.machines.values()) <= 1 + running.SPARES:
            break
        time.sleep(0.1)
    assert len(e2b.machines) >= 4
    assert sum(not machine.ended for machine in e2b.machines.values()) <= 1 + running.SPARES


def command(process: psutil.Process) -> str:
    """Its command line; "" of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_machine_lives_as_long_as_its_bridge_and_little_longer(e2b: Server) -> None:
    from agl_sandboxes import E2B

    grader = PythonTests(isolation=E2B(seconds=3), timeout=20)
    assert grader(TASK, GOOD) == 1.0
    time.sleep(5)
    waiting = [machine for machine in e2b.machines.values() if not machine.ended]
    assert grader(TASK, GOOD) == 1.0, "the machines that waited have ended"
    bridges = [p for p in psutil.Process().children() if "it.bridge()" in command(p)]
    assert len(bridges) >= len(waiting) > 0
    time.sleep(2)  # until all of them are ready
    for bridge in bridges:
        bridge.kill()
    psutil.wait_procs(bridges, timeout=10)
    rented = [*e2b.machines.values()]
    with pytest.raises(RewardError, match="a sandbox ended while it waited"):
        grader(TASK, GOOD)
    for _ in range(100):
        if all(machine.ended for machine in rented):
            break
        time.sleep(0.1)
    assert all(machine.ended for machine in rented)


def test_what_is_missing_is_said_before_anything_is_rented(e2b: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(ConfigError, match="E2B_API_KEY is not set"):
        PythonTests(isolation="e2b")
    assert e2b.machines == {}


def test_a_key_that_is_refused_is_nobodys_failure(e2b: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_fedcba")
    with pytest.raises(RewardError, match="no machine of e2b: AuthenticationException"):
        PythonTests(isolation="e2b", timeout=20)(TASK, GOOD)


def test_without_the_distribution_the_line_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install \./guests/sandboxes"):
        PythonTests(isolation="e2b")
