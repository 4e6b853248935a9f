"""Three agents in one program, one selected: the others keep their provider, key and model, and are never trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import agl
from agl.agents.frameworks import adapters
from agl.errors import NoAgentMatchedError
from agl.testing.provider import Reply, serve
from agl.trainer.store import open_store


def test_only_the_selected_agents_tokens_are_trained(untrained_model: Path, tmp_path: Path) -> None:
    with serve(lambda body: Reply("a fine text")) as provider:

        def model(name: str) -> Any:
            return ChatOpenAI(model=name, base_url=provider.url, api_key="sk-original")  # type: ignore[arg-type]

        writer = create_agent(model("gpt-writer"), name="writer")
        critic = create_agent(model("gpt-critic"), name="critic")
        judge = create_agent(model("gpt-judge"), name="judge")

        @agl.rollout
        async def program(task: Any) -> float:
            draft = await writer.ainvoke({"messages": [{"role": "user", "content": task}]})
            text = draft["messages"][-1].content
            await asyncio.gather(
                critic.ainvoke({"messages": [{"role": "user", "content": f"criticise {len(text)}"}]}),
                judge.ainvoke({"messages": [{"role": "user", "content": "judge"}]}),
            )
            return float(len(text) % 5)

        trainer = agl.Trainer(
            agl.GRPO(model=str(untrained_model), group_size=4, batch_size=2, steps=2, max_response_tokens=8),
            agents=["writer"],
            tracer=adapters()["langchain"](),
            directory=tmp_path,
            progress=False,
        )
        result = trainer.fit(program, ["one", "two", "three"])

        assert len(provider.seen) == 2 * (2 * 4 * 2)
        for seen in provider.seen:
            assert seen.headers["authorization"] == "Bearer sk-original"
            assert "traceparent" not in seen.headers
            assert "agl-" not in seen.text
            assert seen.body["model"] in ("gpt-critic", "gpt-judge")

    async def look() -> None:
        store = await open_store(result.store)
        try:
            rollouts = await store.query_rollouts(mode="train")
            assert len(rollouts) == 16
            for rollout in rollouts:
                calls = await store.query_calls(rollout.rollout_id)
                assert [(c.agent, c.policy) for c in calls] == [("writer", "policy")]
                trained = await store.query_trained_calls(rollout.rollout_id)
                assert [t.call_id for t in trained] == [calls[0].id]
                assert trained[0].tokens == calls[0].response_ids.size
                spans = await store.query_spans(rollout.rollout_id)
                chats = {s.agent: s for s in spans if s.operation == "chat"}
                assert chats.keys() == {"writer", "critic", "judge"}
                assert "agl.routed" not in chats["judge"].attributes
                assert not any("sk-original" in str(s) or "agl-" in str(s.attributes) for s in spans)
        finally:
            await store.close()

    asyncio.run(look())


def test_a_name_with_a_globs_characters_is_that_agent_and_a_name_of_nobody_ends_the_run(
    untrained_model: Path, tmp_path: Path
) -> None:
    """The agent that the text would fit as a glob is asked first, so that the run learns of the name afterwards."""
    with serve(lambda body: Reply("a fine text")) as provider:
        model: Any = ChatOpenAI(model="gpt", base_url=provider.url, api_key="sk-original")  # type: ignore[arg-type]
        agents = [create_agent(model, name=name) for name in ("worker 1", "worker [1]")]

        @agl.rollout
        async def program(task: Any) -> float:
            texts = [
                (await agent.ainvoke({"messages": [{"role": "user", "content": task}]}))["messages"][-1].content
                for agent in agents
            ]
            return float(len(texts[-1]) % 5)

        trainer = agl.Trainer(
            agl.GRPO(model=str(untrained_model), group_size=2, batch_size=2, steps=2, max_response_tokens=8),
            agents=["worker [1]", "nobody"],
            tracer=adapters()["langchain"](),
            directory=tmp_path,
            progress=False,
        )
        with pytest.raises(NoAgentMatchedError, match=r"names 'nobody', .* in this run; .*'worker \[1\]', 'worker 1'"):
            trainer.fit(program, ["one", "two"])
    assert (tmp_path / "policy" / "config.json").is_file()

    async def look() -> None:
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        try:
            for rollout in await store.query_rollouts(mode="train"):
                assert rollout.status == "succeeded"
                calls = await store.query_calls(rollout.rollout_id, rollout.attempts)
                assert [c.agent for c in calls] == ["worker [1]"]
        finally:
            await store.close()

    asyncio.run(look())


def test_a_dry_run_names_agents_of_one_name_and_names_of_nobody(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @agl.rollout
    async def program(task: Any, llm: agl.LLM) -> float:
        model: Any = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)  # type: ignore[arg-type]
        prompts = {"worker": ["You write.", "You check."], "editor": ["You edit.", "You edit."]}
        for name, prompt in ((name, prompt) for name, both in prompts.items() for prompt in both):
            agent = create_agent(model, name=name, system_prompt=prompt)
            await agent.ainvoke({"messages": [{"role": "user", "content": task}]})
        return 1.0

    agl.Trainer(
        agl.GRPO(model=str(untrained_model), group_size=2, batch_size=1, steps=1, max_response_tokens=8),
        agents=["worker", "editor", "nobody"],
        tracer=adapters()["langchain"](),
        directory=tmp_path,
        progress=False,
    ).dev(program, ["one"], n_tasks=1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "worker: 2 system prompts in one rollout, such as 'You write.' and 'You check.'. Two agents" in printed
    assert "editor: 2 system prompts" not in printed
    assert "'nobody': no agent that made a call" in printed


def test_an_unselected_agent_that_asks_the_policy_is_answered_and_not_trained(
    untrained_model: Path, tmp_path: Path
) -> None:
    """A helper that is given the LLM resource uses the policy as it is; its tokens train nothing."""
    model = {"base": ""}

    @agl.rollout
    async def program(task: Any, llm: agl.LLM) -> float:
        import openai

        client = openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        model["base"] = llm.endpoint
        answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
        chat = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)  # type: ignore[arg-type]
        helper = create_agent(chat, name="helper")
        await helper.ainvoke({"messages": [{"role": "user", "content": "help"}]})
        return float(len(answer.choices[0].message.content or "") % 3)

    trainer = agl.Trainer(
        agl.GRPO(model=str(untrained_model), group_size=4, batch_size=1, steps=1, max_response_tokens=8),
        agents=["program"],
        tracer=adapters()["langchain"](),
        directory=tmp_path,
        progress=False,
    )
    result = trainer.fit(program, ["one"])
    assert "/agents/program/v1" in model["base"]

    async def look() -> None:
        store = await open_store(result.store)
        try:
            for rollout in await store.query_rollouts(mode="train"):
                calls = {c.agent: c for c in await store.query_calls(rollout.rollout_id)}
                assert calls["program"].policy == "policy"
                trained = await store.query_trained_calls(rollout.rollout_id)
                assert [t.call_id for t in trained] == [calls["program"].id]
        finally:
            await store.close()

    asyncio.run(look())
