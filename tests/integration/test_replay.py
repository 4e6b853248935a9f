"""`agl replay`: the policy that sampled a rollout gives its answers and their log-probs again; another gives others."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from launching import AGL
from openai import OpenAI
from running import say
from untrained import make_untrained

import agl
from agl.errors import NoTrainableDataError, StoreError
from agl.testing.provider import Reply, serve
from agl.trainer.evaluation.replay import replay
from agl.trainer.store.location import read_store


@agl.rollout
def two_turns(task: dict[str, str], llm: agl.LLM) -> float:
    return len(say(llm, task["question"]) + say(llm, "and more?")) % 3 / 2


def first_rollout(result: agl.Result) -> str:
    return read_store(result.store, lambda store: store.query_rollouts())[0].rollout_id


def test_the_policy_that_sampled_it_says_the_same_with_the_log_probs_that_were_recorded(
    untrained_model: Path, tmp_path: Path
) -> None:
    baseline = agl.Baseline(model=str(untrained_model), temperature=0.0, max_response_tokens=6)
    run = agl.Trainer(baseline, directory=tmp_path / "run", progress=False).fit(two_turns, [{"question": "hello"}])
    rollout = first_rollout(run)
    found = read_store(
        run.store,
        lambda store: replay(store, rollout, str(untrained_model), max_response_tokens=6, progress=False),
    )
    stored = read_store(run.store, lambda store: store.query_calls(rollout))
    assert [call.call for call in found.calls] == [call.id for call in stored]
    assert [call.same for call in found.calls] == [True, True]
    for call, before in zip(found.calls, stored, strict=True):
        assert call.recorded_logprob == pytest.approx(float(np.mean(before.logprobs)), abs=1e-4)
        assert call.message["content"] in ("hello", "and more?")

    make_untrained(tmp_path / "other", seed=7)
    other = read_store(
        run.store,
        lambda store: replay(store, rollout, str(tmp_path / "other"), max_response_tokens=6, progress=False),
    )
    assert not any(call.same for call in other.calls)
    assert all((call.recorded_logprob or 0) < -1 for call in other.calls)


def test_what_a_provider_answered_is_put_to_a_policy(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command line, whose JSON has the two answers."""

    def program(task: dict[str, str]) -> float:
        OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
        return 1.0

    with serve(lambda body: Reply("4, of course")) as provider:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        trainer = agl.Trainer(agl.Baseline(), directory=tmp_path / "run", progress=False)
        run = trainer.fit(agl.rollout(program), [{"question": "2 + 2?"}])
    words = ["replay", first_rollout(run)[:12], "--model", str(untrained_model), "--max-response-tokens", "5"]
    done = subprocess.run(
        [*AGL, *words, "--store", run.store, "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (call,) = json.loads(done.stdout)["calls"]
    assert (call["message"]["content"], call["recorded"]["content"]) == ("2 + 2?", "4, of course")
    assert call["answer"]["content"] != "4, of course"
    assert call["recorded_logprob"] < 0
    assert "0 of 1 answers" in done.stderr


def test_a_rollout_without_a_call_cannot_be_replayed(tmp_path: Path) -> None:
    run = agl.Trainer(agl.Baseline(), directory=tmp_path / "run", progress=False).fit(
        agl.rollout(lambda task: 1.0), [{"question": "?"}]
    )
    rollout = first_rollout(run)
    # Nothing is loaded for it: the model need not even be there.
    with pytest.raises(NoTrainableDataError, match="it made none"):
        read_store(run.store, lambda store: replay(store, rollout, "/no/such/model", progress=False))
    with pytest.raises(StoreError, match="1 attempts, and no number 3"):
        read_store(run.store, lambda store: replay(store, rollout, "/no/such/model", attempt=3, progress=False))
