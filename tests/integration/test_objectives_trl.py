"""The policy losses give the numbers of TRL's GRPOTrainer, loss and gradient alike."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agl.trainer.objectives.losses import loss_of

trl = pytest.importorskip("trl", reason="needs TRL: pip install 'agl[dev]'")

LENGTHS = (9, 4, 1, 7)


@pytest.mark.parametrize("spread", [0.05, 1.0])
@pytest.mark.parametrize(
    ("theirs", "kind", "options"),
    [
        ("dapo", "vanilla", {"epsilon_low": 0.1, "epsilon_high": 0.3}),
        # TRL bounds the weight itself, and only from above.
        ("cispo", "cispo", {"epsilon_low": 0.1, "epsilon_high": 1.3}),
        ("sapo", "sapo", {}),
        ("vespo", "vespo", {}),
    ],
)
def test_loss_and_gradient(theirs: str, kind: Any, options: dict[str, float], spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    old = -3 * torch.rand(mask.shape, generator=generator)
    new = old + spread * torch.randn(mask.shape, generator=generator)
    advantages = torch.tensor([1.5, -1.0, 0.0, -0.5])
    theirs_in, ours_in = (new.clone().requires_grad_() for _ in range(2))
    total = loss_of_trl(theirs, theirs_in, old, advantages, mask, **options)
    total.backward()

    clips = {"clip_low": 0.1, "clip_high": 0.3} if kind == "vanilla" else {"clip_low": 1.0, "clip_high": 0.3}
    rows = torch.arange(len(LENGTHS))[:, None].expand(mask.shape)
    result = loss_of(
        kind, ours_in[mask], old[mask], advantages[:, None].expand(mask.shape)[mask], rows[mask], **clips, clip_c=None
    )
    lengths = mask.sum(-1, keepdim=True).expand(mask.shape)[mask]
    ours = (result.loss / (lengths * len(LENGTHS) if kind == "sapo" else mask.sum())).sum()
    ours.backward()
    assert ours.item() == pytest.approx(total.item(), abs=1e-6)
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, atol=1e-6, rtol=1e-5)


def loss_of_trl(
    kind: str, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **options: float
) -> torch.Tensor:
    """TRL's own method, on a trainer that has no more than it reads."""
    trainer = SimpleNamespace(
        loss_type=kind,
        args=trl.GRPOConfig(output_dir="unused", report_to="none", use_cpu=True, bf16=False),
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
    )
    for name, value in options.items():
        setattr(trainer, name, value)
    trainer.args.steps_per_generation = 1
    nothing = torch.zeros(len(mask), 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask.float(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)
