"""Whole searches: GEPA and APO find the rules that a model behind HTTP obeys, by what the feedback says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from paths import SUPPORT, pythonpath
from rules import (
    HELD_OUT,
    RESOURCES,
    START,
    TRAIN,
    VAL,
    add_rule,
    apo,
    ask,
    current,
    fit,
    gepa,
    graded,
    reflections,
    rule_provider,
    template_agent,
    two_agents,
)  # fmt: skip

import agl
from agl.agents.prompts import load_prompts
from agl.errors import ConfigError, NoAgentMatchedError, RolloutError, UserCodeError
from agl.rewards.function import RewardCaller
from agl.trainer.store import open_store


def test_apo_finds_every_rule(tmp_path: Path) -> None:
    with rule_provider() as provider:
        algorithm = apo(provider.url, held_out=HELD_OUT)
        result = fit(algorithm, template_agent(provider.url), tmp_path)
    assert algorithm.get_best_prompt() == agl.PromptTemplate(result.prompts["prompt"])
    end = result.history[-1]
    assert (end["held_out/start/reward"], end["held_out/reward"]) == (0.0, 1.0)


def test_system_prompts_of_which_one_matters(tmp_path: Path) -> None:
    """Two agents keep their code, their clients and their keys; the prompt of one of them gets better."""
    with rule_provider() as provider:
        agent = two_agents(provider.url)
        result = fit(gepa(provider.url), agent, tmp_path, initial_resources=None, agents=["planner", "writer"])
        prompts = [s.body["messages"][0]["content"] for s in provider.seen if s.body["model"] == "rewriter"]
    assert result.prompts["planner"] == "You plan."
    assert result.prompts["writer"].startswith("You write. {braces} Also be")
    assert result.history[-1]["held_out/reward"] == 1.0
    assert "length = 0.02 (not part of the score), earned by call 1 of writer" in prompts[0]
    assert all(load_prompts(tmp_path / "prompts")[name].observed.startswith("You") for name in ("planner", "writer"))  # type: ignore[union-attr]


@pytest.mark.night
def test_same_seed_same_result(tmp_path: Path) -> None:
    searches = []
    with rule_provider() as provider:
        for name in ("a", "b"):
            result = fit(gepa(provider.url), template_agent(provider.url), tmp_path / name, seed=3)
            lines = (tmp_path / name / "reflections.jsonl").read_text()
            entries = [{k: v for k, v in e.items() if "per_second" not in k} for e in result.history]
            searches.append((result.prompts, lines, entries))
    assert searches[0] == searches[1]


@pytest.mark.parametrize("algorithm", [gepa, apo])
def test_dropped_field_is_rejected_and_told(tmp_path: Path, algorithm: Any) -> None:
    """The first reply drops {question}, the second has another field; the model is told why, and mends it."""

    def rewrite(prompt: str) -> str:
        if "rejected: it lost {question}" in prompt:
            return add_rule(prompt).replace("Answer:", "Answer {tone}:")
        return add_rule(prompt) if "rejected: it has {tone}" in prompt else add_rule(prompt).replace("{question}", "")

    with rule_provider(rewrite) as provider:
        search = algorithm(provider.url, held_out=HELD_OUT)
        result = fit(search, template_agent(provider.url), tmp_path)
    assert result.history[-1]["held_out/reward"] == 1.0
    rejected = result.history[-1]["prompts/rejected"]
    assert rejected > 0
    assert rejected % 2 == 0


def test_worse_text_is_not_accepted(tmp_path: Path) -> None:
    with rule_provider() as provider:
        search = gepa(provider.url, reflection=lambda prompt: "{question} lorem ipsum", budget=30)
        result = fit(search, template_agent(provider.url), tmp_path)
    assert result.prompts == {"prompt": START}
    assert result.history[-1]["prompts/candidates"] == 2


def test_reflection_may_be_an_async_function(tmp_path: Path) -> None:
    async def reflect(prompt: str) -> str:
        await asyncio.sleep(0)
        return add_rule(prompt)

    with rule_provider() as provider:
        result = fit(gepa(provider.url, reflection=reflect), template_agent(provider.url), tmp_path)
    assert result.history[-1]["held_out/reward"] == 1.0


def test_held_out_share_is_taken_from_training(tmp_path: Path) -> None:
    with rule_provider() as provider:
        result = fit(gepa(provider.url, held_out=0.34), template_agent(provider.url), tmp_path)
        asked = [s.body["messages"][0]["content"] for s in provider.seen if s.body["model"] == "obedient"]
    held_out = {text.split(" Also")[0] for text in asked[-4:]}
    assert len(held_out) == 2
    assert not any(text.split(" Also")[0] in held_out for text in asked[:-4])
    assert result.history[-1]["held_out/reward"] == 1.0


def test_agent_that_no_request_came_from(tmp_path: Path) -> None:
    options = {"initial_resources": None, "agents": ["writer", "editor"]}
    with rule_provider() as provider, pytest.raises(NoAgentMatchedError, match=r"'editor'.*'planner', 'writer'"):
        fit(gepa(provider.url), two_agents(provider.url), tmp_path, **options)


def test_prompt_that_is_built_anew(tmp_path: Path) -> None:
    with rule_provider() as provider:

        def work(task: dict[str, str]) -> str:
            return ask(provider.url, ("system", f"Now answer {task['question']}"), ("user", "go"))

        agent = agl.wrap(work, reward=lambda task, output: graded(output), name="clock")
        with pytest.raises(ConfigError, match="not the same in each call; 3 were seen") as error:
            fit(gepa(provider.url), agent, tmp_path, initial_resources=None)
    assert "'Now answer train 0'" in str(error.value)
    assert "agl.PromptTemplate" in str(error.value)


def test_agent_without_a_system_prompt(tmp_path: Path) -> None:
    with rule_provider() as provider:
        agent = agl.wrap(lambda task: ask(provider.url, ("user", "go")), reward=lambda task, output: 0.0, name="bare")
        with pytest.raises(ConfigError, match="'bare' sends no system prompt; 3 calls"):
            fit(gepa(provider.url), agent, tmp_path, initial_resources=None)


def failing_agent(url: str, fails: Any) -> Any:
    @agl.rollout
    def agent(task: dict[str, str], prompt_template: agl.PromptTemplate) -> dict[str, float]:
        if fails(task, prompt_template.template):
            raise ValueError(f"no answer to {task['question']}")
        return graded(ask(url, ("user", prompt_template.format(question=task["question"]))))

    return agent


def test_failed_rollout_scores_lowest_and_its_error_is_feedback(tmp_path: Path) -> None:
    with rule_provider() as provider:
        agent = failing_agent(provider.url, lambda task, text: task["question"] == "train 1")
        result = fit(gepa(provider.url), agent, tmp_path, max_attempts=2)
        prompts = [s.body["messages"][0]["content"] for s in provider.seen if s.body["model"] == "rewriter"]
    assert result.history[-1]["held_out/reward"] == 1.0
    assert any("the rollout failed: " in p and "ValueError: no answer to train 1" in p for p in prompts)


def test_most_fail(tmp_path: Path) -> None:
    with (
        rule_provider() as provider,
        pytest.raises(RolloutError, match=r"4 of 4 rollouts failed; .*no answer to val 0"),
    ):
        fit(gepa(provider.url), failing_agent(provider.url, lambda task, text: True), tmp_path, max_attempts=1)


NINE = [{"question": f"held out {k}"} for k in range(9)]


@pytest.mark.parametrize("fails", [{"val 0", "val 1", "val 3"}, {"held out 0", "held out 4", "held out 8"}])
def test_one_fault_in_more_than_a_quarter_ends_the_search(fails: set[str], tmp_path: Path) -> None:
    """A score of the tasks that are left would choose among prompts, and be reported, as if there were no others."""

    def grade(task: dict[str, str], output: str) -> dict[str, float]:
        if task["question"] in fails:
            raise KeyError(task["question"])
        return graded(output)

    @agl.rollout
    def agent(task: dict[str, str], prompt_template: agl.PromptTemplate) -> dict[str, float]:
        return RewardCaller(grade)(task, ask(provider.url, ("user", prompt_template.format(question="?"))))

    with rule_provider() as provider, pytest.raises(UserCodeError) as caught:
        fit(gepa(provider.url, held_out=NINE), agent, tmp_path, max_attempts=1)
    assert "one place in your code" in str(caught.value)
    assert "raise KeyError(task" in str(caught.value)


def test_candidate_that_breaks_the_agent_is_not_the_end(tmp_path: Path) -> None:
    """Where the start succeeds, it is the candidate that fails: it scores lowest."""

    def rewrite(prompt: str) -> str:
        return "```\nbreak {question}\n```" if current(prompt) == START and "train 1" in prompt else add_rule(prompt)

    with rule_provider(rewrite) as provider:
        agent = failing_agent(provider.url, lambda task, text: text.startswith("break"))
        result = fit(gepa(provider.url), agent, tmp_path, max_attempts=1)
    assert any(entry.get("train/failed_rollouts") == 3 for entry in result.history)
    assert result.history[-1]["held_out/reward"] == 1.0


def test_failing_reflection_ends_the_search_and_it_resumes(tmp_path: Path) -> None:
    broken = True

    def reflect(prompt: str) -> str:
        if broken:
            raise OSError("no network")
        return add_rule(prompt)

    with rule_provider() as provider:
        agent = template_agent(provider.url)
        with pytest.raises(OSError, match="no network"):
            fit(gepa(provider.url, reflection=reflect), agent, tmp_path)
        before = len(provider.seen)
        broken = False
        with pytest.raises(ConfigError, match="already has a prompt search"):
            fit(gepa(provider.url, reflection=reflect), agent, tmp_path)
        result = fit(gepa(provider.url, reflection=reflect), agent, tmp_path, resume=True)
        assert result.history[-1]["held_out/reward"] == 1.0
        again = len(provider.seen)
        # The whole search once more: nothing is asked and nothing is run.
        assert fit(gepa(provider.url, reflection=reflect), agent, tmp_path, resume=True).prompts == result.prompts
        assert len(provider.seen) == again
    assert before == 4 + 3


@pytest.mark.night
def test_cancelled(tmp_path: Path) -> None:
    """Ctrl-C cancels the run: the search's thread ends with it, and what is done is kept."""
    reached, before = threading.Event(), set(threading.enumerate())

    async def reflect(prompt: str) -> str:
        reached.set()
        await asyncio.sleep(600)
        return ""

    async def main(url: str) -> None:
        trainer = agl.Trainer(
            gepa(url, reflection=reflect), initial_resources=RESOURCES, directory=tmp_path, progress=False
        )
        task = asyncio.ensure_future(trainer.fit_async(template_agent(url), TRAIN, VAL))
        await asyncio.to_thread(reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with rule_provider() as provider:
        asyncio.run(main(provider.url))
        assert not any(t.name.startswith("asyncio") for t in set(threading.enumerate()) - before)
        result = fit(gepa(provider.url), template_agent(provider.url), tmp_path, resume=True)
    assert result.history[-1]["held_out/reward"] == 1.0


def test_callback_ends_the_search(tmp_path: Path) -> None:
    class Once(agl.Callback):
        def on_validation(self, run: Any, entry: Any) -> None:
            run.stop("enough")

    with rule_provider() as provider:
        result = fit(gepa(provider.url), template_agent(provider.url), tmp_path, callbacks=Once())
    assert result.stop_reason == "enough"
    assert result.prompts == {"prompt": START}


def test_reflections_are_no_rollouts(tmp_path: Path) -> None:
    with rule_provider() as provider:
        result = fit(gepa(provider.url), template_agent(provider.url), tmp_path)
        asked = reflections(provider)
    kept = [json.loads(line) for line in (tmp_path / "reflections.jsonl").read_text().splitlines()[1:]]
    assert len(kept) == asked == 3
    assert result.history[-1]["prompts/rollouts"] == sum(s.body["model"] == "obedient" for s in provider.seen)


def test_tasks_and_prompts_are_no_settings(tmp_path: Path) -> None:
    """What is recorded of a run goes to trackers."""
    with rule_provider() as provider:
        result = fit(gepa(provider.url, budget=12), template_agent(provider.url), tmp_path)

    async def config() -> dict[str, Any]:
        store = await open_store(result.store)
        [run] = await store.query_runs(run_ids=[result.run_id])
        await store.close()
        return dict(run.config)

    settings = asyncio.run(config())
    assert (settings["algorithm.budget"], settings["initial_resources"]) == (12, ["prompt"])
    assert not any(text in json.dumps(settings) for text in ("held out", "train 1", START, provider.url))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gepa", pytest.param("apo", marks=pytest.mark.night)])
def test_kill_9_and_resume_repeats_nothing(tmp_path: Path, name: str) -> None:
    """The search is killed while the second reflection is asked; resumed, it asks and runs only what is missing."""
    program = [sys.executable, str(SUPPORT / "programs" / "prompt_search.py"), name]
    child: list[subprocess.Popen[bytes]] = []
    asked: list[str] = []

    def rewrite(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) == 2 and child:
            child[0].send_signal(signal.SIGKILL)
            child[0].wait()
        return add_rule(prompt)

    with rule_provider(rewrite) as provider:
        searches = {"gepa": gepa, "apo": apo}
        options = {"branch_factor": 1, "beam_width": 1} if name == "apo" else {}
        whole = fit(searches[name](provider.url, **options), template_agent(provider.url), tmp_path / "whole")
        uninterrupted, n = list(provider.seen), len(asked)
        asked.clear()
        provider.seen.clear()
        env = {**os.environ, "PYTHONPATH": pythonpath(SUPPORT)}
        child.append(subprocess.Popen([*program, provider.url, str(tmp_path / "killed")], env=env))
        assert child[0].wait(120) == -signal.SIGKILL
        resumed = fit(
            searches[name](provider.url, **options), template_agent(provider.url), tmp_path / "killed", resume=True
        )
    assert resumed.prompts == whole.prompts
    assert len(asked) == n + 1, "the one that was being asked is asked again, and no other"
    bodies = [json.dumps(seen.body, sort_keys=True) for seen in provider.seen]
    assert len(bodies) == len(uninterrupted) + 1

    def facts(result: agl.Result) -> list[dict[str, Any]]:
        return [{k: v for k, v in entry.items() if "per_second" not in k} for entry in result.history]

    assert facts(resumed) == facts(whole)


@pytest.mark.night
def test_process_runners_get_each_candidate(tmp_path: Path) -> None:
    with rule_provider() as provider:
        model = {"llm": agl.LLM(provider.url, "obedient", "secret")}
        options = {"runners": "process", "n_workers": 2, "initial_resources": {**RESOURCES, **model}}
        result = fit(gepa(provider.url), "rules:environment_agent", tmp_path, **options)
    assert result.history[-1]["held_out/reward"] == 1.0


@pytest.mark.night
def test_goes_on_from_the_prompts_of_an_earlier_search(tmp_path: Path) -> None:
    options: dict[str, Any] = {"initial_resources": None, "agents": "writer"}
    with rule_provider() as provider:
        agent = two_agents(provider.url)
        first = fit(gepa(provider.url, budget=14), agent, tmp_path / "first", **options)
        second = fit(
            gepa(provider.url), agent, tmp_path / "second", **options, prompts=str(tmp_path / "first" / "prompts")
        )
    assert first.prompts["writer"] != "You write. {braces}"
    assert first.history[-1]["held_out/reward"] < 1.0
    assert second.prompts["writer"].startswith(first.prompts["writer"])
    assert second.history[-1]["held_out/reward"] == 1.0
    [prompt] = load_prompts(tmp_path / "second" / "prompts").values()
    assert isinstance(prompt, agl.SystemPrompt)
    assert prompt.observed == "You write. {braces}"
