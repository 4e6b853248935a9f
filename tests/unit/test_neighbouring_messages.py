"""Neighbouring messages of one role, which the APIs allow: answered where the template's roles must alternate, too."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from test_rendering import rendering
from test_template_refusals import NAMES, begun, chatml, model_of

from agl.errors import ConfigError
from agl.trainer.rendering.normalise import NEIGHBOURS, joined, normalise
from agl.trainer.rendering.rendering import Rendering

ALTERNATES = ["mistral_v3", "trl_gemma", "trl_gemma3"]
"""Templates that refuse two user messages in a row."""


def messages_of(roles: list[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]


def ids_of_template(model: Rendering, messages: list[dict[str, Any]]) -> list[int] | None:
    """The ids of these messages as they are; None if the template refuses them."""
    try:
        return model._model.encode(model._model.render(model._model.normalise(messages), None, True))
    except TemplateError:
        return None


@pytest.mark.parametrize("name", NAMES)
@given(roles=st.lists(st.sampled_from(["user", "assistant"]), max_size=6), systems=st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_neighbours_of_one_role_are_answered_and_nothing_else_changes(
    name: str, roles: list[str], systems: int
) -> None:
    model = model_of(name)
    messages = messages_of([*["system"] * systems, "user", *roles, "user"])
    taken = ids_of_template(model, messages)
    alternating = ids_of_template(model, joined(messages))
    if taken is None and alternating is None:
        with pytest.raises(ConfigError, match="refuses these messages"):
            model.prompt(messages)
        return
    ids = model.prompt(messages).ids.tolist()
    assert ids == (alternating if taken is None else taken)
    if taken is None:
        text = model.decode(ids)
        assert all(message["content"] in text for message in messages)


@pytest.mark.parametrize("name", NAMES)
def test_answers_between_neighbours_are_continued(name: str) -> None:
    model = model_of(name)
    for count in (2, 3):
        conversation, single = begun(model), begun(model)
        assert conversation is not None
        assert single is not None
        conversation.tools = single.tools = None
        single.tell(["user"], single.answer("Plain."))
        conversation.tell(["user"] * count, conversation.answer("Plain."))
        if single.prompt()[1].parent is None:
            continue
        ids, match = conversation.prompt()
        assert match.parent is not None
        assert ids[: len(conversation.sampled)].tolist() == conversation.sampled
        # What follows the answer reads as in the whole conversation.
        whole, _ = conversation.prompt(whole=True)
        rest, rest_of_whole = (model.decode(each).partition("Plain.")[2] for each in (ids, whole))
        assert rest == rest_of_whole


@pytest.mark.parametrize("name", ALTERNATES)
def test_a_conversation_that_begins_with_neighbours_goes_on(name: str) -> None:
    conversation = begun(model_of(name))
    assert conversation is not None
    conversation.messages[:] = messages_of(["user", "user"])
    conversation.tools = None
    first, _ = conversation.prompt()
    assert NEIGHBOURS.join(["text 0", "text 1"]) in conversation.model.decode(first)
    conversation.tell(["user"], conversation.answer("Plain."))
    ids, match = conversation.prompt()
    assert match.parent is not None
    assert ids[: first.size].tolist() == first.tolist()


def test_what_is_joined() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "assistant", "content": "Plain.", "tool_calls": [{**call, "id": "b"}]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "?"}]},
        {"role": "user", "content": None},
        {"role": "user", "content": "three?"},
    ]
    system, first, answer, *results, last = joined(normalise(messages, parse_arguments=True, developer=False))
    assert (system["role"], system["content"]) == ("system", "Be brief.\n\nBe kind.")
    assert first["content"] == "one?"
    assert (answer["content"], answer["reasoning_content"]) == ("Plain.", "Hm.")
    assert [each["id"] for each in answer["tool_calls"]] == ["a", "b"]
    assert [each["content"] for each in results] == ["1", "2"]
    assert last["content"] == "two?\n\nthree?"


def test_what_stays_refused_is_refused_in_the_words_of_the_messages_as_they_are() -> None:
    model = chatml("m.role == 'assistant' or (loop.length == 2 and m.role == 'user')")
    with pytest.raises(ConfigError, match="not like this") as refused:
        model.prompt(messages_of(["user", "assistant", "user", "user"]))
    assert refused.value.hint == "their roles are: user, assistant, user, user"


@pytest.mark.parametrize("name", ["mistral_v3", "chatml"])
def test_an_answer_of_another_model_after_neighbours_is_one_of_this_model(name: str) -> None:
    model = rendering(name)
    messages = messages_of(["user", "user"])
    prompt = model.prompt(messages).ids
    answer = {"role": "assistant", "content": "Plain."}
    assert model.parse(model.response(prompt, messages, answer), prompt_ids=prompt).content.strip() == "Plain."
