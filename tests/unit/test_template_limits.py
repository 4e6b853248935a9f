"""A model's chat template is a program of strangers: it ends, or the model is refused."""

from __future__ import annotations

import resource
import sys
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from tiny_tokenizers import (
    CHATML,
    TEMPLATE_TOKENS,
    published_templates,
    published_tokenizer,
    template_tokenizer,
    tiny_tokenizer,
)

from agl.errors import ConfigError, ModelLoadError
from agl.trainer.rendering import template_limits
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import PLACEHOLDER_TOOLS, placeholder_call

RANGE = "{% for a in range(99999) %}"
LOOP = RANGE * 3 + "{% endfor %}" * 3
SHOW = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
DOUBLING = (
    "{% set ns = namespace(x='xxxxxxxxxxxxxxxx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)


def rendering_of(source: str) -> Rendering:
    return Rendering(tiny_tokenizer(CHATML, "<|im_end|>", source))


@pytest.mark.parametrize("source", [LOOP + SHOW, "{% if tools %}" + LOOP + "{% endif %}" + SHOW])
def test_a_template_that_does_not_end_is_refused_when_it_is_loaded(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_limits, "LINES", 100_000)
    tracer = sys.gettrace()
    with pytest.raises(ModelLoadError, match="chat template executes more than"):
        rendering_of(source)
    assert sys.gettrace() is tracer


def test_a_template_that_makes_gigabytes_is_refused_before_it_has(monkeypatch: pytest.MonkeyPatch):
    # An earlier test may have taken more than this one does; the process's peak says nothing then.
    peaks = iter(range(0, 1 << 60, 1 << 20))
    monkeypatch.setattr(template_limits, "_peak", lambda: next(peaks))
    monkeypatch.setattr(template_limits, "MEMORY_BYTES", 20 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match="chat template takes more than 20 MiB"):
        rendering_of(DOUBLING + SHOW)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "less than 1 GiB"


@pytest.mark.parametrize(
    "source",
    [
        SHOW + "{% for a in range(9999999) %}x{% endfor %}",
        SHOW + "{{ 1 // 0 }}",
        "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(500) }}" + SHOW,
    ],
)
def test_a_template_that_fails_is_an_error_with_a_name(source: str):
    with pytest.raises(ConfigError, match="the chat template refuses"):
        rendering_of(source).prompt([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param("{{ 'x' * (2 ** 62) }}", id="repeated"),
        pytest.param("{{ '%9999999999d' % 1 }}", id="wide"),
        pytest.param("{{ 'x' | center(2 ** 40) }}", id="centred"),
        pytest.param("{{ 9 ** (9 ** 9) }}", id="power"),
    ],
)
def test_what_is_constant_is_not_computed_beyond_the_limits(attack: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match=r"the model's chat template (makes|formats|calls|computes)"):
        rendering_of(SHOW + "{% if tools %}" + attack + "{% endif %}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "less than 1 GiB"


MANY = [{"role": role, "content": "hi"} for role in ("user", "assistant")] * 200
LATER = "{% if messages | length > 300 %}"
"""What no conversation has with which templates are tried."""
X = "{% set ns = namespace(x='xxxxxxxxxxxxxxxx', l=[]) %}"
FORTY = "{% for i in range(40) %}"


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        ("{% for a in messages %}" * 4 + "{% endfor %}" * 4, "rounds"),
        ("{% for a in messages %}" * 4 + "{% if false %}{{ a }}{% endif %}" + "{% endfor %}" * 4, "rounds"),
        ("{% macro f(n) %}{% for m in messages %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}{{ f(9) }}", "rounds"),
        (X + FORTY + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "makes a text"),
        (X + FORTY + "{% set ns.x = ns.x + ns.x %}{% endfor %}", "makes a text"),
        (X + FORTY + "{% set ns.l = ns.l + [ns.l, 1] + ns.l %}{% endfor %}", "makes a text"),
        (X + FORTY + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}", "makes a text"),
        (X + FORTY + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}", "makes a text"),
        (X + FORTY + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}", "makes a text"),
        (X + FORTY + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}", "makes a text"),
        (X + FORTY + "{% set ns.x = ns.x | replace('x', ns.x) %}{% endfor %}", "makes a text"),
        (X + FORTY + "{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}", "makes a text"),
        ("{{ 'x' * (2 ** 40) }}", "makes a text"),
        ("{{ ([1] * (2 ** 40)) | length }}", "makes a text"),
        ("{{ ([messages[0].content * 2 ** 24] * 100000) | map('upper') | list | length }}", "makes a text"),
        ("{% for m in messages %}{{ 'x' * 2 ** 20 }}{% endfor %}", "makes a text"),
        ("{{ (messages | length) ** 99999 }}", "number of more than"),
        ("{{ 'x'.ljust(2 ** 40) }}", "number of more than"),
        ("{{ 'x' | center(2 ** 40) }}", "number of more than"),
        ("{{ 'x' | indent(2 ** 40) }}", "number of more than"),
        ("{{ [1] | tojson(indent=2 ** 40) }}", "number of more than"),
        ("{{ lipsum(n=100000) }}", "number of more than"),
        ("{{ '%9999999999d' % 1 }}", "width"),
        ("{{ '%*d' % (2 ** 40, 1) }}", "width"),
        ("{{ '{:>9999999999}'.format(1) }}", "width"),
        ("{{ '%9999999999d' | format(1) }}", "width"),
    ],
)
def test_what_a_template_does_only_for_some_requests_ends_too(
    attack: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "ROUNDS", 50_000)
    model = rendering_of(SHOW + LATER + attack + "{% endif %}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=f"the model's chat template .*{why}"):
        model.prompt(MANY)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "less than 1 GiB"
    assert "hi" in model.decode(model.prompt(MANY[:3]).ids), "other requests are served"


def test_a_template_that_computes_for_long_in_few_rounds_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.05)
    attack = "{% set x = 'x' * 1000000 %}{% for i in range(90000) %}{% if 'y' in x %}{% endif %}{% endfor %}"
    model = rendering_of(SHOW + LATER + attack + "{% endif %}")
    with pytest.raises(ConfigError, match="processor time"):
        model.prompt(MANY)


THINGS = [
    [{"role": "user", "content": "hi <&>"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [placeholder_call("placeholder_tool", "call00001")]},
        {"role": "tool", "content": "r", "tool_call_id": "call00001", "name": "placeholder_tool"},
    ],
]


@pytest.mark.parametrize("tools", [None, [*PLACEHOLDER_TOOLS]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", [*TEMPLATE_TOKENS, *published_templates()])
def test_what_is_rendered_within_limits_is_what_transformers_renders(name: str, tools: Any) -> None:
    tokenizer = template_tokenizer(name) if name in TEMPLATE_TOKENS else published_tokenizer(name)
    model: Any = Rendering(tokenizer)._model
    rendered = 0
    for messages in THINGS:
        for generation in (False, True):
            as_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
            given = as_parts if model._takes_parts else messages
            try:
                expected = tokenizer.apply_chat_template(
                    given, tools=tools, add_generation_prompt=generation, tokenize=False
                )
            except Exception:
                with pytest.raises(TemplateError):
                    model.render(messages, tools, generation)
            else:
                assert model.render(messages, tools, generation) == expected
                rendered += 1
    assert rendered


@pytest.mark.parametrize("name", TEMPLATE_TOKENS)
def test_usual_templates_take_a_small_part_of_the_limits(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_limits, "LINES", template_limits.LINES // 100)
    Rendering(template_tokenizer(name))
