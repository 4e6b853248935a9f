"""Tasks from GSM8K's calculation annotations: python make_tasks.py GSM8K_FOLDER [OUT_FOLDER]"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from agl.errors import DatasetError
from agl.trainer.quickstart.tasks import Split, Task, calculate, make_task, split_of

ANNOTATION = re.compile(r"<<\s*(\d+)\s*([-+*/])\s*(\d+)\s*=\s*(\d+)\s*>>")


def gsm8k_tasks(path: str | Path, *, split: Split, max_digits: int = 4) -> list[Task]:
    """The single-step integer calculations in GSM8K's `<<48/2=24>>` annotations, in order, each once.

    Args:
        path: a GSM8K `.jsonl` file, or the folder that holds `train.jsonl` and `test.jsonl`.
        split: ours, by `split_of`, so that held-out tasks stay disjoint from the training tasks of the quickstart, too.
        max_digits: leave out calculations with a longer operand; the tiny policy has seen up to 4 digits.

    Raises:
        DatasetError: no such file, a line that is not GSM8K, or no calculation of that kind.
    """
    root = Path(path)
    files = [root / "train.jsonl", root / "test.jsonl"] if root.is_dir() else [root]
    tasks: dict[str, Task] = {}
    for file in files:
        for a, op, b, result in _annotations(file):
            exact = calculate(f"{a} {op} {b}") == str(result)
            if exact and max(a, b) < 10**max_digits and split_of(a, b) == split:
                task = make_task(a, op, b)
                tasks.setdefault(task["question"], task)
    if not tasks:
        raise DatasetError("no integer calculation of one step found", hint="is this GSM8K?", path=root, split=split)
    return list(tasks.values())


def _annotations(file: Path) -> Iterable[tuple[int, str, int, int]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DatasetError(
            f"cannot read GSM8K: {error.strerror}", hint="name its folder or one of its .jsonl files", path=file
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            answer = json.loads(line)["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                "not a GSM8K line", hint='each line is {"question": ..., "answer": ...}', path=file, line=number
            ) from error
        for a, op, b, result in ANNOTATION.findall(answer):
            yield int(a), op, int(b), int(result)


def main(gsm8k: Path, out: Path) -> None:
    train = gsm8k_tasks(gsm8k, split="train")
    heldout = gsm8k_tasks(gsm8k, split="heldout")
    out.mkdir(parents=True, exist_ok=True)
    parts = {"train": train, "heldout": heldout, "heldout-128": heldout[:: len(heldout) // 128][:128]}
    for name, tasks in parts.items():
        lines = (json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{len(train)} training tasks, {len(heldout)} held-out tasks -> {out}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) == 3 else "tasks"))
