"""What the wire hook costs per SDK request: outside a rollout, and inside one with and without a span.

    python benchmarks/routing.py [--json FILE]

`OpenAI.request` is called on a client whose transport answers at once in this process, so that the SDK's own work is
in the figure and the network is not. The hook's share outside a rollout is too small to be seen in that; it is timed
on a class whose `request` does nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai

from agl import tracing
from agl.adapters.openai import OpenAITracer
from agl.mdp.selection import select
from agl.tracing import sdk_hooks as routing

ANSWER = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip


class Nothing:
    """A client whose request does nothing."""

    def request(self, cast_to: Any, options: Any) -> None:
        return None


def per_call(call: Callable[[], object], n: int, repeats: int = 9) -> float:
    """Best of `repeats` means over `n` calls, seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(n):
            call()
        times.append((time.perf_counter() - began) / n)
    return min(times) if n > 1000 else statistics.median(times)


def hook_alone() -> float:
    """Seconds that the hook adds to a request outside a rollout."""
    client = Nothing()
    bare = per_call(lambda: client.request(None, None), 200_000)
    original = Nothing.request
    routing._patch("openai", Nothing, "request", is_async=False)
    hooked = per_call(lambda: client.request(None, None), 200_000)
    Nothing.request = original
    return hooked - bare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, json=ANSWER))
    client = openai.OpenAI(
        api_key="k", base_url="http://provider.invalid/v1", http_client=httpx2.Client(transport=transport)
    )

    def ask() -> object:
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])

    ask()
    plain = per_call(ask, 200)
    facts = {"hook_outside_seconds": hook_alone(), "plain_seconds": plain}
    with OpenAITracer():
        facts["hooked_outside_seconds"] = per_call(ask, 200)
        with tracing.running(tracing.RolloutContext("ro", 1, "a", select(None))):
            facts["traced_inside_seconds"] = per_call(ask, 200)
    facts["hook_outside_ratio"] = facts["hook_outside_seconds"] / plain
    facts["traced_inside_ratio"] = facts["traced_inside_seconds"] / plain
    for name, value in facts.items():
        print(f"{name:26}" + (f"{value:12.5f}" if name.endswith("ratio") else f"{value * 1e6:12.3f} µs"))
    if options.json:
        options.json.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
