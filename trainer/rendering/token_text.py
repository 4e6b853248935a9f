"""Text to token ids and back for one tokenizer, also where the text is a part of a longer one.

SentencePiece's tokenizers put a space before a text, and take it away when they decode: alone, `The` is the token
`▁The`, and after other text it is `The`. What they have no token for they write as bytes, and one byte too few makes
`transformers` decode all the bytes around it to replacement characters.

Invariant: the text of ids never changes with ids that follow, but for replacement characters at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from agl.mdp.types import IntArray

Ids = Sequence[int] | IntArray

CONTEXT = 8
"""How many ids before a text show how it begins."""
_ANCHORS = ("\n", ".")
"""Texts that a text is encoded behind if it cannot be encoded behind what is there, since the two share a token."""
_PROBE = "\u4f60"
"""Three bytes."""


def _byte_level() -> dict[str, int]:
    """The characters that byte-level tokenizers spell bytes with: printable ones stand for themselves, and the others
    are numbered from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()


class TokenText:
    """Encodes and decodes for one tokenizer. Thread-safe.

    Args:
        tokenizer: of Hugging Face.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, int] = {}
        self._byte_ids: list[int] = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        # Where there are no such tokens, all of them are the unknown one, or None.
        if len(set(self._byte_ids)) == 256 and self.decode([self._byte_ids[b] for b in _PROBE.encode()]) == _PROBE:
            self._bytes = {token: byte for byte, token in enumerate(self._byte_ids)}

    def encode(self, text: str) -> list[int]:
        """A whole text as ids; control tokens in it are recognised, none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def encode_after(self, before: Ids, text: str) -> list[int]:
        """A text as the ids that it has behind other text.

        Args:
            before: the ids before it, at least the last `CONTEXT`; none for a text that begins a whole one.
            text: control tokens in it are recognised, none is added.
        """
        if not text:
            return []
        context = self.decode(before[-CONTEXT:]) if len(before) else ""
        for shown in (context, *_ANCHORS) if context else ():
            start = self.encode(shown)
            ids = self.encode(shown + text)
            if ids[: len(start)] == start:
                return ids[len(start) :]
        return self.encode(text)

    def decode(self, ids: Ids) -> str:
        """The text of ids, control tokens included."""
        tokens = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if not self._bytes.keys().isdisjoint(tokens):
            tokens = self._with_whole_characters(tokens)
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_after(self, before: Ids, ids: Ids) -> str:
        """The text that ids add to the text before them."""
        start = self.decode(before[-CONTEXT:])
        whole = self.decode([*before[-CONTEXT:], *ids])
        return whole[len(start) :] if whole.startswith(start) else self.decode(ids)

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token that is a part of a character; None where they are not known."""
        if token in self._bytes:
            return bytes([self._bytes[token]])
        name = self._tokenizer.convert_ids_to_tokens(int(token)) or ""
        if not _BYTE_LEVEL.keys() >= {*name}:
            return None
        spelled = bytes(_BYTE_LEVEL[letter] for letter in name)
        return spelled if spelled.decode(errors="replace") == self.decode([token]) else None

    def _with_whole_characters(self, ids: list[int]) -> list[int]:
        """`ids` with the bytes that are no character replaced by those of the replacement character."""
        whole: list[int] = []
        for are_bytes, run in groupby(ids, self._bytes.__contains__):
            run = list(run)
            if are_bytes:
                text = bytes(self._bytes[token] for token in run).decode(errors="replace")
                run = [self._byte_ids[byte] for byte in text.encode()]
            whole += run
        return whole
