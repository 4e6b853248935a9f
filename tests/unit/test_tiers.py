"""Every test stands in a tier, and the fast tier stays fast to start."""

from __future__ import annotations

from all_subjects import ALL
from paths import TESTS


def test_every_test_stands_in_a_tier() -> None:
    assert [*TESTS.glob("test_*.py")] == []


def test_no_two_files_have_one_name() -> None:
    """pytest cannot collect both in one run."""
    folders = ("unit", "api", "integration", "learning")
    names = [file.name for folder in folders for file in TESTS.glob(f"{folder}/test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_collecting_imports_no_framework(imported_by_collection: frozenset[str]) -> None:
    frameworks = {name for subject in ALL for name in subject.frameworks} | {"verl", "ray", "vllm", "schemathesis"}
    clients = {"openai"}  # with which the gateway's own tests call it
    assert (frameworks - clients) & imported_by_collection == set()
