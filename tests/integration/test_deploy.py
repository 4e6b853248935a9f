"""`deploy/`: the Compose file's own commands are run here, as they stand, and what it promises is checked."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT
from processes import fetch, free_port, programs

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SECONDS = 120
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:-|:\?)([^{}]*))?\}")


def filled(text: str, values: Mapping[str, str]) -> str:
    """Compose's substitution: `${NAME}`, `${NAME:-default}`, `${NAME:?error}`; a default may have one in it."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if values.get(name):
            return values[name]
        assert operator == ":-", f"{name} is not set"
        return rest

    while (done := _VARIABLE.sub(value, text)) != text:
        text = done
    return text


def example() -> dict[str, str]:
    """What `.env.example` sets."""
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def command(service: str, values: Mapping[str, str]) -> list[str]:
    """The service's command, with this installation's programs."""
    words = [filled(word, values) for word in SERVICES[service]["command"]]
    installed = {"agl": ["-c", "from agl.trainer.cli import main; main()"], "ray": ["-m", "ray.scripts.scripts"]}
    return [sys.executable, *installed[words[0]], *words[1:]]


def environment(service: str, values: Mapping[str, str]) -> dict[str, str]:
    """The service's environment."""
    return {name: filled(str(value), values) for name, value in SERVICES[service].get("environment", {}).items()}


def test_what_every_service_of_ours_has() -> None:
    ours = {name: s for name, s in SERVICES.items() if s.get("build")}
    assert set(ours) == {"server", "runner", "ray-head", "ray-worker"}
    for service in ours.values():
        assert (service["read_only"], service["cap_drop"], service["init"]) == (True, ["ALL"], True)
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    for name in ("server", "postgres", "ray-head"):
        assert SERVICES[name]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        named = [v.split(":")[0] for v in service.get("volumes", ()) if not v.startswith((".", "$"))]
        assert set(named) <= set(COMPOSE["volumes"])
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    users = re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE)
    assert users == ["agl"]


@pytest.mark.slow
def test_what_the_image_copies_is_enough_to_install_from(tmp_path: Path) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (tmp_path / "src").mkdir()
    for sources, target in re.findall(r"^COPY (.+) (\S+)$", dockerfile, re.MULTILINE):
        for source in sources.split():
            if (DEPLOY.parent / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(DEPLOY.parent / source, tmp_path / "src" / target, symlinks=True, ignore=ignored)
            else:
                shutil.copy(DEPLOY.parent / source, tmp_path / "src" / target)
    [projects] = re.findall(r"pip install .* \"(\.)\[\$\{EXTRAS\}\]\" (\S+)", dockerfile)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    installed = tmp_path / "installed"
    subprocess.run([*pip, "--target", installed, *projects], cwd=tmp_path / "src", check=True)
    code = "import agl, agl_service.command; print(agl.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True,
        check=True, cwd=tmp_path,
    )  # fmt: skip
    assert str(installed) in done.stdout


def test_no_secret_is_in_the_files() -> None:
    """Whatever is secret has no default, and nothing starts without it."""
    given = example()
    secret = {"POSTGRES_PASSWORD", "AGL_OPERATOR_KEY", "AGL_RUNNER_KEY", "RAY_AUTH_TOKEN"}
    assert {name for name, value in given.items() if not value} == secret
    text = (DEPLOY / "docker-compose.yml").read_text()
    for name, operator in re.findall(r"\$\{(\w+)(:-|:\?|)", text):
        assert operator == (":?" if name in secret | {"AGL_MODEL"} else ":-"), name
    assert "http://server:8123" in command("runner", {**given, "AGL_PORT": "8123"})
    with pytest.raises(AssertionError, match="AGL_RUNNER_KEY is not set"):
        environment("runner", given)


@pytest.mark.slow
def test_the_server_and_the_runner_start(untrained_model: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    agents = (DEPLOY / example()["AGL_AGENTS"]).resolve()
    keys = {"AGL_OPERATOR_KEY": "operator-key-of-this-test", "AGL_RUNNER_KEY": "runner-key-of-this-test"}
    values = {
        **example(), **keys, "POSTGRES_PASSWORD": "x", "AGL_PORT": str(port), "AGL_OUT": str(tmp_path / "run"),
        "AGL_CONFIG": str(DEPLOY / "run.yaml"), "AGL_MODEL": str(untrained_model), "AGL_SERVER": url,
        "AGL_AGENT": f"{agents}/agent.py:my_rollout", "AGL_WORKERS": "1",
    }  # fmt: skip
    server = {**environment("server", values), "AGL_DATABASE_URL": f"sqlite:///{tmp_path / 'store.db'}"}
    assert environment("server", values)["AGL_DATABASE_URL"] == "postgresql+psycopg://agl:x@postgres:5432/agl"
    del server["HF_HOME"]
    with programs(tmp_path, **server) as at:
        started = at.start(*command("server", values), log="server.log")
        at.until(lambda: fetch(f"{url}/health")[0] == 200, SECONDS, "the server")
        check = [word.replace("$$", "$") for word in SERVICES["server"]["healthcheck"]["test"]]
        assert check[:2] == ["CMD", "python"]
        healthy = [sys.executable, *check[2:]]
        assert subprocess.run(healthy, env={**os.environ, "AGL_PORT": str(port)}, timeout=30).returncode == 0
        assert subprocess.run(healthy, env={**os.environ, "AGL_PORT": str(free_port())}, timeout=30).returncode != 0
        assert fetch(f"{url}/data")[0] == 401
        at.environment |= environment("runner", values)
        at.environment.pop("AGL_OPERATOR_KEY")
        runner = at.start(*command("runner", values), log="runner.log")
        at.until(lambda: "at once for" in at.text("runner.log"), SECONDS, "the runner")
        assert runner.poll() is None
        # As `docker compose stop` ends it.
        started.send_signal(signal.SIGTERM)
        at.until(lambda: started.poll() is not None, 30, "the server's end")
        assert started.returncode == 0, at.text("server.log")
    assert "resume its run" in at.text("server.log")


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_ray_cluster_starts(one_ray: None, tmp_path: Path) -> None:
    values = {
        "RAY_PORT": str(free_port()), "RAY_DASHBOARD_PORT": str(free_port()), "RAY_HEAD": "127.0.0.1",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # fmt: skip
    assert environment("ray-worker", values) == environment("ray-head", values)
    with programs(tmp_path, **environment("ray-head", values)) as at:
        head = at.start(*command("ray-head", values), log="head.log")

        def listens() -> bool:
            with socket.create_connection(("127.0.0.1", int(values["RAY_PORT"])), 1.0):
                return True

        at.until(listens, SECONDS, "Ray's head")
        worker = at.start(*command("ray-worker", values), log="worker.log")
        at.until(lambda: "Ray runtime started" in at.text("worker.log"), SECONDS, "Ray's worker")
        assert (head.poll(), worker.poll()) == (None, None)
        check = [filled(word, values) for word in SERVICES["ray-head"]["healthcheck"]["test"]]
        assert check[:2] == ["CMD", "ray"]
        healthy = [sys.executable, "-m", "ray.scripts.scripts", *check[2:]]
        assert subprocess.run(healthy, env=at.environment, timeout=60).returncode == 0
        for program in (worker, head):
            program.send_signal(signal.SIGTERM)
            at.until(lambda program=program: program.poll() is not None, 60, "Ray's end")
