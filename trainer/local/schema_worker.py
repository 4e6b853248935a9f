"""The process that tries what a grammar costs, for `agl.trainer.local.schema_check`: a JSON line in, a JSON line out.

Neither llguidance's limits nor its threads bound what it takes to compile a schema. This process has limits of its own.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from agl.trainer.processes.limited_worker import lower_priority, serve

MEMORY_BYTES = 128 << 20
"""What a grammar may take."""
TOKENS = 256
"""So many tokens are drawn within a grammar, in all."""
LONGEST = 48
"""So many at most of one answer."""
TOO_MUCH = {"exceeds": True}
"""The answer to a job that exceeds a limit."""


def parser_limits() -> Any:
    """llguidance's limits of what a mask takes: about 30 ms and, for all of an answer, 100 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def stop_tokenizer(tokenizer: str, vocabulary: int, stops: tuple[int, ...]) -> Any:
    """llguidance's form of a tokenizer with the stop tokens of an answer.

    Args:
        tokenizer: as JSON.
        vocabulary: how many logits the model has.
        stops: may be empty.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=[*stops] or None)


_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_LISTING = re.compile(r"\n *\d+ \| .*", re.S)


def error_of(matcher: Any) -> str:
    """What llguidance says of a schema, without the lines of the grammar around it, which agents have not written."""
    return _LISTING.sub("", _PLACE.sub("", matcher.get_error()))


def tried(tokenizer: Any, job: dict[str, Any]) -> dict[str, Any]:
    """{"error": why answers cannot be held to the grammar, or ""; "compiled": whether only an answer went
    wrong; "seconds": of processor time}, or {"exceeds": True}.

    Args:
        job: "text": the grammar as Lark; "starts": beginnings of answers behind which a schema begins.
    """
    from llguidance import LLMatcher

    began = time.process_time()
    matcher = LLMatcher(tokenizer, job["text"], log_level=0, limits=parser_limits())
    compiled = not matcher.is_error()
    error = _answered(tokenizer, matcher, job["starts"]) if compiled else error_of(matcher)
    return {"error": error, "compiled": compiled, "seconds": time.process_time() - began}


def _answered(tokenizer: Any, matcher: Any, beginnings: Sequence[str]) -> str:
    """Draw answers; why llguidance could not go on in one, or ""."""
    starts = [[], *(tokenizer.tokenize_str(start, parse_special=True) for start in beginnings)]
    for seed, start in enumerate(starts):
        answer = matcher.deep_copy()
        # Where another text has to come first, the first of the answers finds it.
        if answer.try_consume_tokens(start) == len(start):
            error = _drawn(tokenizer, answer, min(LONGEST, max(4, TOKENS // len(starts))), random.Random(seed))
            if error:
                return error
    return ""


def _drawn(tokenizer: Any, answer: Any, tokens: int, dice: random.Random) -> str:
    """Draw tokens of an answer; why llguidance could not go on, or ""."""
    stops = {*tokenizer.eos_tokens}
    for _ in range(tokens):
        bits = np.frombuffer(answer.compute_bitmask(), np.uint8)
        if answer.is_error():
            return answer.get_error()
        possible = [token for token in np.flatnonzero(np.unpackbits(bits, bitorder="little")) if token not in stops]
        if not possible or answer.is_stopped():
            return ""
        answer.consume_token(int(dice.choice(possible)))
    return answer.get_error() if answer.is_error() else ""


def main() -> None:
    """Serve until standard input ends; its first line has the tokenizer."""
    lower_priority()
    first = json.loads(sys.stdin.readline())
    tokenizer = stop_tokenizer(first["tokenizer"], first["vocabulary"], tuple(first["stops"]))
    serve(functools.partial(tried, tokenizer), TOO_MUCH, MEMORY_BYTES)
