"""The tools of tau2's retail domain, for its files: what its policy and tool schemas ask, in our own code."""

from __future__ import annotations

import ast
import functools
import json
import operator
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.customer_service.environment import Environment

Row = dict[str, Any]


@functools.cache
def read_database(folder: Path) -> dict[str, dict[str, Row]]:
    """`db.json`: products, users, orders. Do not write into it."""
    return json.loads((folder / "db.json").read_text(encoding="utf-8"))


@functools.cache
def read_policy(folder: Path) -> str:
    """`policy.md`."""
    return (folder / "policy.md").read_text(encoding="utf-8")


class Retail(Environment):
    """Every tool raises ValueError for what it refuses; the model reads the reason as the tool's result."""

    names = (
        "calculate",
        "cancel_pending_order",
        "exchange_delivered_order_items",
        "find_user_id_by_email",
        "find_user_id_by_name_zip",
        "get_item_details",
        "get_order_details",
        "get_product_details",
        "get_user_details",
        "list_all_product_types",
        "modify_pending_order_address",
        "modify_pending_order_items",
        "modify_pending_order_payment",
        "modify_user_address",
        "return_delivered_order_items",
        "transfer_to_human_agents",
    )

    # -- reading --------------------------------------------------------------------------------------------------

    def calculate(self, expression: str) -> str:
        """Calculate an expression of numbers, + - * / and parentheses; rounded to two decimals.

        Args:
            expression: such as "2 * (3.5 + 1)".
        """
        return str(round(_value(expression), 2))

    def find_user_id_by_email(self, email: str) -> str:
        """Find a user's id by email.

        Args:
            email: such as "somebody@example.com".
        """
        return self._find(lambda user: _folded(user["email"]) == _folded(email))

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find a user's id by name and zip code, where the email is unknown or not found.

        Args:
            first_name: such as "Ann".
            last_name: such as "Lee".
            zip: such as "12345".
        """
        wanted = (_folded(first_name), _folded(last_name), zip)
        return self._find(
            lambda user: (
                wanted
                == (_folded(user["name"]["first_name"]), _folded(user["name"]["last_name"]), user["address"]["zip"])
            )
        )

    def get_user_details(self, user_id: str) -> str:
        """A user's profile: name, address, email, payment methods and order ids.

        Args:
            user_id: such as "ann_lee_1234".
        """
        return json.dumps(self._row("users", user_id, "User"))

    def get_order_details(self, order_id: str) -> str:
        """An order: its status, items, address, fulfilment and payments.

        Args:
            order_id: with the "#" in front, such as "#W0000000".
        """
        return json.dumps(self._row("orders", order_id, "Order"))

    def get_product_details(self, product_id: str) -> str:
        """A product type with all its variants: options, availability, price.

        Args:
            product_id: a product's id, which is not an item's.
        """
        return json.dumps(self._row("products", product_id, "Product"))

    def get_item_details(self, item_id: str) -> str:
        """One variant of a product: options, availability, price.

        Args:
            item_id: an item's id, which is not a product's.
        """
        for product in self.database["products"].scan():
            if item_id in product["variants"]:
                return json.dumps(product["variants"][item_id])
        raise ValueError("Item not found")

    def list_all_product_types(self) -> str:
        """The names of all product types with their product ids."""
        return json.dumps({p["name"]: p["product_id"] for p in self.database["products"].scan()}, sort_keys=True)

    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent: when the user asks for one, or when policy and tools cannot help.

        Args:
            summary: of what the user wants.
        """
        return "Transfer successful"

    # -- pending orders -------------------------------------------------------------------------------------------

    def cancel_pending_order(self, order_id: str, reason: str) -> str:
        """Cancel a pending order and refund it. Explain it and get the user's explicit yes first.

        Args:
            order_id: with the "#" in front, such as "#W0000000".
            reason: "no longer needed" or "ordered by mistake".
        """
        order = self._order(order_id, "pending", "cancelled")
        if reason not in ("no longer needed", "ordered by mistake"):
            raise ValueError("Invalid reason")
        refunds = []
        for payment in order["payment_history"]:
            method = self._payment_method(order["user_id"], payment["payment_method_id"])
            refunds.append(_transaction("refund", payment["amount"], payment["payment_method_id"]))
            _add(method, payment["amount"])
        order["status"], order["cancel_reason"] = "cancelled", reason
        order["payment_history"].extend(refunds)
        return json.dumps(order)

    def modify_pending_order_address(
        self, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Change where a pending order is sent. Explain it and get the user's explicit yes first.

        Args:
            order_id: with the "#" in front, such as "#W0000000".
            address1: street and number.
            address2: apartment or suite; may be empty.
            city: such as "Denver".
            state: such as "CO".
            country: such as "USA".
            zip: such as "12345".
        """
        order = self._row("orders", order_id, "Order")
        if "pending" not in order["status"]:
            raise ValueError("Non-pending order cannot be modified")
        order["address"] = _address(address1, address2, city, state, country, zip)
        return json.dumps(order)

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> str:
        """Pay a pending order in another way. Explain it and get the user's explicit yes first.

        Args:
            order_id: with the "#" in front, such as "#W0000000".
            payment_method_id: one of the user's, such as "gift_card_0000000".
        """
        order = self._row("orders", order_id, "Order")
        if "pending" not in order["status"]:
            raise ValueError("Non-pending order cannot be modified")
        method = self._payment_method(order["user_id"], payment_method_id)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise ValueError("There should be exactly one payment for a pending order")
        first = history[0]
        if first["payment_method_id"] == payment_method_id:
            raise ValueError("The new payment method should be different from the current one")
        amount = first["amount"]
        if _is_gift_card(method) and method["balance"] < amount:
            raise ValueError("Insufficient gift card balance to pay for the order")
        history.append(_transaction("payment", amount, payment_method_id))
        history.append(_transaction("refund", amount, first["payment_method_id"]))
        _add(method, -amount)
        _add(self._payment_method(order["user_id"], first["payment_method_id"]), amount)
        return json.dumps(order)

    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Replace items of a pending order by others of the same product; once per order. Explain it and get the
        user's explicit yes first.

        Args:
            order_id: with the "#" in front, such as "#W0000000".
            item_ids: items of the order.
            new_item_ids: what replaces each, in the same order.
            payment_method_id: pays or receives the difference in price.
        """
        order = self._order(order_id, "pending", "modified")
        if any(old == new for old, new in zip(item_ids, new_item_ids, strict=False)):
            raise ValueError("The new item id should be different from the old item id")
        pairs = self._replacements(order, item_ids, new_item_ids)
        difference = round(sum(variant["price"] - item["price"] for item, variant in pairs), 2)
        method = self._payment_method(order["user_id"], payment_method_id)
        if _is_gift_card(method) and method["balance"] < difference:
            raise ValueError("Insufficient gift card balance to pay for the new item")
        kind = "payment" if difference > 0 else "refund"
        order["payment_history"].append(_transaction(kind, abs(difference), payment_method_id))
        _add(method, -difference)
        for (item, variant), new_item_id in zip(pairs, new_item_ids, strict=True):
            item.update(item_id=new_item_id, price=variant["price"], options=dict(variant["options"]))
        order["status"] = "pending (item modified)"
        return json.dumps(order)

    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Change a user's default address. Explain it and get the user's explicit yes first.

        Args:
            user_id: such as "ann_lee_1234".
            address1: street and number.
            address2: apartment or suite; may be empty.
            city: such as "Denver".
            state: such as "CO".
            country: such as "USA".
            zip: such as "12345".
        """
        user = self._row("users", user_id, "User")
        user["address"] = _address(address1, address2, city, state, country, zip)
        return json.dumps(user)

    # -- delivered orders -----------------------------------------------------------------------------------------

    def return_delivered_order_items(self, order_id: str, item_ids: list[str], payment_method_id: str) -> str:
        """Take items of a delivered order back; once per order. Explain it and get the user's explicit yes first.

        Args:
            order_id: with the "#" in front, such as "#W0000000".
            item_ids: items of the order.
            payment_method_id: receives the refund: the original one or a gift card.
        """
        order = self._order(order_id, "delivered", "returned")
        method = self._payment_method(order["user_id"], payment_method_id)
        if not _is_gift_card(method) and payment_method_id != order["payment_history"][0]["payment_method_id"]:
            raise ValueError("Payment method should be the original payment method")
        _require_items(order, item_ids)
        order.update(
            status="return requested", return_items=sorted(item_ids), return_payment_method_id=payment_method_id
        )
        return json.dumps(order)

    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Exchange items of a delivered order for others of the same product; once per order. Explain it and get the
        user's explicit yes first.

        Args:
            order_id: with the "#" in front, such as "#W0000000".
            item_ids: items of the order.
            new_item_ids: what replaces each, in the same order.
            payment_method_id: pays or receives the difference in price.
        """
        order = self._order(order_id, "delivered", "exchanged")
        pairs = self._replacements(order, item_ids, new_item_ids)
        difference = round(sum(variant["price"] - item["price"] for item, variant in pairs), 2)
        method = self._payment_method(order["user_id"], payment_method_id)
        if _is_gift_card(method) and method["balance"] < difference:
            raise ValueError("Insufficient gift card balance to pay for the price difference")
        order.update(
            status="exchange requested",
            exchange_items=sorted(item_ids),
            exchange_new_items=sorted(new_item_ids),
            exchange_payment_method_id=payment_method_id,
            exchange_price_difference=difference,
        )
        return json.dumps(order)

    # -- rows -----------------------------------------------------------------------------------------------------

    def _row(self, table: str, key: str, what: str) -> Row:
        if key not in self.database[table]:
            raise ValueError(f"{what} not found")
        return self.database[table][key]

    def _order(self, order_id: str, status: str, done: str) -> Row:
        order = self._row("orders", order_id, "Order")
        if order["status"] != status:
            raise ValueError(f"Non-{status} order cannot be {done}")
        return order

    def _find(self, matches: Callable[[Row], bool]) -> str:
        for user in self.database["users"].scan():
            if matches(user):
                return user["user_id"]
        raise ValueError("User not found")

    def _payment_method(self, user_id: str, payment_method_id: str) -> Row:
        methods = self._row("users", user_id, "User")["payment_methods"]
        if payment_method_id not in methods:
            raise ValueError("Payment method not found")
        return methods[payment_method_id]

    def _replacements(self, order: Row, item_ids: Sequence[str], new_item_ids: Sequence[str]) -> list[tuple[Row, Row]]:
        """Each item of the order with the available variant of its product that replaces it."""
        _require_items(order, item_ids)
        if len(item_ids) != len(new_item_ids):
            raise ValueError("The number of items to be exchanged should match")
        pairs, items = [], list(order["items"])
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = items.pop(next(i for i, item in enumerate(items) if item["item_id"] == item_id))
            variant = self._row("products", item["product_id"], "Product")["variants"].get(new_item_id)
            if variant is None or not variant["available"]:
                raise ValueError(f"New item {new_item_id} not found or available")
            pairs.append((item, variant))
        return pairs


def _require_items(order: Row, item_ids: Sequence[str]) -> None:
    missing = Counter(item_ids) - Counter(item["item_id"] for item in order["items"])
    if missing:
        raise ValueError(f"Item {next(iter(missing))} not found")


def _is_gift_card(method: Row) -> bool:
    return method["source"] == "gift_card"


def _add(method: Row, amount: float) -> None:
    """A gift card's balance changes at once; other methods have none."""
    if _is_gift_card(method):
        method["balance"] = round(method["balance"] + amount, 2)


def _transaction(kind: str, amount: float, payment_method_id: str) -> Row:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Row:
    return {
        "address1": address1, "address2": address2, "city": city, "state": state, "country": country, "zip": zip,
    }  # fmt: skip


def _folded(text: str) -> str:
    """Without case and accents."""
    letters = unicodedata.normalize("NFKD", text.strip().casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def _value(expression: str) -> float:
    """The value of an arithmetic expression; no power, so that it always ends."""

    def of(node: ast.AST) -> float:
        match node:
            case ast.Expression(body=body):
                return of(body)
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](of(left), of(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](of(operand))
        raise ValueError("Invalid expression")

    try:
        return float(of(ast.parse(expression.strip(), mode="eval")))
    except (SyntaxError, ZeroDivisionError, RecursionError, OverflowError) as error:
        raise ValueError("Invalid expression") from error
