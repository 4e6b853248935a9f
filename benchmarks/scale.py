"""What one long rollout costs the gateway and the store: the constants that docs/scale.md multiplies.

    python benchmarks/scale.py                         # 100 turns up to 32,000 tokens, one after the other
    python benchmarks/scale.py --turns 20 --tokens 8000

A client in a separate process plays the agent: it sends the whole conversation each turn, as SDKs do. The engine
answers at once, so the figures are those of the gateway, which matches, renders, tokenises and records, and its SQLite
file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import os
import sqlite3
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np

SAMPLED = 100
"""Tokens of an answer."""
WORDS = " calculator 7 + 5 answer, the number is 12 and nothing else;"
"""About four bytes a token with the quickstart's tokenizer, as English has with the usual ones."""


def agent(url: str, key: str, turns: int, words: int) -> None:
    """Ask `turns` times in one conversation; a line of JSON for each turn on standard output."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}:" + WORDS * words})
        sent = json.dumps({"model": "policy", "max_tokens": SAMPLED, "messages": messages}).encode()
        started = time.perf_counter()
        connection.request("POST", f"{parts.path}/chat/completions", sent, headers)
        response = connection.getresponse()
        answer = response.read()
        seconds = time.perf_counter() - started
        if response.status != 200:
            raise SystemExit(answer.decode())
        reply = json.loads(answer)
        messages.append(reply["choices"][0]["message"])
        facts = {"sent": len(sent), "received": len(answer), "prompt": reply["usage"]["prompt_tokens"], "s": seconds}
        print(json.dumps(facts), flush=True)


class Instant:
    """An engine that answers at once, each time with other tokens."""

    max_context = 1 << 20

    def __init__(self, tokenizer: Any) -> None:
        self.ids = tokenizer.encode(WORDS * SAMPLED)[: SAMPLED - 1]
        self.end = tokenizer.eos_token_id

    async def generate(self, request: Any, **_: Any) -> Any:
        from agl.trainer.engines.base import Completion

        shift = request.prompt_ids.size % len(self.ids)
        ids = np.asarray([*self.ids[shift:], *self.ids[:shift], self.end], np.int32)
        return Completion(ids, np.full(ids.size, -0.1, np.float32), "stop", 0)


def resident() -> int:
    """Bytes of memory that this process has resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measured(turns: int, tokens: int) -> dict[str, Any]:
    """The facts of one rollout."""
    from agl.mdp.selection import select
    from agl.trainer.gateway.gateway import Gateway
    from agl.trainer.gateway.server import GatewayServer
    from agl.trainer.quickstart.tokenizer import build_tokenizer
    from agl.trainer.rendering.rendering import Rendering
    from agl.trainer.store import open_store
    from agl.trainer.store.types import NewRollout

    tokenizer = build_tokenizer()
    words = max(1, round((tokens / turns - SAMPLED - 8) / len(tokenizer.encode(WORDS))))
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        path = f"{folder}/bench.db"
        store = await open_store(f"sqlite:///{path}")
        gateway = Gateway(store)
        gateway.serve("policy", Instant(tokenizer), Rendering(tokenizer))
        server = GatewayServer(gateway)
        await server.start()
        # The first rollout warms up, the second counts.
        (_, rollout) = await store.enqueue_rollouts([NewRollout(task="bench") for _ in range(2)])
        rows: list[dict[str, Any]] = []
        for n in (turns // 10 or 1, turns):
            leased = await store.dequeue_rollout()
            assert leased is not None
            rollout = leased.rollout
            access, key = gateway.open_attempt(rollout.rollout_id, 1, selection=select(None))
            gc.collect()
            memory, rows = resident(), []
            command = [sys.executable, __file__, "--agent", f"{access.url}/agents/a/v1", key, str(n), str(words)]
            child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert child.stdout is not None
            cpu = time.process_time()
            async for line in child.stdout:
                now = time.process_time()
                rows.append({**json.loads(line), "cpu": now - cpu})
                cpu = now
            if await child.wait():
                raise SystemExit("the agent failed")
            grown = resident() - memory
            await gateway.close_attempt(rollout.rollout_id, 1)
        started = time.perf_counter()
        calls = await store.query_calls(rollout.rollout_id)
        read = time.perf_counter() - started
        await server.stop()
        await store.close()
        stored = sizes(path, rollout.rollout_id)
    last = calls[-1]
    final = last.prompt_ids.size + last.response_ids.size
    return {
        "turns": turns,
        "tokens": final,
        "sampled_tokens": sum(c.response_ids.size for c in calls),
        "forks": sum(c.fork_cause is not None for c in calls),
        "sent_bytes": sum(r["sent"] for r in rows),
        "received_bytes": sum(r["received"] for r in rows),
        "text_bytes_per_token": rows[-1]["sent"] / rows[-1]["prompt"],
        "cpu_ms_per_call": {str(t + 1): 1e3 * around(rows, t, "cpu") for t in (1, turns // 2, turns - 2)},
        "latency_ms_per_call": {str(t + 1): 1e3 * around(rows, t, "s") for t in (1, turns // 2, turns - 2)},
        "cpu_s_per_rollout": sum(r["cpu"] for r in rows),
        "gateway_memory_bytes": grown,
        "query_calls_s": read,
        **stored,
        "stored_bytes_per_token": sum(stored["stored"].values()) / final,
    }


def around(rows: list[dict[str, Any]], turn: int, key: str) -> float:
    """The median of a few calls about this one."""
    near = sorted(row[key] for row in rows[max(0, turn - 3) : turn + 4])
    return near[len(near) // 2]


def sizes(path: str, rollout_id: str) -> dict[str, Any]:
    """Bytes of a rollout's calls in the file by what they hold, and of the whole file."""
    parts = {"token ids": "length(prompt) + length(response)", "log-probs": "length(logprobs)"}
    parts |= {"requests": "length(cast(request as blob))", "answers": "length(cast(answer as blob))"}
    connection = sqlite3.connect(path)
    try:
        columns = ", ".join(f"sum({sql})" for sql in parts.values())
        row = connection.execute(f"SELECT {columns} FROM calls WHERE rollout_id = ?", (rollout_id,)).fetchone()
    finally:
        connection.close()
    return {"stored": dict(zip(parts, row, strict=True)), "file_bytes": os.path.getsize(path)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32_000, help="of the conversation at its end")
    parser.add_argument("--json", type=Path, help="write the same facts here")
    parser.add_argument("--agent", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        url, key, turns, words = args.agent
        agent(url, key, int(turns), int(words))
        return
    facts = asyncio.run(measured(args.turns, args.tokens))
    for name, value in facts.items():
        for part, one in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name} {part}".ljust(34), f"{one:14,.2f}" if isinstance(one, float) else f"{one:14,}")
    if args.json:
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
