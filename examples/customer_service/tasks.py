"""The tasks, generated or of tau2's retail files, and how both sides of a conversation are graded.

A task is JSON: `domain`, `scenario` (the customer's system prompt), `actions` (the gold run's tool calls), `say` (what
the assistant has to tell); those of the small form have their `database` and what the customer `knows`, too.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agl.errors import DatasetError, RewardError
from examples.customer_service.agent import ENDINGS, STOP
from examples.customer_service.environment import Environment
from examples.customer_service.retail import Retail, read_database, read_policy
from examples.customer_service.shop import POLICY, Shop

Task = dict[str, Any]

ITEMS = (
    "mug", "lamp", "chair", "kettle", "radio", "clock", "scarf", "tent", "rug", "vase", "fan", "pen", "desk", "sofa",
    "bike", "helmet", "jacket", "boots",
)  # fmt: skip
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Tokyo")
FIRST_NAMES = (
    "ann", "ben", "cleo", "dan", "eve", "finn", "gus", "hope", "ida", "jack", "kim", "leo", "mia", "ned", "olga", "pia",
)  # fmt: skip
LAST_NAMES = (
    "ash", "beck", "cole", "dale", "ford", "gray", "hale", "king", "lamb", "marsh", "nash", "page", "reed", "snow",
    "todd", "wood",
)  # fmt: skip
ALLOWED = {"cancel": ("pending",), "move": ("pending",), "return": ("delivered",)}
STATUSES = ("pending", "delivered", "sent")
CUSTOMERS = 12
UNSEEN = ("sale", "declines")
"""The combination of rules that occurs in no training task: a refund as voucher, to which the customer says no."""


# -- the small form ---------------------------------------------------------------------------------------------------


def train(n: int, seed: int) -> list[Task]:
    """Training tasks: every rule, but no task with both rules of `UNSEEN`."""
    rng = random.Random(f"train {seed}")
    return [_task(rng, _emails("train"), unseen=False) for _ in range(n)]


def held_out(n: int, seed: int, unseen: float = 0.25) -> list[Task]:
    """Tasks of customers that occur in no training task; a share `unseen` of them with the unseen combination."""
    rng = random.Random(f"held out {seed}")
    return [_task(rng, _emails("held out"), unseen=i < unseen * n) for i in range(n)]


def is_unseen(task: Task) -> bool:
    return set(UNSEEN) <= set(task.get("rules", ()))


FEW = 7
"""First names, last names, and items of the short form."""


def cancellations(seed: int, train: int = 200, held_out: int = 72) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks of the short form: customers of the shop cancel orders at regular terms.

    What has to be copied is one of few words, which a policy from scratch learns in a minute. Held-out customers occur
    in no training task.
    """

    def split(name: str, size: int) -> list[Task]:
        rng = random.Random(f"cancellations, {name} {seed}")
        names = {*FIRST_NAMES[:FEW], *LAST_NAMES[:FEW]}
        emails = [email for email in _emails(name) if names.issuperset(email.split("."))]
        found = filter(_is_cancellation, (_task(rng, emails, unseen=False) for _ in itertools.count()))
        return list(itertools.islice(found, size))

    return split("train", train), split("held out", held_out)


def _is_cancellation(task: Task) -> bool:
    """Whether a known caller, who tells the email at once, wants a refund to the card."""
    order = next((a["arguments"]["order"] for a in task["actions"] if a["name"] == "get_order"), None)
    return (
        order in ITEMS[:FEW]
        and task["database"]["orders"][order]["terms"] == "regular"
        and "want to cancel" in task["scenario"]
        and "tell it at once" in task["scenario"]
    )


@functools.cache
def _emails(split: str) -> tuple[str, ...]:
    """The customers of a split: the same for all seeds, and none of another split, though each of their names is in
    both."""
    emails = [f"{first}.{last}" for first in FIRST_NAMES for last in LAST_NAMES]
    random.Random("emails").shuffle(emails)
    return tuple(emails[64:] if split == "train" else emails[:64])


def _task(rng: random.Random, emails: Sequence[str], *, unseen: bool) -> Task:
    *registered, stranger = rng.sample(emails, CUSTOMERS + 1)
    customers = {email: {"id": f"c{number}"} for number, email in enumerate(registered, 1)}
    orders = {
        item: {
            "owner": rng.choice(registered),
            "price": rng.randint(2, 9),
            "terms": rng.choice(("sale", "regular")),
            "status": rng.choice(STATUSES),
            "city": rng.choice(CITIES),
        }
        for item in ITEMS
    }
    kind = rng.choice(("cancel", "return") if unseen else tuple(ALLOWED))
    order, row = rng.choice(list(orders.items()))
    known = unseen or rng.random() < 0.85
    allowed = unseen or rng.random() < 0.75
    row["status"] = rng.choice([s for s in STATUSES if (s in ALLOWED[kind]) == allowed])
    declines = unseen or rng.random() < 0.3
    if unseen:
        row["terms"] = "sale"
    elif declines and kind != "move":
        row["terms"] = "regular"
    sale = row["terms"] == "sale" and kind != "move"
    email = row["owner"] if known else stranger
    city = rng.choice([city for city in CITIES if city != row["city"]])
    refund = None if kind == "move" else "voucher" if sale else "card"
    rules = [
        rule
        for rule, applies in (
            ("stranger", not known),
            ("status", known and not allowed),
            ("sale", known and allowed and sale),
            ("declines", known and allowed and declines),
        )
        if applies
    ]
    look_ups: list[Task] = [{"name": "find_customer", "arguments": {"email": email}}]
    if not known:
        actions, say = [*look_ups, {"name": "transfer", "arguments": {}}], []
    else:
        look_ups.append({"name": "get_order", "arguments": {"order": order}})
        change = {"order": order, **({"refund": refund} if refund else {"city": city})}
        actions = look_ups + ([{"name": f"{kind}_order", "arguments": change}] if allowed and not declines else [])
        say = ([str(row["price"]), refund] if refund else [order, city]) if allowed else [row["status"]]
    return {
        "domain": "shop",
        "scenario": _scenario(rng, kind, order, email, city, declines),
        "actions": actions,
        "say": say,
        "rules": rules,
        "database": {"customers": customers, "orders": orders, "transfers": {}},
    }


def _scenario(rng: random.Random, kind: str, order: str, email: str, city: str, declines: bool) -> str:
    wish = {
        "cancel": f'cancel order "{order}"',
        "return": f'return order "{order}"',
        "move": f'move order "{order}" to "{city}"',
    }[kind]
    when = "at once" if rng.random() < 0.6 else "only when asked for it"
    return (
        "You are a customer of a shop; your messages go to its assistant. Write one short message at a time and make "
        f"nothing up.\nYou want to {wish}.\nYour email is {email}; tell it {when}.\n"
        f"When asked to confirm the change, say {'no' if declines else 'yes'}.\n"
        f"When the assistant asks nothing more, say {STOP}"
    )


# -- tau2's retail ----------------------------------------------------------------------------------------------------

GUIDELINES = f"""You play a customer who writes to a shop's customer service. Stay in the role that is described below.
Write one message at a time, in your own words. Tell what you know when it is asked for, not all at once. Make nothing
up: what is not written below you do not know. When all that you want is done or refused, write {ENDINGS[0]}; when you
are transferred to somebody else, {ENDINGS[1]}; when the description does not say how to go on, {ENDINGS[2]}."""


def retail_folder() -> Path | None:
    """Where the user has tau2's retail files: `$TAU2_DATA_DIR/tau2/domains/retail`, or `$TAU2_DATA_DIR` itself.

    Raises:
        DatasetError: a file is missing there.
    """
    root = os.environ.get("TAU2_DATA_DIR")
    if not root:
        return None
    inner = Path(root) / "tau2" / "domains" / "retail"
    folder = inner if inner.is_dir() else Path(root)
    for name in ("db.json", "tasks.json", "policy.md"):
        if not (folder / name).is_file():
            raise DatasetError(
                f"tau2's retail files are incomplete: there is no {name}",
                hint="TAU2_DATA_DIR is the folder `data` of a checkout of sierra-research/tau2-bench",
                path=folder,
            )
    return folder


def retail(folder: Path, split: str) -> list[Task]:
    """Tau2's retail tasks of a split of `split_tasks.json` ("train", "test"), or all of them ("base").

    Raises:
        DatasetError: the files have no such split.
    """
    listed = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    file = folder / "split_tasks.json"
    splits = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if split != "base" and split not in splits:
        raise DatasetError(
            f"tau2's retail files have no split {split!r}", hint="split_tasks.json names them", path=file
        )
    chosen = splits.get(split)
    return [_retail_task(task, folder) for task in listed if chosen is None or task["id"] in chosen]


def _retail_task(task: Mapping[str, Any], folder: Path) -> Task:
    instructions = task["user_scenario"]["instructions"]
    if not isinstance(instructions, str):
        parts = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
        instructions = "\n".join(instructions[part] for part in parts if instructions.get(part))
    persona = task["user_scenario"].get("persona")
    criteria = task["evaluation_criteria"]
    return {
        "domain": "retail",
        "folder": str(folder),
        "id": task["id"],
        "scenario": "\n\n".join(filter(None, (GUIDELINES, persona, instructions))),
        "actions": [{"name": a["name"], "arguments": a["arguments"]} for a in criteria["actions"] or []],
        "say": list(criteria.get("communicate_info") or []),
    }


# -- both -------------------------------------------------------------------------------------------------------------


def open_environment(task: Task) -> Environment:
    """A copy of the task's database with its policy and tools."""
    if task["domain"] == "shop":
        return Shop(POLICY, task["database"])
    folder = Path(task["folder"])
    return Retail(read_policy(folder), read_database(folder))


USER_ERRED = "the user erred"


def reward(task: Task, output: Mapping[str, Any]) -> float:
    """1 where the database is that of the gold run and all was said that had to be, else 0: tau's reward.

    Raises:
        RewardError: the customer did not keep to the scenario. That says nothing about the assistant, so the rollout
            has no reward: it is counted as failed, and nothing is trained on it.
    """
    if errors := user_errors(task, output["conversation"]):
        raise RewardError(f"{USER_ERRED}: {', '.join(errors)}")
    gold = open_environment(task)
    gold.play(task["actions"])
    told = "\n".join(turn["text"] for turn in output["conversation"] if turn["role"] == "assistant")
    return float(output["changes"] == gold.changes() and all(_said(info, told) for info in task["say"]))


def _said(info: str, told: str) -> bool:
    """Tau2's test: anywhere in the text, whatever the case and without thousands' commas."""
    return info.lower() in told.lower().replace(",", "")


IDENTIFIERS: dict[str, str] = {
    "shop": "|".join((r"\w+\.\w+|\d+", *ITEMS, *CITIES)),
    "retail": r"#W\d+|\d{10}|\b\d{5}\b|[\w.]+@[\w.]+\w",
}
"""What a customer can only know or make up: what orders, items and places are called; emails."""


def user_errors(task: Task, conversation: Sequence[Mapping[str, str]]) -> list[str]:
    """How the customer broke the scenario, each kind once: "made up", "out of scope", "wrong answer", "gave up".

    The last two are judged in the small form alone, whose scenario fixes the answer to a request for confirmation.
    """
    found: set[str] = set()
    known = task["scenario"]
    identifiers = re.compile(IDENTIFIERS[task["domain"]])
    for before, turn in itertools.pairwise(conversation):
        if turn["role"] != "user":
            known += "\n" + turn["text"]
            continue
        if not set(identifiers.findall(turn["text"])) <= set(identifiers.findall(known)):
            found.add("made up")
        if ENDINGS[2] in turn["text"]:
            found.add("out of scope")
        if task["domain"] == "shop":
            answer = re.match(r"\W*(yes|no)\b", turn["text"].lower())
            if answer is not None and f"confirm the change, say {answer[1]}" not in known:
                found.add("wrong answer")
            if STOP in turn["text"] and "?" in before["text"]:
                found.add("gave up")
    return sorted(found)
