"""An MCP server on stdio with the tool `add`, whose results say that it failed (`isError`) for a negative number."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

COMMAND, ARGUMENTS = sys.executable, [__file__]


def main() -> None:
    """Serve until the client leaves."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server: Any = MCPServer("numbers")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        if a < 0:
            raise ToolError("a is negative")
        return a + b

    asyncio.run(server.run_stdio_async())


if __name__ == "__main__":
    main()
