"""The proof, at loading, that engine and learner compute the same policy, and a row the same whatever is beside it.

Invariant: importing this module loads no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from agl.errors import ModelLoadError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray, IntArray
from agl.trainer.local.architecture import CHOOSE, sliding_window

if TYPE_CHECKING:
    from agl.trainer.local.engine.engine import LocalEngine
    from agl.trainer.local.learner.learner import Learner

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of log-probs, in nats, that rounding explains, by the dtype of the weights: they are computed
without autocast."""
LONG = 32
SHORT = 8
"""Tokens of the rows that are compared. A row at the context's end has no more of them: its positions count."""
WIDEST = 512
"""Of a window up to this, the long row is longer by `LONG`, so that it slides over it."""


@contextlib.contextmanager
def refusing_unknown(model: Any, name: str) -> Iterator[None]:
    """Errors of a model that cannot be computed with as engine and learner do become a `ModelLoadError`.

    Args:
        model: a `PreTrainedModel` or a peft model.
        name: where it was loaded from.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise ModelLoadError(
            f"{_class_name(model)} does not compute what the engine and the learner need: "
            f"{type(error).__name__}: {error}",
            hint=CHOOSE,
            path=name,
        ) from error


def require_agreement(model: Any, engine: LocalEngine, learner: Learner, policy: str, name: str) -> None:
    """Compare, on random tokens, the log-probs of a long row alone, beside a short one, in a row that branches, decoded
    token by token, and at the context's last positions.

    Args:
        model: a `PreTrainedModel` or a peft model.
        engine, learner: on that model.
        policy: whose learner it is. name:
            where the model was loaded from.

    Raises:
        ModelLoadError: some differ by more, on average, than rounding explains.
    """
    generator = np.random.default_rng(0)
    window = sliding_window(_base(model).config)
    wanted = LONG if window is None or window.size > WIDEST else window.size + LONG
    long = min(wanted, engine.max_context)
    ids = generator.integers(engine.vocabulary, size=long).astype(np.int32)
    other = generator.integers(engine.vocabulary, size=SHORT).astype(np.int32)
    alone = learner.logprobs(ids)
    branch, trunk = _branching(ids, other)
    other_branch = np.concatenate([ids[:trunk], other])
    together = learner.sequence_logprobs([_chain(ids), _chain(other), branch])
    last = max(0, engine.max_context - SHORT)
    decoded = engine.logprobs(ids, policy=policy)
    dtype = str(_base(model).get_input_embeddings().weight.dtype).removeprefix("torch.")
    differences = {
        "beside a shorter one": together[0][1:] - alone,
        "beside a longer one": together[1][1:] - learner.logprobs(other),
        "in one that branches": together[2][1:long] - alone,
        "in one that it branches from": together[2][long:] - learner.logprobs(other_branch)[-SHORT:],
        "decoded by the engine": decoded - alone,
        "beside one at the context's end": _beside(model, other, 0, last) - _beside(model, other, 0),
        "at the context's end, beside one at its beginning": _beside(model, other, last, 0)
        - _beside(model, other, last),
    }
    for what, difference in differences.items():
        mean = float(np.abs(difference).mean())
        if not mean <= TOLERANCE[dtype]:
            raise ModelLoadError(
                f"a row's log-probs on {_class_name(model)} change by {mean:.2g} nats {what}: what is sampled is not "
                "what would be trained",
                hint=CHOOSE,
                path=name,
            )


def _base(model: Any) -> Any:
    """What a peft model wraps."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _class_name(model: Any) -> str:
    return type(_base(model)).__name__


def _chain(ids: IntArray) -> TrainingRow:
    from agl.trainer.local.learner.prefix_trees import chain

    return chain(ids)


def _branching(ids: IntArray, other: IntArray) -> tuple[TrainingRow, int]:
    """A row that holds `ids` and, after half of them, `other` as well; and how many tokens both have."""
    trunk = ids.size // 2
    row = _chain(np.concatenate([ids, other]))
    parents = row.parents.copy()
    parents[ids.size] = trunk - 1
    positions = row.positions.copy()
    positions[ids.size :] = np.arange(trunk, trunk + other.size)
    return replace(row, parents=parents, positions=positions), trunk


def _beside(model: Any, ids: IntArray, *firsts: int) -> FloatArray:
    """float32 [T - 1]: log-probs of `ids[1:]` in a row that begins at the first of these positions, in a batch with
    rows that begin at the others."""
    import torch

    base = _base(model)
    embedding = base.get_input_embeddings().weight
    at = {"device": embedding.device}
    n = ids.size
    rows = len(firsts)
    mask = torch.full((n, n), torch.finfo(embedding.dtype).min, dtype=embedding.dtype, **at).triu(1)
    positions = torch.tensor(firsts, **at)[:, None] + torch.arange(n, **at)
    tokens = torch.from_numpy(ids).long().to(**at).expand(rows, -1)
    with torch.inference_mode():
        logits = base(
            input_ids=tokens,
            attention_mask=mask.expand(rows, 1, -1, -1),
            position_ids=positions,
            use_cache=False,
        ).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].cpu().numpy()
