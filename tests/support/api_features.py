"""What the four APIs document of requests, and what the gateway does with each: the rows of a table in
docs/adapters.md, with the requests that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

APIS = ("chat", "responses", "messages", "google")
HEAD = ("Chat Completions", "Responses", "Messages", "Google")
"""What the table calls them."""

SERVED, NO_EFFECT, REFUSED, NONE = "served", "no effect", "refused", "–"
"""The cells: as the provider does, taken without an effect on the answer, an error that names it, not in this API."""


@dataclass(frozen=True)
class Case:
    """A request of an API.

    Attributes:
        cell: what the table says. body: the fields that show the feature, as they are on the wire.
        line: what the policy samples. sees, hides: texts that its prompt has, and that it has not.
        error: words of the refusal, its field first; "" for the name of the body's only field.
        needs: a type of the SDK, "module:Name", without which a release cannot read the answer.
    """

    cell: str
    body: Mapping[str, Any] = field(default_factory=dict)
    line: str = "12 apples"
    sees: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    error: str = ""
    needs: str = ""

    def readable(self) -> bool:
        """Whether the installed SDK knows what the answer has."""
        module, _, name = self.needs.partition(":")
        return not name or hasattr(import_module(module), name)


def served(body: Mapping[str, Any], *sees: str, **more: Any) -> Case:
    return Case(SERVED, body, sees=sees, **more)


def no_effect(**body: Any) -> Case:
    return Case(NO_EFFECT, body)


def refused(body: Mapping[str, Any], error: str = "") -> Case:
    return Case(REFUSED, body, error=error or next(iter(body)))


def config(**options: Any) -> dict[str, Any]:
    return {"generationConfig": options}


def said(role: str, *texts: str) -> dict[str, Any]:
    """A content of Google's API."""
    return {"role": role, "parts": [{"text": text} for text in texts]}


USER = {"role": "user", "content": "how many?"}
USER_GOOGLE = said("user", "how many?")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
FUNCTIONS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in ("count", "search")],
    "responses": [{"type": "function", "name": n, "parameters": SCHEMA} for n in ("count", "search")],
    "messages": [{"name": n, "input_schema": SCHEMA} for n in ("count", "search")],
    "google": [{"functionDeclarations": [{"name": n, "parametersJsonSchema": SCHEMA} for n in ("count", "search")]}],
}
CALL = '<tool_call>\n{"name": "count", "arguments": {"n": "12"}}\n</tool_call>'
REST = '{"n": "12"}}\n</tool_call>'
"""Of a call whose beginning is written for the policy."""
NAME_AND_REST = f'count", "arguments": {REST}'

PNG = "iVBORw0KGgo="
ARGUMENTS = '{"n": "12"}'


def tools(api: str, **more: Any) -> dict[str, Any]:
    """Two tools, and other fields."""
    return {"tools": FUNCTIONS[api], **more}


def strict(api: str) -> dict[str, Any]:
    if api == "chat":
        return {"tools": [{**t, "function": {**t["function"], "strict": True}} for t in FUNCTIONS[api]]}
    return {"tools": [{**t, "strict": True} for t in FUNCTIONS[api]]}


FEATURES: dict[str, Mapping[str, Case]] = {
    "an answer in text, whole and streamed": {api: served({}, "how many?") for api in APIS},
    "a system prompt": {
        "chat": served({"messages": [{"role": "system", "content": "be brief"}, USER]}, "be brief"),
        "responses": served({"instructions": "be brief"}, "be brief"),
        "messages": served({"system": [{"type": "text", "text": "be brief"}]}, "be brief"),
        "google": served({"systemInstruction": {"parts": [{"text": "be brief"}]}}, "be brief"),
    },
    "a developer message": {
        "chat": served({"messages": [{"role": "developer", "content": "be brief"}, USER]}, "be brief"),
        "responses": served({"input": [{"role": "developer", "content": "be brief"}, USER]}, "be brief"),
    },
    "several system messages": {
        "chat": served(
            {"messages": [{"role": "system", "content": "be brief"}, {"role": "system", "content": "be kind"}, USER]},
            "be brief", "be kind",
        ),
        "responses": served(
            {"instructions": "be brief", "input": [{"role": "system", "content": "be kind"}, USER]},
            "be brief", "be kind",
        ),
        "messages": served(
            {"system": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}]},
            "be brief", "be kind",
        ),
        "google": served({"systemInstruction": said("user", "be brief", "be kind")}, "be brief", "be kind"),
    },
    "several turns": {
        "chat": served(
            {"messages": [USER, {"role": "assistant", "content": "twelve"}, {"role": "user", "content": "sure?"}]},
            "twelve", "sure?",
        ),
        "responses": served(
            {"input": [USER, {"role": "assistant", "content": "twelve"}, {"role": "user", "content": "sure?"}]},
            "twelve", "sure?",
        ),
        "messages": served(
            {"messages": [USER, {"role": "assistant", "content": "twelve"}, {"role": "user", "content": "sure?"}]},
            "twelve", "sure?",
        ),
        "google": served(
            {"contents": [USER_GOOGLE, said("model", "twelve"), said("user", "sure?")]}, "twelve", "sure?"
        ),
    },
    "tools, calls": {api: served(tools(api), "count", "search", line=CALL) for api in APIS},
    "results of tools": {
        "chat": served(
            tools("chat", messages=[
                USER,
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "count", "arguments": ARGUMENTS}}
                ]},
                {"role": "tool", "tool_call_id": "c1", "content": "a dozen"},
            ]),
            "a dozen",
        ),
        "responses": served(
            tools("responses", input=[
                USER,
                {"type": "function_call", "call_id": "c1", "name": "count", "arguments": ARGUMENTS},
                {"type": "function_call_output", "call_id": "c1", "output": "a dozen"},
            ]),
            "a dozen",
        ),
        "messages": served(
            tools("messages", messages=[
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "count", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a dozen"}]},
            ]),
            "a dozen",
        ),
        "google": served(
            tools("google", contents=[
                USER_GOOGLE,
                {"role": "model", "parts": [{"functionCall": {"name": "count", "args": {}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "count", "response": {"is": "a dozen"}}}]},
            ]),
            "a dozen",
        ),
    },
    "a tool that must be called": {
        "chat": served(
            tools("chat", tool_choice={"type": "function", "function": {"name": "count"}}), "search", line=REST
        ),
        "responses": served(
            tools("responses", tool_choice={"type": "function", "name": "count"}), "search", line=REST
        ),
        "messages": served(tools("messages", tool_choice={"type": "tool", "name": "count"}), "search", line=REST),
        "google": served(
            tools("google", toolConfig={
                "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["count"]}
            }),
            "search", line=REST,
        ),
    },
    "any tool must be called": {
        "chat": served(tools("chat", tool_choice="required"), line=NAME_AND_REST),
        "responses": served(tools("responses", tool_choice="required"), line=NAME_AND_REST),
        "messages": served(tools("messages", tool_choice={"type": "any"}), line=NAME_AND_REST),
        "google": served(
            tools("google", toolConfig={"functionCallingConfig": {"mode": "ANY"}}), line=NAME_AND_REST
        ),
    },
    "no tool may be called": {
        "chat": served(tools("chat", tool_choice="none"), hides=("search",)),
        "responses": served(tools("responses", tool_choice="none"), hides=("search",)),
        "messages": served(tools("messages", tool_choice={"type": "none"}), hides=("search",)),
        "google": served(tools("google", toolConfig={"functionCallingConfig": {"mode": "NONE"}}), hides=("search",)),
    },
    "some tools may be called (`allowed_tools`): the policy sees these alone": {
        "chat": served(
            tools("chat", tool_choice={"type": "allowed_tools", "allowed_tools": {
                "mode": "auto", "tools": [{"type": "function", "function": {"name": "count"}}]
            }}),
            "count", line=CALL, hides=("search",),
        ),
        "responses": served(
            tools("responses", tool_choice={
                "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "count"}]
            }),
            "count", line=REST, hides=("search",), needs="openai.types.responses:ToolChoiceAllowed",
        ),
        "google": served(
            tools("google", toolConfig={"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["count"]}}),
            "count", line=CALL, hides=("search",),
        ),
    },
    "strict tools; Google's mode `VALIDATED`": {
        "chat": served(strict("chat"), line=CALL),
        "responses": served(strict("responses"), line=CALL),
        "messages": served(strict("messages"), line=CALL),
        "google": served(tools("google", toolConfig={"functionCallingConfig": {"mode": "VALIDATED"}}), line=CALL),
    },
    "one call at most, of strict tools": {
        "chat": served({**strict("chat"), "parallel_tool_calls": False}, line=CALL),
        "responses": served({**strict("responses"), "parallel_tool_calls": False}, line=CALL),
        "messages": served(
            {**strict("messages"), "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, line=CALL
        ),
    },
    "an answer in a JSON schema": {
        "chat": served(
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            line=ARGUMENTS,
        ),
        "responses": served(
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}, line=ARGUMENTS
        ),
        "messages": served({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, line=ARGUMENTS),
        "google": served(
            config(responseMimeType="application/json", responseJsonSchema=SCHEMA), line=ARGUMENTS
        ),
    },
    "an answer that is one of several words (`text/x.enum`)": {
        "google": refused(
            config(responseMimeType="text/x.enum", responseSchema={"type": "STRING", "enum": ["12", "13"]}),
            "generationConfig.responseMimeType is 'text/x.enum'",
        ),
    },
    "temperature, `top_p`, most tokens": {
        "chat": served({"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 50}),
        "responses": served({"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50}),
        "messages": served({"temperature": 0.5, "top_p": 0.9, "max_tokens": 50}),
        "google": served(config(temperature=0.5, topP=0.9, maxOutputTokens=50)),
    },
    "a seed": {"chat": served({"seed": 3}), "google": served(config(seed=3))},
    "texts that end an answer": {
        "chat": served({"stop": ["END"]}),
        "messages": served({"stop_sequences": ["END"]}),
        "google": served(config(stopSequences=["END"])),
    },
    "several answers (`n`, `candidateCount`)": {
        "chat": served({"n": 2}), "google": served(config(candidateCount=2))
    },
    "log-probs": {
        "chat": served({"logprobs": True, "top_logprobs": 2}),
        "responses": served({"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        "google": refused(config(responseLogprobs=True), "generationConfig.responseLogprobs"),
    },
    "the model's reasoning": {
        "responses": served({"reasoning": {"summary": "auto"}}),
        "messages": served({"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        "google": served(config(thinkingConfig={"includeThoughts": True})),
    },
    "reasoning that the client keeps (`reasoning.encrypted_content`)": {
        "responses": served(
            {
                "include": ["reasoning.encrypted_content"], "store": False,
                "input": [
                    USER, {"type": "reasoning", "summary": [], "encrypted_content": "agl:SSBjb3VudC4="},
                    {"role": "assistant", "content": "twelve"}, {"role": "user", "content": "sure?"},
                ],
            },
            "twelve", "sure?",
        ),
    },
    "`store`: completions that the provider keeps": {"chat": no_effect(store=True)},
    "how much it reasons or writes (effort, budget, verbosity)": {
        "chat": no_effect(reasoning_effort="low", verbosity="low"),
        "responses": no_effect(reasoning={"effort": "low"}, text={"verbosity": "low"}),
        "messages": no_effect(output_config={"effort": "low"}),
        "google": no_effect(**config(thinkingConfig={"thinkingBudget": 100})),
    },
    "reasoning that is sent back without its text (`display`)": {
        "messages": served({"thinking": {"type": "adaptive", "display": "omitted"}}),
    },
    "a budget of tokens for a whole task (`task_budget`)": {
        "messages": no_effect(output_config={"task_budget": {"type": "tokens", "total": 20000}}),
    },
    "user, metadata, labels, service tiers": {
        # The tier is one that the answers of the oldest release know, too.
        "chat": no_effect(user="u", metadata={"a": "b"}, safety_identifier="s", service_tier="scale"),
        "responses": no_effect(user="u", metadata={"a": "b"}, safety_identifier="s", service_tier="flex"),
        "messages": no_effect(metadata={"user_id": "u"}, service_tier="standard_only", speed="standard"),
        "google": no_effect(labels={"a": "b"}, serviceTier="flex"),
    },
    "hints for caches": {
        "chat": no_effect(prompt_cache_retention="24h", prompt_cache_options={"mode": "explicit"}),
        "responses": no_effect(prompt_cache_key="k", prompt_cache_options={"ttl": "30m"}),
        "messages": no_effect(cache_control={"type": "ephemeral"}),
    },
    "predicted outputs": {"chat": no_effect(prediction={"type": "content", "content": "12 pears"})},
    "`truncation`: a prompt that is too long is refused": {"responses": no_effect(truncation="auto")},
    "safety settings": {
        "google": no_effect(safetySettings=[
            {"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}
        ]),
    },
    "an answer that the request begins (prefill)": {
        "messages": refused({"messages": [USER, {"role": "assistant", "content": "It is"}]}),
        "google": refused({"contents": [USER_GOOGLE, said("model", "It is")]}),
    },
    "penalties, biases": {
        "chat": refused({"frequency_penalty": 0.5}),
        "responses": refused({"presence_penalty": 0.5}),
        "google": refused(config(frequencyPenalty=0.5), "generationConfig.frequencyPenalty"),
    },
    "images": {
        "chat": refused(
            {"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
            ]}]},
            "messages.0.content.0 has the type 'image_url'",
        ),
        "responses": refused(
            {"input": [{"role": "user", "content": [
                {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PNG}"}
            ]}]},
            "input.0.content.0 has the type 'input_image'",
        ),
        "messages": refused(
            {"messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
            ]}]},
            "messages.0.content.0 has the type 'image'",
        ),
        "google": refused(
            {"contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": PNG}}]}]},
            "contents.0.parts.0.inlineData is no text",
        ),
    },
    "files": {
        "chat": refused(
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
            "messages.0.content.0 has the type 'file'",
        ),
        "responses": refused(
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input.0.content.0 has the type 'input_file'",
        ),
        "messages": refused(
            {"messages": [{"role": "user", "content": [
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
            ]}]},
            "messages.0.content.0 has the type 'document'",
        ),
        "google": refused(
            {"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "gs://x"}}]}]},
            "contents.0.parts.0.fileData is no text",
        ),
    },
    "answers in speech or images": {
        "chat": refused({"modalities": ["text", "audio"]}),
        "google": refused(config(responseModalities=["TEXT", "IMAGE"]), "generationConfig.responseModalities"),
    },
    "tools with free text (`custom`)": {
        "chat": refused({"tools": [{"type": "custom", "custom": {"name": "sql"}}]}, "tools.0 is of type 'custom'"),
        "responses": refused({"tools": [{"type": "custom", "name": "sql"}]}, "tools.0 is of type 'custom'"),
    },
    "a tool search; tools that are loaded later": {
        "responses": refused({"tools": [{"type": "tool_search"}]}, "tools.0 is of type 'tool_search'"),
        "messages": refused(
            {"tools": [{"name": "count", "input_schema": SCHEMA, "defer_loading": True}]}, "tools.0.defer_loading"
        ),
    },
    "calls from the provider's code execution": {
        "responses": refused(
            {"tools": [{**FUNCTIONS["responses"][0], "allowed_callers": ["programmatic"]}]}, "tools.0.allowed_callers"
        ),
        "messages": refused(
            {"tools": [{**FUNCTIONS["messages"][0], "allowed_callers": ["code_execution_20260120"]}]},
            "tools.0.allowed_callers",
        ),
    },
    "the provider's tools (web search, code, computer, shell, ...)": {
        "chat": refused({"web_search_options": {}}),
        "responses": refused({"tools": [{"type": "web_search"}]}, "tools.0 is of type 'web_search'"),
        "messages": refused(
            {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0 is Anthropic's tool 'bash_20250124'"
        ),
        "google": refused({"tools": [{**FUNCTIONS["google"][0], "googleSearch": {}}]}, "tools.0.googleSearch"),
    },
    "MCP servers that the provider calls": {
        "responses": refused(
            {"tools": [{"type": "mcp", "server_label": "s", "server_url": "http://x"}]}, "tools.0 is of type 'mcp'"
        ),
        "messages": refused({"mcp_servers": [{"type": "url", "name": "s", "url": "http://x"}]}),
        "google": refused({"tools": [{"mcpServers": [{"name": "s"}]}]}, "tools.0.mcpServers"),
    },
    "moderation": {
        "chat": refused({"moderation": {"model": "omni-moderation-latest"}}),
        "responses": refused({"moderation": {"model": "omni-moderation-latest"}}),
    },
    "`functions`, the old form of tools": {"chat": refused({"functions": [{"name": "count", "parameters": SCHEMA}]})},
    "`background`": {"responses": refused({"background": True})},
    "conversations and prompts on the provider's servers": {
        "responses": refused({"conversation": "conv_1"}),
        "messages": refused({"thread": {"type": "create"}}),
        "google": refused({"cachedContent": "cachedContents/1"}),
    },
    "a prompt for a cache, without an answer (`max_tokens: 0`)": {"messages": refused({"max_tokens": 0})},
    "counts of tokens in every chunk (`continuous_usage_stats`)": {
        "chat": refused(
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    },
    "earlier thoughts that are all kept (`clear_thinking`)": {
        "messages": no_effect(
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        ),
    },
    "histories that the provider shortens": {
        "responses": refused({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}),
        "messages": refused({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Unserved:
    """A path of an API that is refused by an error which says why.

    Attributes:
        api: of `APIS`. method, path: of the request, below `/v1`. headers: of HTTP. error: words of the refusal.
    """

    api: str
    method: str
    path: str
    error: str
    headers: Mapping[str, str] = field(default_factory=dict)


UPGRADE = {
    "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
    "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==",
}  # fmt: skip
ROUTES = {
    "responses over a WebSocket": Unserved("responses", "GET", "responses", "over HTTP, not over a WebSocket", UPGRADE),
    "a response that is cancelled by its id": Unserved(
        "responses", "POST", "responses/resp_1/cancel", "Background is not supported"
    ),
    "completions that are stored and got by their ids": Unserved(
        "chat", "GET", "chat/completions/chatcmpl-1", "Completions are not stored"
    ),
    "histories that the provider compacts by request": Unserved(
        "responses", "POST", "responses/compact", "Only OpenAI's models write and read compactions"
    ),
}
"""What the APIs have at paths that are not served: the last rows of the table."""


def table() -> str:
    """The rows, as Markdown."""
    lines = [f"| request | {' | '.join(HEAD)} |", "|---|---|---|---|---|"]
    for name, cases in FEATURES.items():
        cells = (cases[api].cell if api in cases else NONE for api in APIS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, route in ROUTES.items():
        lines.append(f"| {name} | {' | '.join(REFUSED if api == route.api else NONE for api in APIS)} |")
    return "\n".join(lines)
