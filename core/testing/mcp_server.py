"""An MCP server on stdio with the tool `add`, which reports a failure (`isError`) for a negative number."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

COMMAND = sys.executable
ARGUMENTS = [__file__]


def main() -> None:
    """Serve until the client leaves."""
    server_class: Any
    tool_error: Any
    try:
        from mcp.server.mcpserver import MCPServer as server_class
        from mcp.server.mcpserver.exceptions import ToolError as tool_error
    except ImportError:  # mcp 1
        from mcp.server.fastmcp import FastMCP as server_class  # pyright: ignore
        from mcp.server.fastmcp.exceptions import ToolError as tool_error  # pyright: ignore

    server = server_class("numbers")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        if a < 0:
            raise tool_error("a is negative")
        return a + b

    asyncio.run(server.run_stdio_async())


if __name__ == "__main__":
    main()
