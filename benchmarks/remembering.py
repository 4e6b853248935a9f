"""What a memory costs: writing and searching it, in and out of a run, next to code that encodes again at each query.

    python benchmarks/remembering.py [--entries 1000] [--searches 50] [--json FILE]

"a run" is what a rollout's search costs in the trainer: one version, whose index is made by the first search. The
baseline is the founding guide's `retrieve_relevant_context`: every memory is encoded at every query and the encoder is
made anew. Its encoder here is a hashed bag of character trigrams, which costs a hundredth of the sentence transformer
that the guide loads; so the baseline is flattered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

import agl
from agl.trainer.memory.ranking import Hybrid, Query, find
from agl.trainer.store import open_store
from agl.trainer.store.types import MemoryEntry

DRINKS = ("tea", "milk", "water", "cocoa", "juice", "coffee", "cider", "lemonade")


def texts(n: int) -> list[str]:
    return [f"Customer C-{i} came in the morning and said: I prefer {DRINKS[i % len(DRINKS)]}." for i in range(n)]


def milliseconds(operation: Callable[[int], object], times: int) -> float:
    """The median of an operation, which gets its number."""
    took = []
    for i in range(times):
        began = time.perf_counter()
        operation(i)
        took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took)


def encode(text: str) -> np.ndarray:
    """A hashed bag of character trigrams, float32 [384], of length 1."""
    vector = np.zeros(384, np.float32)
    for i in range(len(text) - 2):
        vector[zlib.crc32(text[i : i + 3].encode()) % 384] += 1
    return vector / (np.linalg.norm(vector) or 1.0)


def guide(entries: list[str], searches: int) -> float:
    """Milliseconds of a search that encodes everything."""

    def search(i: int) -> list[str]:
        query = encode(f"What does C-{i} prefer?")
        scored = [(text, float(query @ encode(text))) for text in entries]
        return [text for text, _ in sorted(scored, key=lambda pair: -pair[1])[:5]]

    return milliseconds(search, max(3, searches // 10))


def memory(entries: list[str], searches: int, folder: Path | None) -> dict[str, float]:
    """Milliseconds of each operation on an `agl.Memory`."""
    kept = agl.Memory(None if folder is None else folder / "memory.db", keep=len(entries))
    kept.put_all((("e",), str(i), text, None, 0.0) for i, text in enumerate(entries))
    put = milliseconds(lambda i: kept.put(("e",), f"{i}", f"{entries[i]} Again."), searches)
    search = milliseconds(lambda i: kept.search(("e",), query=f"What does C-{i} prefer?", limit=5), searches)
    kept.close()
    return {"put": put, "search": search}


async def run(entries: list[str], searches: int, folder: Path) -> dict[str, float]:
    """Milliseconds of the first search of a version and of later ones, as a run makes them, and of a step's merge."""
    store = await open_store(str(folder / "run.db"))
    rows = [
        MemoryEntry(("e",), str(i), text, text, 0.0, created_at=1.0, updated_at=1.0) for i, text in enumerate(entries)
    ]
    await store.merge_memories("run", 0, rows)
    took = []
    for i in range(searches + 1):
        began = time.perf_counter()
        await find(store, "run", 0, rows, Query(f"What does C-{i} prefer?", ("e",), limit=5), Hybrid(), None)
        took.append(1e3 * (time.perf_counter() - began))
    began = time.perf_counter()
    await store.merge_memories("run", 1, rows[:128])
    merged = 1e3 * (time.perf_counter() - began)
    await store.close()
    return {"first": took[0], "search": statistics.median(took[1:]), "merge": merged}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--searches", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    entries, searches = texts(options.entries), options.searches
    with tempfile.TemporaryDirectory() as folder:
        file, private = memory(entries, searches, Path(folder)), memory(entries, searches, None)
        runs = asyncio.run(run(entries, searches, Path(folder)))
    baseline = guide(entries, searches)
    print(f"| {options.entries} entries | milliseconds |\n|---|---|")
    rows = {
        "search, in a rollout": runs["search"],
        "search, the first one of a step": runs["first"],
        "merge of a step's 128 entries": runs["merge"],
        "search, `agl.Memory()`": private["search"],
        "search, `agl.Memory(file)`": file["search"],
        "put, `agl.Memory()`": private["put"],
        "put, `agl.Memory(file)`": file["put"],
        "search that encodes everything again": baseline,
    }
    for name, value in rows.items():
        print(f"| {name} | {value:.1f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
