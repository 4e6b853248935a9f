"""autogen-core alone: agents that subscribe to topics, one after the other."""

import asyncio
from dataclasses import dataclass

from autogen_core import (
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TopicId,
    TypeSubscription,
    message_handler,
)
from autogen_core.models import ChatCompletionClient, SystemMessage, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient


@dataclass
class Text:
    content: str


class Step(RoutedAgent):
    """Asks the model with its own prompt, and publishes the answer for the next step."""

    def __init__(self, prompt: str, next_topic: str | None, client: ChatCompletionClient) -> None:
        super().__init__(f"A step: {prompt}")
        self._system, self._next, self._client = SystemMessage(content=prompt), next_topic, client

    @message_handler
    async def handle_text(self, message: Text, ctx: MessageContext) -> None:
        user = UserMessage(content=message.content, source=self.id.key)
        result = await self._client.create([self._system, user], cancellation_token=ctx.cancellation_token)
        print(f"{self.id.type}: {result.content}")
        if self._next is not None:
            await self.publish_message(Text(str(result.content)), topic_id=TopicId(self._next, source=self.id.key))


STEPS = {
    "ConceptExtractor": "List the features of the product.",
    "Copywriter": "Write copy from the features.",
    "Proofreader": "Correct the copy.",
}


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    runtime = SingleThreadedAgentRuntime()
    names = list(STEPS)
    for name, following in zip(names, [*names[1:], None], strict=True):
        await Step.register(runtime, name, lambda name=name, to=following: Step(STEPS[name], to, client))
        await runtime.add_subscription(TypeSubscription(topic_type=name, agent_type=name))
    runtime.start()
    await runtime.publish_message(Text("A steel water bottle."), topic_id=TopicId(names[0], source="default"))
    await runtime.stop_when_idle()
    await client.close()


asyncio.run(main())
