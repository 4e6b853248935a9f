"""An agent of the OpenAI Agents SDK that answers questions from what a retriever finds. It imports nothing from agl."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    UserError,
    set_tracing_disabled,
)
from agents.mcp import MCPServer, MCPServerStdio
from openai import AsyncOpenAI

INSTRUCTIONS = "Search for one fact at a time. Answer as <answer>...</answer>"
MAX_TURNS = 4

set_tracing_disabled(True)  # the SDK sends its traces to OpenAI otherwise


def build(
    base_url: str, model: str, api_key: str, index: Path, *, tool: bool = True
) -> Callable[[dict[str, Any]], Coroutine[Any, Any, str]]:
    """The agent, on the model of a server that speaks OpenAI's protocol.

    Args:
        index: of the passages, as `retriever.write_index` makes it. tool: whether it may search.
    """

    @asynccontextmanager
    async def session() -> AsyncIterator[Agent]:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0))
            servers: list[MCPServer] = [await stack.enter_async_context(retriever(index))] if tool else []
            yield Agent(
                name="assistant",
                instructions=INSTRUCTIONS,
                model=OpenAIChatCompletionsModel(model, client),
                mcp_servers=servers,
                mcp_config={"failure_error_function": explain},
            )

    agents = OnePerLoop(session)

    async def assistant(task: dict[str, Any]) -> str:
        agent = await agents.get()
        try:
            return (await Runner.run(agent, task["question"], max_turns=MAX_TURNS)).final_output
        except (MaxTurnsExceeded, ModelBehaviorError):  # too many searches, a tool that it does not have
            return ""
        except UserError:
            agents.drop(agent)  # its retriever is gone; the next question starts another
            raise

    return assistant


def retriever(index: Path) -> MCPServerStdio:
    """The retriever as a process of its own, which speaks MCP on its stdin and stdout."""
    command = [str(Path(__file__).with_name("retriever.py")), str(index)]
    return MCPServerStdio(
        {"command": sys.executable, "args": command}, cache_tools_list=True, client_session_timeout_seconds=60
    )


def explain(context: Any, error: Exception) -> str:
    """What the model reads of a call that failed: its own mistakes. A retriever that is gone is none of them."""
    if isinstance(error, UserError | ModelBehaviorError):
        return "error: search takes a query"
    raise error


class OnePerLoop:
    """An agent for all questions on an event loop; opened for the first one, closed when the loop ends.

    A client and an MCP session belong to the loop that they were opened on.
    """

    def __init__(self, open_agent: Callable[[], AbstractAsyncContextManager[Agent]]) -> None:
        self._open = open_agent
        self._opened: dict[asyncio.AbstractEventLoop, tuple[asyncio.Task[None], asyncio.Future[Agent]]] = {}

    async def get(self) -> Agent:
        """The agent of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            ready: asyncio.Future[Agent] = loop.create_future()
            # An MCP session is closed by the task that opened it, which thus is none of the questions'.
            self._opened[loop] = loop.create_task(self._keep(ready), context=contextvars.Context()), ready
        return await asyncio.shield(self._opened[loop][1])

    def drop(self, agent: Agent) -> None:
        """Close an agent, if nobody has yet."""
        keeper, ready = self._opened.get(asyncio.get_running_loop(), (None, None))
        if keeper is not None and ready is not None and ready.done() and ready.result() is agent:
            self._forget(ready)
            keeper.cancel()

    async def _keep(self, ready: asyncio.Future[Agent]) -> None:
        try:
            async with self._open() as agent:
                ready.set_result(agent)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            self._forget(ready)

    def _forget(self, ready: asyncio.Future[Agent]) -> None:
        self._opened = {loop: opened for loop, opened in self._opened.items() if opened[1] is not ready}
