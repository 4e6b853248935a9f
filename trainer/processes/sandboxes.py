"""Which sandbox: by name, or the first that works on this machine."""

from __future__ import annotations

import functools
import importlib
import subprocess
from collections.abc import Sequence

from agl.errors import ConfigError
from agl.extras import require
from agl.trainer.processes.bubblewrap import Bubblewrap
from agl.trainer.processes.container import Container
from agl.trainer.processes.sandbox import Sandbox, Walls, piped

RENTED = ("e2b", "daytona")


class Unconfined(Sandbox):
    """No walls: limits of processor time, memory and file size are all that holds a command."""

    name = "none"
    mounts = False

    def problem(self) -> None:
        return None

    def start(self, command: Sequence[str], walls: Walls) -> subprocess.Popen[bytes]:
        return piped(command, walls.environment)


def chosen(isolation: str | Sandbox) -> Sandbox:
    """A sandbox, or that of a name; for "auto" the first of bubblewrap, podman and docker that works here.

    Raises:
        ConfigError: it does not work here, with the line that installs one.
    """
    if isolation in RENTED:  # named by the user alone: they cost money
        require(f'isolation="{isolation}"', "sandboxes")
        isolation = importlib.import_module("agl_sandboxes").NAMED[isolation]
    if isinstance(isolation, Sandbox):
        if problem := isolation.problem():
            raise ConfigError(f"isolation={isolation.name!r} does not work here", hint=problem)
        return isolation
    return _named(isolation)


@functools.cache
def _named(name: str) -> Sandbox:
    sandboxes: list[Sandbox] = [Bubblewrap(), Container("podman"), Container("docker"), Unconfined()]
    known = {one.name: one for one in sandboxes}
    names = [name] if name != "auto" else [other for other in known if other != "none"]
    if not set(names) <= known.keys():
        raise ConfigError(f"isolation={name!r} is unknown", hint=f'give "auto" or one of {(*known, *RENTED)}')
    problems = []
    for one in names:
        if (problem := known[one].problem()) is None:
            return known[one]
        problems.append(f"{one}: {problem}")
    raise ConfigError(
        f"no sandbox can run untrusted programs here ({'; '.join(problems)})",
        hint="on Debian and Ubuntu: apt-get install bubblewrap libseccomp2 (docs/security.md has the others); "
        'isolation="none" runs programs without walls, as your user: only for models that you trust',
    )
