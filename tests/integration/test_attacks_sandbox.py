"""Attacks on the sandboxes of graded programs: each tries to reach another program, its judge or the machine."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from containers import own_image
from paths import pythonpath
from sandbox import needs_a_sandbox

from agl.errors import ConfigError, RewardError
from agl.rewards import Container, PythonTests
from agl.trainer.graders.programs import running
from agl.trainer.processes import bubblewrap, sandboxes
from agl.trainer.processes import container as container_module

needs_a_sandbox()

GRADER = PythonTests(timeout=10, cpu_seconds=3)
TASK = {"tests": ["assert f(41) == 7341", "assert f(-3) == 905"]}
GOOD = "def f(x): return {41: 7341, -3: 905}[x]"
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def found(code: str, grader: PythonTests = GRADER) -> str:
    """What a program's g() returns, told by the error that its f() raises."""
    (outcome,) = grader.outcomes({"tests": "assert f() == 'nothing'"}, f"{code}\ndef f(): raise Exception(repr(g()))")
    return outcome


# -- from one program to a later one ----------------------------------------------------------------------------------

CHANNELS = {
    "a file in /tmp": ("open('/tmp/x', 'w').write('905')", "open('/tmp/x').read()"),
    "a file in /dev/shm": ("open('/dev/shm/x', 'w').write('905')", "open('/dev/shm/x').read()"),
    "shared memory of POSIX": (
        "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory('x', True, 8)",
        "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory('x').name",
    ),
    "shared memory of System V": ("libc.shmget(905, 4096, 0o1666)", "libc.shmget(905, 4096, 0o666)"),
    "the kernel's keyring": (
        "libc.syscall(248, b'user', b'x', b'905', 3, -4)",  # add_key, to the user's keyring
        "libc.syscall(249, b'user', b'x', None, -4)",
    ),
}


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_program_leaves_nothing_for_the_next(channel: str) -> None:
    write, read = CHANNELS[channel]
    first, then = (f"{LIBC}\ndef g():\n    try: return {part}\n    except OSError: return -1" for part in (write, read))
    found(first)
    assert found(then) == "Exception: -1"


def test_a_tests_leftovers_are_gone_before_the_next() -> None:
    code = "import os\ndef f(x):\n    open('/tmp/x', 'x'); open('/dev/shm/x', 'x'); open('x', 'x')\n    return x"
    assert GRADER.outcomes({"tests": ["assert f(1) == 1"] * 3}, code) == ["passed"] * 3


# -- to the one that judges it ----------------------------------------------------------------------------------------

THIEF = """
import os, struct, sys
frame = sys._getframe()
while frame:
    if nonce := frame.f_locals.get("nonce"):
        verdict = b"V" + nonce.encode() + b'["passed", "passed"]'
        os.write(4, struct.pack(">I", len(verdict)) + verdict)
        os._exit(0)
    frame = frame.f_back
"""
FORGER = f"__import__('builtins').exec({THIEF!r}) or 0"
"""Evaluated where the verdict is made, it finds the verdict's number, and passes."""
PATCHES = "setattr(__import__('builtins'), 'AssertionError', None) or __import__('os')._exit(0)"


class Forged:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (PATCHES,)


@pytest.mark.parametrize("answer", [FORGER, PATCHES, "[].append(globals().clear()) or 1", "__import__('sys').exit()"])
@pytest.mark.parametrize(
    "test", ["assert eval(f(3)) == 905", "n = {}\nexec('y = ' + f(3).strip(), n)\nassert n['y'] == 905"]
)
def test_an_answer_that_is_evaluated_cannot_pass_its_own_test(answer: str, test: str) -> None:
    assert GRADER({"tests": test}, f"def f(x): return {answer!r}") == 0.0


def test_an_answer_that_is_unpickled_cannot_pass_its_own_test() -> None:
    made = """
import os, pickle
class A:
    def __reduce__(self): return os._exit, (0,)
def f(x): return pickle.dumps(A())
"""
    assert GRADER({"tests": "import pickle\nassert pickle.loads(f(3)) == 905"}, made) == 0.0
    with pytest.raises(RewardError, match=r"use pickle\.loads"):
        GRADER({"tests": "import io, pickle\nassert pickle.load(io.BytesIO(f(3))) == 905"}, made)


def test_tests_that_evaluate_answers_still_work() -> None:
    tests = [
        "assert eval(f('2 * 3')) == 6",
        "x = 4\nassert eval(f('x * x + abs(-1)')) == 17",
        "def check(candidate):\n    y = 5\n    assert eval(candidate('y + 1')) == 6",
        "n = {'a': 2}\nexec(f('b = a + 1'), n)\nassert n['b'] == 3 and n['a'] == 2",
        "exec(f('def g(x): return x + 1'))\nassert g(1) == 2",
        "import math\nassert eval(f('math.floor(2.5)')) == 2",
        "import pickle\nassert pickle.loads(pickle.dumps(f([1, (2, 3)]))) == [1, (2, 3)]",
        "try:\n    eval(f('1 +'))\nexcept SyntaxError:\n    x = 1\nassert x == 1",
    ]
    for test in tests:
        task = {"tests": test} if "check" not in test else {"test": test, "entry_point": "f"}
        assert GRADER.outcomes(task, "def f(x): return x") == ["passed"], test


def test_a_program_cannot_stop_kill_or_trace_what_watches_it() -> None:
    code = (
        LIBC + "import signal\ndef g():\n"
        "    for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):\n"
        "        os.kill(1, s)\n"
        "    traced = [libc.ptrace(16, 1, 0, 0), libc.syscall(310, 1, None, 0, None, 0, 0), libc.ptrace(0, 0, 0, 0)]\n"
        "    for name in ('mem', 'environ', 'maps'):\n"
        "        try: traced.append(open(f'/proc/1/{name}', 'rb').read(1))\n"
        "        except OSError: traced.append(-1)\n"
        "    try: traced.append(os.listdir('/proc/1/fd'))\n"
        "    except OSError: traced.append(-1)\n"
        "    return traced"
    )
    assert found(code) == f"Exception: {[-1] * 7}"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
def test_a_program_that_signals_its_parents_fails_alone(signum: signal.Signals) -> None:
    """SIGSTOP once stopped the process that all programs were forked from, and honest ones got 0."""
    code = f"import os\nos.kill(os.getppid(), {int(signum)}); os.kill(-1, {int(signum)})\n{GOOD}"
    GRADER(TASK, code)
    assert GRADER(TASK, GOOD) == 1.0


def test_what_the_trainer_ignores_still_ends_a_program() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        test_every_signal_that_ends_a_program_is_its_own_failure(1)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [1, 19, 34, 40, 64])
def test_every_signal_that_ends_a_program_is_its_own_failure(number: int) -> None:
    """Real-time signals have no name in Python, which must not become an error of the grader."""
    (outcome,) = GRADER.outcomes({"tests": "assert f(1)"}, f"import os\nos.kill(os.getpid(), {number})\nos._exit(3)")
    assert outcome == {
        1: "killed by SIGHUP",
        19: "ran out of time",
        34: "killed by SIGRTMIN",
        64: "killed by SIGRTMAX",
    }.get(number, f"killed by signal {number}")


def test_a_trainer_with_many_open_files_can_grade() -> None:
    """`select` knows no descriptor above 1,023, and a gateway has thousands of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)]
    try:
        running.pool.cache_clear()
        assert GRADER(TASK, GOOD) == 1.0
        assert GRADER({"test_cases": [{"input": "1", "output": "2"}]}, "print(int(input()) + 1)") == 1.0
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        running.pool.cache_clear()


def test_a_judge_that_died_while_it_waited_is_nobodys_failure() -> None:
    running.pool.cache_clear()
    assert GRADER(TASK, GOOD) == 1.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "agl.trainer.graders.programs" in " ".join(process.cmdline()):
                process.kill()
    time.sleep(0.5)
    with contextlib.suppress(RewardError):  # the spares have died, too
        GRADER(TASK, GOOD)
    with contextlib.suppress(RewardError):
        GRADER(TASK, GOOD)
    assert GRADER(TASK, GOOD) == 1.0


# -- to the machine ---------------------------------------------------------------------------------------------------

CALLS = {
    "vsock": "libc.socket(40, 1, 0)",
    "packets": "libc.socket(17, 3, 0)",
    "crypto of the kernel": "libc.socket(38, 5, 0)",
    "io_uring": "libc.syscall(425, 4, 0)",
    "bpf": "libc.syscall(321, 0, 0, 0)",
    "userfaultfd": "libc.syscall(323, 1)",
    "anonymous files": "libc.memfd_create(b'x', 0)",
    "a user namespace": "libc.unshare(0x10000000)",
    "a user namespace by clone": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "a mount": "libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)",
    "shared memory": "libc.shmget(0, 1 << 20, 0o1600)",
    "a keyring": "libc.syscall(250, 0, -3, 0)",
    "root": "libc.setuid(0)",
    "a second root": "libc.chroot(b'/usr')",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls are x86-64's")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_leads_out_is_refused(call: str) -> None:
    assert found(f"{LIBC}\ndef g(): return {CALLS[call]}") == "Exception: -1"


def test_files_without_content_are_bounded_too() -> None:
    many = "import os\nfor i in range(10**9): os.close(os.open(f'/tmp/{i}', os.O_CREAT))"
    assert GRADER.outcomes(TASK, many)[0] in (
        "made too many files",
        "OSError: [Errno 28] No space left on device: '/tmp",
    )
    folders = "import os\nwhile True: os.mkdir('d'); os.chdir('d')"
    assert GRADER(TASK, folders) == 0.0
    assert GRADER(TASK, GOOD) == 1.0


def test_the_rest_of_the_machine_is_not_there() -> None:
    assert (
        found("import os\ndef g(): return sorted(os.listdir('/home')) if os.path.exists('/home') else []")
        == "Exception: []"
    )
    assert found("import socket\ndef g(): return [name for _, name in socket.if_nameindex()]") == "Exception: ['lo']"
    assert "Read-only" in found("def g(): return open('/x', 'w')")
    assert "Read-only" in found("def g(): return open('/dev/x', 'w')")


@pytest.mark.parametrize("program", ["while True: pass", "import os, time\nos.fork()\ntime.sleep(1000)"])
def test_a_trainer_that_is_killed_leaves_no_program_behind(program: str) -> None:
    start = f"from agl.rewards import PythonTests\nPythonTests(timeout=100, cpu_seconds=100)({TASK!r}, {program!r})"
    trainer = subprocess.Popen([sys.executable, "-c", start], env={**os.environ, "PYTHONPATH": pythonpath()})
    ours: list[psutil.Process] = []
    for _ in range(600):
        ours = psutil.Process(trainer.pid).children(recursive=True)
        # A program and its judge, and two spares: bwrap and the first process of each, and what the program forks.
        if len(ours) >= 9:
            break
        time.sleep(0.05)
    assert len(ours) >= 9
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(ours, timeout=20)
    assert alive == []


AS_ANYBODY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from agl.trainer.graders.programs import running
from agl.trainer.processes.sandboxes import chosen

cells = running.pool(chosen("bubblewrap"), sys.executable, 512, 16, 8, os.getpid())
job = dict(timeout=10, total_timeout=60, cpu_seconds=5, memory_mb=512, file_mb=16, processes=8)
for code in sys.argv[2:]:
    test = {"kind": "python", "code": "assert f() == 1", "call": None}
    print(*running.outcomes(cells, job | {"code": code, "tests": [test]}))
"""
FORKS = """
import os, time
def f():
    for started in range(100):
        try:
            if os.fork() == 0: time.sleep(99)
        except OSError: raise Exception(started)
"""


def test_any_user_can_have_a_sandbox_where_user_namespaces_are_allowed() -> None:
    python = "/usr/bin/python3"
    if os.getuid() != 0 or not shutil.which("setpriv") or not os.access(python, os.X_OK):
        pytest.skip("needs root to become another user, and a Python that others can read")
    source = pythonpath().split(os.pathsep)[0]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(f"{source}/agl", f"{folder}/agl", ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder).chmod(0o755)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", AS_ANYBODY, folder]
        codes = ["def f(): return 1", FORKS, "import os\ndef f(): return os.listdir('/proc/1/fd')"]
        done = subprocess.run([*command, *codes], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    denied = "PermissionError: [Errno 13] Permission denied: '/proc/1/fd'"
    assert done.stdout.splitlines() == ["passed", "Exception: 8", denied]


HOARDER = """
import os, time
def f():
    for number in range(6):
        if os.fork() == 0:
            try:
                while True: os.dup(0)
            except OSError: pass
            time.sleep(2)
            kept = bytearray(150 << 20)
            for i in range(0, len(kept), 4096): kept[i] = 1
            time.sleep(99)
    time.sleep(99)
"""
"""Six processes with all descriptors that they can have, and with 900 MiB, of which each may have 512."""


def supervisor_of_many() -> int | None:
    """The process that watches a program with six children."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if len(process.children()) == 6:
                return process.ppid()
    return None


def test_memory_is_limited_where_a_program_takes_all_its_descriptors() -> None:
    grader = PythonTests(timeout=30, memory_mb=512)
    assert grader.outcomes({"tests": "assert f()"}, HOARDER) == ["used too much memory"]


@pytest.mark.parametrize("left", ["none but its own", "none"])
def test_memory_is_limited_where_the_supervisor_has_no_descriptors_left(left: str) -> None:
    """One that could open no file counted no memory at all. Without walls this user may take them from it."""
    grader = PythonTests(timeout=30, memory_mb=512, isolation="none")
    with ThreadPoolExecutor(1) as threads:
        outcome = threads.submit(grader.outcomes, {"tests": "assert f()"}, HOARDER)
        while (supervisor := supervisor_of_many()) is None:
            assert not outcome.done(), outcome.result()
            time.sleep(0.02)
        taken = {int(number) for number in os.listdir(f"/proc/{supervisor}/fd")}
        used = min({*range(len(taken) + 1)} - taken)
        _, most = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3 if left == "none" else used, most))
        unmeasured = "used memory that could not be measured"
        assert outcome.result() == [unmeasured if left == "none" else "used too much memory"]


# -- where there is none ----------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without a program that makes sandboxes."""
    sandboxes._named.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    sandboxes._named.cache_clear()


def test_without_a_sandbox_no_program_is_run(bare: None) -> None:
    with pytest.raises(ConfigError, match=r"bwrap is not installed.*\n?.*apt-get install bubblewrap") as refused:
        PythonTests()
    assert 'isolation="none"' in str(refused.value)
    with pytest.raises(ConfigError, match="podman is not installed"):
        PythonTests(isolation="podman")
    assert PythonTests(isolation="none").isolation == "none"


def test_an_unknown_isolation_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'bubblewrap', 'podman', 'docker', 'none'"):
        PythonTests(isolation="required")


def test_a_filter_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> bytes:
        raise OSError("libseccomp.so.2: cannot open shared object file")

    monkeypatch.setattr(bubblewrap, "_filter", missing)
    assert "libseccomp cannot be used" in str(bubblewrap.Bubblewrap().problem())


def test_without_walls_a_program_is_limited_and_its_children_end(caplog: pytest.LogCaptureFixture) -> None:
    grader = PythonTests(isolation="none", timeout=5)
    assert grader.outcomes({"tests": ["assert f(1) == 1"] * 2}, "def f(x): return x") == ["passed"] * 2
    code = """
import subprocess, time
def f(x):
    subprocess.Popen(["sleep", "1000.0875"], start_new_session=True)
    time.sleep(9)
"""
    assert grader.outcomes({"tests": ["assert f(1) == 1"]}, code) == ["ran out of time"]
    patient = PythonTests(isolation="none", timeout=60, cpu_seconds=1)
    assert patient.outcomes({"tests": "assert f(1)"}, "while True: pass") == ["killed by SIGXCPU"]
    for _ in range(100):
        if not any("1000.0875" in p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]):
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the program started still runs")


def test_the_memory_of_the_trainer_does_not_grow_with_what_programs_print() -> None:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    task = {"test_cases": [{"input": "", "output": "x"}]}
    threads = [threading.Thread(target=GRADER, args=(task, "while True: print('x' * 10**6)")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own < 300_000


# -- a container ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with own_image(tmp_path_factory.mktemp("image")) as sandbox:
        yield sandbox
        running.pool.cache_clear()  # its spares end


def test_a_container_holds_a_program(container: Container) -> None:
    grader = PythonTests(isolation=container, timeout=20, cpu_seconds=3)
    assert grader.outcomes(TASK, GOOD) == ["passed"] * 2
    assert grader({"test_cases": [{"input": "1", "output": "2"}]}, "print(int(input()) + 1)") == 1.0
    assert "Read-only" in found("def g(): return open('/usr/x', 'w')", grader)
    names = "import socket\ndef g(): return [name for _, name in socket.if_nameindex()]"
    assert found(names, grader) == "Exception: ['lo']"
    assert found("import os\ndef g(): return os.listdir('/proc/1/fd')", grader).startswith("PermissionError")
    assert found("import os\ndef g(): return sum(p.isdigit() for p in os.listdir('/proc'))", grader) == "Exception: 2"
    if os.uname().machine == "x86_64":
        a_call_that_leads_out_is_refused(grader)
    short = PythonTests(isolation=container, timeout=2)
    assert short.outcomes({"tests": "assert f(1)"}, "import time\ntime.sleep(99)") == ["ran out of time"]


def a_call_that_leads_out_is_refused(grader: PythonTests) -> None:
    every = ", ".join(call for name, call in CALLS.items() if name != "a user namespace by clone")
    assert found(f"{LIBC}\ndef g(): return [{every}]", grader) == f"Exception: {[-1] * (len(CALLS) - 1)}"
    assert found(f"{LIBC}\ndef g(): return {CALLS['a user namespace by clone']}", grader) == "Exception: -1"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls are x86-64's")
@pytest.mark.parametrize("channel", CHANNELS)
def test_nothing_is_left_in_a_container(container: Container, channel: str) -> None:
    grader = PythonTests(isolation=container, timeout=20, cpu_seconds=3)
    first, then = (f"{LIBC}\ndef g():\n    try: return {x}\n    except OSError: return -1" for x in CHANNELS[channel])
    found(first, grader)
    assert found(then, grader) == "Exception: -1"


def test_podman_is_given_the_filter_that_bubblewrap_has() -> None:
    rules = json.loads(Path(container_module.__file__).with_name("seccomp.json").read_text())["syscalls"]
    names = {name for rule in rules if "args" not in rule for name in rule["names"]}
    assert names == {*" ".join(bubblewrap._DENIED).split(), "clone3"}
    of = {kind: {rule["args"][0]["value"] for rule in rules if rule["names"] == [kind]} for kind in ("clone", "socket")}
    assert of == {"clone": {*bubblewrap._NAMESPACES}, "socket": {*range(65)} - {*bubblewrap._FAMILIES}}


@pytest.mark.night
def test_an_image_that_is_not_there_is_said_with_the_line_that_pulls_it(container: Container) -> None:
    assert "podman pull localhost/none" in str(Container("podman", "localhost/none").problem())
