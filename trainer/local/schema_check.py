"""Tries schemas of agents in a process with limits before they are compiled where policies are sampled.

Invariant: a grammar that passes has been compiled within `SECONDS` of processor time and `schema_worker.MEMORY_BYTES`,
and answers have been drawn within it; what it takes again in another process is bounded by that.
"""

from __future__ import annotations

import copy
import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl.errors import ConfigError, EngineError
from agl.trainer.engines.base import json_grammar
from agl.trainer.local.lark import Lark, places, schemas_of
from agl.trainer.local.schema_worker import MEMORY_BYTES
from agl.trainer.processes.workers import WorkerDied, Workers, WorkerStuck, WorkerUnavailable
from agl.trainer.rendering.reasoning import END_THINK

SECONDS = 1.0
"""Of processor time for a grammar; where llguidance does not return in time, twice as much."""
STUCK_SECONDS = 60.0
"""Wall-clock limit; a machine that is busy takes longer for the same processor time."""
PLACES = 64
"""So many places of a schema at most are tried to find the one that costs too much."""
PLACE_SECONDS = 2.0
"""Processor time for finding it."""
PROCESSES = 2
"""How many grammars are tried at once."""
_KEPT = 1024
"""How many results are remembered."""
_SHARED = ("$defs", "definitions")


class SchemaCheck:
    """What the schemas of one tokenizer take. Thread-safe.

    Args:
        tokenizer: a fast one.
        vocabulary: how many logits the model has.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._results: dict[str, ConfigError | None] = {}
        self._lock = threading.Lock()
        self._workers: dict[tuple[int, ...], Workers] = {}

    @functools.cached_property
    def tokenizer(self) -> str:
        """The tokenizer as JSON, tokens that were added to its file included."""
        backend = copy.copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()

    def prove(self, grammar: str, lark: Lark) -> None:
        """Try a grammar. Blocks.

        Args:
            grammar: what `json_grammar` made.
            lark: of the tokenizer.

        Raises:
            ConfigError: answers cannot be held to it, or it takes too much; see `Grammars.admitted`.
            EngineError: there is no process to try it in.
        """
        if grammar not in self._results:
            result = self._tried(json.loads(grammar), lark.texts(grammar), lark)
            while len(self._results) >= _KEPT:
                self._results.pop(next(iter(self._results)), None)
            self._results[grammar] = result
        refused = self._results.get(grammar)
        if refused is not None:
            raise refused

    def _tried(self, parts: Mapping[str, Any], texts: Sequence[str], lark: Lark) -> ConfigError | None:
        """Why answers cannot be held to a grammar; None if they can."""
        result = self._try(texts[0], parts["stop"], _starts(parts))
        alone = _alone(parts)
        if not _costs_too_much(result) and result["error"]:
            # It is not known to llguidance: the calls that an agent forces take any arguments then.
            if len(texts) > 1 and not self._try(texts[1], parts["stop"], _starts(parts)).get("error", "exceeds"):
                return None
            bad = self._first(lambda found: bool(found["error"]), alone, parts["stop"], lark)
            return _refusal(result, *(bad[:2] if bad else (None, "$")))
        if _costs_too_much(result):
            # The smallest place is the one to change.
            bad = self._first(_costs_too_much, alone, parts["stop"], lark)
            return _refusal(result, *(bad[:2] if bad else (None, "$")))
        # What comes before them may be long, and the answers that were drawn within the whole have not come to them.
        patterns = [place for place in alone if "pattern" in place[3]]
        bad = self._first(_costs_too_much, patterns, parts["stop"], lark)
        return _refusal(bad[2], *bad[:2]) if bad else None

    def _try(self, text: str, stops: Sequence[int], starts: Sequence[str] = ()) -> dict[str, Any]:
        with self._lock:
            workers = self._workers.get(tuple(stops))
            if workers is None:
                first = {"tokenizer": self.tokenizer, "vocabulary": self._vocabulary, "stops": [*stops]}
                module = "agl.trainer.local.schema_worker"
                workers = self._workers[tuple(stops)] = Workers.of_module(module, first=first, most=PROCESSES)
        try:
            return workers.ask({"text": text, "starts": [*starts], "limit": SECONDS}, STUCK_SECONDS)
        except WorkerDied:
            return {"exceeds": True}
        except WorkerStuck as error:
            # Its processor time would have ended it.
            raise EngineError(
                f"a schema could not be tried within {STUCK_SECONDS:g} s: the machine is too busy", hint="try again"
            ) from error
        except WorkerUnavailable as error:
            raise EngineError(
                f"the process that tries schemas does not start: {error}", hint="request no schema, or see the log"
            ) from error

    def _first(
        self,
        is_bad: Callable[[Mapping[str, Any]], bool],
        places: Sequence[_Place],
        stops: Sequence[int],
        lark: Lark,
    ) -> tuple[int | None, str, dict[str, Any]] | None:
        """The first place that alone is bad: its form, where it is, and what came of it."""
        spent = 0.0
        for form, path, whole, _ in places:
            result = self._try(lark.texts(json_grammar([("", whole, "")], stops))[0], stops)
            if is_bad(result):
                return form, path, result
            spent += result.get("seconds", SECONDS)
            if spent > PLACE_SECONDS:
                break
        return None


_Place = tuple[int | None, str, dict[str, Any], dict[str, Any]]
"""The number of a form, a place in its schema, the schema that is there with what it may refer to, and without."""


def _alone(parts: Mapping[str, Any]) -> list[_Place]:
    """The places of a grammar's schemas, the smallest first, with the grammar of each alone."""
    found: list[_Place] = []
    for form, schema in schemas_of(parts):
        shared = {name: schema[name] for name in _SHARED if name in schema}
        found += [(form, path, {**shared, **one}, one) for path, one in places(schema)]
    return sorted(found, key=lambda place: len(json.dumps(place[3])))[:PLACES]


def _costs_too_much(result: Mapping[str, Any]) -> bool:
    """Whether a limit was reached, in compiling or by an answer."""
    return bool(result.get("exceeds") or (result["error"] and result["compiled"]))


def _refusal(result: Mapping[str, Any], form: int | None, place: str) -> ConfigError:
    if result.get("exceeds"):
        most = f"{SECONDS:g} s of processor time or {MEMORY_BYTES >> 20} MiB"
        message = f"this schema takes more than {most} to hold answers to"
        hint = "simplify it: combined patterns, repetitions in repetitions and a large multipleOf take most"
    else:
        message = f"answers cannot be held to this schema: {result['error']}"
        hint = "simplify the schema, or leave it out"
    return ConfigError(message, hint=hint, form=form, schema=place)


def _starts(parts: Mapping[str, Any]) -> list[str]:
    """The beginnings of answers behind which the schemas of a grammar's forms begin."""
    thought = f"{END_THINK}\n\n" if parts.get("reasoning") == "open" else ""
    opening = (parts.get("section") or [""])[0]
    return [thought + opening + before for before, *_ in parts["forms"]]
