"""The functional API: tasks of an entrypoint that write an outline, its paragraphs at once, and a title."""

import asyncio

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from openai import AsyncOpenAI
from opentelemetry import trace

model = ChatOpenAI(model="gpt-4.1-mini", temperature=0)
client = AsyncOpenAI()
tracer = trace.get_tracer("press")


@task
async def write_outline(topic: str) -> list[str]:
    answer = await model.ainvoke([("system", "List two aspects of a topic, by commas."), ("user", topic)])
    return answer.text.split(", ")


@task
async def write_paragraph(aspect: str) -> str:
    with tracer.start_as_current_span("paragraph", attributes={"aspect": aspect}):
        answer = await model.ainvoke([("system", "Write a paragraph."), ("user", aspect)])
    return answer.text


@task(name="headline")
async def write_title(text: str) -> str:
    answer = await client.chat.completions.create(
        model="gpt-4.1-nano",
        messages=[{"role": "system", "content": "Find a title."}, {"role": "user", "content": text}],
    )
    return answer.choices[0].message.content


@entrypoint(checkpointer=InMemorySaver())
async def essay(topic: str, *, previous: str | None = None) -> str:
    aspects = await write_outline(topic)
    paragraphs = await asyncio.gather(*(write_paragraph(aspect) for aspect in aspects))
    text = "\n".join(paragraphs)
    return f"{await write_title(text)}\n{text}"


async def main() -> None:
    with tracer.start_as_current_span("order"):
        print(await essay.ainvoke("bees", {"configurable": {"thread_id": "1"}}))


asyncio.run(main())
