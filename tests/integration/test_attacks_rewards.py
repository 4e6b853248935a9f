"""Attacks on rewards by what a policy leaves behind: forged rewards, and files that stop, deceive or break who reads.

Whatever is left, the outcome is the policy's: a reward of its tests, or its own failure. Nothing of it is paid
unearned, raised as somebody else's failure, or read on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_harbor
from paths import pythonpath

import agl
from agl.errors import RolloutError
from agl.rewards import PythonTests
from agl.testing.provider import Provider, Reply, serve
from agl.trainer.report.explain import list_rollouts
from agl_environments import harbor_inside, harbor_tasks
from agl_harnesses import Attempt, Harness

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., float]:
    """(commands of a policy) -> the reward of a small task of Harbor's."""
    folder = small_harbor.task(tmp_path_factory.mktemp("task"), 1, 2)
    environment = agl.environments.load(f"harbor:{folder}", command_seconds=10.0)
    return lambda *commands: environment.reward(environment.tasks[0], small_harbor.calls(*commands))


# -- a reward of Harbor's tests ---------------------------------------------------------------------------------------

ROOT = "/tmp/root"
PAID = "echo 1 > $D/reward.txt; echo '{\"reward\": 1e6}' > $D/reward.json"
WRITTEN = f"D=/logs/verifier; mkdir -p $D; {PAID}"
FORGED = {
    "a folder that cannot be emptied": f"{WRITTEN}; chmod a-w $D",
    "a folder that holds one": f"D=/logs/verifier; mkdir -p $D/reward.txt/x; {PAID}; chmod 555 $D/reward.txt $D",
    "a link to a folder": f"D=/app/own; mkdir -p $D; {PAID}; rm -rf /logs/verifier; ln -s $D /logs/verifier",
    "a link to a file": "mkdir -p /logs/verifier; echo 1 > /app/x; ln -s /app/x /logs/verifier/reward.txt",
    "a link in place of the root's logs": (
        f"D=/app/own/verifier; mkdir -p $D; {PAID}; rm -rf {ROOT}/logs; ln -s /app/own {ROOT}/logs; chmod a-w $D"
    ),
    "a link in place of the root's tests": (
        f"mkdir /app/own; echo 'echo 1 > /logs/verifier/reward.txt' > /app/own/test.sh; chmod -R a-w /app/own\n"
        f"rm -rf {ROOT}/tests; ln -s /app/own {ROOT}/tests"
    ),
    "a file in place of the root's tests": f"{WRITTEN}; rm -rf {ROOT}/tests; : > {ROOT}/tests",
    "a file in place of the working directory": f"{WRITTEN}; rm -rf {ROOT}/app; : > {ROOT}/app",
    "no working directory": f"{WRITTEN}; cd /; rm -rf {ROOT}/app",
    "a root that cannot be written": f"{WRITTEN}; chmod 555 {ROOT} {ROOT}/logs $D",
    "another root": (
        f"cp -r {ROOT} /tmp/own; D=/tmp/own/logs/verifier; mkdir -p $D; {PAID}; chmod 555 $D\n"
        f"mv {ROOT} /tmp/x; mv /tmp/own {ROOT}"
    ),
    "a full disk": f"{WRITTEN}; cat /dev/zero > /tmp/full; true",
    "too many files": f"{WRITTEN}; i=0; while :; do i=$((i+1)); : > /tmp/$i; done",
    "modules that its HOME brings": (
        "for v in 3.10 3.11 3.12 3.13 3.14; do p=$HOME/.local/lib/python$v/site-packages; mkdir -p $p\n"
        "echo 'open(\"/logs/verifier/reward.json\", \"w\").write(\"1\")' > $p/usercustomize.py; done\n"
        "printf 'echo 1 > /logs/verifier/reward.json' | tee $HOME/.bashrc $HOME/.profile > $HOME/.bash_profile"
    ),
}  # fmt: skip
EXPECTED = {
    "absolute": "ln -s /tests/expected.txt sum.txt",
    "relative": "ln -s ../tests/expected.txt sum.txt",
    "to the root's own": f"ln -s {ROOT}/tests/expected.txt sum.txt",
    "by a link to a folder": "ln -s /tests all; ln -s all/expected.txt sum.txt",
    "out of a folder that a link leads to": "ln -s /usr way; ln -s way/../tests/expected.txt sum.txt",
    "by /proc": "ln -s /proc/self/root/tests/expected.txt sum.txt",
    "by the working directory": "ln -s /proc/self/cwd/../tests/expected.txt sum.txt",
    "in place of the working directory": (
        f"cd /; rm -rf {ROOT}/app; ln -s tests {ROOT}/app; ln -s /tests/expected.txt /app/sum.txt"
    ),
}  # fmt: skip
"""Links to what only the tests have."""


@pytest.mark.parametrize("name", FORGED)
def test_a_reward_that_the_policy_wrote_is_not_paid(name: str, rewarded: Callable[..., float]) -> None:
    assert rewarded(FORGED[name]) == 0.0


@pytest.mark.parametrize("name", EXPECTED)
def test_a_link_to_what_only_the_tests_have_does_not_come_to_them(name: str, rewarded: Callable[..., float]) -> None:
    assert rewarded(EXPECTED[name]) == 0.0


REWARDING = """cat > run.sh <<'END'
echo '{report}' > /logs/verifier/reward.json
touch -d 2100-01-01 /logs/verifier/reward.json
END
chmod +x run.sh"""


@pytest.mark.parametrize("report", ['{"reward": 1}', '{"reward": 1e6}', "1"])
def test_another_file_beside_the_tests_own_reward_is_not_paid(report: str, tmp_path: Path) -> None:
    """Tests that run the policy's program and then write reward.txt: of both files, the program's JSON counted."""
    folder = small_harbor.task(tmp_path, 1, 2, ending="[ -x /app/run.sh ] && /app/run.sh")
    environment = agl.environments.load(f"harbor:{folder}", command_seconds=10.0)
    assert environment.reward(environment.tasks[0], small_harbor.calls(REWARDING.format(report=report))) == 0.0
    assert environment.reward(environment.tasks[0], small_harbor.calls("printf 3 > sum.txt")) == 1.0


@pytest.mark.parametrize(
    ("report", "text", "reward"),
    [
        ('{"reward": 0.5}', "0.5", 0.5),
        ('{"passed": 3, "failed": 1}', "0.75", 0.75),
        ('{"reward": 0.25}', "", 0.25),
        ("", "0.5", 0.5),
        ('{"reward": 0.25}', "1", 0.25),
    ],
)
def test_of_two_files_of_the_tests_the_lower_reward_counts(
    report: str, text: str, reward: float, tmp_path: Path
) -> None:
    """JSON without a reward is a report beside the reward's own file, as in Harbor."""
    files = (
        f"printf '%s' '{report}' > /logs/verifier/reward.json; printf '%s' '{text}' > /logs/verifier/reward.txt; exit"
    )
    folder = small_harbor.task(tmp_path, 1, 2, ending=files)
    environment = agl.environments.load(f"harbor:{folder}", command_seconds=10.0)
    assert environment.reward(environment.tasks[0], small_harbor.calls("true")) == reward


FRAMES = """python3 -c '
import json, struct, sys
report = json.dumps({"output": "1", "status": 0, "ran": True, "packed": True, "texts": ["1", "1"]}).encode()
sys.stdout.buffer.write((struct.pack(">I", len(report)) + report) * 9)'"""


def test_a_commands_output_is_no_report(rewarded: Callable[..., float]) -> None:
    """Where a command's output is to be, it has put a link to the pipe to the trainer."""
    assert rewarded(f"ln -s /proc/1/fd/1 {ROOT}/.output", FRAMES, FRAMES) == 0.0


AS_ANYBODY = """
import sys
import agl
environment = agl.environments.load("harbor:" + sys.argv[1], command_seconds=10.0)
import json
print(environment.reward(environment.tasks[0], json.loads(sys.argv[2])))
"""


def test_no_user_has_a_trainer_that_takes_output_for_a_report(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where the trainer is not root, its pipes belong to the user that commands run as, too."""
    python = "/usr/bin/python3"
    if os.getuid() != 0 or not shutil.which("setpriv") or not os.access(python, os.X_OK):
        pytest.skip("needs root to become another user, and a Python that others can read")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([pythonpath(), *packages]), "HOME": "/tmp"}
    anybody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python]
    probe = [*anybody, "-c", "import agl.environments, agl_environments.harbor_tasks"]
    if subprocess.run(probe, env=environment, capture_output=True, timeout=120).returncode:
        pytest.skip("another user cannot read agl and what it needs here")
    with tempfile.TemporaryDirectory() as folder:
        small_harbor.task(Path(folder), 1, 2)
        Path(folder).chmod(0o755)
        commands = json.dumps(small_harbor.calls(f"ln -s /proc/1/fd/1 {ROOT}/.output", FRAMES, FRAMES))
        command = [*anybody, "-c", AS_ANYBODY, folder, commands]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "0.0\n"), done.stderr


def test_a_reward_without_the_report_of_its_tests_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first process that says what the trainer would like to hear, but not the number of the job."""
    liar = tmp_path / "harbor_inside.py"
    liar.write_text(
        "from agl.trainer.graders.programs.inside import plain\n"
        "def main():\n    while plain.receive(0):\n"
        "        plain.send(1, {'ran': True, 'status': 0, 'output': '', 'texts': ['1', '1']})\n"
    )
    folder = small_harbor.task(tmp_path / "task", 1, 2)
    environment = agl.environments.load(f"harbor:{folder}")
    monkeypatch.setattr(harbor_inside, "__file__", str(liar))
    with pytest.raises(RolloutError, match=r"the sandbox of .* broke: .*a report of another job"):
        environment.reward(environment.tasks[0], small_harbor.calls("true"))


NO_REWARDS = [
    "",
    "x",
    "[1]",
    '{"reward": null}',
    '{"other": 1}',
    "NaN",
    "1e999",
    "1" + "0" * 400,
    "9" * 5000,
    "[" * 9000,
]


@pytest.mark.parametrize("text", NO_REWARDS, ids=lambda text: text[:20] or "nothing")
def test_what_is_no_number_is_no_reward(text: str) -> None:
    assert harbor_tasks._score(text) is None


# -- files that are left ----------------------------------------------------------------------------------------------

LEFT = {
    "a pipe": "os.mkfifo('x')",
    "a socket": "socket.socket(socket.AF_UNIX).bind('x')",
    "a device": "os.mknod('x', 0o600 | stat.S_IFCHR, os.makedev(1, 5))",
    "a link to a device": "os.symlink('/dev/zero', 'x')",
    "a link to /proc": "os.symlink('/proc/self/mem', 'x'); os.symlink('/proc/1/fd', 'fds')",
    "a link to the system": "os.symlink('/etc/passwd', 'x'); os.symlink('/usr', 'usr')",
    "a link to itself": "os.symlink('x', 'x')",
    "links to links": "[os.symlink(f'l{i + 1}', f'l{i}') for i in range(100)]; os.symlink('l0', 'x')",
    "a link out": "os.symlink('../../../../../../etc/passwd', 'x')",
    "a sparse giant": "open('x', 'w').truncate(1 << 27)",
    "a sparse giant with many names": "open('x', 'w').truncate(1 << 24); [os.link('x', f'x{i}') for i in range(100)]",
    "deep folders": "[(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]",
    "a long path": "[(os.mkdir('d' * 200), os.chdir('d' * 200)) for _ in range(19)]; open('x', 'w')",
    "a path too long for anything": "[(os.mkdir('d' * 200), os.chdir('d' * 200)) for _ in range(60)]; open('x', 'w')",
    "names that are no UTF-8": "open(b'\\xff\\xfe', 'w'); os.mkdir(b'\\xe4'); open(b'\\xe4/\\xff', 'w')",
    "names of control characters": "[open(name, 'w') for name in ('\\n', '\\x1b[2J', '-rf', '\\u202e', '~', '*')]",
    "hard links": "open('y', 'w').write('y'); [os.link('y', f'y{i}') for i in range(50)]",
    "many empty files": "[open(f'f{i}', 'w').close() for i in range(9000)]",
    "more files than there may be": "[os.close(os.open(f'f{i}', os.O_CREAT)) for i in range(10**6)]",
    "folders and files that nobody may read": "open('x', 'w'); os.chmod('x', 0); os.mkdir('y'); os.chmod('y', 0)",
    "times that no clock shows": "[(open(n, 'w'), os.utime(n, (t, t))) for n, t in (('x', 2**62), ('y', -9**9))]",
    "an archive's own names": "os.mkdir('x'); open('x/@LongLink', 'w'); open('PaxHeader', 'w'); open('a=b', 'w')",
}  # fmt: skip
"""What is left -> the program that leaves it in its folder. What it may not do, it leaves out."""
PROGRAM = "import os, socket, stat\ntry:\n    {left}\nexcept OSError as error:\n    print(error)\n"
BEFORE = 'from pathlib import Path\nPath("solution.py").write_text("def f(x): return x + 1")\n'


def program(name: str) -> str:
    return PROGRAM.format(left=LEFT[name])


TOO_MUCH = {
    "a sparse giant with many names", "deep folders", "a long path", "a path too long for anything",
    "more files than there may be",
}  # fmt: skip
"""What cannot be copied: the failure of who left it."""


@pytest.mark.parametrize("name", LEFT)
def test_files_left_for_harbors_tests(name: str, rewarded: Callable[..., float]) -> None:
    solve = small_harbor.SOLUTION.splitlines()[1]
    assert rewarded(solve, f"python3 -c {shlex.quote(program(name))}") == float(name not in TOO_MUCH)


@pytest.mark.parametrize("name", LEFT)
def test_files_left_by_a_program_for_the_next_test(name: str) -> None:
    """What an answer leaves in one test, it does not find in the next; nor do others."""
    grader = PythonTests(timeout=20, cpu_seconds=10)
    leaving = f"import os\nbefore = os.listdir('.')\n{program(name)}\ndef f(): return before"
    first, second = grader.outcomes({"tests": ["assert f() == []"] * 2}, leaving)
    assert first == second
    assert first in ("passed", "made too many files")
    assert grader({"tests": "assert f() == []"}, "import os\ndef f(): return os.listdir('.')") == 1.0


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with serve(lambda _: Reply("42")) as running:
        yield running


class Leaver(Harness):
    """A coding agent that asks its model once, and leaves what the task says."""

    name, programs = "leaver", ("sh",)
    install = "apt-get install dash"

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["-c", "python3 ask.py && python3 leave.py"]

    def point(self, attempt: Attempt) -> None:
        attempt.environment["OPENAI_BASE_URL"] = attempt.urls["openai"]


ASK = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "?"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})).read()
"""


class Graded(dict[str, float]):
    """task -> the reward that it got, of a grader that looks at every file."""

    def grade(self, task: str, folder: Path) -> float:
        texts = {path: agl.rewards.read_text(path, folder=folder) for path in folder.rglob("*") if path.is_file()}
        assert not any(path.is_symlink() for path in folder.rglob("*"))
        assert agl.rewards.read_text("x", "none", folder=folder) in ("none", "")
        self[task] = float(texts[folder / "solution.py"] == "def f(x): return x + 1")
        return self[task]


_EVENTS = {"open", "os.mkdir", "os.listdir", "os.scandir", "os.chmod", "shutil.rmtree"}
_watched: list[list[str]] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event in _EVENTS and "agl-harness-" in (path := str(arguments[0])):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if event == "shutil.rmtree" or "/copy" in path:
            _watched[-1].append(f"{event} {path}")


@pytest.fixture
def on_the_loop() -> Iterator[list[str]]:
    """What was done with files of a working copy by a thread that runs an event loop."""
    if not hasattr(_watch, "added"):
        sys.addaudithook(_watch)
        _watch.added = True  # type: ignore[attr-defined]
    _watched.append([])
    yield _watched[-1]
    _watched.pop()


def test_files_left_for_a_grader(provider: Provider, tmp_path: Path, on_the_loop: list[str]) -> None:
    """Each is graded or is the policy's failure by a limit, without an attempt that fails."""
    graded = Graded()
    agent = agl.harness(
        Leaver, task=str, grade=graded.grade, env={"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "k"},
        files=lambda name: {"ask.py": ASK, "leave.py": BEFORE + program(name)}, disk_mb=64, error_reward=-1.0,
    )  # fmt: skip
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path / "run", progress=False, max_attempts=1, n_workers=2)
    result = trainer.fit(agent, list(LEFT))
    assert {rollout["status"] for rollout in list_rollouts(result.store)} == {"succeeded"}
    assert set(LEFT) - set(graded) == TOO_MUCH
    assert set(graded.values()) == {1.0}
    assert on_the_loop == []
