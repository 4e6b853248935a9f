"""What the tests share: the tiers, models made here, and the order in which tests run (docs/testing.md)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import prefork
import pytest
from pairwise import pairwise
from paths import pythonpath
from postgres import Server, private_server
from shared import alone, made_once, workers

from agl.testing.runs import reads

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs that tests start see this tree, too, never an installed copy; `pythonpath` of pyproject.toml is pytest's own.
os.environ["PYTHONPATH"] = pythonpath()
# The keys that servers make for themselves go here, and not among those of the person who runs the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="agl-tests-state-")

# How long an example may take says something about the machine alone. The version matrix does without hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("agl", deadline=None)
    settings.load_profile("agl")

# A shell has its background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As nohup does with the end of a terminal, which ends a run of agl as Ctrl-C does.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# `--capabilities`, which writes the matrix of docs/adapters.md.
pytest_plugins = ["agl.testing.capabilities"]

# The tests of another distribution, which `test_seventh_adapter.py` runs where that is installed.
collect_ignore = ["seventh"]

# What the suites of `*_suite.py` assert is shown like what tests assert.
pytest.register_assert_rewrite("engine_suite", "agl.testing.conformance", "agl.testing.open_calls")


FAST = frozenset(Path(__file__).parent / name for name in ("unit", "api"))
"""The fast tier: what stands here and is marked neither `slow`, `full` nor `night`."""


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else some libraries find at the exit that their objects were never freed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("tiers").addoption(
        "--all",
        action="store_true",
        dest="all_tiers",
        help="run all tests; without this and without paths: the fast tier",
    )
    group = parser.getgroup("adapters")
    group.addoption("--subjects", default="", help="of our own subjects these only, by name, with commas between")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Without paths, the fast tier, in several processes where pytest-xdist is installed; or everything."""
    options = config.option
    options.fast_tier = False
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    options.fast_tier = not options.all_tiers
    # The processes of pytest-xdist come by here, too: they parse the same command line.
    is_worker = hasattr(config, "workerinput")
    if options.all_tiers:
        config.args[:] = [str(Path(__file__).parent)]
    elif not is_worker and getattr(options, "numprocesses", 0) is None and not options.usepdb and (n := workers()) > 1:
        options.numprocesses, options.dist = n, "loadfile"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tiers, leave out what was not asked for, and put slow tests last.

    Of the conformance suite's cases with a way of running an agent or of reading its answer, the fast tier has the
    first way of every subject; the full tier adds others until each way has met each subject and each property
    (`pairwise`); the nightly script runs all.
    """
    found = [(item, *subject_of(item)) for item in items]
    by_way = [
        (item, subject, given["way" if "way" in given else "read"])
        for item, subject, given in found
        if subject is not None and not given.keys().isdisjoint(("way", "read"))
    ]
    first = {i for i, (_, subject, way) in enumerate(by_way) if way in (*subject.ways[:1], *reads(subject)[:1])}
    chosen = pairwise([(item.name.partition("[")[0], subject.name, way) for item, subject, way in by_way], first)
    for i, (item, _, _) in enumerate(by_way):
        if i not in first:
            item.add_marker("full" if i in chosen else "night")
    for item in items:
        if not FAST.isdisjoint(item.path.parents) and not any(map(item.get_closest_marker, ("slow", "full", "night"))):
            item.add_marker("fast")
    subjects = {*config.getoption("subjects").split(",")} - {""}

    def is_left_out(item: pytest.Item) -> bool:
        if getattr(config.option, "fast_tier", False) and item.get_closest_marker("fast") is None:
            return True
        subject, parameters = subject_of(item)
        return bool(subjects) and "subject" in parameters and (subject is None or subject.name not in subjects)

    left_out = {item for item in items if is_left_out(item)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def subject_of(item: pytest.Item) -> tuple[Any, dict[str, Any]]:
    """The subject of a conformance case, None where no installed one has that case; and all parameters."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    subject = parameters.get("subject")
    return subject if hasattr(subject, "ways") else None, parameters


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where the matrix is written, the table of what our extras ask for is, too, if the file has a place for it."""
    file = session.config.getoption("capabilities")
    if file is not None and file.exists() and "<!-- requirements: begin -->" in (text := file.read_text()):
        from extras import requirements

        from agl.testing.capabilities import written

        file.write_text(written(text, "requirements", requirements()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """No slow test begins after AGL_TEST_SLOW_UNTIL, and none at all after AGL_TEST_UNTIL, both seconds since 1970.

    The report names those that did not run.
    """
    if _is_over("AGL_TEST_UNTIL") or (_is_over("AGL_TEST_SLOW_UNTIL") and item.get_closest_marker("slow") is not None):
        pytest.skip("the time for tests is over; .ci/nightly runs them")


def _is_over(name: str) -> bool:
    """Whether the time that the environment variable says has come; False without the variable."""
    until = os.environ.get(name)
    return until is not None and time.time() > float(until)


COLLECTED = pytest.StashKey[frozenset[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse tests of one name in several processes: pytest-xdist would run one of them and drop the others."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        twice = [name for name, n in Counter(item.nodeid for item in session.items).items() if n > 1]
        if twice:
            raise pytest.UsageError(f"mark as serial, and run with -n0: {', '.join(twice)}")
    session.config.stash[COLLECTED] = frozenset(sys.modules)
    # What has been imported stays: each run would visit all of it, as it begins, in search of garbage.
    gc.collect()
    gc.freeze()


@pytest.fixture
def imported_by_collection(request: pytest.FixtureRequest) -> frozenset[str]:
    """The modules that were imported when all tests were collected; skips a run of other tests than the fast tier."""
    if not getattr(request.config.option, "fast_tier", False):
        pytest.skip("other test files than the fast tier's may import what they test")
    return request.config.stash[COLLECTED]


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small model with random weights and the quickstart's tokenizer and chat template."""
    from untrained import make_untrained

    return made_once(tmp_path_factory, "untrained", make_untrained)


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's own policy, warm-started as `agl make-policy` does."""
    from agl.trainer.quickstart.policy import make_policy

    return made_once(tmp_path_factory, "tiny-policy", lambda folder: make_policy(folder, seed=0, threads=1))


@pytest.fixture(scope="session")
def role_policy(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That policy, taught to write, check, play and fetch (`roles`), mostly badly."""
    from roles import make_role_policy

    return made_once(tmp_path_factory, "role-policy", lambda folder: make_role_policy(folder, tiny_policy))


def pytest_runtest_teardown() -> None:
    """Heed stop signals again: a command that a test has run in this process ignores them from its end on, and so would
    every program that a later test starts."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    stop_signals = sys.modules.get("agl.stop_signals")
    if stop_signals is not None:
        stop_signals._ends_when_stopped = False


@pytest.fixture(scope="session", autouse=True)
def forked_policies() -> Iterator[None]:
    """Policy processes are forked from one that has imported torch."""
    # The version matrix has environments without torch.
    forks = sys.platform == "linux" and find_spec("torch") is not None
    with prefork.forked_policies() if forks else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module")
def executed_policies() -> Iterator[None]:
    """For tests of how policy processes start and end: they are started as users' are."""
    with prefork.executed_policies():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server that all tests share; those that kill theirs make one of their own."""
    yield from private_server()


@pytest.fixture(scope="module")
def one_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One test file at a time has a Ray cluster: whoever starts Ray joins a cluster that is there already."""
    with alone(tmp_path_factory, "ray"):
        yield


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a policy process behind."""
    before = prefork.children()
    yield
    assert prefork.children() <= before
