"""Headers and parsed answers: `with_raw_response`, `with_streaming_response`, and `parse` into a pydantic model."""

from openai import OpenAI
from pydantic import BaseModel, ValidationError

client = OpenAI(max_retries=0)


class Event(BaseModel):
    name: str
    day: str
    guests: list[str]


LETTER = "Alice and Bob come to the science fair on Friday."

raw = client.chat.completions.with_raw_response.create(
    model="gpt-4.1-mini",
    messages=[{"role": "user", "content": f"Summarise: {LETTER}"}],
)
print(raw.status_code, raw.headers["content-type"])
print(raw.parse().choices[0].message.content)

with client.responses.with_streaming_response.create(
    model="gpt-4.1-mini", input=f"Translate into French: {LETTER}"
) as response:
    print(response.headers.get("content-type"))
    print(response.parse().output_text)

try:
    completion = client.chat.completions.parse(
        model="gpt-4.1-mini",
        messages=[
            {"role": "system", "content": "Extract the event."},
            {"role": "user", "content": LETTER},
        ],
        response_format=Event,
    )
    event = completion.choices[0].message.parsed
    print(event.name, event.day, sorted(event.guests))
except ValidationError:
    print("no event")
