"""Many calls at once: reviews by clients in threads, then summaries with `AsyncOpenAI` and `asyncio.gather`."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from openai import AsyncOpenAI, OpenAI
from opentelemetry import trace

tracer = trace.get_tracer("magazine")
FILMS = ["Solaris", "Stalker", "Mirror"]


def review(film: str) -> str:
    with tracer.start_as_current_span(f"review {film}"):
        client = OpenAI(timeout=60)
        completion = client.chat.completions.create(
            model="gpt-4.1-mini",
            messages=[
                {"role": "system", "content": "You review films in one sentence."},
                {"role": "user", "content": film},
            ],
        )
        return completion.choices[0].message.content


async def shorten(client: AsyncOpenAI, text: str) -> str:
    with tracer.start_as_current_span("shorten"):
        response = await client.responses.create(
            model="gpt-4.1-nano", instructions="You shorten texts to three words.", input=text
        )
        return response.output_text


async def main() -> None:
    with tracer.start_as_current_span("issue"), ThreadPoolExecutor(max_workers=3) as pool:
        reviews = list(pool.map(review, FILMS))
        async with AsyncOpenAI() as client:
            short = await asyncio.gather(*(shorten(client, text) for text in reviews))
    for film, text in zip(FILMS, short, strict=True):
        print(f"{film}: {text}")


asyncio.run(main())
