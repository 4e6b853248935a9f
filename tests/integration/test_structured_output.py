"""Agents that request structured output train without a parse failure, from a policy with random weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import pytest

pytest.importorskip("llguidance")

from openai import OpenAI
from pydantic import BaseModel, Field

import agl
from agl.trainer.store import open_store

TASKS = [{"question": f"{n} apples"} for n in range(4)]


class Sum(BaseModel):
    kind: str = Field(pattern="^(add|sub)$")
    n: int = Field(ge=0, le=99)


def fits(value: Any) -> float:
    assert isinstance(value, Sum)
    assert value.kind in ("add", "sub")
    assert 0 <= value.n <= 99
    return value.n / 99


@agl.rollout
def chat(task: dict[str, str], llm: agl.LLM) -> float:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: Any = [{"role": "user", "content": task["question"]}]
    answer = client.chat.completions.parse(model=llm.model, messages=messages, response_format=Sum)
    return fits(answer.choices[0].message.parsed)


@agl.rollout
def responses(task: dict[str, str], llm: agl.LLM) -> float:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    return fits(client.responses.parse(model=llm.model, input=task["question"], text_format=Sum).output_parsed)


@agl.rollout
async def pydantic_ai(task: dict[str, str], llm: agl.LLM) -> float:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key)
    agent = Agent(OpenAIChatModel(llm.model, provider=provider), output_type=NativeOutput(Sum), retries=0)
    return fits((await agent.run(task["question"])).output)


@agl.rollout
async def openai_agents(task: dict[str, str], llm: agl.LLM) -> float:
    from agents import Agent, OpenAIChatCompletionsModel, Runner
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    agent = Agent(name="solver", model=OpenAIChatCompletionsModel(llm.model, client), output_type=Sum)
    return fits((await Runner.run(agent, task["question"])).final_output)


@agl.rollout
def langchain(task: dict[str, str], llm: agl.LLM) -> float:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)  # type: ignore[arg-type]
    return fits(model.with_structured_output(Sum, method="json_schema").invoke(task["question"]))


TOOL: Any = {"type": "function", "function": {"name": "answer", "parameters": Sum.model_json_schema()}}
OTHER: Any = {"type": "function", "function": {"name": "sum", "parameters": Sum.model_json_schema()}}


def called(task: dict[str, str], llm: agl.LLM, tools: Any, choice: Any) -> float:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: Any = [{"role": "user", "content": task["question"]}]
    answer = client.chat.completions.create(model=llm.model, messages=messages, tools=tools, tool_choice=choice)
    [call] = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in ("answer", "sum")
    return fits(Sum.model_validate_json(call.function.arguments))


@agl.rollout
def named_tool(task: dict[str, str], llm: agl.LLM) -> float:
    return called(task, llm, [TOOL, OTHER], {"type": "function", "function": {"name": "answer"}})


@agl.rollout
def any_tool(task: dict[str, str], llm: agl.LLM) -> float:
    return called(task, llm, [TOOL, OTHER], "required")


@agl.rollout
async def pydantic_ai_tool(task: dict[str, str], llm: agl.LLM) -> float:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key)
    agent = Agent(OpenAIChatModel(llm.model, provider=provider), output_type=Sum, retries=0)
    return fits((await agent.run(task["question"])).output)


@agl.rollout
def langchain_tool(task: dict[str, str], llm: agl.LLM) -> float:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)  # type: ignore[arg-type]
    return fits(model.with_structured_output(Sum, method="function_calling").invoke(task["question"]))


def messages_api(llm: agl.LLM) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=llm.endpoint.removesuffix("/v1"), api_key=llm.api_key).messages


@agl.rollout
def anthropic_tool(task: dict[str, str], llm: agl.LLM) -> float:
    tools: Any = [{"name": "answer", "input_schema": Sum.model_json_schema()}]
    choice: Any = {"type": "tool", "name": "answer"}
    messages: Any = [{"role": "user", "content": task["question"]}]
    answer = messages_api(llm).create(
        model=llm.model, max_tokens=100, messages=messages, tools=tools, tool_choice=choice
    )
    [block] = answer.content
    assert block.type == "tool_use"
    return fits(Sum.model_validate(block.input))


@agl.rollout
def anthropic_format(task: dict[str, str], llm: agl.LLM) -> float:
    asked: Any = [{"role": "user", "content": task["question"]}]
    # `parse` would send the schema without its bounds.
    form: Any = {"format": {"type": "json_schema", "schema": Sum.model_json_schema()}}
    answer = messages_api(llm).create(model=llm.model, max_tokens=100, messages=asked, output_config=form)
    [block] = answer.content
    assert block.type == "text"
    return fits(Sum.model_validate_json(block.text))


@agl.rollout
def anthropic_free_tool(task: dict[str, str], llm: agl.LLM) -> float:
    """A strict tool that need not be called."""
    tools: Any = [{"name": name, "input_schema": Sum.model_json_schema(), "strict": True} for name in ("answer", "sum")]
    asked: Any = [{"role": "user", "content": task["question"]}]
    answer = messages_api(llm).create(model=llm.model, max_tokens=100, messages=asked, tools=tools)
    calls = [block for block in answer.content if block.type == "tool_use"]
    for call in calls:
        fits(Sum.model_validate(call.input))
    return float(len(calls) > 0)


@agl.rollout
def google(task: dict[str, str], llm: agl.LLM) -> float:
    from google import genai

    client = genai.Client(api_key=llm.api_key, http_options={"base_url": llm.endpoint})
    config: Any = {"response_mime_type": "application/json", "response_schema": Sum}
    return fits(client.models.generate_content(model=llm.model, contents=task["question"], config=config).parsed)


@agl.rollout
def free_tool(task: dict[str, str], llm: agl.LLM) -> float:
    """Strict tools that need not be called: what is called has arguments that fit."""
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: Any = [{"role": "user", "content": task["question"]}]
    tools: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in (TOOL, OTHER)]
    answer = client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
    message = answer.choices[0].message
    assert "<tool_call>" not in (message.content or "")
    for call in message.tool_calls or ():
        assert call.type == "function"
        fits(Sum.model_validate_json(call.function.arguments))
    return float(len(message.tool_calls or ()) > 0)


@agl.rollout
async def openai_agents_with_a_tool(task: dict[str, str], llm: agl.LLM) -> float:
    """An output type beside a tool, which the SDK makes strict: an answer is a call, or the output."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
    from openai import AsyncOpenAI

    used: list[int] = []

    @function_tool(failure_error_function=None)
    def count(n: Annotated[int, Field(ge=0, le=99)]) -> str:
        used.append(n)
        return str(n)

    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    model = OpenAIChatCompletionsModel(llm.model, client)
    one = ModelSettings(parallel_tool_calls=False)
    agent = Agent(name="solver", model=model, output_type=Sum, tools=[count], model_settings=one)
    return fits((await Runner.run(agent, task["question"], max_turns=30)).final_output) + len(used)


@agl.rollout
async def pydantic_ai_with_a_tool(task: dict[str, str], llm: agl.LLM) -> float:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key)
    one: Any = {"parallel_tool_calls": False}
    model = OpenAIChatModel(llm.model, provider=provider)
    agent = Agent(model, output_type=NativeOutput(Sum), retries=0, model_settings=one)
    used: list[int] = []

    @agent.tool_plain
    def count(n: Annotated[int, Field(ge=0, le=99)]) -> str:
        used.append(n)
        return str(n)

    return fits((await agent.run(task["question"])).output) + len(used)


WAYS = {
    "chat": (chat, "openai"),
    "responses": (responses, "openai"),
    "pydantic_ai": (pydantic_ai, "pydantic_ai"),
    "openai_agents": (openai_agents, "agents"),
    "langchain": (langchain, "langchain_openai"),
    "named_tool": (named_tool, "openai"),
    "any_tool": (any_tool, "openai"),
    "pydantic_ai_tool": (pydantic_ai_tool, "pydantic_ai"),
    "langchain_tool": (langchain_tool, "langchain_openai"),
    "anthropic_tool": (anthropic_tool, "anthropic"),
    "anthropic_format": (anthropic_format, "anthropic"),
    "anthropic_free_tool": (anthropic_free_tool, "anthropic"),
    "google": (google, "google.genai"),
    "free_tool": (free_tool, "openai"),
    "openai_agents_with_a_tool": (openai_agents_with_a_tool, "agents"),
    "pydantic_ai_with_a_tool": (pydantic_ai_with_a_tool, "pydantic_ai"),
}


@pytest.mark.parametrize(("way", "gateways"), [*((way, 1) for way in WAYS), ("chat", 2)])
def test_every_rollout_parses_and_is_trained_exactly(
    way: str, gateways: int, untrained_model: Path, tmp_path: Path
) -> None:
    agent, package = WAYS[way]
    pytest.importorskip(package)
    algorithm = agl.GRPO(
        model=str(untrained_model), group_size=4, batch_size=4, steps=2, learning_rate=1e-3, max_response_tokens=60,
        max_context=500,
    )  # fmt: skip
    options: dict[str, Any] = {"max_attempts": 1, "gateways": gateways}
    result = agl.Trainer(algorithm, n_workers=4, directory=tmp_path, progress=False, **options).fit(agent, TASKS)
    first = result.history[0]
    assert first["train/rollouts"] == 16
    assert not first.get("train/failed")
    # The policy has not moved since it sampled.
    ratios = {key: value for key, value in first.items() if key.endswith("abs_log_ratio")}
    assert ratios
    assert max(ratios.values()) < 1e-4, ratios

    async def calls() -> list[Any]:
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        found = [c for r in await store.query_rollouts() for c in await store.query_calls(r.rollout_id)]
        await store.close()
        return found

    found = asyncio.run(calls())
    assert len(found) >= 32
    assert all(call.grammar for call in found)
    cut = [call for call in found if call.finish_reason not in ("stop", "tool_calls")]
    assert not cut or way.endswith("free_tool"), cut
    if way.endswith("free_tool"):
        assert any(call.tool_call_ids for call in found), "no call was made: the test shows nothing"
    if way.endswith("with_a_tool"):
        assert {bool(call.tool_call_ids) for call in found} == {True, False}, "both calls and output"


def untrained_with(folder: Path, template: str, likelier: dict[str, float]) -> str:
    """An untrained model with a chat template of `tests/support/templates`, to which some tokens say more."""
    import torch
    from tiny_tokenizers import template_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = template_tokenizer(template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=2048, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for token, factor in likelier.items():
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] *= factor
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("template", "likelier", "way"),
    [
        ("qwen35", {"</think>": 50}, "named_tool"),
        ("qwen35", {"</think>": 50}, "pydantic_ai_tool"),
        ("qwen35", {"</think>": 50, "<tool_call>": 12}, "free_tool"),
        ("llama31", {"{": 12}, "free_tool"),
        ("mistral_v3", {}, "named_tool"),
        ("mistral_v3", {"[TOOL_CALLS]": 12}, "free_tool"),
    ],
)
def test_calls_fit_in_the_forms_of_other_templates(
    template: str, likelier: dict[str, float], way: str, tmp_path: Path
) -> None:
    """Qwen3.5's XML after reasoning, Llama 3's JSON without a tag, and Mistral's array of calls with ids."""
    agent, package = WAYS[way]
    pytest.importorskip(package)
    algorithm = agl.GRPO(
        model=untrained_with(tmp_path / "model", template, likelier), group_size=4, batch_size=4, steps=1,
        learning_rate=1e-3, max_response_tokens=700,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=4, directory=tmp_path / "run", progress=False, max_attempts=1)
    first = trainer.fit(agent, TASKS).history[0]
    assert first["train/rollouts"] == 16
    assert not first.get("train/failed")
    assert max(value for key, value in first.items() if key.endswith("abs_log_ratio")) < 1e-4
    if way == "free_tool":
        assert 0 < first["train/reward"] < 1, "some answers are calls, and some are not"


def test_a_policy_reasons_before_an_answer_that_fits(tmp_path: Path) -> None:
    thought: list[bool] = []

    @agl.rollout
    def think(task: dict[str, str], llm: agl.LLM) -> float:
        client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        messages: Any = [{"role": "user", "content": task["question"]}]
        answer = client.chat.completions.parse(model=llm.model, messages=messages, response_format=Sum)
        thought.append(bool(getattr(answer.choices[0].message, "reasoning_content", None)))
        return fits(answer.choices[0].message.parsed)

    model = untrained_with(tmp_path / "model", "qwen3", {"<think>": 12, "</think>": 50})
    algorithm = agl.GRPO(
        model=model, group_size=4, batch_size=4, steps=1, learning_rate=1e-3, max_response_tokens=700
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=4, directory=tmp_path / "run", progress=False, max_attempts=1)
    result = trainer.fit(think, TASKS)
    assert result.history[0]["train/rollouts"] == 16
    assert not result.history[0].get("train/failed")
    assert {*thought} == {True, False}, thought
    assert max(value for key, value in result.history[0].items() if key.endswith("abs_log_ratio")) < 1e-4


def test_a_schema_that_cannot_be_held_is_the_agents_error(untrained_model: Path, tmp_path: Path) -> None:
    """The error says what is wrong, and nothing is trained."""
    seen: list[str] = []

    @agl.rollout
    def wrong(task: dict[str, str], llm: agl.LLM) -> float:
        client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nothing"}}}
        messages: Any = [{"role": "user", "content": task["question"]}]
        try:
            client.chat.completions.create(model=llm.model, messages=messages, response_format=form)
        except Exception as error:
            seen.append(str(error))
            raise
        return 1.0

    algorithm = agl.GRPO(model=str(untrained_model), group_size=2, batch_size=1, steps=1, max_context=400)
    with pytest.raises(agl.AglError):
        agl.Trainer(algorithm, n_workers=1, directory=tmp_path, progress=False, max_attempts=1).fit(wrong, TASKS)
    assert seen
    assert all("400" in text and "cannot be held to this schema" in text for text in seen)
