"""What a rewritten prompt removed and added, by words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl.trainer.run.candidates import MOST_WORD_PAIRS, changes

TEXT = st.text(alphabet=st.sampled_from("ab \n.{}é"), max_size=40)


@given(TEXT, TEXT)
def test_both_texts_can_be_read_from_the_changes(before: str, after: str) -> None:
    parts = changes(before, after)
    assert "".join(text for kind, text in parts if kind != "added") == before
    assert "".join(text for kind, text in parts if kind != "removed") == after
    assert all(text for _, text in parts)


def test_words_change_as_a_whole() -> None:
    assert changes("Answer briefly.", "Answer in metres.") == [
        ("same", "Answer "),
        ("removed", "briefly."),
        ("added", "in metres."),
    ]


def test_long_texts_that_differ_much_are_shown_in_full() -> None:
    before, after = ("x " * 3_000, "y " * 3_000)
    assert len(before.split()) * len(after.split()) > MOST_WORD_PAIRS
    assert changes(before, after) == [("removed", before), ("added", after)]
    assert changes(before, before) == [("same", before)]
