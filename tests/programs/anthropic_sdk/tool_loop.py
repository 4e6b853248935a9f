"""Tool use by hand: Claude asks for two tools at once, gets the results, one of them an error, and answers."""

from anthropic import Anthropic
from opentelemetry import trace

client = Anthropic()
tracer = trace.get_tracer("travel")
tools = [
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {
        "name": "get_time",
        "description": "The local time in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
]


def run(name: str, city: str) -> str:
    with tracer.start_as_current_span(f"look up {city}") as span:
        span.set_attribute("travel.what", name)
        if name == "get_time":
            raise KeyError("no clock there")
        return f"{city}: 12 degrees, fog"


messages = [{"role": "user", "content": "What is it like in Oslo now?"}]
while True:
    response = client.messages.create(
        model="claude-sonnet-4-5",
        max_tokens=1024,
        system="You help travellers.",
        tools=tools,
        messages=messages,
    )
    messages.append({"role": "assistant", "content": response.content})
    uses = [block for block in response.content if block.type == "tool_use"]
    if response.stop_reason != "tool_use" or len(messages) > 8:
        break
    results = []
    for use in uses:
        result = {"type": "tool_result", "tool_use_id": use.id}
        try:
            results.append({**result, "content": run(use.name, **use.input)})
        except Exception as error:
            results.append({**result, "content": str(error), "is_error": True})
    messages.append({"role": "user", "content": results})

print("".join(block.text for block in response.content if block.type == "text"))
print("messages:", [message["role"] for message in messages])
