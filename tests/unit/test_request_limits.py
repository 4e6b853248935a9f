"""What a provider refuses is refused by name, with the bound, in its API's own words; and what frameworks write for
nothing, null, is nothing, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from scripted import Attempt, in_loop, new_access, serving
from sdk_clients import anthropic_client, google_client, openai_client

from agl.trainer.gateway.dialects.chat import body as chat
from agl.trainer.gateway.dialects.error_forms import anthropic_error, google_error, openai_error
from agl.trainer.gateway.dialects.google import body as google
from agl.trainer.gateway.dialects.messages import body as messages
from agl.trainer.gateway.dialects.responses import body as responses
from agl.trainer.gateway.errors import OutOfRangeError, RequestError

USER = {"role": "user", "content": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [USER]},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 2000, "messages": [USER]},
    "google": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
READ: dict[str, Callable[..., Any]] = {
    "chat": chat.read, "responses": responses.read, "messages": messages.read, "google": google.read
}  # fmt: skip
FORMS: dict[str, Callable[[RequestError], dict[str, Any]]] = {
    "chat": openai_error, "responses": openai_error, "messages": anthropic_error, "google": google_error
}  # fmt: skip


def read(api: str, fields: Mapping[str, Any]) -> Any:
    return READ[api]({**BODIES[api], **fields}, new_access())


def refusal(api: str, fields: Mapping[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as raised:
        read(api, fields)
    assert raised.value.status == 400
    return raised.value


def tools(api: str, *names: str) -> dict[str, Any]:
    match api:
        case "chat":
            return {"tools": [{"type": "function", "function": {"name": name}} for name in names]}
        case "responses":
            return {"tools": [{"type": "function", "name": name} for name in names]}
        case "messages":
            return {"tools": [{"name": name, "input_schema": SCHEMA} for name in names]}
    return {"tools": [{"functionDeclarations": [{"name": name} for name in names]}]}


def at(path: str, value: Any) -> dict[str, Any]:
    """The fields of a body with a value at a path."""
    first, _, rest = path.partition(".")
    return {first: at(rest, value) if rest else value}


# -- bounds -----------------------------------------------------------------------------------------------------------

BOUNDS = (
    ("chat", "max_tokens", 1, None),
    ("chat", "max_completion_tokens", 1, None),
    ("chat", "temperature", 0, 2),
    ("chat", "top_p", 0, 1),
    ("chat", "top_k", -1, None),
    ("chat", "n", 1, 128),
    ("chat", "top_logprobs", 0, 20),
    ("chat", "seed", -(2**63), 2**63 - 1),
    ("responses", "max_output_tokens", 1, None),
    ("responses", "temperature", 0, 2),
    ("responses", "top_p", 0, 1),
    ("responses", "top_logprobs", 0, 20),
    ("responses", "max_tool_calls", 1, None),
    ("messages", "max_tokens", 0, None),
    ("messages", "temperature", 0, 1),
    ("messages", "top_p", 0, 1),
    ("messages", "top_k", 0, None),
    ("messages", "thinking.budget_tokens", 1024, None),
    ("messages", "output_config.task_budget.total", 1, None),
    ("messages", "output_config.task_budget.remaining", 0, None),
    ("google", "generationConfig.temperature", 0, 2),
    ("google", "generationConfig.topP", 0, 1),
    ("google", "generationConfig.topK", 0, None),
    ("google", "generationConfig.maxOutputTokens", 1, None),
    ("google", "generationConfig.candidateCount", 1, 128),
    ("google", "generationConfig.seed", -(2**63), 2**63 - 1),
)
"""API, a parameter that is a number, its smallest value and its largest."""
DECIMALS = {"temperature", "top_p"}


def with_number(api: str, path: str, value: float) -> dict[str, Any]:
    """The fields of a body with a number, and with those that it needs beside it."""
    fields = at(path, value)
    if path.startswith("thinking"):
        return {"thinking": {"type": "enabled", **fields["thinking"]}}
    if "task_budget" in path:
        budget = {"type": "tokens", "total": 9, **fields["output_config"]["task_budget"]}
        return {"output_config": {"task_budget": budget}}
    return {**fields, "logprobs": True} if (api, path) == ("chat", "top_logprobs") else fields


@pytest.mark.parametrize(("api", "path", "least", "most"), BOUNDS)
def test_a_number_beyond_its_bound_is_refused_with_both_in_the_apis_words(
    api: str, path: str, least: int, most: int | None
) -> None:
    bounds = [(least, -1)] if most is None else [(least, -1), (most, 1)]
    for bound, step in bounds:
        if (api, path) != ("messages", "max_tokens"):
            read(api, with_number(api, path, bound))
        beyond = bound + step
        if api == "google" and beyond == 0:
            # Protobuf's zero is a number that is not set.
            beyond -= 1
        error = refusal(api, with_number(api, path, beyond))
        message = FORMS[api](error)["error"]["message"]
        assert error.param == path
        for part in (path, str(beyond), str(bound)):
            assert part in message, message
        if api in ("chat", "responses"):
            kind = "decimal" if path in DECIMALS else "integer"
            side = "below_min" if step < 0 else "above_max"
            assert openai_error(error)["error"]["code"] == f"{kind}_{side}_value"
            relation = ">=" if step < 0 else "<="
            assert f"Expected a value {relation} {bound}, but got {beyond} instead" in message
        elif api == "messages":
            relation = "greater" if step < 0 else "less"
            assert message == f"{path}: Input should be {relation} than or equal to {bound}, not {beyond}"


@pytest.mark.parametrize(("api", "path"), [(api, path) for api, path, _, _ in BOUNDS])
@pytest.mark.parametrize("number", [2**70, float(2**70)])
def test_a_number_of_more_than_64_bits_is_refused(api: str, path: str, number: float) -> None:
    assert refusal(api, with_number(api, path, number)).param == path


def test_every_bounded_number_is_among_the_rows() -> None:
    bounded = set()
    for api, model in (
        ("chat", chat.ChatBody), ("responses", responses.ResponsesBody), ("messages", messages.MessagesBody)
    ):  # fmt: skip
        for name, field in model.model_fields.items():
            if any(hasattr(each, "ge") or hasattr(each, "le") for each in field.metadata):
                bounded.add((api, name))
    assert bounded
    assert bounded <= {(api, path) for api, path, *_ in BOUNDS}


def test_no_tokens_at_all_are_refused_with_the_reason() -> None:
    error = refusal("messages", {"max_tokens": 0})
    assert error.param == "max_tokens"
    assert "the provider's cache" in error.message
    read("messages", {"max_tokens": 1})


STOPS = {"chat": ("stop", 4), "google": ("generationConfig.stopSequences", 5)}


@pytest.mark.parametrize("api", STOPS)
def test_more_stop_texts_than_the_provider_takes_are_refused(api: str) -> None:
    path, most = STOPS[api]
    texts = [f"END{i}" for i in range(most + 1)]
    assert list(read(api, at(path, texts[:most])).chat.sampling.stop) == texts[:most]
    error = refusal(api, at(path, texts))
    message = FORMS[api](error)["error"]["message"]
    assert isinstance(error, OutOfRangeError)
    assert error.param == path
    for part in (path, str(most), str(most + 1)):
        assert part in message
    if api == "chat":
        assert openai_error(error)["error"]["code"] == "array_above_max_length"


def test_anthropic_takes_any_number_of_stop_texts() -> None:
    texts = [f"END{i}" for i in range(40)]
    assert list(read("messages", {"stop_sequences": texts}).chat.sampling.stop) == texts


# -- names of tools ---------------------------------------------------------------------------------------------------

TAKEN = {
    "chat": ("a", "get-weather_2", "a" * 64),
    "responses": ("a", "get-weather_2", "a" * 128),
    "messages": ("a", "get-weather_2", "a" * 128),
    "google": ("a", "_get.weather:now-2", "a" * 128),
}
REFUSED = {
    "chat": ("", "get weather", "files.read", "größe", "a" * 65, "a\n"),
    "responses": ("", "get weather", "files.read", "größe", "a" * 129, "a\n"),
    "messages": ("", "get weather", "files.read", "größe", "a" * 129, "a\n"),
    "google": ("", "get weather", "2nd", "größe", "a" * 129, "a\n"),
}
PLACES = {
    "chat": "tools.0.function.name",
    "responses": "tools.0.name",
    "messages": "tools.0.name",
    "google": "tools.0.functionDeclarations.0.name",
}


@pytest.mark.parametrize("api", PLACES)
def test_a_name_that_the_provider_refuses_is_refused_at_its_place(api: str) -> None:
    for name in TAKEN[api]:
        assert read(api, tools(api, name)).chat.tools[0]["function"]["name"] == name
    for name in REFUSED[api]:
        error = refusal(api, tools(api, name))
        assert error.param == PLACES[api], name
        assert error.message.startswith(f"{PLACES[api]} is ")


def test_two_tools_of_one_name_are_refused_where_the_provider_does() -> None:
    for api in ("messages", "google"):
        error = refusal(api, tools(api, "count", "search", "count"))
        assert error.param == "tools"
        assert "'count'" in error.message
    # OpenAI takes them.
    for api in ("chat", "responses"):
        assert len(read(api, tools(api, "count", "count")).chat.tools) == 2


def test_a_call_of_any_name_in_a_history_is_read() -> None:
    """The policy wrote it, and the client sends back what it got."""
    call = {"type": "tool_use", "id": "c", "name": "get weather!", "input": {}}
    history = [USER, {"role": "assistant", "content": [call]}, USER]
    assert read("messages", {"messages": history}).chat.messages


# -- parameters that contradict others --------------------------------------------------------------------------------

THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "two bounds of an answer": ("chat", {"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    "options of a stream that is none": ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
    "parallel calls of no tools": ("chat", {"parallel_tool_calls": True}, "parallel_tool_calls"),
    "alternatives without log-probs": ("chat", {"top_logprobs": 2}, "top_logprobs"),
    "two schemas": ("messages", {"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format"),
    "a budget as large as the answer": (
        "messages", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"
    ),
    "thinking at another temperature": ("messages", {**THINKING, "temperature": 0.5}, "temperature"),
    "thinking with a nucleus": ("messages", {**THINKING, "top_p": 0.9}, "top_p"),
    "thinking among the likeliest": ("messages", {**THINKING, "top_k": 5}, "top_k"),
    "thinking before a forced call": (
        "messages", {**THINKING, **tools("messages", "f"), "tool_choice": {"type": "any"}}, "tool_choice"
    ),
    "a budget and a level": (
        "google", at("generationConfig.thinkingConfig", {"thinkingBudget": 5, "thinkingLevel": "LOW"}),
        "generationConfig.thinkingConfig.thinkingBudget",
    ),
    "two schemas of a function's result": (
        "google", {"tools": [{"functionDeclarations": [{"name": "f", "response": {}, "responseJsonSchema": {}}]}]},
        "tools.0.functionDeclarations.0.response",
    ),
}  # fmt: skip
"""What it is -> the API, fields that its provider refuses together, and which one is named."""


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_name(name: str) -> None:
    api, fields, param = CONTRADICTIONS[name]
    error = refusal(api, fields)
    assert error.param == param
    assert error.message.startswith(param)


TOGETHER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {"stream": True, "stream_options": {"include_usage": True}}),
    ("chat", {"parallel_tool_calls": False, **tools("chat", "f")}),
    ("chat", {"tool_choice": "auto"}),
    ("chat", {"top_logprobs": 0}),
    ("chat", {"max_tokens": 5, "max_completion_tokens": None}),
    ("responses", {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}),
    ("messages", {**THINKING, "temperature": 1, "top_p": 0.95, "top_k": None}),
    # Between calls it thinks anew, and its budget is that of all thoughts.
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9000}, **tools("messages", "f")}),
    ("messages", {**THINKING, **tools("messages", "f"), "tool_choice": {"type": "auto"}}),
    ("messages", {"thinking": {"type": "adaptive"}, "temperature": 0.5}),
    ("messages", {"output_format": FORMAT, "output_config": {"effort": "low"}}),
    ("google", at("generationConfig.thinkingConfig", {"thinkingBudget": 5, "includeThoughts": True})),
)  # fmt: skip


@pytest.mark.parametrize(("api", "fields"), TOGETHER)
def test_what_a_provider_takes_together_is_taken(api: str, fields: dict[str, Any]) -> None:
    read(api, fields)


def test_tokens_are_counted_of_a_request_that_says_nothing_of_its_answer() -> None:
    """What is counted has no `max_tokens`, and a budget of thoughts is that of the request that follows."""
    body = {"model": "m", "messages": [USER], **THINKING}
    for fields in ({}, {"max_tokens": None}, {"max_tokens": 0}):
        assert messages.read({**body, **fields}, new_access(), counting=True).chat.messages


# -- null -------------------------------------------------------------------------------------------------------------

NULLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {"response_format": {"type": "text", "json_schema": None}}),
    ("chat", {"response_format": {"type": "json_object", "json_schema": None, "schema": None}}),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "strict": None}, "custom": None}]}),
    (
        "chat",
        {
            **tools("chat", "f"),
            "tool_choice": {"type": "function", "function": {"name": "f"}, "allowed_tools": None, "custom": None},
        },
    ),
    ("chat", {"prediction": {"type": "content", "content": [{"type": "text", "text": "x", "file": None}]}}),
    ("responses", {"text": {"format": {"type": "text", "schema": None, "name": None}, "verbosity": None}}),
    ("responses", {"tools": [{"type": "function", "name": "f", "filters": None, "server_url": None}]}),
    ("responses", {"reasoning": {"effort": None, "max_tokens": None}}),
    ("messages", {"thinking": {"type": "disabled", "budget_tokens": None, "display": None}}),
    ("messages", {"thinking": {"type": "adaptive", "budget_tokens": None}}),
    ("messages", {**tools("messages", "f"), "tool_choice": {"type": "auto", "name": None}}),
    ("messages", {"tools": [{"type": "custom", "name": "f", "input_schema": SCHEMA, "max_uses": None}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "input": None}]}]}),
    ("messages", {"system": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "scope": None}}]}),
    ("messages", {"output_config": {"format": None, "effort": None}, "output_format": FORMAT}),
    ("messages", {"context_management": {"edits": None}}),
    ("chat", {"audio": {"voice": None, "format": None}, "moderation": {"model": None}}),
    ("google", {"generationConfig": {"thinkingConfig": {"thinkingBudget": None, "includeThoughts": None}}}),
    ("google", {"toolConfig": {"functionCallingConfig": {"mode": None, "allowedFunctionNames": None}}}),
)


@pytest.mark.parametrize(("api", "fields"), NULLS)
def test_null_is_a_field_that_is_not_there_at_any_depth(api: str, fields: dict[str, Any]) -> None:
    # The options are a record of what was sent.
    with_nulls, without = (replace(read(api, each).chat, options=None) for each in (fields, without_nulls(fields)))
    assert with_nulls == without


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}


def test_null_in_an_agents_own_values_stays() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [None, 1], "default": None}}}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert read("chat", {"tools": [function]}).chat.tools[0]["function"]["parameters"] == schema
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert '"default": null' in read("chat", {"response_format": form}).chat.sampling.grammar
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"n": None}}
    sent = {"messages": [USER, {"role": "assistant", "content": [call]}, USER]}
    (written,) = read("messages", sent).chat.messages[1]["tool_calls"]
    assert written["function"]["arguments"] == '{"n": null}'


def test_a_budget_of_thoughts_that_are_disabled_is_refused_unless_it_is_null() -> None:
    error = refusal("messages", {"thinking": {"type": "disabled", "budget_tokens": 0}})
    assert error.param == "thinking.budget_tokens"
    assert error.code == "unknown_parameter"


def test_a_required_field_that_is_null_is_missing_at_its_place() -> None:
    error = refusal("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": None, "schema": {}}}})
    assert (error.code, error.param) == ("missing_required_parameter", "response_format.json_schema.name")


# -- bodies with many faults ------------------------------------------------------------------------------------------

MANY = 5000
UNKNOWN = {f"x{i}": i for i in range(MANY)}
WRONG = [7] * MANY
FLOODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a body": ("chat", UNKNOWN, "x0"),
    "options of a stream": ("chat", {"stream": True, "stream_options": UNKNOWN}, "stream_options.x0"),
    "a format": ("chat", {"response_format": {"type": "text", **UNKNOWN}}, "response_format.x0"),
    "a schema's format": (
        "chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **UNKNOWN}}},
        "response_format.json_schema.x0",
    ),
    "a tool": ("chat", {"tools": [{"type": "function", "function": {"name": "f", **UNKNOWN}}]}, "tools.0.function.x0"),
    "messages": ("chat", {"messages": WRONG}, "messages.0"),
    "tools": ("chat", {"tools": WRONG}, "tools.0"),
    "stop texts": ("chat", {"stop": WRONG}, "stop.0"),
    "metadata": ("chat", {"metadata": UNKNOWN}, "metadata"),
    "caches": ("chat", {"prompt_cache_options": UNKNOWN}, "prompt_cache_options.x0"),
    "predicted texts": ("chat", {"prediction": {"type": "content", "content": WRONG}}, "prediction.content.0"),
    "predicted parts": (
        "chat", {"prediction": {"type": "content", "content": [{"type": "text", "text": "x", **UNKNOWN}]}},
        "prediction.content.0.x0",
    ),
    "reasoning": ("responses", {"reasoning": UNKNOWN}, "reasoning.x0"),
    "a text": ("responses", {"text": {"format": {"type": "text", **UNKNOWN}}}, "text.format.x0"),
    "what is included": ("responses", {"include": WRONG}, "include.0"),
    "a function": ("responses", {"tools": [{"type": "function", "name": "f", **UNKNOWN}]}, "tools.0.x0"),
    "allowed tools": (
        "responses",
        {**tools("responses", "f"), "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": WRONG}},
        "tool_choice.tools.0",
    ),
    "thinking": ("messages", {"thinking": {"type": "adaptive", **UNKNOWN}}, "thinking.x0"),
    "a block": (
        "messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **UNKNOWN}]}]},
        "messages.0.content.0.x0",
    ),
    "a mark of a cache": ("messages", {"cache_control": {"type": "ephemeral", **UNKNOWN}}, "cache_control.x0"),
    "a tool's examples": (
        "messages", {"tools": [{"name": "f", "input_schema": SCHEMA, "input_examples": WRONG}]},
        "tools.0.input_examples.0",
    ),
    "stop sequences": ("messages", {"stop_sequences": WRONG}, "stop_sequences.0"),
    "a configuration": ("google", {"generationConfig": UNKNOWN}, "generationConfig.x0"),
    "thoughts": ("google", at("generationConfig.thinkingConfig", UNKNOWN), "generationConfig.thinkingConfig.x0"),
    "Google's stop texts": ("google", at("generationConfig.stopSequences", WRONG), "generationConfig.stopSequences.0"),
    "labels": ("google", {"labels": UNKNOWN}, "labels"),
    "a part": ("google", {"contents": [{"parts": [{"text": "hi", **UNKNOWN}]}]}, "contents.0.parts.0.x0"),
    "functions that may be called": (
        "google", at("toolConfig.functionCallingConfig.allowedFunctionNames", WRONG),
        "toolConfig.functionCallingConfig.allowedFunctionNames.0",
    ),
}  # fmt: skip
"""Where it is -> the API, fields with many faults, and the first of these."""


@pytest.mark.parametrize("name", FLOODS)
def test_of_many_faults_the_first_is_named_and_no_other_is_written_out(name: str) -> None:
    """A body that would cost one error of pydantic for each fault is refused without its place."""
    api, fields, param = FLOODS[name]
    error = refusal(api, fields)
    assert error.param == param
    assert "values do not fit" not in error.message
    assert len(error.message) < 1000


# -- by the SDKs ------------------------------------------------------------------------------------------------------


async def ask(api: str, attempt: Attempt, **fields: Any) -> Any:
    if api == "chat":
        return await openai_client(attempt).chat.completions.create(**BODIES["chat"], extra_body=fields)
    if api == "responses":
        return await openai_client(attempt).responses.create(**BODIES["responses"], extra_body=fields)
    if api == "messages":
        async with anthropic_client(attempt) as client:
            return await client.messages.create(**BODIES["messages"], extra_body=fields)
    async with google_client(attempt) as client:
        config: Any = {"http_options": {"extra_body": fields}}
        return await client.models.generate_content(model="m", contents="hi", config=config)


@in_loop
async def test_an_sdk_raises_the_bound_and_the_next_request_is_answered() -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        for api, fields, words in (
            ("chat", {"temperature": 3}, "Invalid 'temperature': decimal above maximum value"),
            ("responses", {"top_logprobs": 21}, "Invalid 'top_logprobs': integer above maximum value"),
            ("messages", {"temperature": 2}, "temperature: Input should be less than or equal to 1, not 2"),
            ("google", {"generationConfig": {"topP": 2}}, "generationConfig.topP is 2; it is at most 1"),
        ):
            with pytest.raises(Exception, match="400") as raised:
                await ask(api, attempt, **fields)
            assert words in str(raised.value)
            assert await ask(api, attempt)
        await attempt.close()
