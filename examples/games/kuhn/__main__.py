"""Kuhn poker in self-play: how much a perfect opponent would win from the strategy, exactly, while it learns.

    python -m examples.games.kuhn --tiny
    python -m examples.games.kuhn --model DIR_OR_HUB_ID

Trained twice: with a policy for each player, and with one policy that both share.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agl
from examples import common
from examples.games.kuhn import agent as game
from examples.games.kuhn.curve import Points, draw, write
from examples.games.kuhn.rules import PLAYERS, average, exploitability
from examples.games.kuhn.scripts import beginner, oracle
from examples.games.kuhn.strategy import read_strategy
from examples.games.kuhn.tasks import deals

SAMPLING: dict[str, Any] = {"max_response_tokens": 8, "max_context": 128}
FORMS: dict[str, Any] = {"two policies": {name: name for name in PLAYERS}, "one shared policy": list(PLAYERS)}
"""Who is trained by which policy, as `Trainer(agents=)`."""
GRPO_HELP = "one shared policy, trained by agl.GRPO: eight games of a deal are compared with each other"


class Exploitability(agl.Callback):
    """Reads the strategy of each checkpoint.

    Attributes:
        points: (step, exploitability of the policies, exploitability of the average of all strategies so far).
    """

    def __init__(self, start: str) -> None:
        self.strategies = [read_strategy(dict.fromkeys(PLAYERS, start))]
        self.points = [(0, exploitability(self.strategies[0]), exploitability(self.strategies[0]))]

    def on_checkpoint(self, run: Any, path: Path, step: int) -> dict[str, float]:
        shared = path / "policy"
        models = {name: shared if shared.exists() else path / "policies" / name for name in PLAYERS}
        self.strategies.append(read_strategy(models))
        self.points.append((step, exploitability(self.strategies[-1]), exploitability(average(self.strategies))))
        print("step {}: exploitability {:.3f}, of the average strategy {:.3f}".format(*self.points[-1]))
        return dict(
            zip(("goal/exploitability", "goal/exploitability of the average"), self.points[-1][1:], strict=True)
        )


def main(argv: Sequence[str] | None = None) -> dict[str, Points]:
    options = common.arguments(
        "games/kuhn", __doc__, argv, lambda parser: parser.add_argument("--grpo", action="store_true", help=GRPO_HELP)
    )
    if options.grpo and options.save:
        raise SystemExit("--save keeps what agl.REINFORCE does, not --grpo")

    def build(server: common.Endpoint) -> agl.Agent:
        graph = game.build(server.url, server.model, server.key)
        return agl.wrap(graph, reward=game.reward, input=game.begin, output=dict)

    forms = {"one shared policy": list(PLAYERS)} if options.short or options.grpo else FORMS
    batches = {"batch_size": 16, "group_size": 8} if options.grpo else {"batch_size": 126}
    curves: dict[str, Points] = {}
    with common.provider(options, oracle()) as server:
        agent = build(server)
        if options.debug:
            common.debug(agent, deals(6), options)
            return curves
        start = options.model or common.tiny_policy(
            build, deals(240), beginner(), options.out / "start", seed=options.seed, epochs=30, n_workers=1, **SAMPLING
        )
        for form, agents in forms.items():
            curve = Exploitability(start)
            agl.Trainer(
                (agl.GRPO if options.grpo else agl.REINFORCE)(
                    model=start,
                    steps=options.steps or 16,
                    **batches,
                    learning_rate=3e-4 if options.tiny else 1e-6,
                    schedule="linear",
                    betas=(0.9, 0.95),
                    entropy_coef=0.4,
                    checkpoint_every=2,
                    threads=1 if options.tiny else None,
                    **SAMPLING,
                ),
                agents=agents,
                credit=agl.credit.Competitive(),
                callbacks=curve,
                n_workers=32,
                directory=options.out / form.replace(" ", "-"),
                seed=options.seed,
            ).fit(agent, deals(126))
            curves[form] = curve.points
    draw(curves, options.out / "exploitability.svg")
    summary = "; ".join(f"{form}: {points[0][1]:.3f} -> {points[-1][1]:.3f}" for form, points in curves.items())
    common.save("games/kuhn", [], options, curves=curves, summary=f"exploitability, {summary}")
    print(summary)
    if options.save:
        write()
    return curves


if __name__ == "__main__":
    main()
