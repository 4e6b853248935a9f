"""Hostile programs and queries: none is graded well for what it does not compute, and none reaches the machine.

Each attack runs for real. It has succeeded if it passes a test, reads or changes what is not its own, or takes more of
the machine than it was given.
"""

from __future__ import annotations

import contextlib
import os
import resource
import site
import socket
import sqlite3
import subprocess
import tempfile
import threading
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from paths import pythonpath
from postgres import Server
from sandbox import needs_a_sandbox

from agl.errors import RewardError
from agl.rewards import PythonTests, SQLResult

needs_a_sandbox()

TASK = {"tests": ["assert f(41) == 7341", "assert f(-3) == 905"]}
CHECK = {"test": "def check(candidate):\n    assert candidate(41) == 7341\n", "entry_point": "f"}
GRADER = PythonTests(timeout=10, cpu_seconds=2)

SIX = {
    "frames": """
import sys
def f(x):
    constants = sys._getframe(1).f_code.co_consts
    return next(c for c in constants if type(c) is int and c not in (x, -x, 3, 41))
""",
    "check replaced": """
import sys
for module in list(sys.modules.values()):
    for name in ("check", "evaluate", "lines", "_evaluate"):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: None)
def f(x): return 0
""",
    "the word in memory": """
import os, sys
frame = sys._getframe()
while frame:
    secret = frame.f_locals.get("secret")
    if secret:
        os.write(4, b"L" + secret)
        os._exit(0)
    frame = frame.f_back
def f(x): return 0
""",
    "equal to all": """
class Equal(int):
    def __eq__(self, other): return True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
def f(x): return Equal()
""",
    "a forged report": """
import json, os, signal
report = json.dumps(["passed", "passed"]).encode()
for pid in [os.getppid(), *(int(p) for p in os.listdir("/proc") if p.isdigit())]:
    for fd in range(1, 20):
        try:
            os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), report)
            break
        except OSError:
            pass
    else:
        continue
    break
os.kill(os.getppid() or os.getpid(), signal.SIGKILL)
""",
    "the driver killed": """
import os, signal
parent = os.getppid()
if os.fork() == 0:
    os.setsid()
    os.write(os.open(f"/proc/{parent}/fd/1", os.O_WRONLY), b'["passed", "passed"]')
    os.kill(parent or os.getpid(), signal.SIGTERM)
def f(x):
    while True: pass
""",
}


@pytest.mark.parametrize("attack", SIX)
def test_a_program_that_goes_for_its_judge_passes_nothing(attack: str) -> None:
    assert GRADER(TASK, SIX[attack]) == 0.0
    assert GRADER(CHECK, SIX[attack]) == 0.0
    assert GRADER(TASK, "def f(x): return {41: 7341, -3: 905}[x]") == 1.0


LIAR = """
import operator
class Liar:
    def __init__(self, *_): pass
    def __call__(self, *_, **__): return self
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return lambda *_, **__: True
    __class__ = property(lambda self: int)
    def _true(self, *_): return True
    def _zero(self, *_): return 0
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = __instancecheck__ = _true
    __sub__ = __rsub__ = __abs__ = __round__ = __mod__ = __xor__ = __and__ = __len__ = __hash__ = _zero
    __int__ = __index__ = __float__ = __iter__ = __array__ = _zero
"""


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("assert f(3) == 905", LIAR + "def f(x): return Liar()"),
        ("assert not f(3) != 905", LIAR + "def f(x): return Liar()"),
        ("assert abs(f(3) - 905) < 1e-6", LIAR + "def f(x): return Liar()"),
        ("assert 905 in f(3)", LIAR + "def f(x): return Liar()"),
        ("assert f(3) in (905,)", LIAR + "def f(x): return Liar()"),
        ("assert {905: 1}[f(3)]", LIAR + "def f(x): return Liar()"),
        ("assert f(3).startswith('905')", LIAR + "def f(x): return Liar()"),
        ("assert {9, 0, 5}.issubset(f(3)) and f(3).issuperset({9, 0, 5})", LIAR + "def f(x): return Liar()"),
        ("assert isinstance(f(3), int) and f(3) > 900", LIAR + "def f(x): return Liar()"),
        ("assert (f(3) ^ 905) == 0", LIAR + "def f(x): return Liar()"),
        ("assert Solution().f(3).startswith('905')", LIAR + "Solution = Liar()"),
        ("assert Solution().f(3).startswith('905')", LIAR + "class Solution(Liar):\n    def f(self, x): return self"),
        ("assert len(f(3)) == 1 and f(3)[0] == 905", LIAR + "def f(x): return [Liar()]"),
        ("assert f(3) == {'a': 905}", LIAR + "def f(x): return {'a': Liar()}"),
        # Names that tests take for Python's or for a module's.
        ("assert abs(f(3) - 905) < 1e-6", "abs = lambda x: 0\ndef f(x): return 1"),
        ("assert sorted(f(3)) == [905]", "import builtins\nsorted = builtins.sorted = lambda x: [905]\nf = str"),
        ("assert math.isclose(f(3), 905)", "class math:\n    isclose = lambda *_: True\ndef f(x): return 1"),
        ("import math\nassert math.isclose(f(3), 905)", "import math\nmath.isclose = lambda *_: True\nf = abs"),
        ("assert f(3) == 905", "AssertionError = None\ndef f(x): return 1"),
        # Ends of loops.
        ("assert all(map(lambda x: f(x) == 905, [1, 2]))", "def f(x): raise StopIteration"),
        ("assert all(f(x) == 905 for x in [1, 2])", "def f(x): raise StopIteration"),
        ("assert all(map(lambda x: f(x) == 905, [1, 2]))", "class E(StopIteration): pass\ndef f(x): raise E"),
        ("assert all(map(lambda x: f(x) == 905, [1, 2]))",
         "import os\ndef f(x):\n    os.write(4, b'\\0\\0\\0\\x0e{\"stop\": true}')\n    while True: pass"),
        ("assert len(f(3)) == 2 and all(a == b for a, b in zip(f(3), [9, 5]))",
         "class Short:\n    __len__ = lambda s: 2\n    __iter__ = lambda s: iter([])\ndef f(x): return Short()"),
        # Errors that a test may not have foreseen.
        ("assert f(3) == 905", "def f(x): raise SystemExit(0)"),
        ("assert f(3) == 905", "def f(x): raise KeyboardInterrupt"),
        ("assert f(3) == 905", "import os\ndef f(x): os._exit(0)"),
        ("assert f(3) == 905", "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit"),
        ("try:\n    f(3)\nexcept BaseException:\n    pass\nassert True", "import os\ndef f(x): os._exit(0)"),
        # What is sent in place of answers. The socket is its only one.
        *(
            ("assert f(3) == 905", f"import os, struct, time\ndef f(x):\n    os.write(4, {data}); time.sleep(60)")
            for data in (
                "struct.pack('>I', 0xFFFFFFFF)",
                "struct.pack('>I', 4) + b'true'",
                "struct.pack('>I', 7) + b'\"passed'",
                "struct.pack('>I', 17) + b'{\"passed\": \"true\"}'[:17]",
                "b'L[\"passed\", \"passed\"]' * 5",
                "struct.pack('>I', 25) + b'{\"value\": [\"object\", -1e9]}'[:25]",
                "struct.pack('>I', 400011) + b'{\"value\": ' + b'[' * 200000 + b']' * 200000 + b'}'",
                "struct.pack('>I', 26) + b'{\"call\": 0, \"arguments\": 1}'[:26]",
            )
        ),
        ("assert f(3) == 905", "import json\njson.dumps = lambda *_: '{\"value\": 905.5}'\ndef f(x): return 1"),
        ("assert f(3) == 905", "def f(x):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a"),
        ("assert f(3) == 905", "def f(x):\n    a = []\n    a.append(a)\n    return a"),
        ("assert f(3) == 905", "def f(x): return 1 << 80_000_000"),
        ("assert f(3) == 905", "def f(x): return 'x' * 200_000_000"),
        ("assert f(3) == 905", "def f(x): return [[] for _ in range(30_000_000)]"),
        ("assert list(f(3)) == [905]", "def f(x):\n    while True: yield 905"),
        ("assert f(3) == '905'", "def f(x): return '\\udcff905'"),
        ("assert f(3) == 905", "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)"),
        ("assert f(3) == 905", "from threading import *\ndef f(x): Thread(target=Event().wait).start()"),
    ],
)  # fmt: skip
def test_a_program_that_lies_passes_nothing(test: str, code: str) -> None:
    assert PythonTests(timeout=5, cpu_seconds=3)({"tests": test}, code) == 0.0


@pytest.mark.parametrize(
    ("tests", "code"),
    [
        ("assert f((1, 2)) == ((1, 2), [1, 2])", "def f(x): return (x, list(x))"),
        ("assert f([1]) != (1,) and f([1]) == [1]", "def f(x): return x"),
        ("assert f({1, 2}) == {2, 1} and f(frozenset([1])) == frozenset([1])", "def f(x): return x"),
        ("assert f({(1, 2): {3: None}}) == {(1, 2): {3: None}}", "def f(x): return x"),
        ("assert f(b'a\\xff') == b'a\\xff' and f(2**200) == 2**200 and f(-0.5) == -0.5", "def f(x): return x"),
        ("assert f(float('inf')) > 1e308 and f(float('nan')) != f(float('nan'))", "def f(x): return x"),
        ("assert abs(f(1/3) - 0.333333333) < 1e-6 and f(True) is True", "def f(x): return x"),
        ("assert f(3) == {'a': 2, 'b': 1}", "from collections import Counter\ndef f(x): return Counter('aab')"),
        ("from collections import Counter\nassert f(Counter('aab')) == 'a'",
         "def f(x): return x.most_common()[0][0]"),
        ("assert list(f(3)) == [0, 1, 2] and next(f(3)) == 0", "def f(n): yield from range(n)"),
        ("assert [x for x in f([3, 1])] == [1, 3]", "def f(x): return map(int, sorted(x))"),
        ("assert f([3, 1], key=lambda x: -x) == [3, 1]", "def f(x, key): return sorted(x, key=key)"),
        ("assert f(len, ['ab']) == [2] and f(str, [1]) == ['1']", "def f(g, x): return list(map(g, x))"),
        ("assert f(lambda x: x / 0) == 'no'",
         "def f(g):\n    try: g(1)\n    except ZeroDivisionError: return 'no'"),
        ("import pytest\ndef test_a():\n    with pytest.raises(ValueError, match='odd'):\n        f(3)",
         "def f(x): raise ValueError('odd')"),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1 and s.is_empty() and len(s) == 0",
         "class Stack(list):\n    push = list.append\n    def is_empty(self): return not self"
         "\n    __class__ = property(lambda s: object)"),
        ("assert Solution().add([1], target=2) == [1, 2]",
         "class Solution:\n    def add(self, a, target): return a + [target]"),
        ("p = Point(1, 2)\nassert p == Point(1, 2) and p.x == 1 and norm(p) == 3 and str(p) == 'P'",
         "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n"
         "    def __str__(self): return 'P'\ndef norm(p): return p.x + p.y"),
        ("assert f(3) == LIMIT", "LIMIT = 9\ndef f(x): return x * x"),
        ("assert math.isclose(f(4), math.sqrt(4)) and Counter(f2()) == {1: 2}",
         "import math\nfrom collections import Counter\nf = math.sqrt\ndef f2(): return [1, 1]"),
        ("from decimal import Decimal\nassert f('1.10') == Decimal('1.10')",
         "import decimal\ndef f(x): return decimal.Decimal(x)"),
        ("import datetime\nassert f(2024, 2, 29) == datetime.date(2024, 2, 29)",
         "import datetime\ndef f(*a): return datetime.date(*a)"),
        ("assert f(5) == 5", "import sys\nprint('x' * 10**6)\nsys.stderr.write('y' * 10**6)\ndef f(x): return x"),
        ("assert f(100_000) == 1 << 100_000", "def f(n): return 1 << n"),
        ("assert f('\\ud800é') == '\\ud800é'", "def f(x): return x"),
        ("assert f(5) == 5",
         "import multiprocessing as m\ndef f(x):\n    with m.Pool(2) as p: return p.map(abs, [-x])[0]"),
    ],
)  # fmt: skip
def test_an_honest_program_passes_whatever_it_returns(tests: str, code: str) -> None:
    assert PythonTests().outcomes({"tests": tests}, code) == ["passed"]


def test_helpers_of_a_prompt_are_the_tests_own() -> None:
    """As in HumanEval/32, whose test evaluates the polynomial with a function of the prompt."""
    task = {
        "prompt": "def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\ndef zero(xs):\n    '.'\n",
        "test": "def check(candidate):\n    assert abs(poly([6, -2], candidate([6, -2]))) < 1e-4\n",
        "entry_point": "zero",
    }
    assert PythonTests()(task, task["prompt"] + "    return -xs[0] / xs[1]") == 1.0
    assert PythonTests()(task, "def poly(*_): return 0\ndef zero(xs): return 0") == 0.0


def test_tests_that_cannot_run_are_no_failure_of_the_program() -> None:
    passes_objects = "class Node:\n    pass\nassert f(Node()) == 1"
    with pytest.raises(RewardError, match="what cannot be passed"):
        GRADER({"tests": passes_objects}, "def f(x): return 1")
    with pytest.raises(RewardError, match="which one is the program's"):
        GRADER({"tests": "assert set(max([1])) == set([1])"}, "def max(x): return x")


def seen(code: str, **options: Any) -> Any:
    """What a program finds: its f() raises it."""
    grader = PythonTests(timeout=20, **options)
    (outcome,) = grader.outcomes({"tests": "assert f() == 'nothing'"}, f"{code}\ndef f(): raise Exception(repr(g()))")
    return outcome


def test_a_program_sees_nothing_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE_KEY", "sk-very-secret")
    (tmp_path / "mine").write_text("sk-very-secret")
    own = Path(__file__)
    for path in ("/etc/passwd", "/etc/shadow", str(tmp_path / "mine"), str(own), str(Path.home() / ".bashrc")):
        assert "FileNotFoundError" in seen(f"def g(): open({path!r})"), path
    everything = """
import os
def g():
    found = []
    for folder in ("/proc/self/root", "/proc/1/root", "/proc/1/cwd", "/"):
        for base, folders, files in os.walk(folder):
            folders[:] = [f for f in folders if f not in ("usr", "lib", "proc", "lib64", "task", "pts")]
            for name in set(files) - {"ptmx"}:  # reading a terminal waits
                try:
                    if b"sk-very-secret" in open(os.path.join(base, name), "rb").read(1 << 20): found.append(name)
                except OSError: pass
    for pid in os.listdir("/proc"):
        try:
            if b"very-secret" in open(f"/proc/{pid}/environ", "rb").read(): found.append(pid)
        except OSError: pass
    return found
"""
    assert seen(everything) == "Exception: []"
    assert "Read-only" in seen("def g(): open('/usr/new', 'w')")
    processes = "import os\ndef g(): return [p for p in os.listdir('/proc') if p.isdigit()]"
    assert seen(processes) in ("Exception: ['1', '2']", "Exception: []")
    descriptors = """
import os
def g():
    found = []
    for fd in range(256):
        try: os.fstat(fd); found.append(fd)
        except OSError: pass
    return found
"""
    assert seen(descriptors) == "Exception: [0, 1, 2, 3, 4]"
    assert seen("import os\ndef g(): return os.write(0, b'x')").startswith("OSError")
    mount = "import ctypes\nl = ctypes.CDLL(None)\ndef g(): return [l.mount(b'x', b'/usr', b'tmpfs', 0, None), "
    assert seen(mount + "l.unshare(0x10000000), l.umount2(b'/proc', 2), l.chroot(b'/usr')]") == (
        "Exception: [-1, -1, -1, -1]"
    )


def test_a_test_that_evaluates_an_answer_does_it_behind_the_walls(tmp_path: Path) -> None:
    task = {"tests": "assert eval(f(3)) == 905"}
    reads = f"def f(x): return {f'len(open({__file__!r}).read())'!r}"
    expression = f"__import__('os').system('touch {tmp_path}/mine') or 905"
    writes = f"def f(x): return {expression!r}"
    assert "FileNotFoundError" in GRADER.outcomes(task, reads)[0]
    assert GRADER(task, "def f(x): return '900 + 5'") == 1.0
    GRADER(task, writes)
    assert list(tmp_path.iterdir()) == []


def test_a_program_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        connect = f"import socket\ndef g(): socket.create_connection({server.getsockname()!r}, 2)"
        assert "ConnectionRefusedError" in seen(connect)  # by its own loopback
        assert "unreachable" in seen("import socket\ndef g(): socket.create_connection(('192.0.2.1', 80), 2)")
        with pytest.raises(TimeoutError):
            server.accept()
    name = f"\0agl-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        assert "Refused" in seen(f"import socket\ndef g(): socket.socket(socket.AF_UNIX).connect({name!r})")


@pytest.fixture
def children() -> Iterator[list[float]]:
    """The most memory, in MiB, and the most processes that were below this one while a test ran."""
    most, over = [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            below = psutil.Process().children(recursive=True)
            resident = 0
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    resident += process.memory_info().rss
            most[0], most[1] = max(most[0], resident / (1 << 20)), max(most[1], len(below))

    thread = threading.Thread(target=watch)
    thread.start()
    yield most
    over.set()
    thread.join()


@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os\ndef eat():\n    a = bytearray(900 << 20)\n    while True: pass\n"
        "for _ in range(40):\n    if os.fork() == 0: eat()\nwhile True: pass",
        "import os, mmap\nkept = []\nwhile True:\n    kept.append(bytearray(50 << 20))",
        "import ctypes, time\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\nwhile True:\n"
        "    i = libc.shmget(0, 200 << 20, 0o1600)\n    if i < 0: continue\n    p = libc.shmat(i, None, 0)\n"
        "    ctypes.memset(p, 1, 200 << 20)\n    libc.shmdt(ctypes.c_void_p(p))",
        "import os\nfor i in range(10**6): open(f'/tmp/{i}', 'wb').write(bytes(10 << 20))",
        "while True: print('x' * 10**6)",
        "import threading\nwhile True:\n    try: threading.Thread(target=threading.Event().wait).start()\n"
        "    except RuntimeError: pass",
        "import signal, os\n[signal.signal(s, signal.SIG_IGN) for s in range(1, 32) if s not in (9, 19)]\n"
        "while True:\n    try: os.kill(-1, 9)\n    except OSError: pass",
    ],
)
def test_a_bomb_stays_within_its_limits(bomb: str, children: list[float]) -> None:
    for task in (TASK, {"test_cases": [{"input": "", "output": "x"}]}):
        assert PythonTests(timeout=4, cpu_seconds=2)(task, bomb) == 0.0
    assert 10 < children[0] < 4000
    assert children[1] < 200
    assert GRADER(TASK, "def f(x): return {41: 7341, -3: 905}[x]") == 1.0


def test_what_a_test_computes_with_an_answer_is_bounded_too() -> None:
    many = "assert f(3) * 10**9 == [1]"
    assert PythonTests(timeout=5)({"tests": many}, "def f(x): return [0] * 1000") == 0.0
    assert PythonTests(timeout=2)({"tests": "assert 10 ** f(3) == 1"}, "def f(x): return 10**12") == 0.0


@pytest.mark.parametrize("parent", ["/tmp", "/dev/shm"])
def test_an_environment_that_lies_in_a_temporary_folder_can_be_used(parent: str) -> None:
    """The program's own /tmp would cover it."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        venv.create(f"{folder}/venv", symlinks=True)
        (packages,) = Path(folder).glob("venv/lib/python3*/site-packages")
        (packages / "only_there.py").write_text("limit = 9")
        (packages / "agl.pth").write_text("\n".join([pythonpath().split(os.pathsep)[0], *site.getsitepackages()]))
        grade = (
            "from agl.rewards import PythonTests; print(PythonTests().outcomes("
            "{'tests': 'import only_there\\nassert f() == only_there.limit'}, "
            "'import os\\ndef f(): return 9 + len(os.listdir())'))"
        )
        done = subprocess.run([f"{folder}/venv/bin/python", "-c", grade], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr[-2000:]) == ("['passed']\n", "")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS a")
    connection.close()
    return path


NUMBERS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r LIMIT 100000)"


@pytest.mark.parametrize(
    "query",
    [
        f"{NUMBERS} SELECT zeroblob(16000000) FROM r",
        f"{NUMBERS} SELECT i, zeroblob(10000000) AS z FROM r ORDER BY z, i DESC",
        f"{NUMBERS} SELECT group_concat(zeroblob(1000000)) FROM r",
        f"{NUMBERS} SELECT DISTINCT randomblob(1000000) FROM r",
        f"{NUMBERS} SELECT json_group_array(hex(zeroblob(1000000))) FROM r",
        "SELECT replace(replace(hex(zeroblob(8000000)), '0', '0000'), '0', '0000')",
        "SELECT hex(randomblob(8000000)) LIKE '%' || hex(randomblob(400)) || '%_%'",
        "SELECT printf('%.*c', 2000000000, 'x')",
    ],
)
def test_a_query_fills_no_memory(database: Path, query: str, children: list[float]) -> None:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grader = SQLResult(database, answer="gold", timeout=2)
    assert grader({"gold": "SELECT 1"}, query) == 0.0
    assert children[0] < 4000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own < 100_000
    assert grader({"gold": "SELECT a FROM t"}, "SELECT 1") == 1.0


def test_a_reference_that_fills_memory_is_the_datasets_fault(database: Path) -> None:
    with pytest.raises(RewardError, match="rows of more than 1 MiB"):
        SQLResult(database, answer="gold", max_mb=1)({"gold": f"{NUMBERS} SELECT zeroblob(100000) FROM r"}, "SELECT 1")


@pytest.mark.night
def test_a_query_on_postgresql_fills_no_memory(postgres: Server, children: list[float]) -> None:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    url = postgres.new_database().replace("postgresql:", "postgresql+psycopg:")
    grader = SQLResult(url, answer="gold", timeout=5, max_mb=32)
    for query in (
        "SELECT repeat('x', 10000000) FROM generate_series(1, 100000)",
        "SELECT i, repeat('x', 1000000) AS z FROM generate_series(1, 100000) i ORDER BY z, i DESC",
        "SELECT repeat('x', 900000000)",
        "SELECT set_config('statement_timeout', '0', false), pg_sleep(1000)",
        "SELECT pg_sleep(1000) FROM generate_series(1, 1000)",
    ):
        assert grader({"gold": "SELECT 1"}, query) == 0.0, query
    assert children[0] < 4000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own < 100_000
    assert grader({"gold": "SELECT 1"}, "SELECT 1") == 1.0
