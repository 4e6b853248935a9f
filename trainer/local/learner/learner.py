"""The learner: updates of a causal language model on merged rows.

Invariant: an optimiser step is a function of the weights, the data and the step's number alone; how rows are merged or
cut into micro-batches changes it by rounding only, and a step that is not finite is not taken.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from agl.errors import CheckpointError, ConfigError, NoTrainableDataError, TrainingError
from agl.mdp.sequence import BoolArray, TrainingRow
from agl.mdp.types import FloatArray, IntArray
from agl.trainer.local.architecture import sliding_window
from agl.trainer.local.attention import attention
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.grammar import Grammars
from agl.trainer.local.learner.logprobs import LogProbModel, LogProbs
from agl.trainer.local.learner.metrics import Totals, not_finite
from agl.trainer.local.learner.microbatches import MicroBatch, collate, length_buckets
from agl.trainer.local.learner.minibatches import minibatches
from agl.trainer.local.learner.prefix_trees import PrefixTrees, begin_once, chain, divide, prefix_trees
from agl.trainer.local.learner.ranks import Ranks
from agl.trainer.local.learner.targets import (
    LossRow,
    Pairs,
    correct,
    estimate_advantages,
    preferences,
    without_sampler,
)
from agl.trainer.local.learner.tree_attention import BLOCK, TREE, Kept, agrees
from agl.trainer.local.learner.trust_region import TrustRegion
from agl.trainer.objectives.gae import value_loss
from agl.trainer.objectives.kl import kl_penalty
from agl.trainer.objectives.losses import loss_of
from agl.trainer.objectives.reduction import weighted

__all__ = ["Learner", "LearnerConfig"]

WORTH_SHARING = 0.9
"""On a GPU, rows that only follow are written into each other where that leaves less than this share of their tokens:
their own attention has a faster kernel. Beginnings are computed once where each leaves less of a full micro-batch."""


class Learner:
    """Trains the weights of `model` that require gradients, in place.

    Args:
        model: a `PreTrainedModel` or a peft model. It is put in eval mode and left there: no dropout but the adapter's.
        config: the settings of an update.
        device: where the model is.
        use: switches the model to this policy before each use, where it holds the adapters of several.
        tokenizer: for rows that were held to a grammar.
        ranks: the processes that share each update; each has a learner like this one, and calls it with the same.
        context: tokens of the longest row.

    Attributes:
        autocast: dtype that updates compute in, if not the weights' own.

    Raises:
        ConfigError: the model has nothing to train.
    """

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        device: torch.device,
        use: Callable[[], None] | None = None,
        tokenizer: Any = None,
        ranks: Ranks | None = None,
        context: int = sys.maxsize,
    ) -> None:
        self.config = config
        self._ranks = ranks or Ranks()
        self._use = use or (lambda: None)
        self._use()
        lower = (config.autocast or ("bfloat16" if device.type == "cuda" else "float32")) == "bfloat16"
        self.autocast = torch.bfloat16 if lower else None
        self._model = model.eval()
        self._device = device
        self._value_head = _value_head(model, device) if config.critic else None
        self._policy = LogProbModel(
            model,
            device,
            self.autocast,
            self._value_head,
            activation_checkpointing=config.activation_checkpointing,
        )
        self._policy_without_autocast = LogProbModel(model, device, None)
        self._window = sliding_window(self._policy.model.config, context)
        # Trees know no windows, and are compared on texts that are shorter than most.
        self._trees = (
            config.share_prefixes and self._window is None and agrees(self._policy.model, device, self.autocast)
        )
        self._max_tokens = config.max_tokens_per_microbatch or (16384 if device.type == "cuda" else 4096)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.grammars = None if tokenizer is None else Grammars(tokenizer, self._vocabulary)
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ConfigError("every weight of the model is frozen", hint="load it whole, or with a LoraSpec")
        # Those of every adapter: only those of the active one take part.
        self._dropouts = [m for n, m in model.named_modules() if "lora_dropout" in n and isinstance(m, nn.Dropout)]
        groups: list[dict[str, Any]] = [{"params": list(self._trained.values()), "share": 1.0}]
        if self._value_head is not None:
            head = {f"value_head.{name}": p for name, p in self._value_head.named_parameters()}
            share = (config.value_learning_rate or config.learning_rate) / (config.learning_rate or 1.0)
            groups.append({"params": list(head.values()), "share": share})
            self._trained |= head
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._region = None
        if config.max_kl is not None and config.policy_loss not in ("nll", "dpo"):
            self._region = TrustRegion(self._optimizer, config.max_kl)
        self._updates = 0
        refers = config.kl_coef > 0 or config.policy_loss == "dpo"
        self._reference = _reference(model, self._policy, device, self.autocast) if refers else None

    @property
    def n_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self._trained.values())

    # -- training -----------------------------------------------------------------------------------------------

    def update(self, sequences: Seq[TrainingRow], lr_scale: float = 1.0, pairs: Pairs = ()) -> dict[str, float]:
        """One update on the rows of a training step: `update_epochs` x `minibatches` optimiser steps.

        `TrainingRow.logprobs` are the old log-probs of the importance ratio. `TrainingRow.weights` are set here, for
        each optimiser step, by `config.loss_agg`. With a value head, `TrainingRow.advantages` are the calls' returns;
        with the loss "nll" they weigh each token's negative log-likelihood: 1 for plain fine-tuning.

        Args:
            sequences: the rows, as `agl.mdp.sequence.merge` makes them.
            lr_scale: multiplies the learning rate of this update.
            pairs: for the loss "dpo", the rollouts to compare, (chosen, rejected); one may be in several pairs. Pairs
                that share a rollout stay in one optimiser step.

        Returns:
            Means over the optimiser steps: "loss", "grad_norm" (before clipping). Means over the trained tokens:
            "abs_log_ratio" and "approx_kl" (k1) between the policy in training and the one that sampled,
            "entropy" (minus log-prob of the sampled token, nats) and, where they are used or the loss has them,
            "clip_fraction", "dual_clip_fraction",
            are used, "reference_kl" (by `kl_kind`), "rollout_is_weight", "value_loss", "value_error" (absolute); with
            the loss "nll" there is "nll" (nats, before weighing) instead of those of a ratio, and of the entropy. With
            "dpo" means over the pairs instead: "chosen_logprob" and "rejected_logprob" (of all tokens of a rollout),
            "chosen_reward" and "rejected_reward" (beta times the log-ratio to the reference), "reward_margin" and
            "reward_accuracy" (share of pairs with a margin above 0), each before the optimiser step. Also
            "step_kl" (of the optimiser step that would have moved the policy most, before it was shortened, nats per
            token), "step_taken" (the smallest share of an optimiser step that `max_kl` allowed),
            "max_abs_log_ratio", "learning_rate", "optimizer_steps", "rows", "tokens" (trained), "forwarded_tokens" (in
            one pass over the rows, without padding) and "unique_tokens": those of the prefix trees of all rows, the
            fewest that could be forwarded.

        Raises:
            NoTrainableDataError: no row holds a trained token.
            TrainingError: bad rows, or a loss or gradient that is not finite; the message names rollouts and calls. The
                optimiser step that it would have gone into is not taken; earlier ones of the same update stand.
        """
        paired = {rollout for pair in pairs for rollout in pair}
        dpo = self.config.policy_loss == "dpo"
        rows = [s for s in sequences if s.n_actions and (not dpo or s.rollout_id in paired)]
        if not rows:
            raise NoTrainableDataError(
                f"none of {len(sequences)} rows holds a token to train",
                hint="see why with `agl explain`: cancelled and failed answers are masked",
            )
        if self.config.policy_loss in ("nll", "dpo"):
            rows = [without_sampler(row) for row in rows]
        self._check(rows)
        if missing := paired - {row.rollout_id for row in rows} if dpo else paired:
            raise TrainingError(
                f"{len(missing)} rollout(s) of the pairs have no token to train"
                if dpo
                else f"pairs were passed to the loss {self.config.policy_loss!r}",
                hint="leave their pairs out" if dpo else "pairs are for policy_loss='dpo'",
                rollout=min(missing),
            )
        self._use()
        learning_rate = self.config.rate(self._updates) * lr_scale
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["share"]
        totals = Totals()
        shuffle = np.random.default_rng([self.config.seed, self._updates])
        loss_rows = self._loss_rows(rows)
        with self._adapter_dropout():
            for _ in range(self.config.update_epochs):
                for minibatch in minibatches(loss_rows, self.config.minibatches, shuffle, pairs):
                    self._step(minibatch, totals, pairs)
        self._updates += 1
        metrics = totals.metrics(self._ranks.gather)
        return metrics | {
            "learning_rate": learning_rate,
            "rows": float(len(rows)),
            "tokens": float(sum(s.n_actions for s in rows)),
            "forwarded_tokens": metrics["forwarded_tokens"] / self.config.update_epochs,
            "unique_tokens": float(len(prefix_trees(rows))),
        }

    def _loss_rows(self, rows: Seq[TrainingRow]) -> list[LossRow]:
        """The rows with everything that the steps of an update need, by the weights before the first of them."""
        masks = [row.action_mask for row in rows]
        loss_rows = [LossRow(row, row.logprobs) for row in rows]
        if self.config.rollout_is is not None:
            proximal = self._forward(self._policy, rows, masks)
            loss_rows = [correct(r, x, self.config) for r, x in zip(loss_rows, proximal, strict=True)]
        if self._reference is not None:
            with self._reference() as model:
                reference = self._forward(model, rows, masks)
            loss_rows = [replace(r, reference_logprobs=x) for r, x in zip(loss_rows, reference, strict=True)]
        if self._value_head is not None:
            values = self._forward(self._policy, rows, masks, "values")
            loss_rows = estimate_advantages(loss_rows, values, self.config)
        return loss_rows

    def _step(self, rows: Seq[LossRow], totals: Totals, pairs: Pairs) -> None:
        """One optimiser step: the loss is the weighted sum over all trained tokens of these rows."""
        self._optimizer.zero_grad(set_to_none=True)
        config = self.config
        sequences = [row.sequence for row in rows]
        preference_loss = None
        if config.policy_loss == "dpo":
            rollouts = {s.rollout_id for s in sequences}
            logprobs = self._forward(self._policy, sequences, [s.action_mask for s in sequences])
            members = [pair for pair in pairs if pair[0] in rollouts]
            rows, preference_loss, metrics = preferences(rows, logprobs, members, config.beta)
            sequences = [row.sequence for row in rows]
            totals.add(metrics)
        else:
            sequences = weighted(sequences, config.loss_agg, loss_scale_factor=config.loss_scale_factor)
        losses: list[tuple[list[TrainingRow], Tensor]] = []
        before: dict[int, Tensor] = {}
        total = torch.zeros((), device=self._device)
        for bucket, batch in self._microbatches(self._policy, sequences, [s.action_mask for s in sequences]):
            members = [replace(rows[i], sequence=sequences[i]) for i in bucket]
            with self._policy.computing(batch):
                output = self._policy(batch, with_entropy=self.config.entropy_coef > 0)
                loss_N = self._loss(output, members, totals)
                weights_N = self._gather(
                    [row.sequence.weights for row in members], [row.sequence.action_mask for row in members]
                )
                loss = (weights_N * loss_N).sum()
                loss.backward()
            total += loss.detach()
            totals.forwarded += batch.n_tokens
            losses.append(([row.sequence for row in members], loss_N.detach()))
            by_row = output.logprobs.detach().split([row.sequence.n_actions for row in members])
            before |= zip(bucket, by_row, strict=True)
        self._ranks.add_gradients(self._trained.values())
        self._ranks.add(total)
        if preference_loss is not None:
            total = preference_loss.to(total)
        norm = nn.utils.clip_grad_norm_(self._trained.values(), self.config.grad_clip or float("inf"))
        loss_value, norm_value = torch.stack([total, norm]).tolist()
        if not np.isfinite([loss_value, norm_value]).all():
            self._optimizer.zero_grad(set_to_none=True)
            everywhere = self._ranks.gather([(members, loss_N.cpu()) for members, loss_N in losses])
            raise not_finite([of for part in everywhere for of in part], loss_value, norm_value)
        self._optimizer.step()
        if self._region is not None:
            before = self._ranks.union({i: logprobs_N.cpu() for i, logprobs_N in before.items()})
            totals.add_held(*self._region.hold(sequences, before, self._trained_logprobs))
        totals.add_step(loss_value, norm_value)

    def _trained_logprobs(self, rows: Seq[TrainingRow]) -> Tensor:
        """Of the trained tokens, one row after another, computed as in updates; float32 [N], on the CPU."""
        masks = [row.action_mask for row in rows]
        by_row = self._forward(self._policy, rows, masks)
        return torch.from_numpy(np.concatenate([x[mask] for x, mask in zip(by_row, masks, strict=True)]))

    def _loss(self, output: LogProbs, rows: Seq[LossRow], totals: Totals) -> Tensor:
        """The loss of each trained token, float32 [N]."""
        config = self.config
        masks = [row.sequence.action_mask for row in rows]

        def gather(values: Seq[FloatArray | None]) -> Tensor:
            return self._gather([v for v in values if v is not None], masks)

        logprobs_N = output.logprobs
        advantages_N = gather([row.sequence.advantages for row in rows])
        metrics: dict[str, Tensor] = {}
        if config.policy_loss in ("nll", "dpo"):
            loss_N = -advantages_N * logprobs_N
            if config.policy_loss == "nll":
                metrics["nll"] = -logprobs_N
        else:
            old_logprobs_N = gather([row.old_logprobs for row in rows])
            policy = loss_of(
                config.policy_loss,
                logprobs_N,
                old_logprobs_N,
                advantages_N,
                _call_numbers([row.sequence for row in rows]).to(self._device),
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                clip_c=config.dual_clip,
            )
            loss_N = policy.loss
            metrics = {
                "abs_log_ratio": policy.log_ratio.abs(),
                "approx_kl": -policy.log_ratio,
                "entropy": -logprobs_N,
            }
            if policy.clipped is not None:
                metrics["clip_fraction"] = policy.clipped
            if policy.dual_clipped is not None:
                metrics["dual_clip_fraction"] = policy.dual_clipped
        if config.rollout_is is not None:
            metrics["rollout_is_weight"] = gather([row.importance for row in rows])
            loss_N = loss_N * metrics["rollout_is_weight"]
        if config.kl_coef:
            reference_N = gather([row.reference_logprobs for row in rows])
            metrics["reference_kl"] = kl_penalty(logprobs_N, reference_N, config.kl_kind)
            loss_N = loss_N + config.kl_coef * metrics["reference_kl"]
        if output.entropies is not None:
            loss_N = loss_N - config.entropy_coef * output.entropies
        if output.values is not None:
            targets_N = gather([row.value_targets for row in rows])
            old_values_N = gather([row.values for row in rows])
            metrics["value_loss"] = value_loss(output.values, old_values_N, targets_N, config.value_clip)
            metrics["value_error"] = (output.values - targets_N).abs()
            loss_N = loss_N + config.value_coef * metrics["value_loss"]
        totals.add(metrics)
        return loss_N

    def _gather(self, values: Seq[FloatArray], masks: Seq[BoolArray]) -> Tensor:
        """The values of the trained tokens, in the order of the micro-batch's wanted tokens; float32 [N]."""
        flat_N = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])
        return torch.from_numpy(flat_N).to(self._device)

    @contextlib.contextmanager
    def _adapter_dropout(self) -> Iterator[None]:
        """Adapter dropout is on inside; its draws depend on the seed and the update's number alone."""
        if not self._dropouts:
            yield
            return
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(int(np.random.default_rng([self.config.seed, self._updates, 1]).integers(2**63)))
            with self._dropout(on=True):
                yield

    @contextlib.contextmanager
    def _dropout(self, *, on: bool) -> Iterator[None]:
        before = [module.training for module in self._dropouts]
        try:
            for module in self._dropouts:
                module.train(on)
            yield
        finally:
            for module, was in zip(self._dropouts, before, strict=True):
                module.train(was)

    # -- log-probs ----------------------------------------------------------------------------------------------

    def logprobs(self, token_ids: IntArray, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]`, each after the tokens before it, without autocast."""
        return self.sequence_logprobs([chain(token_ids, temperature)])[0][1:]

    def sequence_logprobs(self, sequences: Seq[TrainingRow], *, trained_only: bool = False) -> list[FloatArray]:
        """float32 [T] per row: each token's log-prob in its own context, without autocast; 0 for a first token, and
        with `trained_only` for each that is not trained."""
        self._check(sequences)
        self._use()
        wanted = [s.action_mask if trained_only else s.parents >= 0 for s in sequences]
        return self._forward(self._policy_without_autocast, sequences, wanted)

    def _forward(
        self,
        model: LogProbModel,
        rows: Seq[TrainingRow],
        wanted: Seq[BoolArray],
        output: Literal["logprobs", "values"] = "logprobs",
    ) -> list[FloatArray]:
        """float32 [T] per row: log-probs or values of the wanted tokens, 0 elsewhere."""
        by_row: dict[int, FloatArray] = {}
        with torch.no_grad(), self._dropout(on=False):
            for bucket, batch in self._microbatches(model, rows, wanted):
                values_N = getattr(model(batch), output).cpu().numpy()
                ends = np.cumsum([len(places) for places in batch.places])
                for i, places, part in zip(bucket, batch.places, np.split(values_N, ends[:-1]), strict=True):
                    by_row[i] = np.zeros(len(rows[i]), dtype=np.float32)
                    by_row[i][places] = part
        by_row = self._ranks.union(by_row)
        return [by_row[i] for i in range(len(rows))]

    def _microbatches(
        self, model: LogProbModel, rows: Seq[TrainingRow], wanted: Seq[BoolArray]
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Each forward pass of this process over the rows: the indices of its rows, and its tensors. Its backward pass
        comes before the next one, which may be that of what several begin with."""
        shared = prefix_trees(rows) if self._trees else None
        trees = shared is not None and (
            self._device.type == "cpu"
            or not all(row.is_chain for row in rows)
            or len(shared) < WORTH_SHARING * sum(map(len, rows))
        )
        lengths = [len(row) for row in rows]
        whole = shared if trees else None

        def buckets_of(max_tokens: int) -> list[list[int]]:
            return length_buckets(lengths, max_tokens) if whole is None else divide(whole, max_tokens)

        def cost(bucket: list[int]) -> int:
            if whole is None:
                return len(bucket) * max(lengths[i] for i in bucket)
            return np.unique(np.concatenate([whole.places[i] for i in bucket])).size

        def collated(bucket: list[int], trees: PrefixTrees | None = None, kept: Kept | None = None) -> MicroBatch:
            some = [rows[i] for i in bucket]
            masks = [wanted[i] for i in bucket]
            return collate(
                some,
                masks,
                self._device,
                model.mask_dtype,
                trees=trees,
                kept=kept,
                grammars=self.grammars,
                window=self._window,
            )

        buckets = self._ranks.share(buckets_of, cost, self._max_tokens)
        if whole is None:
            yield from ((bucket, collated(bucket)) for bucket in buckets)
            return
        worth = (1 - WORTH_SHARING) * self._max_tokens
        block = 1 if self._device.type == "cpu" else BLOCK
        for beginning, parts in begin_once(whole, buckets, worth, block):
            kept, n_kept = Kept(), len(beginning)
            if n_kept:
                model(collated([], beginning, kept))
            for bucket, trees in parts:
                batch = collated(bucket, trees, kept or None)
                yield bucket, replace(batch, n_tokens=batch.n_tokens + n_kept)
                n_kept = 0
            with attention(model.model.config, TREE):
                kept.backward()

    def _check(self, rows: Seq[TrainingRow]) -> None:
        for row in rows:
            fault = None
            mask = row.action_mask
            if not (np.isfinite(row.advantages[mask]).all() and np.isfinite(row.logprobs[mask]).all()):
                fault = "an advantage or a behaviour log-prob that is not finite"
            elif (row.parents[mask] < 0).any():
                fault = "a sampled token with no token before it"
            elif len(row) and not 0 <= row.token_ids.min() <= row.token_ids.max() < self._vocabulary:
                fault = f"a token id outside the model's 0 to {self._vocabulary - 1}"
            if fault:
                raise TrainingError(
                    f"a row to train on holds {fault}",
                    hint="no weight was changed; look at the rollout with `agl explain`",
                    rollout=row.rollout_id,
                    calls=", ".join(row.call_ids),
                )

    def drop_gradients(self) -> None:
        """Free the last step's gradient, a quarter of the memory that training all weights takes."""
        self._optimizer.zero_grad(set_to_none=True)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on: trained weights, optimiser, update count.

        As torch's own, it holds the tensors themselves, which the next update changes: save it before. (Copies of
        weights and moments would be the most memory that training takes.) Shuffling and dropout draw from generators
        seeded by the update's number, so the count stands for them too.
        """
        return {
            "weights": {name: _whole(p) for name, p in self._trained.items()},
            "optimizer": _whole(self._optimizer.state_dict()),
            "updates": self._updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`. The weights change in place, so an engine on the same model sees them.

        Raises:
            CheckpointError: it belongs to another model.
        """
        weights: Mapping[str, Tensor] = state["weights"]
        if {n: p.shape for n, p in weights.items()} != {n: p.shape for n, p in self._trained.items()}:
            raise CheckpointError(
                f"the checkpoint's {len(weights)} trained weights are not those of this model ({len(self._trained)})",
                hint="resume with the model and LoRA settings that the run began with",
            )
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(weights[name])
        # The optimiser keeps the tensors that it loads.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._updates = int(state["updates"])


def _value_head(model: Any, device: torch.device) -> nn.Module:
    """A linear layer on the last hidden states that starts at 0."""
    head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _call_numbers(rows: Seq[TrainingRow]) -> Tensor:
    """The call of the micro-batch that each trained token belongs to, counted from 0; int64 [N]."""
    numbers = []
    first = 0
    for row in rows:
        numbers.append(first + row.calls[row.action_mask].astype(np.int64))
        first += len(row.call_ids)
    return torch.from_numpy(np.concatenate(numbers))


def _reference(
    model: Any, policy: LogProbModel, device: torch.device, autocast: torch.dtype | None
) -> Callable[[], contextlib.AbstractContextManager[LogProbModel]]:
    """Makes the frozen reference available: the model without its adapter, or a copy of the current weights."""
    if hasattr(model, "disable_adapter"):

        @contextlib.contextmanager
        def base() -> Iterator[LogProbModel]:
            with model.disable_adapter():
                yield policy

        return base
    frozen = LogProbModel(copy.deepcopy(model).requires_grad_(False), device, autocast)
    return lambda: contextlib.nullcontext(frozen)


def _whole(value: Any) -> Any:
    """A nested state without gradients. A part of a larger storage is copied: `torch.save` would write all of that."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
    if isinstance(value, dict):
        return {k: _whole(v) for k, v in value.items()}
    return [_whole(v) for v in value] if isinstance(value, list) else value
