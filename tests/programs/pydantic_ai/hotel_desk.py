"""Tools that read the run's dependencies, instructions that depend on them, and a span of the user's own in a tool."""

from dataclasses import dataclass, field

from opentelemetry import trace
from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext

tracer = trace.get_tracer("shop")


@dataclass
class Hotel:
    """What a run may use."""

    name: str
    free: dict[str, int]
    booked: list[str] = field(default_factory=list)


class Booking(BaseModel):
    """What the guest is told."""

    room: str
    price: int = Field(description="for one night", ge=0)
    remark: str


desk = Agent("openai-chat:gpt-4.1-mini", deps_type=Hotel, output_type=Booking, instructions="You work at a hotel desk.")


@desk.instructions
def which_hotel(ctx: RunContext[Hotel]) -> str:
    return f"The hotel is called {ctx.deps.name}."


@desk.tool
async def find_rooms(ctx: RunContext[Hotel], most: int) -> dict[str, int]:
    """Find free rooms, with their prices.

    Args:
        most: what a night may cost.
    """
    with tracer.start_as_current_span("read the register") as span:
        found = {room: price for room, price in ctx.deps.free.items() if price <= most}
        span.set_attribute("rooms", len(found))
    return found


@desk.tool
def book(ctx: RunContext[Hotel], room: str) -> str:
    """Book a room."""
    ctx.deps.booked.append(room)
    return f"room {room} is yours"


hotel = Hotel("Seaview", {"12": 90, "14": 240})
result = desk.run_sync("A room for at most 100, please. Book it.", deps=hotel)
print(repr(result.output), "booked:", hotel.booked)
