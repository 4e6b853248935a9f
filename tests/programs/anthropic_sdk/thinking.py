"""Extended thinking: blocks of thought go back with a tool's result, and the conversation goes on."""

from anthropic import Anthropic

client = Anthropic()
SYSTEM = "You are a maths tutor. Think before you answer."
square_root = {
    "name": "square_root",
    "description": "The square root of a number.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
}


def turn(messages: list) -> list:
    message = client.messages.create(
        model="claude-sonnet-4-5",
        max_tokens=2048,
        thinking={"type": "enabled", "budget_tokens": 1024},
        system=SYSTEM,
        messages=messages,
        tools=[square_root],
    )
    messages.append({"role": "assistant", "content": message.content})
    return message.content


messages: list = [{"role": "user", "content": "What is the root of 1764?"}]
for block in turn(messages):
    print(block.type)
uses = [block for block in messages[-1]["content"] if block.type == "tool_use"]
results = [
    {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": str(use.input["x"] ** 0.5)}]}
    for use in uses
]
messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Explain it, please."}]})
for block in turn(messages):
    print(block.type, getattr(block, "text", ""))
messages.append({"role": "user", "content": "Thank you. And is it even?"})
print(turn(messages)[-1].type)
