"""`AsyncAnthropic`: three reviewers at once by `asyncio.gather`, and an editor who reads what they wrote."""

import asyncio

from anthropic import AsyncAnthropic
from opentelemetry import trace

tracer = trace.get_tracer("reviews")
REVIEWERS = {
    "security": "You review code for security.",
    "speed": "You review code for speed.",
    "style": "You review code for style.",
}
CODE = "def area(r): return 3.14 * r ** 2"


async def ask(client: AsyncAnthropic, system: str, text: str) -> str:
    message = await client.messages.create(
        model="claude-sonnet-4-5",
        max_tokens=512,
        system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": text}]}],
    )
    return message.content[0].text


async def review(client: AsyncAnthropic, name: str) -> str:
    with tracer.start_as_current_span(f"review of {name}"):
        return f"{name}: {await ask(client, REVIEWERS[name], CODE)}"


async def main() -> None:
    async with AsyncAnthropic() as client:
        with tracer.start_as_current_span("reviews"):
            reviews = await asyncio.gather(*(review(client, name) for name in REVIEWERS))
            verdict = await ask(client, "You are the editor. Sum up the reviews.", "\n".join(reviews))
    print("\n".join(reviews))
    print("editor:", verdict)


asyncio.run(main())
