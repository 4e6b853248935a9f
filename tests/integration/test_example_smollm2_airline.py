"""examples/smollm2/airline.py: what tau2's airline tools change and what they refuse, on a small database made here."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

pytest.importorskip("pydantic")

from examples.smollm2.airline import Airline
from examples.smollm2.flights import Segment

DAY, NEXT = "2024-05-20", "2024-05-21"
ANN = {"first_name": "Ann", "last_name": "Lee", "dob": "1990-01-01"}
SEATS = {"basic_economy": 1, "economy": 2, "business": 0}
PRICES = {"basic_economy": 50, "economy": 100, "business": 300}


def flight(number: str, origin: str, destination: str, leaves: str, lands: str, **days: str) -> dict[str, Any]:
    free = {"status": "available", "available_seats": SEATS, "prices": PRICES}
    dates = {date: free if status == "available" else {"status": status} for date, status in days.items()}
    return {
        "flight_number": number, "origin": origin, "destination": destination,
        "scheduled_departure_time_est": leaves, "scheduled_arrival_time_est": lands, "dates": dates,
    }  # fmt: skip


def method(source: str, **amount: float) -> dict[str, Any]:
    return {f"{source}_1": {"source": source, "id": f"{source}_1", **amount}}


DATABASE: dict[str, dict[str, Any]] = {
    "flights": {
        "F1": flight("F1", "SFO", "JFK", "10:00:00", "18:00:00", **{DAY: "available", NEXT: "cancelled"}),
        "F2": flight("F2", "SFO", "DEN", "20:00:00", "01:00:00+1", **{DAY: "available"}),
        "F3": flight("F3", "DEN", "JFK", "06:00:00", "11:00:00", **{DAY: "available", NEXT: "available"}),
    },
    "users": {
        "ann": {
            "user_id": "ann",
            "payment_methods": method("credit_card")
            | method("gift_card", amount=150.0)
            | method("certificate", amount=80.0),
            "reservations": ["R1"],
        }
    },
    "reservations": {
        "R1": {
            "reservation_id": "R1", "user_id": "ann", "origin": "SFO", "destination": "JFK", "flight_type": "one_way",
            "cabin": "economy", "passengers": [ANN],
            "flights": [{"origin": "SFO", "destination": "JFK", "flight_number": "F1", "date": DAY, "price": 70}],
            "payment_history": [{"payment_id": "credit_card_1", "amount": 70}],
            "created_at": "2024-05-01T00:00:00", "total_baggages": 1, "nonfree_baggages": 0, "insurance": "no",
        }
    },
}  # fmt: skip
BOOKING: dict[str, Any] = {
    "user_id": "ann", "origin": "SFO", "destination": "JFK", "flight_type": "one_way", "cabin": "economy",
    "flights": [{"flight_number": "F1", "date": DAY, "price": 1}], "passengers": [ANN], "total_baggages": 2,
    "nonfree_baggages": 1, "insurance": "yes",
    "payment_methods": [{"payment_id": "certificate_1", "amount": 80}, {"payment_id": "gift_card_1", "amount": 100}],
}  # fmt: skip


@pytest.fixture
def desk() -> Airline:
    return Airline("", DATABASE)


def segments(*flights: tuple[str, str]) -> list[Segment]:
    return [{"flight_number": number, "date": date} for number, date in flights]


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("get_user_details", {"user_id": "bob"}, "User bob not found"),
        ("get_reservation_details", {"reservation_id": "R9"}, "Reservation R9 not found"),
        ("get_flight_status", {"flight_number": "F9", "date": DAY}, "Flight F9 not found"),
        ("get_flight_status", {"flight_number": "F2", "date": NEXT}, f"Flight F2 not found on {NEXT}"),
        ("cancel_reservation", {"reservation_id": "R9"}, "Reservation R9 not found"),
        ("send_certificate", {"user_id": "bob", "amount": 50}, "User bob not found"),
        ("calculate", {"expression": "2 ** 9"}, "Invalid expression"),
        ("book_reservation", BOOKING | {"user_id": "bob"}, "User bob not found"),
        ("book_reservation", BOOKING | {"flights": segments(("F1", NEXT))}, f"Flight F1 is not available on {NEXT}"),
        ("book_reservation", BOOKING | {"cabin": "business"}, "Not enough seats on flight F1"),
        ("book_reservation", BOOKING | {"insurance": "no"}, "do not add up: the price is 150, paid are 180"),
        (
            "book_reservation",
            BOOKING | {"payment_methods": [{"payment_id": "gift_card_1", "amount": 180}]},
            "Not enough balance in payment method gift_card_1",
        ),
        (
            "book_reservation",
            BOOKING | {"payment_methods": [{"payment_id": "cash", "amount": 180}]},
            "Payment method cash not found",
        ),
        (
            "update_reservation_passengers",
            {"reservation_id": "R1", "passengers": [ANN, ANN]},
            "The number of passengers cannot change",
        ),
        (
            "update_reservation_baggages",
            {"reservation_id": "R1", "total_baggages": 5, "nonfree_baggages": 4, "payment_id": "gift_card_1"},
            "Gift card balance is not enough",
        ),
        (
            "update_reservation_flights",
            {"reservation_id": "R1", "cabin": "economy", "flights": segments(("F9", DAY)), "payment_id": "gift_card_1"},
            "Flight F9 not found",
        ),
        (
            "update_reservation_flights",
            {
                "reservation_id": "R1",
                "cabin": "basic_economy",
                "flights": segments(("F1", DAY)),
                "payment_id": "certificate_1",
            },
            "A certificate cannot pay for a change",
        ),
    ],
)
def test_what_a_tool_refuses_has_a_reason_and_changes_nothing(
    name: str, arguments: dict[str, Any], reason: str, desk: Airline
) -> None:
    [said] = desk.play([{"name": name, "arguments": arguments}])
    assert reason in said
    assert desk.changes() == {}
    with pytest.raises(ValueError, match=re.escape(reason)):
        getattr(desk, name)(**arguments)


def test_a_booking_takes_seats_and_money_and_keeps_what_reservations_have(desk: Airline) -> None:
    before = copy.deepcopy(DATABASE)
    booked = json.loads(desk.book_reservation(**BOOKING))
    assert booked["reservation_id"] == "HATHAT"
    assert booked["flights"] == [
        {"origin": "SFO", "destination": "JFK", "flight_number": "F1", "date": DAY, "price": 100}
    ]
    changed = desk.changes()
    assert changed["reservations"] == {"HATHAT": booked}
    assert changed["flights"]["F1"]["dates"][DAY]["available_seats"] == SEATS | {"economy": 1}
    user = changed["users"]["ann"]
    assert user["reservations"] == ["R1", "HATHAT"]
    assert user["payment_methods"] == method("credit_card") | method("gift_card", amount=50.0)
    assert before == DATABASE


def test_flights_that_stay_keep_their_price_and_the_difference_is_paid(desk: Airline) -> None:
    change: dict[str, Any] = {"reservation_id": "R1", "payment_id": "gift_card_1"}
    desk.update_reservation_flights(cabin="economy", flights=segments(("F1", DAY)), **change)
    assert desk.changes() == {}
    desk.update_reservation_flights(cabin="basic_economy", flights=segments(("F1", DAY)), **change)
    changed = desk.changes()
    assert changed["reservations"]["R1"]["flights"][0]["price"] == 50
    assert changed["reservations"]["R1"]["payment_history"][1] == {"payment_id": "gift_card_1", "amount": -20}
    assert changed["users"]["ann"]["payment_methods"]["gift_card_1"]["amount"] == 170.0


def test_bags_passengers_cancellation_and_certificates(desk: Airline) -> None:
    desk.update_reservation_baggages("R1", 3, 2, "credit_card_1")
    desk.update_reservation_passengers("R1", [{**ANN, "first_name": "Anna", "seat": "1A"}])  # type: ignore[list-item]
    desk.cancel_reservation("R1")
    reservation = desk.changes()["reservations"]["R1"]
    assert [payment["amount"] for payment in reservation["payment_history"]] == [70, 100, -70, -100]
    assert (reservation["total_baggages"], reservation["nonfree_baggages"], reservation["status"]) == (
        3,
        2,
        "cancelled",
    )
    assert reservation["passengers"] == [{**ANN, "first_name": "Anna"}]
    for _ in range(3):
        desk.send_certificate("ann", 50)
    with pytest.raises(ValueError, match="Too many certificates"):
        desk.send_certificate("ann", 50)


def test_searches_find_what_can_be_booked_with_a_connection_on_the_next_day(desk: Airline) -> None:
    [direct] = json.loads(desk.search_direct_flight("SFO", "JFK", DAY))
    assert (direct["flight_number"], direct["prices"], "dates" in direct) == ("F1", PRICES, False)
    assert json.loads(desk.search_direct_flight("SFO", "JFK", NEXT)) == []
    [[first, second]] = json.loads(desk.search_onestop_flight("SFO", "JFK", DAY))
    assert [(f["flight_number"], f["date"]) for f in (first, second)] == [("F2", DAY), ("F3", NEXT)]
    assert desk.get_flight_status("F1", NEXT) == "cancelled"
    assert json.loads(desk.list_all_airports())["SFO"] == "San Francisco"
    assert desk.changes() == {}
