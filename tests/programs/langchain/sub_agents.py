"""A personal assistant: an agent whose tools ask a calendar agent and an email agent."""

import asyncio

from langchain.agents import create_agent
from langchain.tools import tool
from opentelemetry import trace

tracer = trace.get_tracer("office")


@tool
def create_event(title: str, start: str) -> str:
    """Create an event in the calendar."""
    with tracer.start_as_current_span("calendar", attributes={"title": title}):
        return f"{title} at {start} created"


@tool
def send_email(to: list[str], subject: str) -> str:
    """Send an email."""
    return f"sent to {', '.join(to)}: {subject}"


calendar_agent = create_agent(
    "openai:gpt-4.1-mini", [create_event], system_prompt="You keep the calendar.", name="calendar_agent"
)
email_agent = create_agent("openai:gpt-4.1-mini", [send_email], system_prompt="You write email.", name="email_agent")


@tool
def schedule_event(request: str) -> str:
    """Schedule an event, as described in plain words."""
    result = calendar_agent.invoke({"messages": [{"role": "user", "content": request}]})
    return result["messages"][-1].text


@tool
async def manage_email(request: str) -> str:
    """Send an email, as described in plain words."""
    result = await email_agent.ainvoke({"messages": [{"role": "user", "content": request}]})
    return result["messages"][-1].text


async def main() -> None:
    assistant = create_agent(
        "openai:gpt-4.1", [schedule_event, manage_email], system_prompt="You assist.", name="assistant"
    )
    question = "Plan a design review on Tuesday at 14:00, and remind the design team by email."
    result = await assistant.ainvoke({"messages": [{"role": "user", "content": question}]})
    for message in result["messages"]:
        print(message.type, "-", message.text or [call["name"] for call in message.tool_calls])


asyncio.run(main())
