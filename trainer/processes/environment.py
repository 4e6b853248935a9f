"""What processes that agl starts get of this one's environment, and how this process keeps its own to itself.

A program is trusted in one of two ways. A tool (a command agent, a grader's process, a policy's process) gets the
variables of an allow-list, and those that the user names. The user's own program (a worker process with the user's
Python agent, the command of `agl run`) gets everything but agl's own: keys, addresses of stores and databases.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from agl.errors import ConfigError

Variables = Mapping[str, str] | Iterable[str]
"""Environment variables: {name: value}, or the names of those that are passed on from this process."""

ALLOWED = (
    # The user, the terminal, the language.
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "PWD",
    "TERM",
    "TERMINFO*",
    "COLORTERM",
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR*",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "TMP",
    "TEMP",
    "XDG_*",
    # Windows.
    "SYSTEMROOT",
    "SYSTEMDRIVE",
    "WINDIR",
    "COMSPEC",
    "PATHEXT",
    "OS",
    "APPDATA",
    "LOCALAPPDATA",
    "PROGRAMDATA",
    "PROGRAMFILES*",
    "COMMONPROGRAMFILES*",
    "USERPROFILE",
    "USERNAME",
    "HOMEDRIVE",
    "HOMEPATH",
    "PROCESSOR_*",
    "NUMBER_OF_PROCESSORS",
    # Libraries and languages.
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "DYLD_*",
    "PYTHON*",
    "VIRTUAL_ENV",
    "CONDA_*",
    "NODE_*",
    "NVM_*",
    "JAVA_HOME",
    "GOPATH",
    "GOROOT",
    "GOCACHE",
    "CARGO_HOME",
    "RUSTUP_HOME",
    "DOTNET_*",
    "GEM_HOME",
    "GEM_PATH",
    "RUBYLIB",
    "PERL5LIB",
    "PLAYWRIGHT_*",
    "PIP_CACHE_DIR",
    "UV_CACHE_DIR",
    "NPM_CONFIG_CACHE",
    # The network.
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    # Accelerators, numerics, models.
    "CUDA_*",
    "NVIDIA_*",
    "NCCL_*",
    "ROCM_*",
    "ROCR_*",
    "HIP_*",
    "HSA_*",
    "OMP_*",
    "GOMP_*",
    "KMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "VECLIB_*",
    "NUMEXPR_*",
    "MALLOC_*",
    "TORCH*",
    "PYTORCH_*",
    "TRITON_*",
    "TOKENIZERS_PARALLELISM",
    "HF_HOME",
    "HF_HUB_*",
    "HF_DATASETS_*",
    "HF_ENDPOINT",
    "TRANSFORMERS_*",
    # Tracing.
    "OTEL_*",
)
"""Names and globs, compared in upper case."""
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|HEADERS|COOKIE")
"""What is in no name that a glob of `ALLOWED` lets pass."""
_SETTINGS = ("AGL_CAPTURE_CONTENT", "AGL_CACHE", "AGL_ALLOWED_HOSTS", "AGL_LIMIT_*")
"""Variables of agl that hold no secret, as names and globs: they stay, as agl's own programs read them at any time."""
_SERVER = "AGENT_LIGHTNING_SERVER_URL"
_PR_SET_DUMPABLE = 4


def child_environment(env: Variables = (), *, own_program: bool = False) -> dict[str, str]:
    """The environment of a process that agl starts.

    Args:
        env: variables in addition: {name: value}, or names of those of this process; names that are not set here are
            left out.
        own_program: whether it runs the user's own code as the user's program, which gets all but agl's own variables;
            otherwise only those of `ALLOWED`.
    """
    passes = _not_agls if own_program else _allowed
    return {name: value for name, value in os.environ.items() if passes(name)} | values_of(env)


def values_of(env: Variables) -> dict[str, str]:
    """Names and values of variables.

    Raises:
        ConfigError: a name or value is no text, or a name holds "=".
    """
    if isinstance(env, str):
        env = [env]
    elif isinstance(env, Mapping):
        if wrong := [name for name, value in env.items() if not isinstance(name, str) or not isinstance(value, str)]:
            raise ConfigError(f"env: {wrong[0]!r} has no text as its value", hint="env={name: value}, or env=[names]")
        return dict(env)
    names = list(env)
    if wrong := [name for name in names if not isinstance(name, str) or "=" in name]:
        raise ConfigError(f"env: {wrong[0]!r} is not the name of a variable", hint="env={name: value}, or env=[names]")
    return {name: os.environ[name] for name in names if name in os.environ}


def keep_secrets() -> None:
    """Remove agl's variables from this process, where agents run or are started, and keep others from reading them.

    For agl's own programs, once they have read them. Also what /proc shows of the environment that this process was
    started with is overwritten.
    """
    names = [name for name in os.environ if not _not_agls(name)]
    for name in names:
        del os.environ[name]
    _overwrite(names)
    hide_process()


@contextlib.contextmanager
def without_agls_variables() -> Iterator[None]:
    """agl's variables are missing in this process's environment within the block.

    For starting processes through libraries that pass all of it on.
    """
    taken = {name: value for name, value in os.environ.items() if not _not_agls(name)}
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)


def hide_process() -> None:
    """Keep other processes of this user from reading this one's memory and environment in /proc; Linux only.

    No protection from root. Debuggers of the same user cannot attach either, and no core is dumped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _allowed(name: str) -> bool:
    upper = name.upper()
    return upper in ALLOWED or (
        not _SECRET.search(upper) and any("*" in pattern and fnmatchcase(upper, pattern) for pattern in ALLOWED)
    )


def _not_agls(name: str) -> bool:
    is_setting = any(fnmatchcase(name, setting) for setting in _SETTINGS)
    return is_setting or not (name.startswith("AGL_") or name == _SERVER)


def _overwrite(names: Iterable[str]) -> None:
    """Overwrite these variables where this process was given them, which /proc/PID/environ shows; Linux only."""
    if sys.platform != "linux":
        return
    prefixes = tuple(name.encode() + b"=" for name in names)
    # Source: proc_pid_stat(5), fields 50 and 51, env_start and env_end; the name in parentheses is field 2.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start = int(fields[47])
    end = int(fields[48])
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0") if start else ():
        if prefixes and entry.startswith(prefixes):
            ctypes.memset(at, 0, len(entry))
        at += len(entry) + 1
