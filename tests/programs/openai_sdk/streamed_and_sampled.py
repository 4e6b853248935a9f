"""Streams: chunks by `stream=True`, events by `completions.stream`, a stream left early, and two samples at once."""

from openai import OpenAI

client = OpenAI()
MODEL = "gpt-4.1-mini"


def ask(question: str) -> list[dict]:
    return [{"role": "developer", "content": "You write slogans."}, {"role": "user", "content": question}]


stream = client.chat.completions.create(
    model=MODEL, messages=ask("One for tea."), stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="|")
    if chunk.usage:
        print(chunk.usage.total_tokens, "tokens")

with client.chat.completions.stream(model=MODEL, messages=ask("One for coffee.")) as events:
    for event in events:
        if event.type == "content.delta":
            print(event.delta, end="|")
        elif event.type == "content.done":
            print(" done:", event.content)
    print(events.get_final_completion().choices[0].finish_reason)

with client.chat.completions.create(model=MODEL, messages=ask("One for cocoa."), stream=True) as stream:
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print("begins with", chunk.choices[0].delta.content)
            break

both = client.chat.completions.create(model=MODEL, messages=ask("Two for water."), n=2)
for choice in both.choices:
    print(choice.index, choice.message.content)
