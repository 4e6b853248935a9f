"""A Pydantic AI agent: one of its tools asks Claude by the Anthropic SDK, another one a Strands agent."""

import asyncio

from anthropic import AsyncAnthropic
from opentelemetry import trace
from pydantic_ai import Agent, RunContext
from strands import Agent as StrandsAgent
from strands.models.openai import OpenAIModel

tracer = trace.get_tracer("shop")
doctor = Agent(
    "openai-chat:gpt-4.1-mini",
    name="doctor",
    deps_type=AsyncAnthropic,
    instructions="Get two opinions, then decide.",
)


@doctor.tool
async def ask_claude(ctx: RunContext[AsyncAnthropic], case: str) -> str:
    """Get Claude's opinion."""
    with tracer.start_as_current_span("second opinion", attributes={"case": case}):
        message = await ctx.deps.messages.create(
            model="claude-sonnet-4-5",
            max_tokens=200,
            system="You are a careful colleague.",
            messages=[{"role": "user", "content": case}],
        )
    return "".join(block.text for block in message.content if block.type == "text")


@doctor.tool_plain
async def ask_nurse(case: str) -> str:
    """Get the nurse's opinion."""
    nurse = StrandsAgent(
        name="nurse",
        model=OpenAIModel(model_id="gpt-4.1-nano"),
        system_prompt="You are a nurse.",
        callback_handler=None,
    )
    return str(await nurse.invoke_async(case)).strip()


async def main() -> None:
    async with AsyncAnthropic() as claude:
        result = await doctor.run("The patient sneezes.", deps=claude)
    print(result.output)


asyncio.run(main())
