"""VERL by its config dict: today the same training as GRPO on one machine, with the config's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agl.errors import ConfigError
from agl.trainer.algorithms.family import GRPO
from agl.trainer.local.config import LoraSpec
from agl.trainer.run import Run, require_tasks
from agl.trainer.verl.config import VerlSettings, read

NEVER = 1_000_000_000


class VERL:
    """GRPO with the numbers of a verl config.

    The cluster (verl on Ray with vLLM) is not available yet, so the config's layout (parallelism, offloading, memory)
    has no use; a setting that would change a number is honoured or refused.

    Args:
        config: the hydra-style dict that verl takes: `{"data": {...}, "actor_rollout_ref": {...}, ...}`.

    Raises:
        ConfigError: an unknown key, or a value that would have to be ignored.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"config is a {type(config).__name__}", hint='give the dict that verl takes: {"data": {...}, ...}'
            )
        self.config = config
        self.settings = read(config)
        as_grpo(self.settings, 1)  # so that a number out of range is refused here

    async def run(self, run: Run) -> None:
        require_tasks(run.train, "the training dataset")
        self._say(run)
        if self.settings.seed is not None:
            run.seed = self.settings.seed
        if self.settings.val_every is None and not self.settings.val_before_train:
            run.val = []
        await as_grpo(self.settings, len(run.train)).run(run)

    async def dev(self, run: Run, n_tasks: int) -> None:
        await as_grpo(self.settings, len(run.train)).dev(run, n_tasks)

    def _say(self, run: Run) -> None:
        unused = self.settings.unused
        tail = f"; without effect here: {', '.join(unused)}" if unused else ""
        run.progress.note(f"the verl config is trained as GRPO on this machine{tail}")


def as_grpo(settings: VerlSettings, n_tasks: int) -> GRPO:
    """The embedded algorithm with those numbers, for a dataset of `n_tasks`."""
    s = settings
    steps = s.total_steps(n_tasks)
    warmup = s.warmup_steps if s.warmup_steps >= 0 else int(s.warmup_ratio * steps * s.minibatches * s.passes)
    return GRPO(
        model=s.model,
        group_size=s.group_size,
        batch_size=s.batch_size,
        minibatches=s.minibatches,
        update_epochs=s.passes,
        steps=steps,
        learning_rate=s.learning_rate,
        warmup_steps=warmup,
        betas=s.betas,
        weight_decay=s.weight_decay,
        grad_clip=s.grad_clip,
        clip_low=s.clip_low,
        clip_high=s.clip_high,
        kl_coef=s.kl_coef,
        kl_kind=cast(Any, s.kl_kind),
        entropy_coef=s.entropy_coef,
        loss_agg=cast(Any, s.loss_agg),
        normalize_std=s.normalize_std,
        temperature=s.temperature,
        max_response_tokens=s.max_response_tokens,
        val_temperature=s.val_temperature,
        val_every=s.val_every or NEVER,
        val_before_train=s.val_before_train,
        lora=LoraSpec(s.lora_rank, s.lora_alpha, 0.0, s.lora_targets) if s.lora_rank else None,
        # verl's "cuda" is its default rather than a choice; only "cpu" rules the other out.
        device="cpu" if s.device == "cpu" else "auto",
        max_context=s.max_context or s.max_prompt_tokens + s.max_response_tokens,
        checkpoint_every=s.checkpoint_every,
    )
