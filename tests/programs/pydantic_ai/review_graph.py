"""A graph whose steps run agents: reviewers side by side, one for each topic, and an editor when all are done."""

import asyncio
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_ai import Agent, format_as_xml
from pydantic_graph import GraphBuilder, StepContext, reduce_list_append


@dataclass
class Review:
    """What the steps share."""

    draft: str


class Remark(BaseModel):
    """A reviewer's opinion."""

    topic: str
    fine: bool


reviewer = Agent("openai-chat:gpt-4.1-nano", name="reviewer", output_type=Remark, instructions="Review a draft.")
editor = Agent("openai-chat:gpt-4.1-mini", name="editor", instructions="Say in one sentence what to change.")
builder = GraphBuilder(state_type=Review, input_type=list[str], output_type=str)


@builder.step
async def topics(ctx: StepContext[Review, None, list[str]]) -> list[str]:
    return [topic for topic in ctx.inputs if topic]


@builder.step
async def review(ctx: StepContext[Review, None, str]) -> Remark:
    result = await reviewer.run(format_as_xml({"draft": ctx.state.draft, "topic": ctx.inputs}))
    return result.output


@builder.step
async def edit(ctx: StepContext[Review, None, list[Remark]]) -> str:
    wrong = sorted(remark.topic for remark in ctx.inputs if not remark.fine)
    return (await editor.run(f"To change: {', '.join(wrong)}")).output


remarks = builder.join(reduce_list_append, initial_factory=list[Remark])
builder.add(
    builder.edge_from(builder.start_node).to(topics),
    builder.edge_from(topics).map().to(review),
    builder.edge_from(review).to(remarks),
    builder.edge_from(remarks).to(edit),
    builder.edge_from(edit).to(builder.end_node),
)
graph = builder.build()


async def main() -> None:
    print(await graph.run(state=Review("Dear Sir, we is late."), inputs=["grammar", "tone", "", "length"]))


asyncio.run(main())
