"""Agents of three frameworks in threads, and each asks another agent from a thread of its own."""

from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI
from pydantic_ai import Agent
from smolagents import OpenAIModel, ToolCallingAgent, tool
from strands import Agent as StrandsAgent
from strands.models.openai import OpenAIModel as StrandsModel

proof_reader = Agent("openai-chat:gpt-4.1-mini", name="proof_reader", instructions="Correct the text.")


@tool
def word_of_the_day(letter: str) -> str:
    """Gets a word.

    Args:
        letter: What it begins with.
    """
    return {"a": "anchor"}[letter]


def by_smolagents(topic: str) -> str:
    """A poet with a tool."""
    model = OpenAIModel(model_id="gpt-4.1-mini")
    poet = ToolCallingAgent([word_of_the_day], model, name="poet", description="Writes verses.", verbosity_level=0)
    return poet.run(f"A verse about {topic}")


def by_strands(topic: str) -> str:
    """A reporter whose text a second agent corrects."""
    model = StrandsModel(model_id="gpt-4.1-mini")
    reporter = StrandsAgent(name="reporter", model=model, system_prompt="You report.", callback_handler=None)
    return proof_reader.run_sync(f"To correct: {str(reporter(topic)).strip()}").output


def by_hand(topic: str) -> str:
    """No agent at all."""
    response = OpenAI().responses.create(model="gpt-4.1-mini", instructions="Give a title.", input=topic)
    return response.output_text


with ThreadPoolExecutor(3) as pool:
    futures = [pool.submit(write, "the sea") for write in (by_smolagents, by_strands, by_hand)]
    for future in futures:
        print(future.result())
