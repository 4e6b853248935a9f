"""The image of `deploy/`, built and used: by the services of the Compose file, and for a container of each attempt.

Nothing is pulled: `deploy/build.sh` makes the base, and a PostgreSQL of Debian stands in for the one of the registry.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from processes import fetch, free_port

import agl
from agl.errors import ConfigError
from agl.trainer.quickstart.tasks import arithmetic_tasks

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(1800)]
DEPLOY = ROOT / "deploy"
IMAGE = "localhost/agl-test"
NEEDED = ("podman", "runc", "debootstrap", "podman-compose", "netavark")
SECONDS = 120
AGENT = """
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import exact_answer

import agl

my_rollout = agl.wrap(build_agent(), reward=exact_answer)
"""
CONFIGURATION = """
[engine]
runtime = "runc"
[containers]
# podman asks for more than a process without CAP_SYS_RESOURCE may set.
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
STORAGE = '[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/storage"\n'
POSTGRES = """
ARG BASE
FROM ${BASE}
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql \\
    && mkdir -p /var/lib/postgresql/data && chown postgres /var/lib/postgresql/data
COPY start /start
ENV PGDATA=/var/lib/postgresql/data
USER postgres
CMD ["sh", "/start"]
"""
START_POSTGRES = """
set -e
PATH="$(echo /usr/lib/postgresql/*/bin):$PATH"
echo "$POSTGRES_PASSWORD" >/tmp/password
initdb --encoding UTF8 --username "$POSTGRES_USER" --pwfile /tmp/password --auth scram-sha-256
echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
echo "CREATE DATABASE $POSTGRES_DB" | postgres --single postgres
exec postgres -h '*'
"""


def run(*words: object, **options: Any) -> str:
    """The command's output; what it printed is the error if it fails."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip_settings(folder: Path) -> list[str]:
    """Arguments of a build in which pip finds what it finds here, such as PyTorch's CPU build: mounted settings."""
    settings: dict[str, str] = {}
    for line in run("pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        if (name := name.rpartition(".")[2]) in ("cert", "find-links", "index-url"):
            settings[name] = value.strip("'")
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines]))
    paths = {path for value in settings.values() for path in value.split() if Path(path).exists()}
    return [f"--volume={folder}/pip.conf:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in sorted(paths))]


@pytest.fixture(scope="module")
def images() -> Iterator[Path]:
    """Podman with a storage of its own in a folder, which has the images; all of it is removed."""
    missing = [name for name in NEEDED if not _installed(name)] + ["root"] * (os.geteuid() != 0)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    # Not pytest's: the paths of podman's sockets have to be short.
    folder = Path(tempfile.mkdtemp(prefix="agl-images-"))
    (folder / "containers.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
        patch.setenv("AGL_IMAGE", IMAGE)
        try:
            # By this machine's network: packets of a bridge may be longer than what the way to a mirror takes.
            run(DEPLOY / "build.sh", "--network=host", *pip_settings(folder))
            yield folder
            assert run("podman", "ps", "--all", "--quiet") == ""
            assert run("podman", "volume", "ls", "--quiet") == ""
        finally:
            run("podman", "system", "reset", "--force")
            shutil.rmtree(folder)
    assert str(folder) not in Path("/proc/mounts").read_text()


def _installed(name: str) -> bool:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/lib/podman:/usr/libexec/podman:/usr/sbin") is not None


def built(folder: Path, name: str, dockerfile: str, *options: str, **files: str) -> None:
    """Build an image from a text and files."""
    context = folder / name.replace("/", "-").replace(":", "-")
    context.mkdir(exist_ok=True)
    for file, text in {"Dockerfile": dockerfile, **files}.items():
        (context / file.replace("_py", ".py")).write_text(text)
    run("podman", "build", "--network=host", *options, "--tag", name, context)


def until(condition: Any, what: str) -> Any:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if result := condition():
                return result
        except (AssertionError, OSError):
            pass
        time.sleep(0.5)
    raise AssertionError(f"waited {SECONDS} s for {what}")


# -- the services -----------------------------------------------------------------------------------------------------


class Compose:
    """The project of the Compose file, from a copy of it."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.variables = folder, variables
        for name in ("docker-compose.yml", "run.yaml"):
            shutil.copy(DEPLOY / name, folder)
        (folder / ".env").write_text("\n".join(f"{name}={value}" for name, value in variables.items()))

    def __call__(self, *words: str) -> str:
        return run("podman-compose", "--project-name", "agl-test", *words, cwd=self.folder)

    def up(self, *services: str) -> None:
        """Start services, and wait until they are healthy: without systemd, podman runs no health checks by itself."""
        self("up", "--detach", "--no-build", "--no-deps", *services)
        for service in services:
            if service not in ("runner", "ray-worker"):
                until(lambda name=f"agl-test_{service}_1": run("podman", "healthcheck", "run", name) or True, service)

    def inside(self, service: str, *command: str) -> str:
        return run("podman", "exec", f"agl-test_{service}_1", *command)


@pytest.fixture
def compose(images: Path, tiny_policy: Path, tmp_path: Path) -> Iterator[Compose]:
    options = ("--build-arg", "BASE=localhost/agl-base:latest")
    built(images, "docker.io/library/postgres:17", POSTGRES, *options, start=START_POSTGRES)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "agent.py").write_text(AGENT)
    model = shutil.copytree(tiny_policy, tmp_path / "models" / "tiny")
    run("chmod", "--recursive", "a+rX", model)  # for the containers' user
    given = [line.partition("=")[::2] for line in (DEPLOY / ".env.example").read_text().splitlines() if "=" in line]
    keys = {name: secrets.token_urlsafe(32) for name, value in given if not name.startswith("#") and not value}
    compose = Compose(
        tmp_path, **keys, AGL_IMAGE=IMAGE, AGL_MODEL="/models/tiny", AGL_AGENTS="./agents", AGL_WORKERS="2",
        AGL_PORT=str(free_port()), RAY_DASHBOARD_PORT=str(free_port()),
    )  # fmt: skip
    try:
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "10")


def test_the_services_train_an_agent_from_outside(compose: Compose, tmp_path: Path) -> None:
    compose.up("postgres")
    compose.up("server")
    compose.up("runner")
    url, key = f"http://127.0.0.1:{compose.variables['AGL_PORT']}", compose.variables["AGL_OPERATOR_KEY"]
    namespace: dict[str, Any] = {}
    exec(AGENT, namespace)
    client = agl.Client(url, key=key, progress=False)
    client.upload_data(arithmetic_tasks(16, seed=0, split="train"))
    settings = {"steps": 2, "batch_size": 2, "group_size": 4, "max_response_tokens": 48, "learning_rate": 3e-4}
    result = client.train(namespace["my_rollout"], 2, **settings)
    assert (result.status, len(result.history)) == ("succeeded", 2)
    assert result.history[-1]["train/failed_rollouts"] == 0
    [start] = (tmp_path / "models").rglob("model.safetensors")
    end = result.download(tmp_path / "policy") / "model.safetensors"
    assert start.stat().st_size == end.stat().st_size
    assert start.read_bytes() != end.read_bytes()

    # Another run, for which the runner in its container works alone; the server is started anew in its midst.
    headers = {"authorization": f"Bearer {key}"}
    status, body = fetch(f"{url}/train", {"settings": {**settings, "steps": 4}}, **headers)
    assert status in (200, 201, 202), body
    run_url = f"{url}/runs/{body['run_id']}"
    until(lambda: fetch(run_url, **headers)[1]["step"] >= 1, "a step")
    compose("stop", "--timeout", "30", "server")
    compose.up("server")
    until(lambda: fetch(run_url, **headers)[1]["status"] == "succeeded", "the end of the run")
    assert fetch(run_url, **headers)[1]["step"] == 4

    # What deploy/README.md promises of a container.
    assert compose.inside("runner", "id", "-u").strip() == "10001"
    with pytest.raises(AssertionError, match="Read-only file system"):
        compose.inside("runner", "touch", "/agents/x")
    assert "CapEff:\t0000000000000000" in compose.inside("runner", "cat", "/proc/1/status")


def test_the_ray_cluster_has_its_worker(compose: Compose) -> None:
    compose.up("ray-head")
    compose.up("ray-worker")
    count = "import ray; ray.init(address='auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    until(lambda: compose.inside("ray-head", "python", "-c", count).split()[-1] == "2", "the worker")


# -- a container for each attempt -------------------------------------------------------------------------------------

AGENTS = """
import os
import socket
import subprocess
from pathlib import Path

import openai

import agl


@agl.rollout
def messy(task, llm):
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
    client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    mark, interfaces = Path("/tmp/mark"), [name for _, name in socket.if_nameindex()]
    alone = not mark.exists() and interfaces == ["lo"] and "SECRET" not in os.environ and os.environ["SHOWN"] == "1"
    mark.write_text("x")
    subprocess.Popen(["sleep", "98765"], start_new_session=True)
    if task["stuck"]:
        while True:  # which no signal handler of Python's ends
            pass
    return float(alone)
"""


@pytest.fixture(scope="module")
def agent_image(images: Path) -> str:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image's Python is 3.11, this one is not")
    image = "localhost/agl-test-agents"
    built(images, image, f"FROM {IMAGE}\nCOPY *.py /agents/\n", agent_py=AGENT, agents_py=AGENTS)
    return image


def trainer(
    policy: Path, directory: Path, image: str, *, n_workers: int = 2, batch_size: int = 2, **options: Any
) -> agl.Trainer:
    algorithm = agl.GRPO(
        model=str(policy),
        group_size=2,
        batch_size=batch_size,
        steps=1,
        learning_rate=3e-4,
        max_response_tokens=48,
        threads=1,
    )
    runners = agl.ProcessRunners(container=image, env=("SHOWN",))
    return agl.Trainer(algorithm, runners=runners, n_workers=n_workers, directory=directory, progress=False, **options)


def test_each_attempt_has_a_container(agent_image: str, tiny_policy: Path, tmp_path: Path) -> None:
    tasks = arithmetic_tasks(2, seed=0, split="train")
    result = trainer(tiny_policy, tmp_path / "run", agent_image).fit("/agents/agent.py:my_rollout", tasks)
    [step] = result.history
    assert (step["train/rollouts"], step["train/failed_rollouts"], step["train/trained_rollouts"]) == (4, 0, 4)
    assert step["learner/max_abs_log_ratio"] < 1e-3


def test_what_an_attempt_leaves_ends_with_its_container(
    agent_image: str, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOWN", "1")
    monkeypatch.setenv("SECRET", "1")
    # Four run by one worker, between which two are killed: some two in a row.
    tasks, before = [{"stuck": False}, {"stuck": False}, {"stuck": True}], folders()
    of_one = trainer(tiny_policy, tmp_path / "run", agent_image, timeout=15, max_attempts=1, n_workers=1, batch_size=3)
    [step] = of_one.fit("/agents/agents.py:messy", tasks).history
    # Four found nothing of one another's, nor a network or a secret.
    assert (step["train/rollouts"], step["train/failed_rollouts"], step["train/reward"]) == (6, 2, 1.0)
    database = sqlite3.connect(next((tmp_path / "run").glob("*.db")))
    assert database.execute("select count(*) from attempts where status = 'timeout'").fetchone() == (2,)
    assert "98765" not in run("ps", "-eo", "args")
    assert run("podman", "ps", "--all", "--quiet") == ""
    assert folders() <= before


def folders() -> set[Path]:
    """Of the sockets that lead out of containers."""
    return set(Path(tempfile.gettempdir()).glob("agl-containers-*"))


def test_a_trainer_that_is_killed_leaves_no_container(agent_image: str, tiny_policy: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from test_images import trainer\n"
        "of_images = trainer(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])\n"
        "of_images.fit('/agents/agents.py:messy', [{'stuck': True}] * 2)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", code, str(tiny_policy), str(tmp_path / "run"), agent_image]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path, "SHOWN": "1"}) as program:
        try:
            until(lambda: "98765" in run("ps", "-eo", "args"), "a daemon of an agent's")
        finally:
            program.kill()
    until(lambda: "98765" not in run("ps", "-eo", "args"), "its end")
    until(lambda: run("podman", "ps", "--all", "--quiet") == "", "the containers' end")


def test_an_image_that_cannot_be_used_is_an_error_before_anything_is_loaded(
    agent_image: str, tiny_policy: Path, tmp_path: Path
) -> None:
    tasks = arithmetic_tasks(2, seed=0, split="train")
    with pytest.raises(ConfigError, match=r"podman build --tag localhost/none \."):
        trainer(tiny_policy, tmp_path / "run", "localhost/none").fit("/agents/agent.py:my_rollout", tasks)
    with pytest.raises(ConfigError, match=r"/agents/missing\.py"):
        trainer(tiny_policy, tmp_path / "run", agent_image).fit("/agents/missing.py:agent", tasks)
    with pytest.raises(ConfigError, match="gateways=2"):
        trainer(tiny_policy, tmp_path / "run", agent_image, gateways=2)
    assert not (tmp_path / "run").exists()
