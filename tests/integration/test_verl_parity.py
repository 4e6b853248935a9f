"""The local trainer and verl 0.9.1 agree on the same rows: advantages, losses and the gradient of every weight.

verl's side is the code that its workers run: `compute_advantage_for_multi_trajectories`, `prepare_micro_batches` and
`ppo_loss`, on nested tensors as TransferQueue hands them out. Ours is the learner itself.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from call_trees import call
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_learner import VOCABULARY, gradients, tiny_model
from tiny_learner import learner as learner_of

from agl.credit import Uniform
from agl.mdp.sequence import TrainingRow, merge, unmerged
from agl.mdp.types import Reward, Trajectory, Transition
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.learner.minibatches import minibatches
from agl.trainer.local.learner.targets import LossRow
from agl.trainer.objectives import Estimator
from agl.trainer.objectives.advantages import compute_advantages

if sys.version_info >= (3, 13):
    pytest.skip("verl 0.9.1 does not install on Python 3.13 and newer", allow_module_level=True)

pytest.importorskip("verl", reason="needs verl 0.9.1: pip install 'agl[dev]'")
tu = pytest.importorskip("verl.utils.tensordict_utils")

from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights  # noqa: E402
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories  # noqa: E402
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits  # noqa: E402
from verl.workers.config import FSDPActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.engine.utils import prepare_micro_batches  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

torch.set_num_threads(1)


def policy() -> Any:
    """In float64: what is compared is the objective, and the two pad their rows differently.

    The model's own norms and eager attention compute in float32 whatever it is in, which a state near 0 makes much of.
    """
    model = tiny_model(attention="sdpa").double()
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            norm = torch.nn.RMSNorm(module.weight.size(0), module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model


def learner(model: Any = None, **config: Any) -> Learner:
    return learner_of(model or policy(), grad_clip=None, **config)


# -- rows --------------------------------------------------------------------------------------------------------------


def conversations(seed: int, n: int, *, turns: int = 3, lost: bool = False) -> list[Trajectory]:
    """Rollouts of up to `turns` calls, each on the conversation so far; with `lost`, some answers are cancelled."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCABULARY, rng.integers(low, high)).tolist()

    made = []
    for i in range(n):
        context, calls = tokens(2, 9), []
        for k in range(int(rng.integers(1, turns + 1))):
            answer = tokens(1, 8)
            finish = "cancelled" if lost and rng.random() < 0.3 and k else "stop"
            calls.append(call(k, context, answer, rollout=f"r{i}", finish=finish, temperature=0.8))
            context = context + answer + tokens(1, 5)
        made.append(Trajectory(f"r{i}", 1, "policy", f"g{i // 2}", tuple(Transition(c) for c in calls)))
    return made


def rows_of(
    rollouts: list[Trajectory], how: Callable[..., list[TrainingRow]] = merge, seed: int = 0
) -> list[TrainingRow]:
    """Rows with random advantages, and behaviour log-probs on both sides of every clip."""
    rng = np.random.default_rng(seed)
    ids = [t.call.id for r in rollouts for t in r.transitions]
    rows = [row for r in rollouts for row in how(r, dict(zip(ids, rng.normal(size=len(ids)), strict=True)))]
    noise = {name: np.random.default_rng([seed, k]).normal(scale=0.5, size=8) for k, name in enumerate(ids)}
    out = []
    for row, true in zip(rows, learner().sequence_logprobs(rows), strict=True):
        assert row.is_chain
        old = np.zeros(len(row), dtype=np.float32)
        for k, name in enumerate(row.call_ids):
            at = np.flatnonzero((row.calls == k) & row.action_mask)
            old[at] = true[at] + noise[name][: at.size]
        out.append(replace(row, logprobs=old))
    return out


# -- verl's side -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theirs:
    """What verl's workers make of a mini-batch.

    Attributes:
        loss: of the whole mini-batch. gradients: parameter -> its gradient.
    """

    loss: float
    gradients: dict[str, torch.Tensor]


def nested(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    tensors = [torch.as_tensor(np.ascontiguousarray(p), dtype=dtype) for p in parts]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def theirs(
    model: Any,
    rows: list[TrainingRow],
    *,
    micro_tokens: int = 10_000,
    padding: int = 0,
    reference: Any = None,
    correction: tuple[str, float] | None = None,
    **actor: Any,
) -> Theirs:
    """Loss and gradient of one optimiser step by verl: what `train_batch` does between two steps of its optimiser.

    Args:
        micro_tokens: of one micro-batch. padding: verl's own no-op rows that are added.
        reference: the reference model. correction: level and threshold of truncated importance sampling.
        actor: of `FSDPActorConfig`.
    """
    model = copy.deepcopy(model)
    starts = [int(np.flatnonzero(row.action_mask)[0]) for row in rows]
    cut = [(row, s) for row, s in zip(rows, starts, strict=True)]
    temperature = 0.8

    def output(of: Any, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = of(input_ids=row_ids[None], use_cache=False).logits[0].float() / temperature
        return logprobs_from_logits(logits, row_ids.roll(-1)), entropy_from_logits(logits)

    def per_response(of: Any) -> list[np.ndarray]:
        with torch.no_grad():
            full = [output(of, torch.as_tensor(r.token_ids, dtype=torch.int64))[0].numpy() for r in rows]
        return [f[s - 1 : -1] for f, s in zip(full, starts, strict=True)]

    masks = [r.action_mask[s:] for r, s in cut]
    fields = {
        "input_ids": [r.token_ids for r in rows],
        "prompts": [r.token_ids[:s] for r, s in cut],
        "responses": [r.token_ids[s:] for r, s in cut],
        "response_mask": masks,
        "old_log_probs": [r.logprobs[s:] for r, s in cut],
        "advantages": [r.advantages[s:] for r, s in cut],
    }
    if reference is not None:
        fields["ref_log_prob"] = per_response(reference)
    if correction is not None:
        level, threshold = correction
        fields["old_log_probs"] = per_response(model)
        fields["rollout_is_weights"] = [
            compute_rollout_correction_weights(
                torch.as_tensor((old - r.logprobs[s:])[None]), torch.as_tensor(m[None]).float(), level, threshold
            )[0][0].numpy()
            for (r, s), m, old in zip(cut, masks, fields["old_log_probs"], strict=True)
        ]
    for _ in range(padding):
        # As `construct_minimal_padding_template` makes them: a long prompt, one answer token, masked.
        none = np.zeros(1)
        fields["input_ids"].append(np.zeros(12))
        fields["prompts"].append(np.zeros(11))
        fields["responses"].append(none)
        for name in fields.keys() - {"input_ids", "prompts", "responses"}:
            fields[name].append(none)
    whole = {"input_ids", "prompts", "responses"}
    data = tu.get_tensordict(
        {k: nested(v, torch.int64 if k in {*whole, "response_mask"} else torch.float32) for k, v in fields.items()},
        non_tensor_dict={
            "dp_size": 1,
            "batch_num_tokens": int(sum(m.sum() for m in masks)),
            "global_batch_size": len(rows) + padding,
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": micro_tokens,
        },
    )
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **actor)
    micro_batches, _ = prepare_micro_batches(data, same_micro_num_in_dp=False)
    total = 0.0
    for micro in micro_batches:
        found = [output(model, ids) for ids in micro["input_ids"].unbind()]
        made = {
            "log_probs": torch.nested.as_nested_tensor([f[0] for f in found], layout=torch.jagged),
            "entropy": torch.nested.as_nested_tensor([f[1] for f in found], layout=torch.jagged),
        }
        loss, _ = ppo_loss(config=config, model_output=made, data=micro)
        loss.backward()
        total += float(loss.detach())
    return Theirs(total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def assert_same(ours: tuple[dict[str, float], dict[str, torch.Tensor]], other: Theirs) -> None:
    """Loss and gradient to 1e-6, the gradient's numbers as shares of its length."""
    metrics, gradient = ours
    assert metrics["loss"] == pytest.approx(other.loss, rel=1e-6, abs=1e-6)
    assert gradient.keys() == other.gradients.keys()
    length = max(1.0, float(torch.stack([g.norm() for g in other.gradients.values()]).norm()))
    for name in gradient:
        torch.testing.assert_close(
            gradient[name] / length,
            other.gradients[name] / length,
            rtol=0,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


# -- losses ------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.booleans(), st.booleans())
def test_token_mean_of_merged_conversations(seed: int, n: int, lost: bool, small: bool) -> None:
    """Tools' tokens and cancelled answers lie between those that are trained, and micro-batches do not matter."""
    rows = rows_of(conversations(seed, n, lost=lost), seed=seed)
    micro_tokens = max(map(len, rows)) if small else 10_000
    clips = {"clip_low": 0.15, "clip_high": 0.3}
    ours = gradients(learner(max_tokens_per_microbatch=micro_tokens, **clips), rows)
    other = theirs(policy(), rows, micro_tokens=micro_tokens, clip_ratio_low=0.15, clip_ratio_high=0.3)
    assert_same(ours, other)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
    st.sampled_from(["vanilla", "gspo"]),
    st.booleans(),
)
@example(32, "token-mean", "vanilla", False)
def test_every_reduction_of_either_loss(seed: int, mode: Any, loss: Any, small: bool) -> None:
    """Where a row is one call, as verl has it."""
    rows = rows_of(conversations(seed, 4), unmerged, seed)
    micro_tokens = max(map(len, rows)) if small else 10_000
    factor = 16 if mode.endswith("norm") else None
    subject = learner(loss_agg=mode, loss_scale_factor=factor, policy_loss=loss, clip_low=0.1, clip_high=0.2)
    other = theirs(
        policy(), rows, micro_tokens=micro_tokens, clip_ratio_low=0.1, clip_ratio_high=0.2, loss_agg_mode=mode,
        loss_scale_factor=factor, policy_loss=PolicyLossConfig(loss_mode=loss),
    )  # fmt: skip
    assert_same(gradients(subject, rows), other)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_kl_and_entropy(kind: Any, mode: Any) -> None:
    rows = rows_of(conversations(5, 4), unmerged)
    model, first = policy(), policy()
    subject = learner(model, kl_coef=0.3, kl_kind=kind, entropy_coef=0.05, loss_agg=mode)
    with torch.no_grad():  # the policy has moved away from its reference
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    other = theirs(
        model, rows, reference=first, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=kind, entropy_coeff=0.05,
        loss_agg_mode=mode,
    )  # fmt: skip
    assert_same(gradients(subject, rows), other)


@pytest.mark.parametrize("dual_clip", [1.2, 3.0])
def test_the_dual_clip(dual_clip: float) -> None:
    rows = rows_of(conversations(2, 6))
    ours = gradients(learner(dual_clip=dual_clip), rows)
    assert_same(ours, theirs(policy(), rows, clip_ratio_c=dual_clip))
    assert ours[0]["dual_clip_fraction"] > 0


@pytest.mark.parametrize(("level", "how"), [("token", merge), ("sequence", unmerged)])
def test_truncated_importance(level: Any, how: Any) -> None:
    """verl's decoupled mode: the ratio against the trainer's own log-probs, weighed by the sampler's mismatch."""
    rows = rows_of(conversations(3, 5), how)
    ours = gradients(learner(rollout_is=level, rollout_is_threshold=1.3), rows)
    assert_same(ours, theirs(policy(), rows, correction=(level, 1.3)))


def test_every_step_of_several_mini_batches() -> None:
    rows = rows_of(conversations(9, 6))
    subject = learner(minibatches=3)
    seen: list[dict[str, torch.Tensor]] = []
    subject._optimizer.register_step_pre_hook(
        lambda *_: seen.append({n: p.grad.clone() for n, p in subject._model.named_parameters() if p.grad is not None})
    )
    metrics = subject.update(rows, lr_scale=0.0)
    parts = list(minibatches([LossRow(r, r.logprobs) for r in rows], 3, np.random.default_rng([0, 0]), ()))
    each = [theirs(policy(), [row.sequence for row in part]) for part in parts]
    assert len(seen) == len(each) == 3
    for gradient, other in zip(seen, each, strict=True):
        assert_same(({"loss": other.loss}, gradient), other)
    assert metrics["loss"] == pytest.approx(np.mean([other.loss for other in each]), abs=1e-6)


def test_no_op_rows_of_verl_count_for_sequences_alone() -> None:
    """verl fills a batch up to a whole number of mini-batches; with a mean over sequences those rows dilute it."""
    rows = rows_of(conversations(4, 4), unmerged)
    plain, filled = theirs(policy(), rows), theirs(policy(), rows, padding=3)
    assert filled.loss == pytest.approx(plain.loss, abs=1e-6)
    mode = {"loss_agg_mode": "seq-mean-token-mean"}
    plain, filled = theirs(policy(), rows, **mode), theirs(policy(), rows, padding=3, **mode)
    assert filled.loss == pytest.approx(plain.loss * len(rows) / (len(rows) + 3), abs=1e-6)


def test_a_sequence_is_a_call_here_and_a_row_there() -> None:
    """So means over sequences, as GSPO's ratio, depend on how calls were merged with verl, and do not here."""
    rollouts = conversations(6, 4)
    apart = rows_of(rollouts, unmerged)
    together = rows_of(rollouts, merge)
    assert len(together) < len(apart)
    ours = [gradients(learner(loss_agg="seq-mean-token-mean"), rows) for rows in (together, apart)]
    other = [theirs(policy(), rows, loss_agg_mode="seq-mean-token-mean") for rows in (together, apart)]
    assert_same(ours[0], other[1])
    assert_same(ours[1], other[1])
    assert abs(other[0].loss - other[1].loss) > 1e-3


# -- advantages --------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[str, float, int]]:
    """(group, reward, calls) of each rollout, 2 to 5 to a group. Eighths are exact in float32."""
    made = []
    for g in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(2, 5))):
            made.append((f"g{g}", draw(st.integers(-32, 32)) / 8, draw(st.integers(1, 3))))
    return made


def of_verl(batch: list[tuple[str, float, int]], estimator: str, **options: Any) -> dict[str, float]:
    """Call id -> verl's advantage, where each call is a row and the last of a rollout has its reward."""
    lengths = [[1 + (i + k) % 4 for k in range(calls)] for i, (_, _, calls) in enumerate(batch)]
    n, width = sum(map(len, lengths)), 4
    rewards, mask = torch.zeros(n, width, dtype=torch.float64), torch.zeros(n, width, dtype=torch.float64)
    keys, uids, names, at = [], [], [], 0
    for i, (group, reward, calls) in enumerate(batch):
        for k in range(calls):
            mask[at, : lengths[i][k]] = 1
            # verl's agent loop writes the session's final score to each of its rows.
            rewards[at, lengths[i][k] - 1] = reward
            keys.append(f"{group}_{i}_{k}")
            uids.append(group)
            names.append(f"r{i}/{k}")
            at += 1
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask},
        non_tensors={"uid": np.array(uids, dtype=object)},
    )
    options = {"norm_adv_by_std_in_grpo": True, **options}
    data = compute_advantage_for_multi_trajectories(
        data, keys, estimator, config=AlgoConfig(adv_estimator=estimator), **options
    )
    return {name: data.batch["advantages"][i, 0].item() for i, name in enumerate(names)}


def of_ours(batch: list[tuple[str, float, int]], estimator: Estimator, **options: Any) -> dict[str, float]:
    trajectories = [
        Trajectory(
            f"r{i}", 1, None, group,
            tuple(Transition(call(k, [1], [2] * (1 + (i + k) % 4), rollout=f"r{i}")) for k in range(calls)),
            (Reward("reward", reward),),
        )
        for i, (group, reward, calls) in enumerate(batch)
    ]  # fmt: skip
    return dict(compute_advantages(trajectories, Uniform(), estimator=estimator, **options).advantages)


def assert_advantages(ours: dict[str, float], other: dict[str, float], absolute: float = 1e-6) -> None:
    assert ours.keys() == other.keys()
    for name, value in ours.items():
        assert value == pytest.approx(other[name], rel=1e-6, abs=absolute), name


@settings(max_examples=60, deadline=None)
@given(batches(), st.booleans())
def test_grpo_on_rollouts_of_several_rows(batch: list[tuple[str, float, int]], normalize: bool) -> None:
    """verl's V1 compares the last rows of sessions and gives the result to all of them; so a rollout counts once."""
    other = of_verl(batch, "grpo", norm_adv_by_std_in_grpo=normalize)
    assert_advantages(of_ours(batch, "grpo", normalize_std=normalize), other)


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]))
@example([("g0", 0.125, 1), ("g0", 0.125, 1)], "reinforce_plus_plus")
def test_other_estimators_on_rollouts_of_one_row(batch: list[tuple[str, float, int]], estimator: Any) -> None:
    batch = [(group, reward, 1) for group, reward, _ in batch]
    # verl's means are short by 1e-8 / tokens of the value, which whitening divides by 1e-4 where all rewards are equal.
    flat = estimator == "reinforce_plus_plus" and len({reward for _, reward, _ in batch}) == 1
    assert_advantages(of_ours(batch, estimator), of_verl(batch, estimator), 1e-4 * abs(batch[0][1]) if flat else 1e-6)


def test_a_rollout_counts_once_here_and_by_its_rows_there() -> None:
    """verl's other estimators take each row for a rollout: its own session's rows are among "the others"."""
    batch = [("g", 1.0, 3), ("g", 0.0, 1), ("g", 0.0, 1)]
    ours, other = of_ours(batch, "rloo"), of_verl(batch, "rloo")
    assert (ours["r0/0"], ours["r1/0"]) == (1.0, -0.5)
    assert (other["r0/0"], other["r1/0"]) == pytest.approx((0.5, -0.75))
    last = of_verl([(g, r, 1) for g, r, _ in batch], "rloo")
    assert ours["r0/2"] == pytest.approx(last["r0/0"])


def test_equal_rewards_are_worth_nothing_here() -> None:
    """Their mean is exactly theirs here. verl's, in float32, is off by rounding, and a deviation of about 0 divides it:
    eight rewards of 0.9 push the policy."""
    assert set(of_ours([("g", 0.9, 1)] * 8, "grpo").values()) == {0.0}
    rewards = torch.full((8, 1), 0.9)
    groups = np.array(["g"] * 8, dtype=object)
    other, _ = compute_grpo_outcome_advantage(rewards, torch.ones(8, 1), groups)
    assert other.abs().min() > 0.05
