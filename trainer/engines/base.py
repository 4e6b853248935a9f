"""The engine protocol: the one method that the gateway calls to sample tokens, whatever runs behind it."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from agl.errors import ConfigError, ContextLengthError, EngineError
from agl.mdp.types import FloatArray, IntArray

StopReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one answer.

    Attributes:
        max_tokens: most tokens of the answer, >= 1.
        temperature: >= 0; 0 takes the most likely token.
        top_p: nucleus in (0, 1]; 1 keeps every token.
        top_k: keep the k most likely tokens; 0 keeps all.
        stop: texts that end the answer; the tokens up to and including the one that completes the text are kept.
        stop_token_ids: tokens that end the answer; the token itself is kept.
        seed: of this request's generator; the same prompt, weights, batch shape and seed give the same answer.
        top_logprobs: how many alternatives to report per token.
        grammar: what `json_grammar` made; "" holds the answer to nothing. Of an agent's request, a schema's JSON alone.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    top_logprobs: int = 0
    grammar: str = ""


Reasoning = Literal["none", "possible", "open"]


def json_grammar(
    forms: Iterable[tuple[str, Any, str] | tuple[str, Any, str, Any]],
    stop_token_ids: Sequence[int],
    *,
    trigger: str = "",
    otherwise: Any = None,
    several: bool = True,
    section: tuple[str, str, str] | None = None,
    reasoning: Reasoning = "none",
    spaced: bool = True,
) -> str:
    """The grammar of an answer in one of several forms: a text, JSON that fits a schema, its properties in the schema's
    order, and another text; then a stop token. The fourth of a form says how the JSON is written otherwise: see
    `agl.trainer.rendering.toolchoice.Style`.

    Args:
        trigger: the text, not empty, that begins each form where the answer may be another: any text, which may also
            come before the first form, or JSON that fits the schema `otherwise`. With "{" the answer is one form, or
            text that begins otherwise.
        several: whether forms with a trigger may follow each other.
        section: the texts before, between and after forms that follow each other, where these have no trigger each. The
            first of them begins with the trigger. With a section or `otherwise`, no forms stand for one of any text.
        reasoning: whether the answer goes on with any text up to `</think>` before that ("open"), or may begin with
            `<think>` and such a text ("possible").
        spaced: whether white space may come before each form with a trigger.
    """
    others: dict[str, Any] = {"trigger": trigger, "otherwise": otherwise, "several": several, "reasoning": reasoning}
    if not spaced:
        others["spaced"] = False
    if section is not None:
        others["section"] = section
    return json.dumps({"forms": [*forms], "stop": [*stop_token_ids], **others})


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A call for one answer.

    Attributes:
        prompt_ids: int32 [P], P >= 1.
        sampling: the parameters of the answer.
        policy: name of the policy that answers; None for an engine that serves only one.
        session: the conversation that the call belongs to, for engines that keep each on one server.
        owner: who asks, such as an attempt, for engines that let those who wait in by turns.
    """

    prompt_ids: IntArray
    sampling: Sampling
    policy: str | None = None
    session: str | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A sampled answer.

    Attributes:
        token_ids: int32 [R].
        logprobs: float32 [R], of `token_ids` under the distribution that they were drawn from (after temperature, top-k
            and top-p); at temperature 0, under the model's unchanged distribution.
        finish_reason: "stop" (stop token or text), "length", or "cancelled" (aborted, with the tokens sampled so far).
        policy_version: of the weights that sampled it; the oldest one if an update happened meanwhile.
        top_logprobs: per token, (token id, log-prob) of the most likely ones; empty unless requested.
        cached_tokens: how many of the prompt's tokens were not computed, because an earlier request had computed them:
            what the agent's usage says, from which prices are computed. 0 where the engine does not report it.
        versions: (first token, version) of each stretch that one version has sampled; empty for one, or if unknown.
    """

    token_ids: IntArray
    logprobs: FloatArray
    finish_reason: StopReason
    policy_version: int
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = field(default_factory=tuple)
    cached_tokens: int = 0
    versions: Sequence[tuple[int, int]] = ()


OnTokens = Callable[..., None]
"""Called on the caller's event loop with tokens and log-probs as they come, two sequences; where the request has
`top_logprobs`, with the tokens' alternatives as a third, in the form of `Completion.top_logprobs`."""


@runtime_checkable
class Engine(Protocol):
    """Anything that samples tokens from a policy. One that holds answers to `Sampling.grammar` has a true attribute
    `grammars`, too; one that refuses schemas has there a text that says why."""

    @property
    def max_context(self) -> int:
        """Longest prompt + answer, in tokens."""
        ...

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        """Sample one answer.

        Args:
            request: what to sample.
            on_tokens: called with the tokens as they are sampled; None for no streaming.

        Cancelling the awaiting task aborts the sampling.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer.
            EngineError: the engine failed or was closed.
        """
        ...


class ServedModel(Engine):
    """An `Engine` that no run has started, such as a server: `agl.Baseline(engine=)`, `agl.Distill(teacher=)` and
    `agl.evaluate` take any. A subclass has `max_context`, `generate` and `tokenizer`; a teacher `prompt_logprobs`, too.

    Attributes:
        version: of the weights.
    """

    version: int = 0

    @property
    @abstractmethod
    def tokenizer(self) -> str | None:
        """Where tokenizer and chat template are: a Hugging Face directory or hub id; None until `connect`."""

    async def connect(self) -> None:
        """Called before anything else, more than once."""

    async def close(self) -> None:
        """Called at the end of a run; the engine may be connected again."""

    async def tokenize(self, text: str) -> list[int] | None:
        """`text` as the engine tokenises it, without added tokens; None if it cannot say."""
        return None

    async def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        """float32 [T - 1]: log-probs of `token_ids[1:]`, T >= 2, under the model's unchanged distribution.

        Raises:
            ContextLengthError: T tokens leave no room in the context for one more.
            EngineError: the engine failed, or has no such log-probs.
        """
        raise EngineError(f"{self!r} gives no log-probs of a prompt", hint="implement prompt_logprobs")


def holds_to_grammars(engine: Engine) -> bool | str:
    """Whether its answers are held to `Sampling.grammar`; a text if it refuses requests with a schema, and why."""
    return getattr(engine, "grammars", False)


def require_served_model(option: str, value: object) -> None:
    """Raise `ConfigError` for an option's value that is no `ServedModel`."""
    if not isinstance(value, ServedModel):
        raise ConfigError(
            f"{option}= is {value!r}",
            hint='for example agl.VLLMEngine("http://gpu:8000"), or a subclass of agl.trainer.engines.ServedModel',
        )


def empty_completion(policy_version: int) -> Completion:
    """An answer of no tokens, for a request that was cancelled before it began."""
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), "cancelled", policy_version)


def check_sampling(sampling: Sampling) -> None:
    """Raise `ConfigError` for a sampling parameter that is out of range."""
    errors = [
        text
        for invalid, text in (
            (sampling.max_tokens < 1, f"max_tokens={sampling.max_tokens} is below 1"),
            (not 0.0 <= sampling.temperature < float("inf"), f"temperature={sampling.temperature} is not >= 0"),
            (not 0.0 < sampling.top_p <= 1.0, f"top_p={sampling.top_p} is not in (0, 1]"),
            (sampling.top_k < 0, f"top_k={sampling.top_k} is below 0"),
            (sampling.seed < 0, f"seed={sampling.seed} is below 0"),
            (sampling.top_logprobs < 0, f"top_logprobs={sampling.top_logprobs} is below 0"),
            ("" in sampling.stop, "an empty stop text"),
        )
        if invalid
    ]
    if errors:
        raise ConfigError(f"cannot sample with {', '.join(errors)}", hint="correct the request's sampling parameters")


def check_prompt(prompt_ids: IntArray, max_context: int) -> IntArray:
    """The prompt as int32 [P].

    Raises:
        EngineError: it is empty or not flat.
        ContextLengthError: it leaves no room for an answer.
    """
    prompt = np.asarray(prompt_ids, dtype=np.int32)
    if prompt.ndim != 1 or prompt.size == 0:
        raise EngineError(f"a prompt of shape {prompt.shape}", hint="send at least one token id, as a flat array")
    if prompt.size >= max_context:
        raise ContextLengthError(
            f"a prompt of {prompt.size} tokens leaves no room for an answer in a context of {max_context}",
            hint="shorten the prompt, or raise the served context's length if the model allows it",
        )
    return prompt
