"""Kuhn poker: three cards, one each, one bet; and what a strategy is worth in it, exactly.

Each player antes 1. The first one passes or bets 1 more; who faces a bet passes, and loses the ante, or bets, too, and
the higher card wins. After two passes the higher card wins the antes.

Source: H. W. Kuhn, A simplified two-person poker, in: Contributions to the Theory of Games I, 1950.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

CARDS = "JQK"
"""From the lowest to the highest."""
PLAYERS = ("first", "second")
ACTIONS = ("pass", "bet")
DEALS = tuple(permutations(CARDS, 2))
"""(card of the first player, card of the second), all equally likely."""

History = tuple[str, ...]
"""The actions so far; the players take turns."""
Situation = tuple[str, History]
"""What a player knows, an information set: the own card and the actions."""
Strategy = Mapping[Situation, float]
"""The probability of "bet" in each of the twelve situations, of both players."""

OPEN: tuple[History, ...] = ((), ("pass",), ("bet",), ("pass", "bet"))
"""Histories after which somebody has to act."""
SITUATIONS: tuple[Situation, ...] = tuple((card, history) for history in OPEN for card in CARDS)
VALUE = -1 / 18
"""What the first player gets in a game on average where both play optimally."""


def to_act(history: History) -> int | None:
    """Whose turn it is, 0 or 1; None when the game is over."""
    return len(history) % 2 if history in OPEN else None


def payoff(deal: tuple[str, str], history: History) -> int:
    """What the first player has won when the game is over, 1 or 2; the second has lost it."""
    if history == ("bet", "pass"):
        return 1
    if history == ("pass", "bet", "pass"):
        return -1
    stake = 2 if "bet" in history else 1
    return stake if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -stake


def equilibrium(alpha: float) -> dict[Situation, float]:
    """One of the game's Nash equilibria.

    Args:
        alpha: how often the first player bluffs with the jack, 0 to 1/3.
    """
    bets = {
        (): (alpha, 0.0, 3 * alpha),
        ("pass", "bet"): (0.0, alpha + 1 / 3, 1.0),
        ("pass",): (1 / 3, 0.0, 1.0),
        ("bet",): (0.0, 1 / 3, 1.0),
    }
    return {(card, history): bets[history][k] for history in OPEN for k, card in enumerate(CARDS)}


def value(strategy: Strategy) -> float:
    """What the first player gets on average where both play this strategy."""
    return sum(_of_game(strategy, deal, ()) for deal in DEALS) / len(DEALS)


def _of_game(strategy: Strategy, deal: tuple[str, str], history: History) -> float:
    player = to_act(history)
    if player is None:
        return payoff(deal, history)
    bet = strategy[deal[player], history]
    return sum(p * _of_game(strategy, deal, (*history, a)) for a, p in (("pass", 1 - bet), ("bet", bet)))


def best_response(strategy: Strategy, player: int) -> float:
    """What `player`, 0 or 1, gets on average by the best answer to the other one's part of the strategy."""

    def best(card: str, history: History, reach: Mapping[str, float]) -> float:
        """`reach`: the other one's card -> how likely it is with this card and history."""
        turn = to_act(history)
        if turn is None:
            sign = 1 - 2 * player
            deals = {other: (card, other) if player == 0 else (other, card) for other in reach}
            return sum(p * sign * payoff(deals[other], history) for other, p in reach.items())
        if turn == player:
            return max(best(card, (*history, action), reach) for action in ACTIONS)
        bets = {other: p * strategy[other, history] for other, p in reach.items()}
        passes = {other: p - bets[other] for other, p in reach.items()}
        return best(card, (*history, "pass"), passes) + best(card, (*history, "bet"), bets)

    return sum(best(card, (), {other: 1 / 6 for other in CARDS if other != card}) for card in CARDS)


def exploitability(strategy: Strategy) -> float:
    """Half of what both players together could gain by best answers: 0 for a Nash equilibrium, above it otherwise.

    Unit: antes per game. Half of NashConv, as in OpenSpiel (Lanctot et al., arXiv 1908.09453, section 3.5).
    """
    return (best_response(strategy, 0) + best_response(strategy, 1)) / 2


def average(strategies: Sequence[Strategy]) -> dict[Situation, float]:
    """The strategy of one who draws one of these before each game and sticks to it.

    A situation counts by how likely the player itself makes it come about (Kuhn 1953, realisation equivalence).
    """
    weights = {
        (card, history): [1 - s[card, ()] if history == ("pass", "bet") else 1.0 for s in strategies]
        for card, history in SITUATIONS
    }
    return {
        x: sum(w * s[x] for w, s in zip(weights[x], strategies, strict=True)) / max(sum(weights[x]), 1e-12)
        for x in SITUATIONS
    }
