"""Every coding agent: what it sends without agl and under it, and one step of GRPO in its sandbox.

    tests/harnesses/install.sh DIR
    AGL_HARNESSES=DIR benchmarks/all.sh harnesses --minutes 60   # the table of docs/harnesses.md
    python benchmarks/harnesses.py --programs DIR      # prints it
    python benchmarks/harnesses.py --only mini pi      # some of them

Each does the same task on a scripted provider, without agl and under `agl run`. Then the quickstart's policy, whose
context is made longer, answers two rollouts of it in the program's sandbox, and is trained on them for a step. The
policy cannot write programs: the rewards are 0 and 1 in turn.

Exit code 1 if a call was not recorded, a request differed in more than docs/harnesses.md lists, tokens were lost, a
step made no update, the log-probabilities of training differ from those of sampling, or nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

if TYPE_CHECKING:
    from coding_agents import CodingAgent

MOST_DRIFT = 1e-3
"""Nats, of float32: a cached step against one whole forward pass."""
HEAD = (
    "program", "version", "API", "calls recorded", "requests identical", "tokens sampled", "trained", "left out",
    "lost", "forks", "drift, nats",
)  # fmt: skip


def row(agent: CodingAgent, policy: Path, root: Path) -> tuple[list[str], list[str]]:
    """The row of an installed program, and what is wrong with it."""
    from coding_agents import AFTER, FILE
    from harness_runs import Place, identical, run, train
    from launching import chats

    from agl.testing.provider import serve
    from agl_harnesses.report import agents
    from agl_harnesses.session import known

    kind = next(kind for kind in known() if kind.name == agent.name)
    (root / "runs").mkdir(parents=True)
    with serve() as provider:
        place = Place(root / "runs", agent, provider)
        plain, traced = run(place, traced=False), run(place, traced=True)
        recorded, same = len(chats(place.trace())), identical(plain, traced)
    wrong = [
        f"ended with exit status {each.done.returncode}: {(each.done.stdout + each.done.stderr)[-500:]}"
        for each in (plain, traced)
        if each.done.returncode or each.made.get(FILE) != AFTER.encode()
    ]
    made, requests = len(traced.generated), max(len(plain.sent), len(traced.sent))
    wrong += [f"{made - recorded} of {made} calls were not recorded"] * (recorded != made)
    wrong += [f"{requests - same} of {requests} requests differ"] * (same != requests)
    wrong += ["its output differs"] * (plain.output != traced.output)

    found = agents(train(agent, policy, root / "training"))
    sampled, trained, lost = (sum(getattr(one, name) for one in found) for name in ("sampled", "trained", "lost"))
    forks, left_out = Counter[str](), Counter[str]()
    for one in found:
        forks += one.forks
        left_out += one.dropped
    drift = max((one.drift for one in found if one.drift is not None), default=None)
    wrong += [f"{lost} of {sampled} tokens are lost"] * (lost != 0)
    wrong += ["its step made no update"] * (drift is None or trained == 0)
    wrong += [f"a drift of {drift} nats"] * (drift is not None and drift > MOST_DRIFT)
    cells = (
        kind().version(str(agent.path)), ", ".join(traced.apis), f"{recorded} of {made}", f"{same} of {requests}",
        sampled, trained, by_cause(left_out), lost, by_cause(forks), "" if drift is None else f"{drift:.1e}",
    )  # fmt: skip
    return [f"`{agent.program}`", *map(str, cells)], wrong


def by_cause(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {cause}" for cause, n in counts.items()) or "0"


def main() -> None:
    """Print the table, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", help="where tests/harnesses/install.sh put them; AGL_HARNESSES without")
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", help="some of them")
    parser.add_argument("--policy", type=Path, help="the quickstart's policy; made anew without")
    options = parser.parse_args()
    if options.programs is not None:
        os.environ["AGL_HARNESSES"] = options.programs
    from coding_agents import AGENTS, PROGRAMS
    from harness_runs import lengthened

    from agl.trainer.quickstart.policy import make_policy

    os.environ["PATH"] = os.pathsep.join([str(PROGRAMS), os.environ["PATH"]])
    chosen = [agent for agent in AGENTS if not options.only or agent.program in options.only]
    if not any(agent.path for agent in chosen):
        raise SystemExit("none is installed: tests/harnesses/install.sh DIR, then --programs DIR")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="agl-harnesses-") as root:
        policy = options.policy or make_policy(Path(root, "made"), seed=0, threads=os.cpu_count() or 1).directory
        policy = lengthened(policy, Path(root, "policy"))
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
        for agent in chosen:
            cells = [f"`{agent.program}`", "not installed", *[""] * (len(HEAD) - 2)]
            if agent.path is not None:
                cells, found = row(agent, policy, Path(root, agent.name))
                wrong += [f"{agent.program}: {each}" for each in found]
            print(f"| {' | '.join(cells)} |", flush=True)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
