"""An agl agent as an environment of `verifiers`: its evaluation, prime-rl and their clients run it as any other.

The agent runs as it is. Its requests come to a server on this machine, one per rollout, and are answered by the client
that verifiers was given; so verifiers has every message, and the tokens where its client returns them.
"""

# The package may be missing where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from datasets import Dataset
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agl import tracing
from agl.agents.agent import Agent, RolloutInfo, as_agent
from agl.agents.causes import answer_error_cause, causes_of
from agl.agents.frameworks import switched_on
from agl.agents.resources import LLM, Task, as_tasks
from agl.errors import AglError, DatasetError, RolloutError, UnreadableMessageError, described
from agl.mdp.evidence import is_answer, unreadable_inputs
from agl.mdp.selection import select
from agl.mdp.types import Reward
from agl.messages import read, write
from agl.rewards.emit import as_rewards, record
from agl.rewards.function import raised_by
from agl.trainer.http.auth import key_hash, key_of, matches
from agl.trainer.http.bodies import body_in_turn
from agl.trainer.http.errors import error_handlers
from agl.trainer.http.server import HttpServer
from agl.trainer.http.turns import Turns
from agl_environments.verifiers_env import answers_among, vf

# After `verifiers_env`, which says so where verifiers has none of them any more.
serialize_intercept_response: Any = import_module(
    "verifiers.legacy.utils.interception_utils"
).serialize_intercept_response
normalize_messages: Any = import_module("verifiers.legacy.utils.message_utils").normalize_messages


def as_verifiers(
    agent: Any, tasks: Iterable[Any], *, agents: Any = None, max_turns: int = -1, **options: Any
) -> AgentEnvironment:
    """Make a `vf.Environment` of an agent and its tasks.

    Args:
        agent: as `agl.Trainer.fit` takes it, with its reward.
        tasks: JSON values.
        agents: which agents' calls verifiers answers, as `agl.Trainer` takes it; None for all.
        max_turns: calls to the model after which a rollout is ended with reward 0; -1 for no limit.
        **options: of `vf.MultiTurnEnv`, such as `timeout_seconds`.

    An agent may use Chat Completions, streamed or not, and Responses and Messages, not streamed. A failure that the
    policy caused counts as the agent's `error_reward`, or 0; any other is a `vf.InfraError`.

    Raises:
        DatasetError: no tasks, or one that is no JSON.
        ConfigError: what is no agent.
    """
    known = list(as_tasks(tasks))
    try:
        rows = [{"question": _shown(task), "answer": "", "info": json.dumps({"agl_task": task})} for task in known]
    except (TypeError, ValueError) as error:
        raise DatasetError(f"a task is no JSON: {error}", hint="give dicts of texts and numbers") from error
    if not rows:
        raise DatasetError("there are no tasks", hint="give a list of tasks: any JSON values, usually dicts")
    rubric = vf.Rubric(funcs=[reward])
    dataset = Dataset.from_list(rows)
    return AgentEnvironment(
        as_agent(agent), select(agents), dataset=dataset, rubric=rubric, max_turns=max_turns, **options
    )


async def reward(state: Any) -> float:
    """The agent's reward; 0 for a rollout that verifiers ended before the agent did."""
    return state.get("agl_reward", 0.0)


class _Request(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[Any]
    reply: asyncio.Future[Any]


@dataclass
class _Run:
    """A running agent and its server.

    Attributes:
        requests: that wait for their turn.
        now: the one that is being answered.
        open: replies that the agent awaits;
            None once the rollout has ended.
    """

    server: HttpServer
    requests: asyncio.Queue[_Request]
    open: set[asyncio.Future[Any]] | None
    task: asyncio.Task[float] | None = None
    now: _Request | None = None

    async def end(self) -> None:
        """End the agent, unless it has ended: a sync one at its next request."""
        replies = self.open or set()
        self.open = None
        for reply in replies:
            if not reply.done():
                reply.set_exception(_ended())
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
        await self.server.stop(seconds=1.0)


class AgentEnvironment(vf.MultiTurnEnv):
    """`as_verifiers` makes it. Each turn is a request of the agent."""

    def __init__(self, agent: Agent, selection: Any, **options: Any) -> None:
        super().__init__(**options)
        self._agent = agent
        self._selection = selection
        self._traced = contextlib.ExitStack()
        self._traced.enter_context(switched_on(agent.tracers))

    async def setup_state(self, state: Any) -> None:
        key = secrets.token_urlsafe(16)
        run, url = await _serve(key)
        state["agl_run"] = run
        info = RolloutInfo(state["trajectory_id"], 1, "train")
        context = tracing.RolloutContext(info.rollout_id, 1, self._agent.name, self._selection, url, key)
        llm = LLM(f"{url}/rollouts/{info.rollout_id}/attempts/1/agents/{self._agent.name}/v1", state["model"], key)
        task = Task.of(state["info"]["agl_task"])
        run.task = asyncio.create_task(self._attempt(task, {"llm": llm}, info, context))

    async def _attempt(self, task: Any, resources: dict[str, Any], info: RolloutInfo, context: Any) -> float:
        def run() -> Any:
            with tracing.running(context):
                return record_all(self._agent.run(task, resources, info))

        def record_all(outcome: Any) -> None:
            for one in as_rewards(outcome.reward) if outcome.reward is not None else ():
                record(one)

        if self._agent.is_async:
            with tracing.running(context):
                outcome: Any = await self._agent.run(task, resources, info)  # type: ignore[misc]
                record_all(outcome)
        else:
            await asyncio.to_thread(run)
        rewards = [Reward.of_span(span.attributes, span.parent_id) for span in context.spans]
        counted = [one.value for one in rewards if one is not None and one.primary]
        if not counted:
            raise AglError(f"agent {self._agent.name!r} gave no reward", hint="agl.wrap(agent, reward=score)")
        return sum(counted)

    async def get_prompt_messages(self, state: Any) -> Any:
        run: _Run = state["agl_run"]
        assert run.task is not None
        request = asyncio.ensure_future(run.requests.get())
        await asyncio.wait({request, run.task}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            state["agl_reward"] = self._reward(run.task, state)
            state["final_env_response"] = []
            return []
        run.now = request.result()
        return normalize_messages(run.now.messages)

    def _reward(self, ended: asyncio.Task[float], state: Any) -> float:
        error = ended.exception()
        if error is None:
            return ended.result()
        if not isinstance(error, AglError | OSError) and raised_by(error) is None:
            answers = [text for step in state["trajectory"] for text in answers_among(step["completion"])]
            inputs = unreadable_inputs(causes_of(error))
            if answer_error_cause(error) is not None or is_answer(inputs, answers):
                return self._agent.error_reward or 0.0
            if self._agent.error_reward is not None:
                return self._agent.error_reward
        raise vf.InfraError(f"agent {self._agent.name!r} raised {described(error)}") from error

    async def get_model_response(self, state: Any, prompt: Any, **options: Any) -> Any:
        request = state["agl_run"].now
        tools = [vf.Tool.model_validate({"description": "", "parameters": {}, **t["function"]}) for t in request.tools]
        try:
            response = await super().get_model_response(state, prompt, tool_defs=tools or None, **options)
        except BaseException as error:
            if not request.reply.done():
                request.reply.set_exception(HTTPException(502, described(error)))
            raise
        if not request.reply.done():
            request.reply.set_result(response)
        return response

    async def add_model_response(self, state: Any, prompt_messages: Any, response: Any) -> None:
        if not state["trajectory"]:
            state["prompt"] = prompt_messages
        await super().add_model_response(state, prompt_messages, response)

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise NotImplementedError("the agent's next request is the next turn")

    @vf.cleanup
    async def end_agent(self, state: Any) -> None:
        """End the agent, if it runs, and its server."""
        run: _Run | None = state.pop("agl_run", None)
        if run is not None:
            await run.end()

    @vf.teardown
    async def switch_off(self) -> None:
        """Switch the agent's tracers off."""
        self._traced.close()


async def _serve(key: str) -> tuple[_Run, str]:
    """A run without its agent, whose server listens at a free port, and the server's URL."""
    digest, turns = key_hash(key), Turns()

    async def answer(request: Request) -> Response:
        if not matches(key_of(request.headers), digest):
            return JSONResponse({"error": {"message": "this key belongs to no rollout"}}, 401)
        async with body_in_turn(request, turns) as received:
            body = await received.json()
        protocol = _PROTOCOLS.get(request.url.path.rpartition("/v1/")[2])
        if not isinstance(body, dict):
            return JSONResponse({"error": {"message": "the body is an object of JSON"}}, 400)
        streamed = bool(body.get("stream"))
        if protocol is None or body.get("previous_response_id") or (streamed and protocol != _CHAT):
            message = "agl's verifiers environment answers chat/completions, and responses and messages unstreamed"
            return JSONResponse({"error": {"message": message}}, 501)
        if run.open is None:
            raise _ended()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        run.open.add(reply)
        messages = write.to_openai(read.body(body))
        await run.requests.put(_Request(messages, read.tools(body.get("tools")), reply))
        payload = serialize_intercept_response(await reply, protocol)
        if streamed:
            return Response(_stream(payload), media_type="text/event-stream")
        return JSONResponse(payload)

    app = Starlette(
        routes=[Route("/{path:path}", answer, methods=["POST"])],
        exception_handlers=error_handlers(_describe, HTTPException, UnreadableMessageError),
    )
    server = HttpServer(app, error=RolloutError)
    run = _Run(server, asyncio.Queue(), set())
    return run, await server.start()


def _describe(_: Request, error: Exception) -> tuple[Any, int]:
    status = 400 if isinstance(error, UnreadableMessageError) else getattr(error, "status_code", 500)
    return {"error": {"message": str(getattr(error, "detail", error))}}, status


def _ended() -> HTTPException:
    """The clients do not try again after it."""
    return HTTPException(410, "verifiers has ended this rollout")


_CHAT = "openai_chat_completions"
_PROTOCOLS = {"chat/completions": _CHAT, "responses": "openai_responses", "messages": "anthropic_messages"}


def _stream(payload: Mapping[str, Any]) -> bytes:
    """A chat completion as a stream of one chunk."""
    [choice] = payload["choices"]
    calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    chunk = {
        **payload,
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}],
    }
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()


def _shown(task: Any) -> str:
    """How a task reads in verifiers' reports, until the agent's first request takes its place."""
    text = task.get("question") if isinstance(task, Mapping) else task
    return text if isinstance(text, str) else json.dumps(task)
