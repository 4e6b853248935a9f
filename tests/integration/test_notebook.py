"""The quickstart as a notebook runs from its first cell to its last, and is committed with what it printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_it_shows_what_a_whole_run_printed() -> None:
    """In one piece, on no machine in particular, and better at the end than at the start."""
    nbformat = pytest.importorskip("nbformat")
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = "\n".join(str(output) for cell in code for output in cell.outputs)
    assert "training rows" in shown
    assert "<svg" in shown
    assert not re.search(r"/(home|root|tmp|work|Users|usr)/", shown)
    assert len(shown) < 100_000
    start, end = map(float, re.findall(r"held-out reward ([0-9.]+) -> ([0-9.]+)", shown)[0])
    assert start < 0.5 < 0.9 < end


@pytest.mark.night  # `agl quickstart` is run by test_cli.py
@pytest.mark.slow
def test_the_notebook_runs(tiny_policy: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    [parameters] = [cell for cell in code if "parameters" in cell.metadata.get("tags", ())]
    small = {"steps": "1", "batch_size": "2", "held_out_tasks": "4"}
    for name, value in small.items():
        parameters.source, changed = re.subn(rf"^{name} = \d+", f"{name} = {value}", parameters.source, flags=re.M)
        assert changed == 1
    # The policy that the tests share takes the place of the one that the notebook would make.
    (tmp_path / "agl-notebook").mkdir()
    (tmp_path / "agl-notebook" / "start-policy").symlink_to(tiny_policy)

    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()

    assert (tmp_path / "agl-notebook" / "run" / "policy" / "config.json").is_file()
    shown = "\n".join(str(output) for cell in code for output in cell.outputs)
    assert "training rows" in shown, "agl.explain shows a rollout"
    assert "text/html" in shown, "the result and the evaluation show themselves"
