"""What a run may find on its machine: another trainer, damaged files, no space. A clear error, nothing overwritten."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT
from processes import programs
from programs.small_run import train

from agl.errors import CheckpointError, ConfigError, StoreError
from agl.trainer.run.checkpoints import read_facts
from agl.trainer.run.lock import lock_directory

PROGRAM = SUPPORT / "programs" / "small_run.py"
_NAMESPACES = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
own_disk = pytest.mark.skipif(_NAMESPACES.returncode != 0, reason="needs unprivileged mount namespaces")


def run(directory: Path, model: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, directory, model],
        env=os.environ | environment, text=True, capture_output=True, timeout=300,
    )  # fmt: skip


def run_on_disk(mount: str, directory: Path, model: Path) -> subprocess.CompletedProcess[str]:
    """Run with another file system at `directory`; what is on it is copied to `<directory>-kept` afterwards."""
    kept = f"{directory}-kept"
    script = f'{mount} && "$@"; code=$?; cp -r {directory} {kept}; exit $code'
    directory.mkdir(exist_ok=True)
    return subprocess.run(
        ["unshare", "-rm", "bash", "-c", script, "run", sys.executable, PROGRAM, directory / "run", model],
        text=True, capture_output=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory after two steps."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    train(directory, untrained_model)
    return directory


@pytest.fixture
def stopped(trained: Path, tmp_path: Path) -> Path:
    """A copy of that directory, for a test to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.night
def test_a_second_trainer_is_refused_until_the_first_ends(untrained_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with programs(tmp_path) as started:
        first = started.start(sys.executable, PROGRAM, directory, untrained_model, "--steps", "100000", log="first.log")
        started.until(lambda: (directory / "checkpoints" / "step-000001").exists(), 120, "a checkpoint")
        before = (directory / "run-id").read_text()
        with pytest.raises(ConfigError, match=f"is in use by process {first.pid} on {os.uname().nodename}"):
            train(directory, untrained_model, resume=True)
        assert (directory / "run-id").read_text() == before
        assert first.poll() is None
    # It was killed; the lock of a dead process is nobody's.
    lock_directory(directory).close()


def test_a_lock_is_one_trainers(tmp_path: Path) -> None:
    with lock_directory(tmp_path), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"):
        lock_directory(tmp_path)
    lock_directory(tmp_path).close()


def test_what_a_run_writes_is_its_owners_alone(trained: Path) -> None:
    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    assert (mode(trained), mode(trained / "checkpoints"), mode(trained / "run.db")) == (0o700, 0o700, 0o600)


@pytest.mark.parametrize(
    "record", ["", "[1]", "{}", '{"run_id": 1, "step": "2", "history": {}}', '{"run_id": "r", "step": 2, "history":']
)
def test_a_checkpoints_record_of_another_shape(tmp_path: Path, record: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(record)
    with pytest.raises(CheckpointError, match=r"(?s)the checkpoint.*take the one before"):
        read_facts(file, {"run_id": str, "step": int, "history": list}, hint="take the one before")


def test_a_run_goes_on_from_the_checkpoint_before_a_broken_one(stopped: Path, untrained_model: Path) -> None:
    broken = stopped / "checkpoints" / "step-000002"
    (broken / "run.json").write_text("[1]")
    before = contents(stopped / "checkpoints")
    with pytest.raises(CheckpointError, match="delete the checkpoint's folder to resume from the one before"):
        train(stopped, untrained_model, resume=True)
    assert contents(stopped / "checkpoints") == before
    shutil.rmtree(broken)
    assert [entry["step"] for entry in train(stopped, untrained_model, resume=True).history] == [1, 2]


def test_a_store_that_was_emptied(stopped: Path, untrained_model: Path) -> None:
    (stopped / "run.db").write_bytes(b"")
    before = contents(stopped / "checkpoints")
    with pytest.raises(StoreError, match="the run's store holds no rollout of step 2"):
        train(stopped, untrained_model, resume=True)
    assert contents(stopped / "checkpoints") == before


@pytest.mark.night
def test_a_store_whose_journal_was_deleted(untrained_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with programs(tmp_path) as started:
        started.start(sys.executable, PROGRAM, directory, untrained_model, "--steps", "100000", log="first.log")
        started.until(lambda: (directory / "checkpoints" / "step-000002").exists(), 120, "a checkpoint")
    (directory / "run.db-wal").unlink()
    (directory / "run.db-shm").unlink()
    with pytest.raises(StoreError, match=r"its journal \(run\.db-wal\) was deleted"):
        train(directory, untrained_model, resume=True, steps=100_000)


def test_a_truncated_store(stopped: Path, untrained_model: Path) -> None:
    store = stopped / "run.db"
    os.truncate(store, store.stat().st_size // 2)
    before = store.read_bytes()
    with pytest.raises(StoreError, match="the database is damaged"):
        train(stopped, untrained_model, resume=True)
    assert store.read_bytes() == before


@own_disk
@pytest.mark.parametrize("kilobytes", [700, 1500])
@pytest.mark.night
def test_a_full_disk(untrained_model: Path, tmp_path: Path, kilobytes: int) -> None:
    """Wherever it fills up, the error says so, and what was written before stays whole."""
    disk = tmp_path / "disk"
    ended = run_on_disk(f"mount -t tmpfs -o size={kilobytes}k tmpfs {disk}", disk, untrained_model)
    assert ended.returncode == 1, ended.stdout
    last = ended.stderr.strip().splitlines()
    assert any("Error: " in line for line in last[-2:])
    assert any("space" in line for line in last[-2:])
    assert "Traceback" not in ended.stderr
    for checkpoint in (tmp_path / "disk-kept" / "run" / "checkpoints").glob("step-*"):
        assert json.loads((checkpoint / "run.json").read_text())["history"]


@own_disk
def test_a_directory_that_cannot_be_written(untrained_model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    ended = run_on_disk(f"mount -t tmpfs -o ro tmpfs {disk}", disk, untrained_model)
    assert ended.returncode == 1
    assert "ConfigError: the run's directory cannot be written" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_few_file_descriptors(untrained_model: Path, tmp_path: Path) -> None:
    ended = run(tmp_path / "run", untrained_model, RLIMIT_NOFILE="32")
    assert ended.returncode == 1
    assert "this process may open 32 files, and 1 workers need up to 68" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.night
def test_little_address_space(untrained_model: Path, tmp_path: Path) -> None:
    """Too little to load torch's libraries, which is noticed in the same place each time."""
    ended = run(tmp_path / "run", untrained_model, RLIMIT_AS="500000000")
    assert ended.returncode == 1
    assert "ModelLoadError: cannot load" in ended.stderr
    assert "Traceback" not in ended.stderr
