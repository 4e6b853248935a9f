"""`examples/rag`: the real agent and its retriever over MCP, on scripted models."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")
pytest.importorskip("mcp")

import agl
from agl.errors import ConfigError, DatasetError
from agl.testing.provider import Reply, Script, says, serve
from examples.rag.__main__ import SHORT_WORLD, main
from examples.rag.agent import build
from examples.rag.retriever import find, open_index, write_index
from examples.rag.scripts import MORE_MISTAKES, beginner, oracle
from examples.rag.tasks import MARKS, Corpus, generate, load, practice, reward

CORPUS = generate(0)
NAME = re.compile(rf"\w+[{MARKS}]\w+")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_index(CORPUS.passages, tmp_path_factory.mktemp("rag") / "passages.sqlite", letters=MARKS)


def evaluated(script: Script, index: Path, place: Path, *, tool: bool = True) -> Any:
    with serve(script) as server:
        agent = agl.wrap(build(server.url, "m", "key", index, tool=tool), reward=reward)
        report = agl.evaluate(agent, CORPUS.held_out[:24], n_workers=8, directory=place)
    [policy] = report.policies.values()
    assert policy.failed == 0
    return policy


@pytest.mark.night
def test_who_searches_twice_is_right(index: Path, tmp_path: Path) -> None:
    policy = evaluated(oracle, index, tmp_path)
    assert policy.success.value == policy.rewards["f1"].value == policy.rewards["recall@3"].value == 1
    assert policy.means["tools"] == 2
    assert policy.reward.value == pytest.approx(1.1)


@pytest.mark.night
def test_who_says_nothing_earns_nothing(index: Path, tmp_path: Path) -> None:
    policy = evaluated(says("I do not know"), index, tmp_path)
    assert policy.reward.value == policy.success.value == 0


def test_without_the_tool_nothing_can_be_found(index: Path, tmp_path: Path) -> None:
    """What calls it all the same gets no answer; and what guesses can only know the names of the training."""
    assert evaluated(oracle, index, tmp_path / "oracle", tool=False).success.value == 0
    learned = Counter(answer for task in CORPUS.train for answer in task["answer"])
    guess = says(f"<answer>{learned.most_common(1)[0][0]}</answer>")
    policy = evaluated(guess, index, tmp_path / "guess", tool=False)
    assert policy.success.value == policy.rewards["recall@3"].value == 0
    assert policy.reward.value == pytest.approx(0.1)


def test_the_beginner_errs_in_most_questions(index: Path) -> None:
    right = [answers(beginner, task, index)[-1] == f"<answer>{task['answer'][0]}</answer>" for task in CORPUS.train]
    assert 0.15 < sum(right) / len(right) < 0.35


def test_the_short_form_asks_for_countries_alone(tmp_path: Path) -> None:
    corpus = generate(0, **SHORT_WORLD)
    assert not any("river" in text for text in [*corpus.passages, *(task["question"] for task in corpus.train)])
    assert (len(corpus.train), len(corpus.held_out)) == (384, 96)
    assert not names(corpus.held_out) & (names(corpus.train) | names(practice(0, kinds=["country"]).train))
    index = write_index(corpus.passages, tmp_path / "passages.sqlite", letters=MARKS)
    for script, low, high in ((oracle, 1, 1), (partial(beginner, mistakes=MORE_MISTAKES), 0.1, 0.3)):
        right = [answers(script, task, index)[-1] == f"<answer>{task['answer'][0]}</answer>" for task in corpus.train]
        assert low <= sum(right) / len(right) <= high


def answers(script: Script, task: dict[str, Any], index: Path) -> list[str]:
    """What a script is told by the retriever, and its answer: the agent's loop without the agent."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    while (reply := script({"messages": messages})).tools:
        messages.append({"role": "tool", "content": "\n".join(find(open_index(index), reply.tools[0][1]["query"]))})
    return [*(m["content"] for m in messages[1:]), reply.content or ""]


def test_names_of_held_out_questions_never_occur_in_training(index: Path) -> None:
    held_out, trained = names(CORPUS.held_out), names(CORPUS.train)
    assert (len(CORPUS.passages), len(CORPUS.train), len(CORPUS.held_out)) == (500, 480, 120)
    assert not held_out & (trained | names(practice(0).train))
    for task in CORPUS.train:
        for script in (oracle, beginner):
            assert not set(NAME.findall(" ".join(answers(script, task, index)))) & held_out
    for query in ("lives", "lies on", "belongs to", CORPUS.train[0]["question"]):
        assert not set(NAME.findall(" ".join(find(open_index(index), query)))) & held_out


def names(tasks: list[dict[str, Any]]) -> set[str]:
    texts = (text for task in tasks for text in (*task["passages"], *task["answer"]))
    return {name for text in texts for name in NAME.findall(text)}


def test_the_second_search_needs_what_the_first_one_found(index: Path) -> None:
    for task in CORPUS.held_out:
        home, about = task["passages"]
        assert about not in find(open_index(index), task["question"])
        town = home.rstrip(".").split(" ")[-1]
        assert town not in task["question"]
        assert about in find(open_index(index), town)
        assert home == find(open_index(index), re.sub(r".*that (.*) lives in\?", r"\1", task["question"]))[0]


def test_one_retriever_serves_all_questions_and_one_that_died_is_replaced(index: Path) -> None:
    psutil = pytest.importorskip("psutil")

    async def ask() -> None:
        with serve(oracle) as server:
            assistant = build(server.url, "m", "key", index)
            said = await asyncio.gather(*(assistant(task) for task in CORPUS.held_out[:8]))
            assert said == [f"<answer>{task['answer'][0]}</answer>" for task in CORPUS.held_out[:8]]
            [process] = retrievers()
            process.kill()
            with pytest.raises(Exception, match="Connection closed"):
                await assistant(CORPUS.held_out[0])
            assert await assistant(CORPUS.held_out[0]) == said[0]
            [_] = retrievers()

    def retrievers() -> list[Any]:
        children = psutil.Process().children()
        return [c for c in children if c.status() != psutil.STATUS_ZOMBIE and str(index) in c.cmdline()]

    asyncio.run(ask())
    assert retrievers() == []


def test_the_model_reads_of_its_own_mistakes(index: Path) -> None:
    def without_query(body: dict[str, Any]) -> Reply:
        said = [m["content"] for m in body["messages"] if m["role"] == "tool"]
        return Reply(str(said[0])) if said else Reply(tools=(("search", {"person": "x"}),))

    with serve(without_query) as server:
        said = asyncio.run(build(server.url, "m", "key", index)(CORPUS.train[0]))
    assert "search takes a query" in said


@pytest.mark.parametrize("query", ["", "?!", '"', "Beru* NEAR(", "text: x", "AND", "a" * 10_000])
def test_any_query_is_answered(index: Path, query: str) -> None:
    assert len(find(open_index(index), query)) <= 3


def test_debug_tells_three_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--debug", "--out", str(tmp_path / "run")])
    told = capsys.readouterr().out
    assert [told.count(part) for part in ("== task", "\nreward 1.1\n", "execute_tool search")] == [3, 3, 6]


# -- a user's own corpus ----------------------------------------------------------------------------------------------

MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Where is the town in which Ada lives?",
    "answer": "Vesk",
    "answer_aliases": ["the Vesk"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Ada", "paragraph_text": "Ada lives in Omdar.", "is_supporting": True},
        {"idx": 1, "title": "Bob", "paragraph_text": "Bob lives in Lirn.", "is_supporting": False},
        {"idx": 2, "title": "Omdar", "paragraph_text": "Omdar is in Vesk.", "is_supporting": True},
    ],
}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_in_the_form_of_musique(tmp_path: Path) -> None:
    unanswerable = MUSIQUE | {"answerable": False}
    corpus = load(written(tmp_path / "q.jsonl", MUSIQUE, unanswerable, MUSIQUE))
    task = {
        "question": MUSIQUE["question"],
        "answer": ["Vesk", "the Vesk"],
        "passages": ["Ada: Ada lives in Omdar.", "Omdar: Omdar is in Vesk."],
    }
    passages = [task["passages"][0], "Bob: Bob lives in Lirn.", task["passages"][1]]
    assert corpus == Corpus(passages, [task], [task])
    others = written(tmp_path / "p.jsonl", {"title": "Omdar", "paragraph_text": "Omdar is in Vesk."})
    assert load(tmp_path / "q.jsonl", others).passages == ["Omdar: Omdar is in Vesk."]


@pytest.mark.parametrize("options", [["--tiny", "--questions", "q.jsonl"], ["--model", "m", "--passages", "p.jsonl"]])
def test_options_that_do_not_go_together(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--questions"):
        main([*options, "--out", str(tmp_path / "run")])


def wrong_files() -> Iterator[tuple[str, str]]:
    yield "not json", "line=1"
    yield '{"question": "?"}', "answer"
    yield json.dumps(MUSIQUE | {"paragraphs": MUSIQUE["paragraphs"][1:2]}), "is_supporting"
    yield json.dumps(MUSIQUE | {"paragraphs": [3]}), "MuSiQue"


@pytest.mark.parametrize(("text", "says_what"), wrong_files())
def test_what_is_not_in_that_form_is_named(tmp_path: Path, text: str, says_what: str) -> None:
    (tmp_path / "q.jsonl").write_text(text + "\n")
    with pytest.raises(DatasetError, match=says_what):
        load(tmp_path / "q.jsonl")
    with pytest.raises(DatasetError, match="cannot be read"):
        load(tmp_path / "none.jsonl")
