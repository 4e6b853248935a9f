"""What an answer is held to, and how it is read, for every renderer of the package and every chat template."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import openai
import pytest
from scripted import ScriptedEngine, in_loop, serving
from tiny_tokenizers import (
    PACKAGE_TOKENS,
    TAGS,
    TEMPLATE_TOKENS,
    package_tokenizer,
    published_templates,
    published_tokenizer,
    template_tokenizer,
)

pytest.importorskip("llguidance")

from agl.mdp.types import int_array
from agl.trainer.engines.base import Completion, Sampling, json_grammar
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, assistant_message
from agl.trainer.gateway.dialects.deltas import MessageDeltas
from agl.trainer.local.grammar import Grammars
from agl.trainer.rendering.package_renderer import known_renderers
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import CALL_ID, COUNT, ForcedCall, reads_as_call

NEEDS_DOWNLOAD = {"gpt-oss"}
THINKS = ("<think>", "</think>")
OWN_ARGUMENTS = {"gemma4"}
"""Renderers whose models write arguments in a form that is neither JSON nor elements."""
MARKED_TEXTS = {"inkling"}
"""Renderers whose models write texts in the mark that begins a call, too."""
RENDERERS = [name for name in known_renderers() if name not in NEEDS_DOWNLOAD | {"default"}]
MODELS: list[Any] = [
    *RENDERERS,
    *(f"template {name}" for name in TEMPLATE_TOKENS),
    *(pytest.param(f"published {name}", marks=pytest.mark.slow) for name in published_templates()),
]
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["text", "n"],
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sub")]
USER = [{"role": "user", "content": "hi"}]
MARKS = tuple(
    dict.fromkeys(
        (
            *PACKAGE_TOKENS, *TAGS, *(mark for tokens, _ in TEMPLATE_TOKENS.values() for mark in tokens),
            "<function=add>", "</function>", "<parameter=text>", "</parameter>", "<invoke name=", "</invoke>",
            '{"name": "add", "parameters": {}}',
        )
    )
)  # fmt: skip


@functools.cache
def model_of(name: str) -> tuple[Any, Rendering]:
    kind, _, template = name.partition(" ")
    if kind == "template":
        tokenizer = template_tokenizer(template)
    elif kind == "published":
        tokenizer = published_tokenizer(template)
    else:
        return package_tokenizer(), Rendering(package_tokenizer(), renderer=name)
    return tokenizer, Rendering(tokenizer)


def with_tools(name: str) -> tuple[Any, Rendering, ForcedCall]:
    tokenizer, rendering = model_of(name)
    if rendering.tools_refusal:
        pytest.skip("its template takes no tools, and requests with them are refused")
    call = rendering.possible_call(TOOLS)
    assert call is not None, "it writes calls that can be told from text"
    return tokenizer, rendering, call


@functools.cache
def letters_of(tokenizer: Any) -> dict[str, list[int]]:
    return {}


def spelled(tokenizer: Any, text: str) -> list[int]:
    """A text in letters, so that no mark in it is a control token."""
    known = letters_of(tokenizer)
    ids: list[int] = []
    for letter in text:
        if letter not in known:
            known[letter] = tokenizer.encode(letter, add_special_tokens=False)
        ids += known[letter]
    return ids


def holds(tokenizer: Any, grammar: str, ids: list[int]) -> bool:
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(grammar)
    return matcher.validate_tokens(ids) == len(ids)


def before_answer(tokenizer: Any, rendering: Rendering, tools: Any) -> tuple[Any, Any, list[int]]:
    """The prompt's ids, whether an answer to it reasons, and the end of the thought that the prompt has begun."""
    ids = rendering.prompt(USER, tools).ids
    reasoning = rendering.reasoning(ids)
    return ids, reasoning, tokenizer.encode("</think>", add_special_tokens=False) if reasoning == "open" else []


@pytest.mark.parametrize("tools", [False, True], ids=["alone", "next to tools"])
@pytest.mark.parametrize("name", MODELS)
def test_json_that_spells_any_mark_arrives_as_it_was_sampled(name: str, tools: bool) -> None:
    if tools:
        tokenizer, rendering, call = with_tools(name)
    else:
        (tokenizer, rendering), call = model_of(name), None
    stop = rendering.stop_token_ids
    prompt, reasoning, thought = before_answer(tokenizer, rendering, TOOLS if tools else None)
    if call is None:
        grammar = json_grammar([("", SCHEMA, "")], stop, reasoning=reasoning)
    else:
        grammar = json_grammar(
            call.forms, stop, trigger=call.trigger, section=call.section, otherwise=SCHEMA, reasoning=reasoning
        )
    for value in (" ".join(MARKS), "", "é 漢字"):
        answer = json.dumps({"text": value, "n": 1}, ensure_ascii=False)
        ids = [*thought, *spelled(tokenizer, answer), stop[0]]
        assert holds(tokenizer, grammar, ids)
        message = rendering.parse(ids, TOOLS if tools else None, prompt_ids=prompt, grammar=grammar)
        assert (message.content, message.tool_calls, message.malformed) == (answer, (), ())


def arguments_as(style: Any, values: dict[str, Any], schema: Any) -> str:
    if style in ("json", "compact"):
        return json.dumps(values, ensure_ascii=False, separators=(", ", ": ") if style == "json" else (",", ":"))
    begin, text, value, end = ("<parameter=", ">\n", ">\n", "\n</parameter>\n") if style == "xml" else style
    parts = []
    for key, one in values.items():
        is_text = schema["properties"][key]["type"] == "string"
        parts.append(f"{begin}{key}{text if is_text else value}{one if is_text else json.dumps(one)}{end}")
    return "".join(parts)


def calls_of(call: ForcedCall, values: list[dict[str, Any]]) -> str:
    """The text of calls, as the model writes them, of the first tool."""
    before, schema, after, style = call.forms[0]
    made = [before + arguments_as(style, value, schema) + after for value in values]
    texts = [text.replace(CALL_ID, "a1B2c3D4e").replace(COUNT, f":{k}") for k, text in enumerate(made)]
    if call.section is not None:
        return call.section[0] + call.section[1].join(texts) + call.section[2]
    if call.trigger == "[TOOL_CALLS]" and call.forms[0][2]:
        opening, closing = "[TOOL_CALLS] [", "]"
        return opening + ", ".join(t.removeprefix(opening).removesuffix(closing) for t in texts) + closing
    return "\n".join(texts) if call.trigger != "{" else texts[0]


VALUES = [{"text": "two\nlines", "n": 7}, {"text": "b", "n": -1}]


@pytest.mark.parametrize("name", MODELS)
def test_calls_are_held_and_read_in_the_form_of_each_model(name: str) -> None:
    tokenizer, rendering, call = with_tools(name)
    if not call.rests:
        assert name in OWN_ARGUMENTS
        return
    assert call.is_text == (name not in MARKED_TEXTS)
    stop = rendering.stop_token_ids
    prompt, reasoning, thought = before_answer(tokenizer, rendering, TOOLS)
    ways: dict[str, dict[str, Any]] = {"json": {"otherwise": SCHEMA}} | (
        {"free": {}, "one": {"several": False}} if call.is_text else {}
    )
    for way, options in ways.items():
        grammar = json_grammar(
            call.forms, stop, trigger=call.trigger, section=call.section, reasoning=reasoning, **options
        )
        for count in (1,) if call.trigger == "{" else (1, 2):
            text = calls_of(call, VALUES[:count])
            ids = [*thought, *tokenizer.encode(text, add_special_tokens=False), stop[0]]
            assert holds(tokenizer, grammar, ids) == (way != "one" or count == 1), (way, text)
            message = rendering.parse(ids, TOOLS, prompt_ids=prompt, grammar=grammar)
            assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [
                ("add", value) for value in VALUES[:count]
            ]
            assert not message.malformed
        wrong = calls_of(call, [{"text": "a", "n": "x"}])
        assert not holds(tokenizer, grammar, [*thought, *tokenizer.encode(wrong, add_special_tokens=False), stop[0]])
        if way != "json":
            assert holds(tokenizer, grammar, [*thought, *spelled(tokenizer, "It is warm."), stop[0]])


@pytest.mark.parametrize("name", MODELS)
def test_a_stream_next_to_a_schema_adds_up_to_the_whole_answer(name: str) -> None:
    tokenizer, rendering, call = with_tools(name)
    if not call.rests:
        return
    stop = rendering.stop_token_ids[0]
    prompt, reasoning, _ = before_answer(tokenizer, rendering, TOOLS)
    grammar = json_grammar(
        call.forms, (stop,), trigger=call.trigger, section=call.section, otherwise=SCHEMA, reasoning=reasoning
    )
    thought = "" if reasoning == "none" else " The user wants a sum, so I call the tool for it. </think>"
    if reasoning == "possible":
        thought = f"<think>{thought}"
    for answer in (calls_of(call, VALUES[:1]), json.dumps(VALUES[1])):
        ids = [*tokenizer.encode(thought + answer, add_special_tokens=False), stop]
        for size in (len(ids), len(ids) - 9):
            sent, message = streamed(rendering, ids[:size], prompt, grammar)
            assert sent == (message.get("content") or "", message.get("reasoning_content") or "")


def streamed(rendering: Rendering, ids: list[int], prompt: Any, grammar: str) -> tuple[tuple[str, str], dict[str, Any]]:
    """The text and the reasoning of a stream's deltas, token by token, and the message of the whole answer."""
    request = ChatRequest(USER, TOOLS, None, Sampling(max_tokens=999, grammar=json.dumps(SCHEMA)))
    deltas = MessageDeltas(request, rendering)
    choice = Choice(0, prompt, int_array([]), [], [], grammar=grammar)
    sent = []
    for token in ids:
        choice.ids.append(token)
        choice.logprobs.append(0.0)
        sent += deltas.push(choice)
    whole = rendering.parse(ids, TOOLS, prompt_ids=prompt, grammar=grammar)
    message, _ = assistant_message(whole, lambda k: f"call_{k}")
    completion = Completion(int_array(ids), np.zeros(len(ids), np.float32), "stop", 0)
    sent += deltas.finish(0, Reply("", message, completion, "stop", len(prompt), 0))
    content = "".join(delta.get("content") or "" for delta in sent)
    return (content, "".join(delta.get("reasoning_content") or "" for delta in sent)), message


@pytest.mark.parametrize("force", [True, "add"], ids=["any", "named"])
@pytest.mark.parametrize("name", MODELS)
def test_a_forced_call_is_held_to_its_end_in_the_form_of_each_model(name: str, force: Any) -> None:
    tokenizer, rendering, _ = with_tools(name)
    call = rendering.forced_call(TOOLS, force)
    if not call.rests:
        assert name in OWN_ARGUMENTS
        return
    stop = rendering.stop_token_ids
    prompt = rendering.prompt(USER, TOOLS, force_tool=force)
    grammar = json_grammar(call.rests, stop)
    before, schema, after, style = call.rests[0]
    for value, fits in ((VALUES[0], True), ({"text": "a", "n": "x"}, False)):
        rest = before + arguments_as(style, value, schema) + after
        rest = rest.replace(CALL_ID, "a1B2c3D4e").replace(COUNT, ":0")
        ids = [*tokenizer.encode(rest, add_special_tokens=False), stop[0]]
        assert holds(tokenizer, grammar, ids) == fits
        if fits:
            message = rendering.parse(ids, TOOLS, forced_ids=prompt.forced_ids, prompt_ids=prompt.ids, grammar=grammar)
            assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("add", value)]
            assert (message.content, message.malformed) == ("", ())


@pytest.mark.parametrize("name", MODELS)
def test_a_second_call_that_a_stop_token_ends_is_not_all_that_the_policy_wants(name: str) -> None:
    tokenizer, rendering, call = with_tools(name)
    if not call.rests or call.trigger == "{" or not rendering.tells_calls_apart(TOOLS):
        return  # all calls are one list there, which has none of them without its end; and gemma's own form
    prompt, _, thought = before_answer(tokenizer, rendering, TOOLS)
    begin, end = call.marks
    closing = call.section[2].strip() if call.section else ""
    ids = tokenizer.encode(calls_of(call, VALUES), add_special_tokens=False)
    seen = 0
    for size in range(1, len(ids)):
        message = rendering.parse([*thought, *ids[:size], rendering.stop_token_ids[0]], TOOLS, prompt_ids=prompt)
        if len(message.tool_calls) != 1:
            continue
        rest = tokenizer.decode(ids[:size]).rpartition(end)[2].strip() if end else ""
        # White space, or the end of the section, may be all that follows the call.
        begun = bool(rest) and not closing.startswith(rest) and (call.is_text or begin in rest)
        assert message.unfinished or not begun, (size, rest)
        seen += message.unfinished
    assert seen > 8 or not end


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_of_several_calls_is_cut_behind_the_first(name: str) -> None:
    tokenizer, rendering, call = with_tools(name)
    if not call.rests or not rendering.tells_calls_apart(TOOLS) or name == "llama-3":
        return  # whose renderer reads one call
    prompt, _, thought = before_answer(tokenizer, rendering, TOOLS)
    stop = rendering.stop_token_ids[0]
    both = calls_of(call, VALUES)
    if call.trigger == "{":
        both = "; ".join(calls_of(call, [value]) for value in VALUES)
    ids = [*thought, *tokenizer.encode(both, add_special_tokens=False), stop]
    assert len(rendering.parse(ids, TOOLS, prompt_ids=prompt).tool_calls) == 2
    size = rendering.first_call_size(ids, TOOLS, prompt_ids=prompt)
    message = rendering.parse(ids[:size], TOOLS, prompt_ids=prompt)
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("add", VALUES[0])]
    assert not message.malformed
    assert not message.unfinished
    alone = [*thought, *tokenizer.encode(calls_of(call, VALUES[:1]), add_special_tokens=False), stop]
    assert rendering.first_call_size(alone, TOOLS, prompt_ids=prompt) == len(alone)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in RENDERERS])
def test_text_that_spells_control_tokens_is_text_and_real_ones_are_none(name: str) -> None:
    tokenizer, rendering = model_of(name)
    prompt, _, thought = before_answer(tokenizer, rendering, None)
    text = "It says " + " ".join(MARKS)
    stop = rendering.stop_token_ids
    control = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i not in stop]
    ids = [*thought, *spelled(tokenizer, text), *(i for i in control if tokenizer.decode([i]) not in THINKS), stop[0]]
    assert rendering.parse(ids, prompt_ids=prompt).content == text


@pytest.mark.parametrize(
    ("schema", "is_like"),
    [
        (SCHEMA, False),
        ({"type": "object"}, True),
        ({}, True),
        ({"type": "array", "items": {"type": "object"}}, False),
        ({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}, False),
        ({"type": "object", "properties": {"name": {}, "parameters": {}}}, True),
        ({"type": "object", "properties": {"name": {}, "parameters": {}, "n": {}}, "required": ["n"]}, False),
        ({"type": "object", "properties": {"n": {}}, "additionalProperties": True}, True),
        ({"anyOf": [SCHEMA, {"type": "string"}]}, False),
        ({"anyOf": [SCHEMA, {"$ref": "#/$defs/Call"}], "$defs": {"Call": {"type": "object"}}}, True),
        ({"$ref": "#/$defs/Sum", "$defs": {"Sum": SCHEMA}}, False),
    ],
)
def test_which_schemas_have_answers_that_are_like_calls_without_a_mark(schema: Any, is_like: bool) -> None:
    _, rendering = model_of("template llama31")
    call = rendering.possible_call(TOOLS)
    assert call is not None
    assert reads_as_call(schema, call) == is_like


def strict(tools: Any) -> Any:
    return [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
LIKE_A_CALL: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}


@pytest.mark.parametrize("name", [*RENDERERS, *map("template {}".format, TEMPLATE_TOKENS)])
@in_loop
async def test_what_a_request_holds_is_held_or_refused_by_name(name: str) -> None:
    tokenizer, rendering, call = with_tools(name)
    answer = json.dumps({"text": " ".join(MARKS), "n": 1}, ensure_ascii=False)
    engine = ScriptedEngine(tokenizer, [], max_context=1 << 15)
    engine.grammars = True  # type: ignore[attr-defined]
    lines: list[list[int]] = []
    engine._answer = lambda asked: lines.pop()
    async with serving(engine) as rig:
        rig.gateway.serve("policy", engine, rendering)
        attempt = await rig.attempt()
        _, _, thought = before_answer(tokenizer, rendering, TOOLS)
        line = [*thought, *spelled(tokenizer, answer), rendering.stop_token_ids[0]]
        lines.append(line)
        [choice] = (await attempt.chat(response_format=FORMAT, tools=TOOLS)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (answer, None, "stop")
        assert holds(tokenizer, engine.asked[-1].sampling.grammar, line)
        lines.append(line)
        chunks = attempt.client().chat.completions.create(
            model="m", messages=USER, stream=True, response_format=FORMAT, tools=TOOLS
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in await chunks if chunk.choices]
        assert "".join(texts) == answer
        if call.trigger == "{":
            with pytest.raises(openai.BadRequestError, match="can begin as a call does"):
                await attempt.chat(response_format=LIKE_A_CALL, tools=TOOLS)
        wishes: list[dict[str, Any]] = [{}, {"tool_choice": "required"}]
        for wish in wishes:
            if name in OWN_ARGUMENTS or (name in MARKED_TEXTS and not wish):
                with pytest.raises(openai.BadRequestError, match="cannot be held to the schema of tools"):
                    await attempt.chat(tools=strict(TOOLS), **wish)
            else:
                lines.append(line)
                await attempt.chat(tools=strict(TOOLS), **wish)
                assert json.loads(engine.asked[-1].sampling.grammar)["forms"]
        assert not lines
        await attempt.close()


@pytest.mark.parametrize("holds_to", [True, False], ids=["held", "free"])
@pytest.mark.parametrize(
    "name", ["kimi-k2", "glm-4.5", "gemma4", "inkling", "minimax-m2", *map("template {}".format, TEMPLATE_TOKENS)]
)
@in_loop
async def test_parallel_calls_that_an_agent_does_not_want_are_not_made(name: str, holds_to: bool) -> None:
    tokenizer, rendering, call = with_tools(name)
    one = '<|tool_call>call:add{n:7,text:<|"|>a<|"|>}<tool_call|>'
    if call.rests:
        one, both = calls_of(call, VALUES[:1]), calls_of(call, VALUES)
    else:
        both = one + one
    both = "; ".join([one, one]) if call.trigger == "{" else both
    stop = rendering.stop_token_ids[0]
    _, _, thought = before_answer(tokenizer, rendering, TOOLS)
    line = [*thought, *tokenizer.encode(both, add_special_tokens=False), stop]
    engine = ScriptedEngine(tokenizer, [line])
    engine.grammars = holds_to  # type: ignore[attr-defined]
    async with serving(engine) as rig:
        rig.gateway.serve("policy", engine, rendering)
        attempt = await rig.attempt()
        if not rendering.tells_calls_apart(TOOLS) and not holds_to:
            with pytest.raises(openai.BadRequestError, match="parallel_tool_calls: false cannot be held"):
                await attempt.chat(tools=TOOLS, parallel_tool_calls=False)
            await attempt.close()
            return
        [choice] = (await attempt.chat(tools=TOOLS, parallel_tool_calls=False)).choices
        [recorded] = await attempt.close()
    if grammar := engine.asked[-1].sampling.grammar:
        assert not rendering.tells_calls_apart(TOOLS)
        assert not holds(tokenizer, grammar, line)
        assert holds(tokenizer, grammar, [*thought, *tokenizer.encode(one, add_special_tokens=False), stop])
        return
    assert len(choice.message.tool_calls or ()) == 1
    assert choice.finish_reason == "tool_calls"
    assert 0 < recorded.response_ids.size < len(line)
    assert recorded.response_ids.tolist() == line[: recorded.response_ids.size]
    assert recorded.logprobs.size == recorded.response_ids.size


OTHER_THOUGHTS = {"gemma4", "hy3", "inkling", "llama-3"}
"""Renderers without `<think>`: it has other marks there, or there is none."""


@pytest.mark.parametrize("name", RENDERERS)
@in_loop
async def test_reasoning_is_streamed_as_it_comes(name: str) -> None:
    tokenizer, rendering = model_of(name)
    _, reasoning, thought = before_answer(tokenizer, rendering, None)
    words = "\n  First one thing,\n\nthen another, and then a third one. \n"
    begin = [] if reasoning == "open" else tokenizer.encode("<think>", add_special_tokens=False)
    end = tokenizer.encode("</think>", add_special_tokens=False)
    line = [*begin, *spelled(tokenizer, words), *end, *spelled(tokenizer, "\n\nDone."), rendering.stop_token_ids[0]]
    assert bool(thought) == (reasoning == "open")
    engine = ScriptedEngine(tokenizer, [line], seconds=0.0005)
    async with serving(engine) as rig:
        rig.gateway.serve("policy", engine, rendering)
        attempt = await rig.attempt()
        stream = await attempt.client().chat.completions.create(model="m", messages=USER, stream=True)  # type: ignore[arg-type]
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        whole = (await attempt.chat(USER)).choices[0].message
        await attempt.close()
    thoughts = [text for delta in deltas if (text := getattr(delta, "reasoning_content", None))]
    assert "".join(thoughts) == (getattr(whole, "reasoning_content", None) or "")
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    assert len(thoughts) > 5 or name in OTHER_THOUGHTS
