"""Coding agents under `agl run`, the real programs on a scripted provider: nothing that they send or do changes.

`tests/harnesses/install.sh DIR` installs them; AGL_HARNESSES=DIR says where. Those that are not installed are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from coding_agents import (
    AFTER,
    AGENTS,
    BEFORE,
    BY_NAME,
    FILE,
    KEY,
    PROGRAMS,
    SIDE,
    TASK,
    CodingAgent,
    answers,
)  # fmt: skip
from documents import blocks, commands
from harness_runs import Place, generated, identical, run
from launching import chats, facts, launch, outline, show

import agl
from agl import semconv
from agl.mdp.types import int_array
from agl.messages import read
from agl.messages.write import to_openai
from agl.testing.provider import Provider, Reply, serve
from agl.trainer.gateway.sessions import Sessions

pytestmark = pytest.mark.slow


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.name)
def agent(request: pytest.FixtureRequest) -> CodingAgent:
    found: CodingAgent = request.param
    if found.path is None:
        pytest.skip(f"{found.program} is not installed: tests/harnesses/install.sh DIR, then AGL_HARNESSES=DIR")
    return found


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve() as running:
        yield running


@pytest.fixture
def place(tmp_path: Path, agent: CodingAgent, provider: Provider) -> Place:
    return Place(tmp_path, agent, provider)


def test_it_does_what_it_does_without_agl_and_every_call_is_recorded(place: Place, provider: Provider) -> None:
    agent = place.agent
    plain = run(place, traced=False)
    assert plain.done.returncode == 0, plain.done.stdout + plain.done.stderr
    assert (place.work / FILE).read_text() == AFTER, plain.done.stdout + plain.done.stderr
    assert len(plain.generated) >= len(agent.turns(place.work))

    traced = run(place, traced=True)
    assert traced.done.returncode == 0, traced.done.stdout + traced.done.stderr
    assert len(traced.places) <= 2
    assert traced.sent == plain.sent
    assert identical(plain, traced) == len(plain.sent)
    assert traced.output == plain.output
    assert traced.made == plain.made
    assert traced.touched == []
    assert not list((place.cache / "harnesses").iterdir()), "the attempt's directory ends with it"

    spans = place.trace()
    assert len(chats(spans)) == len(traced.generated) == facts(place.work)["calls"]
    assert facts(place.work)["failed_calls"] == 0
    asked = [tool for reply in provider.replies for tool, _ in reply.tools]
    ran = [
        s["attributes"][semconv.TOOL_NAME] for s in spans if s["attributes"][semconv.OPERATION_NAME] == "execute_tool"
    ]
    # What a last tool returns is in no further request.
    assert ran == asked[: len(ran)]
    assert len(ran) >= min(2, len(asked))
    assert outline(spans)[0] == f"agent {agent.name}"
    names = {s["attributes"][semconv.AGENT_NAME] for s in chats(spans)}
    assert names == {agent.name, *(f"{agent.name}-{side}" for side in agent.side)}
    assert KEY.encode() not in place.store.read_bytes()


def test_the_commands_of_the_page(place: Place, provider: Provider) -> None:
    """docs/harnesses.md: its own line for this agent, and the one that lists what was recorded."""
    agent = place.agent
    shown = [
        block
        for block in blocks()
        if block.page == "docs/harnesses.md" and block.kind == "run by" and block.language == "bash"
    ]
    lines = [line for block in shown for line in commands(block.text)]
    assert len(lines) == 9
    found = [line for line in lines if agent.program in line and line[:2] == ["agl", "run"]]
    if not found:
        pytest.skip(f"the page's line for {agent.name} says why it is not run")
    for words in found:
        place.renew(agent.turns(place.work))
        words = [word.replace("~", str(place.home)) for word in words]
        done = launch(place.work, place.environment, *words[2:])
        assert done.returncode == 0, done.stdout + done.stderr
        assert (place.work / FILE).read_text() == AFTER
        (listing,) = (line for line in lines if line[:3] == ["agl", "trace", "ls"])
        words = [word.replace("~", str(place.home)) for word in listing]
        assert facts(place.work)["rollout_id"] in show(place.work, *words[1:])


def test_its_sub_agents_have_names_of_their_own(place: Place, provider: Provider) -> None:
    agent = place.agent
    if agent.delegates is None:
        pytest.skip(f"{agent.name} has no sub-agents")
    turns, phrase, name = agent.delegates
    place.renew(turns(place.work), {phrase: (agent.reports,)})
    done = place.traced()
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [
        (s["attributes"][semconv.AGENT_NAME], s["attributes"][semconv.OUTPUT_MESSAGES]) for s in chats(place.trace())
    ]
    assert [by for by, said in calls if "It says hello." in said] == [name]
    assert len([by for by, said in calls if by == agent.name]) >= 2, calls


SUMMARY = "So far the greeting was read."


@pytest.mark.night
def test_its_compaction_has_a_name_and_what_follows_is_a_fork(place: Place, provider: Provider) -> None:
    """The model's answers count ten tokens, which is above a limit that is set for the test."""
    agent = place.agent
    if agent.compacts is None:
        pytest.skip(f"no limit is known above which {agent.name} compacts")
    lower, phrase, name, after, cause = agent.compacts
    # What follows holds the summary, and maybe no call that would tell how far it is.
    others = {phrase: (Reply(SUMMARY),), SUMMARY: (after,)}
    place.renew(agent.turns(place.work), others)
    words = lower(place.home) or ()
    done = place.traced(words=(*agent.command(TASK), *words))
    assert (done.returncode == 0) == (after.status == 200), done.stdout + done.stderr
    calls = [
        (s["attributes"][semconv.AGENT_NAME], s["attributes"].get(semconv.OUTPUT_MESSAGES, ""))
        for s in chats(place.trace())
    ]
    assert {by for by, said in calls if SUMMARY in said} == {name}
    assert [by for by, _ in calls if by == agent.name]
    assert causes(provider, agent.name, phrase) == ([] if cause is None else [cause])


ASIDES = [(agent, *aside) for agent in AGENTS for aside in agent.asides]


@pytest.mark.night
@pytest.mark.parametrize(
    ("agent", "allow", "first", "phrase", "reply", "name"),
    ASIDES,
    indirect=["agent"],
    ids=[each[-1] for each in ASIDES],
)
def test_its_calls_beside_the_task_have_names_of_their_own(
    place: Place,
    allow: Callable[[Path], None],
    first: Callable[[Path], Reply] | None,
    phrase: str,
    reply: Reply,
    name: str,
) -> None:
    agent = place.agent
    turns = agent.turns(place.work)
    place.renew(turns if first is None else (first(place.work), Reply("Done.")), {phrase: (reply,)})
    allow(place.home)
    done = place.traced()
    assert (place.work / FILE).read_text() == AFTER, done.stdout + done.stderr
    by = [s["attributes"][semconv.AGENT_NAME] for s in chats(place.trace())]
    assert sorted({*by}) == [agent.name, name]
    assert by.count(name) == 1


def causes(provider: Provider, agent: str, phrase: str) -> list[str]:
    """Why requests of the task fork, as the gateway of a policy that answers all of them would see it."""
    sessions, found = Sessions(), []
    sent = [(to_openai(read.body(seen.body), text_only=False), seen.raw.decode()) for seen in generated(provider)]
    for number, (messages, raw) in enumerate(sent):
        aside = any(words in raw for words in (phrase, *SIDE))
        match = sessions.match("policy", messages, None, "other" if aside else agent)
        if match.cause and not aside:
            found.append(match.cause.value)
        # The answer, with the provider's ids of tool calls, is what the next request has there.
        n = len(messages)
        later = (following[n] for following, _ in sent[number + 1 :] if following[:n] == messages and following[n:])
        answer = next((m for m in later if m["role"] == "assistant"), {"role": "assistant", "content": f"{SUMMARY} "})
        session = match.parent.session if match.parent else str(number)
        sessions.remember(match, str(number), session, int_array([number]), int_array([number]), answer)
    return found


def test_it_does_its_task_behind_walls(
    agent: CodingAgent, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`agl.harness`: started by agl alone, with nothing of a user's."""
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    provider.script = answers(agent.turns(Path("/tmp/work")), SIDE)
    found: list[str] = []
    urls = {
        "OPENAI_BASE_URL": provider.url,
        "ANTHROPIC_BASE_URL": provider.root,
        "GOOGLE_GEMINI_BASE_URL": provider.root,
    }

    def grade(task: str, folder: Path) -> float:
        found.append((folder / FILE).read_text())
        return float(found[-1] == AFTER)

    bounded = agl.harness(
        agent.name,
        task=str,
        files=lambda _: {FILE: BEFORE},
        grade=grade,
        words=[FILE] if agent.name == "aider" else [],
        env={**urls, "OPENAI_API_KEY": KEY, "GEMINI_API_KEY": KEY},
    )
    directory = tmp_path / "run"
    report = agl.evaluate(bounded, [TASK], {"scripted": None}, directory=directory, progress=False)
    assert found == [AFTER]
    (policy,) = report.policies.values()
    (rollout,) = policy.rollouts
    assert rollout.reward == 1.0
    assert sum(counts["calls"] for counts in rollout.agents.values()) == len(generated(provider))
    sides = {f"{agent.name}-{side}" for side in agent.side if side != "commit"}  # without git
    assert set(rollout.agents) == {agent.name, *sides}
    assert all(request.headers[agent.key[0]] == agent.key[1] for request in generated(provider))


def test_codex_writes_its_own_summary_for_a_policy(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the provider that it comes with, from whose servers it otherwise requests a compaction."""
    agent = BY_NAME["codex"]
    if agent.path is None or agent.compacts is None:
        pytest.skip("codex is not installed: tests/harnesses/install.sh DIR, then AGL_HARNESSES=DIR")
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _, phrase, name, after, _ = agent.compacts
    provider.script = answers(agent.turns(Path("/tmp/work")), {phrase: (Reply(SUMMARY),), SUMMARY: (after,)})
    bounded = agl.harness(
        "codex",
        task=str,
        files=lambda _: {FILE: BEFORE},
        grade=lambda task, folder: 1.0,
        words=["-c", "model_auto_compact_token_limit=5"],
        env={"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": KEY},
    )
    report = agl.evaluate(bounded, [TASK], {"scripted": None}, directory=tmp_path / "run", progress=False)
    (policy,) = report.policies.values()
    (rollout,) = policy.rollouts
    assert {by: counts["calls"] for by, counts in rollout.agents.items()} == {"codex": 2, name: 1}


AT_NIGHT = [agent for agent in AGENTS if agent.name != "pi"]


@pytest.mark.parametrize(
    "agent",
    [BY_NAME["pi"], *(pytest.param(agent, marks=pytest.mark.night) for agent in AT_NIGHT)],
    indirect=True,
    ids=lambda agent: agent.name,
)
def test_a_policy_answers_the_agent_that_is_selected_and_the_provider_the_others(
    place: Place, provider: Provider, untrained_model: Path
) -> None:
    agent = place.agent
    place.renew((Reply("Not me."),))
    done = place.traced("--model", str(untrained_model), "--agents", agent.name)
    spans = chats(place.trace())
    routed = [s for s in spans if s["attributes"].get(semconv.ROUTED)]
    assert routed, done.stderr
    assert {s["attributes"][semconv.AGENT_NAME] for s in routed} == {agent.name}
    assert len(generated(provider)) == len(spans) - len(routed)
    assert all(s.headers[agent.key[0]] == agent.key[1] for s in generated(provider))
