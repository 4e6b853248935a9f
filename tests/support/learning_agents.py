"""The quickstart's agent, as a user of each framework would write it: a calculator, and nothing of ours."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import agl
from agl.adapters import autogen
from agl.testing.provider import Reply, Script, last_said
from agl.trainer.quickstart.demos import SYSTEM_PROMPT
from agl.trainer.quickstart.tasks import calculate

NAME = "solver"
ROOT = "http://provider.invalid"
URL = f"{ROOT}/v1"
"""Where nobody answers: a call that is not routed to the policy fails."""
KEY = "sk-provider"


def calculator(expression: str) -> str:
    """Calculate `a op b`, where a and b are integers and op is one of + - * /."""
    return calculate(expression)


@dataclass(frozen=True, slots=True)
class Learner:
    """An agent to train.

    Attributes:
        name: of the test. build: makes what is given to `wrap`. modules: what it imports.
        id_prefix: of the response ids of the dialect that it speaks.
        tool_agent: whose the spans of its tools are; None where the user's own loop runs them, so that there are none.
        wrap: the one line; `agl.wrap` if None.
        merges: whether it tells the model of tool calls as the model wrote them, so that a rollout is one row.
        drops_texts: whether it leaves out what the model said beside a tool call; such a conversation forks.
        imitates: where the framework tells of tools in texts of its own, which the policy has never read: a script of
            them for `build(url)`, which the policy imitates before it is trained. A real model comes knowing as much.
    """

    name: str
    build: Callable[..., Any]
    modules: tuple[str, ...]
    id_prefix: str = "chatcmpl-"
    tool_agent: str | None = NAME
    wrap: Callable[..., Any] | None = None
    merges: bool = True
    drops_texts: bool = False
    imitates: Script | None = None

    @property
    def installed(self) -> bool:
        return all(_has(module) for module in self.modules)


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# -- LangChain and LangGraph ------------------------------------------------------------------------------------------


def _chat_openai() -> Any:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    return ChatOpenAI(model="m", base_url=URL, api_key=SecretStr(KEY), max_retries=0)


def langchain_openai() -> Any:
    from langchain.agents import create_agent
    from langchain.tools import tool

    return create_agent(_chat_openai(), [tool(calculator)], system_prompt=SYSTEM_PROMPT, name=NAME)


def langchain_anthropic() -> Any:
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langchain_anthropic import ChatAnthropic
    from pydantic import SecretStr

    model: Any = ChatAnthropic(  # pyright: ignore[reportCallIssue]
        model="m", base_url=ROOT, api_key=SecretStr(KEY), max_tokens=48, max_retries=0
    )
    return create_agent(model, [tool(calculator)], system_prompt=SYSTEM_PROMPT, name=NAME)


def langgraph() -> Any:
    from langchain_core.messages import SystemMessage
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(calculator)]
    model = _chat_openai().bind_tools(tools)

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke([SystemMessage(SYSTEM_PROMPT), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node(NAME, solve)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, NAME)
    graph.add_conditional_edges(NAME, tools_condition)
    graph.add_edge("tools", NAME)
    return graph.compile(name="arithmetic")


# -- the other frameworks ---------------------------------------------------------------------------------------------


def openai_agents() -> Any:
    """Over the SDK's default, the Responses API."""
    from agents import Agent, OpenAIProvider, function_tool

    model = OpenAIProvider(base_url=URL, api_key=KEY).get_model("m")
    return Agent(name=NAME, instructions=SYSTEM_PROMPT, tools=[function_tool(calculator)], model=model)


def agent_framework() -> Any:
    """Over its default client, the Responses API, which continues by `previous_response_id`."""
    from agent_framework import Agent, tool
    from agent_framework.openai import OpenAIChatClient

    client = OpenAIChatClient(model="m", base_url=URL, api_key=KEY)
    return Agent(client, name=NAME, instructions=SYSTEM_PROMPT, tools=[tool(calculator)])


def strands() -> Any:
    """Streaming, its default."""
    import openai
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    # Given client_args=, Strands makes a client, and with it a TLS context (17 ms), for each call.
    model = OpenAIModel(client=openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0), model_id="m")
    return Agent(model=model, tools=[tool(calculator)], system_prompt=SYSTEM_PROMPT, name=NAME, callback_handler=None)


def pydantic_ai() -> Any:
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    model = OpenAIChatModel("m", provider=provider)
    return Agent(model, name=NAME, instructions=SYSTEM_PROMPT, tools=[calculator])


def autogen_agentchat() -> Any:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
    }  # fmt: skip
    client = OpenAIChatCompletionClient(model="m", base_url=URL, api_key=KEY, max_retries=0, model_info=info)
    return AssistantAgent(
        NAME, model_client=client, tools=[calculator], system_message=SYSTEM_PROMPT, max_tool_iterations=4
    )


def smolagents(url: str = URL) -> Any:
    """One step with the tool; then smolagents asks for the answer. It tells the model of both in texts of its own."""
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    @tool
    def calculator(expression: str) -> str:
        """Calculate `a op b`, where a and b are integers and op is one of + - * /.

        Args:
            expression: what to calculate.
        """
        return calculate(expression)

    class Brief(OpenAIModel):
        """The policy knows no more than the quickstart's prompt and the bare question."""

        def generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            brief = copy.deepcopy(messages)
            for part in (part for message in brief if isinstance(message.content, list) for part in message.content):
                part["text"] = part["text"].removeprefix("New task:\n")
            return super().generate(brief, *args, **kwargs)

    model = Brief("m", api_base=url, api_key=KEY, client_kwargs={"max_retries": 0}, tool_choice="auto")
    prompts: Any = {
        **EMPTY_PROMPT_TEMPLATES,
        "system_prompt": SYSTEM_PROMPT,
        "final_answer": {"pre_messages": SYSTEM_PROMPT, "post_messages": ""},
    }
    return ToolCallingAgent(
        [calculator], model, prompts, name=NAME, description="calculates", max_steps=1, verbosity_level=LogLevel.OFF
    )


def crewai() -> Any:
    import subject_crewai  # noqa: F401
    from crewai import LLM, Agent
    from crewai.hooks import register_before_llm_call_hook
    from crewai.tools import tool

    def brief(context: Any) -> None:
        """The policy knows no more than the quickstart's prompt and the bare question."""
        if context.agent is not None and context.agent.role == NAME:
            system, user = context.messages[:2]
            system["content"] = SYSTEM_PROMPT
            user["content"] = user["content"].removeprefix("\nCurrent Task: ")

    register_before_llm_call_hook(brief)
    return Agent(
        role=NAME, goal="", backstory="", llm=LLM(model="openai/m", base_url=URL, api_key=KEY, max_retries=0),
        tools=[tool("calculator")(calculator)],
    )  # fmt: skip


def ag2() -> Any:
    from ag2 import Agent, tool
    from ag2.config import OpenAIConfig
    from openai import DefaultAsyncHttpxClient

    # Without http_client=, ag2 makes a TLS context (17 ms) for each question.
    config = OpenAIConfig(model="m", base_url=URL, api_key=KEY, max_retries=0, http_client=DefaultAsyncHttpxClient())
    return Agent(NAME, prompt=SYSTEM_PROMPT, config=config, tools=[tool(calculator)])


def autogen_classic() -> Any:
    """Two agents, as classic AutoGen has it: one asks for the tool, the other executes it."""
    from autogen import ConversableAgent, register_function  # pyright: ignore[reportMissingImports]

    config = {"config_list": [{"model": "m", "base_url": URL, "api_key": KEY, "max_retries": 0}], "cache_seed": None}
    idle: list[tuple[Any, Any]] = []  # a pair holds one chat at a time, and costs several clients to make

    def pair() -> tuple[Any, Any]:
        solver = ConversableAgent(NAME, system_message=SYSTEM_PROMPT, llm_config=config, human_input_mode="NEVER")
        user = ConversableAgent(
            "user",
            llm_config=False,
            human_input_mode="NEVER",
            is_termination_msg=lambda message: not message.get("tool_calls"),
        )
        register_function(calculator, caller=solver, executor=user, name="calculator", description="Calculate.")
        return solver, user

    def solve(task: Any) -> str:
        try:
            solver, user = idle.pop()
        except IndexError:
            solver, user = pair()
        chat = user.initiate_chat(solver, message=task["question"], max_turns=4, silent=True)
        idle.append((solver, user))
        return chat.chat_history[-1]["content"]

    return solve


# -- bare clients: the loop that everyone writes ----------------------------------------------------------------------

MAX_TURNS = 4


def _schema(**outer: Any) -> Any:
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    return {"name": "calculator", "description": calculator.__doc__} | outer | {"parameters": parameters}


def _use(arguments: Any) -> str:
    """The tool's result, or what is wrong with its arguments."""
    try:
        return calculator(**(json.loads(arguments) if isinstance(arguments, str) else arguments))
    except (TypeError, ValueError) as error:
        return f"error: {error}"


def _opening(task: Any) -> list[Any]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task["question"]}]


def _tool_messages(message: Any) -> list[Any]:
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": _use(call.function.arguments)}
        for call in message.tool_calls
    ]
    return [message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}), *answers]


def openai_chat() -> Any:
    import openai

    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)

    def solver(task: Any) -> str | None:
        messages = _opening(task)
        tools: Any = [{"type": "function", "function": _schema()}]
        for _ in range(MAX_TURNS):
            message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
            if not message.tool_calls:
                return message.content
            messages += _tool_messages(message)
        return None

    return solver


def openai_chat_stream() -> Any:
    import openai

    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)

    async def solver(task: Any) -> str | None:
        messages = _opening(task)
        tools: Any = [{"type": "function", "function": _schema()}]
        for _ in range(MAX_TURNS):
            async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            if not message.tool_calls:
                return message.content
            messages += _tool_messages(message)
        return None

    return solver


def openai_responses() -> Any:
    import openai

    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)

    async def solver(task: Any) -> str | None:
        items: list[Any] = [{"role": "user", "content": task["question"]}]
        tools: Any = [_schema(type="function")]
        for _ in range(MAX_TURNS):
            response = await client.responses.create(model="m", instructions=SYSTEM_PROMPT, input=items, tools=tools)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            items += response.output
            items += [
                {"type": "function_call_output", "call_id": call.call_id, "output": _use(call.arguments)}
                for call in calls
            ]
        return None

    return solver


def anthropic_messages() -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0)

    def solver(task: Any) -> str | None:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        schema = _schema()
        tools: Any = [{"name": schema["name"], "input_schema": schema["parameters"]}]
        for _ in range(MAX_TURNS):
            message = client.messages.create(
                model="m", max_tokens=48, system=SYSTEM_PROMPT, messages=messages, tools=tools
            )
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                return "".join(block.text for block in message.content if block.type == "text")
            results = [{"type": "tool_result", "tool_use_id": u.id, "content": _use(u.input)} for u in uses]
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        return None

    return solver


def google_genai() -> Any:
    from google import genai

    client = genai.Client(api_key=KEY, vertexai=False, http_options={"base_url": ROOT})
    calls: Any = {"maximum_remote_calls": MAX_TURNS}
    config: Any = {
        "system_instruction": SYSTEM_PROMPT, "tools": [calculator], "automatic_function_calling": calls,
    }  # fmt: skip

    def solver(task: Any) -> str | None:
        return client.chats.create(model="m", config=config).send_message(task["question"]).text

    return solver


def _mostly_miscalculates(body: dict[str, Any]) -> Reply:
    """Calls the calculator, three times of five with another second number, and answers what it was told."""
    text = last_said(body)[1]
    if "tools" not in body:
        return Reply(text.removeprefix("Observation:\n").strip())
    rng = random.Random(text)  # whatever the order in which the questions come
    expression = text.removeprefix("What is ").removesuffix("?")
    if rng.random() < 0.6:
        expression = f"{expression.rpartition(' ')[0]} {rng.randrange(10 ** rng.randint(1, 4))}"
    return Reply(tools=(("calculator", {"expression": expression}),))


LEARNERS = (
    Learner("langchain_openai", langchain_openai, ("langchain", "langchain_openai")),
    Learner("langchain_anthropic", langchain_anthropic, ("langchain", "langchain_anthropic"), "msg_"),
    Learner("langgraph", langgraph, ("langgraph", "langchain_openai")),
    Learner("openai_agents", openai_agents, ("agents",), "resp_"),
    Learner("agent_framework", agent_framework, ("agent_framework", "agent_framework_openai"), "resp_"),
    Learner("strands", strands, ("strands", "openai")),
    Learner("pydantic_ai", pydantic_ai, ("pydantic_ai", "openai")),
    Learner("autogen_agentchat", autogen_agentchat, ("autogen_agentchat", "autogen_ext")),
    Learner("ag2", ag2, ("ag2.middleware",)),
    Learner("smolagents", smolagents, ("smolagents", "openai"), merges=False, imitates=_mostly_miscalculates),
    # crewai raises where an answer is empty, as one of an untrained policy may be.
    Learner("crewai", crewai, ("crewai", "openai"), drops_texts=True, wrap=partial(agl.wrap, error_reward=0.0)),
    Learner("autogen_classic", autogen_classic, ("autogen.agentchat",), tool_agent="user", wrap=autogen.wrap),
    Learner("openai_chat", openai_chat, ("openai",), tool_agent=None),
    Learner("openai_chat_stream", openai_chat_stream, ("openai",), tool_agent=None),
    Learner("openai_responses", openai_responses, ("openai",), "resp_", tool_agent=None),
    Learner("anthropic_messages", anthropic_messages, ("anthropic",), "msg_", tool_agent=None),
    Learner("google_genai", google_genai, ("google.genai",), "gen_", tool_agent=None),
)
