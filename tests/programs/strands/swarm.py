"""A swarm: agents that hand a task over to one another, with notes that they share."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.multiagent import Swarm


@tool
def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def member(name: str, system_prompt: str, description: str, tools: list | None = None) -> Agent:
    return Agent(
        name=name,
        description=description,
        model=OpenAIModel(model_id="gpt-4.1-mini"),
        system_prompt=system_prompt,
        tools=tools,
        callback_handler=None,
    )


researcher = member("researcher", "You collect facts, then hand over to the author.", "Collects facts.")
author = member("author", "You write a verse.", "Writes verses.")
critic = member("critic", "You count words, and hand back what is too long.", "Checks lengths.", [count_words])

swarm = Swarm([author, researcher, critic], entry_point=researcher, max_handoffs=6, node_timeout=60)
result = swarm("A verse about herrings.")

print(result.status.value, [node.node_id for node in result.node_history])
for name in sorted(result.results):
    print(f"{name}: {str(result.results[name].result).strip()}")
