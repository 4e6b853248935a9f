"""Text and reasoning are streamed in pieces as they are sampled, nothing sent is withdrawn, a stop text is never shown,
and log-probs are those of the text."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_rendering import TOOLS, rendering
from tiny_tokenizers import package_tokenizer, template_tokenizer

from agl.mdp.types import int_array
from agl.trainer.engines.base import Completion, Sampling
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, assistant_message, cut_at_stop
from agl.trainer.gateway.dialects.content_tokens import content_logprobs
from agl.trainer.gateway.dialects.deltas import MessageDeltas
from agl.trainer.rendering.package_renderer import known_renderers
from agl.trainer.rendering.rendering import Rendering

PIECES = [
    "<think>", "</think>", "<thi", "</thi", "\n", " ", "Hm", "the sum is", "é漢", "👩‍🚀", "STOP", "ST", "<", "\n\n",
    '<tool_call>\n{"name": "lookup", "arguments": {"expression": "x"}}\n</tool_call>', "<tool_call>",
]  # fmt: skip
DRAFTED = f"<think>\n{PIECES[-2]}</think>\n\nDone."
"""A call within a thought."""
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=10).map("".join)
THOUGHT = st.tuples(TEXTS, TEXTS).map("<think>\n{0[0]}</think>\n\n{0[1]}".format)
SPELLED = "spelled:qwen3"
"""A template with reasoning, and a tokenizer that has no token for its marks."""
TEMPLATES = ["chatml", "qwen3", "qwen35", "llama31"]
RENDERERS = [name for name in known_renderers() if name not in ("default", "gpt-oss")]
"""gpt-oss downloads its encoding."""
USER: dict[str, Any] = {"role": "user", "content": "hi"}


@functools.cache
def model_of(name: str) -> Rendering:
    kind, _, name = name.partition(":")
    if kind == "spelled":
        tokenizer = copy.deepcopy(template_tokenizer("chatml"))
        tokenizer.chat_template = template_tokenizer(name).chat_template
        return Rendering(tokenizer)
    return rendering(name) if kind == "template" else Rendering(package_tokenizer(), renderer=name)


def until_stop(model: Rendering, ids: list[int], stop: tuple[str, ...]) -> list[int]:
    """The tokens that an engine samples: up to the one that completes a stop text, or with the one that ends a turn."""
    for n in range(1, len(ids) + 1):
        if any(text in model.decode(ids[:n]) for text in stop):
            return ids[:n]
    return [*ids, model.stop_token_ids[0]]


def streamed(
    model: Rendering, ids: list[int], request: ChatRequest, prompt: Any
) -> tuple[list[Any], dict[str, Any], list[Any], list[Any]]:
    """The deltas of an answer token by token, and its message; the log-probs of both."""
    deltas = MessageDeltas(request, model)
    choice = Choice(0, prompt, int_array([]), [], [])
    sent, logprobs = [], []
    for token in ids:
        choice.ids.append(token)
        choice.logprobs.append(-float(len(choice.ids)))
        for delta in deltas.push(choice):
            sent.append(delta)
            logprobs += deltas.logprobs(0, choice) if delta.get("content") else []
    whole = model.parse(ids, request.tools, prompt_ids=prompt)
    reasoned = len(model.reasoning_places(ids, whole, prompt_ids=prompt))
    message, _ = assistant_message(cut_at_stop(whole, request.sampling.stop), lambda k: f"call_{k}")
    completion = Completion(int_array(ids), -np.arange(1, len(ids) + 1, dtype=np.float32), "stop", 0)
    reply = Reply("", message, completion, "stop", len(prompt), reasoned, choice=choice, parsed=whole)
    sent += deltas.finish(0, reply)
    logprobs += deltas.logprobs(0, completion, rest=True)
    return sent, message, logprobs, content_logprobs(reply, model, request)


def joined(deltas: list[Any], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas)


@pytest.mark.parametrize(
    "name", [*(f"template:{name}" for name in TEMPLATES), SPELLED, *(f"package:{name}" for name in RENDERERS)]
)
@given(text=TEXTS | THOUGHT, tools=st.booleans(), stops=st.booleans(), begun=st.booleans())
@example(text=DRAFTED, tools=False, stops=False, begun=False)
@example(text="</thithe sum isthe sum is<think>é漢", tools=False, stops=False, begun=False)
@example(text=f"12<{PIECES[-2]}ST and more", tools=False, stops=False, begun=False)
@settings(max_examples=25, deadline=None)
def test_what_is_sent_is_never_withdrawn(name: str, text: str, tools: bool, stops: bool, begun: bool) -> None:
    model = model_of(name)
    stop = ("STOP",) if stops else ()
    request = ChatRequest([USER], TOOLS if tools else None, None, Sampling(max_tokens=99, stop=stop))
    prompt = int_array(model.encode("hi\n<think>\n" if begun else "hi\n"))
    sampled = until_stop(model, model.encode(text), stop)
    deltas, message, logprobs, of_content = streamed(model, sampled, request, prompt)
    content = message.get("content") or ""
    assert joined(deltas, "reasoning_content") == (message.get("reasoning_content") or "")
    assert joined(deltas, "content") == content
    assert logprobs == of_content
    if stops:
        assert "STOP" not in joined(deltas, "reasoning_content")
        assert "STOP" not in joined(deltas, "content") or message.get("tool_calls")
    # Other parsers leave out marks in the middle of a text.
    if name.startswith("template:") and not stops and not tools:
        assert b"".join(bytes(entry["bytes"]) for entry in of_content) == content.encode()


@pytest.mark.parametrize("value", ["Ö", "é 🎉 漢字"])
@pytest.mark.parametrize("name", ["template:chatml", "template:qwen3"])
def test_log_probs_of_a_text_behind_a_call_are_not_the_calls(name: str, value: str) -> None:
    model = model_of(name)
    call = json.dumps({"name": "lookup", "arguments": {"expression": value}}, ensure_ascii=False)
    ids = [*model.encode(f"<tool_call>\n{call}\n</tool_call>Done: Ö, ok."), model.stop_token_ids[0]]
    request = ChatRequest([USER], TOOLS, None, Sampling(max_tokens=99))
    _, message, logprobs, of_content = streamed(model, ids, request, int_array(model.encode("hi\n")))
    assert message["content"] == "Done: Ö, ok."
    assert message["tool_calls"]
    assert b"".join(bytes(entry["bytes"]) for entry in of_content) == message["content"].encode()
    assert logprobs == of_content


@pytest.mark.parametrize(("name", "least"), [("template:qwen3", 6), ("package:qwen3", 6), ("package:deepseek-v3", 6)])
def test_reasoning_comes_while_it_is_sampled_where_the_parser_knows_it(name: str, least: int) -> None:
    model = model_of(name)
    thought = "I add one to two, which gives three, and I check it once more."
    ids = [*model.encode(f"<think>\n{thought}\n</think>\n\nThree."), model.stop_token_ids[0]]
    request = ChatRequest([USER], None, None, Sampling(max_tokens=99))
    deltas, *_ = streamed(model, ids, request, int_array(model.encode("hi\n")))
    pieces = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert len(pieces) >= least
    assert "".join(pieces) == thought


@pytest.mark.parametrize("stop", ["Wait", "\n\nWait"])
def test_a_stop_text_within_the_reasoning_ends_the_answer(stop: str) -> None:
    model = model_of("template:qwen3")
    ids = until_stop(model, model.encode("<think>\nI add.\n\nWait, no.\n</think>\n\nThree."), (stop,))
    request = ChatRequest([USER], None, None, Sampling(max_tokens=99, stop=(stop,)))
    deltas, message, *_ = streamed(model, ids, request, int_array(model.encode("hi\n")))
    assert message["reasoning_content"] == "I add." + ("" if stop[0] == "\n" else "\n\n")
    assert message["content"] == ""
    assert joined(deltas, "reasoning_content") == message["reasoning_content"]
