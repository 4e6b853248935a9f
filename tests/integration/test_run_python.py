"""Unmodified Python programs under `agl run` and `opentelemetry-instrument`: what is traced, and that nothing else
changes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import (
    AGL,
    ANTHROPIC_KEY,
    OPENAI_KEY,
    PROGRAMS,
    chats,
    environment,
    facts,
    holds,
    instrumented,
    launch,
    listed,
    outline,
    show,
    trace,
)
from paths import pythonpath
from subject_smolagents import Smolagents

from agl import semconv
from agl.testing.provider import Provider, Reply, serve
from agl.testing.subject import uses_add

LOOP = ["chat", "tool add", "chat"]
SOLVER = ["agent solver", *(f"  {line}" for line in LOOP)]
NODES = ["agent solver", "  chat", "operation tools", "  tool add", "agent solver", "  chat"]
EXPECTED = {
    "bare_openai": ("openai", LOOP),
    "bare_anthropic": ("anthropic", ["chat", "chat"]),
    "bare_google": ("google.genai", ["chat", "chat"]),
    "langchain_agent": ("langchain", SOLVER),
    "langgraph_agent": ("langgraph", NODES),
    "openai_agents_agent": ("agents", SOLVER),
    "agent_framework_agent": ("agent_framework", SOLVER),
    "strands_agent": ("strands", SOLVER),
    "pydantic_ai_agent": ("pydantic_ai", SOLVER),
    "smolagents_agent": ("smolagents", SOLVER),
    "crewai_agent": ("crewai", SOLVER),
    "autogen_agent": ("autogen_agentchat", SOLVER),
}
"""Program -> the framework that it needs, and what is to be seen below its root."""


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as running:
        yield running


def _python(env: dict[str, str], cwd: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (cwd / "program.py").write_text(text)
    return launch(cwd, env, "--", sys.executable, "program.py", *words)


KEYS = ("authorization", "x-api-key", "x-goog-api-key")

BY_OPENTELEMETRY = ("bare_openai",)
"""What opentelemetry-instrument runs in .ci/run, too: it finds our instrumentors as `agl run` does."""


BY_AGL_RUN = ("bare_openai",)
"""What `agl run` runs in .ci/run; test_programs.py and test_traces_programs.py do that with more."""


def _marks(name: str, how: str) -> list[pytest.MarkDecorator]:
    night = name not in (BY_OPENTELEMETRY if how == "opentelemetry-instrument" else BY_AGL_RUN)
    return [pytest.mark.slow] * (name != "bare_openai") + [pytest.mark.night] * night


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=_marks(name, how))
        for name in EXPECTED
        for how in ("agl run", "opentelemetry-instrument")
    ],
)
def test_a_program_of_each_framework_is_traced(name: str, how: str, provider: Provider, tmp_path: Path) -> None:
    framework, below = EXPECTED[name]
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    if how != "agl run" and importlib.util.find_spec("opentelemetry.instrumentation") is None:
        pytest.skip("opentelemetry-instrumentation is not installed")
    program = PROGRAMS / f"{name}.py"
    if name == "smolagents_agent":
        provider.script = Smolagents().script()
    env = environment(provider)
    plain = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=150)
    assert plain.returncode == 0, plain.stderr
    untraced = [*provider.seen]
    provider.seen.clear()
    provider.ids = itertools.count(1)

    if how == "agl run":
        done = launch(tmp_path, env, "--", sys.executable, program)
    else:
        done = instrumented(tmp_path, env, sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout, "the program's own output is what it was"
    assert [(s.path, s.body) for s in provider.seen] == [(s.path, s.body) for s in untraced]
    assert all("agl" not in s.text and "traceparent" not in s.headers for s in provider.seen)
    keys, own = ({s.headers[k] for s in seen for k in KEYS if k in s.headers} for seen in (provider.seen, untraced))
    assert keys == own
    assert keys <= {f"Bearer {OPENAI_KEY}", ANTHROPIC_KEY, f"Bearer {ANTHROPIC_KEY}"}

    spans = trace(tmp_path)
    assert outline(spans) == [f"agent {name}", *(f"  {line}" for line in below)]
    assert {s["status"] for s in spans} == {"unset"}
    first, last = chats(spans)
    assert "2 + 3" in first["attributes"][semconv.INPUT_MESSAGES]
    assert first["attributes"][semconv.INPUT_TOKENS] == 7
    answer = "sum 5" if name not in ("bare_anthropic", "bare_google") else "you said"
    assert answer in last["attributes"][semconv.OUTPUT_MESSAGES]
    assert not holds(tmp_path, OPENAI_KEY)
    assert not holds(tmp_path, ANTHROPIC_KEY)
    (one,) = listed(tmp_path)
    assert (one["mode"], one["status"]) == ("collect", "succeeded")
    assert "token ids" in " ".join(show(tmp_path, "explain", one["rollout_id"]).split())


def test_what_is_said_at_the_end(provider: Provider, tmp_path: Path) -> None:
    program = PROGRAMS / "bare_openai.py"
    done = launch(tmp_path, environment(provider), "--agent", "adder", "--", sys.executable, program, "--stream")
    known = facts(tmp_path)
    rollout = known.pop("rollout_id")
    assert known.pop("store").endswith("agl-runs/traces.db")
    assert known == {
        "status": "succeeded", "exit_status": 0, "error": None, "calls": 2, "failed_calls": 0, "input_tokens": 14,
        "output_tokens": 6, "tools": 1, "agents": ["adder"],
    }  # fmt: skip
    assert f"agl: {rollout} succeeded: 2 calls, 14 -> 6 tokens, 1 tool; agl trace show {rollout}" in done.stderr
    assert done.stdout == "sum 5\n"
    shown = show(tmp_path, "trace", "show", rollout[:8])
    assert "[add]" in shown
    assert '{"a": 2, "b": 3} -> 5' in shown
    assert "sum 5" in show(tmp_path, "trace", "show", rollout)


ASKS = """
import openai, os, sys, threading
client = openai.OpenAI(max_retries=0)
def ask(text):
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
"""


def test_an_exception_is_the_rollouts_error(provider: Provider, tmp_path: Path) -> None:
    done = _python(environment(provider), tmp_path, ASKS + "ask('one')\nraise KeyError('lost')")
    assert done.returncode == 1
    assert "KeyError: 'lost'" in done.stderr
    assert "Traceback" in done.stderr
    assert facts(tmp_path)["status"] == "failed"
    assert "KeyError: 'lost'" in facts(tmp_path)["error"]
    assert outline(trace(tmp_path)) == ["agent program", "  chat", "  exception KeyError"]
    assert "KeyError" in show(tmp_path, "trace", "show", facts(tmp_path)["rollout_id"])


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_status_is_the_programs(end: str, status: int, provider: Provider, tmp_path: Path) -> None:
    # A second's rest: what a killed program had no time to send is lost, what was sent stays.
    text = ASKS + f"import time\nask('one')\ntime.sleep(1)\n{end}\n"
    done = _python(environment(provider), tmp_path, text)
    assert done.returncode == status, done.stderr
    assert facts(tmp_path)["status"] == "failed"
    assert outline(trace(tmp_path)) == ["agent program", "  chat"]


def test_a_command_that_does_not_exist(provider: Provider, tmp_path: Path) -> None:
    done = launch(tmp_path, environment(provider), "--", "no-such-command")
    assert done.returncode == 127
    assert done.stderr == "agl: command not found: no-such-command\n"


def test_threads_forks_and_children_are_one_rollout(provider: Provider, tmp_path: Path) -> None:
    text = (
        ASKS
        + """
import concurrent.futures, multiprocessing, subprocess
def task(text):
    ask(text)
if __name__ == "__main__":
    ask("main")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, ["thread"] * 4))
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=task, args=(method,))
        child.start()
        child.join()
        assert child.exitcode == 0
    if (pid := os.fork()) == 0:
        ask("bare fork")
        sys.exit(0)
    os.waitpid(pid, 0)
    code = "import openai; messages = [{'role': 'user', 'content': 'sub'}]; "
    code += "openai.OpenAI().chat.completions.create(model='m', messages=messages)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
    )
    done = _python(environment(provider), tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert "agl: spans" not in done.stderr
    spans = trace(tmp_path)
    said = sorted(json.loads(s["attributes"][semconv.INPUT_MESSAGES])[0]["parts"][0]["content"] for s in chats(spans))
    assert said == sorted(["main", *["thread"] * 4, "fork", "spawn", "bare fork", "sub"])
    assert outline(spans)[0] == "agent program"
    assert len({s["trace_id"] for s in spans}) == 1


def test_what_would_lose_spans_loses_none(provider: Provider, tmp_path: Path) -> None:
    """Halves of characters, children that end without cleaning up or become other programs, and a body's limit that
    few spans fit into together."""
    provider.script = lambda body: Reply("ok")
    text = (
        ASKS
        + """
def fork(end):
    if os.fork() == 0:
        ask(end.__name__)
        end()
    os.wait()
fork(lambda: os._exit(0))
fork(lambda: os.execv(sys.executable, [sys.executable, "-c", "pass"]))
fork(lambda: os.execvp("true", ["true"]))
import agl
with agl.operation("half \\ud83d of a character"):
    agl.emit_message("\\ud83d and \\u2028")
threads = [threading.Thread(target=ask, args=(f"image {n} " + "x" * 400_000,)) for n in range(12)]
[t.start() for t in threads]
[t.join() for t in threads]
ask("y" * 2_000_000)
os._exit(0)
"""
    )
    done = _python(environment(provider, AGL_LIMIT_BODY_BYTES="1000000"), tmp_path, text)
    assert done.returncode == 0, done.stderr
    (lost, *_) = [line for line in done.stderr.splitlines() if "lost" in line]
    assert lost.startswith("agl: spans of this program are lost: span 'chat m' (")
    assert "413" in lost
    spans = trace(tmp_path)
    asked = [json.loads(s["attributes"][semconv.INPUT_MESSAGES])[0]["parts"][0]["content"] for s in chats(spans)]
    assert sorted(text[:8] for text in asked) == sorted(["<lambda>"] * 3 + [f"image {n} "[:8] for n in range(12)])
    (message,) = [s for s in spans if s["attributes"][semconv.OPERATION_NAME] == semconv.MESSAGE]
    assert message["attributes"][semconv.VALUE] == "\ud83d and \u2028"


def test_texts_are_left_out_on_request(provider: Provider, tmp_path: Path) -> None:
    env = environment(provider, AGL_CAPTURE_CONTENT="0")
    done = launch(tmp_path, env, "--", sys.executable, PROGRAMS / "bare_openai.py", "--stream")
    assert done.returncode == 0, done.stderr
    assert not holds(tmp_path / "agl-runs", "2 + 3")
    assert not holds(tmp_path / "agl-runs", "sum 5")
    assert len(chats(trace(tmp_path))) == 2


@pytest.mark.parametrize("how", ["agl run", "opentelemetry-instrument"])
def test_texts_of_errors_and_arguments_are_left_out_on_request(how: str, provider: Provider, tmp_path: Path) -> None:
    if how != "agl run" and importlib.util.find_spec("opentelemetry.instrumentation") is None:
        pytest.skip("opentelemetry-instrumentation is not installed")
    provider.script = lambda body: Reply("you asked: patient 7", status=400)
    env = environment(provider, AGL_CAPTURE_CONTENT="0")
    text = ASKS + "import agl\nagl.emit_message('patient 8')\nask('patient 9' + sys.argv[1])"
    if how == "agl run":
        done = _python(env, tmp_path, text, "patient 10")
    else:
        (tmp_path / "program.py").write_text(text)
        done = instrumented(tmp_path, env, sys.executable, "program.py", "patient 10")
    assert "BadRequestError: Error code: 400 - you asked: patient 7" in done.stderr
    assert not holds(tmp_path / "agl-runs", "patient")
    (one,) = listed(tmp_path)
    assert (one["status"], one["task"]["command"].endswith(" ...")) == ("failed", True)
    assert "patient" not in show(tmp_path, "trace", "show", one["rollout_id"])
    assert outline(trace(tmp_path)) == ["agent program", "  message", "  chat", "  exception BadRequestError"]
    assert {s["status_message"] for s in trace(tmp_path) if s["status"] == "error" and s["parent_id"]} == {
        "BadRequestError"
    }


def test_a_key_in_the_command_line_is_not_kept(provider: Provider, tmp_path: Path) -> None:
    done = _python(environment(provider), tmp_path, "print('ok')", "--key", OPENAI_KEY)
    assert done.returncode == 0
    assert not holds(tmp_path / "agl-runs", OPENAI_KEY)
    assert "$OPENAI_API_KEY" in listed(tmp_path)[0]["task"]["command"]


def test_modules_and_the_users_own_sitecustomize(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('mine runs')\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(ASKS + "print(ask('one').choices[0].message.content)")
    env = environment(provider, PYTHONPATH=pythonpath(tmp_path / "site"))
    done = launch(tmp_path, env, "--", sys.executable, "-m", "package")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mine runs\n" * 2 + "you said one\n", "once in agl's own process, once in the program's"
    assert len(chats(trace(tmp_path))) == 1


def test_a_package_of_the_users_own_called_agents(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("MINE = 1\n")
    done = _python(environment(provider), tmp_path, ASKS + "import agents\nprint(agents.MINE)\nask('one')")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert done.stderr.count("\n") == 1, "one line, agl's last"
    assert len(chats(trace(tmp_path))) == 1


def test_a_provider_that_fails(provider: Provider, tmp_path: Path) -> None:
    provider.script = lambda body: Reply(status=500)
    done = _python(environment(provider), tmp_path, ASKS + "ask('one')")
    assert done.returncode == 1
    assert "InternalServerError" in done.stderr
    (chat,) = chats(trace(tmp_path))
    assert chat["status"] == "error"
    assert facts(tmp_path)["failed_calls"] == 1


def test_an_interpreter_without_agl_is_seen_on_the_wire(provider: Provider, tmp_path: Path) -> None:
    """`-S` stands for it: no installed package can be imported."""
    text = """
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "one"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
    (tmp_path / "program.py").write_text(text)
    done = launch(tmp_path, environment(provider), "--", sys.executable, "-S", "program.py")
    assert (done.returncode, done.stdout) == (0, "you said one\n"), done.stderr
    assert outline(trace(tmp_path)) == ["agent program", "  chat"]


@pytest.mark.parametrize("group", [False, True], ids=["to agl alone", "to all, as a terminal does"])
def test_ctrl_c_ends_both(group: bool, provider: Provider, tmp_path: Path) -> None:
    text = (
        ASKS
        + "import time\nask('one')\nopen('ready', 'w').close()\n"
        + "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(5)\n"
    )
    (tmp_path / "program.py").write_text(text)
    command = [*AGL, "run", "--json", "facts.json", "--", sys.executable, "program.py"]
    running = subprocess.Popen(
        command, cwd=tmp_path, env=environment(provider), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _until((tmp_path / "ready").exists)
        if group:
            os.killpg(running.pid, signal.SIGINT)
        else:
            running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=30)
    finally:
        running.kill()
    assert "Traceback" not in errors
    assert facts(tmp_path)["status"] == "failed"
    assert len(chats(trace(tmp_path))) == 1
    assert running.returncode == 5


def _until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_a_store_the_program_runs_all_the_same(provider: Provider, tmp_path: Path) -> None:
    """Under `opentelemetry-instrument` the process writes to the store itself, and says so in one line if it cannot."""
    if importlib.util.find_spec("opentelemetry.instrumentation") is None:
        pytest.skip("opentelemetry-instrumentation is not installed")
    (tmp_path / "program.py").write_text(
        "import sys\nsys.modules['sqlalchemy'] = None\n" + ASKS + "ask('one')\nask('two')\n"
    )
    done = instrumented(tmp_path, environment(provider), sys.executable, "program.py")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert 'pip install ".[local]"' in line
    env = environment(provider, AGL_STORE="/proc/nowhere/x.db")
    broken = instrumented(tmp_path, env, sys.executable, "program.py")
    assert broken.returncode == 0
    assert len(broken.stderr.splitlines()) == 1


def test_a_recorded_program_has_its_own_start_and_duration(provider: Provider, tmp_path: Path) -> None:
    """Not those of its first call, before which nothing is recorded, nor of the last one."""
    if importlib.util.find_spec("opentelemetry.instrumentation") is None:
        pytest.skip("opentelemetry-instrumentation is not installed")
    told = (
        "import time\nprint(time.time())\ntime.sleep(1)\n" + ASKS + "ask('one')\ntime.sleep(0.5)\nprint(time.time())\n"
    )
    (tmp_path / "program.py").write_text(told)
    done = instrumented(tmp_path, environment(provider), sys.executable, "program.py")
    first, last = map(float, done.stdout.split())
    (root,) = [s for s in trace(tmp_path) if s["parent_id"] is None]
    (one,) = listed(tmp_path)
    assert max(root["start"], one["began"]) <= first
    assert min(root["end"], one["ended"]) >= last


def test_a_responses_answers_tool_calls_are_shown(provider: Provider, tmp_path: Path) -> None:
    provider.script = uses_add()
    text = """
import openai
tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
client = openai.OpenAI(max_retries=0)
items = [{"role": "user", "content": "2 + 3"}]
answer = client.responses.create(model="m", input=items, tools=tools)
items += [*answer.output, {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "5"}]
client.responses.create(model="m", input=items, tools=tools)
"""
    assert _python(environment(provider), tmp_path, text).returncode == 0
    (one,) = listed(tmp_path)
    shown = show(tmp_path, "trace", "show", one["rollout_id"])
    assert "[add]" in shown
    assert "execute_tool add" in shown


def test_a_program_that_asks_nobody_leaves_nothing(provider: Provider, tmp_path: Path) -> None:
    if importlib.util.find_spec("opentelemetry.instrumentation") is None:
        pytest.skip("opentelemetry-instrumentation is not installed")
    text = "import openai, threading\nt = threading.Thread(target=print, args=('ok',)); t.start(); t.join()\n"
    (tmp_path / "program.py").write_text(text)
    done = instrumented(tmp_path, environment(provider), sys.executable, "program.py")
    assert (done.stdout, done.stderr) == ("ok\n", "")
    assert not (tmp_path / "agl-runs").exists()


@pytest.mark.slow
@pytest.mark.night
def test_a_policy_answers_the_selected_agents(untrained_model: Path, provider: Provider, tmp_path: Path) -> None:
    program = tmp_path / "two.py"
    program.write_text("""
from langchain_openai import ChatOpenAI
from langchain.agents import create_agent
def ask(name):
    agent = create_agent(ChatOpenAI(model="m", max_completion_tokens=8), [], name=name)
    return agent.invoke({"messages": [("user", "hi")]})["messages"][-1].content
ask("writer")
print(ask("judge"))
""")
    pytest.importorskip("langchain_openai")
    env = environment(provider)
    agents = ("--agents", "writer", "--agents", "nobody")
    done = launch(tmp_path, env, "--model", untrained_model, *agents, "--", sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert "--agents 'nobody': no agent that it selects made a call; those that did: 'writer', 'judge'" in done.stderr
    assert done.stdout == "you said hi\n"
    assert [s.headers["authorization"] for s in provider.seen] == [f"Bearer {OPENAI_KEY}"]
    spans = trace(tmp_path)
    assert outline(spans) == ["agent two", "  agent writer", "    chat", "  agent judge", "    chat"]
    routed = [s["attributes"].get(semconv.ROUTED) for s in chats(spans)]
    assert routed == [True, None]
    shown = show(tmp_path, "explain", facts(tmp_path)["rollout_id"])
    assert "agent writer  policy policy v0" in shown
    assert listed(tmp_path)[0]["mode"] == "dev"
