"""Credit rules: pure functions of a trajectory, and what of them reaches the gradient of which call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl.credit import Competitive, Cooperative, Discounted, PerAgent, PerCall, TurnGroups, Uniform, levels, returns
from agl.errors import ConfigError, RewardError
from agl.mdp.sequence import merge, unmerged
from agl.mdp.types import Call, Reward, Trajectory, Transition, float_array, int_array
from agl.trainer.local.learner.metrics import Totals
from agl.trainer.local.learner.microbatches import collate
from agl.trainer.local.learner.targets import LossRow
from agl.trainer.objectives.advantages import compute_advantages, group_statistics
from agl.trainer.objectives.reduction import weighted

numbers = st.integers(-40, 40).map(lambda n: n / 4)
calls = st.lists(st.tuples(st.sampled_from(["writer", "checker", "judge"]), st.lists(numbers, max_size=3)), min_size=1)
steps = st.lists(st.tuples(st.integers(0, 2), numbers), min_size=1, max_size=4)
"""(state, reward) of each call."""
POLICY = {"writer": "a", "checker": "b", "judge": "a"}


def make(
    made: list[tuple[str, list[float]]], shared: float = 0.0, named: dict[str, float] | None = None, name: str = "r",
    prompts: list[int] | None = None, group: str = "g",
) -> Trajectory:  # fmt: skip
    transitions = tuple(
        Transition(
            Call(
                f"{name}/{k}", name, 1, k, agent, POLICY[agent], 0,
                int_array([1, 2, prompts[k] if prompts else 100 + k]), int_array([7, 8]), float_array([-1.0, -2.0]),
            ),
            tuple(Reward(f"own{i}", value, "emit") for i, value in enumerate(own)),
        )
        for k, (agent, own) in enumerate(made)
    )  # fmt: skip
    rewards = [Reward("reward", shared), Reward("metric", 99.0, primary=False)]
    rewards += [Reward(a, value, agent=a) for a, value in (named or {}).items()]
    return Trajectory(name, 1, None, group, transitions, tuple(rewards))


def own_of(t: Trajectory, agent: str) -> float:
    inside = sum(x.reward for x in t.transitions if x.call.agent == agent)
    return inside + sum(r.value for r in t.rewards if r.agent == agent)


trajectories = st.builds(
    make, calls, numbers, st.dictionaries(st.sampled_from(["writer", "checker", "judge"]), numbers)
)


@given(trajectories)
def test_uniform_gives_every_call_its_policys_whole_reward(t: Trajectory):
    for transition, value in zip(t.transitions, returns(Uniform(), t), strict=True):
        policy = transition.call.policy
        mine = {a for a in POLICY if POLICY[a] == policy and any(x.call.agent == a for x in t.transitions)}
        assert value == pytest.approx(t.rewards[0].value + sum(own_of(t, a) for a in mine))


@given(trajectories, st.floats(0, 1))
def test_discounted_is_the_bellman_equation_within_each_policy(t: Trajectory, gamma: float):
    values = returns(Discounted(gamma), t)
    for policy in t.policies:
        chain = [(x, v) for x, v in zip(t.transitions, values, strict=True) if x.call.policy == policy]
        agents = {x.call.agent for x, _ in chain}
        final = t.rewards[0].value + sum(r.value for r in t.rewards if r.agent in agents)
        for (x, value), (_, ahead) in zip(chain, [*chain[1:], (None, None)], strict=True):
            later = final if ahead is None else gamma * ahead
            assert value == pytest.approx(x.reward + later)


@given(trajectories)
def test_without_discount_the_first_call_has_what_uniform_gives(t: Trajectory):
    first = {}
    for x, value in zip(t.transitions, returns(Discounted(1.0), t), strict=True):
        first.setdefault(x.call.policy, value)
    uniform = {x.call.policy: v for x, v in zip(t.transitions, returns(Uniform(), t), strict=True)}
    assert first == pytest.approx(uniform)


@given(trajectories, st.integers(0, 100), numbers)
def test_per_call_credit_moves_with_its_own_call_alone(t: Trajectory, which: int, more: float):
    k = which % len(t.transitions)
    changed = list(t.transitions)
    changed[k] = replace(changed[k], rewards=(*changed[k].rewards, Reward("more", more, "air")))
    before, after = returns(PerCall(), t), returns(PerCall(), replace(t, transitions=tuple(changed)))
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx(
        [more if i == k else 0.0 for i in range(len(before))]
    )


@given(trajectories, numbers)
def test_per_call_credit_may_take_a_share_of_what_the_rollout_earned(t: Trajectory, shared: float):
    whole = t.rewards[0].value + sum(r.value for r in t.rewards if r.agent)
    assert returns(PerCall(shared), t) == pytest.approx([x.reward + shared * whole for x in t.transitions])


@given(trajectories, numbers)
def test_a_reward_that_is_not_primary_trains_nothing(t: Trajectory, value: float):
    first = t.transitions[0]
    metric = Reward("metric", value, "emit", primary=False)
    noted = replace(
        t,
        transitions=(replace(first, rewards=(*first.rewards, metric)), *t.transitions[1:]),
        rewards=(*t.rewards, metric, replace(metric, agent=first.call.agent)),
    )
    for rule in (Uniform(), Discounted(0.9), PerCall(0.5), PerAgent(2.0, 3.0), Cooperative()):
        assert returns(rule, noted) == returns(rule, t), rule


@given(trajectories, numbers, numbers)
def test_per_agent_weighs_what_is_shared_and_what_is_its_own(t: Trajectory, shared: float, own: float):
    for x, value in zip(t.transitions, returns(PerAgent(shared=shared, own=own), t), strict=True):
        assert value == pytest.approx(shared * t.rewards[0].value + own * own_of(t, x.call.agent))


@given(trajectories)
def test_a_team_shares_everything(t: Trajectory):
    everything = t.rewards[0].value + sum(r.value for r in t.rewards if r.agent) + sum(x.reward for x in t.transitions)
    assert returns(Cooperative(), t) == pytest.approx([everything] * len(t.transitions))


@given(trajectories)
def test_a_game_is_zero_sum_between_its_players(t: Trajectory):
    players = {x.call.agent for x in t.transitions} | {r.agent for r in t.rewards if r.agent}
    if len(players) < 2:
        with pytest.raises(RewardError, match=r"needs two players, but only .* played"):
            returns(Competitive(), t)
        return
    value = dict(zip([x.call.agent for x in t.transitions], returns(Competitive(), t), strict=True))
    absent = {
        a: own_of(t, a) - sum(own_of(t, b) for b in players if b != a) / (len(players) - 1)
        for a in players - value.keys()
    }
    assert math.fsum([*value.values(), *absent.values()]) == pytest.approx(0, abs=1e-9)
    shifted = replace(t, rewards=(Reward("reward", 1000.0), *t.rewards[1:]))
    assert returns(Competitive(), shifted) == pytest.approx(returns(Competitive(), t))


class TestTurnGroups:
    def test_calls_in_the_same_state_are_compared_by_what_came_after_them(self):
        """GiGPO's example: two rollouts go through one state; the better way on from it is the better call."""
        one = make([("writer", [0.0]), ("writer", [1.0])], name="r0", prompts=[5, 6])
        two = make([("writer", [0.0]), ("writer", [0.0])], name="r1", prompts=[5, 9])
        rule = TurnGroups(gamma=0.5, weight=2.0)
        got = compute_advantages([one, two], rule, normalize_std=False).advantages
        # Rollouts: 1 and 0, so +-0.5 for all calls. State 5: returns 0.5 and 0, so +-0.25, twice. 6 and 9: alone.
        assert got == pytest.approx({"r0/0": 0.5 + 0.5, "r0/1": 0.5, "r1/0": -0.5 - 0.5, "r1/1": -0.5})

    @given(st.lists(st.tuples(steps, numbers), min_size=2, max_size=5))
    def test_the_formula(self, rollouts: list[Any]):
        rule = TurnGroups(gamma=0.9, weight=0.7)
        data = [
            make([("writer", [r]) for _, r in made], final, name=f"r{i}", prompts=[state for state, _ in made])
            for i, (made, final) in enumerate(rollouts)
        ]
        got = compute_advantages(data, rule, normalize_std=False).advantages
        episode = [t.final_reward + sum(x.reward for x in t.transitions) for t in data]
        states: dict[int, dict[int, list[float]]] = {}
        togo = [returns(Discounted(0.9), t) for t in data]
        for i, (made, _) in enumerate(rollouts):
            for k, (state, _) in enumerate(made):
                states.setdefault(state, {}).setdefault(i, []).append(togo[i][k])
        for i, (made, _) in enumerate(rollouts):
            for k, (state, _) in enumerate(made):
                cells = states[state]
                mean = np.mean([np.mean(v) for v in cells.values()])
                step = togo[i][k] - mean if len(cells) > 1 else 0.0
                assert got[f"r{i}/{k}"] == pytest.approx(episode[i] - np.mean(episode) + 0.7 * step, abs=1e-4)

    def test_two_agents_that_were_asked_the_same_are_not_in_one_state(self):
        one = make([("writer", [1.0]), ("judge", [0.0])], name="r0", prompts=[5, 6])
        two = make([("writer", [0.0]), ("judge", [1.0])], name="r1", prompts=[6, 5])
        got = compute_advantages([one, two], TurnGroups(), normalize_std=False).advantages
        assert got == pytest.approx(dict.fromkeys(got, 0.0))

    def test_a_state_may_be_named_by_the_user(self):
        rule = TurnGroups(gamma=1.0, anchor=lambda transition: transition.call.index)
        one, two = (make([("writer", [float(i)])] * 2, name=f"r{i}", prompts=[i, 10 + i]) for i in range(2))
        by_prompt = compute_advantages([one, two], TurnGroups(gamma=1.0), normalize_std=False).advantages
        by_turn = compute_advantages([one, two], rule, normalize_std=False).advantages
        assert by_prompt == pytest.approx({"r0/0": -1, "r0/1": -1, "r1/0": 1, "r1/1": 1})
        assert by_turn == pytest.approx({"r0/0": -2, "r0/1": -1.5, "r1/0": 2, "r1/1": 1.5})


def test_any_callable_is_a_rule_and_bad_ones_are_named():
    t = make([("writer", []), ("checker", [])], 1.0)
    assert returns(lambda t: [x.call.index for x in t.transitions], t) == [0.0, 1.0]
    with pytest.raises(RewardError, match="gave 1 returns for 2 calls"):
        returns(lambda t: [1.0], t)
    with pytest.raises(RewardError, match="gave the return inf"):
        returns(lambda t: [0.0, math.inf], t)

    class NoKeys(Uniform):
        def levels(self, trajectory: Trajectory) -> list:
            return []

    with pytest.raises(RewardError, match="do not have one key per call"):
        levels(NoKeys(), t)
    for bad in (lambda: Discounted(1.5), lambda: TurnGroups(gamma=-0.1)):
        with pytest.raises(ConfigError, match="gamma"):
            bad()
    with pytest.raises(ConfigError, match="compares calls with each other"):
        compute_advantages([t], TurnGroups(), estimator="reinforce_plus_plus")


@given(st.lists(st.tuples(calls, numbers, st.sampled_from("gh")), min_size=1, max_size=5))
def test_statistics_are_those_of_a_task_and_an_agent_and_a_rollout_counts_once(step: list[Any]):
    data = [make(made, shared, name=f"r{i}", group=g) for i, (made, shared, g) in enumerate(step)]
    rule = PerAgent(shared=1.0, own=0.5)
    got = compute_advantages(data, rule)
    for group in "gh":
        for agent in POLICY:
            took_part = [t for t in data if t.group == group and any(x.call.agent == agent for x in t.transitions)]
            own = [t.rewards[0].value + 0.5 * own_of(t, agent) for t in took_part]
            means, deviations = group_statistics(own, [0] * len(own))
            for t, value, mean, deviation in zip(took_part, own, means, deviations, strict=True):
                for x in t.transitions:
                    if x.call.agent == agent:
                        spread = deviation + 1e-6 if deviation > 0 else 1.0
                        want = (value - mean) / spread if len(own) > 1 else 0.0
                        assert got.advantages[x.call.id] == pytest.approx(want, rel=1e-3, abs=1e-4)
    dropped = {c.call_id for c in got.calls if c.dropped}
    assert dropped.isdisjoint(x.call.id for t in got.trajectories for x in t.transitions)
    assert len(dropped) + sum(len(t.transitions) for t in got.trajectories) == sum(len(t.transitions) for t in data)
    assert all({x.call.policy for x in t.transitions} == {t.policy} for t in got.trajectories)


# -- as far as the gradient -------------------------------------------------------------------------------------------


def _gradient_of_calls(trajectory: Trajectory, how: Any, advantages: dict[str, float]) -> dict[str, torch.Tensor]:
    """Per call, the gradient that its sampled tokens' log-probs get from the learner's own loss, by the position of the
    token in the call."""
    from tiny_learner import learner

    rows = how(trajectory.of("a"), advantages)
    subject = learner(clip_low=1.0, clip_high=1e6, dual_clip=None)
    old = subject.sequence_logprobs(rows)
    rows = [replace(r, logprobs=np.where(r.action_mask, x, 0)) for r, x in zip(rows, old, strict=True)]
    ready = weighted(rows, "token-mean")
    found: dict[str, torch.Tensor] = {}
    for row in ready:
        output = subject._policy(collate([row], [row.action_mask], torch.device("cpu")))
        output.logprobs.retain_grad()
        loss = subject._loss(output, [LossRow(row, row.logprobs)], Totals())
        (torch.from_numpy(row.weights[row.action_mask]) * loss).sum().backward()
        owners = row.calls[row.action_mask]
        for k, name in enumerate(row.call_ids):
            found[name] = output.logprobs.grad[owners == k].clone()
    return found


@pytest.mark.parametrize("how", [merge, unmerged])
def test_one_intermediate_reward_changes_exactly_its_own_calls_tokens(how: Any):
    """Per-call credit, no group normalisation: the calls share a row, and only one of them moves."""
    made = []
    for i in range(2):
        ids = [1, 2, 3 + i]
        for k in range(5):
            sampled = [10 + k, 11 + i, 12]
            made.append(
                Call(
                    f"r{i}/{k}", f"r{i}", 1, k, "writer", "a", 0, int_array(ids), int_array(sampled),
                    float_array([-1.0] * 3),
                )
            )  # fmt: skip
            # Four turns of one conversation, and one that rewrote its history.
            ids = [*ids, *sampled, 18 - k] if k != 2 else [1, 2, 19]

    def step(reward: float) -> list[Trajectory]:
        return [
            Trajectory(
                f"r{i}", 1, None, "g",
                tuple(
                    Transition(c, (Reward("tool", reward if c.id == "r0/2" else 0.25 * c.index, "air"),))
                    for c in made if c.rollout_id == f"r{i}"
                ),
            )
            for i in range(2)
        ]  # fmt: skip

    def advantages(reward: float, **options: Any) -> dict[str, float]:
        return dict(compute_advantages(step(reward), PerCall(), **options).advantages)

    raw = [advantages(r, estimator="gae") for r in (0.0, 1.0)]
    assert {k for k in raw[0] if raw[0][k] != raw[1][k]} == {"r0/2"}
    before, after = (_gradient_of_calls(step(r)[0], how, a) for r, a in zip((0.0, 1.0), raw, strict=True))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"r0/2"}
    share = 1 / sum(g.numel() for g in before.values())
    torch.testing.assert_close(after["r0/2"] - before["r0/2"], torch.full_like(after["r0/2"], -share))

    # With normalisation on, every change follows the formula: (r - mean of the group) / its deviation.
    for reward in (0.0, 1.0):
        got = advantages(reward)
        own = {t.rollout_id: [x.reward for x in t.transitions] for t in step(reward)}
        means = [np.mean(v) for v in own.values()]
        for name, values in own.items():
            for k, value in enumerate(values):
                want = (value - np.mean(means)) / (np.std(means, ddof=1) + 1e-6)
                assert got[f"{name}/{k}"] == pytest.approx(want, rel=1e-4)
        gradient = _gradient_of_calls(step(reward)[0], how, got)
        for name, g in gradient.items():
            torch.testing.assert_close(g, torch.full_like(g, -share * got[name]), rtol=1e-4, atol=1e-6)
