"""What the tests share: models made here, and the order in which tests run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import pythonpath
from postgres import Server, private_server

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs that tests start see this tree, too, never an installed copy; `pythonpath` of pyproject.toml is pytest's own.
os.environ["PYTHONPATH"] = pythonpath()

# A shell has its background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests of another distribution, which `test_seventh_adapter.py` runs where that is installed.
collect_ignore = ["seventh"]

# What the suites of `*_suite.py` assert is shown like what tests assert.
pytest.register_assert_rewrite("engine_suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("adapters")
    group.addoption(
        "--subject",
        action="append",
        metavar="FILE.py:CLASS",
        help="run the adapters' conformance suite over this subclass of subjects.Subject instead of our own",
    )
    group.addoption("--subjects", default="", help="of our own subjects these only, by name, with commas between")
    group.addoption(
        "--capabilities", type=Path, metavar="FILE.md", help="write what the conformance suite proves into this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "capability(words, gap, needs, by_way): a row of docs/adapters.md's matrix")
    if (file := config.getoption("capabilities")) is not None:
        from capabilities import Recorder

        config.pluginmanager.register(Recorder(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first; of the conformance suite only the subjects that were asked for."""
    if wanted := {*config.getoption("subjects").split(",")} - {""}:
        subjects = {item: getattr(item, "callspec", None) for item in items}
        others = [
            item for item, spec in subjects.items()
            if spec is not None and "subject" in spec.params and spec.params["subject"].name not in wanted
        ]  # fmt: skip
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small model with random weights and the quickstart's tokenizer and chat template."""
    from untrained import make_untrained

    return make_untrained(tmp_path_factory.mktemp("untrained"))


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's own policy, warm-started as `agl make-policy` does."""
    from agl.trainer.quickstart.policy import make_policy

    directory = tmp_path_factory.mktemp("tiny-policy")
    make_policy(directory, seed=0, threads=1)
    return directory


@pytest.fixture(scope="session")
def role_policy(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That policy, taught to write, check, play and fetch (`roles`), mostly badly."""
    from roles import make_role_policy

    return make_role_policy(tmp_path_factory.mktemp("role-policy") / "policy", tiny_policy)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server that all tests share; those that kill theirs make one of their own."""
    yield from private_server()


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a policy process behind."""
    import subprocess

    def workers() -> set[str]:
        listed = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False).stdout
        return set(listed.split())

    before = workers()
    yield
    assert workers() <= before
