"""Agent Lightning 0.3's room selector: its trainer, its `APO` and its adapter, under their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import AsyncOpenAI
from rooms import BASELINE, CRITERIA, room_provider, selector, tasks

import agl.compat as agl
from agl.compat.algorithm.apo import APO
from agl.errors import ConfigError


def test_room_selector_improves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    every = tasks()
    with room_provider() as provider:
        algorithm = APO[dict](
            AsyncOpenAI(base_url=provider.url, api_key="k"),
            gradient_model="critic", apply_edit_model="editor", val_batch_size=10, gradient_batch_size=4, beam_width=2,
            branch_factor=2, beam_rounds=3, _poml_trace=True,
        )  # fmt: skip
        with pytest.raises(ConfigError, match="no best prompt yet"):
            algorithm.get_best_prompt()
        trainer = agl.Trainer(
            algorithm=algorithm,
            n_runners=8,
            initial_resources={"prompt_template": agl.PromptTemplate(template=BASELINE, engine="f-string")},
            adapter=agl.TraceToMessages(),
            directory=tmp_path,
        )
        result = trainer.fit(agent=selector(provider.url), train_dataset=every[::2], val_dataset=every[1::2])
    best = algorithm.get_best_prompt()
    assert isinstance(best, agl.PromptTemplate)
    assert best.template == result.prompts["prompt_template"]
    assert all(criterion in best.template for criterion in CRITERIA)
    full = [entry["val/reward"] for entry in result.history if entry.get("prompts/best") == entry.get("val/score")]
    assert full[0] < 0.5
    assert result.history[-1]["prompts/best"] == 1.0
    shown = capfd.readouterr().err
    assert "no held-out tasks" in shown
    assert "+Find a room at {time}" in shown
