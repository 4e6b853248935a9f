"""A conversation: a second run that keeps the memory of the first one, and a callback that tidies the memory up."""

from smolagents import ActionStep, CodeAgent, OpenAIModel, tool


@tool
def read_page(number: int) -> str:
    """Reads a page of the report.

    Args:
        number: The page's number.
    """
    return f"page {number}: " + "profits rose. " * 20


def shorten(step: ActionStep, agent: CodeAgent) -> None:
    """Keep of older observations only the beginning."""
    for old in agent.memory.steps:
        if isinstance(old, ActionStep) and old.step_number < step.step_number and old.observations:
            old.observations = old.observations[:60]


reader = CodeAgent(
    tools=[read_page],
    model=OpenAIModel(model_id="gpt-4.1-mini"),
    name="reader",
    description="Reads reports.",
    instructions="Read one page at a time.",
    step_callbacks=[shorten],
    verbosity_level=0,
)
print(reader.run("What does the report say? Read pages 1 and 2."))
print(reader.run("And page 3?", reset=False))
print(len(reader.memory.steps), "steps,", reader.monitor.get_total_token_counts().total_tokens > 0)
