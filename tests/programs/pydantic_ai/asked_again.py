"""A validator of the output and a tool that both tell the model to try again."""

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext

PEOPLE = {"Ada Lovelace": 7, "Alan Turing": 8}


class Message(BaseModel):
    """A message to one person."""

    user_id: int
    text: str


class NotPossible(BaseModel):
    """If there is nobody to write to."""

    why: str


agent: Agent[None, Message | NotPossible] = Agent(
    "openai-chat:gpt-4.1-mini",
    name="secretary",
    output_type=[Message, NotPossible],
    instructions="You write short messages to people.",
    retries=2,
)


@agent.tool_plain(retries=2)
def user_by_name(name: str) -> int:
    """Get a person's id by the full name."""
    if name not in PEOPLE:
        raise ModelRetry(f"There is no {name!r}, give the full name.")
    return PEOPLE[name]


@agent.output_validator
def is_short(ctx: RunContext[None], output: Message | NotPossible) -> Message | NotPossible:
    if isinstance(output, Message) and len(output.text) > 40:
        raise ModelRetry(f"The text has {len(output.text)} characters, write at most 40.")
    return output


result = agent.run_sync("Ask Ada whether she has time for tea.")
print(result.output)
print(result.usage.requests, "requests,", result.usage.tool_calls, "calls of tools")
