"""A loop around the bare openai SDK, streaming when asked to."""

import json
import sys

from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

client = OpenAI()
messages = [{"role": "user", "content": "What is 2 + 3?"}]
while True:
    if "--stream" in sys.argv:
        with client.chat.completions.stream(
            model="m", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            answer = stream.get_final_completion().choices[0].message
    else:
        answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
    if not answer.tool_calls:
        print(answer.content.strip())
        break
    messages.append(answer.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
    for call in answer.tool_calls:
        result = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
