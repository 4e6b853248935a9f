"""Tasks of `inspect-ai`, such as those of `inspect-evals`: a data set's samples, the task's own solver and scorer.

A sample is run by the task's parts, not by `inspect_ai.eval`, which runs once at a time in a process and writes logs.
"""

# The package may be missing where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

from inspect_ai import Task as InspectTask
from inspect_ai._eval.context import init_task_context
from inspect_ai._eval.loader import load_tasks
from inspect_ai._eval.task.generate import task_generate
from inspect_ai._eval.task.util import sample_messages
from inspect_ai._util.notgiven import NOT_GIVEN
from inspect_ai.dataset import Sample
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.model import (
    GenerateConfig,
    Model,
    ModelAPI,
    ModelName,
    ModelOutput,
    messages_to_openai,
    model_output_from_openai,
    modelapi,
)
from inspect_ai.scorer import Target, value_to_float
from inspect_ai.solver import TaskState, chain
from inspect_ai.solver._task_state import sample_state, set_sample_state
from inspect_ai.util import apply_limits, message_limit
from inspect_ai.util._store import init_subtask_store

from agl.errors import ConfigError
from agl_environments.asking import Ask, function_tool


class InspectTasks:
    """One task, as `inspect eval` takes it: "inspect_evals/gsm8k", or "file.py@name".

    Only the first scorer counts; "C" is 1, "P" 0.5, "I" and "N" are 0. Whatever model the task asks, also as a judge
    or a user, is the policy.

    Args:
        score: which value counts where the scorer gives several.
        max_messages: where the task has no limit of its own; after so many the sample is scored as it is.
        **options: the task's.
    """

    def __init__(self, name: str, *, score: str | None = None, max_messages: int = 100, **options: Any) -> None:
        try:
            found = load_tasks([name], options)
        except Exception as error:
            raise ConfigError(f"inspect cannot load {name!r}: {error}", hint="as `inspect eval` takes it") from error
        if len(found) != 1:
            raise ConfigError(f"{name!r} names {len(found)} tasks of inspect", hint="name one, such as file.py@task")
        self._task: InspectTask = found[0]
        if self._task.sandbox or any(s.sandbox or s.files or s.setup for s in self._task.dataset):
            raise ConfigError(f"{name} runs in a container of inspect", hint="agl reads tasks without sandbox=")
        if not self._task.scorer:
            raise ConfigError(f"{name} has no scorer", hint="agl needs one: it gives the reward")
        self._score = score
        self._limit = self._task.message_limit or max_messages

    def tasks(self, n: int | None, seed: int) -> list[dict[str, Any]]:
        samples = [sample.model_dump(mode="json", exclude_none=True) for sample in self._task.dataset]
        for sample in samples:
            for message in sample["input"] if isinstance(sample["input"], list) else ():
                message.pop("id", None)  # a random one, at every load
        return random.Random(seed).sample(samples, len(samples))[:n]

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        # inspect adds ids to messages and fields to metadata in place.
        sample = Sample.model_validate(copy.deepcopy(dict(task)))
        model = Model(_Policy(ask), GenerateConfig())
        state = TaskState(
            model=ModelName("agl/policy"),
            sample_id=sample.id or 0,
            epoch=1,
            input=sample.input,
            messages=sample_messages(sample),
            target=Target(sample.target),
            choices=sample.choices,
            metadata=sample.metadata or {},
        )
        init_task_context(model)
        init_transcript(Transcript())
        init_subtask_store(state.store)
        set_sample_state(state)

        async def generate(state: TaskState, tool_calls: Any = "loop", **config: Any) -> TaskState:
            return await task_generate(model, state, tool_calls, NOT_GIVEN, GenerateConfig(**config))

        setup = self._task.setup
        solver = self._task.solver
        solvers = [
            *(setup if isinstance(setup, list) else [setup] if setup else []),
            *(solver if isinstance(solver, list) else [solver]),
        ]
        with apply_limits([message_limit(self._limit)], catch_errors=True):
            state = await chain(*solvers)(state, generate)
        scorer = self._task.scorer
        first = scorer[0] if isinstance(scorer, list) else scorer
        score = await first(sample_state() or state, Target(sample.target))
        value = 0.0 if score is None else score.value
        if isinstance(value, Mapping):
            if self._score not in value:
                raise ConfigError(
                    f"the scorer gives {', '.join(value)}", hint="score= says which of them is the reward"
                )
            value = value[self._score]
        return value_to_float()(value)


@modelapi("agl")
class _Policy(ModelAPI):
    """Passes requests on to a policy."""

    def __init__(self, ask: Ask) -> None:
        super().__init__("policy")
        self._ask = ask

    async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> ModelOutput:
        functions = [function_tool(t.name, t.description, t.parameters.model_dump(exclude_none=True)) for t in tools]
        return await model_output_from_openai(await self._ask(await messages_to_openai(input), functions))
