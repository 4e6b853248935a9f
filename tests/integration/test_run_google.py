"""Programs that speak Google's API under `agl run`: recorded on their own model, answered by a policy; Gemini CLI."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from launching import PROGRAMS, chats, facts, holds, launch, outline, trace
from scripted import Attempt, Line, ScriptedEngine, quick_tokenizer, serving, tool_call_of

import agl
from agl import semconv
from agl.agents.prompts import save_prompts
from agl.mdp.types import Call
from agl.messages import read, write

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

CLI = "@google/gemini-cli@0.61.0"
FORMS = ["generateContent", "streamGenerateContent", "streamGenerateContent?alt=sse"]


class Google:
    """A gateway in a thread, which stands for Google's servers; it has `calls` once it has ended."""

    attempt: Attempt
    calls: list[Call]

    def __init__(self, tool: str, arguments: dict[str, Any], answer: str) -> None:
        def script(asked: Any) -> Line:
            prompt = quick_tokenizer().decode(asked.prompt_ids.tolist())
            return answer if "<tool_response>" in prompt else tool_call_of(tool, arguments)

        self.script = script
        self.ready, self.over = threading.Event(), threading.Event()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        # What Gemini CLI says of itself and its tools is long.
        async with serving(ScriptedEngine(quick_tokenizer(), self.script, max_context=1_000_000)) as rig:
            self.attempt = await rig.attempt()
            self.ready.set()
            await asyncio.to_thread(self.over.wait)
            self.calls = await self.attempt.close()

    def environment(self) -> dict[str, str]:
        """What a user has set."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AGL_", "OTEL_", "GOOGLE_", "GEMINI_"))}
        url = f"{self.attempt.access.url}/agents/agent"
        return {**kept, "GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": self.attempt.key, "NO_COLOR": "1"}


@contextmanager
def google(tool: str, arguments: dict[str, Any], answer: str) -> Iterator[Google]:
    server = Google(tool, arguments, answer)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert server.ready.wait(60)
        yield server
    finally:
        server.over.set()
        thread.join(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(PROGRAMS / "gemini.mjs", tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_a_program_on_its_own_model_is_recorded(form: str, folder: Path) -> None:
    with google("calculator", {"expression": "12 * 3"}, "It is 36.") as server:
        key = server.attempt.key
        done = launch(folder, server.environment(), "--", "node", "gemini.mjs", form)
    assert (done.returncode, done.stdout) == (0, "It is 36.\n"), done.stderr
    spans = trace(folder)
    assert outline(spans) == ["agent gemini", "  chat", "  tool calculator", "  chat"]
    first, second = (chat["attributes"] for chat in chats(spans))
    assert (first[semconv.REQUEST_MODEL], first["gen_ai.request.temperature"]) == ("gemini-x", 0.5)
    assert first[semconv.RESPONSE_MODEL] == "policy"
    assert [m.text for m in read.system(json.loads(first[semconv.SYSTEM_INSTRUCTIONS]))] == ["Use the calculator."]
    assert read.tools(json.loads(first[semconv.TOOL_DEFINITIONS]))[0]["function"]["parameters"]["type"] == "object"
    assert [m["role"] for m in write.to_openai(read.messages(json.loads(second[semconv.INPUT_MESSAGES])))] == [
        "user", "assistant", "tool"
    ]  # fmt: skip
    (said,) = read.answers(json.loads(second[semconv.OUTPUT_MESSAGES]))
    assert said.text == "It is 36."
    assert [chat[semconv.RESPONSE_ID] for chat in (first, second)] == [c.id for c in server.calls]
    assert [chat[semconv.INPUT_TOKENS] for chat in (first, second)] == [c.prompt_ids.size for c in server.calls]
    assert facts(folder)["output_tokens"] == sum(c.response_ids.size for c in server.calls)
    tool = next(s["attributes"] for s in spans if s["attributes"][semconv.OPERATION_NAME] == semconv.EXECUTE_TOOL)
    assert (tool[semconv.TOOL_CALL_ARGUMENTS], tool[semconv.TOOL_CALL_RESULT]) == ('{"expression": "12 * 3"}', "36")
    assert not holds(folder / "agl-runs", key)


KEY = "AIza-of-the-user-0123456789"


class Repeats(BaseHTTPRequestHandler):
    """A provider whose error repeats the key that it got."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        said = f"no such key: {self.headers.get('x-goog-api-key')} {self.path}"
        body = json.dumps({"error": {"code": 400, "message": said, "status": "INVALID_ARGUMENT"}}).encode()
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize("form", ["generateContent", f"generateContent?key={KEY}"], ids=["header", "query"])
def test_what_is_refused_is_recorded_without_the_key(form: str, folder: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Repeats) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = {"GOOGLE_GEMINI_BASE_URL": f"http://127.0.0.1:{server.server_port}", "GEMINI_API_KEY": KEY}
        done = launch(folder, os.environ | own, "--", "node", "gemini.mjs", form)
        server.shutdown()
    assert done.returncode == 1
    assert KEY in done.stderr, "the program gets the error as it is"
    (chat,) = chats(trace(folder))
    assert chat["status_message"].startswith("400: no such key")
    assert "[key]" in chat["status_message"]
    assert not holds(folder / "agl-runs", KEY)


def test_a_program_gets_another_system_prompt(folder: Path) -> None:
    save_prompts(folder / "prompts", {"p": agl.SystemPrompt("gemini", "Use it.", "Use the calculator.")})
    with google("calculator", {"expression": "12 * 3"}, "It is 36.") as server:
        done = launch(folder, server.environment(), "--prompts", "prompts", "--", "node", "gemini.mjs", FORMS[0])
    assert done.returncode == 0, done.stderr
    assert server.calls[0].request["messages"][0] == {"role": "system", "content": "Use it."}
    assert facts(folder)["unused_prompts"] == []


def test_an_untrained_policy_answers_and_every_call_is_recorded(untrained_model: Path, folder: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AGL_", "OTEL_"))}
    environment |= {"GOOGLE_GEMINI_BASE_URL": "http://127.0.0.1:9", "GOOGLE_API_KEY": KEY}
    done = launch(folder, environment, "--model", untrained_model, "--", "node", "gemini.mjs", FORMS[2])
    assert done.returncode == 0, done.stderr
    assert len(chats(trace(folder))) == 2
    assert facts(folder)["output_tokens"] > 0
    assert not holds(folder / "agl-runs", KEY)


# -- Gemini CLI -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gemini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemini CLI, installed by npm."""
    folder = tmp_path_factory.mktemp("gemini")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", CLI]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {CLI}: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "node_modules" / ".bin" / "gemini"


@pytest.mark.slow
@pytest.mark.night
def test_gemini_cli_reads_a_file_and_is_recorded(gemini: Path, tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".gemini").mkdir(parents=True)
    work.mkdir()
    (work / "notes.txt").write_text("buy milk\n")
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    ask = ["-m", "gemini-2.5-flash", "--skip-trust", "-p", "What do the notes in notes.txt say?"]
    with google("read_file", {"file_path": "notes.txt"}, "They say: buy milk.") as server:
        done = launch(work, server.environment() | {"HOME": str(home)}, "--agent", "gemini", "--", gemini, *ask)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "They say: buy milk."
    first, second = server.calls
    assert second.parent_id == first.id
    assert second.request["tool_results"] == [{"id": first.tool_call_ids[0], "name": "read_file", "failed": False}]
    assert "buy milk" in second.request["messages"][0]["content"]
    spans = trace(work)
    assert outline(spans) == ["agent gemini", "  chat", "  tool read_file", "  chat"]
    assert [c["attributes"][semconv.RESPONSE_ID] for c in chats(spans)] == [first.id, second.id]
    assert not holds(work / "agl-runs", server.attempt.key)
