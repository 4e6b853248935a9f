"""A manager that writes code, and in it asks two agents that it manages: one calls tools, one writes code itself."""

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id="gpt-4.1-mini")


@tool
def search(query: str) -> str:
    """Searches the library.

    Args:
        query: What to look for.
    """
    return f"{query}: the bridge is 1280 metres long"


librarian = ToolCallingAgent(
    tools=[search],
    model=model,
    name="librarian",
    description="Looks facts up. Give it a question.",
    provide_run_summary=True,
    max_steps=5,
    verbosity_level=0,
)
calculator = CodeAgent(tools=[], model=model, name="calculator", description="Does sums.", verbosity_level=0)
manager = CodeAgent(
    tools=[],
    model=model,
    managed_agents=[librarian, calculator],
    name="manager",
    max_steps=6,
    description="Answers anything.",
    verbosity_level=0,
)

print(manager.run("How long does a leopard, at 16 m/s, take to cross the Golden Gate Bridge?"))
print([len(agent.memory.steps) for agent in (manager, librarian, calculator)])
