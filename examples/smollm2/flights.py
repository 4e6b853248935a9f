"""The flights of tau2's airline domain: when they go, what they cost, whether they have seats; tools that read them."""

from __future__ import annotations

import copy
import json
from datetime import date as Date
from datetime import timedelta
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic refuses that of `typing` before Python 3.12

from examples.customer_service.environment import Environment

Row = dict[str, Any]
Cabin = Literal["basic_economy", "economy", "business"]

AIRPORTS = {
    "ATL": "Atlanta", "BOS": "Boston", "CLT": "Charlotte", "DEN": "Denver", "DFW": "Dallas", "DTW": "Detroit",
    "EWR": "Newark", "IAH": "Houston", "JFK": "New York", "LAS": "Las Vegas", "LAX": "Los Angeles", "LGA": "LaGuardia",
    "MCO": "Orlando", "MIA": "Miami", "MSP": "Minneapolis", "ORD": "Chicago", "PHL": "Philadelphia", "PHX": "Phoenix",
    "SEA": "Seattle", "SFO": "San Francisco",
}  # fmt: skip
"""The cities of the database's airports, which it does not name itself."""


class Segment(TypedDict):
    """One flight of a reservation."""

    flight_number: str
    date: str


class Flights(Environment):
    """The tools that read flights, and what the tools of reservations need to know about them."""

    def get_flight_status(self, flight_number: str, date: str) -> str:
        """Whether a flight is available, on time, delayed, flying, landed or cancelled on a date (YYYY-MM-DD)."""
        return self._day(flight_number, date)["status"]

    def list_all_airports(self) -> str:
        """All airports: code and city."""
        return json.dumps(AIRPORTS)

    def search_direct_flight(self, origin: str, destination: str, date: str) -> str:
        """Available direct flights between two airports (codes such as JFK) on a date (YYYY-MM-DD)."""
        return json.dumps(self._direct(date, origin, destination))

    def search_onestop_flight(self, origin: str, destination: str, date: str) -> str:
        """Available pairs of flights with one stop between two airports (codes such as JFK) on a date (YYYY-MM-DD)."""
        pairs: list[list[Row]] = []
        for first in self._direct(date, origin):
            arrival = first["scheduled_arrival_time_est"]  # "01:30:00+1" is on the next day
            there = str(Date.fromisoformat(date) + timedelta(days=1)) if arrival.endswith("+1") else date
            seconds = self._direct(there, first["destination"], destination, arrival)
            pairs += [[{**first, "date": date}, {**second, "date": there}] for second in seconds]
        return json.dumps(pairs)

    def _row(self, table: Literal["users", "reservations", "flights"], key: str) -> Row:
        if key not in self.database[table]:
            raise ValueError(f"{table[:-1].title()} {key} not found")
        return self.database[table][key]

    def _day(self, flight_number: str, date: str) -> Row:
        """A flight on a date: its status; where it can be booked, seats and prices, too."""
        dates = self._row("flights", flight_number)["dates"]
        if date not in dates:
            raise ValueError(f"Flight {flight_number} not found on {date}")
        return dates[date]

    def _booked(self, flight: Segment, cabin: Cabin, seats: int) -> Row:
        """A flight as reservations list it, if it has the seats."""
        number, day = flight["flight_number"], self._day(flight["flight_number"], flight["date"])
        if day["status"] != "available":
            raise ValueError(f"Flight {number} is not available on {flight['date']}")
        if day["available_seats"][cabin] < seats:
            raise ValueError(f"Not enough seats on flight {number}")
        row = self._row("flights", number)
        ends = {"origin": row["origin"], "destination": row["destination"]}
        return {**ends, "flight_number": number, "date": flight["date"], "price": day["prices"][cabin]}

    def _direct(self, date: str, origin: str, destination: str | None = None, leave_after: str = "") -> list[Row]:
        """Flights that can be booked, to one airport or to all."""
        found: list[Row] = []
        for flight in self.database["flights"].scan():
            day = flight["dates"].get(date)
            if day is None or day["status"] != "available" or flight["origin"] != origin:
                continue
            if destination in (None, flight["destination"]) and flight["scheduled_departure_time_est"] >= leave_after:
                found.append(copy.deepcopy({**{k: v for k, v in flight.items() if k != "dates"}, **day}))
        return found
