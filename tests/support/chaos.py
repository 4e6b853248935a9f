"""A small training run whose processes are killed -9 at random points, and what has to hold when it has ended anyway.

Real processes: `agl train`, with `--runners remote` also `agl store` and several `agl runner`. A witness writes to the
store and reads from it all the while, and notes what was acknowledged and what it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
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
from processes import AGL, family, free_port

from agl import semconv
from agl.errors import AglError
from agl.mdp.spans import Span
from agl.trainer.run.batches import Batches
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout, Rollout

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
            await asyncio.sleep(task["pause"])
            answer = await client.chat.completions.create(model=llm.model, messages=messages)
            texts.append(answer.choices[0].message.content or "")
            messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "go on"}]
        return {"score": reward_of(texts)}
''')

TRAIN = textwrap.dedent('''
    """Does what `agl train` does, in worker processes or with verl; both import the agent by its file's name."""

    import json
    import sys
    from pathlib import Path

    import agl

    if __name__ == "__main__":
        where, algorithm, trainer = map(json.loads, sys.argv[1:])
        tasks = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
        made = agl.VERL(backend="cluster", **algorithm) if where == "verl" else agl.GRPO(**algorithm)
        result = agl.Trainer(made, progress=False, **trainer).fit("agent.py:agent", tasks, resume=True)
        facts = {"run_id": result.run_id, "checkpoint": str(result.checkpoint), "history": result.history}
        Path("result.json").write_text(json.dumps(facts))
''')


@dataclass(frozen=True)
class Plan:
    """One disturbed run.

    Attributes:
        where: rollouts run: "remote" (in `runners` processes of as many `workers`), "local", "process" or "verl".
        steps, batch_size, group_size, tasks: of the training. turn: seconds that the agent waits before a call.
        kills: how many times each kind is killed: "database", "store", "trainer" and "runner" alone; "policy", the
            trainer's policy process; "worker", a process that runs rollouts for it; "run", everything at once.
        pause: seconds between two kills, drawn between these. seed: of the training.
        moments: seed of what is killed when; None for `seed`.
        seconds: bound on the whole run.
    """

    where: str = "remote"
    steps: int = 6
    batch_size: int = 2
    group_size: int = 3
    tasks: int = 5
    runners: int = 2
    workers: int = 2
    turn: float = 0.3
    kills: dict[str, int] = field(default_factory=lambda: {"runner": 2, "store": 1, "trainer": 1, "database": 1})
    pause: tuple[float, float] = (0.5, 2.0)
    seed: int = 0
    moments: int | None = None
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

    def kill(self, *, group: bool = False) -> None:
        """SIGKILL to this process, or to its process group; what it started besides has to notice by itself."""
        assert self._running is not None
        if group:
            os.killpg(self._running.pid, signal.SIGKILL)
        else:
            self._running.kill()
        self._running.wait()

    def family(self) -> list[int]:
        """This process and all that it started, children after their parents."""
        assert self._running is not None
        return [pid for pid, _ in family(self._running.pid)]

    def wait(self, seconds: float) -> int:
        """Wait until it ends by itself. Raises subprocess.TimeoutExpired."""
        assert self._running is not None
        return self._running.wait(seconds)

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

    Attributes:
        killed: what was killed how often. checkpoints: name -> seconds after the start when it was seen.
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
        self.random = random.Random(plan.seed if plan.moments is None else plan.moments)
        self.database = database or f"sqlite:///{directory / 'store.db'}"
        self.break_connections = break_connections or self._lock_sqlite
        (directory / "agent.py").write_text(AGENT)
        (directory / "train.py").write_text(TRAIN)
        questions = [{"question": f"what is {i} + {i}?", "pause": plan.turn} for i in range(plan.tasks)]
        (directory / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in questions))
        self.model = model
        self.store: Process | None = None
        self.runners: list[Process] = []
        store_url, port = self.database, 0
        if plan.where == "remote":
            store_port, port = free_port(), free_port()
            store_url = f"http://127.0.0.1:{store_port}"
            self.store = self._process("store", *AGL, "store", "--db", self.database, "--port", str(store_port))
            self.runners = [
                self._process(
                    f"runner-{i}", *AGL, "runner", "--store", f"http://127.0.0.1:{port}", "--agent", "agent.py:agent",
                    "--n-workers", str(plan.workers),
                )
                for i in range(plan.runners)
            ]  # fmt: skip
        self.trainer = self._process("trainer", *self._training(store_url, port))
        self.witness = Witness(store_url)
        self.killed: Counter[str] = Counter()
        self.checkpoints: dict[str, float] = {}

    def _process(self, name: str, *command: str) -> Process:
        return Process(name, [*command], self.directory / f"{name}.log", self.directory)

    def _training(self, store_url: str, port: int) -> list[str]:
        """The command that trains, and goes on with the run where there is one."""
        plan = self.plan
        algorithm: dict[str, Any] = {
            "model": str(self.model), "steps": plan.steps, "batch_size": plan.batch_size,
            "group_size": plan.group_size, "max_response_tokens": 8, "learning_rate": 1e-3, "device": "cpu",
        }  # fmt: skip
        trainer = {"store": store_url, "seed": plan.seed, "max_attempts": 10, "timeout": 60}
        if plan.where in ("process", "verl"):
            runners = {"runners": "process"} if plan.where == "process" else {}
            if plan.where == "verl":
                from verl_cpu import settings

                os.environ.update(settings.environment())
                algorithm["config"] = settings.config()
            trainer |= {"n_workers": plan.workers, "directory": "run", **runners}
            return [sys.executable, "train.py", *map(json.dumps, (plan.where, algorithm, trainer))]
        remote = ["--port", str(port), "--silent-seconds", "12"]
        local = ["--agent", "agent.py:agent", "--n-workers", str(plan.workers)]
        return [
            *AGL, "train", "--tasks", "tasks.jsonl", "--runners", plan.where, "--out", "run", "--resume", "--quiet",
            "--json", "result.json", *(remote if plan.where == "remote" else local),
            *(word for k, v in (algorithm | trainer).items() for word in (f"--{k.replace('_', '-')}", str(v))),
        ]  # fmt: skip

    @property
    def processes(self) -> list[Process]:
        return [*([self.store] if self.store else []), self.trainer, *self.runners]

    def run(self) -> None:
        """Train and kill until training has ended by itself; `killed` may then be fewer than were planned.

        Raises:
            TimeoutError, AssertionError: it did not, or a process ended that nobody killed.
        """
        (self.directory / "run").mkdir(exist_ok=True)
        deadline = time.monotonic() + self.plan.seconds
        due = [kind for kind, n in self.plan.kills.items() for _ in range(n)]
        self.random.shuffle(due)
        with self._all():
            self._began = time.monotonic()
            for process in self.processes:
                process.start()
            self.witness.start()
            if "run" not in self.plan.kills:
                self._await_first_rollout(deadline)
            while self.trainer.returned() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"still training after {self.plan.seconds:g} s; {self._tails()}")
                self._pass(self.random.uniform(*self.plan.pause))
                if due and self.trainer.returned() is None and self._kill(due[-1]):
                    self.killed[due.pop()] += 1
            self.witness.over.set()
            self.witness.join(90)
            self.say(f"training ended; killed {dict(self.killed)}")
            assert self.trainer.returned() == 0, self.trainer.said()[-3000:]
            assert self.witness.error is None, self.witness.error

    @contextlib.contextmanager
    def _all(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.witness.over.set()
            for process in reversed(self.processes):
                process.stop()

    def _await_first_rollout(self, deadline: float) -> None:
        while not self.witness.ended:
            self._pass(0.2)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rollout ended; {self._tails()}")

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.trainer.returned() is None:
            for process in self.processes:
                ended = process is not self.trainer and process.returned() is not None
                assert not ended, f"{process.name} ended by itself: {process.said()[-3000:]}"
            for path in (self.directory / "run" / "checkpoints").glob("*step?*"):
                self.checkpoints.setdefault(path.name, time.monotonic() - self._began)
            time.sleep(0.02)

    def _kill(self, kind: str) -> bool:
        """Whether there was something to kill."""
        if kind == "database":
            self.say("the database's connections break")
            self.break_connections()
            return True
        down = self.random.uniform(0.2, 2.0)
        if kind in ("policy", "worker"):
            return self._kill_child(kind)
        if kind == "run":
            self._power_cut(down)
            return True
        process = {"store": self.store, "trainer": self.trainer}.get(kind) or self.random.choice(self.runners)
        self.say(f"kill -9 {process.name}, down for {down:.1f} s")
        process.kill()
        time.sleep(down)
        process.start()
        return True

    def _power_cut(self, down: float) -> None:
        """Everything dies at once; for verl, all that Ray has started, too, as when a machine loses power."""
        pids = self.trainer.family() if self.plan.where == "verl" else []
        self.say(f"kill -9 everything after {len(self.checkpoints)} steps, down for {down:.1f} s")
        for process in self.processes:
            process.kill(group=True)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(down)
        for process in self.processes:
            process.start()

    def _kill_child(self, kind: str) -> bool:
        """Kill the policy's process, without which training ends and is started again, or one that runs rollouts."""
        policy = [pid for pid in self.trainer.family()[1:] if b"agl.trainer.local" in _command(pid)]
        workers = [pid for pid in self.trainer.family()[2:] if pid not in policy]
        pids = policy if kind == "policy" else workers[-1:]
        if not pids:
            return False
        self.say(f"kill -9 {kind} {pids[0]} after {len(self.checkpoints)} steps")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        if kind == "policy" and self.trainer.wait(120):
            self.trainer.start()
        return True

    def _lock_sqlite(self) -> None:
        path = self.database.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(1.5)
            other.execute("ROLLBACK")

    def _tails(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.said()[-1500:]}" for p in self.processes)

    # -- what has to hold ---------------------------------------------------------------------------------------------
    async def check(self) -> dict[str, Any]:
        """Check the store and the checkpoint that the run left; what was counted."""
        store = await open_store(self.database)
        try:
            await self._nothing_acknowledged_is_lost(store)
            result = json.loads((self.directory / "result.json").read_text())
            rollouts = await store.query_rollouts(run_id=result["run_id"])
            trained = await trained_once(store, rollouts)
            await self._rewards_are_the_agents(store, rollouts)
            self._every_task_accounted_for(rollouts)
            self._state(result)
            self._runners_are_brief()
            return {
                "killed": dict(self.killed), "rollouts": len(rollouts), "trained_calls": trained,
                "second_attempts": sum(r.attempts > 1 and r.status == "succeeded" for r in rollouts),
                "statuses": dict(Counter(r.status for r in rollouts)), "attempts": sum(r.attempts for r in rollouts),
                "witness_spans": len(self.witness.acknowledged), "trainer_starts": self.trainer.starts,
            }  # fmt: skip
        finally:
            await store.close()

    @property
    def exact(self) -> bool:
        """Whether two runs of the same seed make the same policy, however often they were resumed."""
        return self.plan.where != "verl" and self.plan.runners * self.plan.workers == 1

    def same_policy(self, other: Chaos) -> bool:
        """Whether the last checkpoints hold the same weights and optimiser states, to the bit."""
        import torch

        states = [
            torch.load(chaos.checkpoint() / "states" / "policy.pt", weights_only=False) for chaos in (self, other)
        ]
        return _equal(*states)

    def checkpoint(self) -> Path:
        return Path(self.directory, json.loads((self.directory / "result.json").read_text())["checkpoint"])

    async def _nothing_acknowledged_is_lost(self, store: Store) -> None:
        kept = {s.span_id: s for s in await store.query_spans("witness")}
        for span in self.witness.acknowledged:
            assert span.span_id in kept, f"span {span.attributes['i']} was acknowledged, and is gone"
        assert len(self.witness.acknowledged) > 20
        for rollout_id, status in self.witness.ended.items():
            assert (await store.get_rollout(rollout_id)).status == status

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
        checkpoint = self.checkpoint()
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
        outages = sum(n for kind, n in self.killed.items() if kind not in ("runner", "worker"))
        for runner in self.runners:
            assert runner.said().count("does not answer (") <= outages + runner.starts + 1, runner.said()[-3000:]


async def trained_once(store: Store, rollouts: list[Rollout]) -> int:
    """Check that each place of a step was trained from one rollout, once; how many calls were trained."""
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


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _equal(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b
