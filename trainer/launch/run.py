"""`agl run`: one command as one rollout, recorded on its own models or answered by a policy."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from agl import semconv, tracing
from agl.agents.prompts import PromptUse, load_prompts, replacements
from agl.agents.resources import PromptTemplate, Resource
from agl.errors import ConfigError
from agl.instrument import startup
from agl.mdp.selection import DEFAULT_POLICY, Selection, select
from agl.mdp.spans import Span
from agl.texts import printable
from agl.tracing import propagation
from agl.tracing.inferred import SpanInference, completed, totals
from agl.tracing.propagation import AttemptEnvironment
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.launch import child, harnesses
from agl.trainer.local.policy import PolicySpec
from agl.trainer.policies.frozen import FrozenPolicy
from agl.trainer.processes.environment import child_environment
from agl.trainer.report.progress import Progress
from agl.trainer.runners.command import program_name
from agl.trainer.runners.dotenv import dotenv_names
from agl.trainer.runners.recording_proxy import RecordingProxy, client_variables, left_alone, provider_bases
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.collect import new_rollout, shown_command
from agl.trainer.store.location import store_url
from agl.trainer.store.lost_answers import mark_lost_answers

ENGINE_KEY = "VLLM_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What to run, and how.

    Attributes:
        command: its words.
        agent: the name for calls that no adapter names; the program's name if None.
        store: URL or path; AGL_STORE or the default if None.
        task: any JSON value; the command gets it as AGL_TASK.
        model: the directory of a Hugging Face model or a checkpoint that answers the selected agents.
        engine: the URL
            of a `vllm serve` that answers them; tokenizer and chat template then come from `model`. Without both
            the command is recorded on its own models. agents: names and globs of the selected agents; all if empty.
        prompts: a directory of `save_prompts`: its system prompts are put in the place of the agents' own.
        seed: of the policy's sampling.
        capture_content: whether texts are recorded.
        quiet: show no progress.
    """

    command: Sequence[str]
    agent: str | None = None
    store: str | None = None
    task: Any = None
    model: str | None = None
    engine: str | None = None
    agents: Sequence[str] = ()
    prompts: Path | None = None
    seed: int = 0
    capture_content: bool = True
    quiet: bool = False

    @property
    def routed(self) -> bool:
        """Whether a policy answers."""
        return self.model is not None or self.engine is not None


def run_command(options: LaunchOptions) -> tuple[dict[str, Any], int]:
    """Run a command to its end. From the main thread.

    Returns:
        The rollout's facts as JSON values, and the exit status for the shell.

    Raises:
        AglError: the command was not started: there is no such model, the store cannot be opened, ...
    """
    if options.agents and not options.routed:
        raise ConfigError(
            "--agents selects the agents that a policy answers",
            hint="name the policy with --model DIR, or --engine URL",
        )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_opened(options)) as opened,
        # From the rollout's beginning until its end is recorded, so that no signal leaves it running.
        child.ForwardedSignals() as signals,
        portal.wrap_async_context_manager(_command_rollout(options, opened)) as rollout,
    ):
        harness = rollout.harness
        words, environment = harness.start(rollout) if harness else (options.command, rollout.environment())
        process_exit = child.run_with(signals, words, environment)
        return portal.call(rollout.end, process_exit), process_exit.exit_status


@dataclass(eq=False)
class Opened:
    """What a command's rollout needs; a policy is loaded."""

    prompts: Mapping[str, Resource]
    url: str
    store: Store
    gateway: Gateway
    policy: FrozenPolicy | None
    harness: Any


@dataclass(eq=False)
class CommandRollout:
    """A rollout that is ready for its command."""

    options: LaunchOptions
    prompts: Mapping[str, Resource]
    store: Store
    url: str
    gateway: Gateway
    proxy: RecordingProxy
    agent: str
    selection: Selection
    context: tracing.RolloutContext
    root: tracing.Scope
    access: Access
    harness: Any
    ended: bool = False

    def environment(self) -> dict[str, str]:
        """The command's environment: that of this process without agl's keys, with the attempt's addresses and keys."""
        routed = self.options.routed
        if routed and self.selection.policy_for(self.agent) is not None:
            replacing = propagation.gateway_variables(self.access.url, self.agent, self.context.key, os.environ)
        else:
            urls = self.proxy.provider_urls(self.gateway.base_url, self.agent)
            replacing = client_variables(os.environ, urls, self._dotenv())
        attempt = AttemptEnvironment(
            rollout_id=self.context.rollout_id,
            attempt=self.context.attempt,
            agent=self.agent,
            traceparent=self.root.traceparent,
            spans_url=self.proxy.spans_url(self.gateway.base_url),
            spans_key=self.proxy.secret,
            gateway_url=self.gateway.base_url if routed else None,
            key=self.context.key if routed else "",
            agents=tuple(self.options.agents) or ("*",),
            capture_content=self.options.capture_content,
            prompts=None if self.options.prompts is None else str(self.options.prompts.resolve()),
            replaced={name: os.environ.get(name) for name in replacing},
        )
        environment = child_environment(own_program=True)
        if self.options.engine is not None:
            # The policy's server may let the holder of its key do more than the gateway does.
            environment.pop(ENGINE_KEY, None)
        paths = [str(Path(startup.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **environment,
            **replacing,
            **propagation.variables(attempt, self.options.task),
            "PYTHONPATH": os.pathsep.join(paths),
            **propagation.without_proxy(os.environ),
        }

    async def end(self, process_exit: child.ProcessExit) -> dict[str, Any]:
        """Record how the command ended; the rollout's facts."""
        self.ended = True
        rollout_id = self.context.rollout_id
        attempt = self.context.attempt
        calls = await self.gateway.close_attempt(rollout_id, attempt)
        await self.proxy.close()
        spans = await self.store.query_spans(rollout_id, attempt)
        spans = completed(spans, await mark_lost_answers(self.store, calls, spans))
        error = process_exit.error
        if error is not None:
            exceptions = [s for s in spans if s.operation == semconv.EXCEPTION and s.status_message]
            if process_exit.status > 0 and exceptions:
                error = f"{exceptions[-1].status_message} ({error})"
        seen = [s.agent for s in spans if s.operation == semconv.CHAT and s.agent is not None]
        unmatched = list(self.selection.unmatched(seen)) if self.options.agents else []
        tracing.end(self.root, error=error, attributes={semconv.EXIT_STATUS: process_exit.status})
        tracing.close(self.context)
        await self.store.add_spans(list(self.context.spans))
        status = "succeeded" if error is None else "failed"
        await self.store.update_attempt(rollout_id, attempt, status, error=error)
        return {
            "rollout_id": rollout_id,
            "store": self.url,
            "status": status,
            "exit_status": process_exit.status,
            "error": error,
            **totals(spans),
            **({"left_alone": left} if (left := self._left_alone()) is not None else {}),
            **({"unused_prompts": _unused(self.prompts, spans)} if self.prompts else {}),
            **({"unmatched_agents": unmatched} if unmatched else {}),
        }

    def _left_alone(self) -> str | None:
        """Which of the command's clients were not recorded; None where agl in the command itself recorded them."""
        return None if self.proxy.sends_spans else left_alone(os.environ, self._dotenv())

    def _dotenv(self) -> frozenset[str]:
        return dotenv_names(self.options.command, Path.cwd())


@contextlib.asynccontextmanager
async def _opened(options: LaunchOptions) -> AsyncIterator[Opened]:
    url = store_url(options.store)
    prompts = {} if options.prompts is None else load_prompts(options.prompts)
    async with contextlib.AsyncExitStack() as stack:
        harness = harnesses.find(options.command)
        if harness is not None:
            stack.callback(harness.close)
        store = await open_store(url)
        stack.push_async_callback(store.close)
        gateway = Gateway(store, capture_content=options.capture_content)
        policy = await _policy(options)
        if policy is not None:
            stack.push_async_callback(policy.close)
            policy.serve(gateway, DEFAULT_POLICY)
        yield Opened(prompts, url, store, gateway, policy, harness)


@contextlib.asynccontextmanager
async def _command_rollout(options: LaunchOptions, opened: Opened) -> AsyncIterator[CommandRollout]:
    store = opened.store
    gateway = opened.gateway
    policy = opened.policy
    harness = opened.harness
    system_prompts = replacements(opened.prompts)
    async with contextlib.AsyncExitStack() as stack:
        agent = options.agent or (harness.name if harness else program_name(options.command))
        selection = select(list(options.agents) or None)
        rollout_id = f"ro-{uuid.uuid4().hex[:12]}"
        command = shown_command(options.command, content=options.capture_content)
        task = {"command": command} if options.task is None else options.task
        facts = {"agent": agent, "command": command}
        if policy is not None:
            facts["model"] = policy.model
        if options.prompts is not None:
            facts["prompts"] = str(options.prompts)
        new = new_rollout(task, "dev" if policy else "collect", rollout_id, seed=options.seed, **facts)
        await store.enqueue_rollouts([new])
        attempted_rollout = await store.dequeue_rollout(f"run-{os.getpid()}", run_id=new.run_id)
        assert attempted_rollout is not None
        attempt = attempted_rollout.attempt.attempt
        await store.update_attempt(rollout_id, attempt, "running")
        context = tracing.RolloutContext(rollout_id, attempt, agent, selection, capture_content=options.capture_content)
        root = tracing.root(context)
        trace_id, span_id = root.traceparent.split("-")[1:3]
        inference = SpanInference(rollout_id, attempt, trace_id, span_id, options.capture_content)
        providers = provider_bases(os.environ) | (harness.providers if harness else {})
        proxy = RecordingProxy(store, inference, providers, system_prompts)
        stack.push_async_callback(proxy.close)
        server = GatewayServer(gateway, extra_routes=[*proxy.routes(), *(harness.routes if harness else ())])
        await server.start()
        # A provider's answer that breaks off breaks off here, too: that is recorded and need not be logged.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        stack.push_async_callback(server.stop)
        access, context.key = gateway.open_attempt(
            rollout_id, attempt, selection=selection, seed=options.seed, system_prompts=system_prompts
        )
        rollout = CommandRollout(
            options, opened.prompts, store, opened.url, gateway, proxy, agent, selection, context, root, access, harness
        )
        try:
            yield rollout
        finally:
            if not rollout.ended:
                await rollout.end(child.ProcessExit(-signal.SIGINT, "agl run was stopped before the command ended"))


def _unused(prompts: Mapping[str, Resource], spans: Sequence[Span]) -> list[str]:
    """A sentence for each prompt that the command did not get."""
    use = PromptUse(prompts)
    use.add(spans)
    templates = [name for name, prompt in prompts.items() if isinstance(prompt, PromptTemplate)]
    return [
        *use.unused(),
        *(
            f"the prompt template {name!r} was not used: it is for agents that take it as an argument"
            for name in templates
        ),
    ]


async def _policy(options: LaunchOptions) -> FrozenPolicy | None:
    """The policy that answers the selected agents, if any."""
    if options.engine is not None:
        from agl.trainer.engines.vllm import VLLMEngine

        return await FrozenPolicy.connect(VLLMEngine(options.engine), options.model)
    if options.model is None:
        return None
    return await FrozenPolicy.load(PolicySpec(options.model, DEFAULT_POLICY), progress=Progress(not options.quiet))


def show(facts: dict[str, Any], options: LaunchOptions) -> None:
    """Print one line about the rollout to stderr, since stdout is the command's."""
    tokens = "" if facts["input_tokens"] is None else f", {facts['input_tokens']} -> {facts['output_tokens']} tokens"
    failed = f" ({facts['failed_calls']} failed)" if facts["failed_calls"] else ""
    store = "" if options.store is None else f" --store {options.store}"
    commands = f"agl trace show {facts['rollout_id']}{store}"
    if options.routed:
        commands += f", agl explain {facts['rollout_id']}{store}"
    line = (
        f"agl: {facts['rollout_id']} {facts['status']}: {_count(facts['calls'], 'call')}{failed}{tokens}, "
        f"{_count(facts['tools'], 'tool')}; {commands}"
    )
    print(printable(line), file=sys.stderr)
    if "left_alone" in facts:
        print(printable(f"agl: {facts['left_alone']}"), file=sys.stderr)
    for unused in facts.get("unused_prompts", ()):
        print(printable(f"agl: {unused}"), file=sys.stderr)
    if unmatched := facts.get("unmatched_agents"):
        agents = ", ".join(map(repr, facts["agents"])) or "none"
        text = f"agl: --agents {', '.join(unmatched)}: no agent that it selects made a call; those that did: {agents}"
        print(printable(text), file=sys.stderr)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
