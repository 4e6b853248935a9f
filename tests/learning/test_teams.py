"""Several agents in one program: one is trained and the other is left alone, both are trained, or they compete."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from roles import CHECKER, PLAYER, WRITER, asked_to_check, asked_to_play, asked_to_write, misprint
from served import provider_of

import agl
from agl.adapters.agent_framework import AgentFrameworkTracer
from agl.adapters.langchain import LangChainTracer
from agl.adapters.openai_agents import OpenAIAgentsTracer
from agl.trainer.store import open_store

pytestmark = pytest.mark.slow

NOWHERE = "http://provider.invalid/v1"
"""Where nobody answers: a call that is not routed to a policy fails."""


def tasks(n: int, seed: int) -> list[dict[str, str]]:
    """Numbers to write, and how each is misprinted on its way to the checker: half of them not at all."""
    rng = random.Random(seed)
    numbers = [str(rng.randrange(10, 100)) for _ in range(n)]
    return [{"number": x, "misprint": misprint(x, rng) if k % 2 else ""} for k, x in enumerate(numbers)]


def printed(task: Any, text: str) -> str:
    """What reaches the checker: a wrong text as it is, of the right ones half with a misprint."""
    return task["misprint"] or text if text == task["number"] else text


def algorithm(policy: Path, **changes: Any) -> agl.GRPO:
    return agl.GRPO(**{
        "model": str(policy), "group_size": 8, "batch_size": 8, "learning_rate": 5e-4, "betas": (0.9, 0.95),
        "max_response_tokens": 12, "max_context": 128, "max_batch": 64,
    } | changes)  # fmt: skip


def trainer(algorithm: Any, directory: Path, **options: Any) -> agl.Trainer:
    return agl.Trainer(algorithm, n_workers=16, directory=directory, progress=False, max_attempts=1, **options)


def odd(text: str) -> float:
    """A reward that any policy earns now and then."""
    return float(len(text) % 2)


def validations(result: agl.Result, name: str) -> tuple[float, float]:
    """The first and the last."""
    values = [h[f"val/{name}"] for h in result.history if f"val/{name}" in h]
    return values[0], values[-1]


def ask(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


# -- one of two -------------------------------------------------------------------------------------------------------


def lang(name: str, role: str, url: str = NOWHERE, key: str = "sk-nobody") -> Any:
    model: Any = ChatOpenAI(model=f"model-{name}", base_url=url, api_key=key)  # type: ignore[arg-type]
    return create_agent(model, [], system_prompt=role, name=name)


@pytest.mark.parametrize("steps", [1, pytest.param(8, marks=pytest.mark.night)])
def test_only_the_writer_learns_and_the_checker_stays_as_it_is(
    steps: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The checker answers at its own provider: a real server with weights of its own. One step needs no policy that
    could get better."""
    learns = steps > 1
    policy: Path = request.getfixturevalue("role_policy" if learns else "untrained_model")
    batch_size, heldout = (8, 64) if learns else (2, 4)
    before = digest(policy / "model.safetensors")
    with provider_of({"checker": policy}, tmp_path / "provider") as provider:
        writer = lang("writer", WRITER)
        checker = lang("checker", CHECKER, provider.base_url("checker"), provider.key)

        @agl.rollout
        async def program(task: Any) -> dict[str, float]:
            text = (await writer.ainvoke(ask(asked_to_write(task["number"]))))["messages"][-1].content
            proof = printed(task, text)
            said = (await checker.ainvoke(ask(asked_to_check(task["number"], proof))))["messages"][-1].content
            reward = float(text == task["number"]) if learns else odd(text)
            return {"reward": reward, "checked": float(said == task["number"])}

        result = trainer(
            algorithm(policy, steps=steps, batch_size=batch_size, val_every=steps),
            tmp_path / "run",
            agents=["writer"],
            tracer=LangChainTracer(),
        ).fit(program, tasks(256, seed=0), tasks(heldout, seed=1))

    if learns:
        first, last = validations(result, "reward/reward")
        print(f"writer {first:.3f} -> {last:.3f}")
        assert last - first >= 0.3
    # The checker is as good as it was: it was asked about other texts, by the same weights.
    assert len(provider.calls) == steps * batch_size * 8 + 2 * heldout
    assert {(c.agent, c.policy_version, c.error) for c in provider.calls} == {("checker", 0, None)}
    assert provider.versions == {"checker": 0}
    assert digest(policy / "model.safetensors") == before
    assert same_weights(provider.weights["checker"], policy)
    assert not same_weights(result.policy, policy)
    trained = asyncio.run(trained_calls(result))
    assert {(agent, policy) for agent, policy, _ in trained} == {("writer", "policy")}
    assert len(trained) == steps * batch_size * 8
    assert not {call_id for _, _, call_id in trained} & {c.id for c in provider.calls}
    assert provider.key not in Path(result.store.removeprefix("sqlite:///")).read_bytes().decode("latin1")


# -- two policies or one ----------------------------------------------------------------------------------------------


def team() -> Any:
    """Writer and checker of the OpenAI Agents SDK; each is paid for its own work."""
    from agents import Agent, OpenAIProvider, Runner

    provider = OpenAIProvider(base_url=NOWHERE, api_key="sk-nobody")
    writer = Agent(name="writer", instructions=WRITER, model=provider.get_model("m"))
    checker = Agent(name="checker", instructions=CHECKER, model=provider.get_model("m"))

    @agl.rollout
    async def publish(task: Any) -> dict[str, float]:
        text = (await Runner.run(writer, asked_to_write(task["number"]))).final_output
        proof = printed(task, text)
        said = (await Runner.run(checker, asked_to_check(task["number"], proof))).final_output
        return {"writer": float(text == task["number"]), "checker": float(said == task["number"])}

    return publish


TWO = {"writer": "policy-a", "checker": "policy-b"}
SHARED = {"writer": "policy-a", "checker": "policy-a"}


def train_team(policy: Path, directory: Path, agents: Mapping[str, str], seed: int, steps: int = 8) -> agl.Result:
    lora = agl.LoraSpec(rank=8, alpha=16)
    return trainer(
        algorithm(policy, steps=steps, val_every=steps, lora=lora, learning_rate=3e-3),
        directory,
        agents=agents,
        policies={name: agl.Policy(lr=3e-3) for name in dict.fromkeys(agents.values())},
        credit=agl.credit.PerAgent(),
        tracer=OpenAIAgentsTracer(),
        seed=seed,
    ).fit(team(), tasks(256, seed=0), tasks(96, seed=1))


@pytest.mark.night
@pytest.mark.parametrize("seed", [0, 1])
def test_two_policies_or_one_that_both_share(seed: int, role_policy: Path, tmp_path: Path) -> None:
    """Which is better is reported (docs/benchmarks.md), not asserted."""
    two = train_team(role_policy, tmp_path / "two", TWO, seed)
    one = train_team(role_policy, tmp_path / "one", SHARED, seed)
    for agent in TWO:
        (a0, a1), (b0, b1) = (validations(r, f"reward/{agent}") for r in (two, one))
        print(f"seed {seed} {agent}: two policies {a0:.3f} -> {a1:.3f}, one shared {b0:.3f} -> {b1:.3f}")
        assert a1 - a0 >= 0.15
    assert {(agent, policy) for agent, policy, _ in asyncio.run(trained_calls(two))} == {*TWO.items()}
    assert set(two.policies) == {*TWO.values()}


def test_a_policy_with_nothing_to_learn_stays_as_it_is_to_the_bit(untrained_model: Path, tmp_path: Path) -> None:
    """Both learn in the first step, the writer alone in the two that follow; the two share one base and one process."""
    writer, checker = lang("writer", WRITER), lang("checker", CHECKER)

    @agl.rollout
    async def program(task: Any, rollout: agl.RolloutInfo) -> dict[str, float]:
        text = (await writer.ainvoke(ask(asked_to_write(task["number"]))))["messages"][-1].content
        said = (await checker.ainvoke(ask(asked_to_check(task["number"], text))))["messages"][-1].content
        return {"writer": odd(text), "checker": odd(said) if rollout.step == 0 else 1.0}

    lora = agl.LoraSpec(rank=4)
    result = trainer(
        algorithm(untrained_model, steps=3, batch_size=2, lora=lora),
        tmp_path,
        agents=TWO,
        policies={"policy-a": agl.Policy(lr=1e-3), "policy-b": agl.Policy(lr=2e-3)},
        credit=agl.credit.PerAgent(),
        tracer=LangChainTracer(),
    ).fit(program, tasks(64, seed=0))
    versions = [(h["policy-a/policy_version"], h["policy-b/policy_version"]) for h in result.history]
    assert versions == [(1, 1), (2, 1), (3, 1)]
    states = {
        (name, step): torch.load(tmp_path / f"checkpoints/step-{step:06d}/states/{name}.pt", weights_only=True)
        for name in TWO.values()
        for step in (2, 3)
    }
    assert equal(states["policy-b", 2], states["policy-b", 3])
    assert not equal(states["policy-a", 2]["learner"]["weights"], states["policy-a", 3]["learner"]["weights"])


# -- against each other -----------------------------------------------------------------------------------------------


def player(name: str, url: str = NOWHERE, key: str = "sk-nobody") -> Any:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatClient

    client = OpenAIChatClient(model="m", base_url=url, api_key=key)
    return Agent(client, name=name, instructions=PLAYER)


def game(white: Any, black: Any) -> Any:
    """Each says a digit. The higher one wins, but one above the limit has lost; what is alike is a draw."""

    def worth(said: str, limit: int) -> int:
        return int(said) if len(said) == 1 and said.isdecimal() and int(said) <= limit else -1

    @agl.rollout
    async def play(limit: Any) -> dict[str, float]:
        answers = await asyncio.gather(*(side.run(asked_to_play(limit)) for side in (white, black)))
        mine, theirs = (worth(answer.text, limit) for answer in answers)
        won = float(mine > theirs) - float(mine < theirs)
        return {"white": won, "black": -won}

    return play


LIMITS = [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.night
def test_both_players_of_a_game_get_better(role_policy: Path, tmp_path: Path) -> None:
    """They learn from nothing but their games, of which each wins as many as the other; so each is measured against
    the player that the other was at first. White trains weights of its own, black an adapter."""
    result = trainer(
        algorithm(role_policy, steps=8, batch_size=8),
        tmp_path / "run",
        agents={"white": "white", "black": "black"},
        policies={
            "white": agl.Policy(model=str(role_policy), lr=5e-4),
            "black": agl.Policy(lora=agl.LoraSpec(rank=8, alpha=16), lr=3e-3),
        },
        credit=agl.credit.Competitive(),
        tracer=AgentFrameworkTracer(),
    ).fit(game(player("white"), player("black")), LIMITS)
    steps = result.history
    assert all(abs(h["train/reward"]) < 1e-9 for h in steps), "a game of zero sum"
    assert steps[-1]["white/policy_version"] == steps[-1]["black/policy_version"] >= len(steps) - 2
    for path in result.policies.values():
        assert not same_weights(path, role_policy)
    trained = asyncio.run(trained_calls(result))
    assert {(agent, policy) for agent, policy, _ in trained} == {("white", "white"), ("black", "black")}

    models = {"first": role_policy, "white": result.policies["white"], "black": result.policies["black"]}
    with provider_of(models, tmp_path / "provider") as provider:

        def measured(white: str, black: str) -> float:
            """Games that white won less those that it lost, of all, -1 to 1."""
            sides = (player(n, provider.base_url(m), provider.key) for n, m in (("white", white), ("black", black)))
            tracer = AgentFrameworkTracer()
            played = trainer(agl.Baseline(repeats=32), tmp_path / f"{white}-{black}", tracer=tracer)
            return played.fit(game(*sides), LIMITS).history[0]["train/reward/white"]

        level, white, black = measured("first", "first"), measured("white", "first"), measured("first", "black")
    print(f"white, from the first policies {level:+.3f}, trained {white:+.3f}; against trained black {black:+.3f}")
    assert abs(level) < 0.2
    assert white >= 0.4
    assert black <= -0.4


# -- what they all ask ------------------------------------------------------------------------------------------------


async def trained_calls(result: agl.Result) -> list[tuple[str, str | None, str]]:
    """(agent, policy, id) of every call that was trained."""
    store = await open_store(result.store)
    try:
        found = []
        for rollout in await store.query_rollouts(mode="train"):
            calls = {c.id: c for c in await store.query_calls(rollout.rollout_id)}
            for trained in await store.query_trained_calls(rollout.rollout_id):
                call = calls[trained.call_id]
                assert trained.tokens in (0, call.response_ids.size)
                found.append((call.agent, call.policy, call.id))
        return found
    finally:
        await store.close()


def equal(one: Any, other: Any) -> bool:
    """Whether two states are the same, every tensor to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def same_weights(one: Path | None, other: Path) -> bool:
    from safetensors.torch import load_file

    assert one is not None
    a, b = (load_file(d / "model.safetensors") for d in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
