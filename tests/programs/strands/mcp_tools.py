"""Tools of an MCP server that runs as a process beside the agent; this file is both."""

import sys

from mcp import StdioServerParameters, stdio_client
from mcp.server import MCPServer
from strands import Agent
from strands.models.openai import OpenAIModel
from strands.tools.mcp import MCPClient

server = MCPServer("library")


@server.tool()
def find_book(title: str) -> str:
    """Find a book's shelf by its title."""
    return f"{title} stands on shelf 12"


@server.tool()
def reserve(title: str, days: int) -> str:
    """Reserve a book."""
    if days > 14:
        raise ValueError("at most 14 days")
    return f"{title} is yours for {days} days"


def main() -> None:
    parameters = StdioServerParameters(command=sys.executable, args=[__file__, "serve"])
    with MCPClient(lambda: stdio_client(parameters)) as library:
        tools = library.list_tools_sync()
        print(sorted(tool.tool_name for tool in tools))
        reader = Agent(
            name="reader",
            model=OpenAIModel(model_id="gpt-4.1-mini"),
            system_prompt="You fetch books.",
            tools=tools,
            callback_handler=None,
        )
        print(str(reader("I would like to have Emma for a month.")).strip())


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        server.run()
    else:
        main()
