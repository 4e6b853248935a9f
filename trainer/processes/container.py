"""A sandbox that is a container of podman's or docker's, with the interpreter of an image."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from agl.trainer.processes.sandbox import Sandbox, Walls, piped, tried

IMAGE = "docker.io/library/python:3.12-slim"


class Container(Sandbox):
    """A container for each command: no network, a read-only image, no capabilities, limits by control groups.

    Args:
        engine: "podman" or "docker".
        image: has the interpreter, and the packages that programs may import. Never pulled by agl.
        network: what the engine calls it.
    """

    python = "python3"

    def __init__(self, engine: str, image: str = IMAGE, network: str = "none") -> None:
        self.name = engine
        self.image = image
        self.network = network

    def problem(self) -> str | None:
        if not shutil.which(self.name):
            return f"{self.name} is not installed"
        if problem := tried([self.name, "image", "inspect", self.image]):
            absent = "no such" in problem.lower() or "not known" in problem
            return f"{problem} ({self.name} pull {self.image})" if absent else problem
        return None

    def start(self, command: Sequence[str], walls: Walls) -> subprocess.Popen[bytes]:
        # podman's monitor leaves a file "oom" where it was started, once memory ran out; in /proc there can be none.
        nowhere = "/proc" if Path("/proc").is_dir() else None
        return piped(self.arguments(command, walls), engine_environment(), cwd=nowhere)

    def arguments(self, command: Sequence[str], walls: Walls) -> list[str]:
        """The engine's command."""
        scratch = f"rw,nosuid,nodev,mode=1777,size={walls.scratch_mb}m"
        arguments = [
            self.name,
            "run",
            "--rm",
            "--interactive",
            f"--network={self.network}",
            "--read-only",
            "--cap-drop=ALL",
        ]
        arguments += ["--security-opt=no-new-privileges", "--user=65534:65534", "--workdir=/", "--entrypoint="]
        arguments += [f"--memory={walls.memory_mb}m", f"--memory-swap={walls.memory_mb}m", "--ipc=private"]
        arguments += [f"--pids-limit={walls.processes + 2}", "--ulimit=nofile=256:256", "--ulimit=nproc=4096:4096"]
        arguments += [f"--tmpfs=/tmp:{scratch}", f"--shm-size={walls.scratch_mb}m"]
        if self.name == "podman":  # whose own filter lets a program make namespaces, and reach the host by AF_VSOCK
            arguments += [f"--security-opt=seccomp={Path(__file__).with_name('seccomp.json')}"]
        arguments += [f"--env={name}={value}" for name, value in walls.environment.items()]
        arguments += [f"--volume={path}:{inside}:ro" for inside, path in walls.folders.items()]
        return [*arguments, self.image, *command]


def engine_environment() -> dict[str, str]:
    """What the engine's own program needs of this process's variables."""
    names = ("PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR")
    return {
        name: os.environ[name] for name in os.environ if name in names or name.startswith(("DOCKER_", "CONTAINERS_"))
    }
