"""The Responses API: a conversation continued by `previous_response_id`, with a tool, the last answer streamed."""

import json

from openai import OpenAI

client = OpenAI()
tools = [
    {
        "type": "function",
        "name": "get_horoscope",
        "description": "Today's horoscope of a sign.",
        "parameters": {
            "type": "object",
            "properties": {"sign": {"type": "string"}},
            "required": ["sign"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]


def get_horoscope(sign: str) -> str:
    return f"{sign}: you will meet an otter"


response = client.responses.create(
    model="gpt-4.1-mini",
    instructions="You are an astrologer.",
    input="What will today bring? I am an Aquarius.",
    tools=tools,
)
results = [
    {
        "type": "function_call_output",
        "call_id": item.call_id,
        "output": json.dumps({"horoscope": get_horoscope(**json.loads(item.arguments))}),
    }
    for item in response.output
    if item.type == "function_call"
]
told = client.responses.create(
    model="gpt-4.1-mini",
    instructions="You are an astrologer.",
    previous_response_id=response.id,
    input=results or "And now?",
    tools=tools,
)
print(told.output_text)

stream = client.responses.create(
    model="gpt-4.1-mini",
    instructions="You are an astrologer.",
    previous_response_id=told.id,
    input="Say it in rhyme.",
    stream=True,
)
for event in stream:
    if event.type == "response.output_text.delta":
        print(event.delta, end="")
    elif event.type == "response.completed":
        print("\ntokens:", event.response.usage.output_tokens)
