"""Environments of `verifiers` 0.3 (the classes of `import verifiers as vf`): their own loop, tools and rubric.

The loop's requests go to the policy by `ask`. verifiers counts a reward function that raises as 0; here that holds only
where it could not read the JSON of an answer (`agl.mdp.evidence`), and anything else is the environment's failure.
"""

# The package may be missing where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, cast

import verifiers
from openai.types.chat import ChatCompletion

from agl.agents.causes import causes_of
from agl.errors import ConfigError, MissingExtraError
from agl.mdp.evidence import answer_texts, is_answer, unreadable_inputs
from agl_environments.asking import Ask

if find_spec("verifiers.legacy") is None:
    raise MissingExtraError(
        f"this is verifiers {verifiers.__version__}, and agl reads the environments of 0.3",
        hint='pip install "verifiers>=0.3,<0.4": 0.4 has no vf.SingleTurnEnv, vf.MultiTurnEnv and vf.ToolEnv any more',
    )
vf = cast(Any, verifiers)
_raised: ContextVar[list[Exception]] = ContextVar("agl_environments_raised")


class Verifiers:
    """One environment, by its name as `vf.load_environment` takes it; **options are passed to it."""

    def __init__(self, name: str, **options: Any) -> None:
        try:
            self._environment = vf.load_environment(name, **options)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"verifiers cannot load {name!r}: {error}", hint="install its package") from error
        if self._environment.requires_group_rollouts:
            raise ConfigError(f"{name} scores the rollouts of a task together", hint="its rubric is not supported")
        for rubric in _rubrics(self._environment.rubric):
            rubric.funcs = [_Noted(function) for function in rubric.funcs]

    def tasks(self, n: int | None, seed: int) -> list[dict[str, Any]]:
        rows = [{k: v for k, v in row.items() if v is not None} for row in self._environment.get_dataset()]
        return random.Random(seed).sample(rows, len(rows))[:n]

    async def play(self, task: Mapping[str, Any], ask: Ask) -> float:
        raised: list[Exception] = []
        token = _raised.set(raised)
        try:
            output = await self._environment.run_rollout(dict(task), _Client(ask), "policy", {})
        finally:
            _raised.reset(token)
        answers = answers_among(output["completion"])
        for error in raised:
            if not is_answer(unreadable_inputs(causes_of(error)), answers):
                raise error
        failed = output.get("error")
        if failed and ask.error is None and failed["error"] not in _OF_THE_ANSWER:
            raise RuntimeError(failed["error_chain_str"])
        return output["reward"]


def answers_among(messages: Any) -> list[str]:
    """The texts of the assistant's messages among these, and the arguments of their tool calls."""
    if isinstance(messages, str):
        return [messages]
    plain = (m.model_dump() if hasattr(m, "model_dump") else dict(m) for m in messages or ())
    return [text for m in plain if m.get("role") == "assistant" for text in answer_texts(m)]


_OF_THE_ANSWER = ("EmptyModelResponseError", "InvalidModelResponseError", "ToolParseError")
"""Errors of verifiers that a policy's answer causes; the rubric scores what there is."""


class _Client(vf.OpenAIChatCompletionsClient):
    """Passes requests on to a policy."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(None)
        self._ask = ask

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> ChatCompletion:
        return await self._ask([{k: v for k, v in m.items() if v is not None} for m in prompt], tools)


def _rubrics(rubric: Any) -> Iterator[Any]:
    for part in getattr(rubric, "rubrics", ()):
        yield from _rubrics(part)
    if not hasattr(rubric, "rubrics"):
        yield rubric


class _Noted:
    """A reward function whose exceptions are noted on their way; a class, so that worker processes can get it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            value = self._function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            if (raised := _raised.get(None)) is not None:
                raised.append(error)
            raise
