"""Text in, text out: `/v1/completions`, `/tokenize` and `/detokenize`, as evaluation harnesses call them.

Sources: OpenAI API reference, "Create completion"; vLLM's `/tokenize` and `/detokenize`. A prompt is text or token ids
and is not rendered. Calls are not recorded: agents are trained on conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agl.errors import ConfigError
from agl.mdp.types import IntArray, int_array
from agl.trainer.engines.base import Completion, OnTokens, Request, Sampling
from agl.trainer.gateway import http
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.application import ApplicationGateway
from agl.trainer.gateway.calls import ChatRequest, ServedPolicy
from agl.trainer.gateway.dialects.chat.body import read as read_chat
from agl.trainer.gateway.dialects.common import (
    OTHER_DISTRIBUTION,
    OpenAIBody,
    Several,
    Unsupported,
    nucleus,
    sse,
    validated,
)
from agl.trainer.gateway.dialects.error_forms import openai_error
from agl.trainer.gateway.errors import PromptTooLongError, RequestError, refusal
from agl.trainer.gateway.metrics import Measured
from agl.trainer.gateway.text_logprobs import TextLogprobs
from agl.trainer.http.bodies import body_in_turn
from agl.trainer.http.limits import Limits, Refused
from agl.trainer.http.responses import answer, unless_gone
from agl.trainer.http.turns import Turns
from agl.trainer.rendering.token_text import CONTEXT

T = TypeVar("T")

MOST_ANSWERS = 128
"""Prompts times `n` of one request."""


_Part = tuple[int, Sequence[int]]
"""The number of an answer, and its newly sampled tokens."""


TokenIds = Several[int]


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionsBody(OpenAIBody):
    """The fields of a request for text."""

    model: str = ""
    prompt: str | TokenIds | Several[str] | Several[TokenIds]
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    n: int | None = Field(default=None, ge=1, le=MOST_ANSWERS)
    stop: str | Several[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None


UNSUPPORTED = {
    "suffix": Unsupported("would be text after the answer, which a policy in training does not see; leave it out"),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias"), OTHER_DISTRIBUTION),
}
"""The fields that OpenAI documents and `CompletionsBody` lacks."""


_AS_TRAINED = "is not supported: conversations are written as they were in training; leave it out"
UNSUPPORTED_OF_TOKENIZE = {
    "add_generation_prompt": Unsupported(_AS_TRAINED, (True,)),
    **dict.fromkeys(
        ("continue_final_message", "chat_template", "chat_template_kwargs", "mm_processor_kwargs"),
        Unsupported(_AS_TRAINED),
    ),
}
"""vLLM's fields that `TokenizeBody` lacks."""


class TokenizeBody(BaseModel):
    """A text, or a conversation as the policy's chat template writes it."""

    model: str = ""
    prompt: str | None = None
    messages: Several[dict[str, Any]] | None = None
    tools: Several[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """Token ids."""

    model: str = ""
    tokens: TokenIds


_UNSUPPORTED = {CompletionsBody: UNSUPPORTED, TokenizeBody: UNSUPPORTED_OF_TOKENIZE, DetokenizeBody: {}}


def routes(gateway: ApplicationGateway) -> list[Route]:
    """The routes of text and tokens."""

    async def tokenize(request: HttpRequest) -> Response:
        access = gateway.find_attempt("", 1, request.headers)
        limits = request.app.state.limits
        with _admitted(gateway, request):
            return await _read(
                gateway, request, TokenizeBody, lambda body, served: answer(_tokenized(body, served, access, limits))
            )

    async def detokenize(request: HttpRequest) -> Response:
        with _admitted(gateway, request):
            return await _read(gateway, request, DetokenizeBody, lambda body, served: answer(_text(body, served)))

    async def completions(request: HttpRequest) -> Response:
        application = gateway.application_of(request.headers)
        gateway.admit_one(application)
        streams = False
        try:
            try:
                work = await _read(gateway, request, CompletionsBody, _work)
            except RequestError as error:
                gateway.metrics.refused(application, error.status)
                raise
            measured = gateway.metrics.started(application, work.served.name)
            if work.body.stream:
                streams = True
                return _stream(work, measured, functools.partial(gateway.ended, application))
            return await unless_gone(request, _answer(work, measured, gateway.turns.of(application)))
        finally:
            if not streams:
                gateway.ended(application)

    endpoints = {f"{http.PREFIX}/completions": completions, "/tokenize": tokenize, "/detokenize": detokenize}
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


@contextlib.contextmanager
def _admitted(gateway: ApplicationGateway, request: HttpRequest) -> Iterator[None]:
    """While a request is one of those that its application has open."""
    application = gateway.application_of(request.headers)
    gateway.admit_one(application)
    try:
        yield
    finally:
        gateway.ended(application)


async def _read(
    gateway: ApplicationGateway,
    request: HttpRequest,
    kind: type[Any],
    then: Callable[[Any, ServedPolicy], T],
) -> T:
    """What `then` makes of a request's body and the policy that it names: on a thread, in its application's turn.

    A short text takes as long as a long conversation where it is encoded a hundred times.
    """

    def made(data: Any) -> T:
        body = validated(kind, data, _UNSUPPORTED[kind])
        return then(body, gateway.served(gateway.policy_named(body.model, None)))

    turns = gateway.turns.of(gateway.application_of(request.headers))
    most = request.app.state.limits.request_bytes
    try:
        async with body_in_turn(request, turns, most=most, large=True) as received:
            return await received.json(then=made)
    except Refused as refused:
        raise RequestError(refused.status, refused.message, code=refused.code) from None


def _tokenized(body: TokenizeBody, served: ServedPolicy, access: Access, limits: Limits) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(400, "send prompt or messages", code="invalid_value", param="prompt")
    if body.messages is None:
        prompt = served.rendering.encode(str(body.prompt), special=body.add_special_tokens)
    else:
        conversation = {"messages": body.messages, "tools": body.tools}
        http.check_counts(conversation, limits)
        prompt = _rendered(served, read_chat(conversation, access).chat)
    strings = {"token_strs": [served.rendering.decode([i]) for i in prompt]} if body.return_token_strs else {}
    return {"count": len(prompt), "max_model_len": served.engine.max_context, "tokens": prompt, **strings}


def _text(body: DetokenizeBody, served: ServedPolicy) -> dict[str, Any]:
    return {"prompt": served.rendering.decode(_ids(served, body.tokens, "tokens"))}


def _rendered(served: ServedPolicy, chat: ChatRequest) -> list[int]:
    try:
        return served.rendering.prompt(chat.messages, chat.tools).ids.tolist()
    except ConfigError as error:
        raise refusal(error, "/tokenize") from error


def _ids(served: ServedPolicy, ids: Sequence[int], where: str) -> IntArray:
    """Token ids of a client.

    Raises:
        RequestError: 400, the policy has no such token.
    """
    size = served.rendering.vocabulary_size
    if (wrong := next((i for i in ids if not 0 <= i < size), None)) is not None:
        raise RequestError(400, f"{where}: there is no token {wrong}, but {size} of them", param=where)
    return int_array(ids)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What is to be done for a request.

    Attributes:
        body: of the request.
        served: the policy.
        prompts: int32 [P] each.
        sampling: None where nothing is sampled.
        id: of the answer.
    """

    body: CompletionsBody
    served: ServedPolicy
    prompts: list[IntArray]
    sampling: Sampling | None
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")

    @property
    def base(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": self.served.name}

    @property
    def stop(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return self.sampling.stop if self.sampling else ()

    @property
    def answers(self) -> list[tuple[int, IntArray]]:
        """(number, prompt) of each answer."""
        return list(enumerate(prompt for prompt in self.prompts for _ in range(self.body.n or 1)))

    def whole_text(self, prompt: IntArray, ids: Sequence[int]) -> str:
        """The text of an answer's tokens, without the token that ends it."""
        rest = [i for i in ids if i not in self.served.stop_token_ids]
        return self.served.rendering.decode_after(prompt[-CONTEXT:], rest)

    def text(self, prompt: IntArray, ids: Sequence[int]) -> str:
        """The text of an answer's tokens, up to a stop text."""
        return self.cut(self.whole_text(prompt, ids))

    def cut(self, text: str) -> str:
        """A text up to a stop text in it."""
        ends = [at for s in self.stop if (at := text.find(s)) >= 0]
        return text[: min(ends)] if ends else text

    async def sample(self, number: int, prompt: IntArray, on_tokens: OnTokens | None = None) -> Completion:
        """Sample an answer."""
        if self.sampling is None:
            empty = np.empty(0, np.int32), np.empty(0, np.float32)
            return Completion(*empty, "length", 0)
        seed = (self.sampling.seed + number) % 2**63
        request = Request(prompt, replace(self.sampling, seed=seed), self.served.name)
        return await self.served.engine.generate(request, on_tokens=on_tokens)


def _work(body: CompletionsBody, served: ServedPolicy) -> _Work:
    """What is to be done.

    Raises:
        RequestError: 400, the request cannot be held.
    """
    if body.best_of not in (None, body.n or 1):
        raise RequestError(400, "best_of is not supported: ask for n answers, and choose", param="best_of")
    prompt: Any = body.prompt
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = [
        _ids(served, p, "prompt") if isinstance(p, list) else int_array(served.rendering.encode(p, special=True))
        for p in (prompt if several else [prompt])
    ]
    count = len(prompts) * (body.n or 1)
    if count > MOST_ANSWERS:
        raise RequestError(400, f"{count} answers to one request, the limit is {MOST_ANSWERS}", param="prompt")
    most = 16 if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise RequestError(400, "max_tokens is 0, and without echo nothing is answered", param="max_tokens")
    if body.echo and body.stream:
        raise RequestError(400, "echo is not supported in a stream", code="unsupported_parameter", param="echo")
    if body.logprobs is not None and body.stream:
        raise RequestError(400, "logprobs are not supported in a stream", param="logprobs")
    if body.echo and body.logprobs is not None and not hasattr(served.engine, "scored"):
        why = f"{type(served.engine).__name__} gives no log-probs of a prompt; agl's own engine does"
        raise RequestError(400, f"echo with logprobs: {why}", code="unsupported_parameter", param="echo")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise RequestError(400, "stop: an empty text ends every answer", code="invalid_value", param="stop")
    context = served.engine.max_context
    room = context - max(ids.size for ids in prompts)
    if min(ids.size for ids in prompts) < 1:
        raise RequestError(400, "prompt: it has no tokens", code="invalid_value", param="prompt")
    if room < (1 if most else 0):
        raise PromptTooLongError(
            f"the prompt has {context - room} tokens, which leaves no room in a context of {context}",
            context - room,
            context,
            param="prompt",
        )
    sampling = Sampling(
        max_tokens=max(1, min(most, room)),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=nucleus(body.top_p),
        top_k=max(body.top_k or 0, 0),
        stop=stop,
        stop_token_ids=served.stop_token_ids,
        seed=abs(body.seed) if body.seed is not None else uuid.uuid4().int >> 66,
        top_logprobs=body.logprobs or 0,
    )
    return _Work(body, served, prompts, sampling if most else None)


async def _answer(work: _Work, measured: Measured, turns: Turns) -> Response:
    tasks = [asyncio.ensure_future(work.sample(*each)) for each in work.answers]
    try:
        completions = await asyncio.gather(*tasks)
        pairs = zip(work.answers, completions, strict=True)
        choices = [await _choice(work, turns, number, prompt, done) for (number, prompt), done in pairs]
    except BaseException as error:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        refused = refusal(error, work.id) if isinstance(error, Exception) else None
        measured.ended(499 if refused is None else refused.status)
        if refused is None:
            raise
        raise refused from error
    usage = _count(work, completions, measured)
    return answer({**work.base, "choices": choices, "usage": usage})


def _count(work: _Work, completions: Sequence[Completion], measured: Measured) -> dict[str, int]:
    prompt = sum(ids.size for ids in work.prompts)
    sampled = sum(c.token_ids.size for c in completions)
    measured.tokens(prompt, sum(c.cached_tokens for c in completions), sampled)
    measured.ended(200)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


async def _choice(work: _Work, turns: Turns, number: int, prompt: IntArray, completion: Completion) -> dict[str, Any]:
    body = work.body
    rendering = work.served.rendering

    async def in_turn(function: Callable[..., T], *arguments: Any) -> T:
        async with turns as turn:
            return await turn.run(function, *arguments)

    whole = await in_turn(work.whole_text, prompt, completion.token_ids.tolist())
    text = work.cut(whole)
    stopped = len(text) < len(whole)
    if body.echo:
        text = await in_turn(rendering.decode, prompt) + text
    logprobs = None
    if body.logprobs is not None:
        entries = TextLogprobs(rendering)
        if body.echo:
            entries.add([], prompt[:1], [None], [None])
            if prompt.size > 1:
                values, top_ids, tops = await work.served.engine.scored(prompt, body.logprobs)  # type: ignore[attr-defined]
                pairs = [list(zip(i, v, strict=True)) for i, v in zip(top_ids.tolist(), tops.tolist(), strict=True)]
                await in_turn(entries.add, prompt[:1], prompt[1:], values, pairs)
        sampled = completion.token_ids, completion.logprobs, completion.top_logprobs
        await in_turn(entries.add, prompt, *sampled)
        if stopped:
            entries.end_at(len(text))
        logprobs = entries.json
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": _finish_reason(completion)}


def _finish_reason(completion: Completion) -> str:
    return "length" if completion.finish_reason == "cancelled" else completion.finish_reason


def _stream(work: _Work, measured: Measured, ended: Callable[[], None]) -> Response:
    """The answer as a stream; `ended` is called when nothing is sampled any more."""
    queue: asyncio.Queue[_Part | None] = asyncio.Queue()

    async def sample(number: int, prompt: IntArray) -> Completion:
        def on_tokens(ids: Sequence[int], _: Sequence[float]) -> None:
            measured.first_tokens()
            queue.put_nowait((number, ids))

        return await work.sample(number, prompt, on_tokens)

    sampled = asyncio.ensure_future(asyncio.gather(*(sample(*each) for each in work.answers)))

    def on_end(_: object) -> None:
        ended()
        queue.put_nowait(None)

    sampled.add_done_callback(on_end)
    return StreamingResponse(_events(work, measured, queue, sampled), media_type="text/event-stream")


async def _events(
    work: _Work,
    measured: Measured,
    queue: asyncio.Queue[tuple[int, Sequence[int]] | None],
    sampled: asyncio.Future[Any],
) -> AsyncIterator[bytes]:
    base = work.base
    answers = work.answers
    held_back = max((len(s) for s in work.stop), default=0)
    ids: list[list[int]] = [[] for _ in answers]
    read = [0] * len(answers)
    sent = [0] * len(answers)

    def chunk(number: int, text: str, finish: str | None = None) -> bytes:
        choice = {"index": number, "text": text, "logprobs": None, "finish_reason": finish}
        return sse({**base, "choices": [choice]})

    try:
        while (part := await queue.get()) is not None:
            number, new = part
            ids[number].extend(new)
            # Decoding the whole answer at each token would be quadratic; a long answer is decoded less often.
            if len(ids[number]) - read[number] < 1 + len(ids[number]) // 64:
                continue
            read[number] = len(ids[number])
            text = work.text(answers[number][1], ids[number])
            # A character can end in the next token.
            certain = text[: max(0, len(text) - held_back)].rstrip("\ufffd")[sent[number] :]
            if certain:
                sent[number] += len(certain)
                yield chunk(number, certain)
        completions = await sampled
        for (number, prompt), completion in zip(answers, completions, strict=True):
            text = work.text(prompt, completion.token_ids.tolist())
            yield chunk(number, text[sent[number] :], _finish_reason(completion))
        usage = _count(work, completions, measured)
        if work.body.stream_options is not None and work.body.stream_options.include_usage:
            yield sse({**base, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"
    except Exception as error:
        refused = refusal(error, work.id)
        measured.ended(refused.status)
        yield sse(openai_error(refused))
    finally:
        sampled.cancel()
