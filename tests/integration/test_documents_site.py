"""The documentation site builds without a warning and asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import ROOT

LOADED = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["']?(?P<url>https?://[^"'\s>]+)""")

RUN_IN = re.compile(r"<p>(?:(?!</p>).)*?\n(?:- |\d+\. |\|)(?:(?!</p>).)*?</p>", re.DOTALL)
"""A list or table that lacks the empty line before it, so that it is shown as text."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None or find_spec("mkdocstrings") is None, reason='needs "agl[docs]"')
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {url for page in pages for url in LOADED.findall(page.read_text())} == set()
    assert [(page.parent.name, text) for page in pages for text in RUN_IN.findall(page.read_text())] == []
    for name in ("GRPO", "Trainer", "EarlyStopping"):
        assert f'id="agl.{name}"' in (tmp_path / "site/api/training/index.html").read_text()
    # For assistants: every page, in the order of the navigation, as it is in docs/ but for links to other files.
    index = (tmp_path / "site/llms.txt").read_text()
    listed = re.findall(r"^- \[.+\]\((?P<path>[^)]+)\)(?:: \S.*[.?:])?$", index, re.MULTILINE)
    assert sorted(listed) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )
    assert listed[:2] == ["index.md", "quickstart.md"]
    assert ": A LangChain agent with a calculator learns to use it, on two CPU cores.\n" in index
    assert (tmp_path / "site/concepts.md").read_text().splitlines()[0] == "# Concepts"
    whole = (tmp_path / "site/llms-full.txt").read_text()
    assert "agl.wrap(my_agent, reward=score)" in whole
    assert "# Decisions" not in whole
