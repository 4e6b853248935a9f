"""What a rollout costs: the quickstart's agent through agl, against the same agent plain, in runs per second.

    python benchmarks/rollouts.py
    taskset -c 0,1 python benchmarks/rollouts.py --only langchain httpx --rounds 5 --json out.json

The agent asks a model twice and calls a calculator in between. Through agl, its calls are traced, go over HTTP to the
gateway, are rendered, tokenised and recorded in a store on disk, and its answer is scored: all that training does but
for the policy, in whose place an engine answers at once. Plain, the same agent asks a local server, in a separate
process, that answers at once with the same texts. Both run 32 at a time, each in a process of its own; they take turns
in short rounds, so that what else the machine does meets both.

`--profile SECONDS` records agl's process with py-spy instead, and prints the share of its time by who spends it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import agl
from agl.trainer.quickstart.demos import SYSTEM_PROMPT, TOOL_NAME, tool_call
from agl.trainer.quickstart.tasks import calculate, exact_answer
from agl.trainer.run.run import Algorithm

CONCURRENT = 32
BATCH = 128
EXPRESSION, ANSWER = "47 * 36", "1692"
TASK = {"question": f"What is {EXPRESSION}?", "answer": ANSWER}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Calculate `a op b`.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
Solve = Callable[[str], Awaitable[Any]]
"""One run of the agent: question -> answer."""


# -- the agents: each is made with the base URL of the plain server ---------------------------------------------------


def langchain(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    from agl.trainer.quickstart.agent import build_agent

    return build_agent(ChatOpenAI(model="policy", api_key="unused", base_url=url, max_completion_tokens=48))


def openai_agents(url: str) -> Any:
    from agents import Agent, OpenAIChatCompletionsModel, function_tool
    from agents.tracing import set_trace_processors
    from openai import AsyncOpenAI

    set_trace_processors([])  # none to OpenAI's servers

    def calculator(expression: str) -> str:
        """Calculate `a op b`."""
        return calculate(expression)

    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(api_key="unused", base_url=url))
    return Agent(name="solver", instructions=SYSTEM_PROMPT, tools=[function_tool(calculator)], model=model)


def strands(url: str) -> Any:
    from strands import Agent
    from strands import tool as strands_tool
    from strands.handlers import null_callback_handler
    from strands.models.openai import OpenAIModel

    @strands_tool
    def calculator(expression: str) -> str:
        """Calculate `a op b`."""
        return calculate(expression)

    model = OpenAIModel(client_args={"api_key": "unused", "base_url": url}, model_id="policy")
    return Agent(model, system_prompt=SYSTEM_PROMPT, tools=[calculator], callback_handler=null_callback_handler())


def agent_framework(url: str) -> Any:
    from agent_framework import Agent
    from agent_framework import tool as framework_tool
    from agent_framework.openai import OpenAIChatCompletionClient

    @framework_tool
    def calculator(expression: str) -> str:
        """Calculate `a op b`."""
        return calculate(expression)

    client = OpenAIChatCompletionClient(model="policy", base_url=url, api_key="unused")
    return Agent(client, SYSTEM_PROMPT, name="solver", tools=[calculator])


async def _loop(question: str, ask: Callable[[list[Any]], Awaitable[Any]]) -> str:
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    while calls := (message := await ask(messages)).get("tool_calls"):
        messages.append(message)
        for call in calls:
            result = calculate(json.loads(call["function"]["arguments"])["expression"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return message["content"]


def openai_sdk(url: str) -> Any:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(api_key="unused", base_url=url)

    async def ask(messages: list[Any]) -> Any:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        return answer.choices[0].message.model_dump(exclude_none=True)

    async def solver(task: Any) -> str:
        return await _loop(task["question"], ask)

    return solver


def httpx_loop(url: str) -> Any:
    import httpx

    # By default httpx closes all but 20 of the connections after each request.
    limits = httpx.Limits(max_connections=CONCURRENT, max_keepalive_connections=CONCURRENT)
    client = httpx.AsyncClient(timeout=60, limits=limits)

    @agl.rollout
    async def solver(task: Any, llm: agl.LLM) -> float:
        async def ask(messages: list[Any]) -> Any:
            answer = await client.post(
                f"{llm.endpoint}/chat/completions",
                headers={"authorization": f"Bearer {llm.api_key}"},
                json={"model": llm.model, "messages": messages, "tools": [TOOL]},
            )
            return answer.raise_for_status().json()["choices"][0]["message"]

        return exact_answer(task, await _loop(task["question"], ask))

    return solver


AGENTS: dict[str, Callable[[str], Any]] = {
    "langchain": langchain,
    "openai": openai_sdk,
    "openai-agents": openai_agents,
    "strands": strands,
    "agent-framework": agent_framework,
    "httpx": httpx_loop,
}


def plain_run(name: str, url: str) -> Callable[[], Awaitable[Any]]:
    """The agent as its user runs it."""
    agent = AGENTS[name](url)
    if name == "langchain":
        return lambda: agent.ainvoke({"messages": [{"role": "user", "content": TASK["question"]}]})
    if name == "openai-agents":
        from agents import Runner

        return lambda: Runner.run(agent, TASK["question"])
    if name == "strands":
        from agl.adapters.strands.copying import fresh_copy

        return lambda: fresh_copy(agent).invoke_async(TASK["question"])  # a Strands agent runs once at a time
    if name == "agent-framework":
        return lambda: agent.run(TASK["question"])
    if name == "httpx":
        return lambda: agent(TASK, agl.LLM(url, "policy", "unused"))
    return lambda: agent(TASK)


# -- who answers ------------------------------------------------------------------------------------------------------


class Instant:
    """An engine that answers at once: with a tool call, or with the result if the prompt brings one."""

    max_context = 4096

    def __init__(self, tokenizer: Any) -> None:
        from agl.trainer.engines.base import Completion

        self._result = tokenizer.convert_tokens_to_ids("<tool_response>")
        texts = (f"{tool_call(EXPRESSION)}<|im_end|>", f"{ANSWER}<|im_end|>")
        ids = [np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32) for text in texts]
        self._call, self._answer = (Completion(i, np.full(i.size, -0.1, np.float32), "stop", 0) for i in ids)

    async def generate(self, request: Any, **_: Any) -> Any:
        return self._answer if self._result in request.prompt_ids else self._call


def _completion(message: dict[str, Any], reason: str) -> tuple[bytes, bytes]:
    """The answer, whole and as a stream of two events."""
    usage = {"prompt_tokens": 40, "completion_tokens": 20, "total_tokens": 60}
    head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    content = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index
    deltas = [{"role": "assistant", **message}, None], [{}, reason]
    chunks = [{**head, "choices": [{"index": 0, "delta": d, "finish_reason": f}]} for d, f in deltas]
    chunks.append({**head, "choices": [], "usage": usage})
    events = [json.dumps({**chunk, "object": "chat.completion.chunk"}) for chunk in chunks]
    stream = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")).encode()
    return _response(content, b"application/json"), _response(stream, b"text/event-stream")


def _response(content: bytes, kind: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(content)) + content


async def serve() -> None:
    """The plain server: HTTP/1.1 with just enough of it."""
    function = {"name": TOOL_NAME, "arguments": json.dumps({"expression": EXPRESSION})}
    call = _completion({"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
                       "tool_calls")  # fmt: skip
    answer = _completion({"content": ANSWER}, "stop")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                body = await reader.readexactly(int(length.partition(b":")[2]))
                writer.write((answer if b'"tool_call_id"' in body else call)[b'"stream":true' in body])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# -- the two sides, each in a process that runs a batch per line of input ---------------------------------------------


async def _rounds(batch: Callable[[], Awaitable[None]]) -> None:
    while (await asyncio.to_thread(sys.stdin.readline)).strip():
        began, cpu = time.perf_counter(), time.process_time()
        await batch()
        seconds = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        print(json.dumps(seconds), flush=True)


async def plain_side(name: str, url: str) -> None:
    run = plain_run(name, url)

    async def batch() -> None:
        left = iter(range(BATCH))

        async def worker() -> None:
            for _ in left:
                await run()

        await asyncio.gather(*(worker() for _ in range(CONCURRENT)))

    await _rounds(batch)


class Rounds(Algorithm):
    """An algorithm that trains nothing."""

    async def run(self, run: Any) -> None:
        from agl.trainer.gateway.access import SamplingRules
        from agl.trainer.quickstart.tokenizer import build_tokenizer
        from agl.trainer.rendering.rendering import Rendering
        from agl.trainer.run.workplace import Workplace

        tokenizer = build_tokenizer()
        engine, rendering = Instant(tokenizer), Rendering(tokenizer)
        rules, step, workplace = SamplingRules(max_tokens=48), 0, Workplace(run)
        await workplace.start(lambda mode: rules, "policy", register=lambda g: g.serve("policy", engine, rendering))

        async def batch() -> None:
            nonlocal step
            step += 1
            results = await workplace.rollouts([(0, TASK)], mode="train", step=step, group_size=BATCH)
            rewards = [r.attempt_trajectory and r.attempt_trajectory.reward for r in results]
            assert rewards == [1.0] * BATCH, next((r.error for r in results if r.error), rewards)

        try:
            await _rounds(batch)
        finally:
            await workplace.stop()

    async def dev(self, run: Any, n_tasks: int) -> None:
        await self.run(run)


def agl_side(name: str, url: str) -> None:
    agent = AGENTS[name](url)
    wrapped = agent if name == "httpx" else agl.wrap(agent, reward=exact_answer)
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as directory:
        agl.Trainer(Rounds(), n_workers=CONCURRENT, directory=directory, progress=False).fit(wrapped, [TASK])


# -- measuring --------------------------------------------------------------------------------------------------------


class Process:
    """This program as another process, with what it prints and reads by the line."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> Any:
        assert self.popen.stdout is not None
        if line := self.popen.stdout.readline():
            return json.loads(line)
        raise SystemExit(f"{' '.join(map(str, self.popen.args[2:]))} stopped")  # type: ignore[index]

    def batch(self) -> dict[str, float]:
        assert self.popen.stdin is not None
        print("go", file=self.popen.stdin, flush=True)
        return self.read()

    def stop(self) -> None:
        self.popen.terminate()
        self.popen.wait()


def measure(name: str, url: str, rounds: int) -> dict[str, Any]:
    sides = {side: Process("--side", side, name, url) for side in ("plain", "agl")}
    try:
        taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for i in range(rounds + 1):
            for side in sorted(sides, reverse=bool(i % 2)):
                facts = sides[side].batch()
                taken[side] += [facts] if i else []  # the first batch warms up
    finally:
        for process in sides.values():
            process.stop()
    per_second = {side: BATCH / statistics.median(t["seconds"] for t in rows) for side, rows in taken.items()}
    cpu = {side: 1e3 * statistics.median(t["cpu"] for t in rows) / BATCH for side, rows in taken.items()}
    ratios = [p["seconds"] / a["seconds"] for p, a in zip(taken["plain"], taken["agl"], strict=True)]
    return {"runs_per_second": per_second, "cpu_ms_per_run": cpu, "ratio": statistics.median(ratios)}


SHARES = (
    # Who spends the time: the innermost of these that is on the stack, in this order for one frame.
    ("adapters and tracing", ("agl/adapters", "agl/tracing", "agl/instrument")),
    ("gateway, HTTP and rendering", ("agl/trainer/gateway", "agl/trainer/http", "agl/trainer/rendering", "uvicorn",
                                     "starlette", "h11", "httptools", "jinja2", "tokenizers")),
    ("store", ("agl/trainer/store", "sqlalchemy", "aiosqlite", "sqlite3")),
    ("runner, run and MDP", ("agl/",)),
    ("framework", ("langchain", "langgraph", "langsmith", "pregel/", "(agents/")),
    ("openai SDK, httpx, pydantic", ("openai", "httpx", "httpcore", "anyio", "pydantic")),
    ("asyncio", ("asyncio/", "concurrent/futures")),
)  # fmt: skip


def profile(name: str, url: str, seconds: float) -> dict[str, float]:
    """Share of agl's process by who spends it, of the samples in which a thread held the interpreter."""
    process = Process("--side", "agl", name, url)
    with tempfile.TemporaryDirectory() as folder:
        try:
            process.batch()
            out = Path(folder, "stacks")
            command = [
                "py-spy",
                "record",
                "--gil",
                "--format",
                "raw",
                "--rate",
                "200",
                "-d",
                str(round(seconds)),
                "-o",
                out,
            ]
            recorder = subprocess.Popen([*command, "-p", str(process.popen.pid)], stdout=subprocess.DEVNULL)
            while recorder.poll() is None:
                process.batch()
        finally:
            process.stop()
        samples: Counter[str] = Counter()
        for line in out.read_text().splitlines():
            stack, _, n = line.rpartition(" ")
            samples[_share(stack.split(";"))] += int(n)
    return {what: 100 * n / samples.total() for what, n in samples.most_common()}


def _share(frames: list[str]) -> str:
    for frame in reversed(frames):
        for what, parts in SHARES:
            if any(part in frame for part in parts):
                return what
    return "rest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=AGENTS, default=[*AGENTS], metavar="AGENT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", type=float, metavar="SECONDS", help="py-spy's profile of agl's process instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    elif options.side:
        side, name, url = options.side
        asyncio.run(plain_side(name, url)) if side == "plain" else agl_side(name, url)
    else:
        server = Process("--serve")
        try:
            url = f"http://127.0.0.1:{server.read()}/v1"
            facts: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg(), "agents": {}}
            for name in options.only:
                if options.profile:
                    facts["agents"][name] = shares = profile(name, url, options.profile)
                    print(f"\n{name}: " + ", ".join(f"{what} {share:.0f} %" for what, share in shares.items()))
                    continue
                facts["agents"][name] = f = measure(name, url, options.rounds)
                per_second, cpu = f["runs_per_second"], f["cpu_ms_per_run"]
                print(
                    f"{name:14} plain {per_second['plain']:6.1f} runs/s {cpu['plain']:6.2f} ms of CPU a run   "
                    f"agl {per_second['agl']:6.1f} runs/s {cpu['agl']:6.2f} ms   agl / plain {f['ratio']:.2f}",
                    flush=True,
                )
        finally:
            server.stop()
        if options.json:
            options.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
