"""Word problems with a calculator over MCP: an agent in Microsoft Agent Framework, and the same one in AutoGen.

python -m examples.calc_x --tiny
python -m examples.calc_x --model Qwen/Qwen2.5-1.5B-Instruct --data DIR --framework autogen
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agl
from examples import common
from examples.calc_x.agent import FRAMEWORKS, build
from examples.calc_x.scripts import beginner, oracle
from examples.calc_x.tasks import generated, load, reward

EXAMPLE = "calc_x"
LENGTHS: dict[str, Any] = {"max_response_tokens": 48, "max_context": 256}


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv, _more)
    if options.tiny:
        shape: dict[str, Any] = {"seed": options.seed} | ({"lengths": (1, 0, 0)} if options.short else {})
        train = generated(512 if options.short else 2560, **shape)
        held_out = generated(128 if options.short else 256, held_out=True, **shape)
    else:
        train, held_out = (load(options.data / f"{split}.jsonl") for split in ("train", "test"))

    def agent(endpoint: common.Endpoint, framework: str = options.framework[0]) -> Any:
        mine = build(
            endpoint.url,
            endpoint.model,
            endpoint.key,
            framework=framework,
            server_per_rollout=options.server_per_rollout,
        )
        return agl.wrap(mine, reward=reward, name="MathAgent")

    if options.tiny and not options.debug:
        imitated: dict[str, Any] = {"epochs": 3, "batch_size": 8} if options.short else {"epochs": 2}
        start = common.tiny_policy(
            agent, train, beginner, options.out / "start", seed=options.seed, induction=True, **imitated, **LENGTHS
        )  # fmt: skip
        settings: dict[str, Any] = {"batch_size": 16, "learning_rate": 3e-4, "minibatches": 4, **LENGTHS}
        settings |= {"schedule": "linear", "threads": options.threads}
        steps = 6 if options.short else 16
    else:
        start, steps = options.model, 16
        settings = {"batch_size": 8, "learning_rate": 1e-6, "max_response_tokens": 1024}

    reports: list[agl.Evaluation] = []
    with common.provider(options, oracle) as endpoint:
        for framework in options.framework:
            solver, place = agent(endpoint, framework), options.out / framework
            run: dict[str, Any] = {"n_workers": 16, "directory": place / "grpo", "seed": options.seed}
            if options.debug:
                return common.debug(solver, train, options)
            grpo = agl.GRPO(model=start, steps=options.steps or steps, **settings)
            trained = agl.Trainer(grpo, **run).fit(solver, train)
            name = f", {framework}" if reports else ""
            policies = {f"before{name}": start, f"after{name}": trained.policy}
            measured: dict[str, Any] = {"n_workers": 16, "max_response_tokens": settings["max_response_tokens"]}
            reports.append(agl.evaluate(solver, held_out, policies, directory=place / "evaluation", **measured))
    return common.save(EXAMPLE, reports, options)


def _more(parser: Any) -> None:
    parser.add_argument("--framework", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, help="trained one by one")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/calc_x"), help="folder of Calc-X's rows")
    parser.add_argument(
        "--server-per-rollout", action="store_true", help="start a calculator for each problem, not one for all"
    )


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
