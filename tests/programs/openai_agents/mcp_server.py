"""Tools of an MCP server that runs as a process beside the program; one of them reports an error."""

import asyncio
import sys
from pathlib import Path

from agents import Agent, Runner
from agents.mcp import MCPServerStdio

LIBRARY = Path(__file__).parent / "servers" / "library.py"


async def main() -> None:
    async with MCPServerStdio(
        name="library",
        params={"command": sys.executable, "args": [str(LIBRARY)]},
        cache_tools_list=True,
    ) as server:
        librarian = Agent(
            name="Librarian",
            instructions="Help readers to find books. Use the tools.",
            mcp_servers=[server],
        )
        for asked in ("Where is Middlemarch?", "Reserve Middlemarch for me."):
            result = await Runner.run(librarian, asked)
            print(result.final_output)
        print([tool.name for tool in await server.list_tools()])


if __name__ == "__main__":
    asyncio.run(main())
