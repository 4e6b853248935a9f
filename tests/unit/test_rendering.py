"""Any chat template: a continued conversation keeps the old ids and says what the template would say."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, quick_tokenizer
from tiny_tokenizers import CHATML, TEMPLATE_TOKENS, template_tokenizer, tiny_tokenizer

from agl.errors import ConfigError, ModelLoadError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.rendering.normalise import with_tool_names
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import CALL_ID

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does sums",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
    for name in ("calculator", "lookup")
]

Call = tuple[str, dict[str, Any]]


def _hermes(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _xml(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _mistral(calls: list[Call]) -> str:
    listed = [{"name": n, "arguments": a, "id": f"sampled{i:02d}"} for i, (n, a) in enumerate(calls)]
    return "[TOOL_CALLS] " + json.dumps(listed, ensure_ascii=False)


WRITE_CALLS: dict[str, Callable[[list[Call]], str]] = {
    "chatml": lambda calls: _hermes(calls).replace("</tool_call>\n<", "</tool_call><"),
    "qwen25": _hermes,
    "qwen3": _hermes,
    "qwen35": _xml,
    "llama31": lambda calls: (
        f'{{"name": "{calls[0][0]}", "parameters": {json.dumps(calls[0][1], ensure_ascii=False)}}}'
    ),
    "mistral_v3": _mistral,
    "mistral_tekken": lambda calls: "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in calls
    ),
    "role_closed": lambda calls: "".join(
        f'<tool_call>{{"name": "{n}", "arguments": {json.dumps(a, ensure_ascii=False)}}}</tool_call>' for n, a in calls
    ),
}
WRITE_CALLS |= {
    "agl_hermes": _hermes,
    "agl_qwen3": _hermes,
    "agl_llama3": WRITE_CALLS["llama31"],
    "agl_mistral": _mistral,
}
"""How a model of each template writes tool calls."""

AGL = ["agl_hermes", "agl_qwen3", "agl_llama3", "agl_mistral"]
APPEND_ONLY = ["chatml", "qwen25", "qwen3", "llama31", "mistral_tekken", "role_closed", *AGL]
"""Templates that never rewrite the history of a conversation without reasoning."""

_RENDERINGS: dict[str, Rendering] = {}


def rendering(name: str) -> Rendering:
    if name not in _RENDERINGS:
        _RENDERINGS[name] = Rendering(template_tokenizer(name))
    return _RENDERINGS[name]


def whole_text(name: str, messages: list[dict[str, Any]], tools: Any) -> str:
    """What the template itself writes for the conversation."""
    tokenizer = template_tokenizer(name)
    plain = []
    for message in with_tool_names(deepcopy(messages)):
        message["content"] = message.get("content") or ""
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        plain.append(message)
    return str(tokenizer.apply_chat_template(plain, tools=tools, add_generation_prompt=True, tokenize=False))


def stop_for(name: str, following: str) -> int:
    """The token that a model of the template ends its answer with."""
    tokenizer = template_tokenizer(name)
    if name == "role_closed":
        return tokenizer.convert_tokens_to_ids("<|observation|>" if following == "tool" else "<|user|>")
    return tokenizer.eos_token_id


def sample(name: str, text: str, following: str, *, cut: bool = False) -> list[int]:
    """The ids of an answer; one that is cut short has no stop token."""
    ids = template_tokenizer(name).encode(text, add_special_tokens=False)
    return ids if cut else [*ids, stop_for(name, following)]


def answer_text(name: str, content: str) -> str:
    return " " + content if name in ("mistral_v3", "agl_mistral") else content


def message_of(name: str, ids: list[int], prompt: Any, turn: int) -> dict[str, Any]:
    """The assistant message that a client receives and sends back."""
    parsed = rendering(name).parse(ids, TOOLS, prompt_ids=prompt)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content.strip() or None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call{turn:03d}{k:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for k, call in enumerate(parsed.tool_calls)
        ]
    return message


SNIPPETS = [
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "[INST]",
    "<tool_call>",
    " ",
    "\n\n",
    "",
    "{{ x }}",
    "👩‍🚀",
    "é",
    "\t",
]
wild = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=12)), max_size=5).map("".join)
said = st.text(
    st.characters(codec="utf-8", exclude_characters="<[{|\x1c\x1d\x1e\x1f\x85"), min_size=1, max_size=20
).map(lambda text: "So " + text.strip() + ".")
argument = st.text(st.characters(codec="utf-8", exclude_characters="<["), max_size=12)
turns = st.lists(
    st.one_of(
        st.tuples(st.just("user"), wild, said, st.booleans()),
        st.tuples(st.just("tools"), st.lists(st.tuples(argument, wild), min_size=1, max_size=2), said, st.booleans()),
    ),
    min_size=2,
    max_size=4,
)


def play(name: str, system: str | None, script: list[Any], tools: Any) -> list[str]:
    """Hold a scripted conversation through the rendering; the causes of forks, one per continuation ("" for none)."""
    model = rendering(name)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": "hello"})
    prompt, forks = model.prompt(messages, tools).ids, []
    for turn, (kind, what, said_after, cut) in enumerate(script):
        if kind == "tools" and tools:
            calls = [("calculator", {"expression": expression}) for expression, _ in what]
            calls = calls[:1] if name in ("llama31", "agl_llama3") else calls
            response = sample(name, WRITE_CALLS[name](calls), "tool", cut=cut and name != "role_closed")
            answer = message_of(name, response, prompt, turn)
            assert [
                (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in answer["tool_calls"]
            ] == calls
            new = [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, (_, result) in zip(answer["tool_calls"], what, strict=False)
            ]
        else:
            response = sample(name, answer_text(name, said_after), "user", cut=cut)
            answer = message_of(name, response, prompt, turn)
            assert answer["content"] == said_after
            new = [{"role": "user", "content": what if isinstance(what, str) else said_after}]
        messages = [*messages, answer, *new]
        named = with_tool_names(messages)[-len(new) :]
        extended = model.extend(prompt, response, named, tools, history_has_system=system is not None)
        forks.append(extended if isinstance(extended, str) else "")
        if isinstance(extended, str):
            assert extended
            prompt = model.prompt(messages, tools).ids
            continue
        old = [*prompt, *response]
        assert extended[: len(old)].tolist() == [int(i) for i in old]
        assert model.decode(extended) == whole_text(name, messages, tools)
        prompt = extended
    return forks


@pytest.mark.parametrize("with_tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("name", APPEND_ONLY)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=turns, system=st.one_of(st.none(), wild))
def test_append_only_templates_are_continued_exactly(
    name: str, with_tools: bool, script: list[Any], system: str | None
):
    forks = play(name, system, script, TOOLS if with_tools else None)
    assert not any(forks)


@settings(max_examples=20, deadline=None)
@given(script=turns, system=st.one_of(st.none(), st.just("Be brief.")))
def test_mistral_v3_is_continued_where_nothing_moves(script: list[Any], system: str | None):
    forks = play("mistral_v3", system, [s for s in script if s[0] == "user"] or script[:0], None)
    assert all(forks) if system else not any(forks)


def test_mistral_v3_forks_at_a_new_user_message_with_tools_and_not_at_a_tool_result():
    script = [
        ("tools", [("1+1", "2")], "", False),
        ("user", "and now?", "Two.", False),
    ]
    forks = play("mistral_v3", None, script, TOOLS)
    assert forks[0] == ""
    assert "rewrites the history" in forks[1]


def test_ids_that_a_template_refuses_are_made_to_fit():
    model = rendering("mistral_v3")
    call_id = "call_a-very-long-one"
    call = {"id": call_id, "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1"}'}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "1", "name": "calculator"}
    user = {"role": "user", "content": "one"}
    text = model.decode(
        model.prompt([user, {"role": "assistant", "content": None, "tool_calls": [call]}, result], TOOLS).ids
    )
    short = text.partition('"id": "')[2][:9]
    assert short.isalnum()
    assert f'"call_id": "{short}"' in text


def test_results_are_shown_under_the_ids_that_the_model_wrote():
    model = rendering("mistral_v3")
    prompt = model.prompt([{"role": "user", "content": "1+1? 2+2?"}], TOOLS).ids
    response = sample("mistral_v3", _mistral([("calculator", {"expression": e}) for e in ("1+1", "2+2")]), "tool")
    results = [
        {"role": "tool", "tool_call_id": f"minted-{i}", "name": "calculator", "content": str(i)} for i in range(2)
    ]
    extended = model.extend(prompt, response, results, TOOLS)
    assert not isinstance(extended, str)
    shown = model.decode(extended[prompt.size + len(response) :])
    assert shown == "".join(
        f'[TOOL_RESULTS] {{"content": "{i}", "call_id": "sampled{i:02d}"}}[/TOOL_RESULTS]' for i in range(2)
    )


def test_reasoning_is_continued_within_a_tool_cycle_and_forks_where_the_template_drops_it():
    model = rendering("qwen3")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    prompt = model.prompt(messages, TOOLS).ids
    thought = "<think>\nlet me see\n</think>\n\n"
    response = sample("qwen3", thought + _hermes([("calculator", {"expression": "1+1"})]), "tool")
    answer = message_of("qwen3", response, prompt, 0)
    assert answer["reasoning_content"] == "let me see"
    result = {"role": "tool", "tool_call_id": "call00000", "content": "2", "name": "calculator"}
    extended = model.extend(prompt, response, [result], TOOLS)
    assert not isinstance(extended, str)
    assert model.decode(extended) == whole_text("qwen3", [*messages, answer, result], TOOLS)
    final = sample("qwen3", "Two.", "user")
    user = [{"role": "user", "content": "thanks"}]
    assert "drops reasoning" in str(model.extend(extended, final, user, TOOLS))


def test_a_prompt_that_opens_the_reasoning_block():
    model = rendering("qwen35")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    prompt = model.prompt(messages, TOOLS).ids
    response = sample("qwen35", "hm\n</think>\n\n" + _xml([("calculator", {"expression": "1"})]), "tool")
    answer = message_of("qwen35", response, prompt, 0)
    assert answer["reasoning_content"] == "hm"
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"expression": "1"}
    result = {"role": "tool", "tool_call_id": "call00000", "content": "1", "name": "calculator"}
    extended = model.extend(prompt, response, [result], TOOLS)
    assert not isinstance(extended, str)
    assert model.decode(extended) == whole_text("qwen35", [*messages, answer, result], TOOLS)
    cut = sample("qwen35", "hm, let me", "tool", cut=True)
    assert "cut short inside its reasoning" in str(model.extend(prompt, cut, [result], TOOLS))
    assert model.parse(cut, TOOLS, prompt_ids=prompt).reasoning == "hm, let me"


def test_an_answer_that_ends_with_a_token_the_template_does_not_write_forks():
    model = rendering("role_closed")
    prompt = model.prompt([{"role": "user", "content": "hi"}]).ids
    end = template_tokenizer("role_closed").eos_token_id
    assert end in model.stop_token_ids
    assert "<|user|>" in str(
        model.extend(prompt, [*sample("role_closed", "hi", "", cut=True), end], [{"role": "user", "content": "x"}])
    )


def test_assistant_messages_and_nothing_new_are_not_continued():
    model = rendering("chatml")
    prompt = model.prompt([{"role": "user", "content": "hi"}]).ids
    response = sample("chatml", "hello", "user")
    user = {"role": "user", "content": "x"}
    assistant = {"role": "assistant", "content": "y"}
    for new in ([user, assistant, user], [assistant]):
        assert "did not sample" in str(model.extend(prompt, response, new))
    assert model.extend(prompt, response, []) == "there is no new message"
    for message in (user, {"role": "tool", "tool_call_id": "1", "content": "x"}):
        assert not isinstance(model.extend(prompt, response, [message]), str)


def test_the_turns_end_is_a_stop_token_even_if_the_tokenizer_ends_with_another():
    tokenizer = tiny_tokenizer(CHATML, "<|endoftext|>", template_tokenizer("chatml").chat_template)
    assert Rendering(tokenizer).stop_token_ids == tuple(
        tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    )


@pytest.mark.parametrize(
    ("name", "forced"),
    [
        ("chatml", '<tool_call>\n{"name": "calculator", "arguments":'),
        ("qwen25", '<tool_call>\n{"name": "calculator", "arguments":'),
        ("qwen3", '<tool_call>\n{"name": "calculator", "arguments":'),
        ("qwen35", "\n</think>\n\n<tool_call>\n<function=calculator>\n"),
        ("llama31", '{"name": "calculator", "parameters":'),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "calculator", "arguments":'),
        ("mistral_tekken", "[TOOL_CALLS]calculator[ARGS]"),
        ("role_closed", '<tool_call>{"name": "calculator", "arguments":'),
    ],
)
def test_a_named_tool_is_begun_in_the_prompt_and_any_tool_up_to_its_name(name: str, forced: str):
    model, user = rendering(name), [{"role": "user", "content": "1+1?"}]
    plain = model.prompt(user, TOOLS).ids
    named = model.prompt(user, TOOLS, force_tool="calculator")
    assert model.decode(named.forced_ids) == forced
    assert np.array_equal(named.ids, [*plain, *named.forced_ids])
    one = model.prompt(user, TOOLS[:1], force_tool=True)
    assert np.array_equal(one.forced_ids, named.forced_ids)
    any_tool = model.prompt(user, TOOLS, force_tool=True)
    assert model.decode(any_tool.forced_ids) == forced[: forced.index("calculator")]
    call = WRITE_CALLS[name]([("calculator", {"expression": "1+1"})])
    rest = sample(name, call.partition(forced.split("\n</think>\n\n")[-1])[2], "tool")
    parsed = model.parse(rest, TOOLS, forced_ids=named.forced_ids, prompt_ids=named.ids)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("calculator", {"expression": "1+1"})]
    assert parsed.content == ""


@pytest.mark.parametrize(
    "name", ["chatml", "qwen25", "qwen3", "qwen35", "llama31", "mistral_v3", "mistral_tekken", "role_closed"]
)
@pytest.mark.parametrize("force", ["lookup", True])
def test_a_forced_call_says_how_it_goes_on_to_its_end(name: str, force: Any):
    model, user = rendering(name), [{"role": "user", "content": "1+1?"}]
    prompt = model.prompt(user, TOOLS, force_tool=force)
    rests = model.forced_call(TOOLS, force).rests
    assert len(rests) == (2 if force is True else 1)
    for tool, (before, schema, after, style) in zip(TOOLS[-len(rests) :], rests, strict=True):
        assert schema == tool["function"]["parameters"]
        assert style == ("xml" if name == "qwen35" else "json")
        arguments = '{"expression": "1+1"}' if style == "json" else "<parameter=expression>\n1+1\n</parameter>\n"
        rest = sample(name, before + arguments + after, "tool")
        parsed = model.parse(rest, TOOLS, forced_ids=prompt.forced_ids, prompt_ids=prompt.ids)
        [call] = parsed.tool_calls
        assert (call.name, json.loads(call.arguments)) == (tool["function"]["name"], {"expression": "1+1"})
        assert parsed.content == ""
        whole = model.decode(prompt.forced_ids).removeprefix("\n</think>\n\n") + before + arguments + after
        whole = whole.replace(CALL_ID, "sampled00")  # which stands for any id
        assert whole == WRITE_CALLS[name]([(call.name, {"expression": "1+1"})])


def test_a_forced_call_with_an_id_of_unknown_form_goes_on_freely():
    tokenizer = tiny_tokenizer(*TEMPLATE_TOKENS["mistral_v3"])
    tokenizer.chat_template = template_tokenizer("mistral_v3").chat_template.replace("[TOOL_CALLS]", "<tool_calls>")
    assert Rendering(tokenizer).forced_call(TOOLS, "lookup").rests == ()


def test_a_tool_that_cannot_be_forced_says_why():
    model, user = rendering("chatml"), [{"role": "user", "content": "x"}]
    with pytest.raises(ConfigError, match="none of the request's tools"):
        model.prompt(user, TOOLS, force_tool="calculater")
    with pytest.raises(ConfigError, match="has no tools"):
        model.prompt(user, None, force_tool=True)


def test_contents_come_as_parts_or_none_and_developer_is_system():
    model = rendering("chatml")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = model.prompt([{"role": "developer", "content": "s"}, {"role": "user", "content": parts}])
    plain = model.prompt([{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}])
    assert np.array_equal(joined.ids, plain.ids)
    with pytest.raises(ConfigError, match="image_url"):
        model.prompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


PARTS_ALONE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content[0].type == 'image' %}<image>{% endif %}"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As templates of models that see images are: of a content that is a text they show nothing."""


def test_a_template_that_takes_parts_alone_shows_every_text():
    by_parts = Rendering(tiny_tokenizer(CHATML, "<|im_end|>", PARTS_ALONE))
    plain = PARTS_ALONE.replace("for part in m.content if part.type == 'text'", "for part in [{'text': m.content}]")
    by_text = Rendering(tiny_tokenizer(CHATML, "<|im_end|>", plain))
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"}]
    answer = {"role": "assistant", "content": "1"}
    for model in (by_parts, by_text):
        prompt = model.prompt(history)
        assert model.decode(prompt.ids).count("one?") == 1
        assert np.array_equal(prompt.ids, by_text.prompt(history).ids)
        response = model.response(prompt.ids, history, answer)
        more = model.extend(prompt.ids, response, [{"role": "user", "content": "two?"}], history_has_system=True)
        assert not isinstance(more, str), more
        whole = model.prompt([*history, answer, {"role": "user", "content": "two?"}])
        assert np.array_equal(more, whole.ids)


def test_a_template_that_shows_no_text_of_a_user_is_refused():
    shows_roles = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n{% endfor %}"
    with pytest.raises(ModelLoadError, match="does not show the model what a user says"):
        Rendering(tiny_tokenizer(CHATML, "<|im_end|>", shows_roles))


def test_what_cannot_be_rendered_is_a_clear_error():
    with pytest.raises(ModelLoadError, match="no chat template"):
        Rendering(tiny_tokenizer(CHATML, "<|im_end|>"))
    with pytest.raises(ConfigError, match="roles must alternate"):
        rendering("mistral_v3").prompt([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])
    fails = "{{ messages[0].content + 1 }}"
    with pytest.raises(ConfigError, match="TypeError"):
        Rendering(tiny_tokenizer(CHATML, "<|im_end|>", fails)).prompt([{"role": "user", "content": "a"}])
    without_tools = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    model = Rendering(tiny_tokenizer(CHATML, "<|im_end|>", without_tools))
    with pytest.raises(ConfigError, match="cannot be used with tools"):
        model.prompt([{"role": "user", "content": "a"}], TOOLS)


def test_a_template_without_tools_is_noticed_before_the_first_rollout(caplog: pytest.LogCaptureFixture):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    gateway = Gateway(None)  # type: ignore[arg-type]
    engine = ScriptedEngine(quick_tokenizer(), ["x"])
    gateway.serve("writer", engine, rendering("chatml"))
    assert caplog.text == ""
    gateway.serve("writer", engine, Rendering(tiny_tokenizer(CHATML, "<|im_end|>", template)))
    assert "policy 'writer': requests with tools will be refused: the chat template cannot" in caplog.text


@pytest.mark.parametrize("name", ["chatml", "mistral_v3"])
@given(text=wild, size=st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_streamed_text_adds_up_and_never_ends_within_a_character(name: str, text: str, size: int):
    model = rendering(name)
    ids = template_tokenizer(name).encode(text, add_special_tokens=False)
    ids = [i for i in ids if i not in model.stop_token_ids]
    stream = model.detokenizer()
    pieces = [stream.push([*ids, *model.stop_token_ids][k : k + size]) for k in range(0, len(ids) + 1, size)]
    assert not any(piece.endswith("\ufffd") for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + stream.flush() == model.decode(ids)


def test_threads_share_one_rendering():
    model = Rendering(template_tokenizer("qwen25"))
    user = {"role": "user", "content": "and 2+2?"}
    prompt = model.prompt([user], TOOLS).ids
    response = sample("qwen25", "Four.", "user")
    alone = Rendering(template_tokenizer("qwen25")).extend(prompt, response, [user], TOOLS)
    assert not isinstance(alone, str)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: model.extend(prompt, response, [user], TOOLS), range(64)))
    assert all(not isinstance(ids, str) and np.array_equal(ids, alone) for ids in found)


@pytest.mark.parametrize("clock", [False, True])
def test_a_prompt_is_rendered_once_unless_it_shows_the_time(clock: bool):
    tokenizer = template_tokenizer("chatml")
    tokenizer.chat_template = ("{{ strftime_now('%Y') }}" if clock else "") + tokenizer.chat_template
    rendering = Rendering(tokenizer)
    rendered: list[Any] = []
    rendering._model.render = lambda *a, render=rendering._model.render: rendered.append(a) or render(*a)  # type: ignore
    prompts = [rendering.prompt([{"role": "user", "content": "hello"}], TOOLS).ids.tolist() for _ in range(3)]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(rendered) == (3 if clock else 1)
    assert rendering.prompt([{"role": "user", "content": "hullo"}], TOOLS).ids.tolist() != prompts[0]


@pytest.mark.parametrize(
    ("template", "ending", "expected"),
    [
        ("qwen3", "", "possible"),
        ("qwen3", "<think>\n", "open"),
        ("qwen3", "<think>\n\n</think>\n\n", "none"),
        ("qwen25", "", "none"),
    ],
)
def test_where_an_answer_can_reason(template: str, ending: str, expected: str) -> None:
    tokenizer = template_tokenizer(template)
    messages = [{"role": "user", "content": "How many? <think></think>"}]
    prompt = Rendering(tokenizer).prompt(messages).ids
    prompt = np.concatenate([prompt, tokenizer.encode(ending)]).astype(np.int32)
    assert Rendering(tokenizer).reasoning(prompt) == expected
