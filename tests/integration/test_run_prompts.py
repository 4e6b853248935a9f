"""`agl run --prompts DIR`: an unmodified program gets other system prompts, in any language."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import OPENAI_KEY, chats, environment, facts, launch, trace

import agl
from agl import semconv
from agl.agents.prompts import save_prompts
from agl.testing.provider import Provider, says, serve

PROGRAM = """
import sys
from openai import OpenAI
messages = [{"role": "system", "content": "Write.", "name": "n"}, {"role": "user", "content": "Write."}]
request = {"model": "own", "messages": messages}
client = OpenAI()
print(client.chat.completions.create(**request).choices[0].message.content)
for chunk in client.chat.completions.create(**request, stream=True):
    sys.stdout.write(chunk.choices[0].delta.content or "")
assert messages[0]["content"] == "Write.", "the program's own list"
"""

BODY = (
    '{ "model":"own", "messages" : [{"content":"Wr\\u0069te.","role":"system"},'
    '{"role":"user","content":"Write. \\ud83d\\ude00 \\/"}],\n "temperature": 1.0, "x\\"": [1e3, null, "\\\\"] }'
)
RAW = f"""
import os, urllib.request
body = {BODY!r}.encode()
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
headers = {{"content-type": "application/json", "authorization": "Bearer " + key}}
request = urllib.request.Request(url + "/chat/completions", body, headers)
print(urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request).read().decode())
"""


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("ok")) as running:
        yield running


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    save_prompts(tmp_path / "prompts", {"style": agl.SystemPrompt("program", 'Write "well".\n', "Write.")})
    return tmp_path / "prompts"


def test_an_unmodified_program_gets_another_system_prompt(provider: Provider, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    plain = launch(tmp_path, environment(provider), "--", sys.executable, "program.py")
    own = [s.raw for s in provider.seen]
    provider.seen.clear()
    done = launch(tmp_path, environment(provider), "--prompts", prompts, "--", sys.executable, "program.py")
    assert (done.returncode, plain.returncode) == (0, 0), done.stderr
    assert done.stdout == plain.stdout
    old, new = b'"role":"system","content":"Write."', b'"role":"system","content":"Write \\"well\\".\\n"'
    assert [s.raw for s in provider.seen] == [raw.replace(old, new) for raw in own] != own
    assert {s.headers["authorization"] for s in provider.seen} == {f"Bearer {OPENAI_KEY}"}
    found = facts(tmp_path)
    assert found["unused_prompts"] == []
    for chat in chats(trace(tmp_path, found["rollout_id"])):
        assert chat["attributes"][semconv.SYSTEM_PROMPTS] == ["style"]
        assert json.loads(chat["attributes"][semconv.INPUT_MESSAGES])[0]["parts"][0]["content"] == 'Write "well".\n'


def test_a_program_without_agl_gets_it_in_the_bytes_that_it_sent(
    provider: Provider, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(RAW)
    # Isolated, so that it stands for a program in another language.
    words = ("--prompts", prompts, "--", sys.executable, "-I", "program.py")
    done = launch(tmp_path, environment(provider), *words)
    assert done.returncode == 0, done.stderr
    (seen,) = provider.seen
    assert seen.raw == BODY.encode().replace(b'"Wr\\u0069te."', b'"Write \\"well\\".\\n"')
    assert seen.headers["content-length"] == str(len(seen.raw))
    (chat,) = chats(trace(tmp_path))
    assert chat["attributes"][semconv.SYSTEM_PROMPTS] == ["style"]
    assert json.loads(chat["attributes"][semconv.INPUT_MESSAGES])[0]["parts"][0]["content"] == 'Write "well".\n'


@pytest.mark.parametrize("isolated", [[], ["-I"]], ids=["python", "another language"])
def test_a_prompt_that_no_request_had_is_told(isolated: list[str], provider: Provider, tmp_path: Path) -> None:
    prompts = {
        "style": agl.SystemPrompt("program", "Better.", "Rhyme."),
        "critic": agl.SystemPrompt("critic", "Better.", "Judge."),
        "plan": agl.PromptTemplate("Plan {x}."),
    }
    save_prompts(tmp_path / "prompts", prompts)
    (tmp_path / "program.py").write_text(RAW)
    words = ("--prompts", "prompts", "--", sys.executable, *isolated, "program.py")
    if not isolated:
        (tmp_path / "program.py").write_text(PROGRAM)
    done = launch(tmp_path, environment(provider), *words)
    assert done.returncode == 0, done.stderr
    assert {s.body["messages"][0]["content"] for s in provider.seen} == {"Write."}
    style, critic, plan = facts(tmp_path)["unused_prompts"]
    assert "'style' was not used: no request of 'program' had the prompt that it replaces. They had 'Write.'" in style
    assert "agent 'critic' sent no request; agents that did: program" in critic
    assert "'plan' was not used" in plan
    assert all(f"agl: {line}" in done.stderr for line in (style, critic, plan))


def test_a_missing_directory_is_an_error_before_the_program_runs(provider: Provider, tmp_path: Path) -> None:
    done = launch(tmp_path, environment(provider), "--prompts", "nowhere", "--", sys.executable, "-c", "print('ran')")
    assert done.returncode == 1, done.stderr
    assert "there are no prompts in nowhere" in done.stderr
    assert "ran" not in done.stdout
