"""A model behind HTTP that obeys the rules its prompt names, agents that ask it, and one that rewrites prompts.

The model's answer holds the word of each rule in its prompt. A rewriting model adds one rule that the feedback shows as
broken. Both are at one provider, told apart by the model's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

import agl
from agl import semconv, tracing
from agl.testing.provider import Provider, Reply, serve

RULES = {"polite": "please", "metric": "metres", "brief": "done"}
"""Rule -> the word in the answer of a model that obeys it."""
START = "Answer: {question}"
TRAIN = [{"question": f"train {i}"} for i in range(6)]
VAL = [{"question": f"val {i}"} for i in range(4)]
HELD_OUT = [{"question": f"held out {i}"} for i in range(5)]
RESOURCES = {"prompt": agl.PromptTemplate(START)}


def obey(text: str) -> str:
    return " ".join(["ok", *(word for rule, word in RULES.items() if f"be {rule}" in text)])


def graded(answer: str) -> dict[str, float]:
    """The share of the rules that are obeyed, and each rule by name."""
    rules = {rule: float(word in answer) for rule, word in RULES.items()}
    return {"reward": sum(rules.values()) / len(rules), **rules}


def next_rule(prompt: str) -> str | None:
    """A rule that the feedback in a reflection prompt shows as broken."""
    broken = re.findall(r"^(\w+) = 0 \(not part", prompt, re.MULTILINE)
    return min(broken) if broken else None


def current(prompt: str) -> str:
    """The text that a reflection prompt asks to rewrite."""
    match = re.search(r"```\n(.*?)\n```", prompt, re.DOTALL)
    assert match is not None, prompt
    return match.group(1)


def add_rule(prompt: str) -> str:
    rule = next_rule(prompt) or re.findall(r"be (\w+) at the end", prompt)[-1:]
    rule = rule if isinstance(rule, str) else "".join(rule)
    return f"Here it is:\n```\n{current(prompt)} Also be {rule}.\n```"


def critique(prompt: str) -> str:
    return f"The text has to ask it to be {next_rule(prompt)} at the end."


@contextmanager
def rule_provider(rewrite: Callable[[str], str] = add_rule) -> Iterator[Provider]:
    def script(body: dict[str, Any]) -> Reply:
        text = "\n".join(str(m["content"]) for m in body["messages"])
        models = {"rewriter": rewrite, "critic": critique}
        return Reply(models.get(body["model"], obey)(text))

    with serve(script) as provider:
        yield provider


def reflections(provider: Provider) -> int:
    """How many requests came to the models that rewrite."""
    return sum(seen.body["model"] in ("rewriter", "critic") for seen in provider.seen)


@cache
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="k", max_retries=0)


def ask(url: str, *messages: tuple[str, str]) -> str:
    said: Any = [{"role": role, "content": text} for role, text in messages]
    return client(url).chat.completions.create(model="obedient", messages=said).choices[0].message.content or ""


def template_agent(url: str) -> Any:
    @agl.rollout
    def agent(task: dict[str, str], prompt_template: agl.PromptTemplate) -> dict[str, float]:
        return graded(ask(url, ("user", prompt_template.format(question=task["question"]))))

    return agent


def two_agents(url: str) -> Any:
    """A planner, whose prompt does not matter, and a writer, who keeps its own client and prompt."""

    def work(task: dict[str, str]) -> str:
        with tracing.span(semconv.INVOKE_AGENT, "planner", agent="planner"):
            plan = ask(url, ("system", "You plan."), ("user", task["question"]))
        with tracing.span(semconv.INVOKE_AGENT, "writer", agent="writer"):
            answer = ask(url, ("system", "You write. {braces}"), ("user", f"{task['question']} {len(plan)}"))
            agl.emit_reward({"said": 0.0, "length": len(answer) / 100}, primary="said")
            return answer

    return agl.wrap(work, reward=lambda task, output: graded(output), name="team")


def gepa(url: str, **options: Any) -> agl.GEPA:
    settings: dict[str, Any] = {"reflection": agl.LLM(url, "rewriter"), "budget": 80, "held_out": HELD_OUT}
    return agl.GEPA(**{**settings, **options})


def apo(url: str, **options: Any) -> agl.APO[Any]:
    settings = {"beam_width": 2, "branch_factor": 2, "beam_rounds": 3, "gradient_batch_size": 2, "val_batch_size": 3}
    models = {"gradient_model": "critic", "apply_edit_model": "rewriter"}
    return agl.APO(AsyncOpenAI(base_url=url, api_key="k"), **{**settings, **models, **options})


def fit(algorithm: Any, agent: Any, directory: Path, *, resume: bool = False, **options: Any) -> agl.Result:
    settings = {"initial_resources": RESOURCES, "n_workers": 8, "progress": False, "directory": directory}
    return agl.Trainer(algorithm, **{**settings, **options}).fit(agent, TRAIN, VAL, resume=resume)


@agl.rollout
def environment_agent(task: dict[str, str], prompt_template: agl.PromptTemplate, llm: agl.LLM) -> dict[str, float]:
    """For worker processes: its model comes as a resource, with its key."""
    assert llm.api_key == "secret"
    return graded(ask(llm.endpoint, ("user", prompt_template.format(question=task["question"]))))
