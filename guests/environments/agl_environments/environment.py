"""An environment as agl takes it: tasks, an agent that solves them, a reward.

Whatever a policy's answers cause is a low score; whatever the environment or its surroundings cause is raised, so that
the attempt is repeated and never trained on.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from openai import AsyncOpenAI

import agl
from agl.errors import AglError, ConfigError, DatasetError, MissingExtraError, RolloutError, described, nearest
from agl.surroundings import copied
from agl_environments.asking import Ask, Model, Replay

Task = dict[str, Any]


class Kind(Protocol):
    """What a module of this package implements: tasks, and one run of a task."""

    def tasks(self, n: int | None, seed: int) -> list[Task]:
        """JSON values that say all that `play` needs; the same ones for the same seed."""
        ...

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        """Run a task, with a policy's answers from `ask`, and return its score. Exceptions are the environment's."""
        ...


class _Entry(NamedTuple):
    module: str
    name: str
    package: str


KINDS = {
    "reasoning-gym": _Entry("reasoning", "ReasoningGym", "reasoning_gym"),
    "gymnasium": _Entry("games", "Games", "gymnasium"),
    "verifiers": _Entry("verifiers_env", "Verifiers", "verifiers"),
    "inspect": _Entry("inspect_tasks", "InspectTasks", "inspect_ai"),
    "nemo-gym": _Entry("nemo_gym_server", "NemoGym", "aiohttp"),
    "openenv": _Entry("openenv_server", "OpenEnv", "openenv"),
    "harbor": _Entry("harbor_tasks", "Harbor", "openai"),  # the tasks are read without Harbor's own package
}
"""Kind, which is also the extra that installs it -> the module and class here, and the package that it needs."""


class Environment:
    """Tasks, agent and reward of an environment; `load` makes one.

    Attributes:
        name: as it was loaded, such as "reasoning-gym:gcd".
        tasks: JSON objects, for `agl.Trainer.fit`, `agl.evaluate` and files.
        agent: solves a task with the model that is trained or evaluated, and returns the environment's score. Its name
            is "solver".
        reward: `reward(task, output)` scores the output of your own agent: a text, or its answers in order (texts, or
            messages with "tool_calls"), which the environment replays.
    """

    def __init__(self, name: str, kind: Kind, tasks: list[Task], model: str) -> None:
        self.name = name
        self.tasks = tasks
        self._kind = kind
        self._model = model
        self.agent = agl.rollout(self._solve, name="solver")
        self.reward = Reward(self)

    def __repr__(self) -> str:
        return f"<agl.environments {self.name}: {len(self.tasks)} tasks>"

    async def _solve(self, task: Any, resources: Any) -> agl.Outcome:
        llm = next((value for value in resources.values() if isinstance(value, agl.LLM)), None)
        # Without one the agent calls its own provider, which the client finds in the process's environment.
        url, key = (llm.endpoint, llm.api_key or "not-used") if llm else (None, None)
        async with AsyncOpenAI(base_url=url, api_key=key) as client:
            ask = Model(client, llm.model if llm else self._model, llm.sampling_parameters if llm else {})
            score = await self.play(task, ask)
        texts = [answer["content"] for answer in ask.answers]
        plain = len(texts) == 1 and "tool_calls" not in ask.answers[0]
        return agl.Outcome(score, texts[0] if plain else ask.answers)

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        """Run a task with the answers of `ask`; its score.

        Raises:
            RolloutError: the environment failed. The exception of `ask` if it raised one, whatever became of it.
        """
        failure = None
        score = math.nan
        try:
            score = float(await self._kind.play(task, ask))
        except AglError as error:
            failure = error
        except Exception as error:
            # Without the exception as its cause: one that shows an answer of the policy would count as the policy's.
            failure = RolloutError(
                f"the environment {self.name} failed: {_place(error)}{described(error)}",
                hint="this is no failure of the policy: the attempt is repeated, and left out if it fails again",
            )
        else:
            if not math.isfinite(score):
                failure = RolloutError(f"the environment {self.name} scored {score}", hint="a score is a finite number")
        failure = ask.error or failure
        if failure is not None:
            raise failure
        return score


class Reward:
    """`Environment.reward`: for sync agents as for async ones."""

    is_async = False

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.__name__ = environment.name

    def __call__(self, task: Mapping[str, Any], output: object) -> float:
        """The score of an agent's output; RolloutError if the environment failed."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(copied().run, asyncio.run, self.call_async(task, output)).result()

    async def call_async(self, task: Mapping[str, Any], output: object) -> float:
        """The same, awaited."""
        return await self._environment.play(task, Replay(output))


def load(name: str, *, n: int | None = None, seed: int = 0, model: str = "gpt-4o-mini", **options: Any) -> Environment:
    """Read an environment through its own package.

    Args:
        name: "kind:what", such as "reasoning-gym:gcd", "gymnasium:FrozenLake-v1", "verifiers:my-env",
            "inspect:inspect_evals/gsm8k", "nemo-gym:http://host:port", "openenv:http://host:port", "harbor:FOLDER".
        n: how many tasks; None for all of a data set, or for 100 where tasks are generated.
        seed: of generated tasks, and of the order of a data set's.
        model: what the agent asks at its own provider (`OPENAI_BASE_URL`) while nothing is trained or evaluated.
        **options: the environment's own, and those of its kind (docs/environments.md).

    Raises:
        ConfigError: an unknown kind or environment, or an option that it does not take.
        MissingExtraError: its package is not installed.
        DatasetError: it has no tasks, or one that is no JSON.
    """
    kind, _, what = name.partition(":")
    if kind not in KINDS or not what:
        problem = f"no environment's name: {name!r}" if kind in KINDS else f"no kind of environment: {kind!r}"
        raise ConfigError(problem, hint=f"kind:name, such as 'reasoning-gym:gcd'; {nearest(kind, KINDS)}")
    if n is not None and (not isinstance(n, int) or n < 1):
        raise ConfigError(f"n={n!r} tasks", hint="a positive number, or None")
    entry = KINDS[kind]
    if find_spec(entry.package) is None:
        raise MissingExtraError(
            f"{name} needs {entry.package}, which is not installed",
            hint=f'in the root of the agl clone: pip install "./guests/environments[{kind}]"',
        )
    module = importlib.import_module(f"agl_environments.{entry.module}")
    environment: Kind = getattr(module, entry.name)(what, **options)
    tasks = environment.tasks(n, seed)
    if not tasks:
        raise DatasetError(f"{name} has no tasks")
    for index, task in enumerate(tasks):
        try:
            same = json.loads(json.dumps(task)) == task
        except (TypeError, ValueError):
            same = False
        if not same:
            raise DatasetError(f"task {index} of {name} is no JSON value")
    return Environment(name, environment, tasks, model)


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}: " if trace else ""
