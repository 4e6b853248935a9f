"""Bad input gets an error that says what happened, where, and what to do next."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

import agl
from agl import errors


def _ask(llm: agl.LLM, text: str, **options: Any) -> str:
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}], **options)
    return answer.choices[0].message.content or ""


@agl.rollout
def speaker(task: Any, llm: agl.LLM) -> float:
    return float(len(_ask(llm, str(task))) % 3)


def _trainer(model: Path, directory: Path, **options: Any) -> agl.Trainer:
    return agl.Trainer(
        agl.GRPO(model=str(model), group_size=2, batch_size=1, steps=1, max_response_tokens=8),
        directory=directory,
        progress=False,
        max_attempts=1,
        **options,
    )


def test_a_filter_that_names_no_agent_seen(untrained_model: Path, tmp_path: Path) -> None:
    trainer = _trainer(untrained_model, tmp_path, agents=["writer"])

    @agl.rollout
    def two_agents(task: Any, llm: agl.LLM) -> float:
        # Unselected, so this client's own model is asked: the served policy, by a plain request.
        httpx.post(
            f"{llm.endpoint}/chat/completions",
            headers={"authorization": f"Bearer {llm.api_key}"},
            json={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        ).raise_for_status()
        return 1.0

    with pytest.raises(errors.NoAgentMatchedError, match=r"agents='writer' matched none .*: 'two_agents'"):
        trainer.fit(two_agents, ["a"])


def test_an_agent_that_makes_no_call(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def silent(task: Any) -> float:
        return 1.0

    with pytest.raises(errors.NoLLMCallError, match="made no LLM call"):
        _trainer(untrained_model, tmp_path).fit(silent, ["a"])


def test_a_call_that_bypasses_the_gateway(untrained_model: Path, tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = b'{"text": "hello"}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/own/api"

    class OwnModel(BaseChatModel):
        base_url: str

        @property
        def _llm_type(self) -> str:
            return "own"

        def _generate(
            self,
            messages: list[BaseMessage],
            stop: list[str] | None = None,
            run_manager: CallbackManagerForLLMRun | None = None,
            **kwargs: Any,
        ) -> ChatResult:
            text = httpx.post(self.base_url).json()["text"]
            return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

    agent = agl.wrap(OwnModel(base_url=url), reward=lambda task, output: 1.0)
    with pytest.raises(errors.BypassedGatewayError) as caught:
        _trainer(untrained_model, tmp_path).fit(agent, ["hello"])
    server.shutdown()
    assert "OwnModel" in str(caught.value)
    assert url in str(caught.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "the reward 'reward' is nan"),
        (float("inf"), "the reward 'reward' is inf"),
        ("good", "is 'good', a str"),
        ({"a": 1.0, "b": 2.0}, "cannot tell which of a, b is the reward"),
        (None, "returned no reward and emitted none"),
    ],
)
def test_a_reward_that_is_not_a_finite_number(value: Any, says: str, untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def scored(task: Any, llm: agl.LLM) -> Any:
        _ask(llm, "hi")
        return value

    with pytest.raises(errors.RewardError, match=says) as caught:
        _trainer(untrained_model, tmp_path).fit(scored, ["a"])
    assert "rollout=ro-" in str(caught.value)


def test_an_empty_dataset(untrained_model: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.DatasetError, match="the training dataset is empty"):
        _trainer(untrained_model, tmp_path).fit(speaker, [])


def test_a_model_directory_that_does_not_load(tmp_path: Path, no_process_left: None) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(errors.ModelLoadError, match=r"no config\.json"):
        _trainer(tmp_path / "model", tmp_path).fit(speaker, ["a"])
    with pytest.raises(errors.ModelLoadError, match="no such directory"):
        _trainer(tmp_path / "nowhere" / "model", tmp_path).fit(speaker, ["a"])


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(errors.ConfigError, match=r"GRPO has no option 'lerning_rate'\n.*'learning_rate'"):
        agl.GRPO(model="m", steps=1, lerning_rate=1e-3)  # type: ignore[call-arg]
    with pytest.raises(errors.ConfigError, match=r"Trainer has no option 'n_worker'\n.*'n_workers'"):
        agl.Trainer(agl.GRPO(model="m", steps=1), n_worker=3)  # type: ignore[call-arg]
    with pytest.raises(errors.ConfigError, match=r"has no option 'nam'\n.*'name'"):
        agl.wrap(lambda task: task, reward=lambda t, o: 1.0, nam="x")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either steps= or epochs="),
        ({"steps": 1, "epochs": 1}, "either steps= or epochs="),
        ({"steps": 1, "group_size": 1}, "no rollout has another to be compared with"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1, "learning_rate": -1.0}, r"learning_rate is -1\.0"),
        ({"steps": 1, "temperature": 0.0}, r"temperature is 0\.0"),
    ],
)
def test_impossible_settings(options: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.ConfigError, match=says):
        agl.GRPO(model="m", **options)


def test_an_agent_that_was_not_wrapped(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"cannot run a builtins\.dict as it is\n.*agl\.wrap"):
        agl.Trainer(agl.GRPO(model="m", steps=1), directory=tmp_path).fit({}, ["a"])


def test_a_prompt_longer_than_the_context(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def wordy(task: Any, llm: agl.LLM) -> float:
        _ask(llm, "word " * 2000)
        return 1.0

    with pytest.raises(errors.RolloutError, match=r"the prompt has \d+ tokens, .* context of 512") as caught:
        _trainer(untrained_model, tmp_path).fit(wordy, ["a"])
    assert "rollout=ro-" in str(caught.value)


def test_a_port_in_use(untrained_model: Path, tmp_path: Path, no_process_left: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(errors.GatewayError, match=f"cannot listen on 127.0.0.1:{port}"):
            _trainer(untrained_model, tmp_path, port=port).fit(speaker, ["a"])


@pytest.mark.parametrize("kind", ["sync", "async", "deaf"])
def test_a_worker_that_hangs(kind: str, untrained_model: Path, tmp_path: Path, no_process_left: None) -> None:
    released = threading.Event()

    def hang(task: Any, llm: agl.LLM) -> float:
        released.wait(60)
        return 1.0

    async def hang_async(task: Any, llm: agl.LLM) -> float:
        await asyncio.sleep(60)
        return 1.0

    async def deaf(task: Any, llm: agl.LLM) -> float:
        while not released.is_set():
            try:
                await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                pass
        return 1.0

    agent = agl.rollout({"sync": hang, "async": hang_async, "deaf": deaf}[kind])
    began = time.monotonic()
    with pytest.raises(errors.RolloutTimeoutError, match=r"ran past its limit of 0\.5 s") as caught:
        _trainer(untrained_model, tmp_path, timeout=0.5).fit(agent, ["a"])
    released.set()
    assert time.monotonic() - began < 50, "a hanging agent must not be waited for"
    assert "attempt=1" in str(caught.value)


def test_a_failed_rollout_is_tried_again_then_dropped_and_never_scored(untrained_model: Path, tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    @agl.rollout
    def flaky(task: Any, llm: agl.LLM, rollout: agl.RolloutInfo) -> float:
        seen[rollout.rollout_id] = rollout.attempt
        first = next(iter(seen))
        if rollout.rollout_id == first or (len(seen) == 2 and rollout.attempt == 1):
            raise ValueError("the agent stumbled")
        return float(len(_ask(llm, str(task))))

    trainer = agl.Trainer(
        agl.GRPO(model=str(untrained_model), group_size=4, batch_size=1, steps=1, max_response_tokens=8),
        directory=tmp_path,
        n_workers=1,
        progress=False,
    )
    history = trainer.fit(flaky, ["a"]).history
    assert sorted(seen.values()) == [1, 1, 2, 2]
    assert history[-1]["train/failed_rollouts"] == 1
    assert history[-1]["train/dropped_groups"] == 0
    assert history[-1]["train/reward"] > 0


def test_an_agents_own_failure_can_be_scored(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout(error_reward=-1.0)
    def stumbling(task: Any, llm: agl.LLM) -> float:
        _ask(llm, str(task))
        raise ValueError("the agent stumbled")

    history = _trainer(untrained_model, tmp_path).fit(stumbling, ["a"]).history
    assert history[-1]["train/reward"] == -1.0


def test_a_task_line_that_is_not_json(tmp_path: Path) -> None:
    from agl.trainer.run.data import read_tasks

    file = tmp_path / "tasks.jsonl"
    file.write_text('{"question": "a"}\n\n{"question": \n')
    with pytest.raises(errors.DatasetError, match="line 3 is not JSON"):
        read_tasks(file)
    file.write_text("\n")
    with pytest.raises(errors.DatasetError, match="the task file is empty"):
        read_tasks(file)
    file.write_text(json.dumps("only text") + "\n")
    assert read_tasks(file) == ["only text"]


def test_a_directory_that_holds_another_run(untrained_model: Path, tmp_path: Path) -> None:
    _trainer(untrained_model, tmp_path / "run").fit(speaker, ["a"])
    with pytest.raises(errors.ConfigError, match=r"already has a run .*step-000001\)\n.*resume=True"):
        _trainer(untrained_model, tmp_path / "run").fit(speaker, ["a"])
    with pytest.raises(errors.CheckpointError, match="no run to resume"):
        _trainer(untrained_model, tmp_path / "nowhere").fit(speaker, ["a"], resume=True)
