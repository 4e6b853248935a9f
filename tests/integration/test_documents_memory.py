"""docs/one-gpu.md: its table is what the command prints, and what it says fits does."""

from __future__ import annotations

import re
import sys

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import memory
from transformers import LlamaConfig

PAGE = (ROOT / "docs" / "one-gpu.md").read_text()
ENGINE_AND_DRIVER = 1.5
"""GiB: of the driver and kernels, and for keys and values of the longest conversation."""


def test_the_table_is_what_the_command_prints() -> None:
    models = {name: LlamaConfig(**shape) for name, shape in memory.SHAPES.items()}
    printed = memory.table(models, lora=16, tokens=8192)
    shown = PAGE.partition("<!-- memory: begin -->\n")[2].partition("<!-- memory: end -->")[0].strip()
    assert shown == printed, "run: python benchmarks/memory.py --lora 16 --tokens 8192"


def what_is_advised() -> list[tuple[str, str, str]]:
    table = PAGE.partition("## What to set\n")[2]
    names, _, *cards = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    return [(card, name, advice) for card, *row in cards for name, advice in zip(names[1:], row, strict=True)]


@pytest.mark.parametrize(("card", "name", "advice"), what_is_advised(), ids=str)
def test_what_is_advised_fits(card: str, name: str, advice: str) -> None:
    tokens = re.search(r"max_tokens_per_microbatch=(\d+)", advice)
    printed = memory.table(
        {"model": LlamaConfig(**memory.SHAPES[name])},
        tokens=int(tokens[1]) if tokens else 8192 if "LoRA" in advice else 16384,
        lora=16 if "LoRA" in advice else None,
    )
    plain, checkpointing = [float(line.split("|")[-2]) for line in printed.splitlines()[2:]]
    needed = checkpointing if "checkpointing" in advice else plain
    assert needed + ENGINE_AND_DRIVER < int(card.split()[0]) * 1e9 / 2**30
