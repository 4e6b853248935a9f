"""Pages and programs that reach a server on this machine without its owner's will, and names that steer terminals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import AGL, Programs, fetch, free_port, programs
from scripted import in_loop, serving
from store_server import KEYS, OPERATOR, ServedStore, served

import agl
from agl import semconv
from agl.errors import ConfigError, StoreError
from agl.mdp.spans import Event, Span
from agl.mdp.types import Call, float_array, int_array
from agl.trainer.algorithms.options import Settings
from agl.trainer.http import local_key
from agl.trainer.http.auth import Keys
from agl.trainer.report.explain import renderable
from agl.trainer.report.rollout_report import describe
from agl.trainer.report.terminal import console
from agl.trainer.runners.remote.client import CoordinatorClient
from agl.trainer.store import open_store
from agl.trainer.store.http.client import HttpStore
from agl.trainer.store.types import NewRollout, RolloutConfig
from agl_service.server import serving as serve_service

SECONDS = 60.0


@pytest.fixture
def minted(tmp_path: Path) -> Iterator[ServedStore]:
    """A store whose server got no key."""
    with served(tmp_path, keys=Keys.find()) as running:
        yield running


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_OPERATOR_KEY", "AGL_RUNNER_KEY", "AGL_KEY", "AGL_ALLOWED_HOSTS"):
        monkeypatch.delenv(name, raising=False)


def raw(port: int, path: str, *headers: str, method: str = "GET", body: bytes = b"") -> int:
    """The status of an answer to a request with exactly these headers."""
    lines = [f"{method} {path} HTTP/1.1", *headers, "connection: close", f"content-length: {len(body)}", "", ""]
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall("\r\n".join(lines).encode("latin-1") + body)
        return int(sock.makefile("rb").readline().split()[1])


# -- pages ------------------------------------------------------------------------------------------------------------
REBOUND = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "0.0.0.0",
           "evil.example#localhost", "localhost@evil.example", "[::1].evil.example", ""]  # fmt: skip
OWN = ["127.0.0.1", "127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:{port}", "host.docker.internal:{port}"]


def check_hosts(port: int, path: str, *headers: str) -> None:
    for host in REBOUND:
        assert raw(port, path, f"Host: {host}", *headers) == 403, host
    assert raw(port, path, *headers) == 403
    assert raw(port, path, "Host: localhost", "Host: evil.example", *headers) == 403
    for host in OWN:
        assert raw(port, path, f"Host: {host.format(port=port)}", *headers) == 200, host
        assert raw(port, path, f"Host: {host.format(port=port)}", "Sec-Fetch-Site: cross-site", *headers) == 403
        assert raw(port, path, f"Host: {host.format(port=port)}", "Sec-Fetch-Site: none", *headers) == 200


@pytest.mark.parametrize("keys", [Keys(), KEYS], ids=["open", "keyed"])
def test_a_store_answers_no_rebound_name_and_no_other_site(tmp_path: Path, keys: Keys) -> None:
    with served(tmp_path, keys=keys) as running:
        check_hosts(running.port, "/v1/store/about", f"Authorization: Bearer {OPERATOR}")
        check_hosts(running.port, "/health")


@in_loop
async def test_a_gateway_answers_no_rebound_name_and_no_other_site() -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        path = attempt.url().partition(str(rig.server.port))[2]
        await asyncio.to_thread(check_hosts, rig.server.port, f"{path}/models", f"Authorization: Bearer {attempt.key}")


@in_loop
async def test_a_training_server_answers_no_rebound_name_and_no_other_site(tmp_path: Path) -> None:
    settings = Settings.of(
        {"model": str(tmp_path), "algorithm": "grpo", "directory": str(tmp_path / "out"), "port": 0}, "test"
    )
    keys = Keys.find()
    async with serve_service(settings, keys, progress=False) as service:
        port = int(service.mount.url.rpartition(":")[2])
        await asyncio.to_thread(check_hosts, port, "/health")
        await asyncio.to_thread(check_hosts, port, "/data", f"Authorization: Bearer {keys.minted}")
        # Without its key nobody is an operator.
        assert (await asyncio.to_thread(fetch, f"{service.mount.url}/data", authorization="Bearer wrong"))[0] == 401
        assert (await asyncio.to_thread(fetch, f"{service.mount.url}/data", authorization=""))[0] == 401
        assert (await asyncio.to_thread(fetch, f"{service.mount.url}/runner/lease", {}, authorization=""))[0] == 401


def test_a_name_that_a_proxy_passes_on_can_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_ALLOWED_HOSTS", "train.example.org, other.example.org")
    with served(tmp_path) as running:
        assert raw(running.port, "/health", "Host: train.example.org") == 200
        assert raw(running.port, "/health", "Host: evil.example") == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_what_a_form_can_send_is_not_json(tmp_path: Path, kind: str | None) -> None:
    """Without a key, too: a form of any page can post these without being asked first."""
    headers = [] if kind is None else [f"Content-Type: {kind}"]
    with served(tmp_path) as running:
        for path in ("/v1/store/query_rollouts", "/v1/store/batch", "/v1/traces"):
            assert raw(running.port, path, "Host: localhost", *headers, method="POST", body=b"{}") == 415, path


# -- keys of servers that got none ------------------------------------------------------------------------------------
def test_a_server_without_a_key_makes_one_that_its_own_clients_find(minted: ServedStore) -> None:
    assert fetch(f"{minted.url}/v1/store/query_rollouts", {}, authorization="")[0] == 401
    assert fetch(f"{minted.url}/v1/store/query_rollouts", {}, authorization="Bearer guessed")[0] == 401
    file = local_key.directory() / f"127.0.0.1-{minted.port}"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    key = file.read_text()
    assert len(key) >= 40

    async def use(url: str) -> None:
        store = await open_store(url)
        try:
            await store.enqueue_rollouts([NewRollout("t")])
        finally:
            await store.close()

    # By its address, by a name, and by hand, as printed.
    asyncio.run(use(minted.url))
    asyncio.run(use(minted.url.replace("127.0.0.1", "localhost")))
    file.unlink()
    with pytest.raises(StoreError, match="does not know this key"):
        asyncio.run(use(minted.url))
    asyncio.run(use(local_key.with_key(minted.url, key)))


def test_clients_follow_a_server_that_starts_again_with_another_key(tmp_path: Path) -> None:
    first = ServedStore(tmp_path / "store.db", keys=Keys.find())
    first.start()

    async def main() -> None:
        store = await HttpStore.open(first.url, retry_seconds=20)
        try:
            await store.enqueue_rollouts([NewRollout("before")])
            await asyncio.to_thread(first.stop)
            assert local_key.find(first.url) is None
            first.keys = Keys.find()
            await asyncio.to_thread(first.start)
            await store.enqueue_rollouts([NewRollout("after")])
            assert [r.task for r in await store.query_rollouts()] == ["before", "after"]
        finally:
            await store.close()

    try:
        asyncio.run(main())
    finally:
        first.stop()


def test_every_request_under_way_when_a_server_starts_again_follows_it() -> None:
    url = "http://127.0.0.1:4748"
    local_key.publish("127.0.0.1", 4748, "old")
    try:
        auth = local_key.KeyAuth(url, None)
        flows = [auth.auth_flow(httpx.Request("POST", url)) for _ in range(2)]
        assert [next(flow).headers["authorization"] for flow in flows] == ["Bearer old"] * 2
        local_key.publish("127.0.0.1", 4748, "new")
        again = [flow.send(httpx.Response(401)) for flow in flows]
        assert [request.headers["authorization"] for request in again] == ["Bearer new"] * 2
    finally:
        local_key.withdraw("127.0.0.1", 4748, "new")


def test_a_key_of_this_machine_goes_to_no_other(tmp_path: Path) -> None:
    local_key.publish("127.0.0.1", 4747, "k" * 40)
    try:
        assert local_key.find("http://localhost:4747") == "k" * 40
        for url in (
            "http://evil.example:4747",
            "http://10.0.0.1:4747",
            "http://127.0.0.1:4748",
            "http://127.0.0.1.x:4747",
        ):
            assert local_key.find(url) is None, url
    finally:
        local_key.withdraw("127.0.0.1", 4747, "k" * 40)


def test_a_minted_key_is_no_leave_to_listen_to_other_machines() -> None:
    with pytest.raises(ConfigError, match="without a key"):
        Keys.find().check_host("0.0.0.0")


def test_a_home_that_cannot_be_written_to_stops_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    keys = Keys.find()
    with served(tmp_path, keys=keys) as running:
        assert keys.minted is not None
        assert fetch(f"{running.url}/v1/store/about", authorization=f"Bearer {keys.minted}")[0] == 200


@contextlib.contextmanager
def _agl_store(tmp_path: Path) -> Iterator[tuple[Programs, str]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with programs(tmp_path) as at:
        at.start(*AGL, "store", "--port", port, "--db", tmp_path / "store.db", log="server.log")
        at.until(lambda: "spans " in at.text("server.log"), SECONDS, "the store")
        yield at, url


def test_the_printed_url_and_every_client_work_without_the_users_doing(tmp_path: Path) -> None:
    """`agl store` without a key: the command line, a runner, and a program that takes the printed URL."""
    with _agl_store(tmp_path) as (at, url):
        (printed,) = re.findall(r"http://:\S+@127\.0\.0\.1:\d+", at.text("server.log"))
        key = local_key.split_key(printed)[1]
        assert httpx.get(f"{url}/v1/store/about", trust_env=False).status_code == 401
        answer = httpx.get(f"{url}/v1/store/about", headers={"authorization": f"Bearer {key}"}, trust_env=False)
        assert answer.json() == {"store": "agl", "role": "operator"}
        listing = at.start(*AGL, "trace", "ls", "--store", url, log="ls.log")
        assert listing.wait(SECONDS) == 0, at.text("ls.log")

        async def lease(address: str) -> None:
            coordinator = CoordinatorClient(address, lost_seconds=1.0)
            try:
                assert await coordinator.lease("w", 0.1) is None
            finally:
                await coordinator.close()

        asyncio.run(lease(url))
        asyncio.run(lease(printed))


@in_loop
async def test_the_client_of_a_training_server_finds_its_key(tmp_path: Path) -> None:
    settings = Settings.of(
        {"model": str(tmp_path), "algorithm": "grpo", "directory": str(tmp_path / "out"), "port": 0}, "test"
    )
    async with serve_service(settings, Keys.find(), progress=False) as service:
        client = agl.Client(service.mount.url, progress=False)
        counts = await asyncio.to_thread(client.upload_data, [{"question": "1 + 1"}])
        assert counts == {"train": 1, "test": 0}


# -- names and texts --------------------------------------------------------------------------------------------------
HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31m[bold red]x[/bold][/nothing] :smile: "
    "\u202egnp.exe\u2066\u200b\x00\x9b5n\r\x08\ud800"
)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]")


async def _hostile_store(url: str) -> str:
    """A rollout in which every text that an agent, tool or task can choose is hostile; its id."""
    store = await open_store(url)
    try:
        new = NewRollout({"question": HOSTILE}, group=HOSTILE, config=RolloutConfig(max_attempts=1))
        (rollout,) = await store.enqueue_rollouts([new])
        id = rollout.rollout_id
        await store.dequeue_rollout("w")
        await store.update_attempt(id, 1, "running")
        facts = {
            semconv.OPERATION_NAME: semconv.EXECUTE_TOOL, semconv.AGENT_NAME: HOSTILE, semconv.TOOL_NAME: HOSTILE,
            semconv.TOOL_CALL_ARGUMENTS: HOSTILE, semconv.TOOL_CALL_RESULT: HOSTILE, semconv.TOOL_CALL_ID: "c",
            "agl.output": HOSTILE,
        }  # fmt: skip
        await store.add_spans([
            Span("1" * 32, "2" * 16, None, id, 1, HOSTILE, 1.0, 2.0, "error", HOSTILE, facts,
                 (Event("exception", 1.5, {"exception.message": HOSTILE}),)),
        ])  # fmt: skip
        tool = {"id": "c", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
        await store.add_calls([
            Call(id="call", rollout_id=id, attempt=1, index=0, agent=HOSTILE, policy=HOSTILE, policy_version=0,
                 prompt_ids=int_array([1]), response_ids=int_array([2]), logprobs=float_array([-0.5]),
                 temperature=1.0, finish_reason="error", error=HOSTILE, started_at=1.0, ended_at=2.0,
                 request={"messages": [{"role": HOSTILE, "content": HOSTILE}], "fork_detail": HOSTILE},
                 fork_cause="template", response={"role": "assistant", "content": HOSTILE, "tool_calls": [tool]}),
        ])  # fmt: skip
        await store.update_attempt(id, 1, "failed", error=f"ValueError: {HOSTILE}")
        return id
    finally:
        await store.close()


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
def test_no_text_of_a_rollout_controls_the_terminal(tmp_path: Path, terminal: bool) -> None:
    db = tmp_path / "run.db"
    id = asyncio.run(_hostile_store(f"sqlite:///{db}"))
    # As on a terminal, rich writes its own escapes for colours.
    more = {"FORCE_COLOR": "1", "TERM": "xterm-256color"} if terminal else {}
    with programs(tmp_path, COLUMNS="400", PYTHONIOENCODING="utf-8:surrogateescape", **more) as at:
        unknown = HOSTILE.replace("\0", "").replace("\ud800", "")
        for number, words in enumerate(
            (
                ["explain", id],
                ["explain", "--list"],
                ["trace", "show", id],
                ["trace", "ls"],
                ["explain", unknown],
            )
        ):
            log = f"{number}.log"
            command = at.start(*AGL, *words, "--store", db, log=log)
            assert command.wait(SECONDS) == (number == 4), at.text(log)
            shown = (at.directory / log).read_bytes().decode("utf-8", "surrogateescape")
            own = re.sub(r"\x1b\[[\d;]*m", "", shown)
            assert not CONTROL.search(own), (words, CONTROL.search(own), own)
            if not terminal:
                assert "\x1b" not in shown
            if number in (0, 2):
                assert "\\x1b]0;owned\\x07" in own
                assert "\\u202egnp.exe" in own
                assert "[bold red]x[/bold][/nothing] :smile:" in own


def test_exports_keep_hostile_texts_and_names_no_file_after_them(tmp_path: Path) -> None:
    db = tmp_path / "run.db"
    asyncio.run(_hostile_store(f"sqlite:///{db}"))
    with programs(tmp_path, PYTHONIOENCODING="utf-8") as at:
        for format in ("jsonl", "json", "parquet"):
            command = at.start(*AGL, "export", "--store", db, "--out", tmp_path / format, "--format", format,
                               log=f"{format}.log")  # fmt: skip
            assert command.wait(SECONDS) == 0, at.text(f"{format}.log")
            assert not CONTROL.search(at.text(f"{format}.log").replace("\r", ""))
    for path in tmp_path.rglob("*"):
        assert not CONTROL.search(str(path.relative_to(tmp_path))), path
    spans = [json.loads(line) for line in (tmp_path / "jsonl" / "spans.jsonl").read_text().split("\n") if line]
    assert HOSTILE in [span["name"] for span in spans]


def test_the_console_escapes_whatever_it_is_given(tmp_path: Path) -> None:
    """The one place through which text goes to a terminal: panels, tables and styles included."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.tree import Tree

    table = Table(HOSTILE[:-1])
    table.add_row(HOSTILE[:-1])
    with (tmp_path / "out").open("w+", encoding="utf-8") as file:
        out = console(file=file, width=300)
        for thing in (HOSTILE, table, Tree(HOSTILE), Panel(HOSTILE)):
            out.print(thing, style="red")
        file.seek(0)
        text = file.read()
    assert not CONTROL.search(text)
    assert text.count("[bold red]x") == 5


def test_a_dry_run_reports_through_the_same_console(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'run.db'}"
    id = asyncio.run(_hostile_store(url))

    async def main() -> Any:
        store = await open_store(url)
        try:
            return await describe(store, id)
        finally:
            await store.close()

    report = asyncio.run(main())
    with (tmp_path / "out").open("w+", encoding="utf-8") as file:
        console(file=file, width=200).print(renderable(report))
        file.seek(0)
        assert not CONTROL.search(file.read())
