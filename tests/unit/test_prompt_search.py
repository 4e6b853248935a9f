"""GEPA and APO find the rules that a model behind HTTP obeys, by what the feedback says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from rules import HELD_OUT, START, TRAIN, VAL, reflections, rule_provider, template_agent

import agl
from agl.agents.prompts import load_prompts

RESOURCES = {"prompt": agl.PromptTemplate(START)}


def gepa(url: str, **options: Any) -> agl.GEPA:
    return agl.GEPA(reflection=agl.LLM(url, "rewriter"), **{"budget": 80, "held_out": HELD_OUT, **options})


def apo(url: str, **options: Any) -> agl.APO[Any]:
    client = AsyncOpenAI(base_url=url, api_key="k")
    settings = {"beam_width": 2, "branch_factor": 2, "beam_rounds": 3, "gradient_batch_size": 2, "val_batch_size": 3}
    models = {"gradient_model": "critic", "apply_edit_model": "rewriter"}
    return agl.APO(client, **{**settings, **models, **options})


def fit(algorithm: Any, agent: Any, directory: Path, *, resume: bool = False, **options: Any) -> agl.Result:
    settings = {"initial_resources": RESOURCES, "n_workers": 8, "progress": False, "directory": directory}
    return agl.Trainer(algorithm, **{**settings, **options}).fit(agent, TRAIN, VAL, resume=resume)


def test_gepa_finds_every_rule(tmp_path: Path) -> None:
    with rule_provider() as provider:
        result = fit(gepa(provider.url), template_agent(provider.url), tmp_path)
    text = result.prompts["prompt"]
    assert all(f"be {rule}" in text for rule in ("polite", "metric", "brief"))
    assert "{question}" in text
    start, end = result.history[-2:]
    assert (start["held_out/start/reward"], end["held_out/reward"]) == (0.0, 1.0)
    assert load_prompts(tmp_path / "prompts") == {"prompt": agl.PromptTemplate(text)}
    assert result.history[-1]["prompts/best"] == 1.0


def test_apo_finds_every_rule(tmp_path: Path) -> None:
    with rule_provider() as provider:
        algorithm = apo(provider.url, held_out=HELD_OUT)
        result = fit(algorithm, template_agent(provider.url), tmp_path)
    assert algorithm.get_best_prompt() == agl.PromptTemplate(result.prompts["prompt"])
    assert result.history[-1]["held_out/reward"] == 1.0
    assert result.history[-2]["held_out/start/reward"] == 0.0
