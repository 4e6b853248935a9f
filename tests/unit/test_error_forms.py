"""Errors as each API words them, so that the frameworks which look for the words do what they do with a provider."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted import Attempt, ScriptedEngine, in_loop, quick_tokenizer, serving
from sdk_clients import anthropic_client, google_client, openai_client

from agl.trainer.gateway.dialects.error_forms import TYPES, anthropic_error, google_error, openai_error
from agl.trainer.gateway.errors import PromptTooLongError, RequestError, invalid_key

LONG = "9 " * 60
LIMIT = 50


def by_langchain(model: Any) -> type[BaseException]:
    from langchain_core.exceptions import ContextOverflowError

    try:
        model.invoke(LONG)
    except Exception as error:
        return ContextOverflowError if isinstance(error, ContextOverflowError) else type(error)
    raise AssertionError("it was answered")


def langchain_chat(attempt: Attempt) -> str:
    from langchain_openai import ChatOpenAI

    where: Any = {"model": "m", "base_url": attempt.url(), "api_key": attempt.key, "max_retries": 0}
    return by_langchain(ChatOpenAI(**where)).__name__


def langchain_responses(attempt: Attempt) -> str:
    from langchain_openai import ChatOpenAI

    where: Any = {"model": "m", "base_url": attempt.url(), "api_key": attempt.key, "max_retries": 0}
    return by_langchain(ChatOpenAI(**where, use_responses_api=True)).__name__


def langchain_anthropic(attempt: Attempt) -> str:
    from langchain_anthropic import ChatAnthropic

    url = f"{attempt.access.url}/agents/agent"
    where: Any = {"model_name": "m", "base_url": url, "api_key": attempt.key, "max_retries": 0}
    return by_langchain(ChatAnthropic(**where)).__name__


def by_strands(model: Any) -> str:
    async def ask() -> None:
        async for _ in model.stream([{"role": "user", "content": [{"text": LONG}]}]):
            pass

    try:
        asyncio.run(ask())
    except Exception as error:
        return type(error).__name__
    raise AssertionError("it was answered")


def strands_chat(attempt: Attempt) -> str:
    from strands.models.openai import OpenAIModel

    return by_strands(OpenAIModel(client_args={"base_url": attempt.url(), "api_key": attempt.key}, model_id="m"))


def strands_responses(attempt: Attempt) -> str:
    from strands.models.openai_responses import OpenAIResponsesModel

    where = {"base_url": attempt.url(), "api_key": attempt.key}
    return by_strands(OpenAIResponsesModel(client_args=where, model_id="m"))


def strands_anthropic(attempt: Attempt) -> str:
    from strands.models.anthropic import AnthropicModel

    where = {"base_url": f"{attempt.access.url}/agents/agent", "api_key": attempt.key, "max_retries": 0}
    return by_strands(AnthropicModel(client_args=where, model_id="m", max_tokens=20))


def strands_google(attempt: Attempt) -> str:
    from google import genai
    from strands.models.gemini import GeminiModel

    options: Any = {"base_url": f"{attempt.access.url}/agents/agent"}
    client = genai.Client(api_key=attempt.key, http_options=options)
    return by_strands(GeminiModel(client=client, model_id="m"))


CLIENTS: dict[Callable[[Attempt], str], str] = {
    langchain_chat: "ContextOverflowError",
    langchain_responses: "ContextOverflowError",
    langchain_anthropic: "ContextOverflowError",
    strands_chat: "ContextWindowOverflowException",
    strands_responses: "ContextWindowOverflowException",
    strands_anthropic: "ContextWindowOverflowException",
    strands_google: "ContextWindowOverflowException",
}


@pytest.mark.parametrize("client", CLIENTS)
@in_loop
async def test_a_framework_knows_an_overflow(client: Callable[[Attempt], str]) -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], max_context=LIMIT)) as rig:
        attempt = await rig.attempt()
        raised = await asyncio.to_thread(client, attempt)
        calls = await attempt.close()
    assert raised == CLIENTS[client]
    assert all((call.error or "").startswith("context_length_exceeded") for call in calls)


def test_the_words_of_each_api() -> None:
    error = PromptTooLongError("shorten the history", tokens=60, limit=50)
    assert openai_error(error)["error"] == {
        "message": "Input tokens exceed the configured limit of 50 tokens, this model's maximum context length. "
        "Your messages resulted in 60 tokens. (shorten the history)",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert anthropic_error(error)["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 60 tokens > 50 maximum (shorten the history)",
    }
    assert google_error(error)["error"] == {
        "code": 400,
        "message": "The input token count (60) exceeds the maximum number of tokens allowed (50). "
        "(shorten the history)",
        "status": "INVALID_ARGUMENT",
    }


@pytest.mark.parametrize("form", [openai_error, anthropic_error, google_error])
def test_an_overflow_without_counts_keeps_the_words(form: Callable[[RequestError], dict[str, Any]]) -> None:
    message = form(PromptTooLongError("the request has 9,000,000 bytes"))["error"]["message"]
    assert "None" not in message
    assert any(
        words in message for words in ("maximum context length", "prompt is too long:", "exceeds the maximum number")
    )
    assert "9,000,000 bytes" in message


@pytest.mark.parametrize("status", [400, 404, 409, 413, 415, 429, 500, 501, 503, 504, 529])
def test_other_errors_keep_their_message(status: int) -> None:
    error = RequestError(status, "why", code="c", param="p")
    kind = TYPES.get(status)
    openai, anthropic, google = (form(error)["error"] for form in (openai_error, anthropic_error, google_error))
    assert openai["message"] == anthropic["message"] == google["message"] == "why"
    assert (openai["code"], openai["param"], google["code"]) == ("c", "p", status)
    if kind is not None:
        assert (openai["type"], anthropic["type"], google["status"]) == kind


def test_openai_has_codes_of_its_own() -> None:
    """A refused key is an invalid request whose code says so; a limit of requests at once is one of rates."""
    refused = openai_error(invalid_key("r1", 1))["error"]
    assert (refused["type"], refused["code"]) == ("invalid_request_error", "invalid_api_key")
    limited = openai_error(RequestError(429, "try again", code="too_many_requests"))["error"]
    assert (limited["type"], limited["code"]) == ("requests", "rate_limit_exceeded")


# -- what the SDKs raise ----------------------------------------------------------------------------------------------


OPENAI = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "invalid_request_error"),
    403: ("PermissionDeniedError", "invalid_request_error"),
    404: ("NotFoundError", "invalid_request_error"),
    409: ("ConflictError", "invalid_request_error"),
    413: ("APIStatusError", "invalid_request_error"),
    429: ("RateLimitError", "requests"),
    500: ("InternalServerError", "server_error"),
    501: ("InternalServerError", "server_error"),
    503: ("InternalServerError", "server_error"),
    504: ("InternalServerError", "server_error"),
    529: ("InternalServerError", "server_error"),
}
"""Status -> what OpenAI's SDK raises, and the error's type."""
ANTHROPIC = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    403: ("PermissionDeniedError", "permission_error"),
    404: ("NotFoundError", "not_found_error"),
    409: ("ConflictError", "conflict_error"),
    413: ("ContentTooLargeError", "request_too_large"),
    429: ("RateLimitError", "rate_limit_error"),
    500: ("InternalServerError", "api_error"),
    501: ("HTTPNotImplementedError", "api_error"),
    503: ("ServiceUnavailableError", "api_error"),
    504: ("GatewayTimeoutError", "timeout_error"),
    529: ("OverloadedError", "overloaded_error"),
}
GOOGLE = {
    400: ("ClientError", "INVALID_ARGUMENT"),
    401: ("ClientError", "UNAUTHENTICATED"),
    403: ("ClientError", "PERMISSION_DENIED"),
    404: ("ClientError", "NOT_FOUND"),
    409: ("ClientError", "ABORTED"),
    413: ("ClientError", "INVALID_ARGUMENT"),
    429: ("ClientError", "RESOURCE_EXHAUSTED"),
    500: ("ServerError", "INTERNAL"),
    501: ("ServerError", "UNIMPLEMENTED"),
    503: ("ServerError", "UNAVAILABLE"),
    504: ("ServerError", "DEADLINE_EXCEEDED"),
    529: ("ServerError", "UNAVAILABLE"),
}
_ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@in_loop
async def test_an_sdk_raises_what_it_raises_of_its_provider() -> None:
    lines = [RequestError(status, "why", code="c") for status in OPENAI for _ in range(4)]
    async with serving(ScriptedEngine(quick_tokenizer(), lines)) as rig:
        attempt = await rig.attempt()
        openai = openai_client(attempt)
        async with anthropic_client(attempt) as anthropic, google_client(attempt) as google:
            for status in OPENAI:
                for answer in (
                    openai.chat.completions.create(**_ASKED), openai.responses.create(model="m", input="hi")
                ):  # fmt: skip
                    error = await raised(answer)
                    assert (type(error).__name__, error.type) == OPENAI[status]
                    assert (error.status_code, error.code) == (status, "c")
                error = await raised(anthropic.messages.create(**_ASKED, max_tokens=9))
                assert (type(error).__name__, error.type) == ANTHROPIC[status]
                assert error.status_code == status
                error = await raised(google.models.generate_content(model="m", contents="hi"))
                assert (type(error).__name__, error.status) == GOOGLE[status]
                assert error.code == status
        await attempt.close()


async def raised(answer: Any) -> Any:
    try:
        await answer
    except Exception as error:
        return error
    raise AssertionError("it was answered")
