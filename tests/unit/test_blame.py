"""Whose failure an exception is: what the user's own line did wrongly has a place, what surrounds it has none."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import inspect
import json
import linecache
import os
import shutil
import socket
import subprocess
import types
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

import agl
from agl.errors import ConfigError, RewardError, UserCodeError, own_lines
from agl.rewards.function import RewardCaller, raised_by
from agl.trainer.runners.blame import is_infrastructure, of_service, raised_at

CLOSED = "http://127.0.0.1:1"
"""An address at which nobody listens."""
REQUEST = httpx.Request("GET", CLOSED)


def answer(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(str(status), request=REQUEST, response=httpx.Response(status))


def raised_in(function: Callable[[], Any]) -> BaseException:
    """What a function raised."""
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError(f"{function} raised nothing")


def missing_file() -> None:
    Path("missing.txt").read_text()


def a_folder_as_a_file() -> None:
    Path("/").read_text()


def missing_program() -> None:
    subprocess.run(["no-such-program"], check=True)


def the_same_file() -> None:
    shutil.copyfile(__file__, __file__)


def another_error_of_a_file() -> None:
    raise OSError("'my-model' is no local folder")


def no_answer_of_a_tool() -> None:
    json.loads("not JSON")


def an_address_without_a_protocol() -> None:
    urllib.request.urlopen("127.0.0.1:1/search")


def a_missing_file_as_an_address() -> None:
    urllib.request.urlopen("file:///no/such/file")


def httpx_without_a_protocol() -> None:
    httpx.get("127.0.0.1:1/search")


def httpx_with_a_header_that_is_none() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        httpx.get(f"http://127.0.0.1:{server.server_port}", headers={"Authorization": "Bearer \n"})


def httpx_read_too_early() -> None:
    httpx.Response(200, stream=httpx.ByteStream(b"text")).json()


def requests_without_a_protocol() -> None:
    pytest.importorskip("requests").get("127.0.0.1:1/search")


def openai_without_a_key() -> None:
    pytest.importorskip("openai").OpenAI(base_url=CLOSED)


def openai_without_a_protocol() -> None:
    client = pytest.importorskip("openai").OpenAI(base_url="127.0.0.1:1/v1", api_key="k", max_retries=0)
    client.models.list()


def own_reward_error() -> None:
    raise RewardError("no reference in this task")


def code_of_a_policy() -> None:
    exec("def solve():\n    return 1 / 0\nsolve()", {})


def missing_module() -> None:
    importlib.import_module("no_such_module_of_agl")


@dataclasses.dataclass
class Generated:
    facts: Any = dataclasses.field(default_factory=dict[str, str]().popitem)


def generated_code() -> None:
    Generated()


OF_USER_CODE = [
    missing_file,
    a_folder_as_a_file,
    missing_program,
    the_same_file,
    another_error_of_a_file,
    no_answer_of_a_tool,
    an_address_without_a_protocol,
    a_missing_file_as_an_address,
    httpx_without_a_protocol,
    httpx_with_a_header_that_is_none,
    httpx_read_too_early,
    requests_without_a_protocol,
    openai_without_a_key,
    openai_without_a_protocol,
    own_reward_error,
    code_of_a_policy,
    missing_module,
    generated_code,
]


@pytest.mark.parametrize("function", OF_USER_CODE, ids=lambda function: function.__name__)
def test_what_the_users_own_line_did_wrongly_has_its_place(
    function: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    error = raised_in(function)
    last = inspect.getsourcelines(function)[1] + len(inspect.getsourcelines(function)[0]) - 1
    assert raised_at(error) == f"{__file__}:{last}"
    assert not is_infrastructure(error)
    assert not of_service(error)


def urllib_to_nobody() -> None:
    urllib.request.urlopen(CLOSED)


def httpx_to_nobody() -> None:
    httpx.get(CLOSED)


def requests_to_nobody() -> None:
    pytest.importorskip("requests").get(CLOSED)


def openai_to_nobody() -> None:
    pytest.importorskip("openai").OpenAI(base_url=CLOSED, api_key="k", max_retries=0).models.list()


def an_unknown_host() -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def a_full_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("text")


def no_more_files() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def a_service_that_is_down() -> None:
    raise answer(503)


def a_service_that_has_had_enough() -> None:
    raise answer(429)


def a_tool_whose_connection_broke() -> None:
    try:
        httpx_to_nobody()
    except httpx.HTTPError as error:
        raise RuntimeError("the tool failed") from error


def a_database_that_cannot_be_reached() -> None:
    try:
        socket.create_connection(("127.0.0.1", 1))
    except OSError as error:
        raise RewardError("no database") from error


UNANSWERED = [
    urllib_to_nobody,
    httpx_to_nobody,
    requests_to_nobody,
    openai_to_nobody,
    an_unknown_host,
    a_full_disk,
    no_more_files,
    a_service_that_is_down,
    a_service_that_has_had_enough,
    a_tool_whose_connection_broke,
    a_database_that_cannot_be_reached,
]


@pytest.mark.parametrize("function", UNANSWERED, ids=lambda function: function.__name__)
def test_what_surrounds_the_users_code_has_none_and_is_never_a_reward(function: Any) -> None:
    error = raised_in(function)
    assert raised_at(error) is None
    assert of_service(error)
    assert is_infrastructure(error)


def a_page_that_is_not_there() -> None:
    raise answer(404)


def test_what_a_service_answered_has_none_and_can_have_a_reward() -> None:
    """Such as a tool's 404 for an address that the policy has chosen."""
    error = raised_in(a_page_that_is_not_there)
    assert raised_at(error) is None
    assert of_service(error)
    assert not is_infrastructure(error)


def test_a_file_next_to_the_librarys_is_the_users_and_what_was_typed_is_too() -> None:
    package = os.path.dirname(agl.__file__)
    frames = [
        types.SimpleNamespace(filename=name)
        for name in (
            f"{package}_tasks/reward.py",
            f"{package}/rewards/function.py",
            linecache.__file__,
            httpx.__file__,
            "<string>",
            "<frozen importlib._bootstrap>",
            "<attrs generated init x.Y>",
            "<stdin>",
            "<ipython-input-3-abc>",
            "/tmp/ipykernel_7/12.py",
        )
    ]
    assert [f.filename for f in own_lines(frames)] == [  # type: ignore[arg-type]
        f"{package}_tasks/reward.py", "<stdin>", "<ipython-input-3-abc>", "/tmp/ipykernel_7/12.py"
    ]  # fmt: skip


def test_a_reward_that_raises_in_a_library_is_named_with_its_own_line() -> None:
    def score(task: Any, output: str) -> float:
        return json.loads(output)

    error = raised_in(lambda: RewardCaller(score)("task", "not JSON"))
    line = inspect.getsourcelines(score)[1] + 1
    assert raised_by(error) == f"the reward 'score' ({__file__}:{line})"


# -- in a run ---------------------------------------------------------------------------------------------------------

TASKS = [f"task {letter}" for letter in "abcdefghijkl"]


def answered(task: str) -> str:
    return task


def reads_missing(task: str, output: str) -> float:
    if task.endswith(tuple("bdfh")):
        Path(task).read_text()
    return 1.0


def says_no_reference(task: str, output: str) -> float:
    if task.endswith(tuple("bdfh")):
        raise RewardError(f"no reference in {task}")
    return 1.0


def asks_for_nothing(task: str, output: str) -> float:
    if task.endswith(tuple("bdfh")):
        raise httpx.HTTPStatusError(task, request=REQUEST, response=httpx.Response(404))
    return 1.0


def reaches_nobody(task: str, output: str) -> float:
    if task.endswith(tuple("bdfh")):
        httpx.get(CLOSED)
    return 1.0


def misuses_agl(task: str, output: str) -> float:
    if task.endswith(tuple("bdfh")):
        agl.Trainer(agl.Baseline(), n_workers="8")  # type: ignore[arg-type]
    return 1.0


def measured(reward: Any, directory: Path, by: str) -> Any:
    agent = agl.wrap(answered, reward, name="solver")
    if by == "evaluate":
        return agl.evaluate(agent, TASKS, directory=directory, max_attempts=1, progress=False)
    trainer = agl.Trainer(agl.Baseline(), directory=directory, max_attempts=1, progress=False)
    return trainer.fit(agent, [], TASKS) if by == "validation" else trainer.fit(agent, TASKS)


@pytest.mark.parametrize("by", ["baseline", "validation", "evaluate"])
@pytest.mark.parametrize(
    ("reward", "raised", "place"),
    [
        (reads_missing, "FileNotFoundError", "Path(task).read_text()"),
        (says_no_reference, "RewardError", 'raise RewardError(f"no reference in {task}")'),
        (asks_for_nothing, "HTTPStatusError", "raise httpx.HTTPStatusError(task"),
    ],
)
def test_a_grader_that_raises_in_a_third_ends_a_measurement(
    reward: Any, raised: str, place: str, by: str, tmp_path: Path
) -> None:
    with pytest.raises(UserCodeError) as caught:
        measured(reward, tmp_path / "run", by)
    text = str(caught.value)
    assert f"one place in your code, {__file__}:" in text
    assert "ended attempts of 4 of the 12 rollouts of the run" in text
    assert raised in text
    assert place in text


def test_an_error_of_agls_for_a_wrong_call_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"the same exception in your code, .*n_workers is '8'") as caught:
        measured(misuses_agl, tmp_path / "run", "evaluate")
    assert ConfigError.__name__ in str(caught.value)


def test_a_network_that_fails_in_a_third_ends_none(tmp_path: Path) -> None:
    [entry] = measured(reaches_nobody, tmp_path / "run", "baseline").history
    assert (entry["train/failed_attempts/infrastructure"], entry["train/reward"]) == (4, 1.0)


class Raises(agl.Hook):
    async def on_trace_end(self, **facts: Any) -> None:
        if facts["rollout"].rollout.task.endswith(tuple("bdfh")):
            raise LookupError("no such tracker")


def test_a_hook_that_raises_in_a_third_is_the_users_code_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = agl.wrap(answered, lambda task, output: 1.0, name="solver")
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, max_attempts=1, hooks=[Raises()], progress=False)
    with caplog.at_level("WARNING", "agl"):
        [entry] = trainer.fit(agent, TASKS).history
    assert entry["train/failed_attempts/agent"] == 4
    assert "ended attempts of 4 of the 12 rollouts" in caplog.text
    assert "on_trace_end raised LookupError: no such tracker" in caplog.text


def test_an_agent_that_fails_in_a_third_is_a_result_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def agent(task: str) -> str:
        Path("missing.txt" if task.endswith(tuple("bdfh")) else __file__).read_text()
        return task

    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, max_attempts=1, progress=False)
    with caplog.at_level("WARNING", "agl"):
        [entry] = trainer.fit(agl.wrap(agent, lambda task, output: 1.0, name="solver"), TASKS).history
    assert entry["train/failed_attempts/agent"] == 4
    assert "raised FileNotFoundError" in caplog.text
    assert "in agent\n" in caplog.text
