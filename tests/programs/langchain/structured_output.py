"""Structured output of an agent: by a tool's call, which is asked for again if it is wrong, and by the provider."""

from typing import Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.tools import tool
from pydantic import BaseModel, Field


class ProductReview(BaseModel):
    """What a review says."""

    product: str
    rating: int = Field(description="From 1 to 5", ge=1, le=5)
    sentiment: Literal["positive", "negative"]


class Contact(BaseModel):
    """How to reach somebody."""

    name: str
    email: str


@tool
def find_product(words: str) -> str:
    """Find the name of a product."""
    return f"Lamp {words.upper()}"


reviewer = create_agent(
    "openai:gpt-4.1-mini",
    [find_product],
    system_prompt="You read reviews.",
    response_format=ToolStrategy(ProductReview, tool_message_content="Review noted."),
    name="review_reader",
)
contacts = create_agent(
    "openai:gpt-4.1-mini",
    system_prompt="You find contacts.",
    response_format=ProviderStrategy(Contact),
    name="contact_reader",
)

result = reviewer.invoke({"messages": [{"role": "user", "content": "The X1 is great: 5 of 5 stars."}]})
print(repr(result["structured_response"]))
print([message.text for message in result["messages"] if message.type == "tool"])
result = contacts.invoke({"messages": [{"role": "user", "content": "Write to Ada, ada@example.com"}]})
print(repr(result["structured_response"]))
