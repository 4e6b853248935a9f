"""Has verl's actor and reference compute prefixes that rows share once; loaded as verl's `external_lib`.

A micro-batch's rows become prefix trees, which the model forwards under agl's tree attention; logits are computed where
a trained token is predicted, and nowhere else. Log-probs and entropies then stand where verl has them, 0 elsewhere.

Invariant: for trained tokens, outputs and gradients are those of verl's own rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.engine.fsdp import transformer_impl

from agl.errors import TrainingError
from agl.trainer.local.attention import attention
from agl.trainer.local.learner.prefix_trees import Int64Array, PrefixTrees, chain, divide, prefix_trees
from agl.trainer.local.learner.tree_attention import LOW_PRECISION_TOLERANCE, TOLERANCE, TREE, tree_inputs
from agl_verl.masks import grammars_of, held_answers, hide

WANTED = "agl_wanted"
"""In verl's `output_args`: `Wanted` of a micro-batch."""
FLAGS = ("calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "pad_mode")
"""What verl says of a micro-batch's outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The N trained tokens of B rows, and the P outputs that they are computed from; P <= N.

    Attributes:
        places: int64 [P], in the trees.
        labels: int64 [P], the token that each output predicts.
        source: int64 [N]: which of the P.
        at: int64 [N]: in rows one after another [T], the place before each token,
            where verl has its log-prob.
    """

    places: Int64Array
    labels: Int64Array
    source: Int64Array
    at: Int64Array


def wanted(
    trees: PrefixTrees, ids: Sequence[Int64Array], masks: Sequence[Int64Array], held: Sequence[Sequence[Any]]
) -> Wanted:
    """What rows train.

    Args:
        ids: int64 [T] of each row.
        masks: int64 [R] of each row, 1 where one of its last R tokens is trained.
        held: of each row, as in `agl_verl.masks`; such a row shares no output, as what it hides is its own.
    """
    keys = []
    at = []
    start = 0
    for row, (ids_T, mask_R) in enumerate(zip(ids, masks, strict=True)):
        t = ids_T.size - mask_R.size + np.flatnonzero(mask_R)
        t = t[t > 0]
        keys.append(np.stack([trees.places[row][t - 1], ids_T[t], np.full(t.size, row if held[row] else -1)], 1))
        at.append(start + t - 1)
        start += ids_T.size
    unique, source = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    if not unique.size:  # Rows of padding alone: an output without a token keeps the loss on the model's graph.
        unique = np.zeros((1, 3), np.int64)
    return Wanted(unique[:, 0], unique[:, 1], source.reshape(-1), np.concatenate(at))


def micro_batches(data: Any, max_tokens: int, group: Any) -> list[list[int]]:
    """Rows of each micro-batch, of at most `max_tokens` different tokens or a single row; as many on each rank."""
    batches = divide(_trees(_rows(data["input_ids"])), max_tokens)
    count = torch.tensor([len(batches)], device=get_device_name())
    if dist.is_initialized() and group is not None:
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    while len(batches) < int(count):
        longest = max(batches, key=len)
        batches.remove(longest)
        batches += [longest[: len(longest) // 2], longest[len(longest) // 2 :]]
    return batches


def require_exact(engine: Any) -> None:
    """Compare the model's logits of short random texts in trees with those of each alone.

    Raises:
        TrainingError: they differ, or the model's attention takes more than a mask.
    """
    config = engine.module.config
    device = torch.device(get_device_name())
    pieces = np.split(np.random.default_rng(0).integers(config.get_text_config().vocab_size, size=40), 10)
    texts = [np.concatenate([pieces[i] for i in text]) for text in ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 2, 6, 7, 8, 9))]
    trees = _trees(texts)
    places = torch.from_numpy(np.concatenate(trees.places)).to(device)

    def logits(**inputs: Any) -> Tensor:
        return engine.module(**inputs, use_cache=False).logits[0].float()

    low = engine._autocast_dtype != torch.float32
    try:
        with torch.no_grad(), torch.autocast(device.type, engine._autocast_dtype, enabled=low):
            with attention(config, "eager"):
                alone = [logits(input_ids=torch.from_numpy(text)[None].to(device)) for text in texts]
            with attention(config, TREE):
                names = "input_ids", "position_ids", "attention_mask"
                inputs = dict(zip(names, tree_inputs(trees, device), strict=True))
                ours = logits(**inputs, logits_to_keep=places)
        theirs = torch.cat(alone)
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        why = f"its logits differ by {difference:.1e} of the largest"
    except (NotImplementedError, AttributeError, TypeError, ValueError, IndexError) as error:
        difference = float("inf")
        why = f"{type(error).__name__}: {error}"
    if not difference <= (LOW_PRECISION_TOLERANCE if low else TOLERANCE):
        raise TrainingError(
            f"{type(engine.module).__name__} cannot compute shared prefixes once: {why}",
            hint="set share_prefixes=False",
        )


def _trees(ids: Sequence[Int64Array]) -> PrefixTrees:
    return prefix_trees([chain(ids_T.astype(np.int32)) for ids_T in ids])


def _rows(nested: Tensor) -> list[Int64Array]:
    return [row.numpy() for row in nested.cpu().unbind()]


def _prepare_model_inputs(self: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if self.module.config._attn_implementation != TREE:
        require_exact(self)
        # For good: backward passes compute checkpointed layers again.
        self.module.config._attn_implementation = TREE
    ids = _rows(micro_batch["input_ids"])
    trees = _trees(ids)
    found = wanted(trees, ids, _rows(micro_batch["loss_mask"]), held_answers(micro_batch))
    device = micro_batch["input_ids"].device
    tokens, positions, mask = tree_inputs(trees, device)
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
    keep = torch.from_numpy(found.places).to(device)
    return {**inputs, "logits_to_keep": keep}, {WANTED: found}


def _outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        found: Wanted = output_args[WANTED]
        rows = micro_batch["input_ids"]
        starts = rows.offsets()
        device = rows.device
        held = held_answers(micro_batch)
        if any(held):
            columns = np.full(int(starts[-1]), -1)
            columns[found.at] = found.source
            hide(output.logits, grammars_of(self, output.logits), held, rows, columns)
        labels, source, at = (torch.from_numpy(x).to(device) for x in (found.labels, found.source, found.at))
        temperature = float(micro_batch["temperature"])
        arguments = {
            "temperature_is_one": temperature == 1.0,
            "pad_size": 0,
            "input_ids_rmpad_rolled": labels,
            "temperature_rmpad": torch.full_like(labels, temperature, dtype=torch.float32),
        }
        flags = {
            name: value for name in FLAGS if (value := tu.get_non_tensor_data(micro_batch, name, None)) is not None
        }
        one_row = torch.nested.as_nested_tensor([labels], layout=torch.jagged)
        one = tu.get_tensordict({"input_ids": one_row}, {**flags, "use_remove_padding": True})
        computed = original(self, output, arguments, one, logits_processor_func)

        def spread(nested: Tensor) -> Tensor:
            values_P = nested.values()
            empty = torch.zeros(int(starts[-1]), dtype=values_P.dtype, device=device)
            return torch.nested.nested_tensor_from_jagged(empty.index_copy(0, at, values_P[source]), starts)

        return {name: spread(values) for name, values in computed.items()}

    return prepare_model_outputs


def _micro_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_micro_batches(data: Any, dp_group: Any = None, **options: Any) -> Any:
        if not tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
            return original(data=data, dp_group=dp_group, **options)
        batches = micro_batches(data, data["max_token_len_per_gpu"], dp_group)
        return [tu.index_select_tensor_dict(data, batch) for batch in batches], batches

    return prepare_micro_batches


_engine: Any = FSDPEngineWithLMHead
_engine.prepare_model_inputs = _prepare_model_inputs
_engine.prepare_model_outputs = _outputs(_engine.prepare_model_outputs)
_implementation: Any = transformer_impl
_implementation.prepare_micro_batches = _micro_batches(_implementation.prepare_micro_batches)
