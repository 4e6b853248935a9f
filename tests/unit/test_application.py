"""The gateway for applications: keys, policies by name, conversations, limits, metrics; with the real SDKs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from applications import DESK, SHOP, served
from scripted import TOOLS, ScriptedEngine, in_loop, quick_tokenizer, rendering_of, tool_call, until

from agl.errors import ConfigError, StoreError
from agl.trainer.gateway import application as application_gateway
from agl.trainer.http.application_keys import ApplicationKeys
from agl.trainer.launch.recording import Recording
from agl.trainer.launch.serve import ServeOptions, serving
from agl.trainer.store import open_store


class Kept:
    """A store that keeps the calls as they come."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def add_calls(self, calls: Any) -> None:
        self.calls += calls


USER = {"role": "user", "content": "What is 3 + 4?"}


@pytest.fixture
def sdks() -> None:
    """Imported before a test's time begins."""
    import anthropic  # noqa: F401
    import google.genai  # noqa: F401
    import openai  # noqa: F401


@in_loop
async def test_the_four_apis_are_at_one_address(sdks: None):
    from anthropic import AsyncAnthropic
    from anthropic import DefaultAsyncHttpxClient as AnthropicHttp
    from google import genai

    async with served(["seven"]) as at:
        client = at.openai()
        chat = await client.chat.completions.create(model="any", messages=[USER])
        assert (chat.choices[0].message.content, chat.model) == ("seven", "policy")
        response = await client.responses.create(model="policy", input="What is 3 + 4?")
        assert response.output_text == "seven"
        texts = []
        async for chunk in await client.chat.completions.create(model="policy", messages=[USER], stream=True):
            texts += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(texts) == "seven"
        anthropic = AsyncAnthropic(base_url=at.url, api_key=DESK, http_client=AnthropicHttp(trust_env=False))
        message: Any = await anthropic.messages.create(model="policy", max_tokens=64, messages=[USER])  # type: ignore[list-item]
        assert message.content[0].text == "seven"
        counted = await anthropic.messages.count_tokens(model="policy", messages=[USER])  # type: ignore[list-item]
        assert counted.input_tokens == at.engine.asked[0].prompt_ids.size
        google = genai.Client(api_key=SHOP, http_options={"base_url": at.url})
        answer = await google.aio.models.generate_content(model="policy", contents="What is 3 + 4?")
        assert answer.text == "seven"
        assert [model.id async for model in client.models.list()] == ["policy"]


@in_loop
async def test_tools_of_an_application_are_called():
    async with served([tool_call("3 + 4"), "seven"]) as at:
        client = at.openai()
        first = await client.chat.completions.create(model="policy", messages=[USER], tools=TOOLS)
        (call,) = first.choices[0].message.tool_calls
        assert call.function.name == "calculator"
        answered = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        messages = [USER, first.choices[0].message.model_dump(), answered]
        second = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "seven"


@pytest.mark.parametrize("key", [None, "wrong-key-0123456789", SHOP[:-1]])
@in_loop
async def test_a_wrong_key_is_401_in_each_apis_form(key: str | None):
    async with served(["x"]) as at:
        chat = await at.post("/v1/chat/completions", {"messages": [USER]}, key)
        assert (chat.status_code, chat.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "rollout" not in chat.text
        messages = await at.post("/v1/messages", {"max_tokens": 9, "messages": [USER]}, key)
        assert (messages.status_code, messages.json()["error"]["type"]) == (401, "authentication_error")
        google = await at.post("/v1beta/models/policy:generateContent", {"contents": []}, key)
        assert (google.status_code, google.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        assert (await at.get("/v1/models", key)).status_code == 401
        assert at.engine.asked == []


@in_loop
async def test_without_keys_everyone_on_this_machine_is_answered_but_no_web_page():
    async with served(["x"], ApplicationKeys.find(needed=False)) as at:
        assert (await at.post("/v1/chat/completions", {"messages": [USER]}, None)).status_code == 200
        page = {"origin": "http://evil.example", "content-type": "application/json"}
        async with httpx.AsyncClient(trust_env=False, headers=page) as client:
            refused = await client.post(f"{at.url}/v1/chat/completions", json={"messages": [USER]})
        assert refused.status_code == 401


@in_loop
async def test_several_policies_are_asked_by_their_names():
    engines = {name: ScriptedEngine(quick_tokenizer(), [name]) for name in ("writer", "critic")}
    async with served(engines["writer"], names=("writer",)) as at:
        at.gateway.serve("critic", engines["critic"], rendering_of(quick_tokenizer()))
        client = at.openai()
        for name in ("critic", "writer"):
            chat = await client.chat.completions.create(model=name, messages=[USER])
            assert (chat.choices[0].message.content, chat.model) == (name, name)
        unknown = await at.post("/v1/chat/completions", {"model": "editor", "messages": [USER]})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "'writer', 'critic'" in unknown.text
        google = await at.post("/v1beta/models/critic:generateContent", {"contents": [{"parts": [{"text": "x"}]}]})
        assert google.json()["modelVersion"] == "critic"


@in_loop
async def test_a_conversation_continues_its_tokens_and_is_one_rollout():
    kept = Kept()
    async with served(["one", "two", "three"], store=kept) as at:
        client = at.openai()
        messages: list[Any] = [USER]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and then?"}]
        other = await at.openai(DESK).chat.completions.create(model="policy", messages=messages)
        assert other.choices[0].message.content == "three"
    first, second, third = kept.calls
    assert second.rollout_id == first.rollout_id
    assert (second.index, second.parent_id, second.agent) == (1, first.id, "shop")
    begin = [*first.prompt_ids, *first.response_ids]
    assert second.prompt_ids[: len(begin)].tolist() == begin
    # Another application's history is no conversation of this one.
    assert (third.rollout_id != first.rollout_id, third.parent_id, third.agent) == (True, None, "desk")


@in_loop
async def test_a_response_is_continued_by_its_id_by_its_application_alone():
    async with served(["one", "two"]) as at:
        client = at.openai()
        first = await client.responses.create(model="policy", input="hello")
        second = await client.responses.create(model="policy", input="and?", previous_response_id=first.id)
        assert second.output_text == "two"
        before, after = at.engine.asked
        assert after.prompt_ids[: before.prompt_ids.size].tolist() == before.prompt_ids.tolist()
        body = {"model": "policy", "input": "and?", "previous_response_id": first.id}
        assert (await at.post("/v1/responses", body, DESK)).json()["error"]["code"] == "previous_response_not_found"


@in_loop
async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(application_gateway, "CONVERSATIONS", 3)
    async with served(["yes"]) as at:
        client = at.openai()
        for n in range(8):
            message = {"role": "user", "content": f"question {n}"}
            await client.chat.completions.create(model="policy", messages=[message])
        gateway = at.gateway
        assert len(gateway._conversations) == len(gateway._ends) == len(gateway._accesses) == 3
        assert all(not c.calls and not c.pending for c in gateway._conversations)


@in_loop
async def test_the_same_seed_gives_the_same_sampling():
    async with served(["yes"]) as at:
        client = at.openai()
        for seed in (5, 5, 6, None, None):
            await client.chat.completions.create(model="policy", messages=[USER], **({"seed": seed} if seed else {}))
        first, again, other, free, freer = (asked.sampling.seed for asked in at.engine.asked)
        assert first == again
        assert len({first, other, free, freer}) == 4


@in_loop
async def test_an_application_beyond_its_limit_gets_429_and_others_do_not():
    engine = ScriptedEngine(quick_tokenizer(), ["x"], paused=True)
    async with served(engine, most_requests=2) as at:
        body = {"messages": [USER]}
        running = [asyncio.ensure_future(at.post("/v1/chat/completions", body)) for _ in range(2)]
        await until(lambda: engine.running == 2)
        refused = await at.post("/v1/messages", {"max_tokens": 9, **body})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"] == "1"
        other = asyncio.ensure_future(at.post("/v1/chat/completions", body, DESK))
        await until(lambda: engine.running == 3)
        engine.resume.set()
        assert [(await r).status_code for r in (*running, other)] == [200, 200, 200]
        # Bad requests, and those that were refused, leave no place taken.
        for _ in range(3):
            assert (await at.post("/v1/chat/completions", {"messages": "x"})).status_code == 400
        assert (await at.post("/v1/chat/completions", body)).status_code == 200
        assert set(at.gateway.metrics.open_requests.values()) == {0}


@in_loop
async def test_a_client_that_hangs_up_leaves_its_place_free():
    engine = ScriptedEngine(quick_tokenizer(), ["x"], paused=True)
    async with served(engine, most_requests=1) as at:
        for _ in range(3):
            asking = asyncio.ensure_future(at.post("/v1/chat/completions", {"messages": [USER]}))
            await until(lambda: engine.running == 1)
            asking.cancel()
            await until(lambda: engine.running == 0)
            await until(lambda: at.gateway.metrics.open_requests["shop"] == 0)
        assert at.gateway.metrics.requests["shop", "policy", "499"] == 3


@in_loop
async def test_metrics_count_requests_tokens_and_times():
    async with served(["yes"]) as at:
        client = at.openai()
        await client.chat.completions.create(model="policy", messages=[USER])
        async for _ in await client.chat.completions.create(model="policy", messages=[USER], stream=True):
            pass
        await at.post("/v1/chat/completions", {"messages": [USER]}, "wrong-key-0123456789")
        lines = at.gateway.metrics.text().splitlines()
        size = at.engine.asked[0].prompt_ids.size
    for line in (
        'agl_requests_total{application="shop",model="policy",status="200"} 2',
        'agl_requests_total{application="unknown",model="",status="401"} 1',
        f'agl_tokens_total{{application="shop",model="policy",kind="prompt"}} {2 * size}',
        'agl_open_requests{application="shop"} 0',
        'agl_request_seconds_count{application="shop",model="policy"} 2',
        'agl_first_token_seconds_bucket{application="shop",model="policy",le="+Inf"} 1',
    ):
        assert line in lines, line


@in_loop
async def test_what_is_not_served_is_named_as_its_client_knows_it():
    async with served(["x"]) as at:
        for path in ("/v1/images/generations", "/v1/messages/batches", "/nothing"):
            missing = await at.post(path, {})
            assert missing.status_code == 404
            assert f"POST {path} is not served" in missing.text


class Full:
    """A store whose disk is full, until it is not."""

    def __init__(self) -> None:
        self.store: Any = None

    def __getattr__(self, name: str) -> Any:
        if self.store is None:
            raise StoreError("the disk is full")
        return getattr(self.store, name)


@in_loop
async def test_an_application_gets_its_answers_while_they_cannot_be_recorded(caplog: pytest.LogCaptureFixture):
    full = Full()
    recording = Recording(full, {"policy": "DIR"})  # type: ignore[arg-type]
    async with served(["yes"], store=recording) as at:
        client = at.openai()
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=[USER])
            assert answer.choices[0].message.content == "yes"
        await at.gateway.written()
        assert [record.message for record in caplog.records if record.name == "agl.serve"] == [
            "calls are not recorded: the disk is full"
        ]
        full.store = await open_store("memory")
        await client.chat.completions.create(model="policy", messages=[USER])
        await at.gateway.written()
        (rollout,) = await full.store.query_rollouts(status=["succeeded"])
        assert (rollout.task, rollout.mode, rollout.metadata["model"]) == ("What is 3 + 4?", "collect", "DIR")
        (call,) = await full.store.query_calls(rollout.rollout_id)
        assert (call.agent, call.policy) == ("shop", "policy")
        await full.store.close()


@in_loop
async def test_a_recorded_conversations_task_is_its_question_after_the_examples():
    store = await open_store("memory")
    shots: Any = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
    async with served(["7", "9"], store=Recording(store, {"policy": "DIR"})) as at:  # type: ignore[arg-type]
        for question in ("What is 3 + 4?", "What is 4 + 5?"):
            messages = [*shots, {"role": "user", "content": question}]
            await at.openai().chat.completions.create(model="policy", messages=messages)
        await at.gateway.written()
        tasks = [rollout.task for rollout in await store.query_rollouts(status=["succeeded"])]
        assert {task["input"] for task in tasks} == {"What is 3 + 4?", "What is 4 + 5?"}
    await store.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no key"),
        ("# nothing\n", "no key"),
        ("shop short\n", "'shop' has 5 characters"),
        ("shop key one-two-three-four\n", "line 1 of the key file has 3 words"),
        (f"shop {SHOP}\nshop {DESK}\n", "'shop' has two keys"),
        (f"shop {SHOP}\ndesk {SHOP}\n", "'desk' has another application's key"),
    ],
)
def test_a_key_file_with_a_mistake_is_refused(text: str, error: str, tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=error):
        ApplicationKeys.find(file)


def test_keys_come_from_a_file_the_environment_or_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "keys"
    file.write_text(f"# who asks\nshop {SHOP}\n\n{DESK}\n")
    monkeypatch.setenv("AGL_KEY", "environment-0123456789")
    of_file, of_environment = ApplicationKeys.find(file), ApplicationKeys.find()
    assert of_file.application({"x-api-key": SHOP}) == "shop"
    assert of_file.application({"authorization": f"Bearer {DESK}"}) == "application"
    assert of_file.application({"authorization": "Bearer environment-0123456789"}) is None
    assert of_environment.application({"x-goog-api-key": "environment-0123456789"}) == "application"
    of_file.check_host("0.0.0.0")
    monkeypatch.delenv("AGL_KEY")
    made = ApplicationKeys.find()
    assert made.application({"x-api-key": str(made.minted)}) == "application"
    for keys in (made, ApplicationKeys.find(needed=False)):
        with pytest.raises(ConfigError, match="without a key"):
            keys.check_host("0.0.0.0")


def test_what_another_server_samples_is_served(untrained_model: Path):
    from test_vllm_failures import good
    from test_vllm_failures import serving as vllm_serving

    async def ask(url: str) -> tuple[Any, Any]:
        options = ServeOptions(
            policies={"mine": str(untrained_model)}, keys=ApplicationKeys.find(needed=False), port=0, engine=url,
            loading={}, quiet=True,
        )  # fmt: skip
        async with serving(options) as server, httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            body = {"messages": [USER], "max_tokens": 3}
            return (await client.post("/v1/chat/completions", json=body)).json(), (await client.get("/health")).json()

    def script(body: Any, _: int) -> tuple[int, Any]:
        # It has no /tokenize.
        return (200, {"choices": [good(body)], "usage": {}}) if "temperature" in body else (404, {})

    with vllm_serving(script) as engine:
        answered, health = asyncio.run(ask(engine.url))
        assert (answered["model"], answered["usage"]["completion_tokens"]) == ("mine", 3)
        assert health == {"status": "ok", "models": ["mine"]}
        assert len(engine.seen[-1]["prompt"]) == answered["usage"]["prompt_tokens"]
