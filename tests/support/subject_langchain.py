"""LangChain under the conformance suite with models of other wires: ChatAnthropic, and ChatOpenAI over Responses."""

from __future__ import annotations

from typing import Any, ClassVar

from subjects import LangChain, chat_model

from agl.testing.subject import KEY


class LangChainAnthropic(LangChain):
    name = "langchain_anthropic"
    adapter = "langchain"
    requires = ("langchain", "langchain_anthropic")
    sdk = "anthropic"
    response_id = "msg_"
    finish_reasons = ("tool_use", "end_turn")
    gaps: ClassVar[frozenset[str]] = frozenset({"mcp"})

    def model(self, url: str) -> Any:
        from langchain_anthropic import ChatAnthropic
        from pydantic import SecretStr

        settings: Any = {"base_url": url.removesuffix("/v1"), "max_retries": 0, "max_tokens": 99}
        return ChatAnthropic(model="m", api_key=SecretStr(KEY), **settings)


class LangChainResponses(LangChain):
    name = "langchain_responses"
    adapter = "langchain"
    response_id = "resp_"
    gaps: ClassVar[frozenset[str]] = frozenset({"mcp"})

    def model(self, url: str) -> Any:
        return chat_model(url, use_responses_api=True)
