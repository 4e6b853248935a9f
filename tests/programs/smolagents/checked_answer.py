"""An agent that calls tools, several at once, and whose final answer is checked before it counts."""

from typing import Any

from smolagents import OpenAIModel, Tool, ToolCallingAgent


class TrainTime(Tool):
    """A tool as a class."""

    name = "train_time"
    description = "How long a train takes between two cities, in minutes."
    inputs = {  # noqa: RUF012
        "origin": {"type": "string", "description": "Where it leaves."},
        "destination": {"type": "string", "description": "Where it arrives."},
    }
    output_type = "integer"

    def __init__(self, table: dict[frozenset[str], int]) -> None:
        super().__init__()
        self.table = table

    def forward(self, origin: str, destination: str) -> int:
        return self.table[frozenset((origin, destination))]


def is_a_number(final_answer: Any, memory: Any, agent: Any) -> bool:
    """Whether the answer is minutes and no sentence."""
    return str(final_answer).isdigit()


table = {frozenset(("Bern", "Basel")): 55, frozenset(("Bern", "Genf")): 105}
planner = ToolCallingAgent(
    tools=[TrainTime(table)],
    model=OpenAIModel(model_id="gpt-4.1-mini"),
    name="planner",
    description="Plans journeys by train.",
    final_answer_checks=[is_a_number],
    return_full_result=True,
    verbosity_level=0,
)
result = planner.run("From Basel to Genf by way of Bern?")
print(result.output, result.state, len(result.steps), "steps")
print(result.token_usage)
