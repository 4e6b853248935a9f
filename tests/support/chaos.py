"""A small training run whose processes are killed -9 at random points, and what has to hold when it has ended anyway.

Real processes: `agl store`, `agl train --runners remote`, several `agl runner`. A witness writes to the store and reads
from it all the while, and notes what was acknowledged and what it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from postgres import Server

from agl import semconv
from agl.errors import AglError
from agl.mdp.spans import Span
from agl.trainer.run.batches import Batches
from agl.trainer.store import open_store
from agl.trainer.store.base import NewRollout, Rollout, Store

AGENT = textwrap.dedent('''
    """Asks twice; its reward is a function of what the policy said, so that it can be worked out again."""

    import asyncio
    import hashlib

    import agl
    from openai import AsyncOpenAI


    def reward_of(texts):
        return int(hashlib.sha256("|".join(texts).encode()).hexdigest(), 16) % 1000 / 1000


    @agl.rollout
    async def agent(task, llm: agl.LLM):
        client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=3)
        texts, messages = [], [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            await asyncio.sleep(0.3)
            answer = await client.chat.completions.create(model=llm.model, messages=messages)
            texts.append(answer.choices[0].message.content or "")
            messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "go on"}]
        return {"score": reward_of(texts)}
''')


@dataclass(frozen=True)
class Plan:
    """One disturbed run.

    Attributes:
        steps, batch_size, group_size, tasks: of the training. runners: how many processes.
        kills: how many times each kind is killed: "runner", "store", "trainer", "database".
        pause: seconds between two kills, drawn between these. seed: of all that is drawn.
        seconds: bound on the whole run.
    """

    steps: int = 6
    batch_size: int = 2
    group_size: int = 3
    tasks: int = 5
    runners: int = 2
    kills: dict[str, int] = field(default_factory=lambda: {"runner": 2, "store": 1, "trainer": 1, "database": 1})
    pause: tuple[float, float] = (0.5, 2.0)
    seed: int = 0
    seconds: float = 400.0


def power_cut(server: Server) -> Callable[[], None]:
    """What kills a whole PostgreSQL server and starts it again."""

    def cut() -> None:
        server.kill()
        time.sleep(1.0)
        server.start()

    return cut


class Process:
    """A command that is started again after it was killed; its output goes on in one file."""

    def __init__(self, name: str, command: list[str], log: Path, cwd: Path) -> None:
        self.name, self.command, self.log, self.cwd = name, command, log, cwd
        self.starts = 0
        self._running: subprocess.Popen[bytes] | None = None
        self._file: IO[bytes] = log.open("ab")

    def start(self) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.starts += 1
        self._running = subprocess.Popen(
            self.command, cwd=self.cwd, stdout=self._file, stderr=subprocess.STDOUT, env=environment,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def returned(self) -> int | None:
        assert self._running is not None
        return self._running.poll()

    def kill(self) -> None:
        """SIGKILL to this process alone: what it started has to notice by itself."""
        assert self._running is not None
        self._running.kill()
        self._running.wait()

    def stop(self) -> None:
        if self._running is not None and self._running.poll() is None:
            self._running.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.wait(15)
            if self._running.poll() is None:
                self._running.kill()
                self._running.wait()
        self._file.close()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Witness(threading.Thread):
    """Writes spans to the store and looks at the run's rollouts, and notes what was acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__(name="witness", daemon=True)
        self.url = url
        self.acknowledged: list[Span] = []
        self.ended: dict[str, str] = {}
        self.error: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            asyncio.run(self._watch())
        except BaseException as error:
            self.error = error

    async def _watch(self) -> None:
        store = await open_store(self.url)
        try:
            await store.enqueue_rollouts([NewRollout("watch", mode="collect", run_id="witness", rollout_id="witness")])
            for i in range(1_000_000):
                if self.over.is_set():
                    return
                now = time.time()
                span = Span(
                    f"{i:032x}", f"{i + 1:016x}", None, "witness", 1, "note", now, now,
                    attributes={semconv.OPERATION_NAME: "note", "i": i},
                )  # fmt: skip
                with contextlib.suppress(AglError):
                    await store.add_spans([span])
                    self.acknowledged.append(span)
                if i % 10 == 0:
                    with contextlib.suppress(AglError):
                        for rollout in await store.query_rollouts(mode="train", status=["succeeded"]):
                            self.ended[rollout.rollout_id] = rollout.status
                await asyncio.sleep(0.05)
        finally:
            await store.close()


class Chaos:
    """One disturbed run in a directory.

    Args:
        plan: of the run. model: a policy's directory. directory: where everything goes.
        database: URL of the store's database; a SQLite file if None.
        break_connections: breaks every connection to the database; for SQLite, it is locked for a while.
        say: is told what is done.
    """

    def __init__(
        self,
        plan: Plan,
        model: Path,
        directory: Path,
        *,
        database: str | None = None,
        break_connections: Callable[[], None] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.plan, self.directory, self.say = plan, directory, say
        self.random = random.Random(plan.seed)
        self.database = database or f"sqlite:///{directory / 'store.db'}"
        self.break_connections = break_connections or self._lock_sqlite
        (directory / "agent.py").write_text(AGENT)
        tasks = "".join(json.dumps({"question": f"what is {i} + {i}?"}) + "\n" for i in range(plan.tasks))
        (directory / "tasks.jsonl").write_text(tasks)
        store_port, coordinator_port = _free_port(), _free_port()
        self.store_url = f"http://127.0.0.1:{store_port}"
        agl = [sys.executable, "-c", "from agl.trainer.cli import main; main()"]

        def process(name: str, *arguments: str) -> Process:
            return Process(name, [*agl, *arguments], directory / f"{name}.log", directory)

        self.store = process("store", "store", "--db", self.database, "--port", str(store_port))
        self.trainer = process(
            "trainer", "train", "--tasks", "tasks.jsonl", "--model", str(model), "--runners", "remote",
            "--store", self.store_url, "--port", str(coordinator_port), "--out", "run", "--resume", "--quiet",
            "--steps", str(plan.steps), "--batch-size", str(plan.batch_size), "--group-size", str(plan.group_size),
            "--max-response-tokens", "8", "--learning-rate", "1e-3", "--device", "cpu", "--seed", str(plan.seed),
            "--max-attempts", "10", "--timeout", "60", "--silent-seconds", "12", "--json", "result.json",
        )  # fmt: skip
        self.runners = [
            process(
                f"runner-{i}", "runner", "--store", f"http://127.0.0.1:{coordinator_port}", "--agent", "agent.py:agent",
                "--workers", "2",
            )
            for i in range(plan.runners)
        ]  # fmt: skip
        self.witness = Witness(self.store_url)
        self.killed: Counter[str] = Counter()

    def run(self) -> None:
        """Train and kill until training has ended by itself.

        Raises:
            TimeoutError, AssertionError: it did not, or a process ended that nobody killed.
        """
        (self.directory / "run").mkdir(exist_ok=True)
        deadline = time.monotonic() + self.plan.seconds
        due = [kind for kind, n in self.plan.kills.items() for _ in range(n)]
        self.random.shuffle(due)
        with self._all():
            for process in (self.store, self.trainer, *self.runners):
                process.start()
            self.witness.start()
            self._await_first_rollout(deadline)
            while self.trainer.returned() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"still training after {self.plan.seconds:g} s; {self._tails()}")
                pause = self.random.uniform(*self.plan.pause)
                self._pass(pause)
                if due and self.trainer.returned() is None:
                    self._kill(due.pop())
            self.witness.over.set()
            self.witness.join(90)
            self.say(f"training ended; killed {dict(self.killed)}")
            assert self.trainer.returned() == 0, self.trainer.said()[-3000:]
            assert self.witness.error is None, self.witness.error
            assert not due, f"training had ended before {due}: plan more steps"

    @contextlib.contextmanager
    def _all(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.witness.over.set()
            for process in (*self.runners, self.trainer, self.store):
                process.stop()

    def _await_first_rollout(self, deadline: float) -> None:
        while not self.witness.ended:
            self._pass(0.2)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rollout ended; {self._tails()}")

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.trainer.returned() is None:
            for process in (self.store, *self.runners):
                assert process.returned() is None, f"{process.name} ended by itself: {process.said()[-3000:]}"
            time.sleep(0.05)

    def _kill(self, kind: str) -> None:
        self.killed[kind] += 1
        if kind == "database":
            self.say("the database's connections break")
            self.break_connections()
            return
        process = {"store": self.store, "trainer": self.trainer}.get(kind) or self.random.choice(self.runners)
        down = self.random.uniform(0.2, 2.0)
        self.say(f"kill -9 {process.name}, down for {down:.1f} s")
        process.kill()
        time.sleep(down)
        process.start()

    def _lock_sqlite(self) -> None:
        path = self.database.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(1.5)
            other.execute("ROLLBACK")

    def _tails(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.said()[-1500:]}" for p in (self.trainer, self.store, *self.runners))

    # -- what has to hold ---------------------------------------------------------------------------------------------
    async def check(self) -> dict[str, Any]:
        """Check the store and the checkpoint that the run left; what was counted."""
        store = await open_store(self.database)
        try:
            await self._nothing_acknowledged_is_lost(store)
            result = json.loads((self.directory / "result.json").read_text())
            rollouts = await store.query_rollouts(run_id=result["run_id"])
            trained = await self._trained_once(store, rollouts)
            await self._rewards_are_the_agents(store, rollouts)
            self._every_task_accounted_for(rollouts)
            self._state(result)
            self._runners_are_brief()
            return {
                "killed": dict(self.killed), "rollouts": len(rollouts), "trained_calls": trained,
                "statuses": dict(Counter(r.status for r in rollouts)), "attempts": sum(r.attempts for r in rollouts),
                "witness_spans": len(self.witness.acknowledged), "trainer_starts": self.trainer.starts,
            }  # fmt: skip
        finally:
            await store.close()

    async def _nothing_acknowledged_is_lost(self, store: Store) -> None:
        kept = {s.span_id: s for s in await store.query_spans("witness")}
        for span in self.witness.acknowledged:
            assert span.span_id in kept, f"span {span.attributes['i']} was acknowledged, and is gone"
        assert len(self.witness.acknowledged) > 20
        for rollout_id, status in self.witness.ended.items():
            assert (await store.get_rollout(rollout_id)).status == status

    async def _trained_once(self, store: Store, rollouts: list[Rollout]) -> int:
        seen: dict[tuple[int, int], str] = {}
        count = 0
        for rollout in rollouts:
            rows = [t for t in await store.query_trained_calls(rollout.rollout_id) if t.dropped is None and t.tokens]
            assert len({t.step for t in rows}) <= 1, f"rollout {rollout.rollout_id} was trained in several steps"
            assert len({t.call_id for t in rows}) == len(rows)
            if not rows:
                continue
            assert rollout.status == "succeeded"
            assert rollout.step == rows[0].step - 1
            last = {c.id for c in await store.query_calls(rollout.rollout_id, rollout.attempts)}
            assert {t.call_id for t in rows} <= last, "calls of an attempt that was given up were trained"
            place = (rollout.step, rollout.index)
            assert place not in seen, f"step {place[0]} place {place[1]} was trained from two rollouts"
            seen[place] = rollout.rollout_id
            count += len(rows)
        assert count
        return count

    async def _rewards_are_the_agents(self, store: Store, rollouts: list[Rollout]) -> None:
        scope: dict[str, Any] = {}
        exec(AGENT.partition("@agl.rollout")[0].replace("from openai import AsyncOpenAI", ""), scope)
        for rollout in rollouts:
            if rollout.status != "succeeded":
                continue
            calls = await store.query_calls(rollout.rollout_id, rollout.attempts)
            spans = await store.query_spans(rollout.rollout_id, rollout.attempts)
            values = [s.attributes[semconv.REWARD_VALUE] for s in spans if s.operation == semconv.REWARD]
            good = [c for c in calls if c.error is None and c.finish_reason != "cancelled"]
            texts = [str(c.response.get("content") or "") for c in good]
            assert values == [scope["reward_of"](texts)], f"rollout {rollout.rollout_id}: {values}"
            attempts = await store.query_attempts(rollout.rollout_id)
            assert [a.status for a in attempts].count("succeeded") == 1

    def _every_task_accounted_for(self, rollouts: list[Rollout]) -> None:
        plan = self.plan
        tasks = [json.loads(line) for line in (self.directory / "tasks.jsonl").read_text().splitlines()]
        batches = Batches(tasks, plan.batch_size, plan.seed)
        left = [r for r in rollouts if r.status not in ("succeeded", "failed", "cancelled")]
        assert not left, f"{len(left)} rollouts were left {left[0].status}"
        for step in range(plan.steps):
            good = {r.index: r for r in rollouts if r.step == step and r.status == "succeeded" and r.mode == "train"}
            assert sorted(good) == list(range(plan.batch_size * plan.group_size)), f"step {step}: {sorted(good)}"
            wanted = [i for i in batches.indices(step) for _ in range(plan.group_size)]
            assert [good[i].metadata["task_index"] for i in sorted(good)] == wanted, f"step {step}"

    def _state(self, result: dict[str, Any]) -> None:
        import torch

        assert [h["step"] for h in result["history"] if h["step"]] == list(range(1, self.plan.steps + 1))
        checkpoint = Path(self.directory, result["checkpoint"])
        facts = json.loads((checkpoint / "run.json").read_text())
        assert facts["step"] == self.plan.steps
        versions = [h["policy_version"] for h in result["history"] if "policy_version" in h]
        assert versions == sorted(versions)
        assert facts["policy_versions"] == {"policy": versions[-1]}
        state = torch.load(checkpoint / "states" / "policy.pt", weights_only=False)
        counts = {int(s["step"]) for s in state["learner"]["optimizer"]["state"].values()}
        assert counts == {versions[-1]}, "the optimiser has made another number of updates than the policy has versions"

    def _runners_are_brief(self) -> None:
        """A server that is gone is news once, not at every try."""
        outages = sum(self.killed[kind] for kind in ("store", "trainer", "database"))
        for runner in self.runners:
            assert runner.said().count("lost the server") <= outages + 1, runner.said()[-3000:]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
