"""Errors as each API words them, so that the frameworks which look for the words do what they do with a provider."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted import Attempt, ScriptedEngine, in_loop, quick_tokenizer, serving

from agl.trainer.gateway.dialects.error_forms import TYPES, anthropic_error, google_error, openai_error
from agl.trainer.gateway.errors import PromptTooLongError, RequestError

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


@pytest.mark.parametrize("status", [400, 404, 413, 415, 429, 500, 503])
def test_other_errors_keep_their_message(status: int) -> None:
    error = RequestError(status, "why", code="c", param="p")
    kind = TYPES.get(status)
    openai, anthropic, google = (form(error)["error"] for form in (openai_error, anthropic_error, google_error))
    assert openai["message"] == anthropic["message"] == google["message"] == "why"
    assert (openai["code"], openai["param"], google["code"]) == ("c", "p", status)
    if kind is not None:
        assert (openai["type"], anthropic["type"], google["status"]) == kind
