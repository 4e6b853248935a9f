"""An engine that answers from a script, with exact token ids and made-up log-probs, behind a gateway that listens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agl.errors import ContextLengthError
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.mdp.types import Call, IntArray, Trajectory
from agl.trainer.engines.base import Completion, OnTokens, Request, Sampling
from agl.trainer.gateway.access import Access, SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.processes.group import GatewayProcesses
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.limits import Limits
from agl.trainer.quickstart.tokenizer import build_tokenizer
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.run.results import require_some
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types.chat import ChatCompletion


@dataclass(frozen=True)
class Asked:
    """One call of `generate`."""

    prompt_ids: IntArray
    sampling: Sampling
    session: str | None


Line = str | list[int] | Exception
"""What is answered: a text, token ids as they are, or an error."""


class ScriptedEngine:
    """Answers with the lines of a script, in order of arrival; the last line goes on for ever.

    A text is followed by the tokenizer's end token. `max_tokens` cuts an answer short, as in a real engine.

    Args:
        tokenizer: of Hugging Face.
        script: lines, or a function of what was asked.
        paused: wait for `resume.set()` after the first token of a stream, and before any other answer.
        seconds: between a stream's tokens; with none, how many of them are sent at once depends on who runs next.
        caches: report what a prompt has in common with an earlier request and its answer as reused.

    Attributes:
        asked: every call, in order. cancelled: how many were. running: how many there are now, most at once: `peak`.
        version: the policy version reported.
    """

    def __init__(
        self,
        tokenizer: Any,
        script: Iterable[Line] | Callable[[Asked], Line],
        *,
        max_context: int = 4096,
        paused: bool = False,
        seconds: float = 0.0,
        caches: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.seconds = seconds
        self.caches = caches
        self._computed: list[IntArray] = []
        self.max_context = max_context
        self.asked: list[Asked] = []
        self.cancelled = self.running = self.peak = self.version = 0
        self.resume = asyncio.Event()
        if not paused:
            self.resume.set()
        self._answer = script if callable(script) else _in_order(script)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        sampling = request.sampling
        if request.prompt_ids.size >= self.max_context:
            raise ContextLengthError(f"the prompt has {request.prompt_ids.size} tokens")
        asked = Asked(request.prompt_ids, sampling, request.session)
        self.asked.append(asked)
        line = self._answer(asked)
        self.running += 1
        self.peak = max(self.peak, self.running)
        version = self.version
        try:
            if on_tokens is None:
                await asyncio.sleep(0)
                await self.resume.wait()
            if isinstance(line, Exception):
                raise line
            ids = [*self.encode(line), self.tokenizer.eos_token_id] if isinstance(line, str) else line
            finish = "length" if len(ids) > sampling.max_tokens else "stop"
            ids = ids[: sampling.max_tokens]
            wants_top = sampling.top_logprobs > 0
            for i, token in enumerate(ids):
                if on_tokens is not None:
                    on_tokens([token], [logprob(token, i)], *([[_likeliest(token, i, sampling)]] if wants_top else ()))
                    await asyncio.sleep(self.seconds)
                    await self.resume.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        top = [_likeliest(t, i, sampling) for i, t in enumerate(ids)] if wants_top else ()
        logprobs = np.asarray([logprob(t, i) for i, t in enumerate(ids)], np.float32)
        reused = max((_common(request.prompt_ids, earlier) for earlier in self._computed), default=0)
        if self.caches:
            self._computed.append(np.concatenate([request.prompt_ids, np.asarray(ids, np.int32)]))
        return Completion(np.asarray(ids, np.int32), logprobs, finish, version, top, reused)


def _common(prompt: IntArray, earlier: IntArray) -> int:
    """How many ids of a prompt are the beginning of earlier ones."""
    size = min(prompt.size, earlier.size)
    differ = np.flatnonzero(prompt[:size] != earlier[:size])
    return int(differ[0]) if differ.size else size


def _likeliest(token: int, position: int, sampling: Sampling) -> list[tuple[int, float]]:
    return [(token, logprob(token, position) - k) for k in range(sampling.top_logprobs)]


def logprob(token: int, position: int) -> float:
    """A made-up log-prob that tells tokens and positions apart."""
    return -0.001 * (token + 1) - 0.1 * position


def _in_order(script: Iterable[Line]) -> Callable[[Asked], Line]:
    lines: Iterator[Line] = iter(script)
    last: list[Line] = []

    def answer(_: Asked) -> Line:
        last[:] = [next(lines, *last)]
        return last[0]

    return answer


GATEWAYS = int(os.environ.get("AGL_TEST_GATEWAYS", "1"))
"""Processes of the gateway under test."""

# -- a gateway around it ----------------------------------------------------------------------------------------------


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


@functools.cache
def quick_tokenizer() -> Any:
    """The tokenizer of the quickstart's policy."""
    return build_tokenizer()


@functools.cache
def rendering_of(tokenizer: Any) -> Rendering:
    return Rendering(tokenizer)


def new_access() -> Access:
    """An attempt that was not opened at any gateway, for reading a dialect's body alone."""
    return Access("ro-1", 1, select(None), 0, SamplingRules(), "http://gateway", b"")


class Attempt:
    """An open attempt and clients for it."""

    def __init__(self, rig: Rig, access: Access, key: str) -> None:
        self.rig, self.access, self.key = rig, access, key

    def url(self, agent: str = "agent") -> str:
        return f"{self.access.url}/agents/{agent}/v1"

    def client(self, agent: str = "agent", key: str | None = None, **options: Any) -> AsyncOpenAI:
        """The official client, as an agent would make it."""
        from openai import AsyncOpenAI

        http = self.rig.http
        return AsyncOpenAI(
            base_url=self.url(agent), api_key=key or self.key, http_client=http, **{"max_retries": 0} | options
        )

    def sync_client(self, **options: Any) -> OpenAI:
        from openai import DefaultHttpxClient, OpenAI

        return OpenAI(
            base_url=self.url(), api_key=self.key, http_client=DefaultHttpxClient(trust_env=False),
            **{"max_retries": 0} | options,
        )  # fmt: skip

    async def chat(self, messages: list[Any] | str = "hello", **fields: Any) -> ChatCompletion:
        """One request of the agent called "agent"."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.client().chat.completions.create(model="m", messages=messages, **fields)

    async def close(self) -> list[Call]:
        """End the attempt; its calls as the store holds them."""
        returned = await self.rig.gateway.close_attempt(self.access.rollout_id, self.access.attempt)
        stored = await self.rig.store.query_calls(self.access.rollout_id, self.access.attempt)
        assert sorted(c.id for c in returned) == sorted(c.id for c in stored)
        return sorted(stored, key=lambda c: (c.index, c.id))


@dataclass
class Rig:
    """A listening gateway over a real store."""

    gateway: Gateway
    server: GatewayServer
    store: Store
    engine: Any

    @functools.cached_property
    def http(self) -> Any:
        """What the clients of all attempts send with."""
        from openai import DefaultAsyncHttpxClient

        return DefaultAsyncHttpxClient(trust_env=False)

    async def attempt(
        self, *, seed: int = 0, rules: SamplingRules | None = None, agents: Any = None, prompts: Any = None
    ) -> Attempt:
        """Open the first attempt of a new rollout."""
        (rollout,) = await self.store.enqueue_rollouts([NewRollout(task="t", seed=seed)])
        await self.store.dequeue_rollout("worker")
        access, key = self.gateway.open_attempt(
            rollout.rollout_id, 1, selection=select(agents), seed=seed, rules=rules, system_prompts=prompts
        )
        if access.admitted is not None:
            await access.admitted
        return Attempt(self, access, key)


@contextlib.asynccontextmanager
async def serving(
    engine: Any, tokenizer: Any = None, *, limits: Limits | None = None, **options: Any
) -> AsyncIterator[Rig]:
    """A gateway that serves `engine`, or one that is scripted with these lines, over HTTP on loopback."""
    tokenizer = tokenizer or quick_tokenizer()
    if not hasattr(engine, "generate"):
        engine = ScriptedEngine(tokenizer, engine)
    store = await open_store("memory")
    gateway = Gateway(store, **options) if GATEWAYS == 1 else GatewayProcesses(store, GATEWAYS, **options)
    gateway.serve("policy", engine, rendering_of(tokenizer))
    server = GatewayServer(gateway, limits=limits)
    await server.start()
    if isinstance(gateway, GatewayProcesses):
        await gateway.start(limits=limits)
    rig = Rig(gateway, server, store, engine)
    try:
        yield rig
    finally:
        if "http" in vars(rig):
            await rig.http.aclose()
        if isinstance(gateway, GatewayProcesses):
            await gateway.stop()
        await server.stop()
        await store.close()


class ScriptedRollouts(Algorithm):
    """An algorithm for `agl.Trainer`: tasks are run on a scripted engine, which all policies share; nothing is trained.

    Args:
        script: as `ScriptedEngine`'s.
        group_size: rollouts per task. gateways: the processes that it asks for, as verl's algorithm does.
        tokenizer: of the policies; None for the quickstart's.

    Attributes:
        calls: of each rollout in order, as the store holds them. rewards: likewise, of the whole rollout.
        spans: likewise. trajectories: likewise, what training would be given.
    """

    def __init__(
        self,
        script: Iterable[Line] | Callable[[Asked], Line],
        *,
        group_size: int = 1,
        gateways: int = 1,
        tokenizer: Any = None,
    ) -> None:
        self.engine = ScriptedEngine(tokenizer or quick_tokenizer(), script)
        self.group_size, self.gateways = group_size, gateways
        self.trajectories: list[Trajectory] = []
        self.calls: list[list[Call]] = []
        self.rewards: list[float | None] = []
        self.spans: list[Sequence[Span]] = []

    async def run(self, run: Run) -> None:
        policies, workplace = run.config.selection.policies, Workplace(run)

        def register(gateway: Gateway) -> None:
            for policy in policies:
                gateway.serve(policy, self.engine, rendering_of(self.engine.tokenizer))

        await workplace.start(
            lambda mode: SamplingRules(max_tokens=512), policies[0], register=register, gateways=self.gateways
        )
        try:
            results = await workplace.rollouts(
                [*enumerate(run.train)], mode="train", step=0, group_size=self.group_size
            )
            for result in require_some(results, "the run"):
                assert result.attempt_trajectory is not None
                id = result.rollout.rollout_id
                self.calls.append(sorted(await run.store.query_calls(id), key=lambda c: c.index))
                self.spans.append(await run.store.query_spans(id))
                self.rewards.append(result.attempt_trajectory.reward)
                self.trajectories.append(result.attempt_trajectory.trajectory)
        finally:
            await workplace.stop()

    async def dev(self, run: Run, n_tasks: int) -> None:
        await self.run(run)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out a sum.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def tool_call(expression: str, name: str = "calculator") -> str:
    """A tool call as the quickstart's policy writes it."""
    return tool_call_of(name, {"expression": expression})


def tool_call_of(name: str, arguments: dict[str, Any]) -> str:
    """A call of any tool, likewise."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def calls_once(name: str, arguments: dict[str, Any], answer: str) -> Callable[[Asked], str]:
    """A policy that calls a tool, and answers when it reads the tool's result."""

    def script(asked: Asked) -> str:
        prompt = quick_tokenizer().decode(asked.prompt_ids.tolist())
        return answer if "<tool_response>" in prompt else tool_call_of(name, arguments)

    return script


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
