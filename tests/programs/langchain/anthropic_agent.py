"""An agent of Anthropic's model that is told which tools failed, and streams what it thinks of it."""

from collections.abc import Callable

from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallRequest, wrap_tool_call
from langchain.tools import tool
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import ToolMessage
from opentelemetry import trace

tracer = trace.get_tracer("library")


@tool
def borrow(book: str) -> str:
    """Borrow a book."""
    with tracer.start_as_current_span("desk"):
        if book == "Emma":
            raise LookupError("Emma is lent out")
        return f"{book} is yours"


@wrap_tool_call
def tell(request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage]) -> ToolMessage:
    try:
        return handler(request)
    except LookupError as error:
        return ToolMessage(f"Sorry: {error}", tool_call_id=request.tool_call["id"], status="error")


librarian = create_agent(
    ChatAnthropic(model="claude-sonnet-4-5", temperature=0, max_tokens=1024),
    [borrow],
    system_prompt="You lend books.",
    middleware=[tell],
    name="librarian",
)

question = {"messages": [{"role": "user", "content": "Emma and Persuasion, please."}]}
stream = librarian.stream(question, stream_mode="messages")
first, *tools, last = (f"{metadata['langgraph_node']}: {token.text}" for token, metadata in stream if token.text)
print(first, *sorted(tools), last, sep="\n")  # both tools run at once
