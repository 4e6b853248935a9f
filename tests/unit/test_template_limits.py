"""A model's chat template is a program of strangers: it ends, or the model is refused."""

from __future__ import annotations

import resource
import sys

import pytest
from tiny_tokenizers import CHATML, TEMPLATE_TOKENS, template_tokenizer, tiny_tokenizer

from agl.errors import ConfigError, ModelLoadError
from agl.trainer.rendering import template_limits
from agl.trainer.rendering.rendering import Rendering

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


def test_what_there_is_no_memory_for_is_an_error_with_a_name():
    source = SHOW + "{% if tools %}{{ 'x' * (2 ** 62) }}{% endif %}"
    with pytest.raises(ModelLoadError, match="chat template takes more memory"):
        rendering_of(source)


@pytest.mark.parametrize("name", TEMPLATE_TOKENS)
def test_usual_templates_take_a_small_part_of_the_limits(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_limits, "LINES", template_limits.LINES // 100)
    Rendering(template_tokenizer(name))
