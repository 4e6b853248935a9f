"""What the APIs have around their answers: models, errors of what is not served, ids of requests."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from applications import SHOP, served
from scripted import Attempt, ScriptedEngine, in_loop, quick_tokenizer, serving
from sdk_clients import anthropic_client, google_client, openai_client

from agl.errors import EngineError
from agl.trainer.gateway.completions import routes as routes_of_text

USER: dict[str, Any] = {"role": "user", "content": "hi"}
HEADERS = {
    "openai": lambda key: {"authorization": f"Bearer {key}"},
    "anthropic": lambda key: {"x-api-key": key, "anthropic-version": "2023-06-01"},
    "google": lambda key: {"x-goog-api-key": key},
}
"""Provider -> the headers of its clients."""


# -- models -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_the_models_of_openais_sdk() -> None:
    openai = pytest.importorskip("openai")
    async with serving(["x"]) as rig:
        client = openai_client(await rig.attempt())
        assert [(m.id, m.object, m.owned_by) async for m in client.models.list()] == [("policy", "model", "agl")]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="no policy 'gpt-5' is served here") as raised:
            await client.models.retrieve("gpt-5")
    error = raised.value
    assert (error.type, error.code, error.param) == ("invalid_request_error", "model_not_found", "model")


@pytest.mark.parametrize("base", ["", "/v1"])
@in_loop
async def test_the_models_of_anthropics_sdk(base: str) -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], max_context=500)) as rig:
        attempt = await rig.attempt()
        async with anthropic_client(attempt, attempt.url().removesuffix("/v1") + base) as client:
            (model,) = [m async for m in client.models.list(limit=10)]
            assert await client.models.retrieve("policy") == model
            with pytest.raises(Exception, match="no policy 'claude' is served here") as raised:
                await client.models.retrieve("claude")
    assert (model.id, model.type, model.display_name, model.created_at.year) == ("policy", "model", "policy", 1970)
    shown = model.model_dump()
    assert (shown["max_input_tokens"], shown["lifecycle"]) == (500, "active")
    # As strictly as the SDK's own types read it; a client reads anything.
    type(model).model_validate(model.model_dump(), strict=True)
    body: Any = raised.value
    assert (body.status_code, body.body["type"], body.body["error"]["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize("options", [{}, {"api_version": "v1"}, {"api_version": "v1alpha"}], ids=str)
@pytest.mark.parametrize("base", ["", "/v1"])
@in_loop
async def test_the_models_of_googles_sdk(base: str, options: dict[str, str]) -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], max_context=500)) as rig:
        attempt = await rig.attempt()
        async with google_client(attempt, attempt.url().removesuffix("/v1") + base, **options) as client:
            (model,) = [m async for m in await client.models.list()]
            assert (await client.models.get(model="policy")).name == model.name == "models/policy"
            assert (await client.models.generate_content(model=model.name, contents="hi")).text == "x"
            with pytest.raises(Exception, match="no policy 'gemini' is served here") as raised:
                await client.models.get(model="gemini")
    assert (model.display_name, model.input_token_limit, model.output_token_limit) == ("policy", 500, 500)
    assert model.supported_actions == ["generateContent", "countTokens"]
    error: Any = raised.value
    assert (error.code, error.status) == (404, "NOT_FOUND")


@asynccontextmanager
async def with_policies(*names: str) -> AsyncIterator[tuple[Attempt, httpx.AsyncClient]]:
    """An attempt at a gateway with policies of these names after `policy`, and a client for its paths."""
    async with serving(["x"]) as rig:
        served = rig.gateway.served(None)
        for name in names:
            rig.gateway.serve(name, served.engine, served.rendering)
        attempt = await rig.attempt()
        base = attempt.url().removesuffix("/v1")
        async with httpx.AsyncClient(trust_env=False, base_url=base) as http:
            yield attempt, http


NAMES = ["policy", "b", "c", "d", "e"]


@pytest.mark.parametrize("limit", [1, 2, 5, 9])
@in_loop
async def test_anthropics_sdk_lists_every_model_page_by_page(limit: int) -> None:
    async with with_policies(*NAMES[1:]) as (attempt, _), anthropic_client(attempt) as client:
        assert [model.id async for model in client.models.list(limit=limit)] == NAMES
        backwards = [model.id async for model in client.models.list(limit=limit, before_id="e")]
        assert sorted(backwards) == sorted(NAMES[:4])
        page = await client.models.list(limit=limit, after_id="b")
        shown = NAMES[2 : 2 + limit]
        assert [model.id for model in page.data] == shown
        assert (page.first_id, page.last_id, page.has_more) == (shown[0], shown[-1], limit < 3)
        page = await client.models.list(limit=limit, before_id="d")
        shown = NAMES[max(0, 3 - limit) : 3]
        assert [model.id for model in page.data] == shown
        assert (page.first_id, page.last_id, page.has_more) == (shown[0], shown[-1], limit < 3)


@in_loop
async def test_anthropics_models_are_those_of_the_stages_that_are_asked_for() -> None:
    async with with_policies(*NAMES[1:]) as (attempt, http), anthropic_client(attempt) as client:
        headers = HEADERS["anthropic"](attempt.key)
        for query, names in (
            ("", NAMES),
            ("lifecycle[]=active", NAMES),
            ("lifecycle[]=retired&lifecycle[]=active", NAMES),
            ("lifecycle=active&lifecycle=deprecated", NAMES),
            ("lifecycle[]=deprecated", []),
            ("lifecycle=retired&limit=1", []),
        ):
            answer = (await http.get(f"v1/models?{query}", headers=headers)).json()
            assert [model["id"] for model in answer["data"]] == names, query
            assert not answer["has_more"]
        listed = [model.id async for model in client.models.list(extra_query={"lifecycle": ["active"]})]
        assert listed == NAMES


@pytest.mark.parametrize("size", [1, 2, 5, 9])
@in_loop
async def test_googles_sdk_lists_every_model_page_by_page(size: int) -> None:
    async with with_policies(*NAMES[1:]) as (attempt, _), google_client(attempt) as client:
        pager = await client.models.list(config={"page_size": size})
        assert len(pager) == min(size, len(NAMES))
        assert [model.display_name async for model in pager] == NAMES


@in_loop
async def test_a_page_that_is_none_is_refused_by_name() -> None:
    async with with_policies("b") as (attempt, http):
        for provider, path, parameter, value in (
            ("anthropic", "v1/models", "limit", "0"),
            ("anthropic", "v1/models", "limit", "1001"),
            ("anthropic", "v1/models", "limit", "all"),
            ("anthropic", "v1/models", "after_id", "z"),
            ("anthropic", "v1/models", "before_id", ""),
            ("anthropic", "v1/models", "lifecycle", "new"),
            ("google", "v1beta/models", "pageSize", "-1"),
            ("google", "v1beta/models", "pageToken", "z"),
            ("google", "v1beta/models", "filter", "name:b"),
        ):
            answer = await http.get(path, params={parameter: value}, headers=HEADERS[provider](attempt.key))
            assert answer.status_code == 400, (path, parameter)
            assert error_of(provider, answer)[1].startswith(f"{parameter} is {value!r}")
        for parameter in ("pageSize=0", "page_size=1001", "pageToken="):
            answer = await http.get(f"v1beta/models?{parameter}", headers=HEADERS["google"](attempt.key))
            assert len(answer.json()["models"]) == 2, parameter


@in_loop
async def test_models_need_the_attempts_key_in_every_form() -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        async with httpx.AsyncClient(trust_env=False) as http:
            for provider, headers in HEADERS.items():
                for path in ("models", "models/policy"):
                    answer = await http.get(f"{attempt.url()}/{path}", headers=headers("wrong"))
                    assert answer.status_code == 401, path
                    assert error_of(provider, answer)[0] == {
                        "openai": "invalid_request_error", "anthropic": "authentication_error",
                        "google": "UNAUTHENTICATED",
                    }[provider]  # fmt: skip


# -- what is not served -----------------------------------------------------------------------------------------------


def error_of(provider: str, answer: httpx.Response) -> tuple[str, str]:
    """The type and the message of an error, which must be in the provider's form."""
    body = answer.json()
    error = body["error"]
    match provider:
        case "openai":
            assert {*body} == {"error"}
            assert {*error} == {"message", "type", "param", "code"}
            return error["type"], error["message"]
        case "anthropic":
            assert ({*body}, body["type"]) == ({"type", "error", "request_id"}, "error")
            assert body["request_id"] == answer.headers["request-id"]
            assert {*error} == {"type", "message"}
            return error["type"], error["message"]
    assert {*body} == {"error"}
    assert {*error} == {"code", "message", "status"}
    assert error["code"] == answer.status_code
    return error["status"], error["message"]


UNSERVED = [
    ("openai", "POST", "v1/embeddings", 404),
    ("openai", "POST", "v1/audio/speech", 404),
    ("openai", "POST", "v1/conversations", 404),
    ("openai", "GET", "v1/files", 404),
    ("openai", "GET", "v1/chat/completions", 405),
    ("openai", "PUT", "v1/responses", 405),
    ("openai", "POST", "v1/responses/compact", 404),
    ("openai", "POST", "v1/chat/completions/", 404),
    ("anthropic", "POST", "v1/messages/batches", 404),
    ("anthropic", "GET", "v1/messages/batches/msgbatch_1", 404),
    ("anthropic", "GET", "v1/messages", 405),
    ("anthropic", "POST", "v1/files", 404),
    ("anthropic", "POST", "v1/v1/messages/batches", 404),
    ("anthropic", "DELETE", "v1/models/policy", 405),
    ("google", "POST", "v1beta/models/m:embedContent", 404),
    ("google", "POST", "v1/v1beta/models/m:batchGenerateContent", 404),
    ("google", "POST", "v1/models/m:predict", 404),
    ("google", "POST", "v1beta/interactions", 404),
    ("google", "POST", "v1beta/cachedContents", 404),
    ("google", "GET", "v1beta/files", 404),
    ("google", "PUT", "v1beta/models", 405),
]


@in_loop
async def test_what_is_not_served_is_refused_in_the_form_of_its_api() -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        base = attempt.url().removesuffix("/v1")
        async with httpx.AsyncClient(trust_env=False) as http:
            for provider, method, path, status in UNSERVED:
                answer = await http.request(method, f"{base}/{path}", headers=HEADERS[provider](attempt.key))
                assert answer.status_code == status, (method, path, answer.text)
                kind, message = error_of(provider, answer)
                refused = {"openai": "invalid_request_error", "anthropic": "invalid_request_error"}
                missing = {"openai": "invalid_request_error", "anthropic": "not_found_error", "google": "NOT_FOUND"}
                assert kind == (missing if status == 404 else refused).get(provider, "INVALID_ARGUMENT"), path
                assert f"{method} " in message
                assert "is not served" in message
                if status == 405:
                    assert answer.headers["allow"]
        assert await attempt.close() == []


def listed(message: str) -> list[tuple[str, str]]:
    """(method, path) of each route that an error says is served."""
    (_, _, words) = message.partition("Served are: ")
    return [
        (method, path) for method, _, paths in (of.partition(" ") for of in words.split("; "))
        for path in paths.split(", ")
    ]  # fmt: skip


@in_loop
async def test_what_is_not_served_says_what_is() -> None:
    async with serving(["x"]) as rig, served(["x"], routes=routes_of_text) as application:
        attempt = await rig.attempt()
        of_attempt = {"authorization": f"Bearer {attempt.key}"}
        of_application = {"authorization": f"Bearer {SHOP}"}
        for base, headers in (
            (attempt.url().removesuffix("/v1"), of_attempt),
            (application.url, of_application),
        ):
            async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
                refused = await http.post(f"{base}/v1/embeddings", json={})
                found = listed(error_of("openai", refused)[1])
                assert len(found) == len(set(found))
                assert {
                    ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
                    ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/responses/input_tokens"),
                    ("GET", "/v1/responses/RESPONSE"), ("DELETE", "/v1/responses/RESPONSE"),
                    ("GET", "/v1/responses/RESPONSE/input_items"), ("GET", "/VERSION/models"),
                    ("POST", "/VERSION/models/MODEL:generateContent"),
                    ("POST", "/VERSION/models/MODEL:streamGenerateContent"),
                    ("POST", "/VERSION/models/MODEL:countTokens"), ("GET", "/health"),
                } <= {*found}  # fmt: skip
                text = {("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize")}
                assert text & {*found} == (text if base == application.url else set())
                for method, path in found:
                    at = httpx.URL(base).join("/health") if path == "/health" else base + path
                    url = str(at).replace("VERSION", "v1beta").replace("MODEL", "policy")
                    answer = await http.request(method, url, json={})
                    assert "is not served" not in answer.text, (method, path)


@in_loop
async def test_the_api_of_a_path_is_told_without_headers() -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        # An agent can be called after another API's path.
        base = attempt.url("v1/messages").removesuffix("/v1")
        async with httpx.AsyncClient(trust_env=False, headers={"authorization": "Bearer wrong"}) as http:
            for provider, method, path in (
                ("openai", "POST", "v1/chat/completions"),
                ("openai", "GET", "v1/unknown"),
                ("anthropic", "POST", "v1/messages/count_tokens"),
                ("google", "POST", "v1beta/models/m:generateContent"),
                ("google", "POST", "v1/models/m:countTokens"),
            ):
                error_of(provider, await http.request(method, f"{base}/{path}", json={}))


# -- ids of requests --------------------------------------------------------------------------------------------------


@in_loop
async def test_the_sdk_of_openai_shows_the_id_of_the_recorded_call() -> None:
    openai = pytest.importorskip("openai")
    script = ["x", "x", "x", "x", EngineError("no engine")]
    async with serving(script) as rig:
        attempt = await rig.attempt()
        client = openai_client(attempt)
        chat = await client.chat.completions.create(model="m", messages=[USER])
        response = await client.responses.create(model="m", input="hi")
        ids = [chat._request_id, response._request_id]
        for resource, asked in (
            (client.chat.completions, {"messages": [USER]}), (client.responses, {"input": "hi"})
        ):  # fmt: skip
            raw = await resource.with_raw_response.create(model="m", stream=True, **asked)
            ids.append(raw.request_id)
            async for _ in raw.parse():
                pass
        for asked in ({}, {"temperature": 9}):
            with pytest.raises(openai.APIStatusError) as raised:
                await client.chat.completions.create(model="m", messages=[USER], **asked)
            ids.append(raised.value.request_id)
        calls = await attempt.close()
    assert ids == [call.id for call in calls]
    assert (chat.id, response.id) == tuple(ids[:2])


@in_loop
async def test_the_sdk_of_anthropic_shows_the_id_of_the_recorded_call() -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        async with anthropic_client(attempt) as client:
            asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
            message = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                streamed = stream.response.headers["request-id"]
                await stream.get_final_message()
            with pytest.raises(Exception, match="max_tokens") as raised:
                await client.messages.create(**asked | {"max_tokens": 0})
            counted = await client.messages.count_tokens(model="m", messages=[USER])
        calls = await attempt.close()
    refused: Any = raised.value
    assert refused.body["request_id"] == refused.request_id
    assert [message._request_id, streamed, refused.request_id] == [call.id for call in calls]
    assert counted._request_id.startswith("req_")


@in_loop
async def test_every_other_answer_has_an_id_too() -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        base = attempt.url().removesuffix("/v1")
        seen = set()
        async with httpx.AsyncClient(trust_env=False) as http:
            for provider, method, path, _ in [*UNSERVED, ("google", "GET", "v1beta/models", 200)]:
                for key in (attempt.key, "wrong"):
                    answer = await http.request(method, f"{base}/{path}", headers=HEADERS[provider](key))
                    found = answer.headers["request-id" if provider == "anthropic" else "x-request-id"]
                    assert re.fullmatch("req_[0-9a-f]{32}", found)
                    seen.add(found)
    assert len(seen) == 2 * (len(UNSERVED) + 1)


@in_loop
async def test_an_unexpected_failure_has_the_id_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(attempt: Attempt) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"messages": [USER]}
            return await http.post(
                f"{attempt.url()}/chat/completions", json=body, headers=HEADERS["openai"](attempt.key)
            )

    async with serving([ZeroDivisionError("a bug")]) as rig:
        attempt = await rig.attempt()
        with caplog.at_level(logging.ERROR, "agl.gateway"):
            answer = await ask(attempt)
        (call,) = await attempt.close()
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == call.id
    assert f"request {call.id} failed" in caplog.text
