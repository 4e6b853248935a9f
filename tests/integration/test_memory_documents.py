"""docs/memory.md: its program runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import documents
import pytest
from langchain_openai import ChatOpenAI


@pytest.mark.night
def test_the_memory_page(untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [block, *_] = [b for b in documents.blocks() if b.page == "docs/memory.md" and b.language == "python"]
    # One policy less is loaded, and one step taken.
    text = block.text.replace('"before": "Qwen/Qwen2.5-1.5B-Instruct", ', "")
    text = text.replace("Qwen/Qwen2.5-1.5B-Instruct", str(untrained_model))
    assert "steps=200" in text
    small = "steps=1, batch_size=2, group_size=2, max_response_tokens=8, threads=1"
    names: dict[str, Any] = {
        "model": ChatOpenAI(model="m", base_url="http://provider.invalid/v1", api_key="none"),  # type: ignore[arg-type]
        "score": lambda task, output: len(str(output)) % 2,
        "train": [{"question": f"Who is {name}?"} for name in ("Ann", "Bea")],
        "held_out": [{"question": "Who is Cid?"}],
    }
    exec(text.replace("steps=200", small), names)
    assert list(names["report"].policies) == ["after", "after, memory off", "after, memory shuffled"]
    assert {hit.value["input"] for hit in names["memory"].search(("clerk",))} == {"Who is Ann?", "Who is Bea?"}
