"""autogen-core alone: an agent that lets a tool agent run its tools, asked by direct messages."""

import asyncio
from dataclasses import dataclass

from autogen_core import AgentId, MessageContext, RoutedAgent, SingleThreadedAgentRuntime, message_handler
from autogen_core.models import ChatCompletionClient, LLMMessage, SystemMessage, UserMessage
from autogen_core.tool_agent import ToolAgent, tool_agent_caller_loop
from autogen_core.tools import FunctionTool, Tool
from autogen_ext.models.openai import OpenAIChatCompletionClient


@dataclass
class Question:
    content: str


async def get_stock_price(ticker: str) -> float:
    """Get the price of a stock."""
    return {"ACME": 42.0}.get(ticker, 7.0)


class Broker(RoutedAgent):
    def __init__(self, client: ChatCompletionClient, tools: list[Tool]) -> None:
        super().__init__("An agent that knows prices")
        self._client, self._tools = client, tools

    @message_handler
    async def handle_question(self, message: Question, ctx: MessageContext) -> Question:
        session: list[LLMMessage] = [
            SystemMessage(content="You know the prices of stocks."),
            UserMessage(content=message.content, source="user"),
        ]
        messages = await tool_agent_caller_loop(
            self,
            tool_agent_id=AgentId("tool_executor", self.id.key),
            model_client=self._client,
            input_messages=session,
            tool_schema=[tool.schema for tool in self._tools],
            cancellation_token=ctx.cancellation_token,
        )
        return Question(str(messages[-1].content))


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    tools: list[Tool] = [FunctionTool(get_stock_price, description="Get the price of a stock.")]
    runtime = SingleThreadedAgentRuntime()
    await ToolAgent.register(runtime, "tool_executor", lambda: ToolAgent("Runs tools", tools))
    await Broker.register(runtime, "broker", lambda: Broker(client, tools))
    runtime.start()
    answers = await asyncio.gather(
        *(runtime.send_message(Question(f"What costs {name}?"), AgentId("broker", name)) for name in ("ACME", "Bolt"))
    )
    print(*(answer.content for answer in answers), sep="\n")
    await runtime.stop()
    await client.close()


asyncio.run(main())
