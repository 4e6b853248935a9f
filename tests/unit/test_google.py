"""Google's dialect on the wire: answers, streams, tools, schemas, errors, keys, continuation.

Google's own clients are in tests/integration/test_google_clients.py.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Attempt, ScriptedEngine, in_loop, new_access, quick_tokenizer, serving, tool_call, until
from tiny_tokenizers import template_tokenizer

from agl.errors import EngineError
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.sequence import merge, merge_report
from agl.mdp.span_index import SpanIndex
from agl.messages import google
from agl.trainer.gateway.dialects.google.body import read
from agl.trainer.gateway.errors import RequestError

USER: dict[str, Any] = {"role": "user", "parts": [{"text": "hi"}]}
ASK: dict[str, Any] = {"contents": [USER]}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR: dict[str, Any] = {
    "name": "calculator",
    "description": "Work out a sum.",
    "parameters": {
        "type": "OBJECT",
        "properties": {"expression": {"type": "STRING"}},
        "required": ["expression"],
        "propertyOrdering": ["expression"],
    },
}
SEARCH: dict[str, Any] = {"name": "search", "parametersJsonSchema": {"type": "object", "properties": {}}}
TOOLS = [{"functionDeclarations": [CALCULATOR, SEARCH]}]


async def post(
    attempt: Attempt, method: str, base: str | None = None, key: Any = None, **fields: Any
) -> httpx.Response:
    """One request, with the headers of Google's SDK."""
    headers = {"x-goog-api-key": attempt.key} if key is None else key
    url = f"{base or attempt.access.url + '/agents/agent'}/v1beta/models/m:{method}"
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.post(url, json=ASK | fields, headers=headers)


async def create(attempt: Attempt, **fields: Any) -> dict[str, Any]:
    answer = await post(attempt, "generateContent", **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(attempt: Attempt, **fields: Any) -> list[dict[str, Any]]:
    answer = await post(attempt, "streamGenerateContent?alt=sse", **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


async def items(attempt: Attempt, **fields: Any) -> list[dict[str, Any]]:
    answer = await post(attempt, "streamGenerateContent", **fields)
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream adds up to."""
    whole = {**chunks[-1], "candidates": []}
    for chunk in chunks:
        assert {name: chunk[name] for name in ("modelVersion", "responseId")}.items() <= whole.items()
        for candidate in chunk["candidates"]:
            while len(whole["candidates"]) <= candidate["index"]:
                whole["candidates"].append({"content": {"role": "model", "parts": []}})
            known = whole["candidates"][candidate["index"]]
            parts = known["content"]["parts"]
            for part in candidate["content"]["parts"]:
                if parts and {*part} == {*parts[-1]} and "text" in part:
                    parts[-1] = {**part, "text": parts[-1]["text"] + part["text"]}
                elif part.get("text") != "":
                    parts.append(part)
            known.update({name: value for name, value in candidate.items() if name != "content"})
    for candidate in whole["candidates"]:
        candidate["content"]["parts"] = candidate["content"]["parts"] or [{"text": ""}]
    return whole


async def streamed(attempt: Attempt, **fields: Any) -> dict[str, Any]:
    return joined(await events(attempt, **fields))


def asked(**fields: Any) -> Any:
    return read(ASK | fields, new_access()).chat


def parts(response: dict[str, Any]) -> list[dict[str, Any]]:
    return response["candidates"][0]["content"]["parts"]


# -- answers ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_answer_and_its_call() -> None:
    async with serving(["hello there"]) as rig:
        attempt = await rig.attempt()
        config = {"temperature": 0.5, "topP": 0.9, "topK": 7.0, "maxOutputTokens": 200, "seed": 3}
        system = {"parts": [{"text": "be "}, {"text": "brief"}]}
        answer = await create(attempt, systemInstruction=system, generationConfig=config)
        (call,) = await attempt.close()
    assert answer["candidates"] == [
        {"content": {"role": "model", "parts": [{"text": "hello there"}]}, "index": 0, "finishReason": "STOP"}
    ]
    assert answer["modelVersion"] == "policy"
    assert answer["responseId"] == call.id
    prompt, sampled = call.prompt_ids.size, call.response_ids.size
    assert answer["usageMetadata"] == {
        "promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled,
        "cachedContentTokenCount": 0, "thoughtsTokenCount": 0,
    }  # fmt: skip
    assert call.agent == "agent"
    assert call.request["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert call.request["asked"]["model"] == "m"
    assert call.request["asked"]["temperature"] == 0.5
    sampling = rig.engine.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 200)


@in_loop
async def test_why_an_answer_ended() -> None:
    async with serving(["one two three", "one two three", tool_call("1 + 1"), "well\nObservation: x"]) as rig:
        attempt = await rig.attempt()
        whole = await create(attempt)
        cut = await create(attempt, generationConfig={"maxOutputTokens": 3})
        called = await create(attempt, tools=TOOLS)
        stopped = await create(attempt, generationConfig={"stopSequences": ["\nObservation:"]})
    assert [a["candidates"][0]["finishReason"] for a in (whole, cut, called)] == ["STOP", "MAX_TOKENS", "STOP"]
    assert cut["usageMetadata"]["candidatesTokenCount"] == 3
    assert parts(stopped) == [{"text": "well"}]


ANSWERS = {
    "text": "Let me think about that, " * 20,
    "unicode": "Grüße 🎉👩‍👩‍👧 日本語 ½",
    "a call": tool_call("1 + 2"),
    "text and calls": "  I will work it out.  \n\n" + tool_call("1 + 2") + "\n" + tool_call("3 * 4") + " and so on",
    "text that looks like a call": "a < b and <tool is not <tool_call",
    "malformed": "well <tool_call>\n{broken}\n</tool_call> then",
    "only white space": " \n ",
    "nothing": "",
    "integers longer than a machine word": tool_call("x").replace('"x"', str(2**80)),
    "no number of JSON": tool_call("x").replace('"x"', "NaN"),
}


@pytest.mark.parametrize("form", [events, items], ids=["events", "array"])
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
@in_loop
async def test_a_stream_adds_up_to_the_answer(tools: list[Any], form: Any) -> None:
    for name, text in ANSWERS.items():
        async with serving([text]) as rig:
            first, second = await rig.attempt(seed=4), await rig.attempt(seed=4)
            chunks = await form(first, tools=tools)
            whole = await create(second, tools=tools)
            assert joined(chunks) | {"responseId": ""} == whole | {"responseId": ""}, name
            (a,), (b,) = await first.close(), await second.close()
            assert a.response_ids.tolist() == b.response_ids.tolist()
            assert (a.response, a.id) == (b.response, chunks[0]["responseId"]), name
            assert ["finishReason" in c["candidates"][0] for c in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("form", [create, streamed], ids=["whole", "stream"])
@in_loop
async def test_several_candidates(form: Any) -> None:
    async with serving(["first " * 9, "second " * 9]) as rig:
        attempt = await rig.attempt()
        answer = await form(attempt, generationConfig={"candidateCount": 2})
        calls = await attempt.close()
    assert [(c["index"], c["finishReason"]) for c in answer["candidates"]] == [(0, "STOP"), (1, "STOP")]
    texts = {c["content"]["parts"][0]["text"] for c in answer["candidates"]}
    assert texts == {"first " * 9, "second " * 9}
    assert answer["usageMetadata"]["candidatesTokenCount"] == sum(c.response_ids.size for c in calls)


@in_loop
async def test_text_comes_as_it_is_sampled() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["1234567890"], paused=True)) as rig:
        attempt = await rig.attempt()
        for query, begin in (("?alt=sse", "data: "), ("", "[")):
            rig.engine.resume.clear()
            url = f"{attempt.access.url}/agents/agent/v1beta/models/m:streamGenerateContent{query}"
            async with (
                httpx.AsyncClient(trust_env=False, headers={"x-goog-api-key": attempt.key}) as http,
                http.stream("POST", url, json=ASK) as answer,
            ):
                chunks = answer.aiter_text()
                first = await anext(chunks)
                assert json.loads(first.removeprefix(begin))["candidates"][0]["content"]["parts"] == [{"text": "1"}]
                rig.engine.resume.set()
                assert "234567890"[-1] in "".join([chunk async for chunk in chunks])


@in_loop
async def test_thoughts_are_shown_when_asked_for() -> None:
    tokenizer = template_tokenizer("qwen3")
    config = {"thinkingConfig": {"includeThoughts": True, "thinkingBudget": 100}}
    async with serving(ScriptedEngine(tokenizer, ["<think>\nhmm\n</think>\n\nyes"]), tokenizer) as rig:
        attempt = await rig.attempt()
        shown = await create(attempt, generationConfig=config)
        hidden = await create(attempt)
        stream = await streamed(attempt, generationConfig=config)
        signed = [{**part, "thoughtSignature": "c2lnbmVk"} for part in parts(shown)]
        await create(attempt, contents=[USER, {"role": "model", "parts": signed}, USER], generationConfig=config)
        calls = await attempt.close()
    assert parts(hidden) == [{"text": "yes"}]
    for response in (shown, stream):
        assert [(p["text"].strip(), p.get("thought")) for p in parts(response)] == [("hmm", True), ("yes", None)]
    # This template drops earlier thoughts, which no continuation can; the fork is its own, not the client's.
    assert [c.fork_cause for c in calls] == [None, None, None, "template"]
    assert calls[3].request["messages"][1]["reasoning_content"].strip() == "hmm"


# -- what is asked ----------------------------------------------------------------------------------------------------


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_contents_become_messages() -> None:
    request = asked(
        system_instruction={"role": "user", "parts": [{"text": "be "}, {"text": "brief"}]},
        contents=[
            {"parts": [{"text": "what"}, {"text": "?"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "hmm", "thought": True, "thoughtSignature": "c2ln"},
                    {"text": "let me see"},
                    {"functionCall": {"id": "c1", "name": "calculator", "args": {"expression": "½"}}},
                    {"function_call": {"id": "c2", "name": "search"}},
                    {"functionCall": {"id": "c3", "name": "search", "args": {}}, "thoughtSignature": "c2ln"},
                ],
            },
            {
                "role": "function",
                "parts": [
                    {"functionResponse": {"id": "c1", "name": "calculator", "response": {"result": "5"}}},
                    {"function_response": {"id": "c2", "name": "search", "response": {"found": ["é"], "n": 1}}},
                    {"functionResponse": {"id": "c3", "name": "search", "response": {"error": "no network"}}},
                    {"text": "go on"},
                ],
            },
        ],
        tools=[{"functionDeclarations": [CALCULATOR]}, {"function_declarations": [SEARCH]}],
    )
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what?"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hmm",
            "tool_calls": [
                call("c1", "calculator", '{"expression": "½"}'), call("c2", "search", "{}"), call("c3", "search", "{}")
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": '{"found": ["é"], "n": 1}'},
        {"role": "tool", "tool_call_id": "c3", "content": "no network"},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    assert request.failed_tools == {"c3"}
    function = {"name": "calculator", "description": "Work out a sum.", "parameters": PARAMETERS}
    other = {"name": "search", "parameters": SEARCH["parametersJsonSchema"]}
    assert request.tools == [{"type": "function", "function": f} for f in (function, other)]


@pytest.mark.parametrize("role", ["function", "tool", "user", None])
def test_the_result_of_a_function_may_have_any_role_that_clients_give_it(role: str | None) -> None:
    asked_for = {"role": "model", "parts": [{"functionCall": {"name": "search", "args": {}, "id": "c"}}]}
    result = {"functionResponse": {"name": "search", "response": {"result": "12"}, "id": "c"}}
    request = asked(contents=[USER, asked_for, {"role": role, "parts": [result]}])
    assert request.messages[2:] == [{"role": "tool", "tool_call_id": "c", "content": "12"}]


def test_a_single_object_is_a_list_of_one() -> None:
    one = {"text": "hi"}
    expected = asked(contents=[{"role": "user", "parts": [one]}], systemInstruction={"parts": [one]}, tools=TOOLS)
    tools = {"functionDeclarations": TOOLS[0]["functionDeclarations"]}
    single = asked(contents={"role": "user", "parts": one}, systemInstruction={"parts": one}, tools=tools)
    assert (single.messages, single.tools) == (expected.messages, expected.tools)
    alone = asked(tools={"functionDeclarations": CALCULATOR}, safetySettings={"category": "HARM_CATEGORY_HARASSMENT"})
    assert alone.tools == asked(tools=[{"functionDeclarations": [CALCULATOR]}]).tools


def test_words_of_enumerations_may_be_small() -> None:
    for mode in ("any", "Any", "ANY"):
        assert asked(tools=TOOLS, toolConfig=config(mode)).force_tool is True
    for level in ("low", "LOW"):
        asked(generationConfig={"thinkingConfig": {"thinkingLevel": level}})


def test_ids_that_a_client_dropped_are_those_of_signature_and_order() -> None:
    def called(name: str, signature: str) -> dict[str, Any]:
        return {"functionCall": {"name": name, "args": {}}, "thoughtSignature": signature}

    def result(name: str, text: str, **fields: Any) -> dict[str, Any]:
        return {"functionResponse": {"name": name, "response": {"output": text}, **fields}}

    calls = [called("a", f"aglcall0000{i}") for i in (1, 2, 3)]
    model = {"role": "model", "parts": [*calls, called("b", "x")]}
    results = [result("b", "b"), result("a", "second", id="call00002"), result("a", "first"), result("a", "third")]
    turn = {"role": "user", "parts": results}
    request = asked(contents=[USER, model, turn])
    assert [c["id"] for c in request.messages[1]["tool_calls"]] == ["call00001", "call00002", "call00003", ""]
    assert [(m["tool_call_id"], m["content"]) for m in request.messages[2:]] == [
        ("", "b"), ("call00002", "second"), ("call00001", "first"), ("call00003", "third")
    ]  # fmt: skip


def config(mode: str, *allowed: str) -> dict[str, Any]:
    return {"functionCallingConfig": {"mode": mode, **({"allowedFunctionNames": [*allowed]} if allowed else {})}}


@pytest.mark.parametrize(
    ("choice", "tools", "force"),
    [
        ({}, ["calculator", "search"], None),
        (config("AUTO"), ["calculator", "search"], None),
        (config("VALIDATED"), ["calculator", "search"], None),
        (config("ANY"), ["calculator", "search"], True),
        (config("ANY", "search"), ["calculator", "search"], "search"),
        (config("ANY", "search", "calculator"), ["calculator", "search"], True),
        (config("VALIDATED", "search"), ["search"], None),
        (config("NONE"), [], None),
        ({"function_calling_config": {"mode": "NONE"}}, [], None),
    ],
)
def test_which_tools_may_be_called(choice: Any, tools: list[str], force: Any) -> None:
    request = asked(tools=TOOLS, toolConfig=choice)
    assert [t["function"]["name"] for t in request.tools or ()] == tools
    assert request.force_tool == force


@in_loop
async def test_a_forced_tool_is_called() -> None:
    async with serving(['{"expression": "1 + 1"}}\n</tool_call>']) as rig:
        attempt = await rig.attempt()
        for form in (create, streamed):
            answer = await form(attempt, tools=TOOLS, toolConfig=config("ANY", "calculator"))
            (part,) = parts(answer)
            assert part["functionCall"]["name"] == "calculator"
            assert part["functionCall"]["args"] == {"expression": "1 + 1"}


SCHEMA = {
    "type": "OBJECT", "title": "Sum", "description": "d", "required": ["kind"],
    "properties": {
        "kind": {"type": "STRING", "format": "enum", "enum": ["add", "sub"]},
        "type": {"type": "ARRAY", "items": {"type": "INTEGER", "nullable": True}, "minItems": "1", "max_items": 3},
        "nullable": {"anyOf": [{"type": "NUMBER", "minimum": 0}, {"type": "BOOLEAN"}]},
    },
    "propertyOrdering": ["kind", "type"],
}  # fmt: skip
JSON_SCHEMA = {
    "type": "object", "title": "Sum", "description": "d", "required": ["kind"],
    "properties": {
        "kind": {"type": "string", "format": "enum", "enum": ["add", "sub"]},
        "type": {
            "type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "minItems": 1, "maxItems": 3
        },
        "nullable": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "boolean"}]},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({}, None),
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, {"type": "object"}),
        ({"responseMimeType": "application/json", "responseSchema": SCHEMA}, JSON_SCHEMA),
        ({"response_mime_type": "application/json", "response_json_schema": JSON_SCHEMA}, JSON_SCHEMA),
    ],
)
def test_schemas(fields: Any, schema: Any) -> None:
    grammar = asked(generationConfig=fields).sampling.grammar
    assert (json.loads(grammar) if grammar else None) == schema


@pytest.mark.parametrize("name", ["responseSchema", "response_schema", "responseJsonSchema"])
def test_properties_are_in_the_order_that_is_asked_for(name: str) -> None:
    ordering = "property_ordering" if "_" in name else "propertyOrdering"
    of = {each: {"type": "integer"} for each in "abcd"}
    inner = {"type": "object", "properties": of, ordering: ["c", "a"]}
    schema = {
        "type": "object", ordering: ["second", "no such property", "first"],
        "properties": {"first": {"type": "array", "items": inner}, "propertyOrdering": inner, "second": inner},
    }  # fmt: skip
    form = {"responseMimeType": "application/json", name: schema}
    held = json.loads(asked(generationConfig=form).sampling.grammar)
    assert [*held["properties"]] == ["second", "first", "propertyOrdering"]
    for each in (held["properties"]["first"]["items"], held["properties"]["second"]):
        assert [*each["properties"]] == ["c", "a", "b", "d"]
        assert ordering not in each
    assert ordering not in held


def test_zeros_and_empty_tools_ask_for_nothing() -> None:
    plain = asked()
    for fields in (
        {"generationConfig": {"maxOutputTokens": 0, "candidateCount": 0, "topK": 0}},
        {"generationConfig": {"max_output_tokens": 0, "candidate_count": 0}},
        {"tools": [{}]},
        {"tools": [{}, {"functionDeclarations": None}, {"functionDeclarations": []}]},
        {"tools": {}},
    ):
        found = asked(**fields)
        assert (found.tools, found.n, found.sampling) == (plain.tools, plain.n, plain.sampling)
    assert asked(tools=[{}, *TOOLS]).tools == asked(tools=TOOLS).tools


def test_fields_without_effect_are_accepted() -> None:
    safety = [{"category": "HARM_CATEGORY_HATE_SPEECH", "threshold": "BLOCK_NONE"}]
    asked(safetySettings=safety, labels={"a": "b"}, serviceTier="flex", cachedContent=None)
    asked(generationConfig={"presencePenalty": 0, "responseModalities": None, "thinking_config": {"thinkingBudget": 0}})


INLINE = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
FILE = {"fileData": {"fileUri": "gs://x"}}
SEEN = {"name": "look", "response": {"ok": True}, "parts": [INLINE]}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no contents": ({"contents": []}, "contents"),
    "contents of text": ({"contents": "hi"}, "contents"),
    "unknown field": ({"content": [USER]}, "contents"),
    "unknown option": ({"generationConfig": {"maxTokens": 5}}, "generationConfig.maxTokens"),
    "fewer than no tokens": ({"generationConfig": {"maxOutputTokens": -1}}, "maxOutputTokens"),
    "too hot": ({"generationConfig": {"temperature": 2.5}}, "temperature"),
    "half a token": ({"generationConfig": {"topK": 1.5}}, "topK"),
    "candidates": ({"generationConfig": {"candidateCount": -1}}, "candidateCount"),
    "role": ({"contents": [{"role": "assistant", "parts": [{"text": "x"}]}]}, "contents.0.role"),
    "no parts": ({"contents": [{"role": "user"}]}, "contents.0.parts"),
    "a part of text": ({"contents": [{"role": "user", "parts": ["x"]}]}, "contents.0.parts.0 is no object"),
    "image": ({"contents": [{"role": "user", "parts": [{"text": "see"}, INLINE]}]}, "contents.0.parts.1.inlineData is"),
    "file": ({"contents": [{"role": "user", "parts": [FILE]}]}, "contents.0.parts.0.fileData is"),
    "code": (
        {"contents": [{"role": "model", "parts": [{"executableCode": {}}]}, USER]}, "parts.0.executableCode is"
    ),
    "an image as result": (
        {"contents": [{"role": "user", "parts": [{"functionResponse": SEEN}]}]}, "parts.0.functionResponse.parts is"
    ),
    "nameless call": (
        {"contents": [{"role": "model", "parts": [{"functionCall": {}}]}, USER]}, "functionCall.name is missing"
    ),
    "a file beside text": (
        {"contents": [{"role": "user", "parts": [{"text": "see", **FILE}]}]}, "contents.0.parts.0.fileData is"
    ),
    "an image beside a result": (
        {"contents": [{"role": "user", "parts": [{"functionResponse": {"name": "f"}, **INLINE}]}]},
        "contents.0.parts.0.inlineData is",
    ),
    "a part of nothing": ({"contents": [{"role": "user", "parts": [{"thought": True}]}]}, "contents.0.parts.0 has"),
    "a call as system": (
        {"systemInstruction": {"parts": [{"functionCall": {"name": "f"}}]}}, "'systemInstruction.parts.0.functionCall'"
    ),
    "system": ({"systemInstruction": "be brief"}, "systemInstruction"),
    "an image as system": ({"systemInstruction": {"parts": [INLINE]}}, "systemInstruction.parts.0.inlineData is"),
    "prefill": ({"contents": [USER, {"role": "model", "parts": [{"text": "I"}]}]}, "model"),
    "server tool": ({"tools": [{"googleSearch": {}}]}, "googleSearch"),
    "nameless tool": ({"tools": [{"functionDeclarations": [{"description": "d"}]}]}, "name"),
    "a server tool beside functions": ({"tools": [{**TOOLS[0], "googleSearch": {}}]}, "tools.0.googleSearch is"),
    "no such tool": ({"tools": TOOLS, "toolConfig": config("ANY", "f")}, "'f'"),
    "no such tool among others": (
        {"tools": TOOLS, "toolConfig": config("AUTO", "search", "f")},
        "toolConfig.functionCallingConfig.allowedFunctionNames names 'f'",
    ),
    "nothing to choose": ({"toolConfig": config("ANY")}, "toolConfig"),
    "choice": ({"tools": TOOLS, "toolConfig": config("SOME")}, "toolConfig"),
    "choice of a list": ({"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": ["ANY"]}}}, "toolConfig"),
    "choice of text": ({"tools": TOOLS, "toolConfig": {"functionCallingConfig": "ANY"}}, "functionCallingConfig"),
    "stop": ({"generationConfig": {"stopSequences": [""]}}, "stopSequences"),
    "penalty": ({"generationConfig": {"frequencyPenalty": 0.5}}, "frequencyPenalty"),
    "pictures": ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "responseModalities"),
    "cache": ({"cachedContent": "cachedContents/x"}, "cachedContent"),
    "a schema of no kind": ({"generationConfig": {"responseSchema": SCHEMA}}, "responseMimeType"),
    "an enumeration": ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "text/x.enum"),
    "a JSON schema of a list": (
        {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": [1]}},
        "generationConfig.responseJsonSchema is no schema",
    ),
    "two schemas": (
        {"generationConfig": {"responseMimeType": "application/json", "responseSchema": {}, "responseJsonSchema": {}}},
        "generationConfig.responseSchema stands beside responseJsonSchema",
    ),
    "two schemas of a function": (
        {"tools": [{"functionDeclarations": [{**CALCULATOR, "parametersJsonSchema": {}}]}]},
        "tools.0.functionDeclarations.0.parameters stands beside parametersJsonSchema",
    ),
    "a schema of text": (
        {"generationConfig": {"responseMimeType": "application/json", "responseSchema": "x"}}, "responseSchema"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    fields, told = BAD[name]
    with pytest.raises(RequestError, match=told.replace(".", r"\.")) as caught:
        read(ASK | fields, new_access())
    assert caught.value.status == 400


# -- errors and addresses ---------------------------------------------------------------------------------------------


@in_loop
async def test_errors_are_in_googles_form() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), [EngineError("no engine")], max_context=300)) as rig:
        attempt = await rig.attempt()
        hot = {"generationConfig": {"temperature": 7}}
        for fields, code, status, words in (
            ({"key": {"x-goog-api-key": "wrong"}}, 401, "UNAUTHENTICATED", "key"),
            (hot, 400, "INVALID_ARGUMENT", "temperature"),
            ({"contents": [{"parts": [{"text": "x" * 2000}]}]}, 400, "INVALID_ARGUMENT", "tokens"),
            ({}, 503, "UNAVAILABLE", "no engine"),
        ):
            for method in ("generateContent", "streamGenerateContent", "streamGenerateContent?alt=sse"):
                answer = await post(attempt, method, **fields)
                assert answer.status_code == code, answer.text
                error = answer.json()["error"]
                assert (error["code"], error["status"]) == (code, status)
                assert words in error["message"]
        assert (await post(attempt, "embedContent")).status_code == 404
        calls = await attempt.close()
    assert [c.finish_reason for c in calls] == ["error"] * 9
    assert "temperature" in str(calls[0].error)


@pytest.mark.parametrize("form", [events, items], ids=["events", "array"])
@in_loop
async def test_an_error_after_the_first_token_ends_the_stream(form: Any) -> None:
    class Breaks(ScriptedEngine):
        async def generate(self, request: Any, *, on_tokens: Any = None) -> Any:
            on_tokens(self.encode("12"), [-1.0, -2.0])
            raise EngineError("broken in the middle")

    async with serving(Breaks(quick_tokenizer(), [])) as rig:
        attempt = await rig.attempt()
        *_, last = await form(attempt)
        (call,) = await attempt.close()
    assert last["error"] == {"code": 503, "status": "UNAVAILABLE", "message": "broken in the middle"}
    assert call.logprobs.tolist() == [-1.0, -2.0]


@in_loop
async def test_a_client_that_hangs_up_cancels_its_call() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["a long answer"], paused=True)) as rig:
        attempt = await rig.attempt()
        url = f"{attempt.access.url}/agents/agent/v1beta/models/m:streamGenerateContent"
        async with (
            httpx.AsyncClient(trust_env=False, headers={"x-goog-api-key": attempt.key}) as http,
            http.stream("POST", url, json=ASK) as answer,
        ):
            await anext(answer.aiter_bytes())
        await until(lambda: rig.engine.cancelled == 1)
        (call,) = await attempt.close()
    assert call.finish_reason == "cancelled"


@in_loop
async def test_counted_tokens_are_those_of_the_prompt_and_no_call() -> None:
    async with serving(["hello"]) as rig:
        attempt = await rig.attempt()
        fields = {"tools": TOOLS, "systemInstruction": {"parts": [{"text": "be brief"}]}}
        counted = [
            await post(attempt, "countTokens", **fields),
            await post(attempt, "countTokens", generateContentRequest={"model": "models/m", **ASK, **fields}),
        ]
        refused = await post(attempt, "countTokens", tools=[{"googleSearch": {"a": 1}}])
        misspelt = await post(attempt, "countTokens", generateContentRequest=ASK, tool=TOOLS)
        # A conversation so far, which ends with the model.
        model = {"role": "model", "parts": [{"text": "four words of it"}]}
        longer = await post(attempt, "countTokens", **fields, contents=[USER, model])
        await create(attempt, **fields)
        (call,) = await attempt.close()
    assert [answer.json() for answer in counted] == [{"totalTokens": call.prompt_ids.size}] * 2
    assert refused.json()["error"]["status"] == "INVALID_ARGUMENT"
    assert "unknown field 'tool'" in misspelt.json()["error"]["message"]
    assert longer.json()["totalTokens"] > call.prompt_ids.size + 4


@in_loop
async def test_keys_and_addresses() -> None:
    async with serving(["hello"]) as rig:
        attempt, other = await rig.attempt(), await rig.attempt()
        agent = f"{attempt.access.url}/agents/team%2Fwriter"
        for url, headers, status in (
            (f"{agent}/v1beta/models/m:generateContent", {"x-goog-api-key": attempt.key}, 200),
            (f"{agent}/v1/v1beta/models/m:generateContent", {"authorization": f"Bearer {attempt.key}"}, 200),
            (f"{agent}/v1/models/org/m:generateContent?key={attempt.key}", {}, 200),
            (f"{agent}/v1/v1/models/m:streamGenerateContent?alt=sse&key={attempt.key}", {}, 200),
            (f"{agent}/v1beta/models/m:generateContent?key={other.key}", {}, 401),
            (f"{agent}/v1beta/models/m:generateContent?key={other.key}&key={attempt.key}", {}, 401),
            (f"{agent}/v1beta/models/m:generateContent?key={attempt.key}", {"x-goog-api-key": other.key}, 401),
            (f"{agent}/v1beta/models/m:generateContent", {}, 401),
        ):
            async with httpx.AsyncClient(trust_env=False) as http:
                answer = await http.post(url, json=ASK, headers=headers)
            assert answer.status_code == status, (url, answer.text)
            assert attempt.key not in answer.text
        calls = await attempt.close()
    assert {c.agent for c in calls} == {"team/writer"}
    assert [c.request["asked"]["model"] for c in calls] == ["m", "m", "org/m", "m"]
    assert not any(attempt.key in repr(c) for c in calls)


@in_loop
async def test_system_prompts_are_replaced() -> None:
    async with serving(["hello"]) as rig:
        attempt = await rig.attempt(prompts={"agent": {"be brief": ("p", "be long")}})
        await create(attempt, systemInstruction={"parts": [{"text": "be brief"}]})
        await create(attempt, systemInstruction={"parts": {"text": "be brief"}})
        await create(attempt, system_instruction={"parts": [{"text": "be brief"}]})
        calls = await attempt.close()
    assert [call.request["messages"][0] for call in calls] == [{"role": "system", "content": "be long"}] * 3


# -- exact continuation -----------------------------------------------------------------------------------------------


def without_ids(content: dict[str, Any]) -> dict[str, Any]:
    """What a client that knows no ids sends back."""
    cut = [
        {**p, "functionCall": {**p["functionCall"], "id": None}} if "functionCall" in p else p for p in content["parts"]
    ]
    return {**content, "parts": cut}


@in_loop
async def test_the_chunks_of_a_streamed_answer_are_one_turn():
    async with serving(["hello world", "I look.", "three"]) as rig:
        attempt = await rig.attempt()
        contents: list[Any] = []
        for question in ("one?", "two?", "three?"):
            contents.append({"role": "user", "parts": [{"text": question}]})
            chunks = await events(attempt, contents=contents)
            # As Google's SDK keeps them, the last and empty one included.
            contents += [chunk["candidates"][0]["content"] for chunk in chunks]
        calls = await attempt.close()
    assert len(contents) > 9
    for before, after in itertools.pairwise(calls):
        assert after.parent_id == before.id
        np.testing.assert_array_equal(after.prompt_ids[: before.ids.size], before.ids)


@pytest.mark.parametrize("echo", [lambda content: content, without_ids], ids=["ids", "no ids"])
@pytest.mark.parametrize("form", [create, streamed], ids=["whole", "stream"])
@in_loop
async def test_ten_turns_drift_by_nothing(form: Any, echo: Any) -> None:
    lines = []
    for i in range(10):
        two = tool_call(f"{i} + {i}").replace('"arguments": ', '"arguments":   ') + "\n" + tool_call(f"{i} * {i}")
        lines += ["I look — naïvely.\n" + two, f"It is {2 * i} — naïvely  "]
    async with serving(ScriptedEngine(quick_tokenizer(), lines, caches=True)) as rig:
        attempt = await rig.attempt()
        contents: list[Any] = []
        for i in range(10):
            contents.append({"role": "user", "parts": [{"text": f"what is {i} and {i}?"}]})
            for _ in range(2):
                system = {"parts": [{"text": "Use the calculator!"}]}
                answer = await form(attempt, contents=contents, systemInstruction=system, tools=TOOLS)
                contents.append(echo(answer["candidates"][0]["content"]))
                results = [
                    {
                        "functionResponse": {k: v for k, v in p["functionCall"].items() if k != "args"}
                        | {"response": {"result": str(i)}}
                    }
                    for p in contents[-1]["parts"]
                    if "functionCall" in p
                ]
                if results:
                    contents.append({"role": "user", "parts": [*results, {"text": "go on"}]})
        where = (attempt.access.rollout_id, 1, "group")
        calls = await attempt.close()
        built = build_trajectory(*where, SpanIndex(calls, []), select(None))
    assert len(calls) == 20
    for before, after in itertools.pairwise(calls):
        assert after.parent_id == before.id
        np.testing.assert_array_equal(after.prompt_ids[: before.ids.size], before.ids)
    assert answer["usageMetadata"]["cachedContentTokenCount"] == calls[-2].ids.size
    assert [r["id"] for r in calls[1].request["tool_results"]] == [*calls[0].tool_call_ids]
    (trajectory,) = built.trajectories.values()
    report = merge_report([trajectory], merge(trajectory, dict.fromkeys((c.id for c in calls), 1.0)))
    assert (report.rows, report.forks) == (1, {})
    assert report.tokens == calls[-1].ids.size


# -- any JSON ---------------------------------------------------------------------------------------------------------

NAMES = ["contents", "parts", "role", "text", "functionCall", "functionResponse", "name", "args", "response", "id",
         "type", "functionDeclarations", "parameters", "properties", "anyOf", "items", "nullable", "minItems", "tools",
         "generationConfig", "systemInstruction", "thought", "thoughtSignature", "propertyOrdering"]  # fmt: skip
ANYTHING: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)  # fmt: skip


@given(ANYTHING)
def test_nothing_breaks_the_reader_of_its_fields(value: Any) -> None:
    google.json_schema(value)
    google.json_schema({"properties": value, "items": value, "anyOf": value, "type": value})
    for content in (value, {"parts": value, "role": value}, *({"parts": [{n: value}]} for n in NAMES[3:6])):
        google.message(content)
        google.common({"contents": [content, content]})
    google.common({"contents": value, "tools": value, "generationConfig": value, "systemInstruction": value})


def test_validated_calls_are_held_to_their_schema() -> None:
    calling = {"functionCallingConfig": {"mode": "VALIDATED"}}
    assert [tool["function"].get("strict") for tool in asked(tools=TOOLS, toolConfig=calling).tools] == [True, True]
    assert [tool["function"].get("strict") for tool in asked(tools=TOOLS).tools] == [None, None]
