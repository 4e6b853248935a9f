"""A command line is recorded without the keys in it."""

from __future__ import annotations

import pytest

from agl.trainer.store.collect import shown_command


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["a.py", "--api-key", "abc", "--n", "3"], "a.py --api-key '[key]' --n 3"),
        (["a.py", "--openai-api-key=abc"], "a.py '--openai-api-key=[key]'"),
        (["env", "OPENAI_API_KEY=abc", "node", "a.js"], "env 'OPENAI_API_KEY=[key]' node a.js"),
        (["curl", "-H", "Authorization: Bearer sk-proj-0123456789abcdefghij"], "curl -H 'Authorization: Bearer [key]'"),
        (["a.py", "hf_0123456789abcdefghij"], "a.py '[key]'"),
        (["a.py", "--key", "of-the-environment"], "a.py --key $THEIR_API_KEY"),
        (["a.py", "--max-tokens", "5", "--tokenizer", "gpt2"], "a.py --max-tokens 5 --tokenizer gpt2"),
        (["a.py", "sky-blue", "--keys", "3", "monkey=1"], "a.py sky-blue --keys 3 monkey=1"),
    ],
)
def test_no_key_is_recorded(words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_API_KEY", "of-the-environment")
    assert shown_command(words) == shown
