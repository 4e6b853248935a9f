"""Programs that know nothing of agl, run without it, with it, and with a policy: what is the same, seen and trained.

Invariant: a program is one process that an expectation describes; nothing of agl is imported into it but by `agl run`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from launching import SECONDS, chats, environment, facts, launch, outline, trace
from paths import ROOT

from agl import semconv
from agl.mdp.types import Call
from agl.testing.provider import Provider, Script, Seen, serve
from agl.trainer.store import open_store

FOLDER = ROOT / "tests" / "programs"
OWN = Path(__file__).with_name("own_tracing.py")
COLUMNS = ("traced", "named", "identical", "own spans", "trained")
TOLERANCE = 1e-4
"""Of log-probs in float32: a cached step against one whole forward pass."""
_IDS = re.compile(
    r"\b(?:call|chatcmpl|msg|toolu|resp|fc|rs|run|lc_run|lc)[-_]{1,2}[\w-]*\d[\w-]*"
    r"|(?<![0-9a-f])[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}(?![0-9a-f])|\b0x[0-9a-f]{6,}\b|\b[0-9a-f]{16,32}\b"
    r"|(?<=_)\d{16,20}\b"
)
_DURATIONS = re.compile(r"""(duration\\?["']?[:=] ?)[\d.e-]+""")
_TIMES = re.compile(
    r"datetime\.datetime\([^()]*\)|\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT|\b1[789]\d{8}\.\d+"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?"
)
_VARIES = re.compile(r"time|duration|latency|thread|process|elapsed|\bpid\b|lineno|port", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is known of a program.

    Attributes:
        script: what the provider's models answer.
        agents: the agents whose calls are to be seen, by name.
        trains: the one that a policy answers for in the third run.
        tools: names of the tools that are run. calls: requests to models, if their number is fixed.
        failed: calls that end in an error, as the program expects.
        needs: modules without which it is left out. env: environment variables.
    """

    script: Script
    agents: tuple[str, ...]
    trains: str
    tools: tuple[str, ...] = ()
    calls: int | None = None
    failed: int = 0
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Row:
    """What came of a program: problems by column of the table, none if all is well. `own_spans`: how many it exports
    without agl."""

    framework: str
    program: str
    problems: dict[str, list[str]] = field(default_factory=lambda: {column: [] for column in COLUMNS})
    forks: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    own_spans: int = 0

    def expect(self, column: str, holds: bool, problem: str) -> None:
        if not holds:
            self.problems[column].append(problem)


def programs() -> list[tuple[str, str]]:
    """(framework, program), of all folders."""
    return [
        (folder.name, name)
        for folder in sorted(FOLDER.iterdir())
        if (folder / "expected.py").is_file()
        for name in expected(folder.name)
    ]


@cache
def expected(framework: str) -> dict[str, Expected]:
    """`PROGRAMS` of a folder: name -> what is known of it."""
    spec = importlib.util.spec_from_file_location(f"expected_{framework}", FOLDER / framework / "expected.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PROGRAMS


def check(framework: str, name: str, model: Path, scratch: Path) -> Row:
    """Run a program alone, under `agl run`, and with a policy in the place of one agent.

    Args:
        model: of the policy. scratch: an empty directory.
    """
    known, row = expected(framework)[name], Row(framework, name)
    program = FOLDER / framework / f"{name}.py"
    with serve(known.script) as provider:
        env = {**environment(provider, **known.env), "ENABLE_INSTRUMENTATION": "true", "ENABLE_SENSITIVE_DATA": "true"}
        alone, seen = _alone(program, known, env, provider, scratch)
        _forget(provider)
        _under_agl(row, program, known, env, provider, scratch, alone, seen)
        _forget(provider)
        _with_policy(row, program, known, env, provider, scratch, model)
    return row


def _forget(provider: Provider) -> None:
    provider.seen.clear()
    provider.ids = itertools.count(1)


def _command(program: Path, spans: Path) -> list[str]:
    return [sys.executable, str(OWN), str(spans), str(program)]


def _alone(
    program: Path, known: Expected, env: Mapping[str, str], provider: Provider, scratch: Path
) -> tuple[str, list[Seen]]:
    """Its output, and the requests that it made."""
    command = _command(program, scratch / "alone.jsonl")
    (cwd := scratch / "alone").mkdir()
    done = subprocess.run(command, cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"without agl the program fails: {done.stderr[-3000:]}"
    assert done.stdout.strip(), "a program prints what it found out"
    if known.calls is not None:
        assert len(provider.seen) == known.calls, f"{len(provider.seen)} requests without agl"
    return done.stdout, [*provider.seen]


def _under_agl(
    row: Row, program: Path, known: Expected, env: Mapping[str, str], provider: Provider, scratch: Path, alone: str,
    before: list[Seen],
) -> None:  # fmt: skip
    (cwd := scratch / "agl").mkdir()
    done = launch(cwd, env, "--", *_command(program, scratch / "agl.jsonl"))
    row.expect("identical", done.returncode == 0, f"the program fails: {done.stderr[-2000:]}")
    row.expect("identical", same(done.stdout) == same(alone), f"its output is {done.stdout!r}, without agl {alone!r}")
    requests, without = requests_of(provider.seen), requests_of(before)
    row.expect("identical", requests == without, f"requests differ: {_difference(requests, without)}")
    keys = [
        {s.headers.get("authorization") or s.headers.get("x-api-key") for s in seen} for seen in (provider.seen, before)
    ]
    row.expect("identical", keys[0] == keys[1], f"other keys: {keys[0]}")
    if not (cwd / "facts.json").is_file():
        row.expect("traced", False, "nothing was recorded")
        return
    spans = trace(cwd)
    shape, asked = "\n".join(outline(spans)), chats(spans)
    row.calls = len(before)
    row.expect("traced", len(asked) == len(before), f"{len(asked)} chat spans of {len(before)} requests:\n{shape}")
    for span in asked:
        status, attributes = span["status"], span["attributes"]
        row.expect(
            "traced",
            bool(attributes.get(semconv.INPUT_MESSAGES))
            and (status == "error" or bool(attributes.get(semconv.OUTPUT_MESSAGES))),
            f"a call without messages: {span['name']}",
        )
    wrong = [s["name"] for s in asked if s["status"] == "error"]
    row.expect("traced", len(wrong) == known.failed, f"calls in error: {wrong}")
    tools = Counter(s["attributes"].get(semconv.TOOL_NAME) for s in _tools(spans))
    row.expect("traced", tools == Counter(known.tools), f"tools {dict(tools)}, not {known.tools}:\n{shape}")
    named = set(facts(cwd)["agents"])
    row.expect("named", named == set(known.agents), f"agents {sorted(named)}, not {sorted(known.agents)}:\n{shape}")
    ours, theirs = (own_spans(scratch / f"{which}.jsonl") for which in ("agl", "alone"))
    row.own_spans = theirs.total()
    row.expect("own spans", ours == theirs, f"with agl and without differ: {_difference(ours, theirs)}")


def _tools(spans: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [s for s in spans if s["attributes"].get(semconv.OPERATION_NAME) == semconv.EXECUTE_TOOL]


def _with_policy(
    row: Row, program: Path, known: Expected, env: Mapping[str, str], provider: Provider, scratch: Path, model: Path
) -> None:
    """The policy writes what it likes, so how the program ends is open; whose calls it answers, and how, is not."""
    (cwd := scratch / "policy").mkdir()
    done = launch(cwd, env, "--model", model, "--agents", known.trains, "--", sys.executable, program)
    if not (cwd / "facts.json").is_file():
        row.expect("trained", False, f"nothing was recorded: {done.stderr[-2000:]}")
        return
    known_facts = facts(cwd)
    calls = asyncio.run(_calls(str(cwd / "agl-runs" / "traces.db"), known_facts["rollout_id"]))
    ours = [call for call in calls if call.policy is not None and call.error is None]
    row.expect("trained", bool(ours), f"no call reached the policy: {done.stderr[-2000:]}")
    agents = {call.agent for call in ours}
    row.expect("trained", agents <= {known.trains}, f"the policy answered for {agents}")
    row.expect("trained", not any("agl-" in seen.text for seen in provider.seen), "a key of ours left")
    for call in ours:
        if call.response_ids.size:
            difference = float(np.abs(_logprobs(model, call) - call.logprobs).max())
            row.expect("trained", difference < TOLERANCE, f"log-probs of call {call.index} are off by {difference}")
    row.forks = Counter(call.fork_cause for call in ours if call.fork_cause)


async def _calls(url: str, rollout_id: str) -> list[Call]:
    store = await open_store(url)
    try:
        return await store.query_calls(rollout_id)
    finally:
        await store.close()


@cache
def _loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


def _logprobs(model: Path, call: Call) -> np.ndarray[Any, Any]:
    """Of the sampled tokens, by one forward pass of transformers over the whole call, among those that its grammar
    allowed."""
    import torch
    from transformers import AutoTokenizer

    from agl.trainer.local.grammar import Grammars, hidden

    with torch.no_grad():
        logits = _loaded(model)(torch.from_numpy(call.ids.astype(np.int64))[None]).logits[0].double()
    first, sampled = call.prompt_ids.size - 1, torch.from_numpy(call.response_ids.astype(np.int64))
    logits = logits[first : first + sampled.numel()]
    if call.grammar:
        grammars = Grammars(AutoTokenizer.from_pretrained(model), logits.shape[-1])
        matcher = grammars.matcher(call.grammar)
        for row, token in zip(logits, sampled.tolist(), strict=True):
            row[hidden(torch.from_numpy(grammars.bits([matcher])), row.numel())[0]] = -torch.inf
            matcher.consume_token(token)
    scores = torch.log_softmax(logits / (call.temperature or 1.0), -1)
    return scores.gather(1, sampled[:, None])[:, 0].numpy()


# -- what must not differ ---------------------------------------------------------------------------------------------


def same(text: str) -> str:
    """The text without what differs from run to run: ids and times."""
    return _TIMES.sub("TIME", _IDS.sub("ID", _DURATIONS.sub(r"\1DURATION", text)))


def requests_of(seen: Iterable[Seen]) -> Counter[str]:
    """Path and body of each; concurrent ones may come in any order."""
    return Counter(same(f"{s.path} {json.dumps(s.body, sort_keys=True)}") for s in seen)


def own_spans(file: Path) -> Counter[str]:
    """Each span with its ancestors, attributes and status, without what differs from run to run."""
    spans = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    by_id = {span["id"]: span for span in spans}

    def path(span: Mapping[str, Any]) -> str:
        parent = span["parent"]
        above = "" if parent is None else path(by_id[parent]) if parent in by_id else "A PARENT THAT IS NOT EXPORTED"
        return f"{above}/{span['name']}"

    return Counter(
        same(f"{path(s)} {s['status']} {json.dumps(_steady(s['attributes']), sort_keys=True)}") for s in spans
    )


def _steady(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if not _VARIES.search(key) and not isinstance(value, float)}


def _difference(ours: Counter[str], theirs: Counter[str]) -> str:
    return "\n".join([*(f"+ {text[:1500]}" for text in ours - theirs), *(f"- {text[:1500]}" for text in theirs - ours)])


# -- the table --------------------------------------------------------------------------------------------------------


def table(rows: Iterable[Row], before: str = "") -> str:
    """Markdown: a line for each program; those that did not run keep theirs of the table `before`."""
    head = [f"| framework | program | calls | {' | '.join(COLUMNS)} | forks |", f"|{'---|' * (4 + len(COLUMNS))}"]
    kept = [line for line in before.splitlines() if line.startswith("| ")][1:]
    lines = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in kept}
    for row in rows:
        cells = ["no" if row.problems[column] else "yes" for column in COLUMNS]
        if not row.own_spans:
            cells[COLUMNS.index("own spans")] = "none"
        forks = ", ".join(f"{n} {cause}" for cause, n in sorted(row.forks.items())) or ""
        line = f"| {row.framework} | {row.program} | {row.calls} | {' | '.join(cells)} | {forks} |"
        lines[row.framework, row.program] = line
    return "\n".join([*head, *(line for _, line in sorted(lines.items()))])
