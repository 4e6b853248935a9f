"""Werewolf in self-play: a policy for each role; then each plays with and against the frozen start.

python -m examples.games.werewolf --tiny
python -m examples.games.werewolf --model DIR_OR_HUB_ID
"""

from __future__ import annotations

from typing import Any

import agl
from examples import common
from examples.games.werewolf import rules, tasks
from examples.games.werewolf.agent import build
from examples.games.werewolf.rules import ROLES, VILLAGER
from examples.games.werewolf.scripts import beginner, oracle

SAMPLING: dict[str, Any] = {"max_response_tokens": 16, "max_context": 256}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = common.arguments("games/werewolf", __doc__, argv)
    days = 1 if options.tiny else 3
    train, held_out = (
        tasks.seatings(n, options.seed, split, days) for n, split in ((2000, "train"), (300, "held_out"))
    )

    def game(server: common.Endpoint, reward: Any = tasks.reward, earn: Any = agl.emit_reward) -> agl.Agent:
        graph = build(server.url, server.model, server.key, earn=earn)
        return agl.wrap(graph, reward=reward, input=rules.begin, output=dict)

    # Shortened, one role is a policy, and the script plays the others: most of a game's calls are theirs.
    roles = ROLES[:1] if options.short else ROLES
    with common.provider(options, oracle) as server:
        if options.debug:
            common.debug(game(server), held_out, options)
            return {}
        start = options.model or common.tiny_policy(
            # Nothing is earned, since calls that cost something would not be imitated.
            lambda server: game(server, earn=lambda points: None),
            train[: 128 if options.short else 1000],
            beginner,
            options.out / "start",
            agents=[*roles] if options.short else None,
            seed=options.seed,
            epochs=7 if options.short else 2,
            batch_size=8,
            learning_rate=3e-3,
            **SAMPLING,
        )
        policies = {role: role for role in roles}
        trained = agl.Trainer(
            agl.REINFORCE(
                model=start,
                steps=options.steps or (6 if options.short else 20),
                batch_size=40 if options.short else 60,
                learning_rate=3e-3 if options.short else 5e-4 if options.tiny else 1e-6,
                schedule="linear",
                betas=(0.9, 0.95),
                minibatches=4,
                threads=options.threads,
                **SAMPLING,
            ),
            agents=policies,
            credit=tasks.credit,
            n_workers=32,
            directory=options.out / "trained",
            seed=options.seed,
        ).fit(game(server), train)

        everyone = dict.fromkeys(roles, start)
        after = {role: str(directory) for role, directory in trained.policies.items()}
        plays = {
            "start": everyone,
            **{f"trained {role}": {**everyone, role: after[role]} for role in roles},
            **({} if options.short else {"all trained": after}),
        }
        report = agl.evaluate(
            game(server, reward=lambda task, end: float(rules.won(end, VILLAGER)), earn=lambda points: None),
            held_out[:80] if options.short else held_out,
            plays,
            agents=policies,
            max_response_tokens=SAMPLING["max_response_tokens"],
            n_workers=32,
            directory=options.out / "evaluation",
            seed=options.seed,
        )
    print("games that the village won; in each row the others are played by the start")
    wins = {
        name: 100 * policy.success.value for name, policy in report.policies.items() if policy.success.value is not None
    }
    summary = ", ".join(
        f"{role} {wins['start']:.0f} % -> {wins[f'trained {role}']:.0f} %"
        for role in ROLES
        if f"trained {role}" in wins
    )
    return common.save("games/werewolf", report, options, summary=f"village wins, against the start: {summary}")


if __name__ == "__main__":
    main()
