"""How a vLLM server's answers are read: tokens and log-probs, the kind of log-probs, and refusals as our errors."""

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

LogprobKind = Literal["processed", "raw"]
"""Log-probs of the distribution drawn from (after temperature, top-k and top-p), or of the model's unchanged one."""

PROBE_TOP = 5
"""How many of the likeliest tokens are compared to find out which log-probs a server reports."""

_REASONS: Mapping[str, StopReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
_IMPOSSIBLE = -9999.0
"""What vLLM's HTTP server writes for a log-prob of -inf."""


_NOTHING = {"token_ids": [], "logprobs": {"token_logprobs": [], "top_logprobs": []}}


class Part:
    """An answer, or a streamed part of one.

    Args:
        choice: vLLM's, of a request with `return_token_ids` and `return_tokens_as_token_ids`.
        top: how many of the likeliest tokens to keep.

    Attributes:
        ids, logprobs: of its tokens.
        top: per token, (id, log-prob) of the likeliest ones.
        reason: why the answer ended; None in all parts but the last.
        cached: how many of the prompt's tokens were not computed; 0 where the server does not say it.
        prompt_ids: of the request, in a part where the server repeats them.

    Raises:
        EngineError: the model failed, or the server leaves something out.
    """

    __slots__ = ("cached", "ids", "logprobs", "prompt_ids", "reason", "top")

    def __init__(self, choice: Mapping[str, Any], top: int) -> None:
        logprobs = choice.get("logprobs") or {}
        if choice.get("token_ids") is None or logprobs.get("token_logprobs") is None:
            raise EngineError(
                "the server returns no token ids or log-probs",
                hint="it needs vLLM 0.10.2 or newer, reached without anything that removes fields from answers",
            )
        self.ids: list[int] = choice["token_ids"]
        self.logprobs: list[float] = logprobs["token_logprobs"]
        if len(self.ids) != len(self.logprobs):
            raise EngineError(f"vLLM returned {len(self.ids)} tokens with {len(self.logprobs)} log-probs", hint=SEE_LOG)
        if any(p is None or not p > _IMPOSSIBLE for p in self.logprobs):
            raise EngineError("the model's output is not finite", hint="have its weights diverged?")
        self.top = [_likeliest(likeliest, top) for likeliest in logprobs["top_logprobs"]] if top else []
        self.prompt_ids: Sequence[int] = choice.get("prompt_token_ids") or ()
        self.cached: int = choice.get("cached_tokens", 0)
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _REASONS:
            raise EngineError(f"vLLM ended the answer for {reason!r}", hint=SEE_LOG)
        self.reason: StopReason | None = None if reason is None else _REASONS[reason]


def completion(parts: Sequence[Part], version: int) -> Completion:
    """The answer that consists of these parts.

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
        [top for p in parts for top in p.top],
        max(part.cached for part in parts),
    )


def choice(text: bytes) -> dict[str, Any]:
    """The only choice of an answer, or of a streamed part of one, with the `cached_tokens` of its usage, which a server
    with `--enable-prompt-tokens-details` reports.

    Raises:
        AglError: it is a refusal, or not vLLM's.
    """
    try:
        answer = orjson.loads(text)
        if "error" in answer:
            raise refusal(int(answer["error"].get("code") or 500), text)
        usage = answer.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        # A stream's usage comes after its last tokens.
        found = _NOTHING if usage and not answer["choices"] else answer["choices"][0]
        return found | {"cached_tokens": cached}
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise EngineError(f"not an answer of vLLM: {shown(text)}", hint=SEE_LOG) from None


def refusal(status: int, body: bytes) -> AglError:
    """A refusal as our error."""
    try:
        error = orjson.loads(body)
        error = error.get("error", error)
        message = str(error.get("message") or error)
        param = error.get("param")
    except (orjson.JSONDecodeError, AttributeError):
        message = shown(body)
        param = None
    text = f"the server refuses ({status}): {message}"
    if status in (401, 403):
        return ConfigError(text, hint="give its key: VLLMEngine(api_key=), or VLLM_API_KEY")
    if status == 404:
        return ConfigError(text, hint="is it a vLLM server, and does it still serve this model? See its /v1/models")
    if status == 400 and (param == "input_tokens" or "context length" in message):
        return ContextLengthError(message, hint="shorten the prompt, or raise the server's --max-model-len")
    if status == 400 and "vocabulary" in message:
        return EngineError(text, hint="encode the prompt with the tokenizer of the model that is served")
    if 400 <= status < 500:
        return ConfigError(text, hint="correct the request's sampling parameters, or the server's limits")
    return EngineError(text, hint=SEE_LOG)


def logprob_kind(plain: Part, warped: Part) -> LogprobKind | None:
    """The kind of log-probs that a server reports, from the likeliest tokens after one prompt, at two temperatures.

    At temperature 1 both kinds are the model's unchanged ones, a. At temperature 2 the raw ones are a again, and the
    processed ones a / 2 - c with c = log(sum of exp(a / 2) over the vocabulary), which is at least that sum over the
    likeliest tokens.

    Args:
        plain: one token at temperature 1.
        warped: one at temperature 2; both with `top=PROBED`.

    Returns:
        None where both kinds would be the same, as where all tokens are equally likely.

    Raises:
        ConfigError: neither: the server reports logits.
    """
    # By rank, since equally likely tokens come in any order.
    pairs = list(zip((p for _, p in plain.top[0]), (p for _, p in warped.top[0]), strict=False))
    c = sum(a / 2 - b for a, b in pairs) / len(pairs)
    raw = max(abs(a - b) for a, b in pairs)
    processed = max(abs(a / 2 - c - b) for a, b in pairs)
    # Wide enough for the rounding of half precision.
    tolerance = 0.1 + 0.02 * max(abs(a) for a, _ in pairs)
    if c < math.log(math.fsum(math.exp(a / 2) for a, _ in pairs)) - tolerance:
        processed = math.inf
    if min(raw, processed) > tolerance or math.fsum(math.exp(a) for a, _ in pairs) > 1.01:
        raise ConfigError("the server reports logits instead of log-probs", hint=f"start it with {FLAG}")
    if max(raw, processed) <= tolerance:
        return None
    return "raw" if raw <= tolerance else "processed"


def shown(body: bytes) -> str:
    """The beginning of a text, for an error."""
    return repr(body[:200].decode("utf-8", "replace"))


def _likeliest(logprobs: Mapping[str, float] | None, n: int) -> list[tuple[int, float]]:
    """The `n` likeliest tokens that can be drawn at all; vLLM adds the sampled one, and names them "token_id:<id>"."""
    pairs = [(int(name.rpartition(":")[2]), p) for name, p in (logprobs or {}).items() if p > _IMPOSSIBLE]
    return sorted(pairs, key=lambda pair: -pair[1])[:n]
