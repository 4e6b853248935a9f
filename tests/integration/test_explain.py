"""What `explain` says is what was trained: recomputed here from the store and compared."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from paths import ROOT

import agl
from agl.adapters.langchain import LangChainTracer
from agl.errors import ConfigError, StoreError
from agl.trainer.report.explain import call_numbers, describe, render, renderable
from agl.trainer.report.terminal import console
from agl.trainer.store import open_store


@pytest.fixture(scope="module")
def trained(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> agl.Result:
    @tool
    def lookup(word: str) -> str:
        """Look a word up."""
        return word

    model = ChatOpenAI(model="any", api_key="unused")  # type: ignore[arg-type]
    agent = create_agent(model, [lookup], name="speaker")
    lengths = iter(range(10_000))
    trainer = agl.Trainer(
        agl.GRPO(model=str(untrained_model), group_size=4, batch_size=2, steps=1, max_response_tokens=12),
        directory=tmp_path_factory.mktemp("run"),
        progress=False,
    )
    return trainer.fit(agl.wrap(agent, reward=lambda task, output: next(lengths) % 3), ["one", "two"])


def _reports(result: agl.Result) -> list[Any]:
    async def main() -> list[Any]:
        store = await open_store(result.store)
        try:
            rollouts = await store.query_rollouts(mode="train")
            return [await describe(store, r.rollout_id) for r in rollouts]
        finally:
            await store.close()

    return asyncio.run(main())


def test_rewards_returns_and_advantages(trained: agl.Result) -> None:
    reports = _reports(trained)
    assert len(reports) == 8
    for group in (reports[:4], reports[4:]):
        returns = [r.calls[0].return_ for r in group]
        assert returns == [r.total_reward for r in group]
        mean = sum(returns) / 4
        std = (sum((x - mean) ** 2 for x in returns) / 3) ** 0.5
        for report in group:
            for call in report.calls:
                assert call.trained.advantage == pytest.approx((call.return_ - mean) / (std + 1e-6), abs=1e-5)
                assert (call.trained.step, call.trained.dropped) == (1, None)
                assert (call.call.policy, call.call.policy_version) == ("policy", 0)


def test_tokens_are_the_sampled_ones(trained: agl.Result) -> None:
    for report in _reports(trained):
        for call in report.calls:
            assert call.call.agent == "speaker"
            assert all(t.trained for t in call.tokens)
            assert all(t.logprob <= 0 for t in call.tokens)
        assert sum(row.trained for row in report.rows) == sum(len(c.tokens) for c in report.calls)


def test_what_is_printed(trained: agl.Result, capsys: pytest.CaptureFixture[str]) -> None:
    first = _reports(trained)[0]
    text = render(first)
    for word in ("speaker", "policy v0", "log-probs", "advantage", "training rows", "chain"):
        assert word in text
    again = agl.explain(first.rollout_id[:14], trained.directory)
    assert again.rollout_id == first.rollout_id
    assert "speaker" in capsys.readouterr().out


def test_the_readme_shows_what_is_printed(trained: agl.Result) -> None:
    """Its lines on what was trained, but for the numbers."""

    def forms(text: str) -> set[str]:
        lines = (re.sub(r"[+-]?\d+(\.\d+)?", "0", line).strip("│ ") for line in text.splitlines())
        return {line for line in lines if line.startswith(("return ", "trained ", "policy  calls", "0 prompt tokens"))}

    [shown] = re.findall(r"```\n(rollout ro-.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    first, printed = forms(shown), forms(render(_reports(trained)[0], width=100))
    # The model of this test calls no tool, and continues no call.
    assert len(first) == 5
    assert {form for form in first if "continued" not in form and "tool_calls" not in form} <= printed


@pytest.fixture(scope="module")
def two_policies(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> agl.Result:
    """A writer and a checker, trained apart by a rule of AIR, a reward of the rollout, and one of the checker alone."""
    model = ChatOpenAI(model="any", api_key="unused")  # type: ignore[arg-type]
    writer, checker = create_agent(model, [], name="writer"), create_agent(model, [], name="checker")
    other = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(untrained_model, other)
    air = agl.AIR()
    air.on_call(name="words")(lambda transition: len(str(transition.call.response.get("content")).split()) / 2)
    air.on_call(agent="writer", name="length", primary=False)(lambda transition: transition.call.response_ids.size)

    @agl.rollout
    async def program(task: Any) -> None:
        draft = (await writer.ainvoke({"messages": [{"role": "user", "content": task}]}))["messages"][-1].content
        said = await checker.ainvoke({"messages": [{"role": "user", "content": f"is {len(draft)} too long"}]})
        agl.emit_reward(len(draft) % 2)
        agl.emit_reward({"verdict": len(said["messages"][-1].content) % 3}, agent="checker")

    trainer = agl.Trainer(
        agl.GRPO(model=str(untrained_model), group_size=4, batch_size=2, steps=1, max_response_tokens=12),
        agents={"writer": "policy-a", "checker": "policy-b"},
        policies={"policy-b": agl.Policy(model=str(other), lora=agl.LoraSpec(rank=2), lr=1e-3)},
        credit=agl.credit.PerAgent(),
        air=air,
        tracer=LangChainTracer(),
        directory=tmp_path_factory.mktemp("two"),
        progress=False,
    )
    return trainer.fit(program, ["say one thing", "say two things"])


def test_each_policys_calls_with_air_and_agents_of_their_own(two_policies: agl.Result) -> None:
    reports = _reports(two_policies)
    returns: dict[tuple[int, str], list[float]] = {}
    for place, report in enumerate(reports):
        write, check = report.calls
        assert (write.call.agent, write.call.policy) == ("writer", "policy-a")
        assert (check.call.agent, check.call.policy) == ("checker", "policy-b")
        assert [(r.name, r.source, r.agent) for r in report.rewards] == [
            ("reward", "emit", None), ("verdict", "emit", "checker"),
        ]  # fmt: skip
        shared, verdict = (r.value for r in report.rewards)
        assert [(r.name, r.source, r.primary) for r in write.rewards] == [
            ("words", "air", True), ("length", "air", False),
        ]  # fmt: skip
        assert [(r.name, r.source) for r in check.rewards] == [("words", "air")]
        assert write.return_ == shared + write.rewards[0].value
        assert check.return_ == shared + verdict + check.rewards[0].value
        assert [(row.policy, row.calls) for row in report.rows] == [("policy-a", [0]), ("policy-b", [1])]
        for call in report.calls:
            returns.setdefault((place // 4, call.call.agent), []).append(call.return_)
            assert not any(t.text == f"<{t.id}>" for t in call.tokens), "decoded by its own model's tokenizer"
    for (group, agent), values in returns.items():
        mean = sum(values) / 4
        std = (sum((x - mean) ** 2 for x in values) / 3) ** 0.5
        calls = [c for r in reports[4 * group : 4 * group + 4] for c in r.calls if c.call.agent == agent]
        for call in calls:
            assert call.trained.advantage == pytest.approx((call.return_ - mean) / (std + 1e-6), abs=1e-5)


def test_what_is_printed_of_two_policies(two_policies: agl.Result) -> None:
    reports = _reports(two_policies)
    report = next(r for r in reports if all(c.trained.advantage for c in r.calls))
    text = render(report, width=100)
    assert max(map(len, text.split("\n"))) <= 100
    shared, verdict = (r.value for r in report.rewards)
    write, check = report.calls
    for part in (
        f"of the whole rollout: reward {shared:g} (emit), verdict {verdict:g} (emit, for checker alone)",
        "agent writer  policy policy-a v0", "agent checker  policy policy-b v0",
        f"rewards   words {write.rewards[0].value:g} (air), length {write.rewards[1].value:g} (air, not primary)",
        f"return    {write.return_:g}",
        f"advantage {write.trained.advantage:+.3f}",
        f"advantage {check.trained.advantage:+.3f}",
    ):  # fmt: skip
        assert part in text


def test_the_history_tells_rewards_by_name(two_policies: agl.Result) -> None:
    reports, [facts] = _reports(two_policies), two_policies.history
    assert facts["train/reward"] == pytest.approx(sum(r.total_reward for r in reports) / 8)
    mean = {
        "reward": sum(r.rewards[0].value for r in reports) / 8,
        "checker/verdict": sum(r.rewards[1].value for r in reports) / 8,
        "words": sum(c.rewards[0].value for r in reports for c in r.calls) / 8,
        "length": sum(r.calls[0].rewards[1].value for r in reports) / 8,
    }
    prefix = "train/reward/"
    assert {k.removeprefix(prefix): v for k, v in facts.items() if k.startswith(prefix)} == pytest.approx(mean)


def test_a_dry_run_explains_a_game_by_its_own_credit(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Competitive` compares the players, who are of two policies."""
    model = ChatOpenAI(model="any", api_key="unused")  # type: ignore[arg-type]
    white, black = create_agent(model, [], name="white"), create_agent(model, [], name="black")
    referee = create_agent(GenericFakeChatModel(messages=iter([AIMessage("fair")])), [], name="referee")

    @agl.rollout
    async def game(task: Any) -> dict[str, float]:
        for side in (white, black, referee):
            await side.ainvoke({"messages": [{"role": "user", "content": task}]})
        return {"white": 1.0, "black": -1.0}

    agl.Trainer(
        agl.GRPO(model=str(untrained_model), group_size=4, batch_size=2, steps=1, max_response_tokens=4),
        agents={"white": "w", "black": "b"},
        credit=agl.credit.Competitive(),
        tracer=LangChainTracer(),
        directory=tmp_path,
        progress=False,
    ).dev(game, ["play"], n_tasks=1)
    shown = capsys.readouterr().out
    assert "return    2" in shown
    assert "return    -2" in shown
    assert "agent     white: trained as w; agents='white' selects it alone" in shown
    assert "agent     referee: not trained; agents='referee' selects it alone" in shown


def test_what_agents_say_does_not_steer_the_terminal(trained: agl.Result) -> None:
    report = _reports(trained)[0]
    task = "clear \x1b[2J and \u202e turn"
    text = render(replace(report, rollout=replace(report.rollout, task=task), output="one\r\ntwo"))
    assert "task      clear \\x1b[2J and \\u202e turn\n" in text
    assert "output    one\\r\ntwo\n" in text
    assert not {c for c in text if c < " " and c != "\n"}


def test_a_trace_is_a_tree(trained: agl.Result, capsys: pytest.CaptureFixture[str]) -> None:
    from agl.trainer.report.trace_tree import show_trace

    rollout = _reports(trained)[0]
    spans = show_trace(rollout.rollout_id, trained.directory)
    shown = capsys.readouterr().out
    assert "invoke_agent speaker" in shown
    assert "chat any  policy" in shown
    assert "reward reward" in shown
    roots = [s for s in spans if s["parent_id"] is None]
    assert [s["name"] for s in roots] == ["invoke_agent speaker"]
    chats = [s for s in spans if s["name"].startswith("chat")]
    assert {s["parent_id"] for s in chats} == {roots[0]["span_id"]}
    assert {s["span_id"] for s in chats} == {c.span_id for c in _calls(trained, rollout.rollout_id)}


def _calls(result: agl.Result, rollout_id: str) -> list[Any]:
    async def main() -> list[Any]:
        store = await open_store(result.store)
        try:
            return await store.query_calls(rollout_id)
        finally:
            await store.close()

    return asyncio.run(main())


def test_what_is_not_there(trained: agl.Result, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at this path"):
        agl.explain("ro-1", tmp_path / "nothing")
    with pytest.raises(StoreError, match=f"ro-nobody.*store=sqlite:///{re.escape(str(trained.directory))}"):
        agl.explain("ro-nobody", trained.directory)
    with pytest.raises(StoreError, match="has attempts 1, not 7"):
        agl.explain(_reports(trained)[0].rollout_id, trained.directory, attempt=7)


def test_the_facts_of_json_have_the_names_that_users_read(trained: agl.Result) -> None:
    facts = _reports(trained)[0].to_json()
    assert list(facts) == [
        "rollout_id",
        "status",
        "mode",
        "step",
        "task",
        "output",
        "attempts",
        "rewards",
        "total_reward",
        "calls",
        "rows",
        "forks",
        "tools",
        "provider_calls",
        "cost",
        "policy_fault",
    ]
    call = facts["calls"][0]
    assert list(call) == [
        "id",
        "index",
        "agent",
        "policy",
        "policy_version",
        "finish_reason",
        "temperature",
        "prompt_tokens",
        "continued",
        "parent",
        "fork",
        "messages",
        "reply",
        "tokens",
        "rewards",
        "return_",
        "advantage",
        "step",
        "sequence",
        "dropped",
        "error",
    ]
    assert list(call["tokens"][0]) == ["text", "id", "logprob", "trained"]
    assert list(facts["rewards"][0]) == ["name", "value", "source", "span_id", "primary", "agent", "explanation"]
    assert list(facts["rows"][0]) == ["policy", "calls", "tokens", "trained", "unmerged_tokens", "is_chain"]
    assert facts["attempts"] == [{"attempt": 1, "status": "succeeded", "error": None}]
    assert call["return_"] == facts["total_reward"]


def test_a_long_rollout_is_an_outline_and_calls_are_shown_on_request(trained: agl.Result) -> None:
    (first, *_) = _reports(trained)
    (one,) = first.calls
    calls = [replace(one, call=replace(one.call, index=n)) for n in range(30)]
    forked = replace(one.call, index=17, fork_cause="history", request={**one.call.request, "fork_detail": "message 3"})
    calls[17] = replace(one, call=forked)
    long = replace(first, calls=calls)

    def printed(numbers: str | None) -> list[str]:
        out = io.StringIO()
        chosen = None if numbers is None else call_numbers(numbers)
        console(file=out, width=200).print(renderable(long, chosen))
        return out.getvalue().splitlines()

    outline = printed(None)
    assert not any("log-probs" in line for line in outline)
    rows = [line.split() for line in outline if re.match(r"\s*\d+  speaker", line)]
    assert [int(row[0]) for row in rows] == [*range(30)]
    for row, report in zip(rows, calls, strict=True):
        numbers = (report.call.prompt_ids.size, report.continued, len(report.tokens))
        assert tuple(map(int, row[2:5])) == numbers
    assert [line.split()[0] for line in outline if "forked: history: message 3" in line] == ["17"]
    some = printed("3-5,17")
    assert [re.search(r"call (\d+)  agent", line)[1] for line in some if "─ call" in line] == ["3", "4", "5", "17"]  # type: ignore[index]
    assert sum("─ call" in line for line in printed("all")) == 30
    with pytest.raises(ConfigError, match="--calls is '3-'"):
        call_numbers("3-")
