"""examples/games: scripted players over real HTTP, roles that rotate, moves that no answer can break."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph")

import agl
from agl.testing.provider import Reply, Script, says, serve
from examples.games.kuhn import __main__ as kuhn
from examples.games.kuhn import agent as kuhn_agent
from examples.games.kuhn import scripts as kuhn_scripts
from examples.games.kuhn.rules import CARDS, OPEN, SITUATIONS
from examples.games.kuhn.tasks import deals
from examples.games.werewolf import __main__ as werewolf
from examples.games.werewolf import rules, scripts
from examples.games.werewolf.agent import build
from examples.games.werewolf.rules import ROLES, SEER, VILLAGER, WEREWOLF
from examples.games.werewolf.tasks import credit, reward, seatings


def measured(agent: Any, tasks: list[Any], directory: Path) -> dict[str, float]:
    """The mean reward of each player by its name, on a script."""
    trainer = agl.Trainer(agl.Baseline(), directory=directory, n_workers=8, progress=False, max_attempts=1)
    entry = trainer.fit(agent, tasks).history[0]
    return {name.rpartition("/")[2]: value for name, value in entry.items() if name.startswith("train/reward/")}


# -- Kuhn poker -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("says_", "first"), [("bet", -0.0), ("pass", 0.0)])
def test_both_players_are_paid_what_they_win(says_: str, first: float, tmp_path: Path) -> None:
    """Who always does the same wins as often as it loses, over the six deals."""
    with serve(says(says_)) as server:
        agent = agl.wrap(
            kuhn_agent.build(server.url, "m", "k"), reward=kuhn_agent.reward, input=kuhn_agent.begin, output=dict
        )
        assert measured(agent, deals(6), tmp_path) == {"first": first, "second": -first}
        assert len(server.seen) == 12


def test_a_script_reads_every_situation_from_its_question() -> None:
    questions = {(card, history): kuhn_agent.question(card, history) for history in OPEN for card in CARDS}
    assert set(questions) == set(SITUATIONS)
    for situation, messages in questions.items():
        assert kuhn_scripts.situation({"messages": messages}) == situation
    assert len({str(messages) for messages in questions.values()}) == 12


@pytest.mark.parametrize(
    ("answer", "action"), [("bet", "bet"), (" Bet!", "bet"), ("pass", "pass"), ("", "pass"), ("I fold", "pass")]
)
def test_every_answer_is_an_action(answer: str, action: str) -> None:
    assert kuhn_agent.action(answer) == action


def test_kuhn_is_told_without_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kuhn.main(["--tiny", "--debug", "--out", str(tmp_path / "out")]) == {}
    assert capsys.readouterr().out.count("== task") == 3


# -- werewolf ---------------------------------------------------------------------------------------------------------


def test_roles_rotate_and_held_out_seatings_are_new() -> None:
    train, held_out = seatings(2000, 0, "train"), seatings(200, 0, "held_out")
    assert not {tuple(t["names"]) for t in train} & {tuple(t["names"]) for t in held_out}
    for seat in range(5):
        assert Counter(t["roles"][seat] for t in held_out) == {WEREWOLF: 40, SEER: 40, VILLAGER: 120}


def test_the_good_players_win_more_and_the_silent_village_never(tmp_path: Path) -> None:
    games = seatings(300, 0, "held_out", 1)

    def wins(role: str, script: Script) -> float:
        return sum(rules.won(scripts.played(t, script, scripts.beginner, role), VILLAGER) for t in games) / len(games)

    # The README's figures.
    found = [wins("", scripts.beginner), *(wins(role, scripts.oracle) for role in ROLES)]
    assert [round(100 * share) for share in found] == [53, 5, 70, 79]
    assert all(scripts.played(t, says("")) ["winner"] == WEREWOLF for t in games)  # fmt: skip
    with serve(says("I say nothing")) as server:
        agent = agl.wrap(build(server.url, "m", "k"), reward=reward, input=rules.begin, output=dict)
        assert measured(agent, games[:8], tmp_path) == {WEREWOLF: 1.0, SEER: 0.0, VILLAGER: 0.0}


def test_no_answer_breaks_the_rules() -> None:
    """Whoever is dead does not move, nobody acts on itself or on the dead, and every game ends."""
    words = [*"\n\t.:()[]*", "Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "is bad", "You saw:", "Alive:", ".*"]
    rng = random.Random(0)

    def chaos(body: dict[str, Any]) -> Reply:
        return Reply(" ".join(rng.choices(words, k=rng.randrange(9))))

    for task in seatings(200, 1, "train"):
        game, moves = rules.begin(task), 0
        while not game["winner"]:
            name, move = game["moves"][0]
            assert name in game["alive"]
            before = game
            game, earned = rules.play(game, chaos({}).content or "")
            moves += 1
            assert earned == 0 or (move in ("speak", "vote") and before["players"][name] != WEREWOLF)
            assert all(voter != target for voter, target in game["votes"].items())
            assert set(game["alive"]) <= set(before["alive"])
        assert moves <= 26


def test_only_the_seer_learns_what_it_saw() -> None:
    game = rules.begin({"names": ["Ann", "Bob", "Cid", "Dan", "Eve"], "roles": list(rules.DEALT), "days": 1})
    for answer in ("Cid", "Dan", "Ann"):  # the werewolf kills Cid, the seer looks at Dan and Ann
        game, _ = rules.play(game, answer)
    assert [name for name, _ in game["moves"]] == ["Ann", "Bob", "Dan", "Eve"] * 2
    while game["moves"][0][1] == "speak":
        name = game["moves"][0][0]
        assert ("You know: Dan is good. You know: Ann is bad." in rules.question(game)[1]["content"]) == (name == "Bob")
        game, earned = rules.play(game, f"It is {'Dan' if name == 'Eve' else 'Ann'}")
        assert earned == {"Ann": 0.0, "Bob": 0.5, "Dan": 0.5, "Eve": -0.25}[name]
    for answer, earns in ("Bob", 0.0), ("It is Ann!", 0.5), ("Eve", 0.0):
        game, earned = rules.play(game, answer)
        assert earned == earns


def test_werewolf_is_told_without_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert werewolf.main(["--tiny", "--debug", "--out", str(tmp_path / "out")]) == {}
    assert capsys.readouterr().out.count("== task") == 3


@pytest.mark.night
def test_one_model_answers_for_several_roles_beside_another(
    tiny_policy: Path, untrained_model: Path, tmp_path: Path
) -> None:
    start = dict.fromkeys(ROLES, str(tiny_policy))
    report = agl.evaluate(
        agl.wrap(build("http://provider.invalid/v1", "m", "k"), reward=reward, input=rules.begin, output=dict),
        seatings(2, 0, "held_out", 1),
        {"start": start, "another seer": {**start, SEER: str(untrained_model)}},
        agents={role: role for role in ROLES},
        max_response_tokens=4,
        directory=tmp_path,
        progress=False,
    )
    assert [policy.failed for policy in report.policies.values()] == [0, 0]


def test_a_vote_is_paid_to_its_own_call(tiny_policy: Path, tmp_path: Path) -> None:
    """And the result of the game to every call of a role, by the example's credit rule."""
    from agl.mdp.builder import build_trajectory
    from agl.mdp.selection import select
    from agl.mdp.span_index import SpanIndex
    from agl.trainer.http.aio import run_in_thread
    from agl.trainer.store import open_store

    # The policy cannot play: the points are paid for every vote that it casts, so that there are some.
    def earning(game: Any) -> Any:
        return agl.wrap(game, reward=reward, input=rules.begin, output=dict)

    original = rules.play
    votes = pytest.MonkeyPatch()
    votes.setattr(
        "examples.games.werewolf.agent.play",
        lambda game, answer: (original(game, answer)[0], 0.5 if game["moves"][0][1] == "vote" else 0.0),
    )
    try:
        trained = agl.Trainer(
            agl.Baseline(model=str(tiny_policy), max_response_tokens=4), directory=tmp_path, progress=False, n_workers=1
        ).fit(earning(build("http://provider.invalid/v1", "m", "k", earn=agl.emit_reward)), seatings(1, 0, "train"))
    finally:
        votes.undo()

    async def trajectory() -> Any:
        store = await open_store(trained.store)
        try:
            (rollout,) = await store.query_rollouts(status=["succeeded"])
            calls = await store.query_calls(rollout.rollout_id, rollout.attempts)
            spans = await store.query_spans(rollout.rollout_id, rollout.attempts)
        finally:
            await store.close()
        return build_trajectory(rollout.rollout_id, rollout.attempts, "g", SpanIndex(calls, spans), select(list(ROLES)))

    found = run_in_thread(trajectory()).trajectory
    paid = [t.reward for t in found.transitions]
    asked = ["Vote" in str(t.call.request) for t in found.transitions]
    assert any(asked)
    assert paid == [0.5 if vote else 0.0 for vote in asked]
    assert credit(found) == [p + (t.call.agent == WEREWOLF) for p, t in zip(paid, found.transitions, strict=True)]
