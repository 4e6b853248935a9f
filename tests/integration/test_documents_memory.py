"""docs/one-gpu.md: its table is what the command prints, and what it says fits does."""

from __future__ import annotations

import argparse
import copy
import re
import sys

import pytest
import test_learner_options as options
import torch
from allocations import peak_bytes
from device import LARGE_BFLOAT16
from paths import ROOT
from transformers import LlamaConfig

from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.memory import update_memory
from agl.trainer.local.model import LoadedPolicy, add_adapter

sys.path.append(str(ROOT / "benchmarks"))

import learner as learner_benchmark
import memory

PAGE = (ROOT / "docs" / "one-gpu.md").read_text()
ENGINE_AND_DRIVER = 1.5
"""GiB: of the driver and kernels, and for keys and values of the longest conversation."""


def test_the_table_is_what_the_command_prints() -> None:
    models = {name: LlamaConfig(**shape) for name, shape in memory.SHAPES.items()}
    printed = memory.table(models, lora=16, tokens=8192)
    shown = PAGE.partition("<!-- memory: begin -->\n")[2].partition("<!-- memory: end -->")[0].strip()
    assert shown == printed, "run: python benchmarks/memory.py --lora 16 --tokens 8192"


def test_peaks_on_a_gpu_against_the_formula() -> None:
    """The model is that of benchmarks/learner.py; 24 tokens of each call are trained."""
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("## On a GPU")[2]
    rows = re.findall(r"^\| 32 \| (\d) \| (.*?) \| ([\d,]+) \|.* ([\d,]+) \|$", section, re.MULTILINE)
    subject = learner_benchmark.model_for(argparse.Namespace(model=None, size="0.5b", lora=None), torch.device("meta"))
    parameters = sum(p.numel() for p in subject.parameters())
    megabytes, more = [], []
    for turns, kind, forwarded, peak in rows:
        tokens = int(forwarded.replace(",", ""))
        config = LearnerConfig(share_prefixes="group trees" in kind)
        needed = update_memory(
            subject, config, tokens, row_tokens=32 + 40 * int(turns), trained=32 * 24 * int(turns), autocast=True
        )
        megabytes.append(round((needed.total - (4 + 8) * parameters) / 1e6))
        more.append(round(100 * megabytes[-1] / int(peak.replace(",", "")) - 100))
    named = [f"{abs(m)} % {'more' if m > 0 else 'less'}" for m in more]
    assert f"{', '.join(f'{m:,}' for m in megabytes[:-1])} and {megabytes[-1]:,} MB: {', '.join(named)}." in section
    assert f"the formula says {max(more)} % more to {-min(more)} % less" in PAGE


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


@pytest.mark.parametrize(
    ("name", "length", "checkpointing"),
    [
        ("llama-32k", 256, True),
        pytest.param("llama-30m", 512, True, marks=LARGE_BFLOAT16),
        pytest.param("llama-30m", 512, False, marks=LARGE_BFLOAT16),
    ],
)
def test_adapters_take_what_the_bound_says_or_less(
    name: str, length: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on the CPU by torch's allocator, for 5M and 31M parameters; at most a third less, where layers are
    computed again."""
    for module in ("agl.trainer.local.learner.logprobs", "agl.trainer.local.memory"):
        monkeypatch.setattr(f"{module}.CHUNK_ELEMENTS", length << 14)
    base = copy.deepcopy(options.model(name)).to("cpu")
    base.set_attn_implementation("sdpa")
    shape, device = copy.deepcopy(base), torch.device("cpu")
    loaded = LoadedPolicy(base.to(torch.bfloat16).eval(), None, device, torch.bfloat16, 2048)
    policy = add_adapter(loaded, LoraSpec(rank=16))
    config = LearnerConfig(
        learning_rate=1e-4,
        autocast="bfloat16",
        max_tokens_per_microbatch=2 * length,
        activation_checkpointing=checkpointing,
    )
    learner = Learner(policy.model, config, device)
    rows = [options.long_row(i, length, 32_000) for i in range(4)]
    learner.update(rows)  # makes the moments
    learner._optimizer.zero_grad(set_to_none=True)
    weights = list(policy.model.parameters())
    resident = sum(p.nbytes for p in weights) + sum(2 * p.nbytes for p in weights if p.requires_grad)
    peak = resident + peak_bytes(lambda: learner.update(rows), device)
    full = memory.update_memory(
        shape, config, 2 * length, row_tokens=length, trained=2 * rows[0].n_actions, autocast=True
    )
    bound = memory.with_adapters(shape, 16, full).total
    assert peak < bound < 1.33 * peak
