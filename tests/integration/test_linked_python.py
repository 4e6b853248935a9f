"""A Python that is reached by symbolic links, as home folders of clusters are: sandboxes have the same links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import SUPPORT, pythonpath

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.slow,
]


def environment(folder: Path) -> Path:
    """An empty virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    return folder


def linked(folder: Path) -> Path:
    environment(folder / "scratch/venv")
    (folder / "venv").symlink_to(folder / "scratch/venv")
    return folder / "venv"


def linked_relatively(folder: Path) -> Path:
    environment(folder / "scratch/venv")
    (folder / "home").mkdir()
    (folder / "home/venv").symlink_to("../scratch/venv")
    return folder / "home/venv"


def home_is_a_link(folder: Path) -> Path:
    environment(folder / "nfs/me/venv")
    (folder / "home").symlink_to("nfs")
    return folder / "home/me/venv"


def links_to_links(folder: Path) -> Path:
    environment(folder / "nfs/me/envs/one")
    (folder / "nfs/me/current").symlink_to("envs/one")
    (folder / "home").symlink_to(folder / "nfs")
    (folder / "venv").symlink_to(folder / "home/me/current")
    return folder / "venv"


def program_is_a_link(folder: Path) -> Path:
    """A `python` by way of links that lie beside the environment, not in it."""
    made = environment(folder / "venv")
    base = os.path.realpath(made / "bin/python")
    (folder / "tools").mkdir()
    (folder / "tools/python").symlink_to(base)
    (folder / "latest").symlink_to("tools")
    for program in (made / "bin").glob("python*"):
        program.unlink()
        program.symlink_to(folder / "latest/python")
    return made


LAYOUTS = [linked, linked_relatively, home_is_a_link, links_to_links, program_is_a_link]
USES = {
    "PythonTests": """
from agl.rewards import PythonTests
print(PythonTests(isolation="bubblewrap")({"tests": ["assert f(1) == 2"]}, "def f(x): return x + 1"))
""",
    "Harbor": """
import sys, tempfile
from pathlib import Path
import agl, small_harbor
folder = small_harbor.task(Path(tempfile.mkdtemp(dir=sys.argv[1])), 1, 2)
tasks = agl.environments.load(f"harbor:{folder}")
arguments = '{"command": "python3 -c \\'print(1 + 2)\\' > sum.txt"}'
call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
print(tasks.reward(tasks.tasks[0], [{"content": "", "tool_calls": [call]}]))
""",
    "harness": """
import shutil, sys
from pathlib import Path
import agl
from agl.testing.provider import Reply, serve
from agl_harnesses import Attempt, Harness

ASK = '''
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "?"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})).read()
open("x", "w").write(open(os.environ["EXTRA"]).read())
'''

class Agent(Harness):
    name, programs, install = "agent", ("sh",), "apt-get install dash"
    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["-c", "python3 ask.py"]
    def point(self, attempt: Attempt) -> None:
        attempt.environment["OPENAI_BASE_URL"] = attempt.urls["openai"]

folder = Path(sys.argv[1])
(folder / "real").mkdir()
(folder / "real/file").write_text("extra")
(folder / "extra").symlink_to("real")
def grade(task, copy):
    print(float(agl.rewards.read_text(copy / "x") == "extra"))
    return 1.0
with serve(lambda _: Reply("42")) as provider:
    agent = agl.harness(
        Agent, task=str, files=lambda _: {"ask.py": ASK}, grade=grade, folders=[folder / "extra"],
        env={"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "k", "EXTRA": str(folder / "extra/file")},
    )
    agl.Trainer(agl.Baseline(), directory=folder / "run", progress=False, max_attempts=1).fit(agent, ["x"])
""",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sandbox_has_the_python_that_runs_agl(use: str, layout: Callable[[Path], Path], tmp_path: Path) -> None:
    python = layout(tmp_path / "place") / "bin/python"
    packages = [path for path in sys.path if path.endswith("site-packages")]
    paths = os.pathsep.join([pythonpath(), str(SUPPORT), *packages])
    (tmp_path / "own").mkdir()
    done = subprocess.run(
        [python, "-c", USES[use], tmp_path / "own"],
        env={**os.environ, "PYTHONPATH": paths}, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["1.0"]), done.stderr
