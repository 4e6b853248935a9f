"""The small form: a shop with six tools, four rules of policy, and about thirty rows per task."""

from __future__ import annotations

from typing import Any

from examples.customer_service.environment import Environment

POLICY = """Find the caller by email first; transfer unknown callers.
Cancel or move only pending orders, return only delivered ones.
Refund sale items as voucher, others to card.
Before a change name it and any refund and ask. Without a yes change nothing."""


class Shop(Environment):
    """Customers by email; orders by name, with price, terms ("sale" or "regular"), status, city, owner."""

    names = ("find_customer", "get_order", "cancel_order", "return_order", "move_order", "transfer")

    def find_customer(self, email: str) -> str:
        """The customer's id, or "unknown".

        Args:
            email: such as ann.lamb
        """
        return self.database["customers"].get(email, {"id": "unknown"})["id"]

    def get_order(self, order: str) -> str:
        """An order: price, sale or regular, status.

        Args:
            order: its name.
        """
        row = self.database["orders"].get(order)
        return "unknown" if row is None else f"{row['price']}, {row['terms']}, {row['status']}"

    def cancel_order(self, order: str, refund: str) -> str:
        """Cancel an order and refund its price.

        Args:
            order: its name.
            refund: "card" or "voucher".
        """
        return self._change(order, status="cancelled", refund=refund)

    def return_order(self, order: str, refund: str) -> str:
        """Take an order back and refund its price.

        Args:
            order: its name.
            refund: "card" or "voucher".
        """
        return self._change(order, status="returned", refund=refund)

    def move_order(self, order: str, city: str) -> str:
        """Send an order to another city.

        Args:
            order: its name.
            city: where to.
        """
        return self._change(order, city=city)

    def transfer(self) -> str:
        """Hand the caller over to a colleague."""
        self.database["transfers"]["caller"] = {}
        return "ok"

    def _change(self, order: str, **values: Any) -> str:
        row = self.database["orders"].get(order)
        if row is None:
            return "unknown"
        # The rules are the policy's to keep, not the tool's: a wrong change has to be possible.
        row.update(values)
        return "ok"
