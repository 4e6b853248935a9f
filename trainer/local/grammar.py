"""Answers that are held to a JSON schema, tool calls too: which tokens may come next, by llguidance.

Invariant: engine, vLLM and learner hide the same tokens at the same places, so the log-probs of an answer are those of
the distribution that it was drawn from: masked, and normalised again.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agl.errors import ConfigError
from agl.extras import require
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import IntArray
from agl.trainer.rendering.reasoning import END_THINK, THINK
from agl.trainer.rendering.toolchoice import CALL_ID

_HIDDEN = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0)
"""For each byte of `Grammars.bits`, its bits that are 0; bool [256, 8]."""
Places = npt.NDArray[np.integer[Any]]
_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""As `json.dumps` writes it: of free whitespace a policy could write without end. What llguidance does not know of a
schema holds nothing back."""
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties", "dependentSchemas"}
_NAMED, _NESTED = (
    {"properties", "$defs", "definitions"},
    {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf"},
)
"""Keywords of JSON Schema: that can add properties; that hold schemas by name; that hold schemas."""


class Grammars:
    """The grammars of a tokenizer.

    Args:
        tokenizer: a fast one. vocabulary: how many logits the model has.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._words = -(-vocabulary // 32)
        self._vocabulary = vocabulary
        self._prepared = functools.cache(self._prepare)
        self._added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}

    def _prepare(self, stops: tuple[int, ...]) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=list(stops) or None)

    def matcher(self, grammar: str) -> Any:
        """A matcher at the beginning of an answer; None for the empty grammar. Errors as of `compiled`."""
        return self.compiled(grammar)[0] if grammar else None

    def compiled(self, grammar: str) -> tuple[Any, str]:
        """A matcher at the beginning of an answer, and the grammar as vLLM takes it: Lark, with the stop tokens.

        Args:
            grammar: what `agl.trainer.engines.base.json_grammar` made.

        Raises:
            ConfigError: the schema cannot be held.
            MissingExtraError: llguidance is not installed.
        """
        require("an answer in a JSON schema", "structured")
        from llguidance import LLMatcher

        parts = json.loads(grammar)
        tokenizer = self._prepared(tuple(parts["stop"]))
        # Calls that were recorded before there were others have none of these.
        others = parts.get("trigger", ""), parts.get("otherwise"), parts.get("several", True)
        start = self._start(parts.get("reasoning", "none"))
        text = start + self._lark(parts["forms"], *others)
        matcher = LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error() and all(before or after for before, _, after, *_ in parts["forms"]):
            # A call that the agent forces is one at least, whatever its parameters.
            calls = [(before, _any(schema, style), after, *style) for before, schema, after, *style in parts["forms"]]
            text = start + self._lark(calls, *others)
            matcher = LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ConfigError(
                f"answers cannot be held to this schema: {matcher.get_error()}",
                hint="simplify the schema, or leave it out",
            )
        stops = " | ".join(f"<[{token}]>" for token in parts["stop"])
        return matcher, f"start: whole {stops and f'({stops})'}\n{text.replace('start', 'whole', 1)}"

    def _lark(self, forms: Sequence[Sequence[Any]], trigger: str, otherwise: Any, several: bool) -> str:
        """Those forms, and what the answer may be otherwise, in llguidance's dialect of Lark."""
        # What an allOf of a schema refers to must stay open for the rest of it.
        closed = _closed if "allOf" not in json.dumps([*forms, otherwise]) else lambda schema: schema
        # Mistral's first form is an array of calls, of which each has an id.
        array = re.match(r" ?\[", forms[0][0].removeprefix(trigger)) if trigger == "[TOOL_CALLS]" else None
        opening, ending = (array.group(), "]") if array else ("", "")
        rules = []
        for i, (before, schema, after, *style) in enumerate(forms):
            begin = self._text(before.removeprefix(trigger + opening))
            end = " /[a-zA-Z0-9]{9}/ ".join(map(self._text, after.removesuffix(ending).split(CALL_ID)))
            rules.append(f"form{i}: {begin} json{i} {end}")
            rules += self._elements(f"json{i}", schema) if style == ["xml"] else [f"json{i}: {_json(closed(schema))}"]
        form = " | ".join(f"form{i}" for i in range(len(forms)))
        if array:
            rules.append(f"item: {form}")
            form = f'{self._text(opening)} item (", " item)* "]"' if several else f'{self._text(opening)} item "]"'
        if not trigger:
            return "\n".join([f"answer: {form}", *rules])
        tag = trigger.strip()
        begin, space = self._text(tag), r"/[ \n]{0,2}/"
        calls = f"form ({space} {begin} form)*" if several else "form"
        rules.append(f"form: {form}")
        if tag == "{":
            return "\n".join([f"answer: TEXT | {begin} form", r"TEXT: /[ \n]*([^{ \n](.|\n)*)?/", *rules])
        if otherwise is not None:
            rules.append(f"json: {_json(closed(otherwise))}")
            return "\n".join([f"answer: json | {space} {begin} {calls}", *rules])
        if tag in self._added:  # which no text holds
            return "\n".join([f"answer: TEXT | TEXT {begin} {calls} | {begin} {calls}", r"TEXT: /(.|\n)*/", *rules])
        pattern = re.escape(tag).replace("/", r"\/")
        text = rf"TEXT: ~/(.|\n)*{pattern}(.|\n)*/"
        return "\n".join([f"answer: TEXT | first {calls}", rf"first[lazy]: /(.|\n)*{pattern}/", text, *rules])

    def _elements(self, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """The rules of arguments that are XML elements in the schema's order, their texts without quotes."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        elements = []
        for k, (parameter, one) in enumerate((schema.get("properties") or {}).items()):
            element, end = f"{name}x{k}", self._text("\n</parameter>\n")
            elements.append(element if parameter in schema.get("required", ()) else f"{element}?")
            texts = one.get("enum", [one["const"]] if "const" in one else [])
            pattern = re.fullmatch(r"\^(.*)\$", one.get("pattern", ""))
            begin, line = self._text(f"<parameter={parameter}>\n"), self._text("\n")
            yield f"{element}: {begin} {element}v"
            if one.get("type") != "string":
                yield f"{element}v: {element}j {end}\n{element}j: {_json(_closed(one) | shared)}"
            elif texts:
                yield f"{element}v: ({' | '.join(map(self._text, texts))}) {end}"
            elif pattern:
                yield f"{element}v: {_regex(pattern[1])} {end}"
            else:
                yield f"{element}v: {element}t {line}\n" + rf"{element}t[lazy]: /(.|\n)*<\/parameter>/"
        yield f"{name}: {' '.join(elements) or json.dumps('')}"

    def _start(self, reasoning: str) -> str:
        """The rule that begins all others, by what comes before the answer."""
        if reasoning == "none":
            return "start: answer\n"
        optional = reasoning == "possible"
        begin = self._text(THINK) if optional else ""
        ending = re.escape(END_THINK).replace("/", r"\/")
        # The parser ends a thought at the first text of its end, however that is spelled.
        if END_THINK in self._added:
            thought, rule = f"THOUGHT {self._text(END_THINK)}", rf"THOUGHT: /(.|\n)*/ & ~/(.|\n)*{ending}(.|\n)*/"
        else:
            thought, rule = "ended", rf"ended[lazy]: /(.|\n)*{ending}/"
        return f"start: thought{'?' * optional} answer\nthought: {begin} {thought} /[ \\n]{{0,2}}/\n{rule}\n"

    def _text(self, text: str) -> str:
        """A text; llguidance spells none of the tokens that were added to the vocabulary."""
        added = "|".join(map(re.escape, sorted(self._added, key=len, reverse=True)))
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else json.dumps(piece, ensure_ascii=False)
            for piece in re.split(f"({added})" if added else "$^", text)
            if piece
        )

    def bits(self, matchers: Sequence[Any]) -> IntArray:
        """What may come next, int32 [N, words]: bit t % 32 of word t // 32 is token t; all of them for None."""
        from llguidance.numpy import fill_next_token_bitmask

        bits_NW = np.full((len(matchers), self._words), -1, np.int32)
        for i, matcher in enumerate(matchers):
            if matcher is not None:
                fill_next_token_bitmask(matcher, bits_NW, i)
        return bits_NW

    def of_rows(self, rows: Sequence[TrainingRow], places: Sequence[Places]) -> Tensor | None:
        """`bits` before the tokens at those places of each row; None if no row has a grammar."""
        if not any(row.grammars for row in rows):
            return None
        return torch.from_numpy(np.concatenate([self._of(row)[at] for row, at in zip(rows, places, strict=True)]))

    def _of(self, row: TrainingRow) -> IntArray:
        bits_TW = np.full((len(row), self._words), -1, np.int32)
        for c, grammar in enumerate(row.grammars):
            if matcher := self.matcher(grammar):
                for t in np.flatnonzero(row.calls == c):
                    bits_TW[t] = self.bits([matcher])[0]
                    matcher.consume_token(int(row.token_ids[t]))
        return bits_TW


def hidden(bits_NW: Tensor, vocabulary: int) -> Tensor:
    """bool [N, V], on the device of the bits: which tokens may not come next."""
    table = _HIDDEN.to(bits_NW.device)
    return table[bits_NW.view(torch.uint8).int()].flatten(1)[:, :vocabulary]


def _regex(pattern: str) -> str:
    """A pattern of a schema, as a regular expression of Lark."""
    return "/" + re.sub(r"(?<!\\)/", r"\\/", pattern) + "/"


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _FORM})}"


def _any(schema: Mapping[str, Any], style: Sequence[str]) -> dict[str, Any]:
    """A schema of any arguments, or of XML elements with any texts."""
    free = {name: {"type": "string"} for name in schema.get("properties") or {}}
    return {"type": "object"} | ({"properties": free} if style == ["xml"] else {})


def _closed(schema: Any) -> Any:
    """A schema without the properties that it does not name, where it does not speak of others: a policy could write
    them without end."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict) or ("properties" in schema and not _COMBINING.isdisjoint(schema)):
        return schema
    closed = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            closed[key] = {name: _closed(one) for name, one in value.items()}
        else:
            closed[key] = _closed(value) if key in _NESTED else value
    return {"additionalProperties": False, **closed} if "properties" in schema else closed
