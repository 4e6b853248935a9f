"""What a request to a model may hold where a program that nobody trusts sends it with a key that it does not have.

A provider does more for a key than answer: it runs tools, reads stored files and conversations, contacts other servers,
and charges other accounts. So everything that is not listed here is refused by its name, unless it is allowed by that
name; a header that is not listed is left out. What a tool of the program's own gets or returns is not looked at.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from agl.trainer.gateway.errors import RequestError

HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "accept-language",
        "anthropic-dangerous-direct-browser-access",
        "anthropic-version",
        "content-type",
        "conversation_id",
        "http-referer",
        "originator",
        "session_id",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-app",
        "x-client-request-id",
        "x-goog-api-client",
        "x-openai-subagent",
        "x-request-id",
        "x-title",
    }
)
"""Headers that pass; those of `_HEADER_FAMILIES` do, too."""
_HEADER_FAMILIES = ("x-stainless-", "x-codex-", "x-claude-code-", "x-session-")
"""How names of headers begin in which clients describe themselves."""
BETAS = "anthropic-beta"
_BETA = re.compile(
    r"(?:claude-code|interleaved-thinking|fine-grained-tool-streaming|token-efficient-tools|prompt-caching(?:-scope)?|"
    r"extended-cache-ttl|context-management|context-1m|output-128k|structured-outputs|effort|token-counting)"
    r"-[0-9-]+"
)
"""Values of that header that change the form of an answer, and nothing that is done for it."""

_QUERIES = {
    "openai": {"api-version", "limit", "after", "before", "order"},
    "anthropic": {"beta", "limit", "after_id", "before_id"},
    "google": {"alt", "pageSize", "pageToken"},
}
_QUERY_VALUE = re.compile(r"[A-Za-z0-9._~-]{0,200}")

_SAMPLING = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "min_p",
        "n",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_retention",
        "repetition_penalty",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
    }
)
_CHAT = _SAMPLING | {
    "chat_template_kwargs",
    "function_call",
    "functions",
    "include_reasoning",
    "messages",
    "modalities",
    "model",
    "parallel_tool_calls",
    "prediction",
    "reasoning",
    "reasoning_effort",
    "response_format",
    "thinking",
    "tool_choice",
    "tools",
    "usage",
    "verbosity",
}
_RESPONSES = _SAMPLING | {
    "client_metadata",
    "context_management",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "model",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "truncation",
}
_MESSAGES = frozenset(
    {
        "cache_control",
        "context_management",
        "max_tokens",
        "messages",
        "metadata",
        "model",
        "output_config",
        "output_format",
        "service_tier",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    }
)
_CONTENTS = frozenset(
    {
        "contents",
        "generatecontentrequest",
        "generationconfig",
        "labels",
        "model",
        "safetysettings",
        "systeminstruction",
        "toolconfig",
        "tools",
    }
)
"""Of Google's, as `_plain` writes them."""

_OPENAI_TOOLS = frozenset(
    {"function", "custom", "local_shell", "apply_patch", "computer", "computer_use_preview", "tool_search"}
)
_ANTHROPIC_TOOLS = frozenset({"", "custom", "bash", "text_editor", "computer", "memory"})
_TOOL_SEARCH = "tool_search_tool_"
"""Searches in the tools of the request itself."""
_GOOGLE_TOOLS = frozenset({"functiondeclarations", "computeruse"})
_CHAT_PARTS = frozenset({"text", "refusal", "image_url", "input_audio", "file", "thinking"})
_ITEMS = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "computer_call",
        "computer_call_output",
        "tool_search_call",
        "tool_search_output",
        "reasoning",
        "compaction",
        "compaction_summary",
    }
)
_ITEM_PARTS = frozenset(
    {
        "",
        "input_text",
        "output_text",
        "text",
        "refusal",
        "summary_text",
        "reasoning_text",
        "input_image",
        "input_file",
        "input_audio",
        "computer_screenshot",
    }
)
_BLOCKS = frozenset(
    {
        "text",
        "image",
        "document",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "search_result",
        "tool_reference",
        "compaction",
    }
)
_GOOGLE_PARTS = frozenset(
    {
        "text",
        "inlinedata",
        "functioncall",
        "functionresponse",
        "thought",
        "thoughtsignature",
        "videometadata",
        "mediaresolution",
    }
)
_SEARCHING_MODEL = re.compile(r"-search-(?:preview|api)|deep-research|:online\b|\bsonar\b")
"""In the names of models that search the web without being given a tool."""
_REFERENCES = ("file_id", "file_url", "container_id")
"""Fields of a part that name what lies elsewhere."""
STORED = "a stored response"
"""The name of a request to read one."""


class NotPermitted(RequestError):
    """A request that holds what is not permitted. Attributes: names: of that."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = sorted(set(names))
        shown = ", ".join(name[:100] for name in self.names[:5])
        message = f"not passed on with the user's key: {shown}. agl.harness(allow=[NAME]) permits it"
        super().__init__(403, message, code="not_permitted")


def permitted_headers(
    headers: list[tuple[bytes, bytes]], allow: Collection[str] = ()
) -> tuple[list[tuple[bytes, bytes]], list[str]]:
    """(the headers that pass, the names of the others: `header NAME`, `anthropic-beta VALUE`).

    Args:
        allow: names of others that pass, as they are returned.
    """
    passed: list[tuple[bytes, bytes]] = []
    left_out: list[str] = []
    for header, value in headers:
        name = header.decode("latin-1").lower()
        if name == BETAS:
            betas = [beta.strip() for beta in value.decode("latin-1").split(",")]
            known = [beta for beta in betas if _BETA.fullmatch(beta) or f"{BETAS} {beta}" in allow]
            left_out += [f"{BETAS} {beta}" for beta in betas if beta not in known]
            if known:
                passed.append((header, ",".join(known).encode("latin-1")))
        elif name in HEADERS or name.startswith(_HEADER_FAMILIES) or f"header {name}" in allow:
            passed.append((header, value))
        else:
            left_out.append(f"header {name}")
    return passed, left_out


def permitted_query(api: str, query: str, allow: Collection[str] = ()) -> str:
    """The query that is sent, without `key`, in which Google takes a key.

    Raises:
        NotPermitted: it has other parameters than those of a model's calls, or writes one with escapes.
    """
    passed: list[str] = []
    refused: list[str] = []
    for parameter in filter(None, query.split("&")):
        name, _, value = parameter.partition("=")
        if urllib.parse.unquote_plus(name) == "key":
            continue
        known = name in _QUERIES.get(api, ()) or f"query {name}" in allow
        if known and _QUERY_VALUE.fullmatch(value):
            passed.append(parameter)
        else:
            refused.append(f"query {name}")
    if refused:
        raise NotPermitted(refused)
    return "&".join(passed)


def check_request(api: str, path: str, body: Any, allow: Collection[str] = ()) -> None:
    """Refuse a call's body that asks the provider for more than an answer of a model.

    Args:
        path: of the call, below the base URL of its API.
        body: the value of its JSON.
        allow: names of what it may hold in addition, as `NotPermitted` has them.

    Raises:
        NotPermitted: it does.
        RequestError: 400, it has not the form of a call.
    """
    form = _FORMS.get(api) or next(look for end, look in _FORMS_OF_OPENAI.items() if path.endswith(end))
    names = {*form(_object(body, "the body")), *_searching(path), *_searching(body.get("model"))}
    if names := names - {*allow}:
        raise NotPermitted(names)


def _searching(model: Any) -> Iterator[str]:
    if isinstance(model, str) and _SEARCHING_MODEL.search(model):
        yield "a model that searches the web"


# -- OpenAI: chat completions, completions, responses -----------------------------------------------------------------
def _completions(body: Mapping[str, Any]) -> Iterator[str]:
    yield from _others(body, _SAMPLING | {"best_of", "echo", "model", "prompt", "suffix"})


def _chat(body: Mapping[str, Any]) -> Iterator[str]:
    yield from _others(body, _CHAT)
    yield from _openai_tools(body.get("tools"))
    for message in _objects(body.get("messages"), "messages"):
        if message.get("audio") is not None:
            yield "messages.audio"
        yield from _parts(message.get("content"), "messages.content", _chat_part)


def _chat_part(part: Mapping[str, Any]) -> Iterator[str]:
    if part.get("type") not in _CHAT_PARTS:
        yield _unknown(part, "part")
        return
    for value in part.values():
        if isinstance(value, dict):
            yield from _references(value)
    yield from _references(part)


def _responses(body: Mapping[str, Any]) -> Iterator[str]:
    yield from _others(body, _RESPONSES)
    yield from _openai_tools(body.get("tools"))
    items = body.get("input")
    for item in [] if isinstance(items, str) else _objects(items, "input"):
        kind = item.get("type") or "message"
        if kind not in _ITEMS:
            yield str(kind)
        # Of a reasoning that is only named, the provider reads what it has stored.
        if kind == "reasoning" and item.get("id") and not (item.get("encrypted_content") or item.get("content")):
            yield "reasoning that is stored"
        yield from _local(item)
        for field in ("content", "output"):
            yield from _parts(item.get(field), f"input.{field}", _item_part)
        if kind == "tool_search_output":
            yield from _openai_tools(item.get("tools"))


def _item_part(part: Mapping[str, Any]) -> Iterator[str]:
    # What a shell printed has no type.
    if (part.get("type") or "") not in _ITEM_PARTS:
        yield _unknown(part, "part")
    else:
        yield from _references(part)


def _openai_tools(tools: Any) -> Iterator[str]:
    for tool in _objects(tools, "tools"):
        kind = tool.get("type")
        if kind == "namespace":
            yield from _openai_tools(tool.get("tools"))
        elif kind == "shell":
            yield from _local(tool)
        elif kind not in _OPENAI_TOOLS:
            yield _unknown(tool, "tool")


def _local(tool: Mapping[str, Any]) -> Iterator[str]:
    """A shell runs where the program does, or in a container of the provider's."""
    environment = tool.get("environment")
    if environment is not None and _object(environment, "environment").get("type") != "local":
        yield "a container"


# -- Anthropic --------------------------------------------------------------------------------------------------------
def _messages(body: Mapping[str, Any]) -> Iterator[str]:
    yield from _others(body, _MESSAGES)
    for tool in _objects(body.get("tools"), "tools"):
        # One that the program runs may have no type.
        name = _unknown(tool, "tool") if tool.get("type") else ""
        if name not in _ANTHROPIC_TOOLS and not name.startswith(_TOOL_SEARCH):
            yield name
    yield from _parts(body.get("system"), "system", _block)
    for message in _objects(body.get("messages"), "messages"):
        yield from _parts(message.get("content"), "messages.content", _block)


def _block(block: Mapping[str, Any]) -> Iterator[str]:
    if block.get("type") not in _BLOCKS:
        yield _unknown(block, "block")
        return
    yield from _references(block)
    source = block.get("source")
    if isinstance(source, dict):
        if source.get("type") not in ("base64", "text", "content"):
            yield f"{block.get('type')} of a {source.get('type')}"
        yield from _parts(source.get("content"), "source.content", _block)
    yield from _parts(block.get("content"), "content", _block)


# -- Google -----------------------------------------------------------------------------------------------------------
def _contents(body: Mapping[str, Any]) -> Iterator[str]:
    # It takes names in both ways, inputSchema and input_schema.
    body = _plain(body)
    yield from _others(body, _CONTENTS)
    if (request := body.get("generatecontentrequest")) is not None:
        yield from _contents(_object(request, "generateContentRequest"))
    tools = body.get("tools")
    for tool in _objects([tools] if isinstance(tools, dict) else tools, "tools"):
        yield from _others(_plain(tool), _GOOGLE_TOOLS)
    contents = body.get("contents")
    system = body.get("systeminstruction")
    for content in [
        *_objects([contents] if isinstance(contents, dict) else contents, "contents"),
        *([_object(system, "systemInstruction")] if system is not None else ()),
    ]:
        yield from _google_parts(content.get("parts"))


def _google_parts(parts: Any) -> Iterator[str]:
    for part in map(_plain, _objects([parts] if isinstance(parts, dict) else parts, "parts")):
        yield from _others(part, _GOOGLE_PARTS)
        answer = part.get("functionresponse")
        if answer is not None:
            yield from _google_parts(_object(answer, "functionResponse").get("parts"))


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """An object with its names in small letters and without underscores.

    Raises:
        RequestError: 400, it names a field twice, of which it would be looked at once.
    """
    plain = {name.replace("_", "").lower(): value for name, value in fields.items()}
    if len(plain) < len(fields):
        raise RequestError(400, "a field is named twice", code="invalid_value")
    return plain


# -- what all share ---------------------------------------------------------------------------------------------------
_FORMS: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {"anthropic": _messages, "google": _contents}
_FORMS_OF_OPENAI: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    # The longest first.
    "/chat/completions": _chat,
    "/completions": _completions,
    "/responses": _responses,
    "/responses/input_tokens": _responses,
    "/responses/compact": _responses,
}
"""End of a path -> what finds what is not permitted in a body."""


def _others(fields: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    """The names of the fields that have a value and are not known."""
    return (name for name, value in fields.items() if name not in known and value is not None)


def _unknown(typed: Mapping[str, Any], what: str) -> str:
    """The type of a tool or a part, without the date of its version."""
    kind = typed.get("type")
    return re.sub(r"_\d{8}$", "", str(kind)) if kind else f"a {what} without a type"


def _references(part: Mapping[str, Any]) -> Iterator[str]:
    """What of a part the provider has stored, or would fetch from another server."""
    for name in _REFERENCES:
        if part.get(name) is not None:
            yield name
    for name in ("url", "image_url"):
        value = part.get(name)
        if isinstance(value, str) and not value.startswith("data:"):
            yield "a URL that the provider fetches"


def _parts(value: Any, where: str, look: Callable[[Mapping[str, Any]], Iterator[str]]) -> Iterator[str]:
    """What `look` finds in content, which is a text, a part, or a list of these."""
    for part in value if isinstance(value, list) else [value]:
        if part is not None and not isinstance(part, str):
            yield from look(_object(part, where))


def _objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    """A list of objects; none where there is no value.

    Raises:
        RequestError: 400, it is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(400, f"{where} is no list", code="invalid_value", param=where)
    return [_object(each, where) for each in value]


def _object(value: Any, where: str) -> Mapping[str, Any]:
    """An object.

    Raises:
        RequestError: 400, it is something else.
    """
    if not isinstance(value, dict):
        raise RequestError(400, f"{where}: an object is expected here", code="invalid_value", param=where)
    return value
