"""A graph: two specialists side by side, a judge who waits for both, and a writer if the judge has enough."""

import asyncio

from strands import Agent
from strands.models.anthropic import AnthropicModel
from strands.models.openai_responses import OpenAIResponsesModel
from strands.multiagent import GraphBuilder
from strands.multiagent.graph import GraphState

claude = AnthropicModel(model_id="claude-sonnet-4-5", max_tokens=300)
gpt = OpenAIResponsesModel(model_id="gpt-4.1-mini")


def said(state: GraphState, node: str, word: str) -> bool:
    return node in state.results and word in str(state.results[node].result)


def specialist(name: str, model: AnthropicModel | OpenAIResponsesModel) -> Agent:
    return Agent(name=name, model=model, system_prompt=f"You are the {name}.", callback_handler=None)


builder = GraphBuilder()
builder.add_node(specialist("botanist", claude), "plants")
builder.add_node(specialist("zoologist", gpt), "animals")
builder.add_node(specialist("judge", gpt), "judge")
builder.add_node(specialist("writer", claude), "report")
builder.add_edge("plants", "judge", condition=lambda state: {"plants", "animals"} <= {*state.results})
builder.add_edge("animals", "judge", condition=lambda state: {"plants", "animals"} <= {*state.results})
builder.add_edge("judge", "report", condition=lambda state: said(state, "judge", "enough"))
builder.set_entry_point("plants")
builder.set_entry_point("animals")
builder.set_execution_timeout(100)
graph = builder.build()


async def main() -> None:
    result = await graph.invoke_async("What lives in this pond?")
    print(result.status.value, sorted(node.node_id for node in result.execution_order[:2]))
    print([node.node_id for node in result.execution_order[2:]])
    print(str(result.results["report"].result).strip())


asyncio.run(main())
