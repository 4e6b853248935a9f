"""What a model writes among a tool call's arguments reaches clients as JSON that every parser reads, in all APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted import TOOLS, in_loop, serving, tool_call

from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolparsers import FORMATS, MOST_NESTED, ToolCall, assemble

VALUES = {
    "NaN": "NaN",
    "infinities": "[Infinity, -Infinity]",
    "a number beyond a float's range": "1e999",
    "inside": '{"a": [{"b": -1e999, "c": NaN}], "d": "NaN"}',
    "half a surrogate pair": '"\\ud83d"',
    "a whole one": '"\\ud83d\\ude00"',
    "a long integer": str(2**80),
    "as deep as may be": "[" * (MOST_NESTED - 1) + "]" * (MOST_NESTED - 1),
}
EXPECTED: dict[str, Any] = {
    "NaN": None,
    "infinities": [None, None],
    "a number beyond a float's range": None,
    "inside": {"a": [{"b": None, "c": None}], "d": "NaN"},
    "half a surrogate pair": "?",
}


def strict(text: str) -> Any:
    """The value of JSON as JavaScript reads it."""

    def no_number(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=no_number)


def nodes(value: Any) -> Iterator[Any]:
    yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(child)


def arguments_of(path: str, values: list[Any]) -> dict[str, Any]:
    """The arguments of the call in an answer, or in the events of a stream."""
    objects = [node for value in values for node in nodes(value) if isinstance(node, dict)]
    if "generateContent" in path or "streamGenerateContent" in path:
        return next(o["args"] for o in objects if "args" in o)
    texts = [o[name] for o in objects for name in ("arguments", "partial_json") if o.get(name)]
    return strict(texts[0]) if texts else next(o["input"] for o in objects if o.get("type") == "tool_use")


def body_of(path: str, stream: bool) -> dict[str, Any]:
    function = TOOLS[0]["function"]
    messages = [{"role": "user", "content": "hi"}]
    if path == "chat/completions":
        return {"model": "m", "messages": messages, "tools": TOOLS, "stream": stream}
    if path == "responses":
        return {"model": "m", "input": "hi", "tools": [{"type": "function", **function}], "stream": stream}
    if path == "messages":
        tool = {"name": function["name"], "input_schema": function["parameters"]}
        return {"model": "m", "messages": messages, "max_tokens": 500, "tools": [tool], "stream": stream}
    declared = {"name": function["name"], "parametersJsonSchema": function["parameters"]}
    return {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [declared]}],
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages", "google"])
@in_loop
async def test_arguments_are_json_for_every_parser(api: str, stream: bool) -> None:
    answers = [tool_call("VALUE").replace('"VALUE"', value) for value in VALUES.values()]
    path = f"v1/{api}"
    if api == "google":
        path = f"v1beta/models/m:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}"
    async with serving(answers) as rig, httpx.AsyncClient(trust_env=False) as http:
        attempt = await rig.attempt()
        for name, value in VALUES.items():
            answer = await http.post(
                f"{attempt.access.url}/agents/agent/{path}",
                json=body_of(api, stream),
                headers={"authorization": f"Bearer {attempt.key}"},
            )
            assert answer.status_code == 200, answer.text
            lines = answer.text.splitlines() if stream else [f"data: {answer.text}"]
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            values = [strict(event) for event in events if event != "[DONE]"]
            given = EXPECTED.get(name, json.loads(value))
            assert arguments_of(path, values) == {"expression": given}, name


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_arguments(name: str) -> None:
    write = {
        "hermes": '<tool_call>{{"name": "f", "arguments": {{"x": {}}}}}</tool_call>',
        "xml": "<tool_call><function=f><parameter=x>{}</parameter></function></tool_call>",
        "llama": '{{"name": "f", "parameters": {{"x": {}}}}}',
        "mistral": '[TOOL_CALLS] [{{"name": "f", "arguments": {{"x": {}}}}}]',
    }[name]
    for what, value in VALUES.items():
        [call] = assemble(FORMATS[name](write.format(value), None), None).tool_calls
        assert strict(call.arguments) == {"x": EXPECTED.get(what, json.loads(value))}
        call.arguments.encode()


def test_mistrals_newer_form_and_a_packages_renderer_do_as_well() -> None:
    from tiny_tokenizers import package_tokenizer

    [call] = assemble(FORMATS["mistral"]('[TOOL_CALLS]f[ARGS]{"x": 1e999}', None), None).tool_calls
    assert call.arguments == '{"x": null}'
    model = Rendering(package_tokenizer(), renderer="qwen3")
    ids = model.encode('<tool_call>\n{"name": "calculator", "arguments": {"x": NaN}}\n</tool_call><|im_end|>')
    [call] = model.parse(ids, TOOLS).tool_calls
    assert call.arguments == '{"x": null}'


@pytest.mark.parametrize("renderer", ["llama-3", "qwen3", "glm-4.5", "deepseek-v3"])
@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "1" * 5000], ids=["nested", "digits"])
def test_json_that_python_does_not_read_is_text_for_a_packages_renderer(renderer: str, value: str) -> None:
    from tiny_tokenizers import package_tokenizer

    model = Rendering(package_tokenizer(), renderer=renderer)
    for text in (
        f'{{"name": "f", "parameters": {{"x": {value}}}}}',
        f'<tool_call>\n{{"name": "f", "arguments": {{"x": {value}}}}}\n</tool_call>',
        f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    ):
        parsed = model.parse([*model.encode(text), model.stop_token_ids[0]], TOOLS)
        calls = [call.name + call.arguments for call in parsed.tool_calls]
        assert any(value in text for text in (parsed.content, parsed.reasoning or "", *calls))


@pytest.mark.parametrize("depth", [MOST_NESTED, 5000], ids=["a little", "much"])
def test_arguments_that_are_nested_too_deep_are_no_call(depth: int) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * depth + "]" * depth}}}}}</tool_call>'
    parsed = assemble(FORMATS["hermes"](text, None), None)
    assert (parsed.tool_calls, parsed.malformed, parsed.content) == ((), (text,), text)
    assert not any(isinstance(piece, ToolCall) for piece in FORMATS["hermes"](text, None))


@in_loop
async def test_arguments_as_deep_as_may_be_can_be_sent_back_as_objects() -> None:
    value = VALUES["as deep as may be"]
    async with (
        serving([tool_call("x").replace('"x"', value), "done"]) as rig,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        attempt = await rig.attempt()
        headers, url = {"authorization": f"Bearer {attempt.key}"}, f"{attempt.url()}/messages"
        body = body_of("messages", False)
        first = (await http.post(url, json=body, headers=headers)).json()
        result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": "2"}
        told = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        second = await http.post(url, json=body | {"messages": body["messages"] + told}, headers=headers)
        assert second.status_code == 200, second.text
        _, last = await attempt.close()
        assert last.parent_id is not None
