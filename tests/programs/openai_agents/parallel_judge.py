"""Parallel runs: one translator three times at once with `asyncio.gather`, and a judge with structured output."""

import asyncio

from agents import Agent, ItemHelpers, ModelSettings, Runner
from opentelemetry import trace
from pydantic import BaseModel, Field

tracer = trace.get_tracer("translations")


class Verdict(BaseModel):
    best: int = Field(description="Number of the best translation, from 0.")
    reason: str


translator = Agent(
    name="translator",
    instructions="You translate the user's message to Spanish, in the style that is asked for.",
    model="gpt-4.1-mini",
    model_settings=ModelSettings(temperature=0.7),
)
judge = Agent(
    name="translation_picker",
    instructions="You pick the best Spanish translation from the given options.",
    model="gpt-4.1",
    output_type=Verdict,
)
STYLES = ["plain", "formal", "playful"]


async def translate(style: str) -> str:
    with tracer.start_as_current_span(f"translate {style}"):
        result = await Runner.run(translator, f"See you tomorrow! Style: {style}")
        return ItemHelpers.text_message_outputs(result.new_items)


async def main() -> None:
    with tracer.start_as_current_span("translations"):
        outputs = await asyncio.gather(*(translate(style) for style in STYLES))
        options = "\n".join(f"{i}: {text}" for i, text in enumerate(outputs))
        verdict = (await Runner.run(judge, f"Input: See you tomorrow!\n\nTranslations:\n{options}")).final_output
    print(options)
    print(f"best: {verdict.best}, since {verdict.reason}")


if __name__ == "__main__":
    asyncio.run(main())
