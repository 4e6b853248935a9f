"""`agl run`: one command as one rollout, recorded on its own models or answered by a policy."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from agl import semconv, tracing
from agl.agents.command import program_name
from agl.errors import ConfigError
from agl.instrument import startup
from agl.mdp.selection import DEFAULT_POLICY, Selection, select
from agl.tracing import propagation as handover
from agl.tracing.inferred import SpanInference, completed, totals
from agl.tracing.propagation import AttemptEnvironment
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.launch import child
from agl.trainer.launch.app import PROVIDERS, RecordingProxy
from agl.trainer.local.policy import PolicySpec
from agl.trainer.run.frozen_policy import FrozenPolicy, policy_directory
from agl.trainer.store import open_store
from agl.trainer.store.base import NewRollout, Store
from agl.trainer.store.collect import new_rollout, shown_command, store_url

_URLS = {"openai": handover.OPENAI_URL, "anthropic": handover.ANTHROPIC_URL}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What to run, and how.

    Attributes:
        command: its words. agent: the name for calls that no adapter names; the program's if None.
        store: URL or path; AGL_STORE or the default if None. task: any JSON value, given to the command as AGL_TASK.
        model: a Hugging Face directory or a checkpoint's, to answer the selected agents with. engine: the URL of a
            `vllm serve` that answers them; `model` is then where tokenizer and chat template come from. Without both
            the command is recorded on its own models. agents: names and globs of the selected agents; all if empty.
        seed: of the policy's sampling. capture_content: whether texts are recorded.
    """

    command: Sequence[str]
    agent: str | None = None
    store: str | None = None
    task: Any = None
    model: str | None = None
    engine: str | None = None
    agents: Sequence[str] = ()
    seed: int = 0
    capture_content: bool = True

    @property
    def routed(self) -> bool:
        """Whether a policy answers."""
        return self.model is not None or self.engine is not None


def run_command(launch: LaunchOptions) -> tuple[dict[str, Any], int]:
    """Run it to its end. From the main thread.

    Returns:
        What is known of the rollout, as JSON values, and the exit status for the shell.

    Raises:
        AglError: it was not started: no such model, a store that cannot be opened, ...
    """
    if launch.agents and not launch.routed:
        raise ConfigError(
            "--agents selects who is answered by a policy", hint="name the policy with --model DIR, or --engine URL"
        )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_prepared(launch)) as prepared,
    ):
        ended = child.run(launch.command, prepared.environment())
        return portal.call(prepared.end, ended), ended.exit_status


@dataclass(eq=False)
class _Prepared:
    """A rollout whose command can start."""

    launch: LaunchOptions
    store: Store
    url: str
    gateway: Gateway
    launched: RecordingProxy
    rollout: NewRollout
    agent: str
    selection: Selection
    context: tracing.RolloutContext
    root: tracing.Scope
    access: Access
    ended: bool = False

    def environment(self) -> dict[str, str]:
        """The command's environment: ours, pointed at the attempt."""
        routed = self.launch.routed
        if routed and self.selection.policy_for(self.agent) is not None:
            ours = handover.gateway_variables(self.access.url, self.agent, self.context.key)
        else:
            urls = self.launched.provider_urls(self.gateway.base_url, self.agent)
            ours = {_URLS[name]: url for name, url in urls.items()}
        given = AttemptEnvironment(
            rollout_id=self.context.rollout_id,
            attempt=self.context.attempt,
            agent=self.agent,
            traceparent=self.root.traceparent,
            spans_url=self.launched.spans_url(self.gateway.base_url),
            spans_key=self.launched.secret,
            gateway_url=self.gateway.base_url if routed else None,
            key=self.context.key if routed else "",
            agents=tuple(self.launch.agents) or ("*",),
            capture_content=self.launch.capture_content,
            replaced={name: os.environ.get(name) for name in ours},
        )
        first = str(Path(startup.__file__).parent)
        paths = [first, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            **ours,
            **handover.variables(given, self.launch.task),
            "PYTHONPATH": os.pathsep.join(paths),
            **handover.without_proxy(os.environ),
        }

    async def end(self, ended: child.ProcessExit) -> dict[str, Any]:
        """Record how it ended. Returns what is known of it."""
        self.ended = True
        rollout_id, attempt = self.context.rollout_id, self.context.attempt
        calls = await self.gateway.close_attempt(rollout_id, attempt)
        await self.launched.close()
        spans = completed(await self.store.query_spans(rollout_id, attempt), calls)
        error = ended.error
        if error is not None:
            raised = [s for s in spans if s.operation == semconv.EXCEPTION and s.status_message]
            if ended.status > 0 and raised:
                error = f"{raised[-1].status_message} ({error})"
        tracing.end(self.root, error=error, attributes={semconv.EXIT_STATUS: ended.status})
        tracing.close(self.context)
        await self.store.add_spans(list(self.context.spans))
        status = "succeeded" if error is None else "failed"
        await self.store.update_attempt(rollout_id, attempt, status, error=error)
        return {
            "rollout_id": rollout_id,
            "store": self.url,
            "status": status,
            "exit_status": ended.status,
            "error": error,
            **totals(spans),
        }


@contextlib.asynccontextmanager
async def _prepared(launch: LaunchOptions) -> AsyncIterator[_Prepared]:
    url = store_url(launch.store)
    async with contextlib.AsyncExitStack() as stack:
        store = await open_store(url)
        stack.push_async_callback(store.close)
        gateway = Gateway(store, capture_content=launch.capture_content)
        policy = await _policy(launch)
        if policy is not None:
            stack.push_async_callback(policy.close)
            policy.serve(gateway, DEFAULT_POLICY)
        agent = launch.agent or program_name(launch.command)
        selection = select(list(launch.agents) or None)
        rollout_id = f"ro-{uuid.uuid4().hex[:12]}"
        task = {"command": shown_command(launch.command)} if launch.task is None else launch.task
        facts = {"agent": agent, "command": shown_command(launch.command)}
        if policy is not None:
            facts["model"] = policy.model
        rollout = new_rollout(task, "dev" if policy else "collect", rollout_id, seed=launch.seed, **facts)
        await store.enqueue_rollouts([rollout])
        leased = await store.dequeue_rollout(f"run-{os.getpid()}", run_id=rollout.run_id)
        assert leased is not None
        attempt = leased.attempt.attempt
        await store.update_attempt(rollout_id, attempt, "running")
        context = tracing.RolloutContext(rollout_id, attempt, agent, selection, capture_content=launch.capture_content)
        root = tracing.root(context)
        trace_id, span_id = root.traceparent.split("-")[1:3]
        wire = SpanInference(rollout_id, attempt, trace_id, span_id, launch.capture_content)
        launched = RecordingProxy(
            store, wire, {name: os.environ.get(_URLS[name]) or base for name, base in PROVIDERS.items()}
        )
        stack.push_async_callback(launched.close)
        server = GatewayServer(gateway, beside=launched.routes())
        await server.start()
        # An answer that breaks off on its way breaks off here too; that is recorded, and no news for the terminal.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        stack.push_async_callback(server.stop)
        access, context.key = gateway.open_attempt(rollout_id, attempt, selection=selection, seed=launch.seed)
        prepared = _Prepared(
            launch, store, url, gateway, launched, rollout, agent, selection, context, root, access
        )  # fmt: skip
        try:
            yield prepared
        finally:
            if not prepared.ended:
                await prepared.end(child.ProcessExit(-signal.SIGINT, "agl run was stopped before the command ended"))


async def _policy(launch: LaunchOptions) -> FrozenPolicy | None:
    """The one that answers."""
    model = None if launch.model is None else policy_directory(launch.model)
    if launch.engine is not None:
        from agl.trainer.engines.vllm import VLLMEngine

        return await FrozenPolicy.connect(VLLMEngine(launch.engine), model)
    return None if model is None else await FrozenPolicy.load(PolicySpec(model=model, name=DEFAULT_POLICY))


def show(facts: dict[str, Any], launch: LaunchOptions) -> None:
    """Print the one line on a rollout to stderr, since stdout is the command's."""
    tokens = "" if facts["input_tokens"] is None else f", {facts['input_tokens']} -> {facts['output_tokens']} tokens"
    failed = f" ({facts['failed_calls']} failed)" if facts["failed_calls"] else ""
    store = "" if launch.store is None else f" --store {launch.store}"
    look = f"agl trace show {facts['rollout_id']}{store}"
    if launch.routed:
        look += f", agl explain {facts['rollout_id']}{store}"
    print(
        f"agl: {facts['rollout_id']} {facts['status']}: {_count(facts['calls'], 'call')}{failed}{tokens}, "
        f"{_count(facts['tools'], 'tool')}; {look}",
        file=sys.stderr,
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
