"""Where the real data lie that some tests read in place: $AGL_DATA, or `shared/data` beside the project."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import paths
import pytest

ROOT = Path(os.environ.get("AGL_DATA") or paths.ROOT.parent / "shared" / "data")


def folder(name: str) -> Path:
    """One dataset's folder; skips the test where it is absent."""
    found = ROOT / name
    if not found.is_dir():
        pytest.skip(f"no {name} in {ROOT}; set AGL_DATA to the folder that holds it")
    return found


def jsonl(name: str) -> list[dict[str, Any]]:
    """The lines of a JSON Lines file, such as "gsm8k/test.jsonl"."""
    dataset, _, file = name.partition("/")
    return [json.loads(line) for line in (folder(dataset) / file).read_text().splitlines()]
