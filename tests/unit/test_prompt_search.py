"""GEPA and APO find the rules that a model behind HTTP obeys, by what the feedback says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rules import (
    START,
    TRAIN,
    fit,
    gepa,
    rule_provider,
    template_agent,
)  # fmt: skip

import agl
from agl.agents.prompts import load_prompts
from agl.errors import ConfigError, DatasetError
from agl_prompts.components import Component


def test_gepa_finds_every_rule(tmp_path: Path) -> None:
    with rule_provider() as provider:
        result = fit(gepa(provider.url), template_agent(provider.url), tmp_path)
    text = result.prompts["prompt"]
    assert all(f"be {rule}" in text for rule in ("polite", "metric", "brief"))
    assert "{question}" in text
    end = result.history[-1]
    assert (end["held_out/start/reward"], end["held_out/reward"]) == (0.0, 1.0)
    assert load_prompts(tmp_path / "prompts") == {"prompt": agl.PromptTemplate(text)}
    assert end["prompts/best"] == 1.0
    # Five of five: Wilson's interval, and 2 / 2**5, as five differences may all have either sign.
    assert end["held_out/score_low"] == pytest.approx(0.5655, abs=1e-4)
    assert end["held_out/p_value"] == 2 / 2**5


@pytest.mark.parametrize("reply", ["", "{", None])
def test_rubbish_leaves_the_start(tmp_path: Path, reply: Any) -> None:
    with rule_provider() as provider:
        search = gepa(provider.url, reflection=lambda prompt: reply, budget=12)
        result = fit(search, template_agent(provider.url), tmp_path)
        ran = sum(s.body["model"] == "obedient" for s in provider.seen)
    assert result.prompts == {"prompt": START}
    assert result.history[-1]["prompts/rejected"] > 0
    # Nothing but the start was run: four validation tasks, three training tasks at a time, the held-out tasks once.
    assert result.history[-1]["prompts/candidates"] == 1
    assert ran == 4 + 9 + 5
    assert result.history[-1]["held_out/start/reward"] == result.history[-1]["held_out/reward"] == 0.0


def test_needs_a_third_split(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"(?s)has no held-out tasks.*held_out=0\.3"):
        fit(gepa("http://127.0.0.1:1/v1", held_out=None), template_agent("x"), tmp_path)
    with pytest.raises(DatasetError, match="leaves no task on one side"):
        fit(gepa("http://127.0.0.1:1/v1", held_out=1.5), template_agent("x"), tmp_path)
    with pytest.raises(DatasetError, match="no validation tasks"):
        agl.Trainer(gepa("http://127.0.0.1:1/v1"), directory=tmp_path).fit(template_agent("x"), TRAIN)


def test_budget_too_small(tmp_path: Path) -> None:
    with rule_provider() as provider, pytest.raises(ConfigError, match="about 60 is reasonable"):
        fit(gepa(provider.url, budget=9), template_agent(provider.url), tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Say {a} and {b:>{width}}", None),
        ("{b:>{width}} {a!r} {a}", None),
        ("{{json}} {a} {b:>{width}}", None),
        ("{a}", "lost {b}, {width}"),
        ("{a} {b:>{width}} {c}", "has {c}"),
        ('{"a": 1} {a} {b:>{width}}', "twice"),
        ("{a} {b:>{width}} }", "braces do not fit"),
    ],
)
def test_fields(text: str, why: str | None) -> None:
    refusal = Component("p", agl.PromptTemplate("Use {a}, {b:>{width}}")).refusal(text)
    assert refusal is None if why is None else why in (refusal or "")


def test_template_that_cannot_be_formatted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'prompt' cannot be formatted"):
        fit(gepa("http://x/v1"), template_agent("x"), tmp_path, initial_resources={"prompt": agl.PromptTemplate("{")})
