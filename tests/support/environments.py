"""One subject of the environments' suite per kind: a real environment, who solves it, and how it breaks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import small_harbor

from agl.testing.provider import Reply, Script, last_said

Loaded = tuple[str, dict[str, Any]]
"""What `agl.environments.load` takes."""
SUPPORT = Path(__file__).parent


def fixed(name: str, **options: Any) -> Callable[[], AbstractContextManager[Loaded]]:
    """An environment that needs no server."""
    return lambda: contextlib.nullcontext((name, options))


@dataclass(frozen=True)
class Subject:
    """
    Attributes:
        id: of the test. package: that it needs. open: what to load, while a server runs. broken: likewise, of one that
            fails while it is played or graded, though nothing in the answers is wrong.
        oracle: task -> a model that solves it. full: its score; None where luck is in it.
        floor: the score of a policy that says nothing. garbage: of one that says nonsense; None for the same. n: tasks.
        generated: whether there are as many tasks as one asks for.
    """

    id: str
    package: str
    open: Callable[[], AbstractContextManager[Loaded]]
    oracle: Callable[[dict[str, Any]], Script]
    broken: Callable[[], AbstractContextManager[Loaded]] | None = None
    full: float = 1.0
    floor: float = 0.0
    garbage: float | None = None
    n: int = 8
    generated: bool = True
    tools: tuple[str, ...] = field(default=())

    @property
    def missing(self) -> str | None:
        """Why it cannot run here."""
        parent = self.package.partition(".")[0]
        return None if find_spec(parent) and find_spec(self.package) else f"{self.package} is not installed"


def answers(task: dict[str, Any]) -> Script:
    return lambda body: Reply(f"The answer is {task.get('answer', task.get('target'))}")


def exactly(task: dict[str, Any]) -> Script:
    return lambda body: Reply(task["answer"])


def walks(task: dict[str, Any]) -> Script:
    """The shortest way over the ice."""
    lake, moves = task["options"]["desc"], {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}

    def way(body: dict[str, Any]) -> Reply:
        text = last_said(body)[1].split("\n")[-len(lake) :]
        start = next((y, row.index("[")) for y, row in enumerate(text) if "[" in row)
        queue, seen = deque([(start, ())]), {start}
        while queue:
            (y, x), path = queue.popleft()
            if lake[y][x] == "G":
                return Reply(f"I go {path[0]}")
            for name, (dy, dx) in moves.items():
                place = (y + dy, x + dx)
                if 0 <= place[0] < len(lake) > place[1] >= 0 and lake[place[0]][place[1]] != "H" and place not in seen:
                    seen.add(place)
                    queue.append((place, (*path, name)))
        raise AssertionError("no way")

    return way


def drives(task: dict[str, Any]) -> Script:
    """The best way in the taxi's own table of states, one action per request."""
    import gymnasium

    game: Any = gymnasium.make(task["game"]).unwrapped
    state, _ = game.reset(seed=task["seed"])
    queue, paths = deque([int(state)]), {int(state): ()}
    best: tuple[int, ...] = ()
    while queue and not best:
        at = queue.popleft()
        for action in range(6):
            _, after, _, done = game.P[at][action][0]
            if after not in paths:
                paths[after] = (*paths[at], action)
                queue.append(after)
                if done:
                    best = paths[after]
    names = ("south", "north", "east", "west", "pickup", "dropoff")
    left = iter(best)
    return lambda body: Reply(names[next(left)])


def guesses(task: dict[str, Any]) -> Script:
    """Halves what is left."""

    def halve(body: dict[str, Any]) -> Reply:
        low, high = 0, 64
        texts = [m["content"] for m in body["messages"]]
        for said, heard in itertools.pairwise(texts):
            if heard.startswith("too"):
                low, high = (int(said) + 1, high) if heard == "too low" else (low, int(said))
        return Reply(str((low + high) // 2))

    return halve


def adds(task: dict[str, Any]) -> Script:
    """Calls the tool, then repeats what it says."""

    def call(body: dict[str, Any]) -> Reply:
        role, text = last_said(body)
        if role == "tool":
            return Reply(f"It is {text}")
        a, b = map(int, re.findall(r"\d+", text))
        return Reply(tools=(("add", {"a": a, "b": b}),))

    return call


def counts(task: dict[str, Any]) -> Script:
    """NeMo Gym's counter: both increments, then a look."""

    def call(body: dict[str, Any]) -> Reply:
        if any(m["role"] == "tool" for m in body["messages"]):
            return Reply("done")
        numbers = map(int, re.findall(r"add (\d+)", last_said(body)[1]))
        return Reply(tools=tuple(("increment_counter", {"count": n}) for n in numbers))

    return call


BROKEN = "echo the grader is damaged; exit 1"


def shell(task: dict[str, Any]) -> Script:
    """Runs a command that solves the task, and says so."""

    def call(body: dict[str, Any]) -> Reply:
        role, text = last_said(body)
        return Reply("done") if role == "tool" else Reply(tools=(("bash", {"command": small_harbor.solve(text)}),))

    return call


def fruit(word: Callable[[str], Reply]) -> Callable[[dict[str, Any]], Script]:
    from small_openenv import WORDS

    def script(task: dict[str, Any]) -> Script:
        def guess(body: dict[str, Any]) -> Reply:
            hint = next(m["content"] for m in body["messages"] if "letters" in m["content"])
            length, first = re.search(r"(\d+) letters that begins with (\w)", hint).groups()  # type: ignore[union-attr]
            tried = [m["content"] for m in body["messages"] if m["role"] == "assistant"]
            fits = [w for w in WORDS if len(w) == int(length) and w[0] == first and w not in tried]
            return word(fits[0])

        return guess

    return script


def openenv(**options: bool) -> Callable[[], AbstractContextManager[Loaded]]:
    @contextlib.contextmanager
    def opened() -> Iterator[Loaded]:
        from small_openenv import server

        with server(**options) as url:
            yield f"openenv:{url}", {}

    return opened


def nemo(name: str, broken: bool = False) -> Callable[[], AbstractContextManager[Loaded]]:
    @contextlib.contextmanager
    def opened() -> Iterator[Loaded]:
        import small_nemo_gym

        server = getattr(small_nemo_gym, name)
        with small_nemo_gym.running(server, broken=broken) as url:
            yield f"nemo-gym:{url}", {"tasks": small_nemo_gym.examples(server)}

    return opened


def subjects() -> list[Subject]:
    """All of them; those whose package is missing say so."""
    small = str(SUPPORT / "small_inspect.py")
    rg = "reasoning_gym"
    found = [
        Subject("reasoning-gym:gcd", rg, fixed("reasoning-gym:gcd"), exactly),
        Subject("reasoning-gym:chain_sum", rg, fixed("reasoning-gym:chain_sum", max_terms=3), exactly),
        # Its grader gives 0.01 for an expression that is wrong.
        Subject(
            "reasoning-gym:countdown", rg, fixed("reasoning-gym:countdown"), lambda task: exactly(_worked(task)),
            garbage=0.01,
        ),
        Subject(
            "gymnasium:FrozenLake", "gymnasium", fixed("gymnasium:FrozenLake-v1", is_slippery=False), walks,
            broken=fixed("gymnasium:small_gymnasium:Broken-v0", actions=["left", "right"], floor=0),
        ),
        Subject("gymnasium:Taxi", "gymnasium", fixed("gymnasium:Taxi-v4"), drives, full=1.0, floor=-2000.0),
        Subject(
            "verifiers:single", "verifiers.legacy", fixed("verifiers:small_verifiers"), answers,
            broken=fixed("verifiers:small_verifiers", broken="grader"), generated=False,
        ),
        Subject(
            "verifiers:multi", "verifiers.legacy", fixed("verifiers:small_verifiers", kind="multi"), guesses,
            broken=fixed("verifiers:small_verifiers", kind="multi", broken="game"), generated=False,
        ),
        Subject(
            "verifiers:tool", "verifiers.legacy", fixed("verifiers:small_verifiers", kind="tool"), adds,
            generated=False, tools=("add",),
        ),
        Subject(
            "inspect:single", "inspect_ai", fixed(f"inspect:{small}@sums"), answers,
            broken=fixed(f"inspect:{small}@broken"), generated=False,
        ),
        Subject(
            "inspect:tool", "inspect_ai", fixed(f"inspect:{small}@tools"), adds, generated=False, tools=("add",)
        ),
        Subject(
            "inspect:memory_poison",
            "inspect_evals",
            fixed("inspect:inspect_evals/agent_threat_bench_memory_poison", score="utility"),
            lambda task: lambda body: Reply(f"It is the {task['metadata']['expected_answer']}."),
            generated=False,
        ),
        Subject(
            "nemo-gym:counter", "nemo_gym", nemo("COUNTER"), counts, broken=nemo("COUNTER", broken=True),
            n=5, generated=False, tools=("increment_counter",),
        ),
        Subject(
            "nemo-gym:mcqa", "nemo_gym", nemo("QUESTIONS"),
            lambda task: lambda body: Reply(f"\\boxed{{{task['expected_answer']}}}"), n=5, generated=False,
        ),
    ]  # fmt: skip
    found.append(
        Subject(
            "harbor:sums", "openai", small_harbor.tasks, shell, broken=functools.partial(small_harbor.tasks, 2, BROKEN),
            n=4, generated=False, tools=("bash",),
        )
    )  # fmt: skip
    if find_spec("openenv"):
        found += [
            Subject("openenv:text", "openenv", openenv(), fruit(Reply), broken=openenv(broken=True)),
            Subject(
                "openenv:typed", "openenv", openenv(typed=True),
                fruit(lambda w: Reply(tools=(("act", {"field": len(w), "colour": "white"}),))), tools=("act",),
            ),
        ]  # fmt: skip
    else:
        found.append(Subject("openenv:text", "openenv", openenv(), answers))
    return found


def _worked(task: dict[str, Any]) -> dict[str, Any]:
    """A countdown's own solution, which its task does not show as the answer."""
    import reasoning_gym

    options = json.loads(task["options"])
    entry = reasoning_gym.create_dataset(task["dataset"], **options)[task["index"]]
    return {"answer": entry["metadata"]["expression"]}
