"""Kuhn poker in self-play: the trained strategy's exploitability, exactly, while it learns.

python -m examples.games.kuhn --tiny                 # two policies, one per player
python -m examples.games.kuhn --tiny --shared        # one policy plays both
python -m examples.games.kuhn --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import agl
from examples import common
from examples.games.kuhn import agent as game
from examples.games.kuhn.curve import draw
from examples.games.kuhn.rules import PLAYERS, average, exploitability
from examples.games.kuhn.scripts import beginner, oracle
from examples.games.kuhn.strategy import read_strategy
from examples.games.kuhn.tasks import deals

SAMPLING = {"max_response_tokens": 8, "max_context": 128}


class Exploitability(agl.Callback):
    """Reads the strategy of each checkpoint.

    Attributes:
        points: (step, exploitability of the policies, exploitability of the average of all strategies so far).
    """

    def __init__(self, start: str) -> None:
        self.strategies = [read_strategy(dict.fromkeys(PLAYERS, start))]
        self.points = [(0, exploitability(self.strategies[0]), exploitability(self.strategies[0]))]

    def on_checkpoint(self, run: Any, path: Path, step: int) -> None:
        shared = path / "policy"
        models = {name: shared if shared.exists() else path / "policies" / name for name in PLAYERS}
        self.strategies.append(read_strategy(models))
        self.points.append((step, exploitability(self.strategies[-1]), exploitability(average(self.strategies))))
        print("step {}: exploitability {:.3f}, of the average strategy {:.3f}".format(*self.points[-1]))


def main(argv: list[str] | None = None) -> list[tuple[int, float, float]]:
    options = common.arguments(
        "games/kuhn",
        __doc__,
        argv,
        add=lambda parser: parser.add_argument("--shared", action="store_true", help="one policy plays both players"),
    )

    def build(server: common.Endpoint) -> agl.Agent:
        return agl.wrap(
            game.build(server.url, server.model, server.key), reward=game.reward, input=game.begin, output=dict
        )

    with common.provider(options, oracle()) as server:
        agent = build(server)
        if options.debug:
            common.debug(agent, deals(6), options)
            return []
        start = options.model or common.tiny_policy(
            build, deals(240), beginner(), options.out / "start", seed=options.seed, epochs=60, n_workers=1, **SAMPLING
        )
        curve = Exploitability(start)
        steps = options.steps or (16 if options.short else 60)
        agl.Trainer(
            agl.REINFORCE(
                model=start,
                steps=steps,
                batch_size=126,
                learning_rate=1e-3 if options.tiny else 1e-6,
                schedule="linear",
                betas=(0.9, 0.95),
                entropy_coef=0.1,
                checkpoint_every=4,
                **SAMPLING,
            ),
            agents=list(PLAYERS) if options.shared else {name: name for name in PLAYERS},
            credit=agl.credit.Competitive(),
            callbacks=curve,
            n_workers=32,
            directory=options.out / ("shared" if options.shared else "two"),
            seed=options.seed,
        ).fit(agent, deals(126))
    facts = {"seed": options.seed, "shared": options.shared, "points": curve.points}
    (options.out / "exploitability.json").write_text(json.dumps(facts) + "\n")
    draw({"": curve.points}, options.out / "exploitability.svg")
    return curve.points


if __name__ == "__main__":
    main()
