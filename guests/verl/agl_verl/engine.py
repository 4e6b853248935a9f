"""verl's LLM servers as an engine: token ids in, token ids and log-probs out; verl chooses the server."""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from agl.errors import EngineError
from agl.mdp.types import Call, IntArray
from agl.trainer.engines.base import Completion, OnTokens, Request, StopReason, check_prompt, check_sampling
from agl_verl.schemas import Lark

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient

    from agl.trainer.local.grammar import Grammars


class VerlEngine:
    """Samples through verl's `LLMServerClient`.

    The answer to a cancelled request is sampled to its end and thrown away, since verl's client cannot abort it. An
    answer that a stop text ends exactly at its limit counts as cut. verl's servers never sample an id that the
    tokenizer does not have, even if the model knows it; log-probs are normalised over the other ids.

    Args:
        client: verl's.
        max_context: of the servers, in tokens.
        vocabulary: how many ids the model knows.
        seeds: whether requests are sampled by their seeds: vLLM then samples each one separately, which is slow.
        grammars: of the model, to hold answers to schemas; or why requests with a schema are refused.
    """

    def __init__(
        self,
        client: LLMServerClient,
        max_context: int,
        *,
        vocabulary: int | None = None,
        seeds: bool = False,
        grammars: Grammars | str = "",
    ) -> None:
        self._client = client
        self._max_context = max_context
        self._vocabulary = vocabulary
        self._seeds = seeds
        self._grammars = grammars
        self.grammars: bool | str = grammars if isinstance(grammars, str) else True
        self._newest: dict[bytes, int] = {}

    @property
    def max_context(self) -> int:
        return self._max_context

    def newest(self, call: Call) -> int:
        """The newest weights that sampled a part of a call; `call.policy_version` is the oldest."""
        return self._newest.get(_key(call.prompt_ids, call.response_ids), call.policy_version)

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        sampling = request.sampling
        policy = request.policy
        check_sampling(sampling)
        if sampling.top_logprobs:
            raise EngineError(
                "verl's servers report no alternatives to the tokens that they sample",
                hint="leave top_logprobs out",
                policy=policy,
            )
        prompt = check_prompt(request.prompt_ids, self._max_context)
        if self._vocabulary is not None and int(prompt.max()) >= self._vocabulary:
            raise EngineError(
                f"the prompt has token {int(prompt.max())}, and the model knows {self._vocabulary}",
                hint="render with the tokenizer of the model that is served",
                policy=policy,
            )
        limit = min(sampling.max_tokens, self._max_context - prompt.size)
        params: dict[str, Any] = {
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "logprobs": True,
            # The gateway decides what ends an answer, and a stop text may consist of special tokens.
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        if self._seeds:
            params["seed"] = sampling.seed
        if sampling.grammar and not isinstance(self._grammars, str):
            compiled = await self._grammars.admitted(sampling.grammar, request.owner)
            params["structured_outputs"] = Lark(compiled.text)
        try:
            output = await self._client.generate(
                request_id=request.session or uuid.uuid4().hex, prompt_ids=prompt.tolist(), sampling_params=params
            )
        except Exception as error:
            raise EngineError(
                f"verl's LLM server failed: {type(error).__name__}: {error}",
                hint="see the log of its actor (ray logs)",
                policy=policy,
            ) from error
        ids = np.asarray(output.token_ids, dtype=np.int32)
        logprobs = np.asarray(output.log_probs or (), dtype=np.float32)
        if logprobs.size != ids.size:
            raise EngineError(f"verl's LLM server sent {ids.size} tokens with {logprobs.size} log-probs", policy=policy)
        if on_tokens is not None and ids.size:
            on_tokens(ids.tolist(), logprobs.tolist())
        oldest = int(output.extra_fields.get("min_global_steps") or 0)
        newest = int(output.extra_fields.get("max_global_steps") or oldest)
        if newest != oldest:
            self._newest[_key(prompt, ids)] = newest
        # verl does not distinguish a whole answer from one that was cut.
        ended = ids.size and int(ids[-1]) in sampling.stop_token_ids
        reason: StopReason = "length" if ids.size >= limit and not ended else "stop"
        return Completion(ids, logprobs, "cancelled" if output.stop_reason == "aborted" else reason, oldest)


def _key(prompt_ids: IntArray, response_ids: IntArray) -> bytes:
    """A digest that identifies a call's tokens."""
    ids = np.concatenate([prompt_ids, response_ids]).astype(np.int32)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
