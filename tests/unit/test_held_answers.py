"""An answer that is held to a schema is JSON of it, whatever the policy samples, the template and the vocabulary."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from scripted import in_loop, serving
from tiny_tokenizers import CHATML, TAGS, TEMPLATES, package_tokenizer, tiny_tokenizer

pytest.importorskip("llguidance")

from agl.trainer.engines.base import Completion, OnTokens, Request
from agl.trainer.local.grammar import Grammars
from agl.trainer.rendering.rendering import Rendering

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["add", "sub"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
THINKS = ("<think>", "</think>")
CHAT = (TEMPLATES / "chatml.jinja").read_text()
GENERATION = "<|im_start|>assistant\\n"
SOURCES = {
    "no thought": CHAT,
    "thoughts": (TEMPLATES / "qwen3.jinja").read_text(),
    "a thought begun": "{#- reasoning_content -#}" + CHAT.replace(GENERATION, GENERATION + "<think>\\n"),
    "a thought ended": CHAT.replace(GENERATION, GENERATION + "<think>\\n\\n</think>\\n\\n"),
    "tools without thoughts": (TEMPLATES / "qwen25.jinja").read_text(),
}


class RandomEngine:
    """Samples any token that the grammar allows; the marks of thoughts more often, as tokens and spelled in letters."""

    max_context, grammars = 2048, True

    def __init__(self, tokenizer: Any, seed: str) -> None:
        self._grammars, self._dice = Grammars(tokenizer, len(tokenizer)), random.Random(seed)
        self._marks = [tokenizer.encode(mark, add_special_tokens=False) for mark in THINKS]
        self._marks += [[i for c in mark for i in tokenizer.encode(c, add_special_tokens=False)] for mark in THINKS]
        self.thoughts = 0

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        matcher, ids = self._grammars.matcher(request.sampling.grammar), []
        while not ids or ids[-1] not in request.sampling.stop_token_ids:
            mark = self._dice.choice(self._marks)
            if self._dice.random() < 0.2 and matcher.validate_tokens(mark) == len(mark):
                self.thoughts += 1
                new = mark
            else:
                words = self._grammars.bits([matcher])[0]
                allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
                new = [int(self._dice.choice(allowed))]
            ids += new
            assert new[0] in request.sampling.stop_token_ids or matcher.consume_tokens(new)
        return Completion(np.int32(ids), np.zeros(len(ids), np.float32), "stop", 0)


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("source", SOURCES)
@in_loop
async def test_an_answer_that_is_held_to_a_schema_is_json_of_it(source: str, marked: bool, tools: bool) -> None:
    marks = [tag for tag in TAGS if marked or tag not in THINKS]
    tokenizer = tiny_tokenizer((*CHATML, *marks), "<|im_end|>", SOURCES[source])
    if tools and Rendering(tokenizer).tools_refusal:
        return
    await _ask(tokenizer, source, Rendering(tokenizer), tools, thinks=marked and source == "thoughts")


@in_loop
async def test_an_answer_has_its_properties_in_the_order_that_google_is_asked_for() -> None:
    tokenizer = tiny_tokenizer(CHATML, "<|im_end|>", CHAT)
    properties = {name: {"type": "BOOLEAN"} for name in ("a", "b", "c")}
    schema = {"type": "OBJECT", "properties": properties, "required": [*properties], "propertyOrdering": ["c", "a"]}
    form = {"responseMimeType": "application/json", "responseSchema": schema}
    body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "generationConfig": form}
    async with serving(RandomEngine(tokenizer, "order"), tokenizer) as rig:
        attempt = await rig.attempt()
        url = attempt.url().removesuffix("/v1") + "/v1beta/models/m:generateContent"
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(url, json=body, headers={"x-goog-api-key": attempt.key})
    [part] = answer.json()["candidates"][0]["content"]["parts"]
    assert [*json.loads(part["text"])] == ["c", "a", "b"]


@pytest.mark.parametrize("renderer", ["qwen3", "qwen3.5", "llama-3", "deepseek-v3"])
@in_loop
async def test_an_answer_by_a_hand_written_renderer_is_json_of_its_schema(renderer: str) -> None:
    tokenizer = package_tokenizer()
    await _ask(tokenizer, renderer, Rendering(tokenizer, renderer=renderer), False, thinks=renderer != "llama-3")


async def _ask(tokenizer: Any, seed: str, rendering: Rendering, tools: bool, *, thinks: bool) -> None:
    engine = RandomEngine(tokenizer, seed)
    async with serving(engine) as rig:
        rig.gateway.serve("policy", engine, rendering)
        attempt = await rig.attempt()
        reasoned = 0
        for _ in range(12):
            [choice] = (await attempt.chat(response_format=FORMAT, **({"tools": TOOLS} if tools else {}))).choices
            reasoned += bool(getattr(choice.message, "reasoning_content", None))
            calls = choice.message.tool_calls or ()
            for text in [call.function.arguments for call in calls] or [choice.message.content]:
                jsonschema.validate(json.loads(text), SCHEMA)
            assert not (calls and choice.message.content)
    assert bool(reasoned) == (thinks or "begun" in seed)
    assert reasoned or not engine.thoughts
