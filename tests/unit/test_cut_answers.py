"""Why an answer ended, in every API, whole and streamed: one that was cut says so wherever it was cut, and by what; a
whole one, and one that a stop text of the agent's has ended, never do."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from four_apis import APIS, NAMES, QUESTION, TOOLS, Answer, clients
from scripted import Asked, ScriptedEngine, in_loop, rendering_of, serving
from tiny_tokenizers import TEMPLATE_TOKENS, package_tokenizer, template_tokenizer

from agl.trainer.rendering.rendering import Rendering

TEMPLATES = ("qwen25", "qwen3", "qwen35", "llama31", "mistral_v3", "mistral_tekken")
"""All forms of tool calls; qwen3 and qwen35 think."""


def _calls(n: int) -> list[dict[str, Any]]:
    made = [{"name": name, "arguments": '{"city": "Ulm"}'} for name in NAMES[:n]]
    return [{"id": f"call{i:05}", "type": "function", "function": call} for i, call in enumerate(made)]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The SDKs, which take seconds to import, outside of the time that a test has."""
    import anthropic  # noqa: F401
    import google.genai  # noqa: F401
    import openai  # noqa: F401


_PAIR = ("two calls", "thinking and two calls")

MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"content": "It is warm."},
    "thinking": {"content": "It is warm.", "reasoning_content": "Let me see."},
    "a call": {"content": "", "tool_calls": _calls(1)},
    "two calls": {"content": "", "tool_calls": _calls(2)},
    "thinking and two calls": {"content": "", "reasoning_content": "Let me see.", "tool_calls": _calls(2)},
}


@functools.cache
def answer_ids(template: str, kind: str) -> tuple[int, ...]:
    """A whole answer as a policy of this template samples it, with its stop token."""
    tokenizer = template_tokenizer(template)
    if template == "llama31" and kind in _PAIR:  # whose template writes one call
        calls = (f'{{"name": "{name}", "parameters": {{"city": "Ulm"}}}}' for name in NAMES)
        return (*tokenizer.encode("; ".join(calls), add_special_tokens=False), tokenizer.eos_token_id)
    rendering = rendering_of(tokenizer)
    asked, message = [{"role": "user", "content": QUESTION}], {"role": "assistant", **MESSAGES[kind]}
    return tuple(rendering.response(rendering.prompt(asked, TOOLS).ids, asked, message, TOOLS).tolist())


async def ask(
    template: str, lines: list[tuple[list[int], int]], renderer: str | None = None
) -> list[dict[str, Answer]]:
    """Each line, cut after so many tokens, as each API has it, whole and streamed."""
    current: list[int] = []

    def script(_: Asked) -> list[int]:
        return current

    tokenizer, found = package_tokenizer() if renderer else template_tokenizer(template), []
    engine = ScriptedEngine(tokenizer, script)
    async with serving(engine, template_tokenizer(template)) as rig:
        rig.gateway.serve("policy", engine, Rendering(tokenizer, renderer=renderer))
        attempt = await rig.attempt()
        async with clients(attempt) as of:
            for line, most in lines:
                current[:] = line
                ways = [(api, stream) for api in APIS for stream in (False, True)]
                answers = [(api, stream, await APIS[api](of[api], stream, most, True)) for api, stream in ways]
                found.append({f"{api}{' streamed' if stream else ''}": answer for api, stream, answer in answers})
    return found


@pytest.mark.parametrize("name", ["kimi-k2", "deepseek-v3", "deepseek-v4", "inkling", "glm-4.5", "agl_hermes"])
@in_loop
async def test_a_second_call_that_the_policy_ends_early_is_cut(name: str) -> None:
    """Where a parser leaves its beginning out, or reads it as text."""
    renderer = None if name in TEMPLATE_TOKENS else name
    tokenizer = package_tokenizer() if renderer else template_tokenizer(name)
    rendering = Rendering(tokenizer, renderer=renderer)
    call = rendering.possible_call(TOOLS)
    assert call is not None
    ids, stop = tokenizer.encode(call.pair, add_special_tokens=False), rendering.stop_token_ids[0]
    begin, _ = call.marks
    second = call.pair.rindex(begin)

    def sampled(length: int) -> list[int]:
        """Tokens until the text is so long, and the stop token."""
        size = next(n for n in range(len(ids)) if len(tokenizer.decode(ids[:n])) >= length)
        return [*ids[:size], stop]

    lines = [sampled(second + n) for n in (3, len(begin), len(begin) + 4)]
    found = await ask("chatml" if renderer else name, [(line, len(line)) for line in lines], renderer)
    for line, answers in zip(lines, map(ends, found), strict=True):
        assert answers == dict.fromkeys(answers, "cut"), tokenizer.decode(line)


def ends(answers: dict[str, Answer]) -> dict[str, str]:
    return {way: answer.end for way, answer in answers.items()}


def _ended_early(template: str, kind: str) -> list[int]:
    """An answer that a stop token ends within its second call."""
    *ids, stop = answer_ids(template, kind)
    text = template_tokenizer(template).decode
    named = next(n for n in range(len(ids)) if NAMES[1][:5] in text(ids[:n]))
    return [*ids[: named + 1], stop]


@pytest.mark.parametrize("cuts", [1, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("template", TEMPLATES)
@in_loop
async def test_an_answer_that_is_cut_anywhere_says_so(template: str, cuts: int) -> None:
    """After any token; or by the policy's stop token within its second call: no API has one call, and the beginning of
    another as text, as all that the policy wants."""
    dice = random.Random(f"{template} {cuts}")
    whole = {kind: [*answer_ids(template, kind)] for kind in MESSAGES}
    cut = [(ids, n) for ids in whole.values() for n in dice.sample(range(1, len(ids)), cuts)]
    early = [(ids, len(ids)) for ids in (_ended_early(template, kind) for kind in _PAIR)]
    lines = [*cut, *early, *((ids, len(ids)) for ids in whole.values())]
    found = [ends(answers) for answers in await ask(template, lines)]
    for (ids, n), answers in zip(cut, found, strict=False):
        assert answers == dict.fromkeys(answers, "cut"), (n, ids)
    # Forms that have all calls in one list have none where it has no end: then all of it is a text.
    in_a_list = template in ("llama31", "mistral_v3")
    for (ids, n), answers in zip(early, found[len(cut) :], strict=False):
        assert answers == dict.fromkeys(answers, "stop" if in_a_list else "cut"), (n, ids)
    for kind, answers in zip(whole, found[-len(whole) :], strict=True):
        assert answers == dict.fromkeys(answers, "calls" if "call" in kind else "stop"), kind


REASONS = {
    "chat": ("length", "length"),
    "responses": ("max_output_tokens", "max_output_tokens"),
    "messages": ("max_tokens", "model_context_window_exceeded"),
    "google": ("MAX_TOKENS", "MAX_TOKENS"),
}
"""API -> its words for an answer that was cut at the most tokens of its request, and at the end of the context."""


@pytest.mark.parametrize("template", TEMPLATES)
@in_loop
async def test_what_cut_an_answer_has_the_words_of_its_api(template: str) -> None:
    dice = random.Random(template)
    current: list[int] = []

    def script(_: Asked) -> list[int]:
        return current

    tokenizer = template_tokenizer(template)
    engine = ScriptedEngine(tokenizer, script)
    async with serving(engine, tokenizer) as rig:
        attempt = await rig.attempt()
        async with clients(attempt) as of:
            for kind in MESSAGES:
                current[:] = answer_ids(template, kind)
                for api, (at_most, at_context) in REASONS.items():
                    engine.max_context = 4096
                    await APIS[api](of[api], False, len(current), True)
                    room = dice.randrange(1, len(current))
                    engine.max_context = engine.asked[-1].prompt_ids.size + room
                    for stream in (False, True):
                        filled = await APIS[api](of[api], stream, room + 1, True)
                        assert (filled.reason, filled.end) == (at_context, "cut"), (kind, api, room)
                        # Its last token is the last one that was asked for, too.
                        cut = await APIS[api](of[api], stream, room, True)
                        assert (cut.reason, cut.end) == (at_most, "cut"), (kind, api, room)


def _stopped(template: str, ids: list[int], stop: str) -> list[int]:
    """An answer up to the token that completes a stop text, as an engine ends it."""
    text = rendering_of(template_tokenizer(template)).decode
    return next(ids[:n] for n in range(1, len(ids) + 1) if stop in text(ids[:n]))


@pytest.mark.parametrize("template", TEMPLATES)
@in_loop
async def test_an_answer_that_a_stop_text_ends_anywhere_says_so(template: str) -> None:
    """In the thoughts, the text, or any call, of which those before are whole."""
    dice = random.Random(template)
    current: list[int] = []

    def script(_: Asked) -> list[int]:
        return current

    tokenizer = template_tokenizer(template)
    within_second = False
    async with serving(ScriptedEngine(tokenizer, script), tokenizer) as rig:
        attempt = await rig.attempt()
        async with clients(attempt) as of:
            for kind in MESSAGES:
                whole = [*answer_ids(template, kind)]
                *ids, _ = whole
                text = rendering_of(tokenizer).decode(ids)
                places = dice.sample(range(len(text) - 3), 3)
                # The second call's name, which the first has not.
                places += [text.index(NAMES[1])] if kind in _PAIR else []
                for stop in (text[at : at + 3] for at in places):
                    current[:] = _stopped(template, ids, stop)
                    for api in ("chat", "messages", "google"):
                        pair = [await APIS[api](of[api], stream, len(whole), True, stop) for stream in (False, True)]
                        said = [(answer.text, answer.reasoning, answer.calls) for answer in pair]
                        assert said[0] == said[1], (kind, api, stop)
                        assert stop not in said[0][0] + said[0][1], (kind, api, stop)
                        for answer in pair:
                            reasons = {
                                "chat": "tool_calls" if answer.calls else "stop",
                                "messages": "stop_sequence",
                                "google": "STOP",
                            }
                            assert answer.reason == reasons[api], (kind, stop)
                            assert answer.stop_text == (stop if api == "messages" else None)
                            within_second |= len(answer.calls) == 1 and kind in _PAIR
    # Forms that have all calls in one list have none where it has no end.
    assert within_second == (template not in ("llama31", "mistral_v3"))
