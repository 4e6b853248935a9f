"""`agl quickstart --real`: a pretrained model learns to use a tool, by imitation of an expert and then by GRPO."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool

from agl.adapters.langchain import wrap
from agl.trainer.algorithms.baseline import Baseline
from agl.trainer.algorithms.imitation import SFT
from agl.trainer.algorithms.policy_gradient import GRPO
from agl.trainer.evaluation.evaluation import Evaluation
from agl.trainer.evaluation.policy_report import RolloutQuery
from agl.trainer.local.prepared import model_directory
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.outcome import conclude
from agl.trainer.quickstart.smollm2 import smollm2
from agl.trainer.quickstart.tasks import Split, Task, make_task, split_of
from agl.trainer.report import terminal
from agl.trainer.report.explain import explain
from agl.trainer.run.trainer import Result, Trainer
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store
from agl.trainer.traces.stored import traces

STEPS = 6
TEMPLATE = "hermes"
SYSTEM_PROMPT = "Use the calculator, then answer with the number."
SETTINGS: Mapping[str, Any] = {
    "max_response_tokens": 64,
    "max_context": 384,
    "max_batch": 64,
    # On a GPU, too, where bfloat16 is the default: this model learns less from the same steps with it.
    "autocast": "float32",
    # What a pass's rows begin with is computed once; with more in a pass an update takes more memory than sampling.
    "max_tokens_per_microbatch": 512,
    "threads": os.cpu_count(),  # the model computes nearly all of the time
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done.

    Attributes:
        expert: tasks that the expert solves, each of which is imitated once.
        heldout: tasks that measure.
        batch: tasks of a step of GRPO.
        group: rollouts of each.
    """

    expert: int = 96
    heldout: int = 128
    batch: int = 8
    group: int = 8


class Expert(BaseChatModel):
    """A chat model that calls the calculator, then answers with what it returned: what a large model would do."""

    @property
    def _llm_type(self) -> str:
        return "scripted-expert"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """The model with its tools, which are recorded with each call."""
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools])

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        last = messages[-1]
        if isinstance(last, ToolMessage):
            answer = AIMessage(str(last.content))
        else:
            expression = re.findall(r"\d+ [-+*/] \d+", str(last.content))[0]
            call = {"name": "calculator", "args": {"expression": expression}, "id": f"call_{len(messages)}"}
            answer = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])


def products(n: int, *, seed: int, split: Split) -> list[Task]:
    """`n` different products of two numbers of three digits, the same ones for the same seed."""
    rng = random.Random(f"products {split} {seed}")
    tasks: dict[str, Task] = {}
    while len(tasks) < n:
        a = rng.randrange(100, 1000)
        b = rng.randrange(100, 1000)
        if split_of(a, b) == split:
            task = make_task(a, "*", b)
            tasks[task["question"]] = task
    return list(tasks.values())


def last_number(task: Mapping[str, Any], output: object) -> float:
    """1.0 iff the last number of the agent's final text is the task's answer, else 0.0."""
    numbers = re.findall(r"-?\d+", str(output).replace(",", ""))
    return float(numbers[-1:] == [task["answer"]])


def run(
    out: Path,
    *,
    model: str | None = None,
    seed: int = 0,
    steps: int = STEPS,
    n_workers: int = 64,
    progress: bool = True,
    size: Size = Size(),
) -> dict[str, Any]:
    """Run it in the directory `out` and print its result; the facts are those of `quickstart.run.run`.

    Args:
        model: to train instead of SmolLM2: whatever `model=` of an algorithm takes.
    """
    started = time.monotonic()
    console = terminal.console()
    model = model or smollm2()
    # One that cannot be loaded is refused before anything is removed or run.
    model_directory(model, TEMPLATE)
    for name in ("expert", "imitation", "checkpoints", "policy"):
        shutil.rmtree(out / name, ignore_errors=True)
    for file in out.glob("run.db*"):
        file.unlink()
    agent = wrap(build_agent(system_prompt=SYSTEM_PROMPT, max_tokens=64), reward=last_number)
    expert = wrap(build_agent(Expert(), system_prompt=SYSTEM_PROMPT), reward=last_number)
    train = products(max(size.expert, steps * size.batch), seed=seed, split="train")
    heldout = products(size.heldout, seed=seed, split="heldout")
    options: dict[str, Any] = {"n_workers": n_workers, "seed": seed, "progress": progress}

    def say(text: str) -> None:
        if progress:
            console.print(text)

    say(f"1. an expert solves {size.expert} tasks with the agent; its runs are recorded")
    Trainer(Baseline(), directory=out / "expert", **options).fit(expert, train[: size.expert])
    say(f"2. {model} solves {size.heldout} held-out tasks, imitates the expert, and solves them again")
    imitated = Trainer(
        SFT(
            model=model,
            chat_template=TEMPLATE,
            data=traces(out / "expert"),
            epochs=1,
            batch_size=16,
            learning_rate=2e-5,
            val_every=10**6,
            **SETTINGS,
        ),
        directory=out / "imitation",
        store=str(out / "run.db"),
        **options,
    ).fit(agent, [], heldout)
    say(f"3. GRPO: {steps} steps of {size.batch * size.group} rollouts; reward 1 for the right answer, else 0")
    result = Trainer(
        GRPO(
            model=str(imitated.policy),
            group_size=size.group,
            batch_size=size.batch,
            steps=steps,
            learning_rate=2e-5,
            val_every=steps,
            val_before_train=False,
            checkpoint_every=steps,
            **SETTINGS,
        ),
        directory=out,
        store=str(out / "run.db"),
        **options,
    ).fit(agent, train, heldout)
    evaluation = read_store(result.store, lambda opened: _evaluated(opened, result, imitated))
    return _report(out, evaluation, imitated, result, steps, time.monotonic() - started)


async def _evaluated(store: Store, result: Result, imitated: Result) -> Evaluation:
    """The held-out tasks, solved three times."""
    last = [imitated.history[-1]["step"], result.history[-1]["step"]]
    queries = {
        "pretrained": RolloutQuery(imitated.run_id, 0),
        "after imitation": RolloutQuery(imitated.run_id, last[0]),
        "after GRPO": RolloutQuery(result.run_id, last[1]),
    }
    return await Evaluation.of_runs(store, result.store, queries)


def _report(
    out: Path, evaluation: Evaluation, imitated: Result, result: Result, steps: int, seconds: float
) -> dict[str, Any]:
    first = imitated.history[-1]["step"]
    history = [*imitated.history, *(entry | {"step": entry["step"] + first} for entry in result.history)]
    shown = evaluation.compare("pretrained", "after GRPO").gained
    if shown:
        console = terminal.console()
        for when, rollout in zip(("before", "after"), shown[0].rollouts, strict=True):
            console.print(f"\n{when}:")
            explain(rollout, result.store)
    facts = conclude(out, evaluation, result, history, steps=first + steps, seconds=seconds, ask="What is 417 * 286?")
    return facts | {"rollouts": list(shown[0].rollouts) if shown else []}
