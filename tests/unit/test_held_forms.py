"""What an answer is held to, and how it is read, for every renderer of the package and every chat template."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
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

from agl.trainer.engines.base import json_grammar
from agl.trainer.local.grammar import Grammars
from agl.trainer.rendering.package_renderer import known_renderers
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import CALL_ID, COUNT, ForcedCall

NEEDS_DOWNLOAD = {"gpt-oss"}
OWN_ARGUMENTS = {"gemma4"}
"""Renderers whose models write arguments in a form that is neither JSON nor elements."""
MARKED_TEXTS = {"inkling"}
"""Renderers whose models write texts in the mark that begins a call, too."""
MODELS = [
    *(name for name in known_renderers() if name not in NEEDS_DOWNLOAD | {"default"}),
    *(f"template {name}" for name in TEMPLATE_TOKENS),
    *(f"published {name}" for name in published_templates()),
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


def before_answer(tokenizer: Any, rendering: Rendering, tools: Any) -> tuple[Any, str, list[int]]:
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
    if call.is_array:
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
    ways = {"json": {"otherwise": SCHEMA}} | ({"free": {}, "one": {"several": False}} if call.is_text else {})
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
