"""A conversation over three runs: the history goes through JSON, and a processor shortens it."""

from pydantic_ai import Agent, ModelMessage, ModelMessagesTypeAdapter
from pydantic_ai.capabilities import ProcessHistory


def recent(messages: list[ModelMessage]) -> list[ModelMessage]:
    """Only what was said of late."""
    return messages[-3:]


chef = Agent(
    "openai-chat:gpt-4.1-mini",
    name="chef",
    instructions="Answer questions about cooking in one sentence.",
    capabilities=[ProcessHistory(recent)],
)

first = chef.run_sync("How long do I boil an egg?")
stored = first.all_messages_json()

second = chef.run_sync("And a goose egg?", message_history=ModelMessagesTypeAdapter.validate_json(stored))
third = chef.run_sync("And peas?", message_history=second.all_messages())

for result in (first, second, third):
    print(result.output, "-", len(result.all_messages()), "messages,", len(result.new_messages()), "of them new")
