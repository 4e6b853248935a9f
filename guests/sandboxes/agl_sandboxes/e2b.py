"""e2b: a micro virtual machine for each command (`E2B_API_KEY`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from agl_sandboxes.rented import SECONDS, Machine, Rented


class E2B(Rented):
    """A machine of e2b without a network: `PythonTests(isolation="e2b")`, or `isolation=E2B(template=...)`.

    Args:
        template: has `python3`, `unshare` and `mount`, and the packages that programs may import; e2b's base if None.
        seconds: after which e2b ends a machine whose bridge was killed.
    """

    name = "e2b"
    package = "e2b"
    key = "E2B_API_KEY"
    prefix = "E2B_"

    def __init__(self, template: str | None = None, seconds: int = SECONDS) -> None:
        super().__init__(template=template, seconds=seconds)

    @classmethod
    def rent(cls, command: str, settings: dict[str, Any]) -> Machine:
        # By its name: this file has the same.
        e2b: Any = importlib.import_module("e2b")
        machine = e2b.Sandbox.create(
            settings["template"], timeout=settings["seconds"], allow_internet_access=False, metadata={"for": "agl"}
        )
        try:
            return _Machine(machine, command, settings["seconds"])
        except BaseException:
            machine.kill()
            raise


class _Machine:
    def __init__(self, machine: Any, command: str, seconds: int) -> None:
        self._machine = machine
        self._seconds = seconds
        self._handle = machine.commands.run(
            command, background=True, stdin=True, user="root", cwd="/", timeout=0, retain_output=False
        )

    def send(self, data: bytes) -> None:
        self._machine.commands.send_stdin(self._handle.pid, data)

    def follow(self, output: Callable[[str], object], errors: Callable[[str], object]) -> None:
        self._handle.wait(on_stdout=output, on_stderr=errors)

    def keep(self) -> None:
        self._machine.set_timeout(self._seconds)

    def end(self) -> None:
        self._machine.kill()
