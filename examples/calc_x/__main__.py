"""Word problems with a calculator over MCP: an agent in Microsoft Agent Framework, or in AutoGen.

python -m examples.calc_x --tiny
python -m examples.calc_x --model Qwen/Qwen2.5-1.5B-Instruct --data DIR --steps 16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agl
from examples import common
from examples.calc_x.agent import build
from examples.calc_x.scripts import beginner, oracle
from examples.calc_x.tasks import generated, load, reward

EXAMPLE = "calc_x"
LENGTHS: dict[str, Any] = {"max_response_tokens": 48, "max_context": 256}


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv, _more)
    run: dict[str, Any] = {"n_workers": 16, "seed": options.seed}

    def agent(endpoint: common.Endpoint) -> Any:
        mine = build(
            endpoint.url,
            endpoint.model,
            endpoint.key,
            framework=options.framework,
            server_per_rollout=options.server_per_rollout,
        )
        return agl.wrap(mine, reward=reward, name="MathAgent")

    if options.tiny:
        train = generated(1536 if options.short else 3072, seed=options.seed)
        held_out = generated(96 if options.short else 256, seed=options.seed, held_out=True)
    else:
        train, held_out = (load(options.data / f"{split}.jsonl") for split in ("train", "test"))

    with common.provider(options, oracle) as endpoint:
        solver = agent(endpoint)
        if options.debug:
            return common.debug(solver, train, options)
        if options.tiny:
            start = common.tiny_policy(
                agent, train, beginner, options.out / "start", seed=options.seed, epochs=4, **LENGTHS
            )
            settings: dict[str, Any] = {
                "batch_size": 16,
                "learning_rate": 3e-4,
                "minibatches": 4,
                "schedule": "linear",
                "threads": options.threads,
                **LENGTHS,
            }
        else:
            start, settings = options.model, {"batch_size": 8, "learning_rate": 1e-6, "max_response_tokens": 1024}
        steps = options.steps or (6 if options.short else 24)
        grpo = agl.GRPO(model=start, steps=steps, group_size=8, **settings)
        trained = agl.Trainer(grpo, directory=options.out / "grpo", **run).fit(solver, train)
        policies = {"before": start, "after": trained.policy}
        report = agl.evaluate(solver, held_out, policies, directory=options.out / "evaluation", n_workers=16)
    return common.save(EXAMPLE, report, options)


def _more(parser: Any) -> None:
    parser.add_argument("--framework", choices=("agent_framework", "autogen"), default="agent_framework")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/calc_x"), help="folder of Calc-X's rows")
    parser.add_argument(
        "--server-per-rollout", action="store_true", help="start a calculator for each problem, not one for all"
    )


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
