"""crewai: a crew of one agent with a tool."""

import os

# crewai reads these when it is imported: no telemetry, no question about traces.
os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TESTING="true")

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(role="solver", goal="Be right.", backstory="You add.", llm=LLM(model="gpt-4o-mini"), tools=[add])
task = Task(description="What is 2 + 3?", expected_output="a number", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff().raw)
