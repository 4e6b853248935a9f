"""What a vLLM server's answers mean: tokens and log-probs, which log-probs they are, and what a refusal says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import orjson

from agl.errors import AglError, ConfigError, ContextLengthError, EngineError
from agl.trainer.engines.base import Completion, StopReason

FLAG = "--logprobs-mode processed_logprobs"
SEE_LOG = "the server's log says more; the call may be made again"

Reported = Literal["processed", "raw"]
"""Log-probs of the distribution drawn from (after temperature, top-k and top-p), or of the model's own."""

PROBED = 5
"""How many of the likeliest tokens tell which log-probs a server reports."""

_REASONS: Mapping[str, StopReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
_IMPOSSIBLE = -9999.0
"""What vLLM's HTTP server writes for a log-prob of -inf."""


class Part:
    """An answer, or a streamed part of one.

    Args:
        choice: of vLLM, asked for with `return_token_ids` and `return_tokens_as_token_ids`.
        top: how many of the likeliest tokens to keep.

    Attributes:
        ids, logprobs: of its tokens. top: per token, (id, log-prob) of the likeliest ones.
        reason: why the answer ended, in its last part. prompt_ids: where the server repeats them.

    Raises:
        EngineError: the model failed, or the server leaves something out.
    """

    __slots__ = ("ids", "logprobs", "prompt_ids", "reason", "top")

    def __init__(self, choice: Mapping[str, Any], top: int) -> None:
        given = choice.get("logprobs") or {}
        if choice.get("token_ids") is None or given.get("token_logprobs") is None:
            raise EngineError(
                "the server returns no token ids or log-probs",
                hint="it needs vLLM 0.10.2 or newer, reached without anything that removes fields from answers",
            )
        self.ids: list[int] = choice["token_ids"]
        self.logprobs: list[float] = given["token_logprobs"]
        if len(self.ids) != len(self.logprobs):
            raise EngineError(f"vLLM returned {len(self.ids)} tokens with {len(self.logprobs)} log-probs", hint=SEE_LOG)
        if any(p is None or not p > _IMPOSSIBLE for p in self.logprobs):
            raise EngineError("the model's output is not finite", hint="have its weights diverged?")
        self.top = [_likeliest(found, top) for found in given["top_logprobs"]] if top else []
        self.prompt_ids: Sequence[int] = choice.get("prompt_token_ids") or ()
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _REASONS:
            raise EngineError(f"vLLM ended the answer for {reason!r}", hint=SEE_LOG)
        self.reason: StopReason | None = None if reason is None else _REASONS[reason]


def completion(parts: Sequence[Part], version: int) -> Completion:
    """The answer that these parts are.

    Raises:
        EngineError: it has no end.
    """
    reason: StopReason | None = next((p.reason for p in reversed(parts) if p.reason is not None), None)
    if reason is None:
        raise EngineError("the answer broke off without an end", hint=SEE_LOG)
    return Completion(
        np.asarray([i for p in parts for i in p.ids], np.int32),
        np.asarray([x for p in parts for x in p.logprobs], np.float32),
        reason,
        version,
        [found for p in parts for found in p.top],
    )


def choice(text: bytes) -> dict[str, Any]:
    """The only choice of an answer, or of a streamed part of one.

    Raises:
        AglError: it is a refusal, or not an answer of vLLM.
    """
    try:
        answer = orjson.loads(text)
        if "error" in answer:
            raise refusal(int(answer["error"].get("code") or 500), text)
        return answer["choices"][0]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise EngineError(f"not an answer of vLLM: {shown(text)}", hint=SEE_LOG) from None


def refusal(status: int, body: bytes) -> AglError:
    """What a refusal means."""
    try:
        error = orjson.loads(body)
        error = error.get("error", error)
        message, param = str(error.get("message") or error), error.get("param")
    except (orjson.JSONDecodeError, AttributeError):
        message, param = shown(body), None
    said = f"the server refuses ({status}): {message}"
    if status in (401, 403):
        return ConfigError(said, hint="give its key: VLLMEngine(api_key=), or VLLM_API_KEY")
    if status == 404:
        return ConfigError(said, hint="is it a vLLM server, and does it still serve this model? Its /v1/models tells")
    if status == 400 and (param == "input_tokens" or "context length" in message):
        return ContextLengthError(message, hint="shorten the prompt, or raise the server's --max-model-len")
    if status == 400 and "vocabulary" in message:
        return EngineError(said, hint="encode the prompt with the tokenizer of the model that is served")
    if 400 <= status < 500:
        return ConfigError(said, hint="correct the request's sampling parameters, or the server's limits")
    return EngineError(said, hint=SEE_LOG)


def reported(plain: Part, warped: Part) -> Reported | None:
    """Which log-probs a server reports, from those of the likeliest tokens after one prompt, at two temperatures.

    At temperature 1 both kinds are the model's own, a. At temperature 2 the raw ones are a again, and the processed
    ones a / 2 - c with c = log(sum of exp(a / 2) over the vocabulary), which is at least that sum over the likeliest.

    Args:
        plain: one token at temperature 1. warped: one at temperature 2; both with `top=PROBED`.

    Returns:
        None where both kinds would be the same, as after a prompt that all tokens are alike likely after.

    Raises:
        ConfigError: neither: the server reports logits.
    """
    # By rank, since tokens that are alike likely come in any order.
    pairs = list(zip((p for _, p in plain.top[0]), (p for _, p in warped.top[0]), strict=False))
    c = sum(a / 2 - b for a, b in pairs) / len(pairs)
    raw = max(abs(a - b) for a, b in pairs)
    processed = max(abs(a / 2 - c - b) for a, b in pairs)
    # Wide enough for the rounding of half precision.
    near = 0.1 + 0.02 * max(abs(a) for a, _ in pairs)
    if c < math.log(math.fsum(math.exp(a / 2) for a, _ in pairs)) - near:
        processed = math.inf
    if min(raw, processed) > near or math.fsum(math.exp(a) for a, _ in pairs) > 1.01:
        raise ConfigError("the server reports logits instead of log-probs", hint=f"start it with {FLAG}")
    if max(raw, processed) <= near:
        return None
    return "raw" if raw <= near else "processed"


def _likeliest(found: Mapping[str, float] | None, n: int) -> list[tuple[int, float]]:
    """The `n` likeliest tokens that can be drawn at all; vLLM adds the sampled one, and calls them "token_id:<id>"."""
    pairs = [(int(name.rpartition(":")[2]), p) for name, p in (found or {}).items() if p > _IMPOSSIBLE]
    return sorted(pairs, key=lambda pair: -pair[1])[:n]


def shown(body: bytes) -> str:
    """The beginning of a text, for an error."""
    return repr(body[:200].decode("utf-8", "replace"))
