"""The tools of tau2's airline domain, for its files: what its policy and tool schemas ask, in our own code.

As in tau2, the tools check what a computer can check (seats, balances, sums). The rest is the policy's, and the
assistant's to keep: a wrong change has to be possible.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from typing_extensions import TypedDict

from examples.customer_service.retail import Retail
from examples.smollm2.flights import Cabin, Flights, Row, Segment

NOW = "2024-05-15T15:00:00"
"""The time at which the policy says that all conversations take place."""
NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
NEW_CERTIFICATES = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
"""The ids that tau2 gives to what is made in a conversation, in this order: equal databases need equal ids."""


class Passenger(TypedDict):
    """A passenger of a reservation."""

    first_name: str
    last_name: str
    dob: str


class Payment(TypedDict):
    """What is paid in one way."""

    payment_id: str
    amount: int


class Airline(Flights):
    """Every tool raises ValueError for what it refuses; the model reads the reason as the tool's result."""

    names = (
        "book_reservation",
        "calculate",
        "cancel_reservation",
        "get_flight_status",
        "get_reservation_details",
        "get_user_details",
        "list_all_airports",
        "search_direct_flight",
        "search_onestop_flight",
        "send_certificate",
        "transfer_to_human_agents",
        "update_reservation_baggages",
        "update_reservation_flights",
        "update_reservation_passengers",
    )

    # The two tools that tau2's domains share.
    calculate = Retail.calculate
    transfer_to_human_agents = Retail.transfer_to_human_agents

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_user_details(self, user_id: str) -> str:
        """A user's profile: membership, payment methods, saved passengers, reservation ids."""
        return json.dumps(self._row("users", user_id))

    def get_reservation_details(self, reservation_id: str) -> str:
        """A reservation: flights, cabin, passengers, payments, bags, insurance."""
        return json.dumps(self._row("reservations", reservation_id))

    # -- changing -----------------------------------------------------------------------------------------------------

    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: Literal["one_way", "round_trip"],
        cabin: Cabin,
        flights: list[Segment],
        passengers: list[Passenger],
        payment_methods: list[Payment],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: Literal["yes", "no"],
    ) -> str:
        """Book a reservation; the payments must add up to its price. Get the user's explicit yes first."""
        user = self._row("users", user_id)
        new = next((id for id in NEW_RESERVATIONS if id not in self.database["reservations"]), None)
        if new is None:
            raise ValueError("Too many reservations")
        n = len(passengers)
        booked = [self._booked(flight, cabin, n) for flight in flights]
        price = n * sum(flight["price"] for flight in booked)
        price += 30 * n * (insurance == "yes") + 50 * nonfree_baggages
        for payment in payment_methods:
            method = self._payment_method(user, payment["payment_id"])
            if method.get("amount", payment["amount"]) < payment["amount"]:  # a credit card has no amount
                raise ValueError(f"Not enough balance in payment method {method['id']}")
        paid = sum(payment["amount"] for payment in payment_methods)
        if paid != price:
            raise ValueError(f"The payments do not add up: the price is {price}, paid are {paid}")
        for payment in payment_methods:
            method = user["payment_methods"][payment["payment_id"]]
            if method["source"] == "gift_card":
                method["amount"] -= payment["amount"]
            elif method["source"] == "certificate":  # what it is worth beyond the price is lost
                del user["payment_methods"][method["id"]]
        for flight in flights:
            self._day(**_only(Segment, flight))["available_seats"][cabin] -= n
        self.database["reservations"][new] = {
            "reservation_id": new, "user_id": user_id, "origin": origin, "destination": destination,
            "flight_type": flight_type, "cabin": cabin, "flights": booked,
            "passengers": [_only(Passenger, passenger) for passenger in passengers],
            "payment_history": [_only(Payment, payment) for payment in payment_methods], "created_at": NOW,
            "total_baggages": total_baggages, "nonfree_baggages": nonfree_baggages, "insurance": insurance,
        }  # fmt: skip
        user["reservations"].append(new)
        return json.dumps(self.database["reservations"][new])

    def cancel_reservation(self, reservation_id: str) -> str:
        """Cancel a whole reservation and refund it. Get the user's explicit yes first."""
        reservation = self._row("reservations", reservation_id)
        history = reservation["payment_history"]
        history += [{"payment_id": payment["payment_id"], "amount": -payment["amount"]} for payment in history]
        reservation["status"] = "cancelled"
        return json.dumps(reservation)

    def send_certificate(self, user_id: str, amount: int) -> str:
        """Give a user a travel certificate over an amount in dollars, as a compensation."""
        methods = self._row("users", user_id)["payment_methods"]
        new = next((id for id in NEW_CERTIFICATES if id not in methods), None)
        if new is None:
            raise ValueError("Too many certificates")
        methods[new] = {"source": "certificate", "id": new, "amount": amount}
        return f"{user_id} received {new} over {amount}"

    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> str:
        """Set how many bags a reservation has, and how many of them are paid. Get the user's explicit yes first."""
        reservation = self._row("reservations", reservation_id)
        self._charge(reservation, payment_id, 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"]))
        reservation.update(total_baggages=total_baggages, nonfree_baggages=nonfree_baggages)
        return json.dumps(reservation)

    def update_reservation_flights(
        self, reservation_id: str, cabin: Cabin, flights: list[Segment], payment_id: str
    ) -> str:
        """Set all flights of a reservation, those that stay the same too, and the cabin. A card pays or receives the
        difference in price. Get the user's explicit yes first."""
        reservation = self._row("reservations", reservation_id)
        n = len(reservation["passengers"])
        # A flight that stays in the same cabin keeps its seat and the price that was paid.
        kept = {
            (flight["flight_number"], flight["date"]): flight
            for flight in reservation["flights"]
            if cabin == reservation["cabin"]
        }
        changed = [kept.get((f["flight_number"], f["date"])) or self._booked(f, cabin, n) for f in flights]
        before, after = (sum(flight["price"] for flight in some) for some in (reservation["flights"], changed))
        self._charge(reservation, payment_id, n * (after - before))
        reservation.update(flights=changed, cabin=cabin)
        return json.dumps(reservation)

    def update_reservation_passengers(self, reservation_id: str, passengers: list[Passenger]) -> str:
        """Replace the passengers of a reservation by as many others. Get the user's explicit yes first."""
        reservation = self._row("reservations", reservation_id)
        if len(passengers) != len(reservation["passengers"]):
            raise ValueError("The number of passengers cannot change")
        reservation["passengers"] = [_only(Passenger, passenger) for passenger in passengers]
        return json.dumps(reservation)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _payment_method(self, user: Row, payment_id: str) -> Row:
        if payment_id not in user["payment_methods"]:
            raise ValueError(f"Payment method {payment_id} not found")
        return user["payment_methods"][payment_id]

    def _charge(self, reservation: Row, payment_id: str, amount: int) -> None:
        """Pay for a change, or with a negative amount refund it."""
        method = self._payment_method(self._row("users", reservation["user_id"]), payment_id)
        if method["source"] == "certificate":
            raise ValueError("A certificate cannot pay for a change")
        if method["source"] == "gift_card":
            if method["amount"] < amount:
                raise ValueError("Gift card balance is not enough")
            method["amount"] -= amount
        if amount:
            reservation["payment_history"].append({"payment_id": payment_id, "amount": amount})


def _only(shape: Any, row: Any) -> Row:
    """The keys that a shape has: a model may write others, which reservations do not keep."""
    return {key: row[key] for key in shape.__annotations__}
