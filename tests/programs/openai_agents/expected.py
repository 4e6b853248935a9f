"""What is known of the programs of this folder."""

from __future__ import annotations

from typing import Any

from program_table import Expected

from agl.testing.provider import Reply, last_said


def handoff(body: dict[str, Any]) -> Reply:
    who, text = last_said(body)
    names = [tool["name"] for tool in body["tools"]]
    if "transfer_to_billing_agent" in names:
        return Reply(tools=(("transfer_to_billing_agent", {}),))
    return (
        Reply(f"Done: {text}.") if who == "tool" and "refunded" in text else Reply(tools=(("refund", {"order": "17"}),))
    )


PROGRAMS = {
    "handoff": Expected(
        script=handoff, agents=("Billing agent", "Triage agent"), trains="Billing agent",
        tools=("transfer_to_billing_agent", "refund"), calls=3,
    ),
}  # fmt: skip
