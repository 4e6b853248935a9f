"""Mistakes of people who use agl for the first time: each is found before anything is loaded, with the right form."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agl


def agent(task: Any) -> str:
    return "x"


def score(task: Any, output: Any) -> float:
    return 1.0


def grpo(**options: Any) -> Any:
    return agl.GRPO(**{"model": "some/model", "steps": 3, **options})


def trainer(**options: Any) -> agl.Trainer:
    return agl.Trainer(grpo(), progress=False, **options)


def fit(*datasets: Any, **options: Any) -> Any:
    algorithm = grpo(model="/nowhere/model")
    return agl.Trainer(algorithm, progress=False, **options).fit(agl.wrap(agent, score), *datasets)


MISTAKES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "credit to the algorithm": (lambda _: grpo(credit="discounted"), "GRPO has no option 'credit'", "agl.Trainer"),
    "learning rate to the trainer": (
        lambda _: trainer(learning_rate=1e-5),
        "Trainer has no option 'learning_rate'",
        "agl.GRPO",
    ),
    "credit that there is not": (lambda _: trainer(credit="discountd"), "no credit 'discountd'", "discounted"),
    "credit's class": (
        lambda _: trainer(credit=agl.credit.Discounted),
        "credit= is <class",
        "agl.credit.Discounted(...)",
    ),
    "lora's rank alone": (lambda _: grpo(lora=16), "lora is 16", "agl.LoraSpec(...)"),
    "a reward range from high to low": (
        lambda _: agl.Trainer(grpo(), reward_range=(1, 0)),
        "reward_range=(1, 0)",
        "lowest and the highest",
    ),
    "one beta": (lambda _: grpo(betas=0.9), "betas is 0.9", "a tuple (a number, a number)"),
    "agents by number": (lambda _: trainer(agents=3), "agents= is 3", "a name, a glob"),
    "context in words": (lambda _: grpo(max_context="8k"), "max_context is '8k'", "a whole number"),
    "algorithm's class": (lambda _: agl.Trainer(agl.GRPO), "algorithm= is <class", "agl.GRPO(model=..., steps=200)"),  # type: ignore[arg-type]
    "another database": (lambda _: trainer(store="mysql://x"), "begin with mysql:", "postgresql://"),
    "half a step": (lambda _: grpo(steps=2.5), "steps is 2.5", "a whole number"),
    "steps as text": (lambda _: grpo(steps="10"), "steps is '10'", "a whole number"),
    "rate as text": (lambda _: grpo(learning_rate="1e-5"), "learning_rate is '1e-5'", "a number"),
    "workers as text": (lambda _: trainer(n_workers="8"), "n_workers is '8'", "a whole number"),
    "time in words": (lambda _: trainer(timeout="5m"), "timeout is '5m'", "a number"),
    "directory by number": (lambda _: trainer(directory=5), "directory is 5", "a text or a path"),
    "no model": (lambda _: grpo(model=None), "model is None", "a text"),
    "another device": (lambda _: grpo(device="gpu"), "device='gpu'", "cuda"),
    "another dtype": (lambda _: grpo(dtype="fp16"), "dtype='fp16'", "bfloat16"),
    "template that there is not": (lambda _: grpo(chat_template="qwen"), "chat_template='qwen'", "qwen3"),
    "path for traces": (
        lambda _: agl.SFT(model="m", epochs=1, data="runs/a"),
        "data is 'runs/a'",
        'agl.traces("runs/a"',
    ),  # type: ignore[arg-type]
    "misspelt": (lambda _: grpo(learning_rte=1), "no option 'learning_rte'", "learning_rate"),
    "model that is not there": (
        lambda _: agl.Trainer(grpo(model="/nowhere"), progress=False).fit(agl.wrap(agent, score), [{"q": 1}]),
        "no such directory",
        "a hub id",
    ),
    "path for a dataset": (lambda _: fit("tasks.jsonl"), "the dataset is 'tasks.jsonl'", "json.loads"),
    "number for a dataset": (lambda _: fit(5), "the dataset is 5", "a list of tasks"),
    "one task for a dataset": (lambda _: fit({"q": 1}), "the dataset is a dict", "a list of tasks"),
    "no tasks": (lambda _: fit([]), "the training dataset is empty", "at least one task"),
    "task that cannot be stored": (
        lambda _: fit([{"q": 1}, {"q": object()}]),
        "a training task is not a JSON value",
        "dicts",
    ),
    "val task that cannot be stored": (lambda _: fit([{"q": 1}], [object()]), "a validation task is not", "dicts"),
    "agent that is none": (lambda _: trainer().fit(5, [{"q": 1}]), "cannot run a builtins.int", "agl.wrap"),
    "reward of one argument": (lambda _: agl.wrap(agent, lambda task: 1.0), "takes no (task, output)", "def reward"),
    "reward of three": (lambda _: agl.wrap(agent, lambda t, o, x: 1.0), "'x' that agl cannot fill", "trace"),
    "reward whose names contradict": (
        lambda _: agl.wrap(agent, lambda output, expected: 1.0),
        "whose names contradict their places",
        "`task` and `output`",
    ),
    "reward that is a number": (lambda _: agl.wrap(agent, 1.0), "reward= is 1.0", "a function"),  # type: ignore[arg-type]
    "GPUs without a cluster": (
        lambda missing: agl.VERL(model="m", steps=1, gpus=missing("verl")),
        "gpus=1 is for verl",
        "backend='local'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_the_right_form(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def missing(_: str) -> int:
        monkeypatch.setattr("agl_verl.algorithm.find_spec", lambda name: None)
        return 1

    make, message, hint = MISTAKES[mistake]
    with pytest.raises(agl.AglError) as raised:
        make(missing)
    assert message in raised.value.message
    assert hint in (raised.value.hint or "")
    assert not [*tmp_path.iterdir()], "nothing is begun"


PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
WRITTEN = {"grpo(": "agl.GRPO(..., ", "trainer(": "agl.Trainer(algorithm, ", "fit(": "trainer.fit(agent, "}
ALONE = """
import sys, time
sys.path.insert(0, sys.argv[1])
import test_mistakes as m
def missing(_):
    import agl_verl.algorithm as a
    a.find_spec = lambda name: None
    return 1
start = time.perf_counter()
try: m.MISTAKES[sys.argv[2]][0](missing)
except m.agl.AglError: print(time.perf_counter() - start)
"""


def rows() -> dict[str, str]:
    """For each mistake a row of the page, without the seconds: what was written, the message, what to do."""
    tree = ast.parse(Path(__file__).read_text())
    (made,) = (n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "MISTAKES")
    assert isinstance(made, ast.Dict)
    found = {}
    for name, entry in zip(MISTAKES, made.values, strict=True):
        assert isinstance(entry, ast.Tuple)
        assert isinstance(entry.elts[0], ast.Lambda)
        code = (
            ast.unparse(entry.elts[0].body)
            .replace("missing('verl')", "1")
            .replace("grpo(m", "agl.GRPO(m")
            .replace("trainer().fit", "trainer.fit")
            .replace("grpo()", "algorithm")
        )
        start = next((start for start in WRITTEN if code.startswith(start)), "")
        code = WRITTEN.get(start, "") + code.removeprefix(start)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agl_verl.algorithm.find_spec", lambda name: None)
            with pytest.raises(agl.AglError) as raised:
                MISTAKES[name][0](lambda _: 1)
        texts = (raised.value.message, raised.value.hint or "")
        cells = [" ".join(text.split()).replace("|", r"\|") for text in (f"`{code.replace(', )', ')')}`", *texts)]
        found[name] = "| " + " | ".join(cells) + " |"
    return found


def test_the_page_says_what_is_said() -> None:
    listed = [line.rpartition("|")[0].rpartition("|")[0] + "|" for line in PAGE.read_text().splitlines()]
    lacking = [row for row in rows().values() if row not in listed]
    assert lacking == [], "write the page anew: python tests/unit/test_mistakes.py"


def write_page() -> None:
    """The page, with the seconds that each takes in a new process, from the call to the message."""
    lines = ["| written | answer | what to do | seconds |", "|---|---|---|---|"]
    for name, row in rows().items():
        command = [sys.executable, "-c", ALONE, str(Path(__file__).parent), name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        lines.append(f"{row} {float(done.stdout):.1f} |")
        print(lines[-1][:100])
    text = PAGE.read_text()
    start, end = "<!-- table -->", "<!-- end of table -->"
    before, after = text.partition(start)[0], text.partition(end)[2]
    PAGE.write_text(before + "\n".join([start, *lines, end]) + after)


def test_none_of_them_waits_for_torch() -> None:
    """All of them in a new process, with the tests' own packages: torch is not imported."""
    program = (
        "import sys, test_mistakes as m, agl\n"
        "def missing(name):\n"
        "    import agl_verl.algorithm as a; a.find_spec = lambda name: None; return 1\n"
        "for make, *_ in m.MISTAKES.values():\n"
        "    try: make(missing)\n"
        "    except agl.AglError: continue\n"
        "    raise SystemExit('accepted')\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


def test_what_is_right_is_taken(tmp_path: Path) -> None:
    grpo(
        model=tmp_path, steps=3, learning_rate=1, betas=[0.9, 0.95], lora=agl.LoraSpec(8), max_context=None,
        device="cuda:1", dtype="bfloat16", chat_template="hermes",
    )  # fmt: skip
    assert isinstance(trainer(credit="discounted(0.9)").config.credit, agl.credit.Discounted)
    assert trainer(credit=lambda trajectory: [0.0]).config.credit is not None
    agl.wrap(agent, lambda *both: 1.0)
    agl.wrap(agent, lambda task, output, trace=None: 1.0)


if __name__ == "__main__":
    write_page()
