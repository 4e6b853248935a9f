"""Delegation: a tool of one agent runs another one, with its dependencies and counted as its usage; twice at once."""

import asyncio
from dataclasses import dataclass

from pydantic_ai import Agent, RunContext, UsageLimits


@dataclass
class Kitchen:
    """What both agents may use."""

    pantry: tuple[str, ...]


menu_agent = Agent(
    "openai-chat:gpt-4.1-mini",
    deps_type=Kitchen,
    instructions="Plan a menu with `suggest_dish`, once for each course.",
)
dish_agent = Agent(
    "openai-chat:gpt-4.1-nano",
    deps_type=Kitchen,
    output_type=list[str],
    instructions="Suggest dishes that the pantry allows.",
)


@menu_agent.tool
async def suggest_dish(ctx: RunContext[Kitchen], course: str, count: int = 2) -> list[str]:
    """Get suggestions for a course."""
    result = await dish_agent.run(f"{count} dishes for the {course}", deps=ctx.deps, usage=ctx.usage)
    return result.output[:count]


@dish_agent.tool
def pantry(ctx: RunContext[Kitchen]) -> str:
    """What there is."""
    return ", ".join(ctx.deps.pantry)


async def main() -> None:
    result = await menu_agent.run(
        "Dinner for two.", deps=Kitchen(("leek", "rice", "plums")), usage_limits=UsageLimits(request_limit=12)
    )
    print(result.output)
    print(result.usage.requests, "requests")


if __name__ == "__main__":
    asyncio.run(main())
