"""examples/customer_service: its grading, its databases, tau2's files, and its program without training."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("strands")

import agl
from agl.errors import DatasetError, RewardError
from agl.testing.provider import Provider, Script, serve
from examples.customer_service import scripts, tasks
from examples.customer_service.__main__ import columns, main, passes
from examples.customer_service.agent import build, chat_model
from examples.customer_service.retail import Retail


def service(assistant: Provider, customer: Provider) -> agl.Agent:
    first, second = (chat_model(server.url, "m", "k", 48) for server in (assistant, customer))
    return agl.wrap(build(first, second, tasks.open_environment, turns=5, calls=4), reward=tasks.reward)


def evaluated(listed: Any, script: Script, directory: Path, customer: Script = scripts.customer, **options: Any) -> Any:
    with serve(script) as assistant, serve(customer) as user:
        report = agl.evaluate(
            service(assistant, user), listed, directory=directory, agents=["assistant"], progress=False, **options
        )
    return report


def test_the_oracle_always_succeeds_and_a_null_agent_never_does(tmp_path: Path) -> None:
    """Whatever the customer errs in is nobody's failure: such a rollout has no reward, and its cause is counted."""
    listed = tasks.held_out(16, seed=0)
    right = evaluated(listed, scripts.oracle, tmp_path / "oracle", samples=4, max_attempts=1).policies["own model"]
    assert right.success.value == 1.0
    assert passes(right) == dict.fromkeys((1, 2, 3, 4), 1.0)
    assert right.failed == 8
    assert all("the user erred" in cause for cause in right.failures)
    nothing = columns(evaluated(listed, scripts.null, tmp_path / "null", max_attempts=1))["own model"]
    assert nothing["pass^1 to pass^1"] == "0.000"
    assert nothing["unseen combination"] == "0.0 % of 4"


@pytest.mark.night
def test_a_beginner_sometimes_succeeds(tmp_path: Path) -> None:
    found = evaluated(tasks.train(48, seed=0), scripts.beginner, tmp_path).policies["own model"].success
    assert 0.1 <= found.value <= 0.5


def test_held_out_tasks_have_other_customers_and_a_combination_of_rules_that_none_was_trained_on() -> None:
    train, held_out = tasks.train(512, seed=0), tasks.held_out(96, seed=0)
    emails = [{e for task in split for e in task["database"]["customers"]} for split in (train, held_out)]
    assert not emails[0] & emails[1]
    assert not any(tasks.is_unseen(task) for task in train)
    assert sum(map(tasks.is_unseen, held_out)) == 24
    assert {rule for task in train for rule in task["rules"]} == {"stranger", "status", "sale", "declines"}
    assert {rows for task in held_out for rows in [sum(map(len, task["database"].values()))]} == {30}
    assert train == tasks.train(512, seed=0) != tasks.train(512, seed=1)


def test_the_short_form_has_cancellations_of_which_some_are_allowed() -> None:
    train, held_out = tasks.cancellations(seed=0)
    emails = [{e for task in split for e in task["database"]["customers"]} for split in (train, held_out)]
    assert not emails[0] & emails[1]
    for split in (train, held_out):
        assert {tuple(task["rules"]) for task in split} == {(), ("status",), ("declines",)}
        assert {task["actions"][-1]["name"] for task in split} == {"get_order", "cancel_order"}


def test_each_rollout_works_on_a_database_of_its_own() -> None:
    task = next(task for task in tasks.train(32, seed=0) if len(task["actions"]) == 3)
    before = json.dumps(task)
    with serve(scripts.oracle) as assistant, serve(scripts.customer) as user:
        first, second = (chat_model(server.url, "m", "k") for server in (assistant, user))
        program = build(first, second, tasks.open_environment)

        async def at_once() -> Any:
            return await asyncio.gather(*(program(task) for _ in range(8)))

        outputs = asyncio.run(at_once())
    assert [tasks.reward(task, output) for output in outputs] == [1.0] * 8
    assert json.dumps(task) == before


@pytest.mark.night
def test_an_agent_serves_one_event_loop_after_the_other(tmp_path: Path) -> None:
    """Recording, training and evaluation each have their own; a connection kept from the first fails in the next."""
    listed = tasks.train(4, seed=0)
    with serve(scripts.oracle) as assistant, serve(scripts.customer) as user:
        agent = service(assistant, user)
        for i in range(3):
            report = agl.evaluate(agent, listed, directory=tmp_path / str(i), max_attempts=1, progress=False)
            assert [r.error for r in report.policies["own model"].rollouts] == [None] * 4


def test_the_customer_keeps_its_own_endpoint_while_the_assistant_is_the_policy(
    untrained_model: Path, tmp_path: Path
) -> None:
    with serve(scripts.oracle) as assistant, serve(scripts.customer) as user:
        agl.evaluate(
            service(assistant, user),
            tasks.held_out(1, seed=2),
            {"untrained": untrained_model},
            agents=["assistant"],
            max_response_tokens=8,
            directory=tmp_path,
            progress=False,
        )
        assert not assistant.seen
        assert user.seen
    assert all(request.body["messages"][0]["role"] == "system" for request in user.seen)


SAID = [{"role": "assistant", "text": "Hi! How can I help you today?"}]


@pytest.mark.parametrize(
    ("turns", "errors"),
    [
        (("user", "Cancel mug. I am ann.lamb."), []),
        (("user", "Cancel lamp."), ["made up"]),
        (("assistant", "Do you mean lamp?", "user", "Yes, lamp."), []),
        (("assistant", "Cancel it?", "user", "yes."), []),
        (("assistant", "Cancel it?", "user", "No!"), ["wrong answer"]),
        (("assistant", "Cancel it?", "user", "###STOP###"), ["gave up"]),
        (("assistant", "Done.", "user", "###STOP###"), []),
        (("user", "###OUT-OF-SCOPE###"), ["out of scope"]),
    ],
)
def test_what_counts_as_the_users_error(turns: tuple[str, ...], errors: list[str]) -> None:
    scenario = "You want to cancel order mug.\nYour email is ann.lamb.\nWhen asked to confirm the change, say yes."
    said = SAID + [{"role": role, "text": text} for role, text in zip(turns[::2], turns[1::2], strict=True)]
    task = {"domain": "shop", "scenario": scenario}
    assert tasks.user_errors(task, said) == errors
    if errors:
        with pytest.raises(RewardError, match=f"the user erred: {errors[0]}"):
            tasks.reward(task, {"conversation": said, "changes": {}})


def test_debug_tells_three_conversations_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--debug", "--out", str(tmp_path / "run")])
    told = capsys.readouterr().out
    assert told.count("== task ") == 3
    assert "execute_tool find_customer" in told
    assert not (tmp_path / "run" / "grpo").exists()


# -- tau2's retail: generated files in its format ----------------------------------------------------------------------


def order(order_id: str, status: str, paid_by: str) -> dict[str, Any]:
    item = {"name": "Mug", "product_id": "1000000001", "item_id": "2000000001", "price": 10.5, "options": {"size": "S"}}
    return {
        "order_id": order_id, "user_id": "ann_lee_1", "address": ADDRESS, "items": [item], "status": status,
        "fulfillments": [],
        "payment_history": [{"transaction_type": "payment", "amount": 10.5, "payment_method_id": paid_by}],
    }  # fmt: skip


ADDRESS = {"address1": "1 A St", "address2": "", "city": "Rome", "country": "USA", "state": "NY", "zip": "13440"}
MOVED = {**ADDRESS, "address1": "2 B St"}
VARIANTS = [("2000000001", "S", True, 10.5), ("2000000002", "M", True, 12.0), ("2000000003", "L", False, 14.0)]
DATABASE = {
    "products": {
        "1000000001": {
            "name": "Mug",
            "product_id": "1000000001",
            "variants": {
                i: {"item_id": i, "options": {"size": size}, "available": available, "price": price}
                for i, size, available, price in VARIANTS
            },
        }
    },
    "users": {
        "ann_lee_1": {
            "user_id": "ann_lee_1",
            "name": {"first_name": "Ann", "last_name": "Lée"},
            "address": ADDRESS,
            "email": "ann@example.com",
            "payment_methods": {
                "paypal_1": {"source": "paypal", "id": "paypal_1"},
                "gift_card_1": {"source": "gift_card", "id": "gift_card_1", "balance": 11.0},
            },
            "orders": ["#W1", "#W2", "#W3"],
        }
    },
    "orders": {
        "#W1": order("#W1", "pending", "gift_card_1"),
        "#W2": order("#W2", "delivered", "paypal_1"),
        "#W3": order("#W3", "pending", "paypal_1"),
    },
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("find_user_id_by_name_zip", {"first_name": "ann", "last_name": "Lee", "zip": "13440"}),
    ("get_order_details", {"order_id": "#W1"}),
    ("cancel_pending_order", {"order_id": "#W1", "reason": "no longer needed"}),
]


def task_of(number: int, calls: list[tuple[str, dict[str, Any]]], say: list[str]) -> dict[str, Any]:
    actions = [
        {"action_id": f"{number}_{i}", "name": n, "arguments": a, "info": None} for i, (n, a) in enumerate(calls)
    ]
    instructions = {
        "domain": "retail", "reason_for_call": "You want order #W1 cancelled.", "known_info": "You are Ann Lee, 13440.",
        "unknown_info": "You do not know your email.", "task_instructions": "You are brief.",
    }  # fmt: skip
    return {
        "id": str(number),
        "user_scenario": {"persona": None, "instructions": instructions},
        "initial_state": None,
        "evaluation_criteria": {
            "actions": actions, "communicate_info": say, "nl_assertions": None, "reward_basis": ["DB", "NL_ASSERTION"],
        },
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "data"
    place = root / "tau2" / "domains" / "retail"
    place.mkdir(parents=True)
    (place / "db.json").write_text(json.dumps(DATABASE))
    (place / "policy.md").write_text("# Policy\nBe kind.")
    (place / "tasks.json").write_text(json.dumps([task_of(0, CALLS, ["10.5"]), task_of(1, CALLS[:2], ["pending"])]))
    (place / "split_tasks.json").write_text(json.dumps({"train": ["0"], "test": ["1"]}))
    monkeypatch.setenv("TAU2_DATA_DIR", str(root))
    return place


@pytest.mark.night
def test_retail_tasks_run_on_the_users_files(folder: Path, tmp_path: Path) -> None:
    assert tasks.retail_folder() == folder
    [task] = tasks.retail(folder, "train")
    assert [t["id"] for t in tasks.retail(folder, "base")] == ["0", "1"]

    def customer(body: dict[str, Any]) -> Any:
        assert "You want order #W1 cancelled.\nYou are Ann Lee, 13440." in str(body["messages"][0]["content"])
        heard = body["messages"][-1]["content"]
        return scripts.Reply("###STOP###" if "Done" in str(heard) else "Please cancel #W1. Ann Lee, 13440.")

    def success(script: Callable[..., Any], name: str) -> float:
        report = evaluated([task], script, tmp_path / name, customer, samples=2)
        return report.policies["own model"].success.value

    assert success(scripts.replays(task["actions"], task["say"]), "gold") == 1.0
    assert success(scripts.replays(task["actions"], []), "says nothing") == 0.0
    assert success(scripts.replays(task["actions"][:2], task["say"]), "does nothing") == 0.0
    assert success(scripts.null, "null") == 0.0


@pytest.mark.parametrize(
    ("name", "arguments", "changed"),
    [
        ("cancel_pending_order", {"order_id": "#W1", "reason": "ordered by mistake"}, {"orders", "users"}),
        ("cancel_pending_order", {"order_id": "#W1", "reason": "too dear"}, "Invalid reason"),
        ("cancel_pending_order", {"order_id": "#W2", "reason": "ordered by mistake"}, "Non-pending"),
        ("modify_pending_order_address", {"order_id": "#W1", **MOVED}, {"orders"}),
        ("modify_pending_order_address", {"order_id": "#W2", **MOVED}, "Non-pending"),
        ("modify_pending_order_payment", {"order_id": "#W3", "payment_method_id": "gift_card_1"}, {"orders", "users"}),
        ("modify_pending_order_payment", {"order_id": "#W3", "payment_method_id": "paypal_1"}, "different"),
        ("modify_user_address", {"user_id": "ann_lee_1", **MOVED}, {"users"}),
        ("get_item_details", {"item_id": "2000000009"}, "Item not found"),
        ("find_user_id_by_email", {"email": "nobody@example.com"}, "User not found"),
        ("calculate", {"expression": "2 ** 9"}, "Invalid expression"),
    ],
)
def test_retail_tools_change_what_they_name_or_refuse(
    name: str, arguments: dict[str, Any], changed: set[str] | str
) -> None:
    shop = Retail("", DATABASE)
    if isinstance(changed, str):
        with pytest.raises(ValueError, match=changed):
            getattr(shop, name)(**arguments)
        assert shop.changes() == {}
    else:
        getattr(shop, name)(**arguments)
        assert set(shop.changes()) == changed


def test_retail_items_are_replaced_by_available_ones_of_their_product_and_the_difference_is_paid() -> None:
    shop, swap = Retail("", DATABASE), {"item_ids": ["2000000001"], "payment_method_id": "gift_card_1"}
    shop.modify_pending_order_items(order_id="#W1", new_item_ids=["2000000002"], **swap)
    changed = shop.changes()
    assert changed["orders"]["#W1"]["items"][0]["price"] == 12.0
    assert changed["orders"]["#W1"]["status"] == "pending (item modified)"
    assert changed["users"]["ann_lee_1"]["payment_methods"]["gift_card_1"]["balance"] == 9.5
    for order_id, new in (("#W1", "2000000001"), ("#W3", "2000000003"), ("#W3", "2000000001")):
        with pytest.raises(ValueError, match=r"Non-pending|available|different"):
            shop.modify_pending_order_items(order_id=order_id, new_item_ids=[new], **swap)
    shop.exchange_delivered_order_items(order_id="#W2", new_item_ids=["2000000002"], **swap)
    assert shop.changes()["orders"]["#W2"]["exchange_price_difference"] == 1.5
    with pytest.raises(ValueError, match="Non-delivered"):
        shop.return_delivered_order_items(order_id="#W2", **swap)


def test_retail_returns_go_to_the_original_payment_or_a_gift_card() -> None:
    item = {"order_id": "#W2", "item_ids": ["2000000001"]}
    for method in ("paypal_1", "gift_card_1"):
        shop = Retail("", DATABASE)
        shop.return_delivered_order_items(**item, payment_method_id=method)
        assert shop.changes()["orders"]["#W2"]["status"] == "return requested"
    other = json.loads(json.dumps(DATABASE))
    other["orders"]["#W2"]["payment_history"][0]["payment_method_id"] = "gift_card_1"
    with pytest.raises(ValueError, match="original payment method"):
        Retail("", other).return_delivered_order_items(**item, payment_method_id="paypal_1")


def test_incomplete_files_and_unknown_splits_are_errors(folder: Path) -> None:
    with pytest.raises(DatasetError, match="no split 'tset'"):
        tasks.retail(folder, "tset")
    (folder / "db.json").unlink()
    with pytest.raises(DatasetError, match=r"there is no db\.json"):
        tasks.retail_folder()


@pytest.mark.skipif("TAU2_DATA_DIR" not in os.environ, reason="needs the data folder of tau2-bench")
def test_the_gold_runs_of_tau2s_own_files_earn_the_reward() -> None:
    folder = tasks.retail_folder()
    assert folder is not None
    for task in tasks.retail(folder, "base"):
        shop = tasks.open_environment(task)
        shop.play(task["actions"])
        said = [*SAID, {"role": "user", "text": "Hi."}, {"role": "assistant", "text": " ".join(task["say"])}]
        assert tasks.reward(task, {"changes": shop.changes(), "conversation": said}) == 1.0, task["id"]
