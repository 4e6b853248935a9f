"""System prompts replaced at the wire: which requests, which parts of them, and what is said of those left alone."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from late import Late
from running import fit
from scripted import in_loop, serving

import agl
from agl import semconv, tracing
from agl.adapters.anthropic import AnthropicTracer
from agl.adapters.openai import OpenAITracer
from agl.agents.prompts import PromptUse, replacements
from agl.agents.resources import resource_from_json, resource_to_json
from agl.errors import ConfigError
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.messages import read
from agl.testing.provider import Provider, says, serve
from agl.tracing.context import RolloutContext
from agl.tracing.inferred import completed
from agl.tracing.system_prompts import replace_system_prompts
from agl.trainer.algorithms.options import RUN_OPTIONS, SECTIONS
from agl.trainer.store import open_store

anthropic = Late("anthropic")

TEXTS = {"old": ("p", "new"), "one two": ("q", "whole")}
CACHED = {"cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": "old"}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


@pytest.mark.parametrize(
    ("body", "expected", "names"),
    [
        ({"messages": [{"role": "system", "content": "old", "name": "n"}, USER], "model": "m"},
         {"messages": [{"role": "system", "content": "new", "name": "n"}, USER], "model": "m"}, ["p"]),
        ({"messages": [{"role": "developer", "content": [text("old")]}, USER]},
         {"messages": [{"role": "developer", "content": [text("new")]}, USER]}, ["p"]),
        ({"messages": [USER, {"role": "system", "content": "old"}, {"role": "system", "content": "old"}]},
         {"messages": [USER, {"role": "system", "content": "new"}, {"role": "system", "content": "new"}]}, ["p", "p"]),
        ({"model": "m", "instructions": "old", "input": "old"},
         {"model": "m", "instructions": "new", "input": "old"}, ["p"]),
        ({"input": [{"role": "developer", "content": [{"type": "input_text", "text": "old"}]}, USER]},
         {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "new"}]}, USER]}, ["p"]),
        ({"system": [text("first"), text("old", **CACHED)], "messages": [USER]},
         {"system": [text("first"), text("new", **CACHED)], "messages": [USER]}, ["p"]),
        ({"system": [text("one "), text("two", **CACHED)], "messages": [USER]},
         {"system": [text("whole", **CACHED)], "messages": [USER]}, ["q"]),
        ({"systemInstruction": {"role": "user", "parts": [{"text": "one "}, {"text": "two"}]}, "contents": ["old"]},
         {"systemInstruction": {"role": "user", "parts": [{"text": "whole"}]}, "contents": ["old"]}, ["q"]),
        ({"systemInstruction": {"parts": "old"}}, None, []),
        ({"system": "old ", "messages": [USER]}, None, []),
        ({"system": None, "messages": [{"role": "system", "content": None}, USER, 3]}, None, []),
        ({"prompt": "old"}, None, []),
        (["old"], None, []),
        (None, None, []),
    ],
)  # fmt: skip
def test_system_prompts_alone_are_replaced(body: Any, expected: Any, names: list[str]) -> None:
    before = copy.deepcopy(body)
    replaced = replace_system_prompts(body, TEXTS)
    assert json.dumps(replaced.body) == json.dumps(before if expected is None else expected), "fields keep their order"
    assert [*replaced.names] == names
    assert body == before, "the caller's objects are unchanged"
    assert (replaced.body is body) == (expected is None)


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("ok")) as server:
        yield server


@contextmanager
def attempt(*prompts: agl.SystemPrompt, gateway: Provider | None = None, **options: Any) -> Iterator[RolloutContext]:
    url = gateway.root if gateway else None
    context = RolloutContext("ro", 1, "writer", select("writer"), url, "key", **options)
    context.system_prompts = replacements({f"p{i}": p for i, p in enumerate(prompts)})
    with OpenAITracer(), AnthropicTracer(), tracing.running(context):
        yield context


def ask(provider: Provider, prompt: str, **fields: Any) -> None:
    client = openai.OpenAI(base_url=provider.url, api_key="sk-own", max_retries=0)
    messages: Any = [{"role": "system", "content": prompt}, {"role": "user", "content": "q"}]
    client.chat.completions.create(model="own", messages=messages, **fields)


def sent(provider: Provider) -> list[str]:
    return [m.text for seen in provider.seen for m in read.body(seen.body) if m.role == "system"]


def test_one_of_two_agents_gets_its_prompt_and_the_other_keeps_the_same_text(provider: Provider) -> None:
    with attempt(agl.SystemPrompt("writer", "Write well.", "Write.")):
        ask(provider, "Write.")
        with tracing.span("invoke_agent", "critic", agent="critic"):
            ask(provider, "Write.")
        with tracing.untrained("writer"):
            ask(provider, "Write.")
    assert sent(provider) == ["Write well.", "Write.", "Write."]
    assert {s.headers["authorization"] for s in provider.seen} == {"Bearer sk-own"}
    assert {s.body["model"] for s in provider.seen} == {"own"}


def test_a_selected_agents_prompt_is_replaced_on_its_way_to_the_gateway(provider: Provider) -> None:
    with serve(says("ok")) as gateway, attempt(agl.SystemPrompt("writer", "Better.", "Own."), gateway=gateway):
        ask(provider, "Own.")
    assert (sent(gateway), provider.seen) == (["Better."], [])


def test_anthropics_blocks_keep_their_fields(provider: Provider) -> None:
    client = anthropic.Anthropic(base_url=provider.root, api_key="sk-own", max_retries=0)
    block = text("Own.", **CACHED)
    request: Any = {"model": "own", "max_tokens": 9, "system": [block], "messages": [USER]}
    with attempt(agl.SystemPrompt("writer", "Better.", "Own.")):
        client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            stream.until_done()
    assert [s.body["system"] for s in provider.seen] == [[text("Better.", **CACHED)]] * 2
    assert block == text("Own.", **CACHED)


def test_what_the_caller_holds_stays_as_it_is(provider: Provider) -> None:
    from openai._models import FinalRequestOptions
    from openai.types.chat import ChatCompletion

    client = openai.OpenAI(base_url=provider.url, api_key="sk-own", max_retries=0)
    body = {"model": "own", "messages": [{"role": "system", "content": "Own."}, USER]}
    options = FinalRequestOptions.construct(method="post", url="/chat/completions", json_data=body)
    with attempt(agl.SystemPrompt("writer", "Better.", "Own.")):
        for _ in range(2):
            client.request(ChatCompletion, options)
    assert sent(provider) == ["Better."] * 2
    body = dict(options.json_data)  # type: ignore[arg-type]
    assert body["messages"][0] == {"role": "system", "content": "Own."}


@pytest.mark.parametrize("capture", [True, False])
def test_another_prompt_is_left_and_told(capture: bool, provider: Provider) -> None:
    prompts = {"better": agl.SystemPrompt("writer", "Better.", "Own."), "c": agl.SystemPrompt("critic", "C", "c")}
    use = PromptUse(prompts)
    with attempt(*prompts.values(), capture_content=capture) as rollout:
        for day in ("Monday", "Tuesday"):
            ask(provider, f"Today is {day}. " + "Own. " * 40)
        with tracing.span("invoke_agent", "planner", agent="planner"):
            ask(provider, "c")
    assert sent(provider)[0].startswith("Today is Monday")
    use.add(rollout.spans)
    writer, critic = use.unused()
    assert "'better' was not used: no request of 'writer' had the prompt that it replaces" in writer
    assert "agl.PromptTemplate" in writer
    assert ("Today is Monday. Own. " in writer) == capture
    assert len(max(use.left["writer"], key=len)) <= 80
    assert critic.endswith("agent 'critic' sent no request; agents that did: planner, writer")
    assert len(use.unused(of_seen_agents=True)) == 1
    chats = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert [semconv.SYSTEM_PROMPTS in s.attributes for s in chats] == [True, True, False]


@in_loop
async def test_the_gateway_replaces_the_prompts_of_clients_without_agl() -> None:
    texts = {"agent": {"Own.": ("better", "Better.")}}
    system: Any = {"role": "system", "content": "Own."}
    async with serving(["four"]) as rig:
        attempt = await rig.attempt(prompts=texts)
        await attempt.chat([system, USER])
        responses: Any = attempt.client().responses
        await responses.create(model="m", instructions="Own.", input="q")
        await attempt.client("other").chat.completions.create(model="m", messages=[system, USER])
        await attempt.chat([{"role": "system", "content": "Another."}, USER])
        # As agl's own client sends it: what it holds was replaced there.
        headers = {"x-agl-traceparent": f"00-{1:032x}-{1:016x}-01"}
        await attempt.client().chat.completions.create(model="m", messages=[system, USER], extra_headers=headers)
        calls = await attempt.close()
    prompts = ["Better.", "Better.", "Own.", "Another.", "Own."]
    assert [call.request["messages"][0]["content"] for call in calls] == prompts
    use = PromptUse({"better": agl.SystemPrompt("agent", "Better.", "Own.")})
    use.add(completed([], calls))
    assert (use.requests, {a: dict(n) for a, n in use.left.items()}) == ({"better": 2}, {"agent": {"Another.": 1}})


@pytest.mark.parametrize("runners", ["local", pytest.param("process", marks=pytest.mark.full)])
def test_a_run_trains_with_the_prompts_that_it_is_given(
    runners: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {"style": agl.SystemPrompt("writes", "Write well.", "Write."), "plan": agl.PromptTemplate("Plan {x}.")}
    prompts["other"] = agl.SystemPrompt("writes", "Rhyme well.", "Rhyme.")
    done = fit(writes, [{"q": "q"}] * 2, tmp_path, runners=runners, initial_resources=prompts)
    assert [call.request["messages"][0]["content"] for calls in done.calls for call in calls] == ["Write well."] * 2
    assert done.rewards == [1.0, 1.0]
    told = [r.getMessage() for r in caplog.records if "was not used" in r.getMessage()]
    assert told == [
        "the system prompt 'other' was not used: no request of 'writes' had the prompt that it replaces, but only "
        "others that were replaced"
    ]


@agl.rollout
def writes(task: Any, llm: agl.LLM, resources: Any) -> float:
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: Any = [{"role": "system", "content": "Write."}, {"role": "user", "content": task["q"]}]
    client.chat.completions.create(model=llm.model, messages=messages)
    return float(sorted(resources) == ["llm", "plan"])


PROGRAM = """
import json, os, urllib.request as u
messages = [{"role": "system", "content": "Write."}, {"role": "user", "content": "q"}]
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"model": "own", "messages": messages}).encode()
u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""


def test_a_command_that_is_trained_gets_its_prompt(tmp_path: Path) -> None:
    command = agl.CommandAgent([sys.executable, "-c", PROGRAM], reward=lambda task, output: 1.0, name="writer")
    done = fit(command, [{}], tmp_path, initial_resources={"p": agl.SystemPrompt("writer", "Better.", "Write.")})
    [[call]] = done.calls
    assert call.request["messages"][0]["content"] == "Better."
    assert call.request[semconv.SYSTEM_PROMPTS] == ["p"]


def test_a_command_on_its_own_model_gets_its_prompt_and_is_recorded(tmp_path: Path, provider: Provider) -> None:
    env = {"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "sk-own-0123456789"}
    command = agl.CommandAgent([sys.executable, "-c", PROGRAM], reward=lambda task, output: 1.0, name="writer", env=env)
    prompts = {"p": agl.SystemPrompt("writer", "Better.", "Write.")}
    trainer = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False, initial_resources=prompts)
    result = trainer.fit(command, ["a", "b", "c"])
    assert result.history[0]["train/reward"] == 1.0
    assert [s.body["messages"][0]["content"] for s in provider.seen] == ["Better."] * 3
    assert {s.headers["authorization"] for s in provider.seen} == {"Bearer sk-own-0123456789"}

    async def spans() -> list[list[Span]]:
        store = await open_store(result.store)
        found = [await store.query_spans(r.rollout_id) for r in await store.query_rollouts()]
        await store.close()
        return found

    for attempt in asyncio.run(spans()):
        (chat,) = (s for s in attempt if s.operation == semconv.CHAT)
        (root,) = (s for s in attempt if s.parent_id is None)
        assert (chat.agent, chat.parent_id, chat.trace_id) == ("writer", root.span_id, root.trace_id)
        assert chat.attributes[semconv.SYSTEM_PROMPTS] == ["p"]
        assert [m.text for m in read.sent(chat) if m.role == "system"] == ["Better."]
        assert chat.attributes[semconv.INPUT_TOKENS] == 7
    assert "sk-own" not in (tmp_path / "run.db").read_bytes().decode(errors="ignore")


def test_a_command_on_its_own_model_cannot_send_spans(tmp_path: Path, provider: Provider) -> None:
    program = """
import json, os, re, urllib.error, urllib.request as u
url = os.environ["OPENAI_BASE_URL"]
root, secret = re.fullmatch("(.*)/keys/(.*)/agents/.*", url).groups()
headers = {"content-type": "application/json", "authorization": "Bearer " + secret}
for target in (root + "/v1/traces", url.replace(secret, "other") + "/models"):
    try:
        print(u.urlopen(u.Request(target, b"{}", headers)).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
    answers = []
    env = {"OPENAI_BASE_URL": provider.url}
    command = agl.CommandAgent(
        [sys.executable, "-c", program], reward=lambda task, output: float(answers.append(output) is None), env=env
    )
    agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False).fit(command, ["a"])
    assert answers == ["404\n401"]
    assert provider.seen == []


def test_a_prompt_survives_json() -> None:
    prompt = agl.SystemPrompt("writer", "Bétter.", "Own.")
    assert resource_from_json(json.loads(json.dumps(resource_to_json(prompt)))) == prompt


def test_a_client_of_a_training_server_names_no_directory_of_the_server() -> None:
    assert "prompts" not in RUN_OPTIONS
    assert "prompts" in SECTIONS["training"]


def test_two_prompts_for_one_place_are_an_error() -> None:
    with pytest.raises(ConfigError, match="'a' and 'b' replace the same system prompt of 'writer'"):
        replacements({"a": agl.SystemPrompt("writer", "A", "Own."), "b": agl.SystemPrompt("writer", "B", "Own.")})
