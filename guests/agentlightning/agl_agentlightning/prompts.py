"""0.3's prompt optimisation: `agl.APO`, on the prompt template among the trainer's initial resources."""

from __future__ import annotations

from typing import Any

from agl.trainer import prompts
from agl.trainer.prompts.apo import T_task

__all__ = ["APO"]


class APO(prompts.APO[T_task]):
    """`agl.APO(async_openai_client, ...)`; `_poml_trace` has no effect."""

    def __init__(self, async_openai_client: Any, *, _poml_trace: bool = False, **options: Any) -> None:
        super().__init__(async_openai_client, **options)
