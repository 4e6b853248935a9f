"""How long the road is: the functions and files that one small run enters, in all its processes.

`python tests/support/road.py` prints it: an agent on the OpenAI SDK, GRPO, two steps, one worker.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from paths import ROOT, SUPPORT, pythonpath

PACKAGE = ROOT / ".src" / "agl"
_NO_FUNCTION = re.compile(r"<(genexpr|listcomp|dictcomp|setcomp|lambda|module)>$")
_PROFILE = """
import json, os, sys, threading, time

_PACKAGE = {package!r}
_FOLDER = {folder!r}
_entered = []

def _profile(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
        _entered.append((time.time(), frame.f_code.co_filename[len(_PACKAGE):], frame.f_code.co_qualname))

def _write():
    # While it runs, since the policy's process is ended by its parent.
    written = 0
    while True:
        time.sleep(0.2)
        rows = _entered[written:]
        written += len(rows)
        with open(os.path.join(_FOLDER, str(os.getpid()) + ".jsonl"), "a") as file:
            file.writelines(json.dumps(row) + chr(10) for row in rows)

threading.Thread(target=_write, daemon=True).start()
sys.setprofile(_profile)
threading.setprofile(_profile)
"""
_PROGRAM = """
import json, os, sys, time
from pathlib import Path

import agl
from openai import OpenAI
from untrained import make_untrained

folder = Path(sys.argv[1])
calls = []

def solve(task):
    client = OpenAI(api_key="x")
    began = time.time()
    answer = client.chat.completions.create(
        model="gpt", messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    calls.append((began, time.time()))
    return answer.choices[0].message.content or ""

def score(task, output):
    return float(len(output) % 7) / 7

algorithm = agl.GRPO(
    model=str(make_untrained(folder / "model")), group_size=3, batch_size=1, steps=2, max_response_tokens=8,
    learning_rate=1e-3,
)
trainer = agl.Trainer(algorithm, n_workers=1, directory=str(folder / "run"), progress=False)
trainer.fit(agl.wrap(solve, reward=score), [{"question": "hi there"}, {"question": "two"}])
time.sleep(1)
(folder / "calls.json").write_text(json.dumps({"calls": calls, "pid": os.getpid()}))
"""


class Entered(NamedTuple):
    """A function that was entered.

    Attributes:
        time: when, in seconds of the wall clock.
        file: the module's file, below the package.
        function: its qualified name.
    """

    time: float
    file: str
    function: str

    @property
    def room(self) -> str:
        """The folder that a reader looks into: of the trainer and the adapters, the one below."""
        first, *rest = self.file.split("/")
        return f"{first}/{rest[0]}" if first in ("trainer", "adapters") and len(rest) > 1 else first


@dataclass(frozen=True)
class Stretch:
    """A part of the road.

    Attributes:
        functions: different functions entered.
        files: files that these are in.
        changes: how often the road goes from one room to another.
    """

    functions: int
    files: int
    changes: int

    @classmethod
    def of(cls, entered: Iterable[Entered]) -> Stretch:
        """What was entered, in the order of time."""
        road = sorted(entered)
        return cls(
            len({(each.file, each.function) for each in road}),
            len({each.file for each in road}),
            sum(one.room != other.room for one, other in pairwise(road)),
        )


@dataclass(frozen=True)
class Road:
    """The run's road.

    Attributes:
        fit: the whole run.
        call: the shortest call of a model, from the SDK's method to its answer, in all processes.
        call_here: the shortest, in the agent's process alone.
        to_gradient: from a call's start to the end of the update that trains it.
    """

    fit: Stretch
    call: Stretch
    call_here: Stretch
    to_gradient: Stretch


def measure() -> Road:
    """Run the program in a process of its own, with a profile of each process that it starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The policy's process gets few variables of its parent, so the paths are in the text.
        (folder / "sitecustomize.py").write_text(_PROFILE.format(package=f"{PACKAGE}/", folder=name))
        environment = {**os.environ, "PYTHONPATH": pythonpath(folder, SUPPORT), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([sys.executable, "-c", _PROGRAM, name], env=environment, check=True)
        times = json.loads((folder / "calls.json").read_text())
        by_process = {int(path.stem): _read(path) for path in folder.glob("*.jsonl")}
    everywhere = [each for entered in by_process.values() for each in entered]
    # What a process does beside a call, such as a heartbeat, falls into some calls and not into others.
    calls = [Stretch.of(_between(everywhere, *call)) for call in times["calls"]]
    here = [Stretch.of(_between(by_process[times["pid"]], *call)) for call in times["calls"]]
    updated = max(each.time for each in everywhere if each.function.endswith("Learner._step"))
    return Road(
        fit=Stretch.of(everywhere),
        call=min(calls, key=attrgetter("functions")),
        call_here=min(here, key=attrgetter("functions")),
        to_gradient=Stretch.of(_between(everywhere, times["calls"][5][0], updated)),
    )


def _read(path: Path) -> list[Entered]:
    entered = [Entered(*json.loads(line)) for line in path.read_text().splitlines()]
    return [each for each in entered if not _NO_FUNCTION.search(each.function)]


def _between(entered: Iterable[Entered], begin: float, end: float) -> list[Entered]:
    return [each for each in entered if begin <= each.time <= end]


if __name__ == "__main__":
    for part, stretch in vars(measure()).items():
        print(f"{part:12} {stretch}")
