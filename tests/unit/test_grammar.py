"""Answers that are held to a JSON schema: they fit it, and engine and learner give them the same log-probs."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch
from device import DEVICE
from tiny_engine import VOCABULARY, engine_for, finish, prompts, tiny_model, tiny_tokenizer
from tiny_tokenizers import TEMPLATE_TOKENS, template_tokenizer
from tiny_tokenizers import tiny_tokenizer as tokenizer_with

pytest.importorskip("llguidance")

from agl.errors import ConfigError
from agl.mdp.sequence import TrainingRow, merge, unmerged
from agl.mdp.types import Call, Trajectory, Transition
from agl.trainer.engines.base import Completion, Sampling, json_grammar
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.grammar import Grammars
from agl.trainer.local.learner.learner import Learner
from agl.trainer.rendering.rendering import Rendering

torch.set_num_threads(1)
STOP = 0
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["add", "sub"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
GRAMMAR = json_grammar([("", SCHEMA, "")], [STOP])


def answers(samplings: list[Sampling], **options) -> tuple[list[np.ndarray], list[Completion]]:
    engine, requested = engine_for(tiny_model(), **options), prompts(len(samplings))
    for i, (prompt, sampling) in enumerate(zip(requested, samplings, strict=True)):
        engine.submit(i, prompt, sampling)
    done = finish(engine)
    return requested, [done[i] for i in range(len(samplings))]


def call(i: int, prompt, answer: Completion, sampling: Sampling) -> Call:
    used = {"used": {"grammar": sampling.grammar} if sampling.grammar else {}}
    return Call(
        str(i), "ro", 1, i, "solver", "policy", 0, prompt, answer.token_ids, answer.logprobs,
        temperature=sampling.temperature, request=used,
    )  # fmt: skip


def rows(calls: list[Call], build) -> list[TrainingRow]:
    trajectory = Trajectory("ro", 1, "policy", "g", tuple(Transition(c) for c in calls))
    return build(trajectory, {c.id: 1.0 for c in calls})


def learner(**config) -> Learner:
    settings = LearnerConfig(learning_rate=1e-2, autocast="float32", **config)
    return Learner(tiny_model().to(DEVICE), settings, DEVICE, tokenizer=tiny_tokenizer())


def samplings() -> list[Sampling]:
    kinds = [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 1.0, 0)] * 3
    held = [
        Sampling(40, seed=i, temperature=t, top_p=p, top_k=k, stop_token_ids=(STOP,), grammar=GRAMMAR)
        for i, (t, p, k) in enumerate(kinds)
    ]
    return [*held, Sampling(12, seed=7), replace(held[0], top_p=0.5, seed=3), replace(held[0], top_k=2, seed=4)]


def test_every_answer_fits_its_schema_whatever_is_sampled_beside_it():
    requested = samplings()
    _, done = answers(requested, max_batch=4)
    tokenizer, kinds = tiny_tokenizer(), set()
    for sampling, answer in zip(requested, done, strict=True):
        if not sampling.grammar:
            assert answer.token_ids.size == 12
            continue
        assert answer.finish_reason == "stop"
        assert answer.token_ids[-1] == STOP
        value = json.loads(tokenizer.decode(answer.token_ids[:-1]))
        assert value.keys() == {"kind", "n"}
        assert value["kind"] in ("add", "sub")
        assert 0 <= value["n"] <= 99
        kinds.add(value["kind"])
    assert kinds == {"add", "sub"}


def test_properties_come_in_the_order_of_the_schema():
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["a", "z"]}
    sampling = Sampling(20, stop_token_ids=(STOP,), grammar=json_grammar([("", schema, "")], [STOP]))
    _, [answer] = answers([sampling])
    assert tiny_tokenizer().decode(answer.token_ids[:-1]).startswith('{"z": 1, "a": 2')


def test_the_logprob_is_that_of_the_choice_among_what_may_come():
    """By hand: after `"` there are two letters, and after the first of them nothing is left to choose."""
    grammar = json_grammar([("", {"enum": ["ab", "cd"]}, "")], [STOP])
    sampling = Sampling(10, temperature=0.8, stop_token_ids=(STOP,), grammar=grammar)
    [prompt], [answer] = answers([sampling])
    tokenizer, model = tiny_tokenizer(), tiny_model()
    assert tokenizer.decode(answer.token_ids[:-1]) in ('"ab"', '"cd"')
    ids = torch.tensor(np.concatenate([prompt, answer.token_ids])).long()[None]
    with torch.no_grad():
        logits = model(ids).logits[0, prompt.size] / 0.8
    a, c = tokenizer.encode("a")[0], tokenizer.encode("c")[0]
    expected = torch.log_softmax(logits[[a, c]], 0)[[a, c].index(answer.token_ids[1])]
    np.testing.assert_allclose(answer.logprobs, [0, float(expected), 0, 0, 0], atol=1e-5)


@pytest.mark.parametrize("build", [merge, unmerged])
@pytest.mark.parametrize("config", [{}, {"share_prefixes": False}])
def test_the_learner_gives_the_logprobs_that_the_engine_gave(build, config):
    requested = samplings()[:13]
    given, done = answers(requested)
    calls = [call(i, *one) for i, one in enumerate(zip(given, done, requested, strict=True))]
    made = rows(calls, build)
    assert any(row.grammars for row in made)
    subject = learner(**config)
    for row, logprobs in zip(made, subject.sequence_logprobs(made), strict=True):
        np.testing.assert_allclose(logprobs[row.action_mask], row.logprobs[row.action_mask], atol=2e-5)
    plain = subject.sequence_logprobs([replace(row, grammars=()) for row in made])
    differ = [np.abs(p - r.logprobs)[r.action_mask].max() for p, r in zip(plain, made, strict=True)]
    assert max(differ) > 1


def test_an_update_leaves_what_could_not_come_alone():
    """The gradient of a forced token is 0: the loss of an answer in which nothing was left to choose moves nothing."""
    forced = Sampling(10, stop_token_ids=(STOP,), grammar=json_grammar([("", {"const": "ab"}, "")], [STOP]))
    [prompt], [answer] = answers([forced])
    [row] = rows([call(0, prompt, answer, forced)], merge)
    subject = learner(entropy_coef=0.1)
    metrics = subject.update([row], lr_scale=0.0)
    assert all(np.isfinite(value) for value in metrics.values())
    assert max(float(p.grad.abs().max()) for p in subject._model.parameters() if p.grad is not None) < 1e-6
    subject.update([replace(row, grammars=())], lr_scale=0.0)
    assert max(float(p.grad.abs().max()) for p in subject._model.parameters() if p.grad is not None) > 1e-3


def test_a_row_in_the_middle_of_an_answer_goes_on_within_its_schema_after_an_update():
    engine = engine_for(tiny_model())
    engine.submit(0, prompts(1)[0], Sampling(40, seed=1, stop_token_ids=(STOP,), grammar=GRAMMAR))
    for _ in range(6):
        engine.step()
    engine.on_weights_changed(1)
    answer = finish(engine)[0]
    assert json.loads(tiny_tokenizer().decode(answer.token_ids[:-1])).keys() == {"kind", "n"}


NAMES_A, NAMES_B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        (NAMES_A, '{"a": 1}', True),
        (NAMES_A, '{"a": 1, "b": 2}', False),
        (NAMES_A | {"additionalProperties": True}, '{"a": 1, "b": 2}', True),
        ({"type": "object"}, '{"a": 1, "b": 2}', True),
        ({"type": "array", "items": NAMES_A}, '[{"a": 1, "b": 2}]', False),
        ({"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": NAMES_A}}, '{"x": {"b": 2}}', False),
        ({"properties": {"properties": {"type": "integer"}}}, '{"properties": 1}', True),
        ({"properties": {"properties": {"type": "integer"}}}, '{"additionalProperties": false}', False),
        (NAMES_A | {"anyOf": [{"properties": {"b": {}}, "required": ["b"]}]}, '{"a": 1, "b": 2}', True),
        ({"allOf": [NAMES_A, NAMES_B]}, '{"a": 1, "b": 2}', True),
        ({"allOf": [{"$ref": "#/$defs/A"}, NAMES_B], "$defs": {"A": NAMES_A}}, '{"a": 1, "b": 2}', True),
    ],
)
def test_properties_that_a_schema_does_not_name_are_not_written(schema, text, fits):
    tokenizer = tiny_tokenizer()
    matcher = Grammars(tokenizer, VOCABULARY).matcher(json_grammar([("", schema, "")], [STOP]))
    ids = [*tokenizer.encode(text), STOP]
    assert (matcher.validate_tokens(ids) == len(ids)) == fits


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"$ref": "#/nowhere"}])
def test_a_call_whose_parameters_cannot_be_held_is_a_call_still(schema):
    """An agent may force calls without knowing of grammars, and must not fail for one."""
    tokenizer = tiny_tokenizer()
    matcher = Grammars(tokenizer, VOCABULARY).matcher(json_grammar([("f ", schema, " end")], [STOP]))
    ids = [*tokenizer.encode('f {"a": 1} end'), STOP]
    assert matcher.validate_tokens(ids) == len(ids)
    assert matcher.validate_tokens(tokenizer.encode("f 1")) < len(tokenizer.encode("f 1"))


@pytest.mark.parametrize(
    "schema", ['{"type": "nothing"}', '{"type": "object", "required": 3}', '{"$ref": "#/nowhere"}']
)
def test_a_schema_that_cannot_be_held_is_refused_when_it_is_submitted(schema):
    engine = engine_for(tiny_model())
    with pytest.raises(ConfigError, match="cannot be held to this schema"):
        engine.submit(0, prompts(1)[0], Sampling(4, grammar=json_grammar([("", json.loads(schema), "")], [STOP])))
    assert not engine.has_work
    assert engine.vocabulary == VOCABULARY


CALL = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
ADD = ('<call>{"name": "add", "arguments": ', {"type": "object", "properties": {"a": {"type": "integer"}}}, "}</call>")


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("text", "as_text", "as_json"),
    [
        ("Three apples.", True, False),
        ('{"n": 3}', True, True),
        ('{"n": "3"}', True, False),
        ("a < b, <cal", True, False),
        (CALL, True, True),
        (f"{CALL}\n{CALL}", True, True),
        (f"I add.\n{CALL}", True, False),
        (f"{CALL} That was it.", False, False),
        (CALL.replace("1", '"1"'), False, False),
        (CALL.replace('"a"', '"b"'), False, False),
        (CALL.replace("add", "mul"), False, False),
        ("<call>", False, False),
        ("a <call> b", False, False),
        (CALL.removesuffix("</call>"), False, False),
    ],
)
def test_an_answer_is_a_call_that_fits_or_something_else(text, as_text, as_json, added):
    tokenizer = tiny_tokenizer()
    vocabulary = VOCABULARY + tokenizer.add_tokens(["<call>", "</call>"]) if added else VOCABULARY
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    ids = [*tokenizer.encode(text), STOP]
    for fits, otherwise in ((as_text, None), (as_json, schema)):
        grammar = json_grammar([ADD], [STOP], trigger="<call>", otherwise=otherwise)
        matcher = Grammars(tokenizer, vocabulary).matcher(grammar)
        assert (matcher.validate_tokens(ids) == len(ids)) == fits, otherwise


def test_one_call_or_several():
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode(CALL + CALL), STOP]
    for several in (True, False):
        matcher = Grammars(tokenizer, VOCABULARY).matcher(
            json_grammar([ADD], [STOP], trigger="<call>", several=several)
        )
        assert (matcher.validate_tokens(ids) == len(ids)) == several
        assert matcher.validate_tokens([*tokenizer.encode(CALL), STOP]) == len(tokenizer.encode(CALL)) + 1


def test_what_an_answer_may_be_beside_calls_may_combine_schemas():
    tokenizer = tiny_tokenizer()
    both = {"allOf": [{"$ref": "#/$defs/A"}, NAMES_B], "$defs": {"A": NAMES_A}}
    matcher = Grammars(tokenizer, VOCABULARY).matcher(json_grammar([ADD], [STOP], trigger="<call>", otherwise=both))
    ids = [*tokenizer.encode('{"a": 1, "b": 2}'), STOP]
    assert matcher.validate_tokens(ids) == len(ids)


def test_a_grammar_that_was_recorded_without_what_came_later_is_still_known():
    tokenizer = tiny_tokenizer()
    recorded = json.dumps({"forms": [["", NAMES_A, ""]], "stop": [STOP]})
    ids = [*tokenizer.encode('{"a": 1}'), STOP]
    assert Grammars(tokenizer, VOCABULARY).matcher(recorded).validate_tokens(ids) == len(ids)


THOUGHT = "<think>\nIs it {3}?\n</think>\n\n"
RESULT = '{"a": 1}'


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(
    ("text", "where"),
    [
        (RESULT, {"none", "possible"}),
        (THOUGHT + RESULT, {"possible"}),
        (THOUGHT.removeprefix("<think>\n") + RESULT, {"open"}),
        ("<think></think>" + RESULT, {"possible"}),
        (THOUGHT + THOUGHT + RESULT, set()),
        (THOUGHT, set()),
        ("<think>\nIs it {3}?\n" + RESULT, set()),
        (THOUGHT + "Well, " + RESULT, set()),
        (THOUGHT + "\n\n\n" + RESULT, set()),
    ],
)
def test_reasoning_comes_before_what_a_schema_holds(text: str, where: set[str], free: bool):
    tokenizer = template_tokenizer("qwen3")
    stop = tokenizer.eos_token_id
    ids = [*tokenizer.encode(text), stop]
    for reasoning in ("none", "possible", "open"):
        grammar = json_grammar([("", NAMES_A, "")], [stop], reasoning=reasoning)
        if free:
            form = '<tool_call>\n{"name": "add", "arguments": ', NAMES_B, "}\n</tool_call>"
            grammar = json_grammar([form], [stop], trigger="<tool_call>", otherwise=NAMES_A, reasoning=reasoning)
        matcher = Grammars(tokenizer, len(tokenizer)).matcher(grammar)
        assert (matcher.validate_tokens(ids) == len(ids)) == (reasoning in where), reasoning


def test_a_call_after_reasoning_has_parameters_that_fit():
    tokenizer = template_tokenizer("qwen3")
    stop = tokenizer.eos_token_id
    form = '<tool_call>\n{"name": "add", "arguments": ', NAMES_B, "}\n</tool_call>"
    grammar = json_grammar([form], [stop], trigger="<tool_call>", reasoning="possible")
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(grammar)
    for arguments, fits in (('{"b": 2}', True), ('{"b": "2"}', False)):
        ids = [*tokenizer.encode(f"{THOUGHT}So:\n{form[0]}{arguments}{form[2]}"), stop]
        assert (matcher.validate_tokens(ids) == len(ids)) == fits


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
        "days": {"type": "integer"},
        "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "box": {"$ref": "#/$defs/Box"},
    },
    "required": ["city", "unit", "code", "days"],
    "$defs": {"Box": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
XML_STOP = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"

MISTRAL_STOP = '{"name": "stop", "arguments": {}, "id": "a1B2c3D4e"}'


def element(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def xml(**arguments: str) -> str:
    inner = "".join(element(name, value) for name, value in arguments.items())
    return f"<tool_call>\n<function=weather>\n{inner}</function>\n</tool_call>"


RIGHT = {"city": 'Bad\n<b>"Aibling"', "unit": "C", "code": "ab/1", "days": "3"}


@pytest.mark.parametrize(
    ("template", "text", "fits"),
    [
        ("qwen35", xml(**RIGHT), True),
        ("qwen35", "I look.\n" + xml(**RIGHT) + "\n" + XML_STOP, True),
        ("qwen35", xml(**RIGHT, near='"a"', box='{"x": 1.5}'), True),
        ("qwen35", xml(**RIGHT | {"city": ""}), True),
        ("qwen35", "It rains.", True),
        ("qwen35", xml(**RIGHT | {"days": "three"}), False),
        ("qwen35", xml(**RIGHT | {"unit": "K"}), False),
        ("qwen35", xml(**RIGHT | {"code": "ab/x"}), False),
        ("qwen35", xml(**RIGHT, other="1"), False),
        ("qwen35", xml(city="a", unit="C", code="ab/1"), False),
        ("qwen35", xml(**RIGHT, near="bare"), False),
        ("qwen35", XML_STOP.replace("stop", "halt"), False),
        ("mistral_v3", f"[TOOL_CALLS] [{MISTRAL_STOP}]", True),
        ("mistral_v3", f"[TOOL_CALLS] [{MISTRAL_STOP}, {MISTRAL_STOP}]", True),
        ("mistral_v3", "It rains.", True),
        ("mistral_v3", f"[TOOL_CALLS] [{MISTRAL_STOP}", False),
        ("mistral_v3", "[TOOL_CALLS] []", False),
        ("mistral_v3", f"[TOOL_CALLS] [{MISTRAL_STOP.replace('stop', 'halt')}]", False),
        ("mistral_v3", f"[TOOL_CALLS] [{MISTRAL_STOP.replace('a1B2c3D4e', 'a1')}]", False),
        ("mistral_v3", f"[TOOL_CALLS] [{MISTRAL_STOP}][{MISTRAL_STOP}]", False),
        ("mistral_tekken", "It rains.[TOOL_CALLS]stop[ARGS]{}", True),
        ("mistral_tekken", "[TOOL_CALLS]stop[ARGS]{}[TOOL_CALLS]stop[ARGS]{}", True),
        ("mistral_tekken", '[TOOL_CALLS]weather[ARGS]{"city": 1}', False),
        ("llama31", '{"name": "stop", "parameters": {}}', True),
        ("llama31", 'It is {"a"}.', True),
        ("llama31", "", True),
        ("llama31", '{"name": "halt", "parameters": {}}', False),
        ("llama31", '{"name": "weather", "parameters": {"city": 1}}', False),
        ("llama31", '{"name": "stop", "parameters": {}} and on', False),
        ("llama31", ' {"a": 1}', False),
    ],
)
def test_calls_in_other_forms_than_tagged_json(template: str, text: str, fits: bool):
    tokenizer = template_tokenizer(template)
    rendering = Rendering(tokenizer)
    call = rendering.possible_call(TOOLS)
    assert call is not None
    stop = tokenizer.eos_token_id
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(json_grammar(call.forms, [stop], trigger=call.trigger))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (matcher.validate_tokens([*ids, stop]) == len(ids) + 1) == fits
    if fits:
        message = rendering.parse(ids, TOOLS)
        assert not message.malformed
        for made in message.tool_calls:
            if made.name == "weather":
                jsonschema.validate(json.loads(made.arguments), WEATHER)


def test_a_forced_call_in_xml_whose_parameters_cannot_be_held_takes_any_texts():
    tokenizer = template_tokenizer("qwen35")
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=x)$"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    stop = tokenizer.eos_token_id
    forced = Rendering(tokenizer).forced_call(tools, "f")
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(json_grammar(forced.rests, [stop]))
    ids = [*tokenizer.encode(element("a", "anything") + "</function>\n</tool_call>"), stop]
    assert matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("template", ["mistral_v3", "agl_mistral"])
@pytest.mark.parametrize("added", [True, False])
def test_a_call_has_an_id_that_the_policy_writes(template: str, added: bool):
    """Forced and free, with `[TOOL_CALLS]` as a token of the vocabulary or as text."""
    tokenizer = template_tokenizer(template)
    if not added:
        specials, stop = TEMPLATE_TOKENS[template]
        tokenizer = tokenizer_with([t for t in specials if t != "[TOOL_CALLS]"], stop, tokenizer.chat_template)
    rendering, stop = Rendering(tokenizer), tokenizer.eos_token_id
    [form] = rendering.forced_call(TOOLS, "stop").forms
    free = rendering.possible_call(TOOLS)
    assert free is not None
    grammars = {
        "forced": (json_grammar([form], [stop]), {1}),
        "several": (json_grammar(free.forms, [stop], trigger=free.trigger), {0, 1, 2}),
        "one": (json_grammar(free.forms, [stop], trigger=free.trigger, several=False), {0, 1}),
    }
    for way, (grammar, wants) in grammars.items():
        matcher = Grammars(tokenizer, len(tokenizer)).matcher(grammar)
        for n in range(3):
            calls = ", ".join(MISTRAL_STOP for _ in range(n))
            ids = tokenizer.encode(f"[TOOL_CALLS] [{calls}]" if n else "None.", add_special_tokens=False)
            assert (matcher.validate_tokens([*ids, stop]) == len(ids) + 1) == (n in wants), (way, n)
            assert [call.id for call in rendering.parse(ids, TOOLS).tool_calls] == ["a1B2c3D4e"] * n
