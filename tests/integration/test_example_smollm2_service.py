"""examples/smollm2/service.py: tau2's tasks, tools and reward, the two agents' conversation, and its recipe."""

from __future__ import annotations

import asyncio
import copy
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from untrained import make_untrained

pytest.importorskip("agent_framework")
pytest.importorskip("agent_framework_openai")

import agl
from agl.mdp.types import Call
from agl.testing.provider import Provider, Reply, Script, serve
from agl.trainer.evaluation.policy_report import PolicyReport
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store
from examples.common import Endpoint
from examples.smollm2 import service_scripts as scripts
from examples.smollm2 import tau2
from examples.smollm2.recipe import learn
from examples.smollm2.service import build, claim, service

SPLITS = [
    pytest.param(domain, split, marks=() if (domain, split) == ("retail", "test") else pytest.mark.night)
    for domain in tau2.DOMAINS
    for split in ("train", "test")
]
IDLE = {("airline", "train"): 13, ("airline", "test"): 6, ("retail", "train"): 5, ("retail", "test"): 2}
"""In how many tasks an assistant that does nothing is right: nothing has to change, and nothing to be said."""


def endpoint(server: Provider) -> Endpoint:
    return Endpoint(server.url, "scripted", "none")


def evaluated(tasks: list[tau2.Task], assistant: Script, directory: Path) -> PolicyReport:
    with serve(scripts.both(tasks, assistant)) as server:
        agent = service(endpoint(server), endpoint(server))
        report = agl.evaluate(agent, tasks, directory=directory, agents="assistant", max_attempts=1, progress=False)
    [policy] = report.policies.values()
    assert policy.failed == 0
    return policy


def idle(task: tau2.Task) -> bool:
    return not tau2.expected_changes(task) and not task["say"]


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.night)])
@pytest.mark.parametrize(("domain", "split"), SPLITS)
def test_the_oracle_earns_one_and_a_null_assistant_only_where_nothing_is_to_be_done(
    domain: str, split: str, every: int, tmp_path: Path
) -> None:
    tasks = tau2.tasks(domain, split)[::every]
    right = evaluated(tasks, scripts.oracle(tasks), tmp_path / "oracle")
    assert [rollout.reward for rollout in right.rollouts] == [1.0] * len(tasks)
    nothing = evaluated(tasks, scripts.null, tmp_path / "null")
    assert {r.task: r.reward for r in nothing.rollouts} == {i: float(idle(task)) for i, task in enumerate(tasks)}


@pytest.mark.parametrize(("domain", "split"), SPLITS)
def test_every_reference_run_earns_the_reward(domain: str, split: str) -> None:
    tasks = tau2.tasks(domain, split)
    for task in tasks:
        desk = tau2.open_environment(task)
        desk.play(task["actions"])
        output = {"changes": desk.changes(), "conversation": said(*task["say"]), "ended": True}
        assert tau2.reward(task, output) == 1.0
        assert tau2.reward(task, {**output, "ended": False}) == 0.0
        assert tau2.reward(task, {**output, "changes": {}}) == float(not tau2.expected_changes(task))
        assert tau2.reward(task, {**output, "conversation": said()}) == float(not task["say"])
    assert sum(map(idle, tasks)) == IDLE[domain, split]


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "text": text} for text in texts]


def test_what_has_to_be_said_counts_in_any_case_without_commas_and_from_the_assistant_alone() -> None:
    task = {"domain": "retail", "actions": [], "say": ["1093.34", "Camera"], "basis": ["COMMUNICATE", "DB"]}
    told: dict[str, Any] = {"changes": {}, "ended": True}
    assert tau2.reward(task, {**told, "conversation": said("The CAMERA costs", "$1,093.34.")}) == 1.0
    assert tau2.reward(task, {**told, "conversation": said("The camera costs $1,093.")}) == 0.0
    by_user = [{"role": "user", "text": "The camera for 1093.34?"}]
    assert tau2.reward(task, {**told, "conversation": by_user}) == 0.0


# -- databases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", tau2.DOMAINS)
def test_rollouts_at_once_never_see_each_others_databases(domain: str) -> None:
    """Eight rollouts make the same change; a second one would be refused, or counted as a change too many."""
    task = next(task for task in tau2.tasks(domain, "train") if len(tau2.expected_changes(task)) > 1)
    before = copy.deepcopy(tau2.database(domain))
    with serve(scripts.both([task], scripts.oracle([task]))) as server:
        program = build(endpoint(server), endpoint(server))

        async def at_once() -> Any:
            return await asyncio.gather(*(program(task) for _ in range(8)))

        outputs = asyncio.run(at_once())
    assert [tau2.reward(task, output) for output in outputs] == [1.0] * 8
    assert tau2.database(domain) == before


def test_a_change_is_seen_in_its_own_rollout_alone() -> None:
    first, second = (tau2.open_environment({"domain": "airline"}) for _ in range(2))
    reservation, user = "EHGLP3", "emma_kim_9957"
    first.play(
        [
            {"name": "cancel_reservation", "arguments": {"reservation_id": reservation}},
            {"name": "send_certificate", "arguments": {"user_id": user, "amount": 50}},
        ]
    )
    assert {table: list(rows) for table, rows in first.changes().items()} == {
        "users": [user],
        "reservations": [reservation],
    }
    look: list[dict[str, Any]] = [{"name": "get_reservation_details", "arguments": {"reservation_id": reservation}}]
    assert ["cancelled" in desk.play(look)[0] for desk in (first, second)] == [True, False]
    assert second.changes() == {}


# -- tools -------------------------------------------------------------------------------------------------------------

NOWHERE = {"address1": "1 A St", "address2": "", "city": "Rome", "state": "NY", "country": "USA", "zip": "13440"}
SWAP = {"order_id": "#W0", "item_ids": ["1"], "new_item_ids": ["2"], "payment_method_id": "cash"}
REFUSED = {
    "airline": [
        ("get_user_details", {"user_id": "nobody"}, "User nobody not found"),
        ("get_reservation_details", {"reservation_id": "R0"}, "Reservation R0 not found"),
        ("get_flight_status", {"flight_number": "F0", "date": "2024-05-20"}, "Flight F0 not found"),
        ("cancel_reservation", {"reservation_id": "R0"}, "Reservation R0 not found"),
        ("send_certificate", {"user_id": "nobody", "amount": 50}, "User nobody not found"),
        ("update_reservation_passengers", {"reservation_id": "R0", "passengers": []}, "Reservation R0 not found"),
        (
            "update_reservation_flights",
            {"reservation_id": "R0", "cabin": "first", "flights": [{"date": "2024-05-20"}], "payment_id": "cash"},
            "Input should be 'basic_economy', 'economy' or 'business'",
        ),
    ],
    "retail": [
        ("find_user_id_by_email", {"email": "nobody@example.com"}, "User not found"),
        ("find_user_id_by_name_zip", {"first_name": "No", "last_name": "Body", "zip": "0"}, "User not found"),
        ("get_user_details", {"user_id": "nobody"}, "User not found"),
        ("get_product_details", {"product_id": "0"}, "Product not found"),
        ("get_item_details", {"item_id": "0"}, "Item not found"),
        ("calculate", {"expression": "2 ** 9"}, "Invalid expression"),
        ("cancel_pending_order", {"order_id": "#W0", "reason": "no longer needed"}, "Order not found"),
        ("modify_pending_order_address", {"order_id": "#W0", **NOWHERE}, "Order not found"),
        ("modify_user_address", {"user_id": "nobody", **NOWHERE}, "User not found"),
        ("modify_pending_order_items", SWAP, "Order not found"),
        ("exchange_delivered_order_items", SWAP, "Order not found"),
    ],
}
"""Calls that a tool refuses, with the reason that the assistant reads."""


@pytest.mark.parametrize("domain", tau2.DOMAINS)
def test_the_assistant_reads_why_a_tool_refused(domain: str) -> None:
    """What a tool refuses, and every tool without its arguments: missing ones are named."""
    task = tau2.tasks(domain, "test")[0]
    desk = tau2.open_environment(task)
    bare = [(name, {}) for name in desk.names if not name.startswith("list_")]
    calls = (*[(name, arguments) for name, arguments, _ in REFUSED[domain]], *bare)

    def assistant(body: dict[str, Any]) -> Reply:
        return Reply("I see.") if body["messages"][-1]["role"] == "tool" else Reply(tools=calls)

    with serve(scripts.both([task], assistant)) as server:
        output = asyncio.run(build(endpoint(server), endpoint(server))(task))
        told = [request.body["messages"] for request in server.seen if request.body["messages"][-1]["role"] == "tool"]
    results = [scripts.text(message) for message in told[0] if message["role"] == "tool"]
    assert len(results) == len(calls)
    for result, (name, _, reason) in zip(results, REFUSED[domain], strict=False):
        assert result.startswith("Error: "), name
        assert reason in result, name
    for result, (name, _) in zip(results[len(REFUSED[domain]) :], bare, strict=True):
        assert f"Invalid arguments for '{name}'" in result
        assert "Field required" in result
    assert output["changes"] == {}
    assert output["ended"]


# -- the conversation --------------------------------------------------------------------------------------------------


def test_the_customer_tells_its_scenario_in_parts_and_ends_the_conversation() -> None:
    task = next(task for task in tau2.tasks("retail", "test") if tau2.expected_changes(task))
    with serve(scripts.both([task], scripts.oracle([task]))) as server:
        output = asyncio.run(build(endpoint(server), endpoint(server))(task))
        systems = {scripts.system(request.body) for request in server.seen}
    heard = [turn["text"] for turn in output["conversation"] if turn["role"] == "user"]
    assert heard == [task["reason"], task["details"], "Yes.", tau2.STOP]
    assert systems == {task["scenario"], tau2.open_environment(task).policy}
    # Who never ends asking is cut off.
    with serve(scripts.both([task], lambda body: Reply("And then?"))) as server:
        output = asyncio.run(build(endpoint(server), endpoint(server), turns=4)(task))
    assert (len(output["conversation"]), output["ended"], tau2.reward(task, output)) == (9, False, 0.0)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with a context that holds tau2's policies and tools, and a short conversation."""
    return make_untrained(tmp_path_factory.mktemp("models") / "long", context=8192)


@pytest.mark.night
def test_the_policy_answers_for_the_assistant_alone(long_model: Path, tmp_path: Path) -> None:
    [task] = tasks = tau2.tasks("retail", "test")[:1]
    with serve(scripts.oracle(tasks)) as assistant, serve(scripts.customer(tasks)) as customer:
        report = agl.evaluate(
            service(endpoint(assistant), endpoint(customer)),
            tasks,
            {"untrained": long_model},
            agents="assistant",
            max_response_tokens=8,
            directory=tmp_path,
            progress=False,
        )
        assert not assistant.seen
        assert {scripts.system(request.body) for request in customer.seen} == {task["scenario"]}
    [rollout] = report.policies["untrained"].rollouts
    calls = re.findall(r"^chat scripted  (\w+)  (policy)?", rollout.transcript, re.MULTILINE)
    assert set(calls) == {("assistant", "policy"), ("customer", "")}


@pytest.mark.night
def test_its_recipe_trains_the_assistant(tmp_path: Path) -> None:
    model = make_untrained(tmp_path / "model", context=24000)  # of tokens that are shorter than SmolLM2's
    options = Namespace(model=str(model), seed=0, short=True, steps=None, threads=1, out=tmp_path, save=False)
    facts = learn("service", replace(claim(options), max_context=24000, max_response_tokens=16), options)
    assert (facts["heldout"], facts["rollouts"], len(facts["measured"])) == (2, 2, 3)

    async def calls(store: Store) -> list[Call]:
        rollouts = await store.query_rollouts(mode="train")
        return [call for rollout in rollouts for call in await store.query_calls(rollout.rollout_id)]

    assert {call.agent for call in read_store(facts["store"], calls)} == {"assistant"}


def test_a_conversation_that_outgrows_the_context_earns_nothing_and_is_no_error(
    long_model: Path, tmp_path: Path
) -> None:
    def talks_on(body: dict[str, Any]) -> Reply:
        return Reply("Hello." if len(body["messages"]) == 2 else "word " * 4000)

    with serve(talks_on) as customer:
        report = agl.evaluate(
            service(endpoint(customer), endpoint(customer)),
            tau2.tasks("airline", "test")[:1],
            {"untrained": long_model},
            agents="assistant",
            max_response_tokens=8,
            directory=tmp_path,
            progress=False,
        )
    [rollout] = report.policies["untrained"].rollouts
    assert (rollout.reward, rollout.error) == (0.0, None)
    assert "Input tokens exceed" in rollout.transcript
