"""The learner: policy-gradient updates of a causal language model on merged rows.

Invariant: an optimiser step is a function of the weights, the data and the step's number alone; how rows are merged or
cut into micro-batches changes it by rounding only, and a step that is not finite is not taken.
"""

from __future__ import annotations

import contextlib
import copy
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
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.learner.metrics import Totals, not_finite
from agl.trainer.local.learner.packing import chain, collate, pack
from agl.trainer.local.learner.scoring import Scorer, Scores
from agl.trainer.local.learner.targets import Row, prepare
from agl.trainer.objectives.gae import value_loss
from agl.trainer.objectives.kl import kl_penalty
from agl.trainer.objectives.losses import gspo_loss, policy_loss
from agl.trainer.objectives.reduction import weighted

__all__ = ["Learner", "LearnerConfig"]


class Learner:
    """Trains the weights of `model` that require gradients, in place.

    Args:
        model: a `PreTrainedModel` or a peft model. It is put in eval mode and left there: no dropout but the adapter's.
        config: how.
        device: where the model is.
        use: makes the model this policy's before each use, where it holds adapters of several.

    Attributes:
        autocast: dtype that updates compute in, if not the weights' own.

    Raises:
        ConfigError: the model has nothing to train.
    """

    def __init__(
        self, model: Any, config: LearnerConfig, device: torch.device, use: Callable[[], None] | None = None
    ) -> None:
        self.config = config
        self._use = use or (lambda: None)
        self._use()
        self.autocast = _autocast(config, device)
        self._model = model.eval()
        self._device = device
        self._value_head = _value_head(model, device) if config.critic else None
        self._scorer = Scorer(model, device, self.autocast, self._value_head)
        self._exact = Scorer(model, device, None)
        self._max_tokens = config.max_tokens_per_microbatch or (16384 if device.type == "cuda" else 4096)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ConfigError("every weight of the model is frozen", hint="load it whole, or with a LoraSpec")
        # Of every adapter: only those of the one in use take part.
        self._dropouts = [m for n, m in model.named_modules() if "lora_dropout" in n and isinstance(m, nn.Dropout)]
        groups: list[dict[str, Any]] = [{"params": list(self._trained.values()), "share": 1.0}]
        if self._value_head is not None:
            own = {f"value_head.{name}": p for name, p in self._value_head.named_parameters()}
            share = (config.value_learning_rate or config.learning_rate) / (config.learning_rate or 1.0)
            groups.append({"params": list(own.values()), "share": share})
            self._trained |= own
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._updates = 0
        self._reference = _reference(model, self._scorer, device, self.autocast) if config.kl_coef else None

    @property
    def n_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self._trained.values())

    # -- training -----------------------------------------------------------------------------------------------

    def update(self, sequences: Seq[TrainingRow], lr_scale: float = 1.0) -> dict[str, float]:
        """One update on the rows of a training step: `epochs` x `minibatches` optimiser steps.

        `TrainingRow.logprobs` are the old log-probs of the importance ratio. `TrainingRow.weights` are set here, for
        each optimiser step, by `config.loss_agg`. With a value head, `TrainingRow.advantages` are the calls' returns.

        Args:
            sequences: the rows, as `agl.mdp.sequence.merge` makes them.
            lr_scale: multiplies the learning rate of this update.

        Returns:
            Means over the optimiser steps: "loss", "grad_norm" (before clipping). Means over the trained tokens:
            "abs_log_ratio" and "approx_kl" (k1) between the policy in training and the one that sampled,
            "clip_fraction", "dual_clip_fraction", "entropy" (minus log-prob of the sampled token, nats) and, where they
            are used, "reference_kl" (by `kl_kind`), "rollout_is_weight", "value_loss", "value_error" (absolute). Also
            "max_abs_log_ratio", "learning_rate", "optimizer_steps", "rows", "tokens" (trained) and "forwarded_tokens"
            (in one pass over the rows, without padding).

        Raises:
            NoTrainableDataError: no row holds a trained token.
            TrainingError: bad rows, or a loss or gradient that is not finite; the message names rollouts and calls. The
                optimiser step that it would have gone into is not taken; earlier ones of the same update stand.
        """
        rows = [s for s in sequences if s.n_actions]
        if not rows:
            raise NoTrainableDataError(
                f"none of {len(sequences)} rows holds a token to train",
                hint="see why with `agl explain`: cancelled and failed answers are masked",
            )
        self._check(rows)
        self._use()
        learning_rate = self.config.rate(self._updates) * lr_scale
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["share"]
        totals = Totals()
        shuffle = np.random.default_rng([self.config.seed, self._updates])
        ready = prepare(
            rows,
            self.config,
            proximal=lambda rows: self._forward(self._scorer, rows, [s.action_mask for s in rows]),
            reference=None if self._reference is None else self._reference_logprobs,
            values=None if self._value_head is None else self._values,
        )
        with self._adapter_dropout():
            for _ in range(self.config.epochs):
                for part in _deal(ready, self.config.minibatches, shuffle):
                    self._step(part, totals)
        self._updates += 1
        return totals.metrics() | {
            "learning_rate": learning_rate,
            "rows": float(len(rows)),
            "tokens": float(sum(s.n_actions for s in rows)),
            "forwarded_tokens": float(sum(len(s) for s in rows)),
        }

    def _step(self, rows: Seq[Row], totals: Totals) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        sequences = weighted(
            [row.sequence for row in rows], self.config.loss_agg, loss_scale_factor=self.config.loss_scale_factor
        )
        losses: list[tuple[list[TrainingRow], Tensor]] = []
        total = torch.zeros((), device=self._device)
        for picked in pack([len(s) for s in sequences], self._max_tokens):
            members = [replace(rows[i], sequence=sequences[i]) for i in picked]
            masks = [row.sequence.action_mask for row in members]
            scores = self._scorer.score(
                collate([row.sequence for row in members], masks, self._device, self._scorer.mask_dtype),
                with_entropy=self.config.entropy_coef > 0,
            )
            loss = self._loss(scores, members, totals)
            share = (self._gather([row.sequence.weights for row in members], masks) * loss).sum()
            share.backward()
            total += share.detach()
            losses.append(([row.sequence for row in members], loss.detach()))
        norm = nn.utils.clip_grad_norm_(self._trained.values(), self.config.grad_clip or float("inf"))
        loss_value, norm_value = torch.stack([total, norm]).tolist()
        if not np.isfinite([loss_value, norm_value]).all():
            self._optimizer.zero_grad(set_to_none=True)
            raise not_finite(losses, loss_value, norm_value)
        self._optimizer.step()
        totals.step(loss_value, norm_value)

    def _loss(self, scores: Scores, rows: Seq[Row], totals: Totals) -> Tensor:
        """The loss of each trained token, float32 [n]."""
        config = self.config
        masks = [row.sequence.action_mask for row in rows]

        def of(values: Seq[FloatArray | None]) -> Tensor:
            return self._gather([v for v in values if v is not None], masks)

        old, advantages = of([row.old for row in rows]), of([row.sequence.advantages for row in rows])
        clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        if config.policy_loss == "gspo":
            calls = _call_numbers([row.sequence for row in rows])
            policy = gspo_loss(scores.logprobs, old, advantages, calls.to(self._device), **clips)
        else:
            policy = policy_loss(scores.logprobs, old, advantages, **clips, clip_c=config.dual_clip)
        seen: dict[str, Tensor] = {
            "abs_log_ratio": policy.log_ratio.abs(),
            "approx_kl": -policy.log_ratio,
            "clip_fraction": policy.clipped,
            "dual_clip_fraction": policy.dual_clipped,
            "entropy": -scores.logprobs,
        }
        loss = policy.loss
        if config.rollout_is is not None:
            seen["rollout_is_weight"] = of([row.importance for row in rows])
            loss = loss * seen["rollout_is_weight"]
        if self._reference is not None:
            seen["reference_kl"] = kl_penalty(scores.logprobs, of([row.reference for row in rows]), config.kl_kind)
            loss = loss + config.kl_coef * seen["reference_kl"]
        if scores.entropies is not None:
            loss = loss - config.entropy_coef * scores.entropies
        if scores.values is not None:
            targets = of([row.targets for row in rows])
            seen["value_loss"] = value_loss(scores.values, of([row.values for row in rows]), targets, config.value_clip)
            seen["value_error"] = (scores.values - targets).abs()
            loss = loss + config.value_coef * seen["value_loss"]
        totals.tokens(seen)
        return loss

    def _gather(self, values: Seq[FloatArray], masks: Seq[BoolArray]) -> Tensor:
        """The values of the trained tokens, in the order of the micro-batch's wanted tokens; float32 [n]."""
        flat = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])
        return torch.from_numpy(flat).to(self._device)

    @contextlib.contextmanager
    def _adapter_dropout(self) -> Iterator[None]:
        """Adapter dropout is on inside; its draws depend on the seed and the update's number alone."""
        if not self._dropouts:
            yield
            return
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(int(np.random.default_rng([self.config.seed, self._updates, 1]).integers(2**63)))
            for module in self._dropouts:
                module.train()
            try:
                yield
            finally:
                for module in self._dropouts:
                    module.eval()

    # -- log-probs ----------------------------------------------------------------------------------------------

    def logprobs(self, token_ids: IntArray, temperature: float = 1.0) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]`, each given the tokens before it, without autocast."""
        return self.sequence_logprobs([chain(token_ids, temperature)])[0][1:]

    def sequence_logprobs(self, sequences: Seq[TrainingRow]) -> list[FloatArray]:
        """float32 [T] per row: each token's log-prob in its own context, without autocast; 0 for a first token."""
        self._check(sequences)
        self._use()
        return self._forward(self._exact, sequences, [s.parents >= 0 for s in sequences])

    def _reference_logprobs(self, rows: Seq[TrainingRow]) -> list[FloatArray]:
        assert self._reference is not None
        with self._reference() as scorer:
            return self._forward(scorer, rows, [s.action_mask for s in rows])

    def _values(self, rows: Seq[TrainingRow]) -> list[FloatArray]:
        return self._forward(self._scorer, rows, [s.action_mask for s in rows], "values")

    def _forward(
        self,
        scorer: Scorer,
        rows: Seq[TrainingRow],
        wanted: Seq[BoolArray],
        what: Literal["logprobs", "values"] = "logprobs",
    ) -> list[FloatArray]:
        """float32 [T] per row: log-probs or values of the wanted tokens, 0 elsewhere."""
        out = [np.zeros(len(row), dtype=np.float32) for row in rows]
        with torch.no_grad():
            for picked in pack([len(row) for row in rows], self._max_tokens):
                batch = collate([rows[i] for i in picked], [wanted[i] for i in picked], self._device, scorer.mask_dtype)
                values = getattr(scorer.score(batch), what).cpu().numpy()
                ends = np.cumsum([len(places) for places in batch.places])
                for i, places, part in zip(picked, batch.places, np.split(values, ends[:-1]), strict=True):
                    out[i][places] = part
        return out

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

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on, as CPU copies: trained weights, optimiser, update count.

        Shuffling and dropout draw from generators seeded by the update's number, so the count stands for them too.
        """
        return {
            "weights": {name: _cpu(p) for name, p in self._trained.items()},
            "optimizer": _cpu(self._optimizer.state_dict()),
            "updates": self._updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state_dict`. The weights change in place, so an engine on the same model sees them.

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
        # The optimiser keeps the tensors that it is given.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._updates = int(state["updates"])


def _autocast(config: LearnerConfig, device: torch.device) -> torch.dtype | None:
    name = config.autocast or ("bfloat16" if device.type == "cuda" else "float32")
    return torch.bfloat16 if name == "bfloat16" else None


def _value_head(model: Any, device: torch.device) -> nn.Module:
    """A linear layer on the last hidden states that starts at 0."""
    head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _call_numbers(rows: Seq[TrainingRow]) -> Tensor:
    """Which call of the micro-batch each trained token belongs to, from 0; int64 [n]."""
    numbers, first = [], 0
    for row in rows:
        numbers.append(first + row.calls[row.action_mask].astype(np.int64))
        first += len(row.call_ids)
    return torch.from_numpy(np.concatenate(numbers))


def _deal(rows: Seq[Row], parts: int, rng: np.random.Generator) -> Iterator[list[Row]]:
    """Mini-batches of whole rollouts, so that merging cannot move a call from one to another."""
    rollouts = sorted({row.sequence.rollout_id for row in rows})
    order = rng.permutation(len(rollouts))
    for chosen in np.array_split(order, min(parts, len(rollouts))):
        names = {rollouts[i] for i in chosen}
        yield [row for row in rows if row.sequence.rollout_id in names]


def _reference(
    model: Any, scorer: Scorer, device: torch.device, autocast: torch.dtype | None
) -> Callable[[], contextlib.AbstractContextManager[Scorer]]:
    """What gives the frozen reference: the model without its adapter, or a copy of the weights as they are now."""
    if hasattr(model, "disable_adapter"):

        @contextlib.contextmanager
        def base() -> Iterator[Scorer]:
            with model.disable_adapter():
                yield scorer

        return base
    frozen = Scorer(copy.deepcopy(model).requires_grad_(False), device, autocast)
    return lambda: contextlib.nullcontext(frozen)


def _cpu(value: Any) -> Any:
    """A copy of a nested state with every tensor on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cpu(v) for v in value)
    return value
