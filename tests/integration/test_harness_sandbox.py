"""agl.harness against what a policy may have a coding agent do: a real sandbox, a real provider, a small agent."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from containers import own_image

import agl
from agl.errors import ConfigError, RolloutError
from agl.testing.provider import Provider, Reply, serve
from agl.trainer.processes.sandbox import Sandbox
from agl.trainer.report.explain import list_rollouts
from agl_harnesses import Attempt, Harness

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
KEY = "sk-kept-outside-0123456789"
CALL = """
import json, os, sys, urllib.request
def ask(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))
messages = [{"role": "user", "content": "7 * 6?"}]
answer = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", model="policy", messages=messages, max_tokens=4)
print("call answered", flush=True)
"""


class Shell(Harness):
    """A coding agent that asks once, and then does as the task says, whatever the answer was."""

    name, programs = "shell", ("sh",)
    install = "apt-get install dash"

    def alone(self, attempt: Attempt, task: str, model: str) -> None:
        attempt.words += ["-c", f"python3 ask.py || exit 9\n{task}"]

    def point(self, attempt: Attempt) -> None:
        attempt.environment["OPENAI_BASE_URL"] = attempt.urls["openai"]


class Seen(dict[str, Any]):
    """task -> what `grade` found in the folder: path -> text."""

    def grade(self, task: str, folder: Path) -> float:
        self[task] = {
            str(p.relative_to(folder)): p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file()
        }
        assert not any(p.is_symlink() for p in folder.rglob("*"))
        return 1.0


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(lambda _: Reply("42")) as running:
        yield running


Run = Callable[..., dict[str, Any]]
PROGRAMS = ["sh", "awk", "cat", "chmod", "env", "find", "grep", "head", "ln", "ls", "rm", "sleep", "truncate", "yes"]
"""What the scripts here call."""


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("podman", marks=pytest.mark.night)])
def walls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | Sandbox]:
    if request.param == "podman":
        with own_image(tmp_path_factory.mktemp("image"), *PROGRAMS) as container:
            yield container
    else:
        yield "bubblewrap"


@pytest.fixture
def run(walls: str | Sandbox, seen: Seen, provider: Provider, tmp_path: Path) -> Run:
    def run(script: str, **settings: Any) -> dict[str, Any]:
        """What one attempt came to, as `RolloutReport.output`."""
        provided = {"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": KEY}
        agent = shell(seen, env=provided, isolation=walls, **settings)
        directory = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        trainer = agl.Trainer(agl.Baseline(), directory=directory, progress=False, max_attempts=1)
        result = trainer.fit(agent, [script])
        (rollout,) = list_rollouts(result.store)
        output = agl.explain(rollout["rollout_id"], result.store).output
        assert output is not None
        return json.loads(output)

    return run


def shell(seen: Seen, **settings: Any) -> agl.Agent:
    return agl.harness(
        Shell, task=str, files=lambda _: {"ask.py": CALL, "kept/a.txt": "a\n"}, grade=seen.grade, **settings
    )


def test_a_temporary_folder_may_have_a_long_path(
    run: Run, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert run("echo done > kept/a.txt")["said"] == "call answered\n"
    assert seen["echo done > kept/a.txt"]["kept/a.txt"] == "done\n"
    assert list(folder.iterdir()) == []


def test_the_copy_is_what_is_left_of_what_it_writes(run: Run, seen: Seen, provider: Provider, tmp_path: Path) -> None:
    place = tmp_path / "outside"
    place.mkdir()
    place.chmod(0o777)
    (place / "victim").write_text("as before")
    (place / "victim").chmod(0o666)
    script = (
        f"for path in {place}/victim {place}/new /usr/new /agl/new /new /etc/passwd {agl.__file__}; do\n"
        "  (echo bad > $path) 2>/dev/null && echo wrote $path\ndone\n"
        "echo b >> kept/a.txt; echo new > new.txt; echo x > /tmp/elsewhere; ln -s /etc/passwd link; ln new.txt hard\n"
        "printf '#!/bin/sh\\necho run' > run.sh; exit 0"
    )
    output = run(script)
    assert output["said"] == "call answered\n"
    assert (place / "victim").read_text() == "as before"
    assert sorted(path.name for path in place.iterdir()) == ["victim"]
    copy = {
        "ask.py": CALL,
        "kept/a.txt": "a\nb\n",
        "new.txt": "new\n",
        "hard": "new\n",
        "run.sh": "#!/bin/sh\necho run",
    }
    assert seen[script] == copy, "links are no files of it"
    assert [request.headers["authorization"] for request in provider.seen] == [f"Bearer {KEY}"]


@pytest.fixture
def service() -> Iterator[tuple[int, str, list[bytes]]]:
    """Other servers of this machine, on loopback and on an abstract socket, and what they were sent."""
    heard: list[bytes] = []
    name = f"agl-test-{os.getpid()}"
    sockets = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    sockets[1].bind(f"\0{name}")
    sockets[1].listen()

    def listen(server: socket.socket) -> None:
        try:
            while True:
                connection, _ = server.accept()
                connection.settimeout(1)
                heard.append(connection.recv(100))
                connection.close()
        except OSError:
            pass

    for server in sockets:
        threading.Thread(target=listen, args=[server], daemon=True).start()
    yield sockets[0].getsockname()[1], name, heard
    for server in sockets:
        server.close()


def test_it_reaches_its_model_and_no_other_host(run: Run, service: tuple[int, str, list[bytes]]) -> None:
    port, name, heard = service
    script = f"""cat > try.py <<'END'
import os, socket, urllib.error, urllib.request
def tried(what, do):
    try:
        do()
        print(what, "reached")
    except urllib.error.HTTPError as error:
        print(what, error.code, error.read().decode().strip())
    except OSError as error:
        print(what, "refused")
def connect(family, address):
    with socket.socket(family) as s:
        s.settimeout(5)
        s.connect(address)
        s.sendall(b"hello")
get = lambda url: urllib.request.urlopen(url, timeout=5)
tried("loopback", lambda: connect(socket.AF_INET, ("127.0.0.1", {port})))
tried("abstract", lambda: connect(socket.AF_UNIX, "\\0{name}"))
tried("address", lambda: connect(socket.AF_INET, ("192.0.2.1", 80)))
tried("vsock", lambda: connect(40, (2, 1024)))
tried("name", lambda: get("http://example.org/leak?x=1"))
tried("tls", lambda: get("https://example.net/leak"))
own = "http://127.0.0.1:4747"
for path in ("/", "/openapi.json", "/rollouts/x/attempts/1/agents/a/v1/models", "/openai/../../admin"):
    tried(path, lambda: get(own + path))
END
python3 try.py"""
    output = run(script)
    lines = output["said"].splitlines()
    assert lines[:5] == ["call answered", "loopback refused", "abstract refused", "address refused", "vsock refused"]
    assert lines[5] == "name 403 agl: example.org cannot be reached from here"
    assert lines[6] == "tls refused"
    assert [line.split()[1] for line in lines[7:]] == ["404"] * 4, lines
    assert output["refused"] == {"example.org": 1, "example.net:443": 1}
    assert heard == []


def processes_with(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker in (line := (folder / "cmdline").read_text()):
                found.append(line)
        except OSError:
            pass
    return found


def test_what_it_leaves_running_ends_with_it(run: Run, seen: Seen) -> None:
    script = (
        "cat > daemon.py <<'END'\nimport os, signal, sys, time\n"
        "for number in range(1, 32):\n"
        "    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        open('started', 'w').close()\n"
        "        time.sleep(300)\nEND\n"
        "python3 daemon.py agl-daemon-marker; while [ ! -e started ]; do sleep 0.05; done"
    )
    run(script)
    assert "started" in seen[script]
    assert processes_with("agl-daemon-marker\0") == []


def test_who_watches_it_waits_without_computing(run: Run) -> None:
    """A process whose parent has ended becomes a child of the first process; when it ends, that once woke for ever."""
    ticks = "awk '{print $14 + $15}' /proc/1/stat"
    script = f"(sh -c 'sleep 0.2 & exit' &)\nsleep 0.5\nbefore=$({ticks})\nsleep 3\necho ticks $(($({ticks}) - before))"
    output = run(script)
    ticked = int(output["said"].split("ticks ")[1].split()[0])
    assert ticked < 30, "hundredths of a second of processor time in three seconds"


def test_no_key_and_nothing_of_this_process_is_inside(
    run: Run, seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HUGGING_FACE_TOKEN", "hf_secret_of_the_user")
    show = "env; cat /proc/*/environ; find /tmp/home /agl -type f -exec cat {} +; ls -R / | grep harness"
    script = f"{{ {show}; }} > dump 2>&1; exit 0"
    run(script)
    dump = seen[script]["dump"]
    assert "OPENAI_BASE_URL=http://127.0.0.1:4747/openai/" in dump
    for secret in (KEY, KEY[3:], "hf_secret_of_the_user", str(tmp_path)):
        assert secret not in dump


LIMITS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "time": ("sleep 60", {"timeout": 2.0}, "ran for more than 2 s without its model"),
    "output": ("yes", {"output_mb": 1}, "printed too much"),
    "memory": (
        "python3 -c 'x = b\"x\" * (1 << 29); import time; time.sleep(60)'",
        {"memory_mb": 256},
        "used too much memory",
    ),
    "files": ("i=0; while :; do i=$((i+1)); : > f$i; done", {}, "made too many files"),
    "sparse": ("for i in 1 2 3; do truncate -s 6M f$i; done", {"disk_mb": 8}, "left files that cannot be read"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_that_it_exceeds_ends_it(
    limit: str, run: Run, seen: Seen, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, settings, why = LIMITS[limit]
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    with pytest.raises(RolloutError, match=why):
        run(script, **settings)
    assert list(here.iterdir()) == [], "nothing is left where the trainer was started"
    assert seen == {}, "it is not graded"


def test_its_disk_and_its_processes_are_limited(run: Run) -> None:
    """Which it sees as errors, like on any full machine."""
    output = run(
        "head -c 20M /dev/zero > big || echo full; rm big\n"
        "python3 -c '\nimport subprocess\ntry:\n    for n in range(500): subprocess.Popen([\"sleep\", \"60\"])\n"
        "except OSError: print(\"no more\", n < 100)'",
        disk_mb=8, processes=64,
    )  # fmt: skip
    assert "full" in output["said"]
    assert "no more True" in output["said"]


def test_a_limit_is_the_policys_failure_and_is_trained(seen: Seen, untrained_model: Path, tmp_path: Path) -> None:
    agent = shell(seen, timeout=2.0)
    algorithm = agl.GRPO(
        model=str(untrained_model),
        group_size=2,
        batch_size=2,
        steps=1,
        max_response_tokens=8,
        max_context=256,
        threads=1,
    )
    trainer = agl.Trainer(algorithm, n_workers=4, directory=tmp_path / "run", progress=False)
    step = trainer.fit(agent, ["sleep 30", "echo done"]).history[-1]
    assert step["train/policy_faults"] == step["train/policy_faults/limit"] == 2
    assert step["train/failed_rollouts"] == 0
    assert step["train/calls"] == 4, "no attempt is repeated"
    assert list(seen) == ["echo done"]


class Pair(Shell):
    """Another name for calls with this system prompt."""

    name = "pair"
    sub_agents: ClassVar[Mapping[str, str]] = {"helper": "You help."}


def test_a_policy_answers_one_of_its_agents_and_its_provider_the_other(
    seen: Seen, provider: Provider, untrained_model: Path, tmp_path: Path
) -> None:
    system = 'messages.insert(0, {"role": "system", "content": "You help."})\n'
    again = CALL.replace("answer =", system + "answer =")
    agent = agl.harness(
        Pair, task=str, files=lambda _: {"ask.py": CALL, "again.py": again}, grade=seen.grade,
        env={"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": KEY},
    )  # fmt: skip
    algorithm = agl.GRPO(model=str(untrained_model), group_size=2, batch_size=1, steps=1, max_context=256, threads=1)
    trainer = agl.Trainer(algorithm, agents=["pair"], directory=tmp_path / "run", progress=False, max_attempts=1)
    result = trainer.fit(agent, ["python3 again.py"])
    assert result.history[-1]["train/calls"] == 2
    assert [request.headers["authorization"] for request in provider.seen] == [f"Bearer {KEY}"] * 2
    assert all("You help." in request.raw.decode() for request in provider.seen)
    report = agl.explain(list_rollouts(result.store)[-1]["rollout_id"], result.store)
    assert [call.call.agent for call in report.calls] == ["pair"]
    assert [call.agent for call in report.provider_calls] == ["pair-helper"]


def test_a_model_that_cannot_be_reached_is_no_failure_of_its(seen: Seen, tmp_path: Path) -> None:
    agent = shell(seen, env={"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}, error_reward=0.0)
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False, max_attempts=1)
    with pytest.raises(RolloutError, match="shell ended with exit status 9 after its model answered 502"):
        trainer.fit(agent, ["echo done"])


def test_one_that_does_not_start_is_no_failure_of_the_policys(seen: Seen, tmp_path: Path, provider: Provider) -> None:
    agent = agl.harness(
        Shell, task=str, files=lambda _: {}, grade=seen.grade, error_reward=0.0, env={"OPENAI_BASE_URL": provider.url}
    )
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False, max_attempts=1)
    with pytest.raises(RolloutError, match=r"(?s)exit status 9 before its first call; its output:.*ask\.py"):
        trainer.fit(agent, ["echo done"])


class TestBadInput:
    def make(self, name: Any = Shell, **settings: Any) -> agl.Agent:
        wanted: dict[str, Any] = {"task": str, "files": lambda _: {}, "grade": lambda task, folder: 1.0}
        return agl.harness(name, **(wanted | settings))

    def test_one_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(Path(shutil.which("bwrap") or "").parent))
        with pytest.raises(ConfigError, match="opencode is not installed") as raised:
            self.make("opencode")
        assert "npm install -g opencode-ai" in str(raised.value)

    def test_one_that_is_unknown(self) -> None:
        with pytest.raises(ConfigError, match=r"'nano'\): no such coding agent") as raised:
            self.make("nano")
        assert "mini" in str(raised.value)

    @pytest.mark.parametrize("limit", ["timeout", "memory_mb", "disk_mb", "output_mb", "processes"])
    def test_a_limit_of_nothing(self, limit: str) -> None:
        with pytest.raises(ConfigError, match=limit):
            self.make(**{limit: 0})

    def test_no_walls(self) -> None:
        with pytest.raises(ConfigError, match="no walls"):
            self.make(isolation="none")

    @pytest.mark.parametrize("files", [{"../x": ""}, {"/etc/x": ""}, {"x": b""}, ["x"]])
    def test_files_that_are_none(self, files: Any, tmp_path: Path, provider: Provider) -> None:
        agent = self.make(files=lambda _: files, env={"OPENAI_BASE_URL": provider.url})
        with pytest.raises(RolloutError, match=r"ConfigError: agl\.harness\(files="):
            agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False, max_attempts=1).fit(agent, ["x"])
