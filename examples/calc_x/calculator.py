"""The client of the calculator's MCP server: one server for all rollouts of a process, in whichever event loop.

Connections of MCP belong to the event loop and to the task that opened them; rollouts come and go in many. So this one
lives in a thread, and is called from anywhere. A server that dies, or that does not answer in time, is replaced.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import sys
import threading
from pathlib import Path

from mcp import Client, StdioServerParameters

COMMAND, ARGUMENTS = sys.executable, [str(Path(__file__).with_name("server.py"))]
TOOL = "calculator"
SECONDS = 10.0
"""A call that takes longer is given up, and its server restarted."""
START_SECONDS = 120.0


class Calculator:
    """A server, started at the first call. Safe to call from any thread.

    Args:
        command, arguments: the server's; ours by default.
        tool, argument: what is called, and the name under which it takes the expression.
        seconds: limit of a call.

    Attributes:
        starts: how many servers were started so far.
    """

    def __init__(
        self,
        command: str = COMMAND,
        arguments: list[str] | None = None,
        *,
        tool: str = TOOL,
        argument: str = "expression",
        seconds: float = SECONDS,
    ) -> None:
        self.tool, self.argument, self.seconds = tool, argument, seconds
        self.starts = 0
        self._parameters = StdioServerParameters(command=command, args=ARGUMENTS if arguments is None else arguments)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._owner: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None

    async def calculate(self, expression: str) -> str:
        """The server's answer, which may be "error: ...".

        Raises:
            MCPError, OSError: no server can be started, or two in a row died at this.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._calculate(expression), self._running()))

    def close(self) -> None:
        """End the server and the thread. A later call starts new ones."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="calculator", daemon=True)
                self._thread.start()
            return self._loop

    # -- in the thread's loop ------------------------------------------------------------------------------------------

    async def _calculate(self, expression: str) -> str:
        for last in (False, True):
            client = await self._connected()
            try:
                async with asyncio.timeout(self.seconds):
                    result = await client.call_tool(self.tool, {self.argument: expression})
            except TimeoutError:
                await self._replace(client)
                return f"error: no answer within {self.seconds:g} s"
            except Exception:  # a tool's own failure is a result; this is the connection's
                await self._replace(client)
                if last:
                    raise
            else:
                return "".join(getattr(part, "text", "") for part in result.content)
        raise AssertionError

    async def _connected(self) -> Client:
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._own(self._client))
        return await asyncio.shield(self._client)

    async def _own(self, connected: asyncio.Future[Client]) -> None:
        """Hold the connection, which the task that opened it has to close."""
        try:
            async with Client(self._parameters, read_timeout_seconds=START_SECONDS) as client:
                self.starts += 1
                connected.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not connected.done():
                connected.set_exception(error)
                self._client = None
        finally:
            connected.cancel()  # where it was stopped before it was connected, for those who wait

    async def _replace(self, client: Client) -> None:
        """Have the next call start a server, unless another call that met the same did."""
        if self._client is not None and self._client.done() and self._client.result() is client:
            await self._stop()

    async def _stop(self) -> None:
        owner, self._owner, self._client = self._owner, None, None
        if owner is not None:
            owner.cancel()
            await asyncio.wait([owner])


@functools.cache
def shared() -> Calculator:
    """The calculator of all rollouts in this process; ended with it."""
    calculator = Calculator()
    atexit.register(calculator.close)
    return calculator
