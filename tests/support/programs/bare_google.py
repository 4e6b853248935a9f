"""The bare google-genai SDK, asked once whole and once as a stream."""

from google import genai

client = genai.Client()
question = {"model": "m", "contents": "What is 2 + 3?"}
print(client.models.generate_content(**question).text)
print("".join(chunk.text for chunk in client.models.generate_content_stream(**question)))
