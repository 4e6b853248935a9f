"""Daytona: a container or a virtual machine for each command (`DAYTONA_API_KEY`)."""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Callable
from typing import Any

from agl_sandboxes.rented import SECONDS, Machine, Rented

_SESSION = "agl"
# Whatever user it was started for, a session has that of the snapshot's image: in Daytona's own, one who may use sudo.
_AS_ROOT = """sh -c '[ "$(id -u)" = 0 ] || set -- sudo -n "$@"; exec "$@"' sh """


class Daytona(Rented):
    """A machine of Daytona without a network: `PythonTests(isolation="daytona")`, or `isolation=Daytona(snapshot=...)`.

    Args:
        snapshot: has `python3`, `unshare` and `mount`, root or `sudo` without a password, and the packages that
            programs may import; Daytona's default if None. Its memory is more than a program's `memory_mb`.
        seconds: after which Daytona ends a machine whose bridge was killed, rounded up to whole minutes.
    """

    name = "daytona"
    package = "daytona"
    key = "DAYTONA_API_KEY"
    prefix = "DAYTONA_"

    def __init__(self, snapshot: str | None = None, seconds: int = SECONDS) -> None:
        super().__init__(snapshot=snapshot, seconds=seconds)

    @classmethod
    def rent(cls, command: str, settings: dict[str, Any]) -> Machine:
        # By its name: this file has the same.
        daytona: Any = importlib.import_module("daytona")
        minutes = math.ceil(settings["seconds"] / 60)
        wanted = daytona.CreateSandboxFromSnapshotParams(
            snapshot=settings["snapshot"],
            os_user="root",
            labels={"for": "agl"},
            network_block_all=True,
            auto_stop_interval=0,  # one that waits has nothing to do
            ttl_minutes=minutes,
            ephemeral=True,
        )
        machine = daytona.Daytona().create(wanted)
        try:
            request = daytona.SessionExecuteRequest(
                command=_AS_ROOT + command, run_async=True, suppress_input_echo=True
            )
            machine.process.create_session(_SESSION)
            return _Machine(machine, machine.process.execute_session_command(_SESSION, request).cmd_id, minutes)
        except BaseException:
            machine.delete()
            raise


class _Machine:
    def __init__(self, machine: Any, command: str, minutes: int) -> None:
        self._machine = machine
        self._command = command
        self._minutes = minutes

    def send(self, data: bytes) -> None:
        self._machine.process.send_session_command_input(_SESSION, self._command, data.decode())

    def follow(self, output: Callable[[str], object], errors: Callable[[str], object]) -> None:
        asyncio.run(self._machine.process.get_session_command_logs_async(_SESSION, self._command, output, errors))

    def keep(self) -> None:
        self._machine.set_ttl(self._minutes)

    def end(self) -> None:
        self._machine.delete()
