"""Where the tree under test lies, and how programs that tests start are made to import it."""

from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent


def pythonpath(*first: str | Path) -> str:
    """A PYTHONPATH with these folders, then this tree's modules, so that no installed copy of agl is imported."""
    folders = (*map(str, first), str(ROOT / ".src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys(filter(None, folders)))
