"""A shop's customer service in Strands: an assistant that changes a database under a policy, and a simulated customer.

It imports nothing of agl. The two agents talk in turns; each is called at an endpoint of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI
from strands import Agent, tool
from strands.models.openai import OpenAIModel

from examples.customer_service.environment import Environment

GREETING = "Hi! How can I help you today?"
STOP = "###STOP###"
ENDINGS = (STOP, "###TRANSFER###", "###OUT-OF-SCOPE###")
"""With one of these the customer ends the conversation; they are tau2's."""

Conversation = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def build(
    assistant: OpenAIModel,
    customer: OpenAIModel,
    open_environment: Callable[[dict[str, Any]], Environment],
    *,
    turns: int = 30,
    calls: int = 12,
) -> Conversation:
    """The program: task -> what changed in the database, and what was said.

    Args:
        assistant, customer: the models of the two agents, results of `chat_model`.
        open_environment: task -> a policy, tools and a copy of the database for this conversation alone.
        turns: the customer's at most. calls: of the assistant's model within one of its turns at most.
    """

    async def customer_service(task: dict[str, Any]) -> dict[str, Any]:
        shop = open_environment(task)
        agents = {
            "assistant": Agent(
                assistant,
                name="assistant",
                system_prompt=shop.policy,
                tools=[tool(method) for method in shop.tools],
                callback_handler=None,
            ),
            "user": Agent(customer, name="user", system_prompt=task["scenario"], callback_handler=None),
        }
        said = [{"role": "assistant", "text": GREETING}]
        for _ in range(turns):
            said.append({"role": "user", "text": await _answer(agents["user"], said[-1]["text"], calls)})
            if any(ending in said[-1]["text"] for ending in ENDINGS):
                break
            said.append({"role": "assistant", "text": await _answer(agents["assistant"], said[-1]["text"], calls)})
        return {"changes": shop.changes(), "conversation": said}

    return customer_service


async def _answer(agent: Agent, text: str, calls: int) -> str:
    """What an agent says to the other's text; "" where it used up its calls."""
    result = await agent.invoke_async(text, limits={"turns": calls})
    return "\n".join(block["text"] for block in result.message["content"] if "text" in block).strip()


def chat_model(base_url: str, model: str, api_key: str, max_tokens: int = 512) -> OpenAIModel:
    """A model of a server that speaks OpenAI's protocol."""
    # Given client_args=, Strands makes a client, and with it a TLS context, for each call.
    # Without connections that are kept open, one client serves several event loops: recording, training, evaluation.
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, default_headers={"Connection": "close"})
    return OpenAIModel(client=client, model_id=model, params={"max_tokens": max_tokens}, stream=False)
