"""Run the example programs of Agent Lightning 0.3, unchanged, under `python -m agl.compat`.

    python tests/al03_examples.py CHECKOUT                      of agent-lightning, at its tag v0.3.0
    python tests/al03_examples.py CHECKOUT --only calc_x        one folder of its examples (or "calc_x train")
    python tests/al03_examples.py CHECKOUT --lab LAB            also the samples in a checkout of agent-framework

What only a network has is replaced, nothing else: OpenAI by a server that answers by script, weights by a tiny policy,
data sets by a few rows in their format. A policy is taught what the script would answer: the program's debugging mode
runs first, and from its requests and all answers that the script allows for them (some right, some wrong) a model is
trained, so that the training that follows has groups with spread. Tool, MCP and retrieval servers are the real ones.
Exits with 1 if a program that should run does not.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "support"))

import habits
from paths import pythonpath

from agl.testing.provider import Reply, serve

TIMEOUT = 900
"""Seconds for one program."""
CONTEXT = 12288
"""Tokens of the policies' context: the longest prompt and answer that an example's config asks for."""
Answers = Callable[[dict[str, Any]], Sequence[Reply]]
"""Body of a request -> what may be answered, the best first."""


@dataclass(frozen=True)
class Program:
    """One command of an example.

    Attributes:
        command: path in the example's folder, and arguments.
        beside: programs that run next to it; they are ended when it has ended.
        trains: whether it must leave trained calls, with advantages.
        expect: what it must print.
        stops: the error that it must end with, where docs/from-agent-lightning.md says that it does.
        environment: beside the usual one.
    """

    command: Sequence[str]
    beside: Sequence[Sequence[str]] = ()
    trains: bool = False
    expect: str = ""
    stops: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """A folder of examples.

    Attributes:
        folder: in the checkout.
        answers: of the scripted models. model: the hub's name of the policy, taught by `lessons`, a program.
        prepare: writes its data into the copy of the folder, and other models into the Hugging Face home.
        requirements: `pip install` for each, beside this project's development environment.
        port: where the scripted models have to listen; 0 for any.
        changes: (file, old, new) of lines that run nowhere any more, whatever the package behind `agentlightning`.
    """

    folder: str
    programs: Sequence[Program]
    answers: Answers = lambda body: [Reply("hi")]
    lessons: Program | None = None
    model: str = ""
    prepare: Callable[[Path, Path], None] = lambda folder, home: None
    requirements: Sequence[str] = ()
    port: int = 0
    changes: Sequence[tuple[str, str, str]] = ()

    @property
    def name(self) -> str:
        return Path(self.folder).name


@dataclass(frozen=True)
class Outcome:
    program: str
    verdict: str
    seconds: float
    detail: str = ""


class Workplace:
    """Where one example runs: a copy of its folder, an environment, a Hugging Face home."""

    def __init__(self, example: Example, checkout: Path, work: Path) -> None:
        self.example, self.root = example, work / example.name
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self.folder, self.home = self.root / "files", self.root / "huggingface"
        shutil.copytree(checkout / example.folder, self.folder)
        for file, old, new in example.changes:
            text = (self.folder / file).read_text()
            if old not in text:
                raise SystemExit(f"{file} has no {old!r}: take `changes` out of {example.name}")
            (self.folder / file).write_text(text.replace(old, new))
        self.python = environment(work, example.requirements)
        write_uvx(self.root / "bin", work)
        self.logs = 0

    def variables(self, url: str, program: Program) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.root / 'bin'}:{self.python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": pythonpath(*sorted(self.root.glob("path*"))),
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": "sk-example",
            "PYTHONUNBUFFERED": "1",
            **{k: v.replace("{root}", str(self.root)) for k, v in program.environment.items()},
        }

    @contextmanager
    def started(self, command: Sequence[str], variables: Mapping[str, str]) -> Iterator[tuple[Any, Path]]:
        self.logs += 1
        log = self.root / f"{self.logs}-{Path(command[0]).stem}.log"
        if command[0] == "agl":
            whole = [str(self.python), "-c", "from agl.trainer.cli import main; main()", *command[1:]]
        elif command[0] == "python":
            whole = [str(self.python), *command[1:]]
        else:
            whole = [str(self.python), "-m", "agl.compat", *command]
        with log.open("wb") as out:
            process = subprocess.Popen(
                whole, cwd=self.folder, env=dict(variables), stdout=out, stderr=out, start_new_session=True
            )
            try:
                yield process, log
            finally:
                if process.poll() is None:
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(20)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, program: Program, url: str) -> Outcome:
        begun, name = time.monotonic(), " ".join(program.command)
        variables = self.variables(url, program)
        before = set(self.folder.rglob("run.db"))
        with Beside(self, program, variables), self.started(program.command, variables) as (process, log):
            try:
                code = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                code = None
        said, seconds = log.read_text(errors="replace"), time.monotonic() - begun
        flat = re.sub(r"\s+", " ", said)
        if code is None:
            return Outcome(name, "failed", seconds, f"still running after {TIMEOUT} s; {log}")
        if program.stops:
            found = code != 0 and program.stops in flat
            return Outcome(name, "stops" if found else "failed", seconds, program.stops if found else str(log))
        if code:
            return Outcome(name, "failed", seconds, f"exit status {code}; {log}")
        if program.expect and not re.search(program.expect, flat):
            return Outcome(name, "failed", seconds, f"it did not say {program.expect!r}; {log}")
        if not program.trains:
            return Outcome(name, "runs", seconds)
        new = [path for path in self.folder.rglob("run.db") if path not in before]
        trained = sum(trained_calls(path) for path in new)
        if not trained:
            return Outcome(name, "failed", seconds, f"nothing was trained; {log}")
        return Outcome(name, "trains", seconds, f"{trained} calls with an advantage")


class Beside:
    """The programs next to another one, started in order, ended in reverse."""

    def __init__(self, place: Workplace, program: Program, variables: Mapping[str, str]) -> None:
        self.place, self.program, self.variables = place, program, variables
        self.contexts: list[Any] = []

    def __enter__(self) -> None:
        for command in self.program.beside:
            port = next((part for part in command if part.startswith("@")), "")
            context = self.place.started([part for part in command if part != port], self.variables)
            self.contexts.append(context)
            process, _ = context.__enter__()
            if port:
                wait_for(int(port[1:]), process)

    def __exit__(self, *error: object) -> None:
        for context in reversed(self.contexts):
            context.__exit__(None, None, None)


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Until something listens at the port, or the process that should has ended."""
    import socket

    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)


def environment(work: Path, requirements: Sequence[str]) -> Path:
    """The Python of a virtual environment that has this one's packages and the requirements."""
    if not requirements:
        return Path(sys.executable)
    name = re.sub(r"\W+", "-", "-".join(requirements)).lower()[:80]
    python = work / f"venv-{name}" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        ours, theirs = (
            subprocess.run([p, "-c", purelib], check=True, capture_output=True, text=True).stdout.strip()
            for p in (sys.executable, str(python))
        )
        Path(theirs, "agl-development.pth").write_text(ours + "\n")
        for packages in requirements:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages.split()], check=True)
    return python


def write_uvx(directory: Path, work: Path) -> None:
    """A `uvx` whose tools are installed already: it would ask a package index each time that an agent starts one."""
    tools = environment(work, ("mcp-server-calculator",)).parent
    directory.mkdir()
    (directory / "uvx").write_text(f'#!/bin/sh\ntool="$1"; shift\nexec "{tools}/$tool" "$@"\n')
    (directory / "uvx").chmod(0o755)


def trained_calls(database: Path) -> int:
    """How many calls of a run were trained with an advantage."""
    from agl.trainer.store import open_store

    async def count() -> int:
        store = await open_store(str(database))
        rollouts = await store.query_rollouts(mode="train")
        trained = [t for r in rollouts for t in await store.query_trained_calls(r.rollout_id)]
        await store.close()
        return sum(t.advantage != 0 and t.tokens > 0 for t in trained)

    return asyncio.run(count())


def text_of(reply: Reply) -> str:
    """What a policy has to write for this reply."""
    calls = [habits.tool_call(name, json.dumps(arguments)) for name, arguments in reply.tools]
    return "\n".join([*([reply.content] if reply.content else []), *calls])


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """A request of the Responses API in the form of Chat Completions; others unchanged."""
    if "input" not in body:
        return body
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    items = [{"role": "user", "content": body["input"]}] if isinstance(body["input"], str) else body["input"]
    for item in items:
        if item.get("type") == "function_call":
            call = {"id": item["call_id"], "type": "function", "function": {k: item[k] for k in ("name", "arguments")}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.get("type") == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif "role" in item:
            messages.append({"role": item["role"], "content": item["content"]})
    tools = [{"type": "function", "function": {k: t[k] for k in ("name", "description", "parameters") if k in t}}
             for t in body.get("tools") or ()]  # fmt: skip
    return {**body, "messages": messages, "tools": tools}


def situation(body: dict[str, Any], answers: Sequence[Reply]) -> habits.Situation:
    """A request and its answers as something to learn; tool calls' arguments as the chat template has them."""
    messages: list[dict[str, Any]] = []
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        messages.append({**message, "content": content})
    return habits.Situation(messages, [text_of(a) for a in answers], body.get("tools") or ())


def varied(taught: habits.Situation) -> Iterator[habits.Situation]:
    """A situation, and again with other words of the user's, so that the answer is learnt for other tasks, too."""
    yield taught
    rng = random.Random(0)
    for _ in range(4):
        messages = []
        for message in taught.messages:
            words = message["content"].split(" ")
            if message["role"] == "user":
                words = rng.sample(words, rng.randint(len(words) // 2, len(words)))
            messages.append({**message, "content": " ".join(words)})
        yield dataclasses.replace(taught, messages=messages)


def run_example(example: Example, checkout: Path, work: Path, only: str) -> list[Outcome]:
    place = Workplace(example, checkout, work)
    example.prepare(place.folder, place.home)
    outcomes: list[Outcome] = []
    with serve(lambda body: example.answers(as_chat(body))[0], example.port) as provider:
        if example.lessons is not None:
            outcomes.append(place.run(example.lessons, provider.url))
            requests = [as_chat(seen.body) for seen in provider.seen]
            distinct = {json.dumps([body.get("messages"), body.get("tools")]): body for body in requests}
            situations = [situation(body, example.answers(body)) for body in distinct.values() if "messages" in body]
            if example.model and situations:
                taught = [variant for s in situations for variant in varied(s)]
                policy = habits.make(place.root / "policy", taught, max_context=CONTEXT, steps=300, batch=6)
                habits.as_hub_model(place.home, example.model, policy)
        for program in example.programs:
            if matches(only, example, program):
                outcomes.append(place.run(program, provider.url))
                print(show(example, outcomes[-1]), flush=True)
    return outcomes


def matches(only: str, example: Example, program: Program) -> bool:
    return only in f"{example.name} {' '.join(program.command)}"


def show(example: Example, outcome: Outcome) -> str:
    return f"{example.name:10} {outcome.verdict:8} {outcome.seconds:6.0f} s  {outcome.program}  {outcome.detail}"


# -- the examples -----------------------------------------------------------------------------------------------------


def spoken(body: dict[str, Any]) -> str:
    """All text of a request."""
    return "\n".join(
        m["content"] if isinstance(m.get("content"), str)
        else "".join(part.get("text", "") for part in m.get("content") or [])
        for m in body.get("messages", [])
    )  # fmt: skip


# minimal


def minimal_answers(body: dict[str, Any]) -> list[Reply]:
    return [Reply("Hello! I'm ChatGPT, not Qwen. How can I help you?")]


# apo


def apo_answers(body: dict[str, Any]) -> list[Reply]:
    """The room selector's model, its judge and APO's two models; the sky's model and judge."""
    text, last = spoken(body), body["messages"][-1]
    if "strict grader" in text:
        wanted = text.partition("Task expected answer:\n")[2].split("\n")[0]
        right = f"final_choice: {wanted}" in text
        return [Reply(json.dumps({"reason": "as expected" if right else "another room", "score": float(right)}))]
    if "Return only a number between 0 and 1" in text:
        return [Reply("0.7")]
    if any(t["function"]["name"] == "get_rooms_and_availability" for t in body.get("tools") or ()):
        found = re.search(r"on (\S+) at (\S+) for (\d+)", text)
        date, at, minutes = found.groups() if found else ("2025-10-13", "10:00", "30")
        return [Reply(None, tools=(("get_rooms_and_availability",
                                    {"date": date, "time": at, "duration_min": int(minutes)}),))]  # fmt: skip
    if last["role"] == "tool":
        return [Reply("final_choice: Nova" if "free, large enough" in text else "final_choice: Orion")]
    if "critic" in text or "```" in text:
        before = re.search(r"```\n(.*?)\n```", text, re.DOTALL)
        if "Rewrite" in text and before:
            return [Reply(f"```\n{before.group(1)} It has to be free, large enough and equipped.\n```")]
        return [Reply("It does not say that the room has to be free, large enough and equipped.")]
    return [Reply("Air scatters blue light more than red light.")]


# calc_x, unsloth and the maths agent of the lab: a calculator over MCP


def calculator_answers(form: str) -> Answers:
    def answers(body: dict[str, Any]) -> list[Reply]:
        if body["messages"][-1]["role"] == "tool":
            return [Reply(form.format("4")), Reply(form.format("5"))]
        if any(t["function"]["name"] == "calculate" for t in body.get("tools") or ()):
            return [Reply(None, tools=(("calculate", {"expression": "2 + 2"}),)), Reply(form.format("5"))]
        return [Reply(form.format("4"))]

    return answers


def problems(n: int) -> list[dict[str, str]]:
    """Rows of Calc-X, all with the answer 4."""
    rows = [(f"Ann has {a} pears and finds {4 - a}. How many has she?", f"{a} + {4 - a}") for a in range(4)]
    return [
        {"id": f"c{i}", "question": rows[i % 4][0], "chain": rows[i % 4][1], "result": "4", "source": "made"}
        for i in range(n)
    ]


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(list(rows)).to_parquet(path)


def prepare_calc_x(folder: Path, home: Path) -> None:
    parquet(folder / "data" / "train.parquet", problems(4))
    parquet(folder / "data" / "test.parquet", problems(2))


# spider


def sql_answers(body: dict[str, Any]) -> list[Reply]:
    text = spoken(body)
    if "SQL expert" in text:
        return [Reply("THE QUERY IS CORRECT."), Reply("THE QUERY IS INCORRECT.")]
    return [Reply(f"```sqlite\n{query}\n```") for query in ("SELECT COUNT(*) FROM singer", "SELECT name FROM singer")]


def prepare_spider(folder: Path, home: Path) -> None:
    """A database of one table, and rows in Spider's format."""
    for split in ("database", "test_database"):
        directory = folder / "data" / split / "concert"
        directory.mkdir(parents=True)
        schema = "CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER)"
        (directory / "schema.sql").write_text(schema)
        with sqlite3.connect(directory / "concert.sqlite") as database:
            database.execute(schema)
            database.executemany("INSERT INTO singer (name, age) VALUES (?, ?)", [("Ada", 30), ("Bo", 41), ("Cy", 25)])
        database.close()
    questions = ["How many singers are there?", "What is the number of singers?", "Count the singers."]
    rows = [{"db_id": "concert", "question": q, "query": "SELECT count(*) FROM singer"} for q in questions]
    for name in ("train_spider", "dev", "test_dev", "test_dev_500"):
        parquet(folder / "data" / f"{name}.parquet", rows)


# rag


def rag_answers(body: dict[str, Any]) -> list[Reply]:
    if body["messages"][-1]["role"] != "tool":
        return [Reply(None, tools=(("retrieve", {"query": "capital of France"}),)), Reply("<answer>Rome</answer>")]
    return [Reply("<answer>Paris</answer>"), Reply("<answer>Rome</answer>")]


def prepare_rag(folder: Path, home: Path) -> None:
    """A few passages, their index, and a sentence encoder that nothing was taught, under the name of the real one."""
    import pickle
    import textwrap

    passages = ["Paris is the capital of France.", "Rome is the capital of Italy.", "The Seine flows through Paris."]
    (folder / "data").mkdir()
    (folder / "data" / "chunks_candidate_tiny.pkl").write_bytes(pickle.dumps(passages))
    rows = [{"question": "What is the capital of France?", "answer": "Paris"},
            {"question": "Which city is France governed from?", "answer": "Paris"}]  # fmt: skip
    parquet(folder / "data" / "dataset_tiny.parquet", [{"id": str(i), **row} for i, row in enumerate(rows)])
    encoder = folder.parent / "encoder"
    program = textwrap.dedent("""
        import faiss, sys
        from sentence_transformers import SentenceTransformer, models
        from transformers import BertConfig, BertModel, BertTokenizerFast
        encoder, index, *passages = sys.argv[1:]
        words = sorted({w for p in passages for w in p.lower().replace(".", " .").split()})
        with open(encoder + "-words", "w") as file:
            file.write("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
        tokenizer = BertTokenizerFast(encoder + "-words")
        config = BertConfig(vocab_size=len(words) + 5, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                            intermediate_size=64, max_position_embeddings=64)
        BertModel(config).save_pretrained(encoder + "-bert")
        tokenizer.save_pretrained(encoder + "-bert")
        word = models.Transformer(encoder + "-bert", max_seq_length=64)
        model = SentenceTransformer(modules=[word, models.Pooling(32)])
        model.save(encoder)
        made = faiss.IndexHNSWFlat(32, 8)
        made.add(model.encode(passages, normalize_embeddings=True))
        faiss.write_index(made, index)
    """)
    python = environment(folder.parent.parent, RAG_REQUIREMENTS)
    index = folder / "data" / "index_hnsw_faiss_n32e40_tiny.index"
    subprocess.run([str(python), "-c", program, str(encoder), str(index), *passages], check=True)
    habits.as_hub_model(home, "BAAI/bge-large-en-v1.5", encoder)


RAG_REQUIREMENTS = ("openai-agents[litellm] fastmcp faiss-cpu sentence-transformers",)
RETRIEVER = ("python", "wiki_retriever_mcp.py", "@8099")


# chartqa


def chart_answers(body: dict[str, Any]) -> list[Reply]:
    text = spoken(body)
    if "THE ANSWER IS CORRECT" in text:
        return [Reply("THE ANSWER IS CORRECT."), Reply("THE ANSWER IS INCORRECT.")]
    if "<answer>" in text:
        return [Reply("<calculate>3 + 4 = 7</calculate><answer>7</answer>"), Reply("<answer>8</answer>")]
    if "<extract>" in text:
        return [Reply("<extract>3 and 4</extract>")]
    return [Reply("<observe>Two bars, 3 and 4.</observe>")]


def prepare_chartqa(folder: Path, home: Path) -> None:
    from PIL import Image, ImageDraw

    images = folder / "data" / "images"
    images.mkdir(parents=True)
    picture = Image.new("RGB", (64, 64), "white")
    for left, height in ((10, 30), (35, 40)):
        ImageDraw.Draw(picture).rectangle((left, 60 - height, left + 15, 60), fill="blue")
    picture.save(images / "bars.png")
    row = {"image_path": "images/bars.png", "question": "What is the sum of both bars?", "answer": "7"}
    for split, number in (("train", 2), ("test", 100)):
        parquet(folder / "data" / f"{split}_chartqa.parquet", [{"id": f"{split}_{i}", **row} for i in range(number)])


# agent-framework's lab


def prepare_lab(folder: Path, home: Path) -> None:
    for split in ("train", "test"):
        rows = "\n".join(json.dumps(row) for row in problems(5))
        (folder / "data" / "math" / f"{split}.jsonl").write_text(rows + "\n")


LAB_REQUIREMENTS = ("--ignore-installed --no-deps agent-framework-core agent-framework-openai agent-framework-lab",)


EXAMPLES = (
    Example(
        "examples/minimal",
        [
            Program(["write_traces.py", "otel"]),
            Program(["write_traces.py", "operation"]),
            *(
                Program(["write_traces.py", mode, "--use-client"], [["agl", "store", "--port", "45993", "@45993"]])
                for mode in ("otel", "operation")
            ),
            # The calls are answered and recorded; then it looks for the spans of AgentOps and of LiteLLM.
            Program(["write_traces.py", "agentops"], stops="in _verify_agentops_traces"),
            Program(
                ["llm_proxy.py", "test", "gpt-4.1-mini"],
                [["llm_proxy.py", "openai", "gpt-4.1-mini", "@43886"]],
                stops="in _verify_span",
            ),
            Program(["write_metrics.py", "--duration", "3"], stops="ConsoleMetricsBackend is not available"),
        ],
        minimal_answers,
        requirements=["portpicker"],
    ),
    Example(
        "examples/apo",
        [
            Program(["room_selector.py"], expect="Postmortem Reward"),
            Program(["room_selector_apo.py"]),
            *(Program(["apo_debug.py", "--mode", mode]) for mode in ("runner", "hook", "trainer")),
            Program(["apo_custom_algorithm_trainer.py"], expect="Best prompt found"),
            Program(
                ["apo_custom_algorithm.py", "algo"],
                [["agl", "store", "--port", "4747", "@4747"], ["apo_custom_algorithm.py", "runner"]],
                expect="Best prompt found",
            ),
            Program(["legacy_apo_server.py"], stops="AgentLightningServer is not available"),
        ],
        apo_answers,
        requirements=["python-dotenv"],
    ),
    Example(
        "examples/calc_x",
        [
            Program(["train_calc_agent.py", "--ci-fast"], trains=True),
            Program(["train_calc_agent.py", "--ci-fast", "--llm-proxy"], trains=True),
            Program(["train_calc_agent.py", "--ci-fast", "--lora"], trains=True),
            Program(
                ["train_calc_agent.py", "--ci-fast", "--external-store-address", "http://localhost:9999"],
                [["agl", "store", "--port", "9999", "@9999"]],
                environment={"AGL_MANAGED_STORE": "0"},
            ),
            Program(["train_calc_agent.py", "--ci-fast", "--weave"], stops="WeaveTracer is not available"),
            Program(["legacy_calc_agent_debug.py"], stops="fit_v0"),
        ],
        calculator_answers("### ANSWER: {} ###"),
        Program(["calc_agent.py"]),
        "Qwen/Qwen2.5-1.5B-Instruct",
        prepare_calc_x,
        requirements=["autogen-ext[mcp]>=0.7,<0.8 mcp<2"],
    ),
    Example(
        "examples/spider",
        [
            Program(["train_sql_agent.py", "fast"], trains=True),
            Program(["train_sql_agent.py", "fast", "--active-agent", "write"], trains=True),
        ],
        sql_answers,
        Program(["sql_agent.py"]),
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        prepare_spider,
        ["termcolor langchain-community nltk"],
    ),
    Example(
        "examples/rag",
        [
            Program(["train_rag.py", "fast"], [RETRIEVER], trains=True),
            Program(["train_rag.py", "single_gpu", "--active-agent", "Assistant"], [RETRIEVER], trains=True),
        ],
        rag_answers,
        Program(["rag_agent.py"], [RETRIEVER]),
        "Qwen/Qwen2.5-1.5B-Instruct",
        prepare_rag,
        RAG_REQUIREMENTS,
        port=8000,
    ),
    Example(
        "examples/unsloth",
        [
            Program(["math_agent.py"]),
        ],
        calculator_answers("### {} ###"),
    ),
    Example(
        "examples/chartqa",
        [
            Program(["debug_chartqa_agent.py"]),
            Program(["train_chartqa_agent.py", "ci"], stops="training on images is not available"),
            Program(
                ["debug_chartqa_agent.py"],
                environment={"USE_LLM_PROXY": "1"},
                stops="Trainer(llm_proxy=) with Baseline is not available",
            ),
        ],
        chart_answers,
        prepare=prepare_chartqa,
        requirements=["termcolor"],
    ),
)

LAB_EXAMPLES = (
    Example(
        "python/packages/lab/lightning/samples",
        [
            Program(["train_math_agent.py"], trains=True),
        ],
        calculator_answers("### {}"),
        Program(["train_math_agent.py", "--debug"]),
        "Qwen/Qwen2.5-1.5B-Instruct",
        prepare_lab,
        LAB_REQUIREMENTS,
        # The framework's `Agent` takes it among its options since 1.0.
        changes=[
            (
                "train_math_agent.py",
                'temperature=llm.sampling_parameters.get("temperature", 0.0)',
                'default_options={"temperature": llm.sampling_parameters.get("temperature", 0.0)}',
            )
        ],
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of agent-lightning at v0.3.0")
    parser.add_argument("--work", type=Path, default=Path("al03-examples"), help="where they run, and their logs stay")
    parser.add_argument("--only", default="", help='a part of "folder program arguments"')
    parser.add_argument("--lab", type=Path, help="a checkout of agent-framework: its lab's samples, too")
    options = parser.parse_args()
    # So that what was started ends, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcomes: list[tuple[Example, Outcome]] = []
    checkouts = {options.checkout: EXAMPLES, **({options.lab: LAB_EXAMPLES} if options.lab else {})}
    for checkout, example in [(c, e) for c, examples in checkouts.items() for e in examples]:
        if any(matches(options.only, example, program) for program in example.programs):
            results = run_example(example, checkout.resolve(), options.work.resolve(), options.only)
            outcomes += [(example, outcome) for outcome in results]
    print()
    for example, outcome in outcomes:
        print(show(example, outcome))
    sys.exit(any(outcome.verdict == "failed" for _, outcome in outcomes))


if __name__ == "__main__":
    main()
