"""The Responses API: an agent with a tool that fails, and a model that goes on from its response before."""

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    if city == "Atlantis":
        raise ValueError("no such city")
    return f"It is sunny in {city}."


model = ChatOpenAI(model="gpt-4.1-mini", use_responses_api=True, reasoning={"effort": "low"})
forecaster = create_agent(model, [weather], system_prompt="You forecast the weather.", name="forecaster")

result = forecaster.invoke({"messages": [{"role": "user", "content": "How is it in Paris and in Rome?"}]})
for message in result["messages"]:
    print(f"{message.type}: {message.text}")

chat = ChatOpenAI(model="gpt-4.1-nano", output_version="responses/v1", use_previous_response_id=True)
first = chat.invoke("Say that in German.")
print(first.text)
print("".join(chunk.text for chunk in chat.stream([("user", "Say that in German."), first, ("user", "Shorter.")])))

try:
    forecaster.invoke({"messages": [{"role": "user", "content": "How is it in Atlantis?"}]})
except ValueError as error:
    print("failed:", error)
