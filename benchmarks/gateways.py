"""A gateway in several processes against one: calls/s, and who uses how much processor time for a call.

    python benchmarks/gateways.py [--processes 2] [--rounds 7] [--turns 40] [--tokens 16000]
    python benchmarks/gateways.py --share 0.15 --turns 10      # calls/s where other programs use the cores

Both gateways are started once and take turns: in a round, agents in processes of their own hold long conversations with
one and then with the other, each sending the whole conversation each turn. The engine answers at once and the store is
a SQLite file, so that what is measured is the gateway and the process of the run, which has engine and store.

"full at" is the rate at which the busiest of a gateway's processes would have a core for itself full, from processor
time alone: what other programs do to it is the same for both. Calls/s need as many idle cores as are printed beside it,
and so is what bounded them. With `--share`, every process of a gateway is stopped whenever it has used this share of a
core: then there are cores enough for both sides on a busy machine too, and calls/s can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scale

FULL = 0.85
"""Of a core: who uses more, over a whole round, is what the others waited for."""
CREDIT = 0.02
"""Processor time that a process under `--share` may save up while it waits, s."""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_seconds() -> float:
    """Of all cores of the machine, s."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def scheduled_seconds(pid: int) -> float:
    """Processor time of a process's threads that live, s: to the nanosecond, where `cpu_seconds` counts in ticks."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


@contextlib.contextmanager
def limited(pids: Sequence[int], share: float) -> Iterator[None]:
    """Within the block each of these processes uses this share of a core at most: it is stopped until it may go on."""
    over = threading.Event()

    def limit() -> None:
        stopped: set[int] = set()
        began = {pid: (scheduled_seconds(pid), time.perf_counter()) for pid in pids}
        while not over.wait(0.003):
            for pid in pids:
                used, now = scheduled_seconds(pid), time.perf_counter()
                too_much = used - began[pid][0] - share * (now - began[pid][1])
                if too_much < -CREDIT:
                    began[pid] = used, now - CREDIT / share
                if (too_much > 0) != (pid in stopped):
                    os.kill(pid, signal.SIGSTOP if too_much > 0 else signal.SIGCONT)
                    stopped ^= {pid}
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=limit)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- the two sides and their agents, each in processes of its own -----------------------------------------------------


async def serve(processes: int) -> None:
    """Open as many attempts as each line of standard input says, and close those before. Answers with JSON.

    The first line is the process ids, that of the run first; the others are URLs and keys.
    """
    from agl.mdp.selection import select
    from agl.trainer.gateway.gateway import Gateway
    from agl.trainer.gateway.processes.group import GatewayProcesses
    from agl.trainer.gateway.server import GatewayServer
    from agl.trainer.quickstart.tokenizer import build_tokenizer
    from agl.trainer.rendering.rendering import Rendering
    from agl.trainer.store import open_store
    from agl.trainer.store.types import NewRollout

    tokenizer = build_tokenizer()
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        store = await open_store(f"sqlite:///{directory}/bench.db")
        stack.push_async_callback(store.close)
        gateway = Gateway(store) if processes == 1 else GatewayProcesses(store, processes)
        gateway.serve("policy", scale.Instant(tokenizer), Rendering(tokenizer))
        server = GatewayServer(gateway)
        await server.start()
        stack.push_async_callback(server.stop)
        pids = [os.getpid()]
        if isinstance(gateway, GatewayProcesses):
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            pids += gateway.pids
        print(json.dumps(pids), flush=True)
        opened: list[Any] = []
        while line := await asyncio.to_thread(sys.stdin.readline):
            await asyncio.gather(*(gateway.close_attempt(access.rollout_id, 1) for access, _ in opened))
            opened.clear()
            await store.enqueue_rollouts([NewRollout(task="bench")] * int(line))
            for _ in range(int(line)):
                leased = await store.dequeue_rollout()
                assert leased is not None
                opened.append(gateway.open_attempt(leased.rollout.rollout_id, 1, selection=select(None)))
            await asyncio.gather(*(access.admitted for access, _ in opened if access.admitted is not None))
            print(json.dumps([(f"{access.url}/agents/a/v1", key) for access, key in opened]), flush=True)


def converse() -> None:
    """Hold a conversation for each line of standard input, URL, key, turns and words of a turn; answers with a line."""
    for line in sys.stdin:
        url, key, turns, words = line.split()
        with contextlib.redirect_stdout(io.StringIO()):
            scale.agent(url, key, int(turns), int(words))
        print("done", flush=True)


class Program:
    """This file in a process of its own, which answers each line with one."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def receive(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"a process of the benchmark ended with {self._process.wait()}")
        return line

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


# -- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """One side's part of a round.

    Attributes:
        calls: in `seconds`. run, gateways, agents: processor time of each process, s; `gateways` is empty where the
            process of the run is the gateway. idle: of all cores, s. share: of a core that a gateway's process may use.
    """

    calls: int
    seconds: float
    run: float
    gateways: tuple[float, ...]
    agents: tuple[float, ...]
    idle: float
    share: float

    @property
    def rate(self) -> float:
        """Calls/s."""
        return self.calls / self.seconds

    @property
    def full_at(self) -> float:
        """Calls/s at which the busiest process of the gateway has a core full."""
        return self.calls / max(self.run, *self.gateways, 0.0)

    @property
    def costs_ms(self) -> tuple[float, float, float]:
        """Processor time of a call, ms: in the process of the run, in gateway processes, in agents."""
        return tuple(1e3 * s / self.calls for s in (self.run, sum(self.gateways), sum(self.agents)))  # type: ignore[return-value]

    @property
    def cores(self) -> float:
        """Cores that all of it would use at `full_at`."""
        return self.full_at * sum(self.costs_ms) / 1e3

    @property
    def bound(self) -> str:
        """What the calls waited for."""
        shares = {
            "the process of the run": self.run / self.share,
            "a gateway process": max(self.gateways, default=0.0) / self.share,
            "an agent's process": max(self.agents),
        }
        name, busiest = max(shares.items(), key=lambda item: item[1])
        if busiest > FULL * self.seconds:
            return name
        used = (self.run + sum(self.gateways) + sum(self.agents)) / self.seconds
        idle = self.idle / self.seconds
        machine = os.cpu_count() or 1
        if idle < (1 - FULL) * machine:
            return f"cores: {used:.1f} of {machine} here, {max(0.0, machine - used - idle):.1f} other programs"
        return "round trips: no process is full, cores are idle"


def play(side: Program, pids: list[int], agents: list[Program], turns: int, words: int, share: float) -> Round:
    """A conversation of every agent with one side."""
    side.send(str(len(agents)))
    attempts = json.loads(side.receive())
    run, gateways, callers = pids[:1], pids[1:], [agent.pid for agent in agents]
    before = {pid: cpu_seconds(pid) for pid in (*pids, *callers)}
    idle, started = idle_seconds(), time.perf_counter()
    with limited(pids, share) if share < 1 else contextlib.nullcontext():
        for agent, (url, key) in zip(agents, attempts, strict=True):
            agent.send(f"{url} {key} {turns} {words}")
        for agent in agents:
            agent.receive()
    seconds = time.perf_counter() - started
    used = {pid: cpu_seconds(pid) - then for pid, then in before.items()}
    of_run, of_gateways, of_agents = (tuple(used[pid] for pid in group) for group in (run, gateways, callers))
    return Round(len(agents) * turns, seconds, of_run[0], of_gateways, of_agents, idle_seconds() - idle, share)


def compare(processes: int, rounds: int, turns: int, tokens: int, share: float) -> dict[int, list[Round]]:
    """Rounds of one process and of several, in turn; the first of each only warms up."""
    from agl.trainer.quickstart.tokenizer import build_tokenizer

    words = max(1, round((tokens / turns - scale.SAMPLED - 8) / len(build_tokenizer().encode(scale.WORDS))))
    with contextlib.ExitStack() as stack:

        def program(*arguments: str) -> Program:
            started = Program(*arguments)
            stack.callback(started.end)
            return started

        sides = {n: program("--serve", str(n)) for n in (1, processes)}
        pids: dict[int, list[int]] = {n: json.loads(side.receive()) for n, side in sides.items()}
        agents = [program("--converse") for _ in range(4 * processes)]
        facts: dict[int, list[Round]] = {n: [] for n in sides}
        for k in range(rounds + 1):
            # Whoever begins has the machine as the round before left it.
            for n in list(sides) if k % 2 else reversed(list(sides)):
                one = play(sides[n], pids[n], agents, turns if k else 2, words, share)
                facts[n] += [one] if k else []
    return facts


def together(rounds: Sequence[Round]) -> Round:
    """All rounds of a side as one."""
    of_gateways, of_agents = (
        tuple(map(sum, zip(*times, strict=True)))
        for times in ([one.gateways for one in rounds], [one.agents for one in rounds])
    )
    totals = {key: sum(getattr(one, key) for one in rounds) for key in ("calls", "seconds", "run", "idle")}
    return Round(**totals, gateways=of_gateways, agents=of_agents, share=rounds[0].share)


def show(facts: dict[int, list[Round]]) -> dict[str, Any]:
    """Print all rounds together, and each; the same as JSON."""
    print("| processes | calls/s | CPU ms of a call: run, gateway, agent | full at | cores for that | bound by |")
    print("|---|---|---|---|---|---|")
    for n, rounds in facts.items():
        every = together(rounds)
        run, gateway, agent = every.costs_ms
        print(
            f"| {n} | {every.rate:.0f} | {run:.2f}, {f'{gateway:.2f}' if gateway else '-'}, {agent:.2f} | "
            f"{every.full_at:.0f}/s | {every.cores:.1f} | {every.bound} |"
        )
    sides = list(zip(*facts.values(), strict=True))
    ratios: dict[str, dict[str, Any]] = {}
    for name, key in (("calls/s", "rate"), ("full at", "full_at")):
        first, second = (getattr(together(rounds), key) for rounds in facts.values())
        each = [getattr(b, key) / getattr(a, key) for a, b in sides]
        ratios[name] = {"all": second / first, "median": statistics.median(each), "each": each}
    cells = [f"{r['all']:.2f}x (rounds: {min(r['each']):.2f} to {max(r['each']):.2f})" for r in ratios.values()]
    print(f"| ratio of all {len(sides)} rounds | {cells[0]} | | {cells[1]} | | |\n")
    for i, pair in enumerate(sides):
        for n, one in zip(facts, pair, strict=True):
            print(f"round {i + 1}, {n}: {one.rate:6.1f} calls/s, full at {one.full_at:.0f}/s; bound by {one.bound}")
        print("    " + ", ".join(f"{name} {r['each'][i]:.2f}x" for name, r in ratios.items()), flush=True)
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that are compared with one")
    parser.add_argument("--rounds", type=int, default=7, help="of a conversation of each of 4 N agents on either side")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=16_000, help="of a conversation at its end")
    parser.add_argument("--share", type=float, default=1.0, help="of a core that each process of a gateway may use")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ratios there")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--converse", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
    elif options.converse:
        converse()
    else:
        shown = show(compare(options.processes, options.rounds, options.turns, options.tokens, options.share))
        if options.json:
            options.json.write_text(json.dumps(shown, indent=2) + "\n")
