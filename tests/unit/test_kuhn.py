"""Kuhn poker's theory: exploitability is 0 at every equilibrium, 11/24 for the uniform strategy, above 0 elsewhere."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.games.kuhn.rules import (
    DEALS,
    SITUATIONS,
    VALUE,
    Situation,
    average,
    best_response,
    equilibrium,
    exploitability,
    payoff,
    value,
)

probabilities = st.floats(0, 1)
strategies = st.fixed_dictionaries({situation: probabilities for situation in SITUATIONS})
alphas = st.floats(0, 1 / 3)


def test_the_game_has_twelve_situations() -> None:
    assert len(set(SITUATIONS)) == 12


def test_the_uniform_strategy_loses_as_much_as_is_known() -> None:
    """As OpenSpiel's tests have it: NashConv 11/12."""
    assert exploitability(dict.fromkeys(SITUATIONS, 0.5)) == pytest.approx(11 / 24)


@given(alphas)
def test_the_family_of_equilibria_is_not_exploitable_and_has_the_games_value(alpha: float) -> None:
    assert exploitability(equilibrium(alpha)) == pytest.approx(0, abs=1e-12)
    assert value(equilibrium(alpha)) == pytest.approx(VALUE) == pytest.approx(-1 / 18)


@given(strategies, alphas)
def test_nobody_wins_more_against_an_equilibrium_than_the_game_is_worth(other: dict, alpha: float) -> None:
    first = {s: (other if len(s[1]) % 2 == 0 else equilibrium(alpha))[s] for s in SITUATIONS}
    second = {s: (other if len(s[1]) % 2 == 1 else equilibrium(alpha))[s] for s in SITUATIONS}
    assert value(first) <= VALUE + 1e-9
    assert value(second) >= VALUE - 1e-9


@given(strategies)
def test_a_best_response_is_no_worse_than_any_pure_answer(strategy: dict) -> None:
    """By enumeration of all that one player can do: the tree's maximum is the best of them."""
    for player in (0, 1):
        own = [s for s in SITUATIONS if len(s[1]) % 2 == player]
        answers = (strategy | dict(zip(own, map(float, bets), strict=True)) for bets in product((0, 1), repeat=6))
        best = max((1 - 2 * player) * value(answer) for answer in answers)
        assert best_response(strategy, player) == pytest.approx(best, abs=1e-9)
    assert exploitability(strategy) >= -1e-12


def test_an_equilibrium_off_by_a_little_is_exploitable() -> None:
    for situation in SITUATIONS:
        bet = equilibrium(0.2)[situation]
        assert exploitability(equilibrium(0.2) | {situation: abs(bet - 0.1)}) > 0


def test_the_higher_card_wins_what_is_at_stake() -> None:
    histories = ("pass", "pass"), ("bet", "pass"), ("bet", "bet"), ("pass", "bet", "pass"), ("pass", "bet", "bet")
    assert [payoff(("K", "J"), h) for h in histories] == [1, 1, 2, -1, 2]
    assert [payoff(("J", "Q"), h) for h in histories] == [-1, 1, -2, -1, -2]
    assert len(DEALS) == 6


@given(st.lists(strategies, min_size=1, max_size=3), strategies)
def test_the_average_of_strategies_earns_what_they_earn_on_average(mixed: list[dict], other: dict) -> None:
    def against(strategy: dict[Situation, float], player: int) -> float:
        return value({s: (strategy if len(s[1]) % 2 == player else other)[s] for s in SITUATIONS})

    for player in (0, 1):
        mean = sum(against(s, player) for s in mixed) / len(mixed)
        assert against(average(mixed), player) == pytest.approx(mean, abs=1e-6)
