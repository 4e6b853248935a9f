"""0.3's prompt optimisation: `agl.APO`, on the prompt template among the trainer's initial resources."""

from __future__ import annotations

from typing import Any

from agl.extras import require

require("agl.APO", "prompts", ("agl_prompts",))

import agl_prompts as prompts  # noqa: E402
from agl_prompts.apo import T_task  # noqa: E402

__all__ = ["APO"]


class APO(prompts.APO[T_task]):
    """`agl.APO(async_openai_client, ...)`; `_poml_trace` has no effect."""

    def __init__(self, async_openai_client: Any, *, _poml_trace: bool = False, **options: Any) -> None:
        super().__init__(async_openai_client, **options)
