"""What judges share: the question to another model, at any OpenAI-compatible endpoint, and its answer.

Invariant: a judge's calls are never trained, and what it is shown is marked as data.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

from agl import tracing
from agl.errors import ConfigError, JudgeError
from agl.trainer.graders.base import Named
from agl.trainer.graders.fields import Field, failure, reference, text_of

_CACHED = 10_000

T = TypeVar("T")


class _NoAnswer(Exception):
    """The judge's response holds no score, or one outside of the scale."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a judge is asked.

    Attributes:
        key: the same for the same question.
        messages: the request's.
        schema: of the answer.
        runs: how many are judged.
    """

    key: str
    messages: list[Any]
    schema: Mapping[str, Any]
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class Judge(Named, Generic[T]):
    """Another model that is asked for scores; `T` is what its answer is read as. Options are those of `LLMJudge`."""

    needs = ("openai",)
    shows: ClassVar[str]
    """The field of `prompt` that a prompt must have."""

    model: str = field(kw_only=False)
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    criteria: str = ""
    prompt: str | Callable[..., Any] = ""
    task: Field | None = None
    answer: Field | None = None
    low: float = 0
    high: float = 10
    structured: bool = True
    temperature: float | None = None
    max_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 3
    asks: int = 3
    timeout: float = 60.0
    cache: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"{name}(low={self.low!r}, high={self.high!r})", hint="low < high")
        if self.asks < 1 or self.retries < 0 or not self.timeout > 0:
            raise ConfigError(f"{name}: asks is at least 1, retries not negative, timeout more than 0")
        if isinstance(self.prompt, str) and f"{{{self.shows}}}" not in self.prompt:
            raise ConfigError(
                f"{name}(prompt=) does not show the {'answer' if self.shows == 'output' else self.shows}",
                hint=f"put {{{self.shows}}} where it goes",
            )

    def read(self, question: Question, text: str) -> T | None:
        """What a response says; None if it does not hold what was asked for. Subclasses define it."""
        raise NotImplementedError

    # -- the question -------------------------------------------------------------------------------------------------

    def question(
        self,
        task: Any,
        shown: Any,
        fields: Callable[[str], Mapping[str, str]],
        schema: Mapping[str, Any],
        runs: int = 1,
    ) -> Question:
        """The question about what an agent did.

        Args:
            shown: what a prompt that is a function gets between the task and the reference.
            fields: mark -> the further fields of a prompt that is a text.
        """
        task_text = text_of(task if self.task is None else reference(task, self.task, self.label))
        reference_text = None if self.answer is None else text_of(reference(task, self.answer, self.label))
        if callable(self.prompt):
            prompt = self.prompt(task, shown, reference_text)
            key = _hash([runs, prompt])
        else:
            values = {
                "task": task_text,
                "reference": "none" if reference_text is None else reference_text,
                "criteria": self.criteria,
                "low": f"{self.low:g}",
                "high": f"{self.high:g}",
            }
            key = _hash([self.prompt, {**values, **fields("")}])
            mark = f"#{secrets.token_hex(6)}"
            values |= {"mark": mark, **fields(mark)}
            prompt = re.sub(rf"\{{({'|'.join(values)})\}}", lambda match: values[match[1]], self.prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return Question(key, messages, schema, runs)

    @contextmanager
    def cached_or_untrained(self, question: Question) -> Iterator[T | None]:
        """Yields the cached answer; without one, yields None and makes the block's requests the judge's, untrained."""
        if self.cache:
            with _lock:
                answer = self._answers.get(question.key)
            if answer is not None:
                yield answer
                return
        with tracing.untrained(self.label) as scope:
            try:
                if scope is not None:
                    tracing.refuse_gateway(scope, self._client.base_url)
                yield None
            except _openai().BadRequestError as error:
                raise failure(
                    f"the judge {self.model!r} refused the request: {type(error).__name__}: {error}",
                    hint="is it too long for the judge's context, or does the judge not know an option?",
                ) from error
            except _openai().OpenAIError as error:
                raise failure(
                    f"the judge {self.model!r} did not answer: {type(error).__name__}: {error}",
                    hint="is its endpoint up, and are base_url=, api_key= and model= right?",
                    cls=JudgeError,
                ) from error
            except _NoAnswer as error:
                what = "no score" if question.runs == 1 else f"no score for each of {question.runs} runs"
                raise failure(
                    f"the judge {self.model!r} gave {what} from {self.low:g} to {self.high:g}, asked {self.asks} "
                    f"times; at last: {str(error)[:300]!r}",
                    hint="raise max_tokens=, or ask for the score more plainly in prompt=",
                ) from error

    def keep(self, question: Question, answer: T) -> None:
        """Cache an answer."""
        if self.cache:
            with _lock:
                self._answers[question.key] = answer
                while len(self._answers) > _CACHED:
                    self._answers.popitem(last=False)

    def normalised(self, score: float) -> float:
        """A score of the judge's scale on the scale 0 to 1."""
        return (score - self.low) / (self.high - self.low)

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(self, question: Question) -> T:
        """The judge's answer.

        Raises:
            OpenAIError, _NoAnswer: which `cached_or_untrained` turns into a `RewardError`.
        """
        text = ""
        for attempt in range(self.asks):
            try:
                response = self._client.chat.completions.create(**self._request(question, attempt))
            except _openai().BadRequestError:
                if not self._endpoint.structured:
                    raise
                self._endpoint.structured = False
                response = self._client.chat.completions.create(**self._request(question, attempt))
            text = _response_text(response)
            if (answer := self.read(question, text)) is not None:
                return answer
        raise _NoAnswer(text)

    async def ask_async(self, question: Question) -> T:
        """`ask` with an async client."""
        client = self._async_client()
        text = ""
        for attempt in range(self.asks):
            try:
                response = await client.chat.completions.create(**self._request(question, attempt))
            except _openai().BadRequestError:
                if not self._endpoint.structured:
                    raise
                self._endpoint.structured = False
                response = await client.chat.completions.create(**self._request(question, attempt))
            text = _response_text(response)
            if (answer := self.read(question, text)) is not None:
                return answer
        raise _NoAnswer(text)

    def _request(self, question: Question, attempt: int) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        if attempt and self.temperature == 0:
            sampling["temperature"] = None  # the same question at temperature 0 has the same answer
        json_schema = {"name": "grade", "strict": True, "schema": question.schema}
        response_format = {"type": "json_schema", "json_schema": json_schema}
        return {
            "model": self.model,
            "messages": question.messages,
            **{name: value for name, value in sampling.items() if value is not None},
            **({"response_format": response_format} if self._endpoint.structured else {}),
            **self.extra,
        }

    # -- state that lives as long as this object and is not copied -----------------------------------------------------

    @cached_property
    def _answers(self) -> OrderedDict[str, T]:
        return OrderedDict()

    @cached_property
    def _endpoint(self) -> SimpleNamespace:
        """`structured`: whether to request a JSON schema; False when the endpoint refuses it."""
        return SimpleNamespace(structured=self.structured)

    @cached_property
    def _client(self) -> Any:
        return self._new_client("OpenAI")

    @cached_property
    def _async_clients(self) -> weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any]:
        return weakref.WeakKeyDictionary()

    def _async_client(self) -> Any:
        """A client's connections belong to one event loop."""
        loop = asyncio.get_running_loop()
        with _lock:
            if loop not in self._async_clients:
                self._async_clients[loop] = self._new_client("AsyncOpenAI")
            return self._async_clients[loop]

    def _new_client(self, kind: str) -> Any:
        options: dict[str, Any] = {"base_url": self.base_url, "timeout": self.timeout, "max_retries": self.retries}
        if kind == "AsyncOpenAI":
            # The default client closes its connections when it is collected, on whatever loop runs then.
            options["http_client"] = _openai().DefaultAsyncHttpxClient()
        try:
            return getattr(_openai(), kind)(api_key=self.api_key, **options)
        except _openai().OpenAIError as error:
            raise ConfigError(
                f"the judge {self.model!r} has no API key",
                hint="api_key=, or OPENAI_API_KEY; any text where the endpoint needs none",
            ) from error


_lock = threading.Lock()


def answer_schema(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an answer: a reason, then these properties, all required."""
    properties = {"reason": {"type": "string"}, **properties}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def json_object(text: str) -> Mapping[str, Any]:
    """The JSON object in a text, which may stand between others; empty if there is none."""
    start = text.find("{")
    end = text.rfind("}")
    if 0 <= start < end:
        try:
            value = json.loads(text[start : end + 1])
            return value if isinstance(value, Mapping) else {}
        except (ValueError, RecursionError):
            pass
    return {}


def _openai() -> Any:
    import openai

    return openai


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _response_text(response: Any) -> str:
    choices = getattr(response, "choices", None)
    return (choices[0].message.content or "") if choices else ""
