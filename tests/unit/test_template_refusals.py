"""A chat template that refuses what a policy has sampled: the conversation continues, or the fault is the policy's."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from scripted import Asked, ScriptedRollouts
from test_policy_faults import attempts, faults
from test_rendering import TOOLS, Call, _hermes, _mistral, _xml, rendering
from tiny_tokenizers import (
    TEMPLATE_TOKENS,
    package_tokenizer,
    published_templates,
    published_tokenizer,
    template_tokenizer,
    tiny_tokenizer,
)

import agl
from agl.errors import ConfigError, RefusedAnswerError
from agl.mdp.types import int_array
from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.calls import ChatRequest, assistant_message, rendered_prompt
from agl.trainer.gateway.sessions import ForkCause, SessionMatch, Sessions
from agl.trainer.rendering.normalise import joined
from agl.trainer.rendering.refusals import refused_histories
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import VALUE, placeholder_call

NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]
ARGUMENTS: list[dict[str, Any]] = [
    {"expression": "1+1"},
    {},
    {"expression": float("nan")},
    {"expression": ""},
    {"expression": NESTED},
    {"expression": "half a character: HALF"},
    {"expression": "</tool_call> [INST] <|eot_id|>"},
    {"expression": None, "other": 10**40},
]


def _llama(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


WRITERS = {"hermes": _hermes, "xml_function": _xml, "mistral": _mistral, "bare_json": _llama}
"""How calls are written, by the parser that reads them."""
STRICT = {"trl_llama3_1", "trl_gemma3"}
"""The published templates that refuse the most."""
NAMES = [
    *TEMPLATE_TOKENS,
    *(name if name in STRICT else pytest.param(name, marks=pytest.mark.full) for name in published_templates()),
]


def model_of(name: str) -> Rendering:
    if name in TEMPLATE_TOKENS:
        return rendering(name)
    return Rendering(published_tokenizer(name))


def answers_of(model: Rendering) -> list[str]:
    """What a policy can sample: texts with and without tool calls, well-formed and not."""
    texts = ["", "  \n", "Plain.", '<tool_call>{"name": "calculator"', '{"name": 3}', "[TOOL_CALLS] [", "<think>Hm"]
    if model.tools_refusal is not None:
        return texts
    write = WRITERS[model._model._format.__name__]  # type: ignore[union-attr]
    calls = [write([("calculator", arguments)]).replace("HALF", "\\ud83d") for arguments in ARGUMENTS]
    several = [write([("calculator", {"expression": str(i)}) for i in range(n)]) for n in (2, 3)]
    return [*texts, *calls, *several, write([("no_such_tool", {})]), "Let me see.\n" + write([("lookup", {})])]


@dataclass
class Conversation:
    """One conversation of an agent with a policy that answers what it is told to."""

    model: Rendering
    messages: list[dict[str, Any]]
    tools: Any

    def __post_init__(self) -> None:
        self.sessions, self.calls = Sessions(), 0

    def prompt(self, *, whole: bool = False) -> tuple[Any, SessionMatch]:
        """The ids of the next prompt, and what they continue; nothing if the `whole` history is to be rendered."""
        match = self.sessions.match("another policy" if whole else "policy", self.messages, self.tools)
        request = ChatRequest(self.messages, self.tools, None, Sampling(max_tokens=0))
        ids, _, match = rendered_prompt(self.model, request, match)
        return ids, match

    def answer(self, text: str, end: int | None = None) -> dict[str, Any]:
        """Sample this answer to the next prompt; the message that the agent gets, which the conversation has, too.

        Args:
            end: the token that ends it; None for the one that the template writes there.
        """
        prompt, match = self.prompt()
        sampled = self.model.encode(text)
        parsed = self.model.parse(sampled, self.tools, prompt_ids=prompt)
        ids = int_array([*sampled, self.end("tool" if parsed.tool_calls else "user") if end is None else end])
        assert self.model.parse(ids, self.tools, prompt_ids=prompt) == parsed
        message, _ = assistant_message(parsed, lambda k: f"call_{self.calls}_{k}")
        self.calls += 1
        self.sessions.remember(match, f"answer{self.calls}", "session", prompt, ids, message)
        self.sampled = [*prompt, *ids]
        self.messages.append(json.loads(json.dumps(message)))
        return message

    def end(self, following: str) -> int:
        """The token that an answer ends with, as the template writes it before a message of this role."""
        history: list[Any] = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "ANSWER"}]
        new = {"role": "user", "content": "two?"}
        if following == "tool":
            history[1] = {"role": "assistant", "content": "", "tool_calls": [placeholder_call("lookup", "call00001")]}
            new = {"role": "tool", "content": "two?", "tool_call_id": "call00001", "name": "lookup"}
        try:
            text = self.model._model.render([*history, new], self.tools, False)
        except TemplateError:
            return self.model.stop_token_ids[0]
        _, _, after = text.partition(VALUE if following == "tool" else "ANSWER")
        ends = {self.model.decode([token]): token for token in self.model.stop_token_ids}
        found = [end for end in ends if end in after]
        return ends[min(found, key=after.index)] if found else self.model.stop_token_ids[0]

    def tell(self, roles: Sequence[str], message: dict[str, Any]) -> list[str]:
        """Messages after an answer: results of its calls, then these; their texts."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"}
            for i, call in enumerate(message.get("tool_calls") or ())
        ]
        new = [*results, *({"role": role, "content": f"told {i}"} for i, role in enumerate(roles))]
        self.messages += new
        return [m["content"] for m in new]


def begun(model: Rendering, system: bool = False) -> Conversation | None:
    """A conversation with tools if the model takes them; None if the template does not take this beginning."""
    start: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if system else []
    conversation = Conversation(model, [*start, {"role": "user", "content": "one?"}], None)
    conversation.tools = TOOLS if model.tools_refusal is None else None
    try:
        ids, _ = conversation.prompt()
    except ConfigError:
        return None
    assert "one?" in model.decode(ids)
    return conversation


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_sampled_the_conversation_continues(name: str) -> None:
    model = model_of(name)
    assert begun(model) is not None
    tried = 0
    for text in answers_of(model):
        for system in (False, True):
            for roles in ((), ("user",), ("user", "user")):
                conversation = begun(model, system)
                if conversation is None:
                    continue
                message = conversation.answer(text)
                told = conversation.tell(roles, message)
                if not told:
                    continue
                tried += 1
                ids, match = conversation.prompt()
                assert (match.parent is None) == (match.cause is ForkCause.TEMPLATE)
                if match.parent is not None:
                    assert ids[: len(conversation.sampled)].tolist() == conversation.sampled
                    rest = model.decode(ids[len(conversation.sampled) :])
                    places = [rest.find(each) for each in told]
                    assert -1 not in places
                    assert places == sorted(places)
    assert tried


@cache
def lenient(name: str) -> Any:
    """The tokenizer of a template, which refuses nothing."""
    tokenizer = template_tokenizer(name) if name in TEMPLATE_TOKENS else published_tokenizer(name)
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("raise_exception(", "''.format(")
    return tokenizer


def alternates(model: Rendering) -> bool:
    """Whether the template refuses two user messages in a row."""
    user = {"role": "user", "content": "one?"}
    try:
        model._model.render([user, user], None, True)
    except TemplateError:
        return True
    return False


@pytest.mark.parametrize("name", ["llama31", "mistral_v3", "trl_llama3_1", "trl_gemma", "trl_gemma3", "trl_cohere"])
def test_what_is_written_apart_is_what_the_template_would_write_together(name: str) -> None:
    if name not in TEMPLATE_TOKENS and name not in published_templates():
        pytest.skip("needs TRL, which has this template")
    model, tried, ids_of_calls = model_of(name), 0, r'"call_id": "\w+"'
    for text in answers_of(model):
        for roles in ((), ("user",), ("user", "user"), ("user", "user", "user")):
            conversation = begun(model)
            assert conversation is not None
            message = conversation.answer(text)
            if not conversation.tell(roles, message):
                continue
            ids, match = conversation.prompt()
            if match.parent is None:
                continue
            history = model._model.normalise(conversation.messages)
            whole = lenient(name).apply_chat_template(
                joined(history) if alternates(model) else history, tools=conversation.tools,
                add_generation_prompt=True, tokenize=False,
            )  # fmt: skip
            tried += 1
            rest = model.decode([conversation.sampled[-1], *ids[len(conversation.sampled) :]])
            # Results stand under the ids that were sampled.
            assert re.sub(ids_of_calls, "", whole).endswith(re.sub(ids_of_calls, "", rest))
    assert tried > 10


@pytest.mark.parametrize("name", NAMES)
def test_whatever_ends_an_answer_the_conversation_continues(name: str) -> None:
    model = model_of(name)
    assert begun(model) is not None
    for end in model.stop_token_ids:
        for text in answers_of(model)[2:-1:3]:
            for roles in (("user",), ("user", "user")):
                conversation = begun(model)
                assert conversation is not None
                conversation.tell(roles, conversation.answer(text, end))
                ids, match = conversation.prompt()
                if match.parent is not None:
                    assert ids[: len(conversation.sampled)].tolist() == conversation.sampled


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_sampled_a_refused_history_is_the_policys_fault(name: str) -> None:
    model = model_of(name)
    assert begun(model) is not None
    for text in answers_of(model):
        conversation = begun(model)
        assert conversation is not None
        message = conversation.answer(text)
        if not conversation.tell(() if message.get("tool_calls") else ("user",), message):
            continue
        with contextlib.suppress(RefusedAnswerError):
            _, match = conversation.prompt(whole=True)
            assert match.cause is ForkCause.TOOLS_CHANGED


TWO_CALLS = _llama([("calculator", {"expression": "1+1"}), ("calculator", {"expression": "2+2"})])


def adds_up(task: Any, llm: agl.LLM, tools_of: Any = lambda turn: TOOLS) -> float:
    """A tool agent: the reward is the number of its policy's calls."""
    import openai

    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "What is 1+1, and 2+2?"}]
    for turn in range(3):
        answer = client.chat.completions.create(model=llm.model, messages=messages, tools=tools_of(turn))
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
    return float(sum(m["role"] == "tool" for m in messages if isinstance(m, dict)))


def fit(directory: Any, agent: Any, answers: list[str]) -> ScriptedRollouts:
    """Four rollouts on Llama 3.1's template; each answer is the first of one, and then comes a text."""
    first, tokenizer = iter(answers), template_tokenizer("llama31")

    def answer(asked: Asked) -> str:
        has_results = "<|start_header_id|>ipython" in tokenizer.decode(asked.prompt_ids.tolist())
        return "Done." if has_results else next(first)

    algorithm = ScriptedRollouts(answer, group_size=len(answers), tokenizer=tokenizer)
    trainer = agl.Trainer(algorithm, directory=directory, n_workers=1, progress=False)  # type: ignore[arg-type]
    trainer.fit(agl.rollout(agent), [{"question": "q"}])
    return algorithm


def test_two_tool_calls_of_one_answer_are_answered_at_the_first_attempt(tmp_path: Any) -> None:
    one = _llama([("calculator", {"expression": "1+1"})])
    algorithm = fit(tmp_path, adds_up, [one, TWO_CALLS, "No.", TWO_CALLS])
    assert algorithm.rewards == [1.0, 2.0, 0.0, 2.0]
    assert [len(of) for of in attempts(tmp_path)] == [1] * 4
    assert faults(tmp_path) == [None] * 4
    for calls in algorithm.calls[1::2]:
        assert [call.parent_id for call in calls] == [None, calls[0].id]


def test_two_tool_calls_that_no_prompt_can_show_are_the_policys_fault(tmp_path: Any) -> None:
    def changes_tools(task: Any, llm: agl.LLM) -> float:
        return adds_up(task, llm, lambda turn: TOOLS[: 2 - turn])

    one = _llama([("calculator", {"expression": "1+1"})])
    algorithm = fit(tmp_path, changes_tools, [one, TWO_CALLS, "No.", one])
    assert algorithm.rewards == [1.0, 0.0, 0.0, 1.0]
    assert [len(of) for of in attempts(tmp_path)] == [1] * 4
    fault = faults(tmp_path)[1]
    assert fault is not None
    assert (fault.cause, fault.call_id) == ("template", algorithm.calls[1][0].id)
    assert "single tool-calls at once" in fault.error
    *_, refused = algorithm.calls[1]
    assert (refused.error or "").startswith("answer_refused: the chat template refuses")
    assert [t.call.id for t in algorithm.trajectories[1].transitions if t.trainable] == [fault.call_id]


# -- what is written -------------------------------------------------------------------------------------------------


def continued(model: Rendering, text: str, new: list[dict[str, Any]], *, system: bool = False) -> str:
    """What is put after this answer, up to the next generation prompt."""
    conversation = begun(model, system)
    assert conversation is not None
    message = conversation.answer(text)
    calls = message.get("tool_calls") or ()
    for told, call in zip(new, calls, strict=False):
        told["tool_call_id"] = call["id"]
    conversation.messages += new
    ids, match = conversation.prompt()
    assert match.parent is not None, match.detail
    return model.decode(ids[len(conversation.sampled) :])


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "", "content": text}


USER = {"role": "user", "content": "and now?"}


def llama_turn(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


@pytest.mark.parametrize("renderer", [None, "llama-3"], ids=["template", "package"])
def test_two_results_are_written_as_the_template_writes_each(renderer: str | None) -> None:
    model = Rendering(package_tokenizer(), renderer=renderer) if renderer else rendering("llama31")
    assert model.fork_after(("tool", "tool"), tools=True, system=True) is None
    written = continued(model, TWO_CALLS, [result("2"), result("4"), USER])
    turns = llama_turn("ipython", '"2"') + llama_turn("ipython", '"4"') + llama_turn("user", "and now?")
    assert written == turns + "<|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize("system", [False, True])
def test_a_user_message_after_results_is_written_where_roles_must_alternate(system: bool) -> None:
    model = rendering("mistral_v3")
    calls = _mistral([("calculator", {"expression": "1+1"}), ("lookup", {"expression": "x"})])
    written = continued(model, calls, [result("2"), result("4"), USER], system=system)
    results = "".join(
        f'[TOOL_RESULTS] {{"content": "{text}", "call_id": "sampled{i:02d}"}}[/TOOL_RESULTS]'
        for i, text in enumerate(("2", "4"))
    )
    tools = json.dumps(TOOLS, ensure_ascii=False)
    assert written == f"{results}[AVAILABLE_TOOLS] {tools}[/AVAILABLE_TOOLS][INST] and now?[/INST]"


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TURNS = (
    "{%- for m in messages %}"
    "{%- set called = m.tool_calls | length if m.tool_calls else 0 %}"
    "REFUSE"
    "<|im_start|>{{ m.role }}HEAD\n{{ m.content }}"
    '{%- for c in m.tool_calls or [] %}<tool_call>\n{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml(refuse: str = "", head: str = "", end: str = "<|im_end|>") -> Rendering:
    """ChatML that refuses messages, or writes something after the role; its tokenizer's end token is `end`."""
    shown = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    refuse = refuse and "{% if " + refuse + " %}{{ raise_exception('not like this') }}{% endif %}"
    template = shown + TURNS.replace("REFUSE", refuse).replace("HEAD", head)
    return Rendering(tiny_tokenizer(CHATML_TOKENS, end, template))


def test_a_result_stands_under_the_name_of_the_tool_that_was_called() -> None:
    last = "{{ ' of ' ~ messages[loop.index0 - 1].tool_calls[0].function.name if m.role == 'tool' else '' }}"
    written = continued(chatml(head=last), _hermes([("lookup", {})]), [result("2")])
    assert written.startswith("\n<|im_start|>tool of lookup\n2<|im_end|>")


@pytest.mark.parametrize(
    ("refuse", "answer", "roles", "turns"),
    [
        (
            "m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user'", "Plain.",
            ("user", "user"), ["user\ntold 0\n\ntold 1"],
        ),
        ("called > 1", _hermes([("lookup", {}), ("lookup", {})]), (), ["tool\nresult 0", "tool\nresult 1"]),
    ],
    ids=["neighbours", "two results"],
)  # fmt: skip
def test_an_answer_with_another_end_is_closed_where_it_cannot_fork(
    refuse: str, answer: str, roles: tuple[str, ...], turns: list[str]
) -> None:
    conversation = begun(chatml(refuse, end="<|endoftext|>"))
    assert conversation is not None
    model = conversation.model
    assert [model.decode([token]) for token in model.stop_token_ids] == ["<|endoftext|>", "<|im_end|>"]
    conversation.tell(roles, conversation.answer(answer, model.stop_token_ids[0]))
    ids, match = conversation.prompt()
    assert match.parent is not None
    written = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert model.decode(ids[len(conversation.sampled) :]) == f"<|im_end|>\n{written}<|im_start|>assistant\n"


def test_a_second_tool_turn_is_continued_where_no_history_has_one() -> None:
    again = "called and messages[:loop.index0] | selectattr('tool_calls', 'defined') | list"
    conversation = begun(chatml(again))
    assert conversation is not None
    for _ in range(3):
        conversation.tell((), conversation.answer(_hermes([("lookup", {"expression": "x"})])))
        _, match = conversation.prompt()
        assert match.parent is not None


REFUSED = {
    "an empty answer": ("m.role == 'assistant' and not m.content and not called", ""),
    "two calls": ("called > 1", _hermes([("lookup", {}), ("calculator", {})])),
    "an unknown tool": ("called and m.tool_calls[0].function.name == 'no_such_tool'", _hermes([("no_such_tool", {})])),
    "no arguments": ("called and not m.tool_calls[0].function.arguments", _hermes([("lookup", {})])),
    "text beside a call": ("called and m.content", "Let me see.\n" + _hermes([("lookup", {"expression": "x"})])),
    "a text": ("m.role == 'assistant' and 'Plain' in m.content", "Plain."),
}
"""What a template refuses, and an answer like it."""


@pytest.mark.parametrize("what", REFUSED)
def test_an_answer_that_is_refused_in_a_whole_history_is_found(what: str) -> None:
    refuse, text = REFUSED[what]
    conversation = begun(chatml(refuse))
    assert conversation is not None
    fine = conversation.answer(_hermes([("calculator", {"expression": "1"})]))
    conversation.tell((), fine)
    bad = conversation.answer(text)
    conversation.tell(() if bad.get("tool_calls") else ("user",), bad)
    _, match = conversation.prompt()
    assert match.parent is not None
    with pytest.raises(RefusedAnswerError, match="not like this") as refused:
        conversation.prompt(whole=True)
    assert refused.value.where["call"] == "answer2"


@pytest.mark.parametrize(
    ("refuse", "roles"),
    [
        ("m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'tool'", ("user",)),
        ("m.content == 'told 0'", ("user",)),
    ],
    ids=["order", "what the agent says"],
)
def test_what_is_refused_with_any_answer_is_no_fault_of_the_policys(refuse: str, roles: tuple[str, ...]) -> None:
    conversation = begun(chatml(refuse))
    assert conversation is not None
    message = conversation.answer(_hermes([("calculator", {"expression": "1"})]))
    conversation.tell(roles, message)
    with pytest.raises(ConfigError, match="not like this") as refused:
        conversation.prompt(whole=True)
    assert not isinstance(refused.value, RefusedAnswerError)


def test_an_answer_that_was_not_sampled_here_is_nobodys_fault() -> None:
    conversation = begun(rendering("llama31"))
    assert conversation is not None
    calls = [placeholder_call("lookup", f"call{i}") for i in range(2)]
    conversation.messages += [{"role": "assistant", "content": None, "tool_calls": calls}, {**result(""), "name": "x"}]
    with pytest.raises(ConfigError, match="single tool-calls") as refused:
        conversation.prompt()
    assert not isinstance(refused.value, RefusedAnswerError)


def test_a_tool_that_cannot_be_forced_is_no_fault_of_the_policys() -> None:
    conversation = begun(rendering("chatml"))
    assert conversation is not None
    conversation.tell((), conversation.answer(_hermes([("lookup", {})])))
    match = conversation.sessions.match("policy", conversation.messages, TOOLS[:1])
    request = ChatRequest(conversation.messages, TOOLS[:1], "lookup", Sampling(max_tokens=0))
    with pytest.raises(ConfigError, match="none of the request's tools") as refused:
        rendered_prompt(conversation.model, request, match)
    assert not isinstance(refused.value, RefusedAnswerError)


def test_doctor_knows_what_a_template_refuses() -> None:
    assert refused_histories(rendering("chatml")) == {}
    assert refused_histories(rendering("llama31")) == {
        "two tool calls in one answer": "This model only supports single tool-calls at once!"
    }
    assert set(refused_histories(rendering("mistral_v3"))) == {"a user message after a tool's result"}
    assert set(refused_histories(chatml(REFUSED["an empty answer"][0]))) == {"an empty answer"}
