"""Attention over prefix trees: equal to a dense mask, forwards and backwards, and linear in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from device import DEVICE
from tiny_learner import CPU, SHAPE, learner
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agl.mdp.sequence import TrainingRow
from agl.trainer.local.learner import tree_attention as subject
from agl.trainer.local.learner.prefix_trees import PrefixTrees, chain, prefix_trees

torch.set_num_threads(1)


def family(common: int = 12, own: int = 9, n: int = 3) -> list[TrainingRow]:
    """Rows that begin alike, and the first two of them longer than the others."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 24, (2, common), dtype=np.int32)
    rows = []
    for k in range(n):
        rest = rng.integers(0, 24, own, dtype=np.int32)
        rows.append(chain(np.concatenate([first, second, rest] if k < 2 else [first, rest])))
    return rows


def dense(query: Any, key: Any, value: Any, sees: torch.Tensor) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    return (scores.masked_fill(~sees, -math.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.slow
def test_flex_attention_stays_compiled_for_more_kinds_of_passes_than_torch_allows():
    """Of 8 by default; the ninth and all later ones would hold the scores of all queries and keys. Seen on a GPU."""
    compiled = 0

    def compile_as_it_is(graph: Any, _: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    attend: Any = torch.compile(flex_attention, backend=compile_as_it_is)
    mask = create_block_mask(lambda _b, _h, query, key: key <= query, None, None, 128, 128, device="cpu")
    kinds = list(itertools.product((torch.float32, torch.bfloat16, torch.float16), (True, False), (1, 2)))[:9]
    torch._dynamo.reset()
    try:
        for dtype, grad, groups in kinds:
            query, key = torch.zeros(1, 2, 128, 8, dtype=dtype), torch.zeros(1, 2 // groups, 128, 8, dtype=dtype)
            with torch.set_grad_enabled(grad):
                attend(query, key, key, block_mask=mask, enable_gqa=groups > 1)
    finally:
        torch._dynamo.reset()
    assert compiled == len(kinds) == 9


@pytest.mark.parametrize("kept", [0, 20], ids=["whole", "kept"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_it_is_attention_with_the_trees_mask(dtype: Any, near: float, kept: int):
    """Also where the first 20 tokens, as far as the second branch, are keys and values of another pass."""
    if dtype == torch.float64 and DEVICE != CPU:
        pytest.skip("FlexAttention computes in float32 at most")
    whole = prefix_trees(family())
    assert len(whole) == 12 + 12 + 3 * 9
    trees = whole.part([0, 1, 2], np.arange(kept, len(whole)), np.arange(kept), 1 if DEVICE == CPU else subject.BLOCK)
    ids, _, mask = subject.tree_inputs(trees, DEVICE)
    size = ids.shape[1]
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, n, 16, dtype=dtype, device=DEVICE).requires_grad_()
        for heads, n in ((4, size), (2, size + trees.kept), (2, size + trees.kept))
    )
    grad = torch.randn(1, size, 4, 16, dtype=dtype, device=DEVICE)
    ours, _ = subject.tree_attention(torch.nn.Module(), query, key, value, mask)
    found = [ours, *torch.autograd.grad(ours, (query, key, value), grad)]
    exact = [x.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for x in (query, key, value)]
    theirs = dense(*exact, sees(trees, size).to(DEVICE))
    wanted = [theirs, *torch.autograd.grad(theirs, exact, grad.to(theirs.dtype))]
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.to(b.dtype), b, rtol=near, atol=near * 4)


@pytest.mark.parametrize(
    "kept", [range(0), range(20), range(200), [*range(33), *range(360, 365)]], ids=["none", "first", "many", "two"]
)
def test_the_mask_of_a_gpu_is_that_of_the_blocks(kept: Sequence[int]):
    rows = [*family(), *family(common=40, own=70, n=4), chain(np.arange(5, dtype=np.int32))]
    whole, size = prefix_trees(rows), 384 if len(kept) < 200 else 256
    others = np.setdiff1d(np.arange(len(whole)), kept)
    trees = whole.part(range(8), others, np.array(kept, np.int64), 128)
    assert size - 128 < len(trees) < size
    query = np.arange(size)[:, None]
    starts, ends = trees.seen_by(size)
    np.testing.assert_array_equal((starts <= query) & (query < ends), sees(trees, size).numpy())


def sees(trees: PrefixTrees, size: int) -> torch.Tensor:
    """bool [size, size + kept]: which keys each query sees, by `PrefixTrees.blocks`; a padded one itself."""
    found = torch.eye(size, size + trees.kept, dtype=torch.bool)
    for first, last, first_key, last_key in trees.blocks.tolist():
        own = torch.ones(last - first, last_key - first_key, dtype=torch.bool)
        found[first:last, first_key:last_key] = own.tril() if first == first_key else own
    return found


GPT2: dict[str, Any] = dict(vocab_size=24, n_embd=16, n_layer=2, n_head=2, attn_implementation="sdpa")
SMALL: dict[str, Any] = SHAPE | {"num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "config", "can"),
    [
        (LlamaForCausalLM, LlamaConfig(**SHAPE), True),
        (Qwen3ForCausalLM, Qwen3Config(**SHAPE | {"head_dim": 16}), True),
        (
            GPT2LMHeadModel,
            GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, attn_implementation="sdpa"),
            DEVICE == CPU,
        ),
        (Gemma2ForCausalLM, Gemma2Config(**SMALL | {"head_dim": 16}), False),
        (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None), True),
        (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=4096), False),
    ],
    ids=["llama", "qwen3", "gpt2", "gemma2: soft cap", "mistral", "mistral: window"],
)
def test_a_model_that_asks_for_more_keeps_its_own_attention(kind: Any, config: Any, can: bool):
    """A window of 4,096 tokens does not show in a short probe: it is refused by its name."""
    model = kind(config).eval()
    before = model.config._attn_implementation
    assert subject.agrees(model.to(DEVICE), DEVICE) is can
    assert model.config._attn_implementation == before
    torch.manual_seed(0)
    rows = family()
    ours = learner(model).sequence_logprobs(rows)
    alone = [learner(model, share_prefixes=False).sequence_logprobs([row])[0] for row in rows]
    for a, b in zip(ours, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.skipif(DEVICE != CPU, reason="the kernel is torch's own there")
def test_a_kernel_that_is_wrong_backwards_alone_is_not_used(monkeypatch: pytest.MonkeyPatch):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.3)).eval()
    assert subject.agrees(model, CPU)
    right = subject._backward

    def wrong(*arguments: Any, **options: Any) -> Any:
        query, key, value = right(*arguments, **options)
        return query, key * 1.1, value

    monkeypatch.setattr(subject, "_backward", wrong)
    assert not subject.agrees(model, CPU)


def test_a_model_whose_attention_gets_a_copy_of_the_mask_keeps_its_own():
    """The copy knows nothing of kept keys. Without them the kernel would end the process."""
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().to(DEVICE)

    def copied(_module: object, args: Any, options: dict[str, Any]) -> Any:
        mask = options["attention_mask"]
        return args, options | {"attention_mask": mask if mask is None else mask[...]}

    model.model.layers[1].self_attn.register_forward_pre_hook(copied, with_kwargs=True)
    assert not subject.agrees(model, DEVICE)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = out if isinstance(out, tuple | list) else [out]
        self.elements = max([self.elements, *(x.numel() for x in tensors if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.skipif(DEVICE != CPU, reason="elsewhere a piece of the scores is the largest")
def test_no_tensor_grows_with_the_square_of_the_tokens():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"max_position_embeddings": 4096}))
    rows = [trained(row) for row in family(common=500, own=100, n=5)]
    size = len(prefix_trees(rows))
    with Largest() as seen:
        learner(model).update(rows, lr_scale=0.0)
    assert seen.elements <= size * SHAPE["intermediate_size"]


def trained(row: TrainingRow) -> TrainingRow:
    """The row with its last 20 tokens sampled by one call."""
    mask = np.arange(len(row)) >= len(row) - 20
    return replace(
        row, call_ids=("c",), calls=np.where(mask, 0, -1), action_mask=mask, advantages=mask.astype(np.float32)
    )
