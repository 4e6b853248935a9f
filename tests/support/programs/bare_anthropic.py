"""The bare anthropic SDK, asked once whole and once as a stream."""

from anthropic import Anthropic

client = Anthropic()
question = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
print(client.messages.create(**question).content[0].text)
with client.messages.stream(**question) as stream:
    print(stream.get_final_text())
