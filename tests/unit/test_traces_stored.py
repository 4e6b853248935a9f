"""`agl.traces` over real stores: exact tokens of the student, tokens made from texts, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import TOOLS, Asked, quick_tokenizer, tool_call
from tiny_tokenizers import CHATML, template_tokenizer, tiny_tokenizer
from traced_runs import TASKS, record, saved

import agl
from agl.errors import ConfigError, NoTrainableDataError, StoreError
from agl.mdp.selection import select
from agl.mdp.sequence import merge
from agl.mdp.types import Call
from agl.trainer.store import open_store
from agl.trainer.traces.choice import Chosen
from agl.trainer.traces.files import write
from agl.trainer.traces.stored import traces


def policy(asked: Asked) -> str:
    """Calls the tool; then repeats its result, but gives up at the first task."""
    text = quick_tokenizer().decode(asked.prompt_ids.tolist())
    question = text.split("user\n")[1].split("<|im_end|>")[0]
    if "<tool_response>" not in text:
        return tool_call(question)
    return text.split("<tool_response>\n")[1].split("\n")[0] if "1 + 2" not in question else "I do not know"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Call]]]:
    """A run's directory, and the calls of its rollouts."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder, record(folder, policy)


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A student with the tokenizer and chat template of the policy that was recorded."""
    return saved(quick_tokenizer(), tmp_path_factory.mktemp("same"))


def texts(chosen: Chosen, tokenizer: Any) -> list[tuple[str, str]]:
    """Each row's text, and that of its trained tokens."""
    rows = [row for one in chosen.trajectories for row in merge(one, chosen.weights)]
    return [(tokenizer.decode(row.token_ids), tokenizer.decode(row.token_ids[row.action_mask])) for row in rows]


def test_calls_of_the_same_tokenizer_are_trained_as_they_were_sampled(recorded: Any, same: str) -> None:
    folder, calls = recorded
    chosen = agl.traces(folder, where=agl.reward("correct") >= 1).load(same)
    kept = [t.call for one in chosen.trajectories for t in one.transitions]
    sampled = {c.id: c for of_one in calls for c in of_one}
    assert len(kept) == 4  # two calls of each solved task; the second sample of a task is the same again
    for call in kept:
        assert np.array_equal(call.ids, sampled[call.id].ids)
        assert np.array_equal(call.logprobs, sampled[call.id].logprobs)
    assert chosen.counts["calls_retokenised"] == 0
    assert chosen.counts["rollouts_left_out/condition not met"] == 2
    assert chosen.counts["rollouts_left_out/duplicate"] == 2
    assert str(chosen).splitlines()[:2] == ["rollouts trained  2 of 6", "calls trained     4 of 12"]


@pytest.mark.parametrize("template", ["qwen25", "qwen3", "llama31", "mistral_tekken"])
def test_calls_of_another_tokenizer_are_written_as_the_student_would(
    recorded: Any, template: str, tmp_path: Path
) -> None:
    folder, _ = recorded
    tokenizer = template_tokenizer(template)
    chosen = agl.traces(folder, where="correct>=1", per_task=1).load(saved(tokenizer, tmp_path))
    assert chosen.counts["calls_kept"] == chosen.counts["calls_retokenised"] == 4
    for text, trained in texts(chosen, tokenizer):
        (answer,) = (t["answer"] for t in TASKS if t["question"] in text)
        assert trained.endswith(f"{answer}{tokenizer.eos_token}")
        assert trained.count(tokenizer.eos_token) == 2
        assert '"calculator"' in trained or "calculator[ARGS]" in trained
        assert f"{answer}" in text
        # One row: the second call continues the first, token for token.
        assert text.count(f"{trained.split(tokenizer.eos_token)[0]}") == 1


def test_a_tool_call_that_the_student_cannot_write_is_refused(recorded: Any, tmp_path: Path) -> None:
    folder, _ = recorded
    # The template writes tool calls, but leaves out the arguments as soon as there is a digit in them.
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        '{% if "+" in c.function.arguments | string %}{}{% else %}{{ c.function.arguments | tojson }}{% endif %}}'
        "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tiny_tokenizer((*CHATML, "<tool_call>", "</tool_call>"), "<|im_end|>", template)
    chosen = agl.traces(folder, where="correct>=1", per_task=1).load(saved(tokenizer, tmp_path))
    # The answers after it are trained; the call that was refused is not, nor is it hidden.
    assert chosen.counts["calls_left_out/a tool call does not survive the chat template"] == 2
    assert chosen.counts["calls_kept"] == 2
    assert [trained for _, trained in texts(chosen, tokenizer)] == ["7<|im_end|>", "11<|im_end|>"]


def test_tokens_without_texts_are_taken_from_the_same_tokenizer_alone(same: str, tmp_path: Path) -> None:
    record(tmp_path / "run", policy, capture_content=False)
    data = agl.traces(tmp_path / "run", where="correct>=1")
    chosen = data.load(same)
    assert (chosen.counts["calls_kept"], chosen.counts["calls_retokenised"]) == (4, 0)
    other = data.load(saved(template_tokenizer("llama31"), tmp_path / "other"))
    assert other.counts["calls_left_out/texts not recorded"] == 8
    with pytest.raises(NoTrainableDataError, match="8 texts not recorded"):
        asyncio.run(write(data, "sft", tmp_path / "out", format="messages"))


def test_each_policy_learns_from_its_own_agents(recorded: Any, same: str, tmp_path: Path) -> None:
    other = template_tokenizer("qwen25")
    models = {"a": same, "b": saved(other, tmp_path)}
    data = agl.traces(recorded[0], where="correct>=1", agents="sol*")

    def chosen(agents: Any) -> Chosen:
        return asyncio.run(data.choose(models, select(agents)))

    assert {one.policy for one in chosen({"judge": "a", "solver": "b"}).trajectories} == {"b"}
    assert chosen({"judge": "a", "solver": "b"}).counts["calls_retokenised"] == 4
    assert chosen({"solver": "a", "*": "b"}).counts["calls_retokenised"] == 0
    assert chosen({"judge": "a"}).counts["calls_left_out/other agent"] == 8


def test_several_stores_are_read_as_one(recorded: Any, same: str, tmp_path: Path) -> None:
    record(tmp_path, policy)
    one, both = (agl.traces(stores, where="correct>=1").load(same) for stores in (tmp_path, [recorded[0], tmp_path]))
    assert both.counts["rollouts"] == 12
    assert both.counts["calls_kept"] == one.counts["calls_kept"] == 4


def test_a_condition_that_keeps_nothing_says_what_was_seen(recorded: Any, same: str) -> None:
    folder, _ = recorded
    chosen = agl.traces(folder, where="reward>=2").load(same)
    with pytest.raises(NoTrainableDataError) as caught:
        chosen.require()
    assert "nothing is left of 6 rollouts to train on (6 condition not met)" in str(caught.value)
    assert "reward: 0 to 1, mean 0.6667, of 6; correct: 0 to 1, mean 0.6667, of 6" in str(caught.value)


def test_calls_of_no_agent(recorded: Any, same: str) -> None:
    chosen = agl.traces(recorded[0], agents="judge*").load(same)
    assert chosen.counts["calls_left_out/other agent"] == chosen.counts["calls"] == 12
    with pytest.raises(NoTrainableDataError, match="12 other agent"):
        chosen.require()


def test_rollouts_on_which_a_policy_is_measured_are_not_read(same: str, tmp_path: Path) -> None:
    async def fill() -> None:
        from agl.trainer.store.types import NewRollout

        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        await store.enqueue_rollouts([NewRollout("t", mode="val")])
        await store.close()

    asyncio.run(fill())
    with pytest.raises(NoTrainableDataError, match="of 1 of other kinds") as caught:
        agl.traces(tmp_path).load(same)
    assert "do not train on the tasks that you measure with" in str(caught.value)
    assert agl.traces(tmp_path, mode="val").load(same).counts["rollouts_left_out/queuing"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"were": "reward>=1"}, "has no option 'were'"),
        ({"where": "reward"}, "begins no comparison"),
        ({"where": 3}, "not a condition"),
        ({"agents": []}, "selects no agent"),
        ({"per_task": 0}, "per_task= is 0"),
        ({"weight": 2.0}, "weight= is 2.0"),
        ({"mode": "training"}, "there is no mode 'training'"),
        ({"stores": 3}, "stores= is 3"),
        ({"stores": []}, "stores= is"),
    ],
)
def test_an_impossible_option_says_so(recorded: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        traces(**{"stores": recorded[0], **options})
    assert caught.value.hint


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at this path"):
        agl.traces(tmp_path / "none.db")


# -- files ------------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_messages_are_openais(recorded: Any, tmp_path: Path) -> None:
    data = agl.traces(recorded[0], where="correct>=1")
    facts = asyncio.run(write(data, "sft", tmp_path / "out", format="messages"))
    rows = lines(tmp_path / "out" / "sft.jsonl")
    assert len(rows) == facts["rows"] == 2
    for row, task in zip(rows, TASKS[1:], strict=True):
        question, call, result, answer = row["messages"]
        assert question == {"role": "user", "content": task["question"]}
        assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"expression": task["question"]}
        assert result["tool_call_id"] == call["tool_calls"][0]["id"]
        assert answer == {"role": "assistant", "content": str(task["answer"])}
        assert row["tools"] == TOOLS


def test_rewards_have_their_names(recorded: Any, tmp_path: Path) -> None:
    facts = asyncio.run(write(agl.traces(recorded[0]), "rewards", tmp_path))
    rows = lines(tmp_path / "rewards.jsonl")
    assert facts["rows"] == 3
    assert [row["reward"] for row in rows] == [0.0, 1.0, 1.0]
    assert json.loads(rows[1]["rewards"]) == {"correct": 1.0, "reward": 1.0}
    assert rows[0]["completion"][-1]["content"] == "I do not know"


def test_an_export_that_cannot_be_made_leaves_nothing(recorded: Any, tmp_path: Path) -> None:
    data = agl.traces(recorded[0])
    for what, options, message in (
        ("sft", {}, "no model given"),
        ("sft", {"format": "parquet"}, "no format 'parquet'"),
        ("sfts", {}, "no export 'sfts'"),
        ("pairs", {"margin": -1.0}, "margin= is -1"),
        ("pairs", {}, "no two of 6 rollouts of 3 tasks make a pair"),
    ):
        with pytest.raises((ConfigError, NoTrainableDataError), match=message) as caught:
            asyncio.run(write(data, what, tmp_path / "out", **options))  # type: ignore[arg-type]
        assert caught.value.hint
    assert not list(tmp_path.iterdir())
