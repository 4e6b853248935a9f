"""Whatever a request's grammar allows, the parser reads: as many calls as there are, each with arguments that fit.

Answers are drawn at random within the grammar that the gateway makes, for every renderer of the package and every chat
template; marks, halves of marks, whole and spoilt calls come more often than chance would have them.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from test_held_forms import MODELS, USER, arguments_as, model_of, spelled
from tiny_tokenizers import CHATML, TAGS, template_tokenizer, tiny_tokenizer
from tokenizers import AddedToken

pytest.importorskip("llguidance")

from agl.errors import ConfigError
from agl.trainer.engines.base import Sampling, json_grammar
from agl.trainer.gateway.calls import ChatRequest, ServedPolicy
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.grammars import grammar_of, is_strict
from agl.trainer.local.grammar import Grammars
from agl.trainer.local.lark import Lark
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import CALL_ID, COUNT, ForcedCall

PARAMETERS: Any = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "kind": {"type": "string", "enum": ["a<b", "</tool", "x\ny"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["text", "n"],
}
NAMES = ("zqadd", "zqsub")
ANSWER: Any = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "m": {"type": "integer"}},
    "required": ["text", "m"],
}
VALUES: list[dict[str, Any]] = [{"text": "b\nc", "n": 3}, {"text": "", "n": -4}, {"text": "d", "n": 50}]
SPOILT = [
    '{"name": "other", "arguments": {"text": 3}}',
    '<tool_call>\n{"name": "other", "arguments": {"n": "x"}}\n</tool_call>',
    "<tool_call>\n<function=other>\n<parameter=n>\nx\n</parameter>\n</function>\n</tool_call>",
    '[TOOL_CALLS] [{"name": "other", "arguments": {"text": 3}}]', "<function=other>", "<parameter=n>", "</parameter>",
    "<|python_tag|>", "<think>", "</think>", '<|"|>', "call:other{n:7",
]  # fmt: skip
"""Calls that no grammar allows, and parts of them."""
PARTS = [
    '"}',
    '"',
    '", ',
    '", "n": 7',
    "\n",
    "\t",
    "<",
    "</",
    "{",
    "}",
    " ",
    "[",
    "]",
    ", ",
    ";",
    '"text": "',
    "a:",
    "3",
]
LONGEST = 200


def tools(*, strict: bool) -> Any:
    functions = [{"name": name, "parameters": PARAMETERS} | ({"strict": True} if strict else {}) for name in NAMES]
    return [{"type": "function", "function": function} for function in functions]


def sampling(schema: Any = None) -> Sampling:
    return Sampling(max_tokens=999, grammar="" if schema is None else json.dumps(schema))


REQUESTS = {
    "a schema": ChatRequest(USER, None, None, sampling(ANSWER)),
    "a schema next to tools": ChatRequest(USER, tools(strict=False), None, sampling(ANSWER)),
    "a schema next to one strict call": ChatRequest(USER, tools(strict=True), None, sampling(ANSWER), one_call=True),
    "strict calls": ChatRequest(USER, tools(strict=True), None, sampling()),
    "one strict call": ChatRequest(USER, tools(strict=True), None, sampling(), one_call=True),
    "one call": ChatRequest(USER, tools(strict=False), None, sampling(), one_call=True),
    "any forced call": ChatRequest(USER, tools(strict=True), True, sampling()),
    "a forced call": ChatRequest(USER, tools(strict=False), "zqadd", sampling()),
}


def held(rendering: Rendering, request: ChatRequest) -> tuple[Any, str]:
    """The prompt of a request and the grammar of its answers; "" where it is refused or holds answers to nothing."""
    served = ServedPolicy("policy", None, rendering, rendering.stop_token_ids)  # type: ignore[arg-type]
    try:
        prompt = rendering.prompt(USER, request.tools, force_tool=request.force_tool)
        return prompt, grammar_of(request, served, prompt.ids)
    except (RequestError, ConfigError):
        return None, ""


def written(call: ForcedCall, values: dict[str, Any]) -> str:
    """The text of a call of the first tool, without the texts of a section."""
    before, _, after, style = call.forms[0]
    text = before + arguments_as(style, values, PARAMETERS) + after
    return text.replace(CALL_ID, "a1B2c3D4e").replace(COUNT, ":1")


def pieces_of(tokenizer: Any, call: ForcedCall | None) -> list[list[int]]:
    """What an answer is likely to be made of."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    marks = [token.content for token in tokenizer.added_tokens_decoder.values()]
    pieces = [piece for mark in marks for piece in (ids(mark), spelled(tokenizer, mark))]
    pieces += [piece for text in SPOILT for piece in (ids(text), spelled(tokenizer, text))] * 3
    pieces += [ids(text) for text in PARTS] * 6
    if call is not None and call.rests:
        style, after = call.forms[0][3], call.forms[0][2]
        for values in VALUES:
            arguments = arguments_as(style, values, PARAMETERS)
            pieces += [ids(text) for text in (written(call, values), arguments, arguments + after)] * 6
        texts = [*(call.section or ()), *(style if len(style) == 4 else ())]
        pieces += [ids(text) for text in texts if text] * 8
    return pieces


def drawn(
    tokenizer: Any, matcher: Any, grammars: Grammars, stop: tuple[int, ...], pieces: Any, dice: random.Random
) -> list[int] | None:
    """An answer within a grammar, with the token that ends it; None for one that gets too long."""
    ids: list[int] = []
    thought = tokenizer.encode("</think>", add_special_tokens=False)
    if dice.random() < 0.8 and matcher.validate_tokens(thought) == len(thought):
        ids += thought
        matcher.consume_tokens(thought)
    while len(ids) < LONGEST:
        piece = dice.choice(pieces)
        fits = matcher.validate_tokens(piece)
        if dice.random() < 0.55 and fits and not {*piece[:fits]} & {*stop}:
            ids += piece[:fits]
            assert matcher.consume_tokens(piece[:fits])
            continue
        bits = grammars.bits([matcher])[0]
        allowed = [int(token) for token in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))]
        ends = [token for token in allowed if token in stop]
        others = [token for token in allowed if token not in stop]
        if ends and (not others or len(ids) > LONGEST // 2 or dice.random() < 0.3):
            return [*ids, ends[0]]
        ids.append(dice.choice(others))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    return None


def names_in(text: str) -> int:
    return sum(map(text.count, NAMES))


def check(rendering: Rendering, request: ChatRequest, grammar: str, prompt: Any, ids: list[int]) -> None:
    """Fail where the parser reads an answer otherwise than its grammar means it."""
    message = rendering.parse(ids, request.tools, forced_ids=prompt.forced_ids, prompt_ids=prompt.ids, grammar=grammar)
    text = rendering.decode([*prompt.forced_ids.tolist(), *ids])
    assert (message.malformed, message.unfinished) == ((), False), text
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    form = rendering.possible_call(request.tools) if request.tools else None
    if form is not None:
        in_calls = form.forms[0][0].count(NAMES[0]) * len(calls)
        in_texts = sum(map(names_in, (message.content, message.reasoning or "", *map(repr, calls)))) - len(calls)
        assert names_in(text) == in_calls + in_texts, text
        assert {name for name, _ in calls} <= {*NAMES}
    if is_strict(request.tools) or (request.force_tool and form is not None and form.rests):
        for _, arguments in calls:
            jsonschema.validate(arguments, PARAMETERS)
    if request.one_call:
        assert len(calls) <= 1, text
    if request.force_tool:
        assert (len(calls), message.content) == (1, ""), text
    if request.sampling.grammar:
        assert not (calls and message.content), text
        if not calls:
            jsonschema.validate(json.loads(message.content), ANSWER)


def hold(name: str, count: int) -> None:
    tokenizer, rendering = model_of(name)
    grammars = Grammars(tokenizer, len(tokenizer))
    seen = 0
    for way, request in REQUESTS.items():
        if request.tools and rendering.tools_refusal:
            continue
        prompt, grammar = held(rendering, request)
        if not grammar:
            continue
        call = rendering.possible_call(request.tools) if request.tools else None
        pieces = pieces_of(tokenizer, call)
        for k in range(count):
            dice = random.Random(f"{way} {k}")
            ids = drawn(tokenizer, grammars.matcher(grammar), grammars, rendering.stop_token_ids, pieces, dice)
            if ids is not None:
                check(rendering, request, grammar, prompt, ids)
                seen += 1
    assert seen > 1


@pytest.mark.parametrize("name", MODELS)
def test_what_a_grammar_allows_is_what_the_parser_reads(name: str) -> None:
    hold(name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_a_grammar_allows_is_what_the_parser_reads_in_many_answers(name: str) -> None:
    hold(name, 150)


@pytest.mark.parametrize("name", MODELS)
def test_as_many_calls_are_read_as_an_answer_may_have(name: str) -> None:
    tokenizer, rendering = model_of(name)
    if rendering.tools_refusal:
        return
    request = REQUESTS["a schema next to tools"]
    prompt, grammar = held(rendering, request)
    call = rendering.possible_call(request.tools)
    assert call is not None
    assert grammar
    if not call.rests:
        return  # the calls of a form that is held to no schema are drawn above
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(grammar)
    thought = "</think>" if rendering.reasoning(prompt.ids) == "open" else ""
    most = 0
    for count in range(1, len(VALUES) + 1):
        texts = [written(call, values) for values in VALUES[:count]]
        if call.section:
            text = call.section[0] + call.section[1].join(texts) + call.section[2]
        elif texts[0].startswith("[TOOL_CALLS] ["):
            opening = "[TOOL_CALLS] ["
            text = opening + ", ".join(one.removeprefix(opening).removesuffix("]") for one in texts) + "]"
        else:
            text = ("\n" if call.is_text else "").join(texts)
        ids = [*tokenizer.encode(thought + text, add_special_tokens=False), rendering.stop_token_ids[0]]
        if matcher.validate_tokens(ids) < len(ids):
            continue
        message = rendering.parse(ids, request.tools, prompt_ids=prompt.ids, grammar=grammar)
        assert [json.loads(one.arguments) for one in message.tool_calls] == VALUES[:count]
        assert (message.content, message.malformed) == ("", ())
        most = count
    assert most == (len(VALUES) if rendering.reads_several_calls else 1)


@pytest.mark.parametrize("name", ["template qwen3", "template chatml", "template qwen35", "template mistral_v3"])
def test_a_text_before_a_call_hides_it_nowhere(name: str) -> None:
    tokenizer, rendering = model_of(name)
    request = REQUESTS["strict calls"]
    prompt, grammar = held(rendering, request)
    call = rendering.possible_call(request.tools)
    assert call is not None
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(grammar)
    thought = "</think>" if rendering.reasoning(prompt.ids) == "open" else ""
    ending = [*tokenizer.encode(written(call, VALUES[0]), add_special_tokens=False), rendering.stop_token_ids[0]]
    seen = 0
    texts = ("It is warm. ", "<think>", "\n\t<think>so", "\x1c<think>", "<tool_call>x", "[TOOL_CALLS]0", "<", "</thi")
    for before in texts:
        begun = tokenizer.encode(thought, add_special_tokens=False)
        ids = [*begun, *spelled(tokenizer, before), *ending]
        if matcher.validate_tokens(ids) == len(ids):
            check(rendering, request, grammar, prompt, ids)
            assert len(rendering.parse(ids, request.tools, prompt_ids=prompt.ids).tool_calls) == 1, before
            seen += 1
    assert seen >= 3


def test_a_list_in_an_element_does_not_spell_its_end() -> None:
    tokenizer, rendering = model_of("template qwen35")
    request = REQUESTS["any forced call"]
    _, grammar = held(rendering, request)
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(grammar)
    for tag, fits in (("a</parameter>b", False), ("a<b, <<c<", True)):
        arguments = arguments_as("xml", VALUES[0], PARAMETERS)
        tags = f'<parameter=tags>\n["{tag}"]\n</parameter>\n'
        before, _, after, _ = rendering.forced_call(request.tools, True).rests[0]
        ids = [*spelled(tokenizer, before + arguments + tags), *tokenizer.encode(after, add_special_tokens=False)]
        assert (matcher.validate_tokens(ids) == len(ids)) == fits


# -- names and values that no answer can spell ------------------------------------------------------------------------


def places_for(text: str) -> dict[str, Any]:
    """Schemas that each have a text in another place."""
    return {
        "const": {"properties": {"k": {"const": text}}},
        "enum": {"properties": {"k": {"type": "string", "enum": ["a", text]}}},
        "in a value": {"properties": {"k": {"const": {"a": [f"so {text} it is"]}}}},
        "name": {"properties": {text: {"type": "integer"}}},
        "nested name": {"properties": {"k": {"type": "array", "items": {"properties": {f"a{text}": {}}}}}},
        "required": {"required": [text]},
        "pattern": {"properties": {"k": {"type": "string", "pattern": f"^{text}+$"}}},
    }


@pytest.mark.parametrize("strict", [False, True], ids=["answer", "call"])
@pytest.mark.parametrize(("name", "mark"), [
    ("template qwen25", "<tool_call>"), ("template qwen25", "<im_end>"), ("template qwen25", "<|im_end|>"),
    ("template qwen3", "</think>"), ("template qwen35", "<|im_end|>"), ("template llama31", "<|eot_id|>"),
    ("glm-4.5", "<arg_key>"), ("inkling", "<|end_message|>"),
])  # fmt: skip
def test_a_name_or_value_with_a_mark_of_the_model_is_refused_by_name(name: str, mark: str, strict: bool) -> None:
    tokenizer, rendering = model_of(name)
    is_mark = mark in tokenizer.get_added_vocab()
    for place, schema in places_for(mark).items():
        schema = {"type": "object", "additionalProperties": False, **schema}
        if strict:
            call = rendering.forced_call([{"function": {"name": "zqadd", "parameters": schema}}], True)
            grammar = json_grammar(call.rests, rendering.stop_token_ids)
        else:
            grammar = json_grammar([("", schema, "")], rendering.stop_token_ids)
        if not is_mark or (place == "pattern" and "|" in mark):
            continue
        with pytest.raises(ConfigError, match="the model's mark") as caught:
            Grammars(tokenizer, len(tokenizer)).matcher(grammar)
        assert mark in caught.value.message
        assert (caught.value.where["form"], caught.value.where["schema"][0]) == (0, "$")  # type: ignore[index]


@pytest.mark.parametrize("text", ["<tool_call", "im_end|>", "tool_call", "<", "</", "a<b>c", "foo"])
def test_a_name_or_value_that_is_no_mark_is_held(text: str) -> None:
    tokenizer = template_tokenizer("qwen25")
    for place, part in places_for(text).items():
        if place in ("required", "pattern"):
            continue
        grammar = json_grammar([("", {"type": "object", "additionalProperties": False, **part}, "")], [308])
        Grammars(tokenizer, len(tokenizer)).matcher(grammar)


@pytest.mark.parametrize(("what", "text"), [("name", "a>b"), ("name", "a\nb"), ("const", "a</parameter>b")])
def test_what_ends_an_element_is_in_no_name_or_value_of_it(what: str, text: str) -> None:
    tokenizer, rendering = model_of("template qwen35")
    schema = {"type": "object", **places_for(text)[what]}
    call = rendering.forced_call([{"function": {"name": "zqadd", "parameters": schema}}], True)
    with pytest.raises(ConfigError, match="ends it where the model writes arguments as elements"):
        Grammars(tokenizer, len(tokenizer)).matcher(json_grammar(call.rests, rendering.stop_token_ids))
    Grammars(tokenizer, len(tokenizer)).matcher(json_grammar([("", schema, "")], rendering.stop_token_ids))


def test_the_marks_are_the_tokens_that_llguidance_spells_in_no_text() -> None:
    tokenizer = tiny_tokenizer((*CHATML, *TAGS), "<|im_end|>", "x")
    added = (("foo", False), ("   ", False), ("<bar>", False), ("[baz]", False), ("[qux]", True), ("<a b>", False))
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])
    prepared = Grammars(tokenizer, len(tokenizer))._prepare((2,))
    special = {text for text, token in tokenizer.get_added_vocab().items() if prepared.is_special_token(token)}
    assert special == {*Lark(tokenizer)._marks}
    assert {"<bar>", "[qux]", "<a b>"} <= special
    assert not {"foo", "   ", "[baz]"} & special
