"""Runs of coding agents, the real programs: without agl and under it on a scripted provider, and one step of training.

`tests/integration/test_harnesses.py` and `benchmarks/harnesses.py` share them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from coding_agents import (
    BEFORE,
    FILE,
    PROGRAMS,
    SIDE,
    TASK,
    CodingAgent,
    Turns,
    answers,
    comparable,
    files,
    request,
)  # fmt: skip
from launching import Trace, facts, launch, show

import agl
from agl.testing.provider import Provider, Seen
from agl.trainer.run.trainer import Result

NOT_OF_THE_TASK = (".git/", ".aider", "facts.json")
"""What is below the working directory, but no result."""
APIS = {
    "/chat/completions": "Chat Completions",
    "/responses": "Responses",
    "/messages": "Messages",
    ":generateContent": "Gemini",
    ":streamGenerateContent": "Gemini",
}
"""The end of a request's path -> its API."""
Sent = tuple[str, str, dict[str, str]]
"""A request as `coding_agents.request` has it."""


class Place:
    """A user's home and a directory to work in, made anew for each run at the same paths."""

    def __init__(self, root: Path, agent: CodingAgent, provider: Provider) -> None:
        self.home, self.work, self.cache = root / "home", root / "work", root / "cache"
        self.store = root / "traces.db"
        self.agent, self.provider = agent, provider
        self.environment: dict[str, str] = {}

    def renew(self, turns: Turns, others: dict[str, Turns] | None = None) -> None:
        for folder in (self.home, self.work):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        (self.work / FILE).write_text(BEFORE)
        # Prompts hold the last commits, whose names depend on their dates.
        dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-01T00:00:00Z")
        for words in ("init -q -b main", "add .", "-c user.name=a -c user.email=a@b.c commit -q -m first"):
            subprocess.run(["git", *words.split()], cwd=self.work, check=True, env=os.environ | dates)
        kept = ("PATH", "LANG", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        own = {name: value for name, value in os.environ.items() if name in kept}
        paths = os.pathsep.join([str(PROGRAMS), own["PATH"]])
        more = self.agent.configure(self.home, self.provider)
        # Wide enough that no path is broken into two lines.
        own |= {"HOME": str(self.home), "PATH": paths, "AGL_CACHE": str(self.cache), "TERM": "dumb", "COLUMNS": "400"}
        self.environment = own | more
        self.provider.seen.clear()
        self.provider.replies.clear()
        self.provider.script = answers(turns, {**SIDE, **(others or {})})

    def plain(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = list(words) or self.agent.command(TASK)
        return subprocess.run(
            command, cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=200,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def traced(self, *options: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        # Not in the working directory, which agents list.
        options = ("--store", str(self.store), *options)
        return launch(self.work, self.environment, *options, "--", *(words or self.agent.command(TASK)))

    def trace(self) -> Trace:
        """The only trace of the store, which the next one replaces."""
        place = self.store.parent / "trace.json"
        show(
            self.work, "trace", "show", facts(self.work)["rollout_id"], "--store", str(self.store), "--json", str(place)
        )
        return json.loads(place.read_text())


@dataclass(frozen=True, eq=False)
class Run:
    """The task, done once on the scripted provider.

    Attributes:
        done: of its process. sent: all requests, sorted, and `output`, without what differs between two runs.
        generated: the requests for an answer. made: the files of the working directory. touched: files of the home
            that it changed, but those that it always writes. places: directories of its configuration.
    """

    done: subprocess.CompletedProcess[str]
    sent: list[Sent]
    output: str
    generated: list[Seen]
    made: dict[str, bytes]
    touched: list[str]
    places: list[Path]

    @property
    def apis(self) -> list[str]:
        """The APIs of the requests for an answer."""
        return sorted({name for seen in self.generated for end, name in APIS.items() if _path(seen).endswith(end)})


def run(place: Place, *, traced: bool) -> Run:
    """The task of `place`, made anew, without agl or under `agl run`."""
    agent, provider = place.agent, place.provider
    place.renew(agent.turns(place.work))
    before = files(place.home, agent.writes)
    done = place.traced() if traced else place.plain()
    after = files(place.home, agent.writes)
    own = re.compile(rf"{place.cache.name}/harnesses/{agent.name}-[^/\s\"'\\]+")
    seen = "".join(each.raw.decode() for each in provider.seen) + done.stdout
    places = [place.home / agent.config, *{place.cache.parent / match[0] for match in own.finditer(seen)}]
    return Run(
        done,
        sorted(request(each, agent, place.work, *places) for each in provider.seen),
        comparable(done.stdout, agent, place.work, *places),
        generated(provider),
        files(place.work, NOT_OF_THE_TASK),
        [name for name in before | after if before.get(name) != after.get(name)],
        places,
    )


def identical(one: Run, other: Run) -> int:
    """How many requests of two runs are equal."""
    found = [Counter(map(repr, each.sent)) for each in (one, other)]
    return (found[0] & found[1]).total()


def generated(provider: Provider) -> list[Seen]:
    """The requests for an answer."""
    return [seen for seen in provider.seen if _path(seen).endswith(tuple(APIS))]


def _path(seen: Seen) -> str:
    return seen.path.partition("?")[0]


CONTEXT = 1 << 17
"""Tokens: prompts of coding agents are long, and the quickstart's tokens short."""


def lengthened(policy: Path, folder: Path) -> Path:
    """The quickstart's policy with a context of `CONTEXT` tokens, in another folder."""
    shutil.copytree(policy, folder)
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {field: CONTEXT}))
    return folder


def train(agent: CodingAgent, policy: Path, directory: Path) -> Result:
    """One step of GRPO in its sandbox, with its own prompts. A rollout's reward is 0 or 1 in turn.

    Args:
        policy: as of `lengthened`. It ends its answers: Codex fails where one is cut, which is a policy fault.
    """
    turn = itertools.count()
    bounded = agl.harness(
        agent.name, task=str, files=lambda _: {FILE: BEFORE}, grade=lambda task, folder: float(next(turn) % 2),
        words=[FILE] if agent.name == "aider" else [],
    )  # fmt: skip
    algorithm = agl.GRPO(
        model=str(policy), group_size=2, batch_size=1, steps=1, threads=2, learning_rate=1e-5,
        max_response_tokens=64, max_context=CONTEXT,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=2, directory=directory, progress=False, max_attempts=1, timeout=900)
    return trainer.fit(bounded, [TASK])
