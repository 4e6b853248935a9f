"""Middleware in three turns of a thread: it sums the history up, limits the calls of a tool, and makes the prompt."""

from langchain.agents import create_agent
from langchain.agents.middleware import (
    ModelRequest,
    SummarizationMiddleware,
    ToolCallLimitMiddleware,
    dynamic_prompt,
)
from langchain.chat_models import init_chat_model
from langchain.tools import tool
from langgraph.checkpoint.memory import InMemorySaver


@tool
def search(query: str) -> str:
    """Search the web."""
    return f"{query}: a result"


@dynamic_prompt
def prompt(request: ModelRequest) -> str:
    return f"You search. You have {len(request.messages)} messages."


agent = create_agent(
    init_chat_model("openai:gpt-4.1-mini"),
    [search],
    middleware=[
        prompt,
        SummarizationMiddleware("openai:gpt-4.1-nano", trigger=("messages", 6), keep=("messages", 2)),
        ToolCallLimitMiddleware(tool_name="search", run_limit=1),
    ],
    checkpointer=InMemorySaver(),
    name="searcher",
)

config = {"configurable": {"thread_id": "1"}}
for question in ("What are bees?", "And wasps?", "And ants?"):
    result = agent.invoke({"messages": [{"role": "user", "content": question}]}, config)
    print(result["messages"][-1].text, len(result["messages"]))
