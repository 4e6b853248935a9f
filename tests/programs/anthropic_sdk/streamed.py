"""Streams: text by `messages.stream`, a tool's input as it comes, and raw events by `stream=True`."""

from anthropic import Anthropic
from opentelemetry import trace

client = Anthropic()
tracer = trace.get_tracer("poet")
MODEL = "claude-haiku-4-5"

with (
    tracer.start_as_current_span("first verse"),
    client.messages.stream(
        model=MODEL,
        max_tokens=256,
        system="You are a poet.",
        messages=[{"role": "user", "content": "A verse about rain."}],
    ) as stream,
):
    for text in stream.text_stream:
        print(text, end="", flush=True)
    print()
    print(stream.get_final_message().usage.output_tokens, "tokens")

save = {
    "name": "save_verse",
    "description": "Keep a verse.",
    "input_schema": {"type": "object", "properties": {"title": {"type": "string"}, "verse": {"type": "string"}}},
}
with client.messages.stream(
    model=MODEL,
    max_tokens=256,
    system="You are a poet.",
    messages=[{"role": "user", "content": "Save a verse about snow."}],
    tools=[save],
) as stream:
    for event in stream:
        if event.type == "input_json":
            print("so far:", event.partial_json)
        elif event.type == "content_block_stop":
            print("block:", event.content_block.type)
    print("stopped by", stream.get_final_message().stop_reason)

events = client.messages.create(
    model=MODEL,
    max_tokens=256,
    messages=[
        {"role": "user", "content": "A verse about wind."},
        {"role": "assistant", "content": "The wind"},
    ],
    stream=True,
)
print([event.type for event in events if event.type.startswith("message")])
