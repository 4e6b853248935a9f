"""Families of models, from small random configurations: each computes in engine and learner what transformers computes,
whatever its length and whatever is beside it, or is refused with the reason before a weight is loaded."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import FAMILIES, write_model
from rich.console import Console
from tiny_engine import VOCABULARY
from transformers import AutoModelForCausalLM

from agl.errors import ModelLoadError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray, IntArray
from agl.trainer.cli.doctor_model import examine_model, show
from agl.trainer.engines.base import Sampling
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.learner.prefix_trees import chain
from agl.trainer.local.model import load_policy
from agl.trainer.local.protocol import Finished, PolicySpec
from agl.trainer.local.worker import Worker
from agl.trainer.policies.frozen import FrozenPolicy
from agl.trainer.report.progress import Progress

torch.set_num_threads(1)

TABLE = "AGL_MODELS_TABLE"
NEAR = 2e-4
"""Nats that float32 rounding explains."""
REFUSED = {
    "Qwen 3 Next": "recurrent state",
    "Granite 4": "recurrent state",
    "Mamba": "recurrent state",
    "Mamba 2": "recurrent state",
    "Falcon H1": "recurrent state",
    "LFM2": "conv layers",
    "RecurrentGemma": "recurrent layers",
    "GPT-Neo": "so many columns",
    "BLOOM": "takes no positions",
    "MPT": "takes no positions",
    "DeepSeek V2": "keys of 16 numbers and values of 8",
    "DeepSeek V3": "keys of 16 numbers and values of 8",
    "Gemma 4": "keys of 8 and of 16 numbers",
    "Falcon, ALiBi": "ALiBi",
}
CONTEXTS = {"Phi-3, long rope": 256, "Llama 4": 64}
"""Tokens, where they are fewer than the model's 1,024 positions."""
FAST = ("Llama 3.1", "Phi-3, long rope", "gpt-oss", "OPT", "BLOOM", "LFM2")
"""What every run of the tests proves."""


@dataclass(frozen=True)
class Row:
    """What the table says of a family."""

    context: str = ""
    shared: str = ""
    refused: str = ""


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, Row]]:
    """Collected for the table, which is written where it is asked for, and every family was tried."""
    found: dict[str, Row] = {}
    yield found
    if (path := os.environ.get(TABLE)) and found.keys() == FAMILIES.keys():
        page = Path(path)
        before, mark, rest = page.read_text().partition("<!-- families -->\n")
        assert mark, f"{page} has no place for the table"
        _, end, after = rest.partition("<!-- end of families -->")
        page.write_text(f"{before}{mark}{table(found)}\n{end}{after}")


def table(found: dict[str, Row]) -> str:
    """Markdown: a line for each family, those that are refused last."""
    lines = ["| family | such as | context | prefixes computed once in updates |", "|---|---|---|---|"]
    for name, row in found.items():
        if not row.refused:
            lines.append(f"| {name} | {FAMILIES[name].examples} | {row.context} | {row.shared} |")
    lines += ["", "| refused | such as | because the model |", "|---|---|---|"]
    for name, row in found.items():
        if row.refused:
            lines.append(f"| {name} | {FAMILIES[name].examples} | {row.refused} |")
    return "\n".join(lines)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.full) for n in FAMILIES])
def test_a_family(name: str, tmp_path: Path, rows: dict[str, Row]) -> None:
    directory = write_model(name, tmp_path / "model")
    if name in REFUSED:
        with pytest.raises(ModelLoadError, match=REFUSED[name]) as loading:
            load_policy(directory, device="cpu")
        with pytest.raises(ModelLoadError) as examining:
            examine_model(str(directory))
        assert examining.value.message == loading.value.message
        assert loading.value.hint
        rows[name] = Row(refused=loading.value.message.partition(" ")[2])
        return

    report = examine_model(str(directory))
    worker = Worker()
    spec = PolicySpec(str(directory), device="cpu", threads=1, learner=LearnerConfig(learning_rate=1e-3))
    info = worker._load([spec], 0, "")[spec.name]
    engine = worker._engine
    learner = worker._policies[spec.name].learner
    assert report.context == info.max_context == engine.max_context == CONTEXTS.get(name, 1024)
    assert bool(report.shortened) == bool(info.shortened) == (name in CONTEXTS)

    plain: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    compare(plain, engine, learner)
    learner.update([trained(chain(random_ids(40, 5)))])
    worker.publish(spec.name)
    plain.load_state_dict(worker._loaded.model.state_dict())
    compare(plain, engine, learner)
    rows[name] = Row(report.shortened or f"{report.context:,} tokens", "yes" if learner._trees else "no")


@pytest.mark.slow
def test_a_context_that_ends_early_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(write_model("Llama 4", tmp_path / "model"))
    said = "64 tokens of 1,024: its chunked attention ends there (attention_chunk_size)"
    show(examine_model(directory))
    assert f"context             {said}\n" in capsys.readouterr().out

    async def loaded(max_context: int | None) -> str:
        screen = Console(file=io.StringIO(), width=200)
        spec = PolicySpec(directory, device="cpu", threads=1, max_context=max_context)
        policy = await FrozenPolicy.load(spec, progress=Progress(console=screen))
        await policy.close()
        return screen.file.getvalue()  # type: ignore[attr-defined]

    assert "a context of 64 tokens: its chunked attention ends there" in asyncio.run(loaded(512))
    assert "context" not in asyncio.run(loaded(32))


def compare(plain: Any, engine: Any, learner: Learner) -> None:
    """Engine and learner give the log-probs of a plain forward pass: of a short row and of the longest, each alone,
    beside the others and a row that branches, and sampled in one batch."""
    short = random_ids(9, 1)
    long = random_ids(engine.max_context, 2)
    for ids in (short, long):
        near(learner.logprobs(ids), plain_logprobs(plain, ids))
        near(engine.logprobs(ids), plain_logprobs(plain, ids))

    contexts = branches(engine.max_context)
    branching = branching_row(contexts)
    scores = learner.sequence_logprobs([chain(short), chain(long), branching])
    near(scores[0][1:], plain_logprobs(plain, short))
    near(scores[1][1:], plain_logprobs(plain, long))
    first = contexts[0].size
    near(scores[2][1:first], plain_logprobs(plain, contexts[0]))
    near(scores[2][first:], plain_logprobs(plain, contexts[1])[-(scores[2].size - first) :])

    for i, size in enumerate((3, engine.max_context // 2, engine.max_context - 12)):
        engine.submit(i, random_ids(size, 10 + i), Sampling(max_tokens=12, seed=i))
    answers = {}
    while engine.has_work:
        answers |= {event.request_id: event.completion for event in engine.step() if isinstance(event, Finished)}
    assert len(answers) == 3
    for i, size in enumerate((3, engine.max_context // 2, engine.max_context - 12)):
        answer = answers[i]
        ids = np.concatenate([random_ids(size, 10 + i), answer.token_ids])
        near(answer.logprobs, plain_logprobs(plain, ids)[-answer.token_ids.size :])


def random_ids(size: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, size).astype(np.int32)


def plain_logprobs(model: Any, ids: IntArray) -> FloatArray:
    """transformers' own log-probs of `ids[1:]`, of this row alone."""
    tokens = torch.from_numpy(ids).long()
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, tokens[1:, None])[:, 0].numpy()


def near(found: FloatArray, expected: FloatArray) -> None:
    np.testing.assert_allclose(found, expected, atol=NEAR)


def branches(context: int) -> list[IntArray]:
    """Two conversations of most of the context that begin alike; the second one turns off shortly before the end."""
    first = random_ids(context - 1, 3)
    return [first, np.concatenate([first[: context - 20], random_ids(12, 4)])]


def branching_row(contexts: Sequence[IntArray]) -> TrainingRow:
    """Both as one row."""
    first, second = contexts
    shared = int(np.flatnonzero(first[: second.size] != second)[0])
    row = chain(np.concatenate([first, second[shared:]]))
    parents = row.parents.copy()
    parents[first.size] = shared - 1
    positions = row.positions.copy()
    positions[first.size :] = np.arange(shared, second.size)
    return replace(row, parents=parents, positions=positions)


def trained(row: TrainingRow) -> TrainingRow:
    """The row with its last 20 tokens sampled by one call."""
    mask = np.arange(len(row)) >= len(row) - 20
    calls = np.where(mask, 0, -1).astype(np.int32)
    return replace(row, call_ids=("c",), calls=calls, action_mask=mask, advantages=mask.astype(np.float32))
