"""What a process that agl starts sees of the environment, and what it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl.trainer.processes.environment import child_environment, without_agls_variables

SECRETS = {
    "AGL_OPERATOR_KEY": "a", "AGL_RUNNER_KEY": "b", "AGL_KEY": "c", "AGL_DATABASE_URL": "postgresql://u:p@h/d",
    "AGL_STORE": "http://:k@h", "AGENT_LIGHTNING_SERVER_URL": "http://:k@h", "AGL_HANDOVER": "{}",
}  # fmt: skip
PROVIDERS = {"OPENAI_API_KEY": "sk-1", "ANTHROPIC_API_KEY": "sk-2", "HF_TOKEN": "hf", "MY_DATABASE": "mine"}
HIDDEN_BY_THEIR_NAME = {"OTEL_EXPORTER_OTLP_HEADERS": "k", "NODE_AUTH_TOKEN": "t", "CONDA_TOKEN": "t"}
NEEDED = {
    "PATH": "/bin", "HOME": "/home/u", "LC_ALL": "C", "TMPDIR": "/t", "VIRTUAL_ENV": "/v", "PYTHONPATH": "/p",
    "https_proxy": "http://proxy", "NO_PROXY": "h", "SSL_CERT_FILE": "/c", "CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/h",
    "NODE_EXTRA_CA_CERTS": "/n", "OTEL_SERVICE_NAME": "s", "TZ": "UTC",
}  # fmt: skip


SETTINGS = {
    "AGL_CAPTURE_CONTENT": "0", "AGL_CACHE": "/c", "AGL_ALLOWED_HOSTS": "proxy", "AGL_LIMIT_MESSAGES": "3"
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in {**SECRETS, **PROVIDERS, **HIDDEN_BY_THEIR_NAME, **NEEDED, **SETTINGS}.items():
        monkeypatch.setenv(name, value)


def test_a_tool_sees_the_allowed_and_the_named() -> None:
    assert child_environment() == NEEDED
    assert child_environment(["OPENAI_API_KEY", "UNSET"]) == {**NEEDED, "OPENAI_API_KEY": "sk-1"}
    assert child_environment("HF_TOKEN") == {**NEEDED, "HF_TOKEN": "hf"}
    assert child_environment({"PATH": "/other", "X": "1"}) == {**NEEDED, "PATH": "/other", "X": "1"}


def test_the_users_own_program_sees_all_but_agls() -> None:
    own = {**PROVIDERS, **HIDDEN_BY_THEIR_NAME, **NEEDED, **SETTINGS}
    seen = child_environment(own_program=True)
    assert {n: v for n, v in seen.items() if not n.startswith("PYTEST_")} == own
    with without_agls_variables():
        assert not SECRETS.keys() & os.environ.keys()
    assert os.environ["AGL_KEY"] == "c"


@pytest.mark.parametrize("env", [{"A": 1}, ["A=b"], [1]])
def test_what_names_no_variable_is_an_error(env: Any) -> None:
    with pytest.raises(ConfigError, match="env: "):
        child_environment(env)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_program_that_keeps_its_secrets_shows_them_to_nobody() -> None:
    """Neither to its children, nor in /proc to root."""
    text = "import os, subprocess, sys; from agl.trainer.processes.environment import keep_secrets; keep_secrets(); "
    text += "print('ready', 'AGL_KEY' in os.environ, subprocess.check_output(['env']), flush=True); sys.stdin.read()"
    source = str(Path(__file__).parents[2] / ".src")
    environment = {"PATH": "/bin:/usr/bin", "PYTHONPATH": source, "AGL_KEY": "agl-secret", "OPENAI_API_KEY": "sk-1"}
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as program:
        assert program.stdout is not None
        said = program.stdout.readline()
        assert said.startswith(b"ready False"), said
        assert b"agl-secret" not in said
        assert b"sk-1" in said
        try:
            shown = Path(f"/proc/{program.pid}/environ").read_bytes()
        except PermissionError:
            pass
        else:
            assert b"agl-secret" not in shown
            assert os.geteuid() == 0
        assert program.stdin is not None
        program.stdin.close()
