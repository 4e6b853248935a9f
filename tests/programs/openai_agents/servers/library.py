"""An MCP server over stdio, which the program `mcp_server` starts."""

from mcp.server import MCPServer

server = MCPServer("library")


@server.tool()
def find_book(title: str) -> str:
    """Where a book stands."""
    return f"{title}: shelf 12"


@server.tool()
def reserve(title: str) -> str:
    """Reserve a book."""
    raise ValueError(f"{title} is lent out")


if __name__ == "__main__":
    server.run("stdio")
