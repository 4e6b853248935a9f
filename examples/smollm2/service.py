"""tau2's customer service of an airline and a shop, with Microsoft Agent Framework: the assistant is trained.

The customer is another agent of the framework. Only the assistant is trained; the customer keeps its own model, here a
script that reads the scenario aloud. The expert is a script that knows the reference runs.

Policy and tools fill more than half of SmolLM2's context of 8,192 tokens, counted with its tokenizer:

| domain  | policy | first prompt, with tools | reference runs that fit: train | test     |
|---------|--------|--------------------------|--------------------------------|----------|
| airline | 1,776  | 4,377 to 4,455           | 28 of 30                       | 19 of 20 |
| retail  | 1,540  | 4,516 to 4,727           | 53 of 74                       | 33 of 40 |

An assistant that does nothing and says nothing is right in 19 of airline's 50 tasks and in 7 of retail's 114, which
require neither a change nor a statement.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from agent_framework import Agent, FunctionTool, tool
from agent_framework.openai import OpenAIChatCompletionClient

import agl
from examples import common
from examples.customer_service.environment import Environment
from examples.smollm2 import service_scripts as scripts
from examples.smollm2 import tau2
from examples.smollm2.recipe import Claim

GREETING = "Hi! How can I help you today?"
CONTEXT = 8192
"""SmolLM2's, in tokens."""
LONGEST = 7000
"""Longest reference run that is trained, in characters, two to a token or so: longer ones do not fit into `CONTEXT`."""

Conversation = Callable[[tau2.Task], Coroutine[Any, Any, dict[str, Any]]]


def build(assistant: common.Endpoint, customer: common.Endpoint, *, turns: int = 20, calls: int = 30) -> Conversation:
    """The program: task -> what changed in the database, what was said, and whether the customer ended it.

    Args:
        assistant, customer: whose model each agent is.
        turns: messages of the customer at most. calls: of the assistant's model within one of its turns at most.
    """
    assistant_client, customer_client = chat_client(assistant, calls), chat_client(customer, calls)

    async def customer_service(task: tau2.Task) -> dict[str, Any]:
        desk = tau2.open_environment(task)
        tools = [unbound.__get__(desk) for unbound in domain_tools(type(desk))]
        agents = {
            "user": Agent(customer_client, task["scenario"], name="customer"),
            "assistant": Agent(assistant_client, desk.policy, name="assistant", tools=tools),
        }
        sessions = {role: agent.create_session() for role, agent in agents.items()}
        said = [{"role": "assistant", "text": GREETING}]
        ended = False
        for turn in range(2 * turns):
            role = ("user", "assistant")[turn % 2]
            answer = await agents[role].run(said[-1]["text"], session=sessions[role])
            said.append({"role": role, "text": answer.text})
            if ended := role == "user" and any(ending in answer.text for ending in tau2.ENDINGS):
                break
        return {"changes": desk.changes(), "conversation": said, "ended": ended}

    return customer_service


@functools.cache
def domain_tools(domain: type[Environment]) -> tuple[FunctionTool, ...]:
    """A domain's methods as tools, still unbound: making their schemas takes too long to do it in each rollout."""
    methods: list[Callable[..., str]] = [getattr(domain, name) for name in domain.names]
    return tuple(tool(method, description=inspect.getdoc(method)) for method in methods)


def chat_client(endpoint: common.Endpoint, calls: int) -> OpenAIChatCompletionClient:
    """A model of a server that speaks OpenAI's protocol."""
    client = OpenAIChatCompletionClient(
        model=endpoint.model,
        base_url=endpoint.url,
        api_key=endpoint.key,
        # Recording, training and evaluation each have an event loop, which a connection kept open would belong to.
        default_headers={"Connection": "close"},
    )
    client.function_invocation_configuration.update(
        max_iterations=calls,
        max_consecutive_errors_per_request=10,  # 3 by default; small models err often, and the next try may be right
        include_detailed_errors=True,  # the assistant has to know why a tool refused
        allow_concurrent_invocation=False,  # the calls of one message change the database in their order
    )
    return client


def service(assistant: common.Endpoint, customer: common.Endpoint, **limits: int) -> agl.Agent:
    """The program with its reward."""
    return agl.wrap(build(assistant, customer, **limits), reward=tau2.reward)


def claim(options: argparse.Namespace) -> Claim:
    """The program's parts: tau2's training tasks are imitated and tried, and its test tasks measure."""
    train, test = ([task for domain in tau2.DOMAINS for task in tau2.tasks(domain, s)] for s in ("train", "test"))
    train = [task for task in train if tau2.reference_length(task) <= LONGEST]
    if options.short:  # tasks in which the database changes: in others an assistant that does nothing may be right
        train, test = ([task for task in some if tau2.expected_changes(task)] for some in (train, test))
    return Claim(
        build=lambda endpoint: service(endpoint, endpoint), train=train, heldout=test, recorded=train,
        expert=scripts.both(train, scripts.oracle(train)), others=scripts.customer([*train, *test]),
        agents=["assistant"], imitation={"epochs": 3, "batch_size": 8, "learning_rate": 2e-5}, steps=4,
        learning_rate=1e-5, max_context=CONTEXT, max_response_tokens=256, short=2,
        # On two cores conversations took more than the usual ten minutes.
        more={"n_workers": 64 if torch.cuda.is_available() else 16, "timeout": 3600.0},
    )  # fmt: skip
