"""What of a message a terminal is given: not the whole of an image."""

from __future__ import annotations

import base64

import pytest

from agl.texts import shortened
from agl.trainer.evaluation.replay import _line
from agl.trainer.report.explain import _said

IMAGE = base64.b64encode(bytes(range(256)) * 200).decode()
FORMS = {
    "Chat": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}],
    "Messages": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}],
    "Google": [{"inlineData": {"mimeType": "image/png", "data": IMAGE.replace("+", "-").replace("/", "_")}}],
    "a page of text": "a word " * 100_000,
}


@pytest.mark.parametrize("form", FORMS)
def test_of_a_file_and_of_a_long_text_the_beginning_is_shown(form: str) -> None:
    message = {"role": "user", "content": FORMS[form]}
    for shown in (_said(message).plain, _line(message)):
        assert len(shown) < 101_000
        assert " characters)" in shown
        assert IMAGE[:20] in shown or "a word a word" in shown


def test_other_texts_are_shown_whole() -> None:
    for text in ("", "What is 2 + 2?", "x" * 1999, "a sentence of words, " * 4000, "/".join(["path"] * 300)):
        assert shortened(text) == text
