"""Text graders: SQuAD's known values, what holds for every text, where references and outputs are found."""

from __future__ import annotations

import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from agl.agents.resources import Task
from agl.errors import ConfigError, RewardError
from agl.rewards import Contains, ExactMatch, FuzzyMatch, Grader, RegexMatch, TokenF1
from agl.trainer.graders.fields import text_of
from agl.trainer.graders.text import squad

WORDS = st.text(st.sampled_from("abcXYZ éß.,'-4 \n"), max_size=40) | st.text(max_size=40)


@pytest.mark.parametrize(
    ("given_", "wanted", "f1", "exact"),
    [
        # Values of SQuAD's own evaluation script (v1.1 and, for empty answers, v2.0).
        ("The Norman conquest", "norman conquest", 1.0, 1.0),
        ("in the 10th and 11th centuries", "10th and 11th centuries", 8 / 9, 0.0),
        ("Denver Broncos", "Carolina Panthers", 0.0, 0.0),
        ("gold gold gold", "gold", 0.5, 0.0),
        ("U.S.", "us", 1.0, 1.0),
        ("", "", 1.0, 1.0),
        ("the", "", 1.0, 1.0),
        ("", "something", 0.0, 0.0),
        ("a cat sat on the mat", "cat on mat", 6 / 7, 0.0),
    ],
)
def test_squads_numbers(given_: str, wanted: str, f1: float, exact: float) -> None:
    assert TokenF1()({"answer": wanted}, given_) == pytest.approx(f1)
    assert ExactMatch(ignore_punctuation=True, ignore_articles=True)({"answer": wanted}, given_) == exact


SYMMETRIC: list[Grader] = [
    ExactMatch(),
    TokenF1(),
    FuzzyMatch(),
    FuzzyMatch(scorer="token_sort"),
    FuzzyMatch(scorer="token_set"),
]
GRADERS: list[Grader] = [
    *SYMMETRIC,
    FuzzyMatch(scorer="partial"),
    FuzzyMatch(scorer="weighted", threshold=0.5),
    Contains(),
    Contains(whole_words=False),
    Contains(require="all"),
    RegexMatch(r"\d+"),
]


@given(WORDS, WORDS)
def test_every_value_lies_in_the_range(left: str, right: str) -> None:
    for grader in GRADERS:
        value = grader({"answer": left}, right)
        assert type(value) is float
        assert grader.range[0] <= value <= grader.range[1]


@given(WORDS, WORDS)
def test_likeness_is_symmetric_and_a_text_is_like_itself(left: str, right: str) -> None:
    for grader in SYMMETRIC:
        assert grader({"answer": left}, right) == pytest.approx(grader({"answer": right}, left))
        assert grader({"answer": left}, left) == 1.0


@given(st.text(max_size=60))
def test_the_normal_form_is_a_normal_form(text: str) -> None:
    once = squad(text)
    assert TokenF1()({"answer": text}, once) == 1.0
    assert squad(once.upper()) == squad(text.upper()) or not text.isascii()


def test_what_is_ignored_is_an_option() -> None:
    task = {"answer": "The  Cat."}
    assert ExactMatch()(task, "the cat.") == 1.0
    assert ExactMatch(ignore_case=False)(task, "the cat.") == 0.0
    assert ExactMatch(ignore_whitespace=False)(task, "the cat.") == 0.0
    assert ExactMatch()(task, "cat") == 0.0
    assert ExactMatch(ignore_articles=True, ignore_punctuation=True)(task, "cat") == 1.0
    assert ExactMatch()({"answer": "caf\u00e9"}, "cafe\u0301") == 1.0


def test_fuzzy_scorers_and_threshold() -> None:
    task = {"answer": "new york mets"}
    assert FuzzyMatch(scorer="token_sort")(task, "mets york new") == 1.0
    assert FuzzyMatch()(task, "mets york new") < 0.7
    assert FuzzyMatch(scorer="token_set")(task, "new york mets new york") == 1.0
    assert FuzzyMatch(scorer="partial")(task, "the new york mets won") == 1.0
    assert FuzzyMatch(threshold=0.99)(task, "new york met") == 0.0
    with pytest.raises(ConfigError, match="no scorer 'levenshtein'"):
        FuzzyMatch(scorer="levenshtein")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="FuzzyMatch has no option 'threshhold'"):
        FuzzyMatch(threshhold=1)  # type: ignore[call-arg]


def test_containing_whole_words_any_or_all() -> None:
    assert Contains()({"answer": "4"}, "it is 42") == 0.0
    assert Contains(whole_words=False)({"answer": "4"}, "it is 42") == 1.0
    assert Contains()({"answer": ["Rome", "Paris"]}, "it is paris!") == 1.0
    assert Contains(require="all")({"answer": ["Rome", "Paris"]}, "it is paris!") == 0.5


def test_patterns() -> None:
    assert RegexMatch(r"####\s*\d+")({}, "so\n#### 4") == 1.0
    assert RegexMatch(r"\d+", full=True)({}, "4 apples") == 0.0
    with pytest.raises(ConfigError, match="cannot read the pattern"):
        RegexMatch("(")


def test_of_several_references_the_best_counts() -> None:
    assert TokenF1()({"answer": ["blue whale", "whale"]}, "a whale") == 1.0


def test_where_the_reference_is() -> None:
    assert ExactMatch()({"question": "q", "ground_truth": "x"}, "x") == 1.0
    assert ExactMatch(answer="meta.gold.0")({"meta": {"gold": ["x", "y"]}}, "x") == 1.0
    assert ExactMatch(answer="a.b")({"a.b": "x"}, "x") == 1.0
    assert ExactMatch(answer=lambda task: task["n"] + 1)({"n": 1}, "2") == 1.0
    assert ExactMatch(answer="gold")(Task.of({"gold": 7}), 7) == 1.0
    for task, answer in (({"question": "q"}, None), ("just text", None), ({"a": None}, "a"), ({"a": []}, "a")):
        with pytest.raises(RewardError, match="reference") as caught:
            ExactMatch(answer=answer)(task, "x")
        assert caught.value.hint


def test_which_part_of_the_output() -> None:
    task = {"answer": "x"}
    assert ExactMatch(output=re.compile(r"<a>(.*?)</a>"))(task, "<a>y</a> <a>x</a>") == 1.0
    assert ExactMatch(output=re.compile("x$"))(task, "y x") == 1.0
    assert ExactMatch(output="result.text")(task, {"result": {"text": "x"}}) == 1.0
    assert ExactMatch(output=lambda o: o[::-1])({"answer": "ab"}, "ba") == 1.0
    # What is not there is the agent's fault: graded low, even where the reference is empty.
    for part in (re.compile("<b>(.*)</b>"), "nowhere"):
        assert ExactMatch(output=part)({"answer": ""}, {"content": "x"}) == 0.0


class Answer(BaseModel):
    city: str


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (None, ""),
        (7, "7"),
        ("x", "x"),
        ({"role": "assistant", "content": "x"}, "x"),
        (Answer(city="x"), '{"city": "x"}'),
        ({"city": "x"}, '{"city": "x"}'),
        (["a", "b"], '["a", "b"]'),
        (
            ChatCompletion.model_validate(
                {
                    "id": "1", "object": "chat.completion", "created": 1, "model": "m",
                    "choices": [
                        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
                    ],
                }
            ),
            "x",
        ),
    ],
)  # fmt: skip
def test_texts_of_what_frameworks_give(output: Any, text: str) -> None:
    assert text_of(output) == text


def test_texts_of_langchains_messages() -> None:
    from langchain_core.messages import AIMessage, HumanMessage

    parts: list[Any] = [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "x"}]
    for output in (
        {"messages": [HumanMessage("q"), AIMessage("x")]},
        [HumanMessage("q"), AIMessage(parts)],
        AIMessage("x"),
    ):
        assert text_of(output) == "x"


def test_threads_share_a_grader_and_copies_keep_the_options() -> None:
    grader = FuzzyMatch(scorer="token_set", answer="gold")
    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda i: grader({"gold": f"a {i}"}, f"{i} a"), range(200)))
    assert values == [1.0] * 200
    assert pickle.loads(pickle.dumps(grader)) == grader
