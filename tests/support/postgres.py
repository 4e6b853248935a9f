"""A PostgreSQL server of our own for the tests: made in a temporary directory, killed and started again at will."""

from __future__ import annotations

import getpass
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_names = map("db{}".format, itertools.count())


def find(program: str) -> str | None:
    """One of PostgreSQL's programs: Debian keeps them out of the PATH."""
    newest = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"), key=lambda path: int(path.parts[4]))
    return next(map(str, reversed(newest)), None) or shutil.which(program)


class Server:
    """A server on a Unix socket and a loopback port.

    Args:
        directory: where everything goes, short enough for a socket's path.
        durable: whether it syncs, which matters to a machine that loses power alone.
    """

    def __init__(self, directory: str, *, durable: bool = False) -> None:
        self.directory, self.data = directory, f"{directory}/data"
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:  # the server refuses to run as root
            account = pwd.getpwnam("postgres" if _exists("postgres") else "nobody")
            os.chown(directory, account.pw_uid, account.pw_gid)
            self._as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._start = ("-D", self.data, "-w", "-t", "60", "-l", f"{directory}/log", "start")
        self._run("initdb", "-D", self.data, "-U", "agl", "-A", "trust", "-E", "UTF8", "--no-sync")
        settings = {
            "unix_socket_directories": f"'{directory}'",
            "listen_addresses": "'127.0.0.1'",
            "port": self.port,
            "max_connections": 60,
            "fsync": "on" if durable else "off",
            "shared_buffers": "'64MB'",
        }
        with open(f"{self.data}/postgresql.conf", "a") as config:
            config.writelines(f"{name} = {value}\n" for name, value in settings.items())
        self.start()

    def start(self) -> None:
        """Start it, again if it was killed; its memory is free once the last of its processes has gone."""
        for _ in range(20):
            if self._run("pg_ctl", *self._start, check=False):
                return
            time.sleep(0.2)
        self._run("pg_ctl", *self._start)

    def kill(self) -> None:
        """As a power cut would: no process of it gets to say anything."""
        head = int(Path(self.data, "postmaster.pid").read_text().split()[0])
        family = subprocess.run(["ps", "-o", "pid=", "--ppid", str(head)], capture_output=True, text=True, check=False)
        for pid in (head, *map(int, family.stdout.split())):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        # They name a process that nobody may have reaped yet.
        for lock in (Path(self.data, "postmaster.pid"), Path(self.directory, f".s.PGSQL.{self.port}.lock")):
            lock.unlink(missing_ok=True)

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-m", "immediate", "-w", "stop", check=False)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://agl@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = next(_names)
        self.sql(f"CREATE DATABASE {name}")
        return self.url(name)

    def sql(self, statement: str, url: str | None = None) -> list[Any]:
        """Run a statement, in the URL's database."""
        import psycopg

        with psycopg.connect(url or self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str, check: bool = True) -> bool:
        path = find(program)
        assert path is not None
        # Files, not pipes: the server keeps what it inherits open.
        with open(f"{self.directory}/{program}.out", "w+") as out:
            done = subprocess.run([path, *arguments], stdout=out, stderr=out, cwd="/", check=False, **self._as)
            out.seek(0)
            assert not check or done.returncode == 0, out.read()
        return done.returncode == 0


def _exists(user: str) -> bool:
    try:
        return bool(pwd.getpwnam(user))
    except KeyError:
        return False


def require() -> None:
    """Skip the test where there is no PostgreSQL."""
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed")
    if find("initdb") is None or find("pg_ctl") is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")


def private_server(**options: Any) -> Iterator[Server]:
    """A server that ends with the generator."""
    require()
    # Not below pytest's directory: other users may not enter that, and its path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix=f"agl-pg-{getpass.getuser()}-", dir="/tmp") as directory:
        server = Server(directory, **options)
        try:
            yield server
        finally:
            server.stop()
