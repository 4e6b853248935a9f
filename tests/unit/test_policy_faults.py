"""What a policy itself caused is no infrastructure failure: not repeated, trained, and the lowest of its group."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import documents
import httpx
import jsonschema
import pytest
import requests
from pydantic import BaseModel
from running import attempts, say
from scripted import Asked, ScriptedRollouts, quick_tokenizer

import agl
from agl import tracing
from agl.agents.frameworks import adapters
from agl.credit import Competitive, Credit, PerCall, Uniform
from agl.errors import RolloutError
from agl.mdp.builder import AttemptTrajectory
from agl.mdp.evidence import answer_texts, is_answer, unreadable_inputs
from agl.mdp.faults import CAUSES, Fault
from agl.mdp.types import Call, Reward, Trajectory, Transition, float_array, int_array
from agl.trainer.report.explain import render
from agl.trainer.report.rollout_report import describe
from agl.trainer.run.faults import NAME, SOURCE, _lowest
from agl.trainer.store import open_store
from agl.trainer.store.location import read_store
from agl.trainer.traces.choice import Candidate, choose
from agl.trainer.traces.pairs import pairs

CUT = quick_tokenizer().encode("a", add_special_tokens=False) * 600
"""An answer that is cut: `ScriptedRollouts` allows 512 tokens."""


class NoAnswer(ValueError):
    """An exception of an agent's own, which says nothing of an answer."""


def length_of(task: Any, llm: agl.LLM) -> float:
    answer = say(llm, task["question"])
    if len(answer) > 100:
        raise agl.PolicyFault("no end")
    return float(len(answer))


def fit(
    directory: Path, answers: list[Any], agent: Any = None, group_size: int = 4, tasks: Any = None, **options: Any
) -> Any:
    script = itertools.cycle(answers)
    algorithm = ScriptedRollouts(lambda asked: next(script), group_size=group_size)
    trainer = agl.Trainer(algorithm, directory=directory, n_workers=1, progress=False, **options)  # type: ignore[arg-type]
    trainer.fit(agent or agl.rollout(length_of), tasks or [{"question": "q"}])
    return algorithm


def rollout_ids(directory: Path) -> list[str]:
    rollouts = read_store(f"sqlite:///{directory / 'run.db'}", lambda store: store.query_rollouts())
    return [rollout.rollout_id for rollout in rollouts]


def faults(directory: Path) -> list[Fault | None]:
    """What a policy caused in each rollout, in order."""

    async def query() -> list[Fault | None]:
        store = await open_store(f"sqlite:///{directory / 'run.db'}")
        rollouts = sorted(await store.query_rollouts(), key=lambda r: r.index)
        found = [Fault.of_spans(await store.query_spans(r.rollout_id)) for r in rollouts]
        await store.close()
        return found

    return asyncio.run(query())


@pytest.mark.parametrize("runners", ["local", pytest.param("process", marks=pytest.mark.full)])
def test_a_cut_answer_is_trained_with_the_lowest_reward_of_its_group(runners: Any, tmp_path: Path) -> None:
    algorithm = fit(tmp_path, ["abc", CUT, "a", "abcde"], runners=runners)
    assert sorted(algorithm.rewards) == [1.0, 1.0, 3.0, 5.0]
    [(index, fault)] = [(i, f) for i, f in enumerate(faults(tmp_path)) if f is not None]
    assert (fault.cause, fault.agent, fault.error) == ("length", "length_of", "PolicyFault: no end")
    [call] = algorithm.calls[index]
    assert (fault.call_id, call.finish_reason) == (call.id, "length")
    [transition] = algorithm.trajectories[index].transitions
    assert transition.trainable
    assert transition.call.response_ids.tolist() == CUT[:512]
    [attempt] = attempts(tmp_path)[index]
    assert (attempt.attempt, attempt.status) == (1, "succeeded")
    assert (attempt.error or "").splitlines()[-1] == str(fault)
    assert "PolicyFault" in (attempt.error or "")


def test_explain_says_what_the_policy_caused(tmp_path: Path) -> None:
    fit(tmp_path, ["abc", CUT])

    async def report() -> Any:
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        found = [await describe(store, r.rollout_id) for r in await store.query_rollouts()]
        await store.close()
        return next(r for r in found if r.fault is not None)

    found = asyncio.run(report())
    assert "ended by  the policy's own failure (length): agent 'length_of', its answer was cut" in render(found)
    assert found.to_json()["policy_fault"]["cause"] == "length"


def test_error_reward_says_otherwise(tmp_path: Path) -> None:
    agent = agl.rollout(length_of, error_reward=-2.0)
    algorithm = fit(tmp_path, ["abc", CUT, "a", "abcde"], agent)
    assert sorted(algorithm.rewards) == [-2.0, 1.0, 3.0, 5.0]
    assert [f.cause for f in faults(tmp_path) if f] == ["length"]


def test_an_exception_after_a_whole_answer_is_the_agents_own(tmp_path: Path) -> None:
    @agl.rollout
    def broken(task: Any, llm: agl.LLM) -> float:
        say(llm, task["question"])
        raise NoAnswer("a bug")

    with pytest.raises(RolloutError, match="a bug"):
        fit(tmp_path, ["abc"], broken)
    # It is the same each time, so the last two are not tried again.
    assert [[a.status for a in of] for of in attempts(tmp_path)] == [["failed"] * n for n in (2, 2, 1, 1)]


class OfTheUser(Exception):
    pass


class Point(BaseModel):
    x: int
    y: int


CUT_JSON = '{"x": 1, "y": ' + "1" * 600
"""An answer that is cut: `ScriptedRollouts` allows 512 tokens."""
WHOLE_JSON = '{"x": 1, "y": "north"}'

POLICYS = {
    "json": lambda answer: json.loads(answer),
    "json within": lambda answer: json.loads(answer[answer.index("{") :]),
    "pydantic of a text": lambda answer: Point.model_validate_json(answer),
    "declared": lambda answer: raises(agl.PolicyFault("no answer")),
}
"""What an agent does with an answer that is cut, and raises."""
POLICYS_WHOLE = {
    "pydantic of a field": lambda answer: Point.model_validate_json(answer),
    "pydantic of an object": lambda answer: Point.model_validate(json.loads(answer)),
    "a missing field": lambda answer: BaseModelWithZ.model_validate_json(answer),
    "jsonschema": lambda answer: jsonschema.validate(json.loads(answer), {"properties": {"y": {"type": "number"}}}),
}
"""The same, after an answer that is whole."""
NO_POLICYS = {
    "KeyError": lambda answer: {}["answer"],
    "IndexError": lambda answer: [][0],
    "AttributeError": lambda answer: re.match("<", answer).group(),  # type: ignore[union-attr]
    "TypeError": lambda answer: answer + 3,
    "ValueError": lambda answer: raises(NoAnswer("no end")),
    "SyntaxError": lambda answer: compile("x =", "agent.py", "exec"),
    "RuntimeError": lambda answer: raises(RuntimeError("the tool server said 500")),
    "of the user": lambda answer: raises(OfTheUser("out of stock")),
    "another JSON": lambda answer: json.loads("<a tool server's HTML>"),
    "an empty JSON": lambda answer: json.loads(""),
    "JSON of a task": lambda answer: Point.model_validate({"x": "west", "y": 2}),
    "requests": lambda answer: raises(requests.JSONDecodeError("the tool server sent HTML", answer, 0)),
    "httpx": lambda answer: raises(
        httpx.HTTPStatusError("500", request=httpx.Request("GET", "http://x"), response=httpx.Response(500))
    ),
    "a file": lambda answer: Path("/no/such/config.json").read_text(),
    "a time-out": lambda answer: raises(TimeoutError("the tool")),
}


class BaseModelWithZ(BaseModel):
    z: int


def raises(error: Exception) -> Any:
    raise error


def fault_of(directory: Path, read: Any, answer: str, *, wrapped: bool = False) -> tuple[str | None, str]:
    """(the cause of the fault, the attempt's status) of an agent that raises after the second of four answers."""

    def agent(task: Any, llm: agl.LLM) -> float:
        text = say(llm, task["question"])
        if len(text) > 10:
            try:
                read(text)
            except Exception as error:
                if wrapped:
                    raise OfTheUser("no answer") from error
                raise
        return 1.0

    fit(directory, ["a", answer, "ab", "abc"], agl.rollout(agent), max_attempts=1)
    found = faults(directory)
    assert found[:1] + found[2:] == [None] * 3
    status = [attempt.status for [attempt] in attempts(directory)]
    assert status[:1] + status[2:] == ["succeeded"] * 3
    return (None if found[1] is None else found[1].cause), status[1]


@pytest.mark.parametrize("name", POLICYS)
def test_an_exception_that_shows_a_cut_answer_is_the_policys(name: str, tmp_path: Path) -> None:
    assert fault_of(tmp_path, POLICYS[name], CUT_JSON, wrapped=name == "json") == ("length", "succeeded")


@pytest.mark.parametrize("name", POLICYS_WHOLE)
def test_an_exception_that_shows_a_whole_answer_is_the_policys(name: str, tmp_path: Path) -> None:
    assert fault_of(tmp_path, POLICYS_WHOLE[name], WHOLE_JSON) == ("unparsable", "succeeded")


@pytest.mark.parametrize("name", NO_POLICYS)
def test_any_other_exception_after_a_cut_answer_is_not(name: str, tmp_path: Path) -> None:
    assert fault_of(tmp_path, NO_POLICYS[name], CUT_JSON, wrapped=name == "KeyError") == (None, "failed")
    assert "ran past its limit" not in (attempts(tmp_path)[1][0].error or "")


@pytest.mark.parametrize(
    ("content", "arguments", "is_the_policys"),
    [("", '{"q": 1}', False), ([{"type": "text", "text": ""}], '{"q": 1}', False), ("", "", True), ("", None, True)],
)
def test_an_empty_text_is_an_answer_only_where_there_is_no_other(
    content: Any, arguments: str | None, is_the_policys: bool
) -> None:
    """A tool server that sent nothing is no fault of the call that asked it."""
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("")
    inputs = unreadable_inputs([raised.value])
    calls = [] if arguments is None else [{"id": "t", "function": {"name": "look", "arguments": arguments}}]
    assert is_answer(inputs, answer_texts({"content": content, "tool_calls": calls})) is is_the_policys


PROGRAM = """
import openai
messages = [{"role": "user", "content": "q"}]
answer = openai.OpenAI().chat.completions.create(model="m", messages=messages)
print({"stop": "whole"}[answer.choices[0].finish_reason])
"""


def test_a_program_that_fails_after_a_cut_answer_is_not_the_policys(tmp_path: Path) -> None:
    agent = agl.CommandAgent([sys.executable, "-c", PROGRAM], reward=lambda task, output: 1.0, name="program")
    fit(tmp_path, ["a", CUT_JSON], agent, group_size=2, max_attempts=1)
    assert faults(tmp_path) == [None, None]
    assert [attempt.status for [attempt] in attempts(tmp_path)] == ["succeeded", "failed"]
    assert "KeyError: 'length'" in (attempts(tmp_path)[1][0].error or "")


REWARDS_THAT_RAISE = {
    "KeyError": lambda task, output: task["answer"],
    "JSON of the answer": lambda task, output: json.loads(output),
    "PolicyFault": lambda task, output: raises(agl.PolicyFault("no answer")),
}


@pytest.mark.parametrize("name", REWARDS_THAT_RAISE)
def test_what_a_reward_raises_is_never_the_policys(name: str, tmp_path: Path) -> None:
    def solver(task: Any) -> str:
        scope = tracing.current()
        assert scope is not None
        base = f"{scope.rollout.gateway_url}/rollouts/{scope.rollout.rollout_id}/attempts/{scope.rollout.attempt}"
        return say(agl.LLM(f"{base}/agents/solver/v1", "policy", scope.rollout.key), "q")

    def reward(task: Any, output: str) -> float:
        return REWARDS_THAT_RAISE[name](task, output) if len(output) > 10 else 1.0

    script = itertools.cycle(["a", CUT_JSON, "a", "a"])
    algorithm = ScriptedRollouts(lambda asked: next(script))
    agent = agl.wrap(solver, reward, error_reward=-1.0, name="solver")
    trainer = agl.Trainer(algorithm, directory=tmp_path, n_workers=1, max_attempts=1, progress=False)  # type: ignore[arg-type]
    trainer.fit(agent, [{"question": str(k)} for k in range(4)])
    assert faults(tmp_path) == [None] * 4
    assert [attempt.status for [attempt] in attempts(tmp_path)] == ["succeeded", "failed", "succeeded", "succeeded"]


def test_a_lost_connection_after_a_cut_answer_is_not_the_policys(tmp_path: Path) -> None:
    @agl.rollout
    def disconnected(task: Any, llm: agl.LLM) -> float:
        say(llm, task["question"])
        try:
            raise ConnectionResetError("gone")
        except ConnectionError as error:
            raise NoAnswer("wrapped") from error

    with pytest.raises(RolloutError, match="wrapped"):
        fit(tmp_path, [CUT], disconnected)


def test_error_reward_scores_no_lost_connection(tmp_path: Path) -> None:
    @agl.rollout(error_reward=-2.0)
    def disconnected(task: Any, llm: agl.LLM) -> float:
        say(llm, task["question"])
        raise ConnectionResetError("gone")

    with pytest.raises(RolloutError, match="gone"):
        fit(tmp_path, ["abc"], disconnected)


class Answer(BaseModel):
    number: int


def test_an_answer_that_its_framework_cannot_parse(tmp_path: Path) -> None:
    """Here openai's own `parse`, whose exception is pydantic's."""
    import openai

    @agl.rollout
    def parsed(task: Any, llm: agl.LLM) -> float:
        client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        messages: Any = [{"role": "user", "content": task["question"]}]
        answer = client.chat.completions.parse(model=llm.model, messages=messages, response_format=Answer)
        return float(answer.choices[0].message.parsed.number)  # type: ignore[union-attr]

    algorithm = fit(tmp_path, ['{"number": 7}', "seven", '{"number": 3}', CUT], parsed)
    assert sorted(algorithm.rewards) == [3.0, 3.0, 3.0, 7.0]
    assert sorted(f.cause for f in faults(tmp_path) if f) == ["length", "unparsable"]


def by_agent_framework(task: Any, llm: agl.LLM) -> float:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model=llm.model, api_key=llm.api_key, base_url=llm.endpoint)
    options: Any = {"response_format": Answer}
    response = asyncio.run(Agent(client, name="solver", default_options=options).run(task["question"]))
    return float(response.value.number)


def by_autogen(task: Any, llm: agl.LLM) -> float:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True
    }  # fmt: skip
    client = OpenAIChatCompletionClient(model=llm.model, api_key=llm.api_key, base_url=llm.endpoint, model_info=info)
    agent = AssistantAgent("solver", client, output_content_type=Answer)
    return float(asyncio.run(agent.run(task=task["question"])).messages[-1].content.number)  # type: ignore[union-attr]


def by_langchain(task: Any, llm: agl.LLM) -> float:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=llm.model, api_key=llm.api_key, base_url=llm.endpoint)  # type: ignore[arg-type]
    return float(model.with_structured_output(Answer, method="json_schema").invoke(task["question"]).number)  # type: ignore[union-attr]


def by_pydantic_ai(task: Any, llm: agl.LLM) -> float:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(llm.model, provider=OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key))
    agent = Agent(model, name="solver", output_type=NativeOutput(Answer), retries=0)
    return float(agent.run_sync(task["question"]).output.number)


def by_anthropic(task: Any, llm: agl.LLM) -> float:
    import anthropic

    client = anthropic.Anthropic(base_url=llm.endpoint.removesuffix("/v1"), api_key=llm.api_key)
    messages: Any = [{"role": "user", "content": task["question"]}]
    answer = client.messages.parse(model=llm.model, messages=messages, max_tokens=64, output_format=Answer)
    return float(answer.parsed_output.number)  # type: ignore[union-attr]


def by_instructor_alike(task: Any, llm: agl.LLM) -> float:
    """What libraries on a bare client do: the JSON in a fence, validated as Python's values."""
    text = say(llm, task["question"])
    return float(Answer.model_validate(json.loads(text.strip("`").removeprefix("json"))).number)


STRUCTURED = (by_agent_framework, by_autogen, by_langchain, by_pydantic_ai, by_anthropic, by_instructor_alike)


@pytest.mark.full
@pytest.mark.parametrize("agent", STRUCTURED)
@pytest.mark.parametrize("wrong", ['{"number": "seven"}', "seven", '{"numeral": 7}'])
def test_an_answer_that_a_framework_cannot_validate(agent: Any, wrong: str, tmp_path: Path) -> None:
    fit(tmp_path, ['{"number": 7}', wrong], agl.rollout(agent), group_size=2, max_attempts=1)
    assert [fault and fault.cause for fault in faults(tmp_path)] == [None, "unparsable"]


def test_the_block_of_the_page(tmp_path: Path) -> None:
    [block] = [
        b for b in documents.blocks() if b.what.endswith("::test_the_block_of_the_page") and "agl.PolicyFault" in b.text
    ]
    namespace: dict[str, Any] = {"agl": agl, "re": re, "ask": say}
    exec(compile(block.text, str(block), "exec"), namespace)
    tasks = [{"question": "q", "answer": "4"}]
    algorithm = fit(tmp_path, ["<answer>4</answer>", "four", "<answer>5</answer>"], namespace["solver"], 3, tasks)
    assert sorted(algorithm.rewards) == [0.0, 0.0, 1.0]
    assert [fault and fault.cause for fault in faults(tmp_path)] == [None, "declared", None]


def test_an_answer_of_a_frozen_agent_is_nobodys_fault(tmp_path: Path) -> None:
    """The agent that raised asked a model that is not trained, after the policy's answer was cut."""
    import openai

    from agl.testing.provider import says, serve

    with serve(says("whole")) as provider:

        @agl.rollout
        def writer(task: Any, llm: agl.LLM) -> float:
            say(llm, task["question"])
            with agl.tracing.span("invoke_agent", "judge", agent="judge"):
                client = openai.OpenAI(base_url=provider.url, api_key="sk", max_retries=0)
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "score it"}])
                raise NoAnswer("of the judge")

        with pytest.raises(RolloutError, match="of the judge"):
            fit(tmp_path, [CUT], writer, agents=["writer"])


def talks_on(task: Any, llm: agl.LLM) -> float:
    """An agent that goes on until an answer has an end; each new prompt holds all that was answered before."""
    import openai

    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    while True:
        answer = client.chat.completions.create(model=llm.model, messages=messages)
        said = answer.choices[0].message.content or ""
        if len(said) < 100:
            return float(len(said))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]


def never_ending(nth: int) -> Any:
    """A script in which the nth rollout never ends an answer, and the others do with their first."""
    begun = itertools.count()
    rollout = -1

    def script(asked: Asked) -> Any:
        nonlocal rollout
        if asked.prompt_ids.size < 200:
            rollout = next(begun)
        return CUT if rollout == nth else "ab" + "c" * rollout

    return script


def test_a_conversation_that_outgrows_the_context_has_the_lowest_reward_of_its_group(tmp_path: Path) -> None:
    algorithm = ScriptedRollouts(never_ending(1), group_size=4)
    trainer = agl.Trainer(algorithm, directory=tmp_path, n_workers=1, progress=False)  # type: ignore[arg-type]
    trainer.fit(agl.rollout(talks_on), [{"question": "q"}])
    assert sorted(algorithm.rewards) == [2.0, 2.0, 4.0, 5.0]
    [(index, fault)] = [(i, f) for i, f in enumerate(faults(tmp_path)) if f is not None]
    assert (fault.cause, fault.agent) == ("context", "talks_on")
    assert "leaves no room in a context of 4096" in fault.error
    *sampled, refused = algorithm.calls[index]
    assert len(sampled) > 4
    assert (refused.finish_reason, (refused.error or "").partition(":")[0]) == ("error", "context_length_exceeded")
    assert fault.call_id == sampled[-1].id
    assert [t.call.id for t in algorithm.trajectories[index].transitions if t.trainable] == [c.id for c in sampled]
    assert [len(of) for of in attempts(tmp_path)] == [1] * 4


def test_a_first_prompt_that_does_not_fit_is_nobodys_fault(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="leaves no room in a context of 4096"):
        fit(tmp_path, ["abc"], agl.rollout(talks_on), tasks=[{"question": "q" * 20_000}], max_attempts=1)
    assert faults(tmp_path) == [None] * 4


def test_an_agent_that_copes_with_a_full_context_earns_its_own_reward(tmp_path: Path) -> None:
    import openai

    @agl.rollout
    def copes(task: Any, llm: agl.LLM) -> float:
        try:
            return talks_on(task, llm)
        except openai.BadRequestError:
            return 7.0

    algorithm = ScriptedRollouts(never_ending(0), group_size=2)
    trainer = agl.Trainer(algorithm, directory=tmp_path, n_workers=1, progress=False)  # type: ignore[arg-type]
    trainer.fit(copes, [{"question": "q"}])
    assert sorted(algorithm.rewards) == [3.0, 7.0]
    assert faults(tmp_path) == [None, None]


def test_where_every_rollout_was_cut_all_have_the_same_reward(tmp_path: Path) -> None:
    assert fit(tmp_path, [CUT]).rewards == [0.0] * 4


@pytest.mark.full
def test_a_group_that_policies_ended_whole_is_skipped_and_a_line_names_the_first(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @agl.rollout
    def never_satisfied(task: Any, llm: agl.LLM) -> float:
        say(llm, task["question"])
        raise agl.PolicyFault("no end")

    algorithm = agl.GRPO(model=str(untrained_model), group_size=2, batch_size=1, steps=1, max_response_tokens=4)
    agl.Trainer(algorithm, directory=tmp_path, n_workers=1).fit(never_satisfied, [{"question": "q"}])
    printed = " ".join(capsys.readouterr().err.split())
    found = re.search(
        r"step 1: 1 group\(s\) skipped, .* every rollout \(2 length\); the first, (\S+): the policy's own", printed
    )
    assert found is not None
    assert found[1] in rollout_ids(tmp_path)


def test_a_group_without_another_rollout_gets_the_lowest_of_the_step(tmp_path: Path) -> None:
    def script(asked: Asked) -> Any:
        return CUT if "worst" in _text(asked) else "abc"

    algorithm = ScriptedRollouts(script, group_size=2)
    trainer = agl.Trainer(algorithm, directory=tmp_path, progress=False)  # type: ignore[arg-type]
    trainer.fit(agl.rollout(length_of), [{"question": "worst"}, {"question": "q"}])
    assert algorithm.rewards == [3.0] * 4


def _text(asked: Asked) -> str:
    return quick_tokenizer().decode(asked.prompt_ids.tolist())


# -- credit -----------------------------------------------------------------------------------------------------------


def attempt(*calls: tuple[str, float], reward: float | dict[str, float] = 0.0, fault: bool = False) -> Any:
    """An attempt of these calls (agent, its own reward), the last of which is at fault."""
    made = []
    for i, (agent, own) in enumerate(calls):
        call = Call(f"c{i}", "ro", 1, i, agent, "policy", 0, int_array([1]), int_array([2]), float_array([-0.1]))
        made.append(Transition(call, (Reward("own", own, "emit"),) if own else ()))
    named = reward if isinstance(reward, dict) else {"": reward}
    rewards = tuple(Reward("reward", v, agent=agent or None) for agent, v in named.items() if v)
    why = Fault("length", calls[-1][0], f"c{len(calls) - 1}", "NoAnswer") if fault else None
    trajectory = Trajectory("ro", 1, None, "g", tuple(made), rewards)
    credited = tuple((r, t.call.id) for t in made for r in t.rewards) + tuple((r, None) for r in rewards)
    return AttemptTrajectory(trajectory, credited, ("a",), (), (), fault=why)


def filled(credit: Credit, cut: Any, *peers: Any, measured: bool = False) -> Any:
    """The attempt with its reward."""
    return cut.with_rewards([_lowest(credit, cut, cut.fault, peers, measured=measured)])


def test_what_it_had_earned_before_is_part_of_it_and_penalties_stay() -> None:
    peers = attempt(("a", 0.0), reward=1.0), attempt(("a", 0.0), reward=2.0)
    assert filled(Uniform(), attempt(("a", 0.5), ("a", 0.0), fault=True), *peers).reward == 1.0
    assert filled(Uniform(), attempt(("a", 3.0), fault=True), *peers).reward == 1.0
    assert filled(Uniform(), attempt(("a", -3.0), fault=True), *peers).reward == -3.0


def test_a_measurement_is_never_improved_by_it() -> None:
    peer = attempt(("a", 0.0), reward=1.0)
    assert filled(Uniform(), attempt(("a", 0.0), fault=True), peer, measured=True).reward == 0.0
    assert filled(Uniform(), attempt(("a", 0.0), fault=True), measured=True).reward == 0.0


def test_by_call_it_is_the_reward_of_the_call_whose_answer_it_was() -> None:
    peer = attempt(("a", 2.0), ("b", -1.0), ("a", 1.0))
    cut = filled(PerCall(), attempt(("a", 5.0), ("a", 0.0), fault=True), attempt(("a", -2.0)), peer)
    assert PerCall()(cut.trajectory) == [5.0, -2.0]
    [(reward, call_id)] = cut.credited[-1:]
    assert (reward.name, reward.source, call_id) == (NAME, SOURCE, "c1")


def test_in_a_game_it_is_the_agents_own() -> None:
    peer = attempt(("a", 0.0), ("b", 0.0), reward={"a": 1.0, "b": -1.0})
    worse = attempt(("a", 0.0), ("b", 0.0), reward={"a": 0.5, "b": -2.0})
    cut = filled(Competitive(), attempt(("a", 0.0), ("b", 0.0), fault=True), peer, worse)
    assert Competitive()(cut.trajectory) == [2.0, -2.0]


# -- what is imitated -------------------------------------------------------------------------------------------------


def test_it_is_never_imitated_and_never_the_better_one() -> None:
    cut, bad = attempt(("a", 0.0), reward=1.0, fault=True), attempt(("a", -1.0), reward=1.0)
    chosen = choose([Candidate(cut, "t"), Candidate(bad, "t")])
    assert chosen.counts["rollouts_left_out/ended by the policy itself"] == 1
    assert pairs([Candidate(cut, "t"), Candidate(bad, "t")]).pairs == ()


@pytest.mark.full
def test_in_an_evaluation_it_is_no_success_and_no_failed_rollout(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def never_satisfied(task: Any, llm: agl.LLM) -> float:
        say(llm, task["question"])
        raise agl.PolicyFault("no end")

    report = agl.evaluate(
        never_satisfied, [{"question": "q"}] * 2, {"now": untrained_model}, max_response_tokens=4,
        directory=tmp_path, progress=False,
    )  # fmt: skip
    now = report.policies["now"]
    assert [(r.reward, r.success, r.error) for r in now.rollouts] == [(0.0, False, None)] * 2
    assert (now.success.value, now.reward.value) == (0.0, 0.0)
    assert "policy_fault length" in now.rollouts[0].transcript


def test_adapters_name_exceptions_that_exist() -> None:
    for name, adapter in adapters().items():
        for qualified, cause in getattr(adapter, "answer_errors", {}).items():
            module, _, cls = qualified.rpartition(".")
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                continue
            found = getattr(importlib.import_module(module), cls)
            assert f"{found.__module__}.{found.__qualname__}" == qualified, name
            assert cause in CAUSES


# -- what is the infrastructure's -------------------------------------------------------------------------------------


def test_a_connection_error_of_a_frozen_agent_names_it_and_its_url(tmp_path: Path) -> None:
    import openai

    @agl.rollout
    def writer(task: Any, llm: agl.LLM) -> float:
        say(llm, task["question"])
        with agl.tracing.span("invoke_agent", "judge", agent="judge"):
            client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="sk", max_retries=0)
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "score it"}])
        return 1.0

    with pytest.raises(RolloutError) as failure:
        fit(tmp_path, [CUT], writer, agents=["writer"], max_attempts=1, group_size=1)
    assert "agent 'judge', which is not trained, got no answer from http://127.0.0.1:9/v1" in str(failure.value)
    assert "APIConnectionError" in str(failure.value)
    assert "error_reward" not in str(failure.value)
