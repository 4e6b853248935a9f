"""From a model that never succeeds to one that does: record a strong model, imitate it, reinforce, measure.

    python -m examples.distil_then_reinforce --tiny
    python -m examples.distil_then_reinforce --model STUDENT --endpoint https://api.../v1 --endpoint-model STRONG

The strong model's key is in OPENAI_API_KEY. With `--tiny` it is `scripts.py`, and the student has random weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import agl
from agl.trainer.quickstart.policy import make_policy
from agl.trainer.quickstart.tasks import arithmetic_tasks
from examples import common
from examples.distil_then_reinforce.agent import build, reward
from examples.distil_then_reinforce.scripts import strong

EXAMPLE = "distil_then_reinforce"


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv)
    train = arithmetic_tasks(512 if options.short else 2048, seed=options.seed, split="train")
    held_out = arithmetic_tasks(64 if options.short else 256, seed=options.seed, split="heldout")
    run: dict[str, Any] = {"n_workers": 32, "seed": options.seed}
    policy: dict[str, Any] = {"max_response_tokens": 48, "max_context": 256, "threads": options.threads}

    with common.provider(options, strong) as endpoint:
        solver = agl.wrap(build(endpoint.url, endpoint.model, endpoint.key), reward=reward)
        if options.debug:
            return common.debug(solver, train, options)
        student = options.model or str(make_policy(options.out / "student", seed=options.seed, stages=()).directory)

        # 1. The agent as it is, on the strong model: nothing is trained, everything is recorded.
        agl.Trainer(agl.Baseline(), directory=options.out / "strong", **run).fit(solver, train[:1024])

        # 2. The student imitates what succeeded; texts of another model are written with the student's chat template.
        traces = agl.traces(options.out / "strong", where=agl.reward() >= 1)
        sft = agl.SFT(
            model=student,
            data=traces,
            epochs=4 if options.short else 6,
            batch_size=16 if options.short else 32,
            learning_rate=2e-3,
            **policy,
        )
        imitated = agl.Trainer(sft, directory=options.out / "sft", seed=options.seed).fit(None)

        # 3. It goes on by itself.
        grpo = agl.GRPO(
            model=str(imitated.policy),
            steps=options.steps or (4 if options.short else 20),
            learning_rate=1e-4,
            minibatches=4,
            schedule="linear",
            **policy,
        )
        reinforced = agl.Trainer(grpo, directory=options.out / "grpo", **run).fit(solver, train)

        # 4. All of them on tasks that none has seen.
        policies = {"strong": None, "before": student, "imitated": imitated.policy, "after": reinforced.policy}
        place = options.out / "evaluation"
        report = agl.evaluate(solver, held_out, policies, max_response_tokens=48, directory=place, n_workers=32)
    return common.save(EXAMPLE, report, options)


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
