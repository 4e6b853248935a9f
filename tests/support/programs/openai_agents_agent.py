"""The OpenAI Agents SDK: an agent with a tool, over Chat Completions."""

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_default_openai_api("chat_completions")
agent = Agent(name="solver", model="m", tools=[add])
print(Runner.run_sync(agent, "What is 2 + 3?").final_output)
