"""Better prompts for two agents, with no change to them and no weights to train; measured on tasks that none has seen.

    python -m examples.prompts --tiny
    python -m examples.prompts --model gpt-5-mini --endpoint https://api.openai.com/v1 --rewriter gpt-5

`--model` is what the agents ask at `--endpoint` here, and `--rewriter` what rewrites their prompts; the key is in
OPENAI_API_KEY.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import agl
from examples import common
from examples.prompts.agent import PROMPTS, build
from examples.prompts.scripts import models
from examples.prompts.tasks import grade, tickets

EXAMPLE = "prompts"


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(
        EXAMPLE, __doc__, argv, add=lambda parser: parser.add_argument("--rewriter", default="rewriter")
    )
    train = tickets(24, seed=options.seed, split="train")
    val = tickets(24, seed=options.seed, split="val")
    held_out = tickets(64, seed=options.seed, split="held out")
    with common.provider(options, models) as endpoint:
        asked, options.model = options.model or endpoint.model, None
        program = build(endpoint.url, asked, endpoint.key)
        desk = agl.wrap(program, reward=grade, input=lambda task: {"ticket": task["ticket"]}, output=dict)
        if options.debug:
            return common.debug(desk, train, options)
        gepa = agl.GEPA(
            reflection=agl.LLM(endpoint.url, options.rewriter, api_key=endpoint.key),
            budget=(options.steps or 16) * len(val),
            held_out=held_out,
        )
        run: dict[str, Any] = {"agents": list(PROMPTS), "n_workers": 16, "seed": options.seed}
        found = agl.Trainer(gepa, directory=options.out / "search", **run).fit(desk, train, val_dataset=val)

        # The prompts that were found and the start, side by side.
        reports = [
            agl.evaluate(desk, held_out, {name: None}, directory=options.out / name, prompts=prompts, n_workers=16)
            for name, prompts in (("before", None), ("after", found.directory / "prompts"))
        ]
    return common.save(EXAMPLE, reports, options, prompts=dict(found.prompts))


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
