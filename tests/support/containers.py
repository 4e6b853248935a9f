"""Podman's container with an image of this machine's own programs: nothing is pulled."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl.trainer.processes.container import Container

PYTHON = "/usr/bin/python3"


@contextlib.contextmanager
def own_image(folder: Path, *programs: str) -> Iterator[Container]:
    """A container with Python, its library, and these programs. Skips the test where there is no podman."""
    if not shutil.which("podman") or not shutil.which("runc") or not os.access(PYTHON, os.X_OK):
        pytest.skip("needs podman, runc and a Python in /usr/bin")
    (folder / "containers.conf").write_text('[engine]\nruntime = "runc"\n')
    root = folder / "root"
    for name in ("tmp", "proc", "dev", "sys", "etc"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    ask = "import sysconfig, glob, sys; print(sysconfig.get_path('stdlib')); print(sys.executable)"
    library, real = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    modules = [str(path) for path in Path(library, "lib-dynload").glob("*.so")]
    copied = [PYTHON, str(Path(real).resolve()), *(found for name in programs if (found := shutil.which(name)))]
    needed = subprocess.run(["ldd", real, *modules, *copied], capture_output=True, text=True, check=False).stdout
    files = {word for word in needed.split() if word.startswith("/") and Path(word).is_file()}
    for path in (*copied, *files):
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    shutil.copytree(library, root / library[1:], ignore=shutil.ignore_patterns("__pycache__", "test", "dist-packages"))
    image = f"localhost/agl-test-{folder.name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        subprocess.run(["tar", "-cf", folder / "image.tar", "-C", root, "."], check=True)
        subprocess.run(["podman", "import", "-q", folder / "image.tar", image], check=True, capture_output=True)
        sandbox = Container("podman", image)
        if problem := sandbox.problem():
            pytest.fail(problem)
        yield sandbox
        subprocess.run(["podman", "rmi", "--force", image], check=False, capture_output=True)
