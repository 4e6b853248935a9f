"""`capture_content=False`: no text of the program's is in the store, and of an error the type and its place alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from scripted import ScriptedRollouts
from store_server import served

import agl
from agl import semconv, tracing
from agl.errors import AglError, outlined
from agl.mdp.selection import select
from agl.mdp.spans import Event, Span
from agl.tracing import otlp
from agl.trainer.store.location import read_store

SECRET = "patient 7"


class Visit(pydantic.BaseModel):
    """What an agent reads out of an answer."""

    patient: int


async def ask(llm: agl.LLM, text: str, **options: Any) -> None:
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": text}]
        await client.chat.completions.create(model=llm.model, messages=messages, **options)


def looks_up() -> None:
    raise LookupError(f"no {SECRET}")


def validates() -> None:
    Visit.model_validate({"patient": SECRET})


def chains() -> None:
    try:
        looks_up()
    except LookupError as error:
        raise RuntimeError(f"while {SECRET} was read") from error


def groups() -> None:
    raise ExceptionGroup(SECRET, [ValueError(SECRET)])


def emits() -> None:
    agl.emit_message(SECRET)
    agl.emit_object({"about": SECRET})
    agl.emit_exception(LookupError(SECRET))
    with pytest.raises(LookupError), agl.operation("reading"):
        looks_up()


def emits_by_03s_names() -> None:
    import agl.compat as al

    @al.operation
    def reading(about: str) -> str:
        return f"read {about}"

    al.emit_message(SECRET)
    al.emit_object({"about": SECRET})
    al.emit_exception(LookupError(SECRET))
    reading(SECRET)


def stored(
    directory: Path, body: Callable[[], None], *, content: bool, reward: Any = 1.0, error_reward: float | None = None
) -> bytes:
    """The files of a run whose agent asks its policy, and then runs `body`."""

    async def agent(task: Any, llm: agl.LLM) -> Any:
        await ask(llm, f"about {SECRET}")
        body()
        return reward() if callable(reward) else reward

    wrapped = agl.rollout(agent)
    wrapped.error_reward = error_reward
    trainer = agl.Trainer(
        ScriptedRollouts(["an answer"] * 4),
        directory=directory,
        progress=False,
        max_attempts=1,
        capture_content=content,
    )
    with contextlib.suppress(AglError):
        trainer.fit(wrapped, [{"n": 1}])
    return b"".join(p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file())


@pytest.mark.parametrize("body", [looks_up, validates, chains, groups, emits, emits_by_03s_names])
@pytest.mark.parametrize("error_reward", [None, 0.0], ids=["fails", "error_reward"])
def test_the_store_has_no_text(body: Callable[[], None], error_reward: float | None, tmp_path: Path) -> None:
    assert SECRET.encode() in stored(tmp_path / "on", body, content=True, error_reward=error_reward)
    files = stored(tmp_path / "off", body, content=False, error_reward=error_reward)
    assert SECRET.encode() not in files
    if body is looks_up and error_reward is None:
        assert b"in looks_up\nLookupError" in files


def test_neither_has_it_what_a_reward_function_raises_or_returns(tmp_path: Path) -> None:
    def raises() -> float:
        raise KeyError(SECRET)

    for i, reward in enumerate([raises, lambda: SECRET]):
        assert SECRET.encode() not in stored(tmp_path / str(i), lambda: None, content=False, reward=reward)


def test_neither_has_it_what_other_tracers_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        semconv.INPUT_MESSAGES,
        semconv.TOOL_CALL_RESULT,
        "input.value",
        "logfire.msg",
        "gen_ai.prompt.0.content",
        "my",
    ]
    score = {semconv.EVALUATION_NAME: "right", semconv.EVALUATION_SCORE: 1.0, semconv.EVALUATION_EXPLANATION: SECRET}
    facts = {semconv.OPERATION_NAME: "chat", semconv.REQUEST_MODEL: "m", semconv.INPUT_TOKENS: 7, "gen_ai.usage.x": 3}
    span = Span(
        "a" * 32, "b" * 16, None, "", 0, "chat m", 1.0, 2.0, "error", SECRET,
        facts | dict.fromkeys(texts, SECRET) | {semconv.ERROR_TYPE: "LookupError", "patient": 7},
        [Event("exception", 1.0, {"exception.message": SECRET}), Event(semconv.EVALUATION, 1.0, score)],
    )  # fmt: skip
    for content in ("1", "0"):
        monkeypatch.setenv("AGL_CAPTURE_CONTENT", content)
        folder = tmp_path / content
        folder.mkdir()
        with served(folder) as server:
            request = otlp.encode([span])
            assert httpx.post(f"{server.url}/v1/traces", json=request, trust_env=False).json() == {}
            files = b"".join(p.read_bytes() for p in sorted(folder.iterdir()))
        assert (SECRET.encode() in files) is (content == "1")
        chat, reward = sorted(stored_trace(folder), key=lambda each: each.operation)
    assert dict(chat.attributes) == facts | {semconv.ERROR_TYPE: "LookupError"}
    assert (chat.status, chat.status_message) == ("error", "LookupError")
    assert reward.attributes[semconv.REWARD_VALUE] == 1.0


def stored_trace(folder: Path) -> Any:
    """The spans of the only trace in a served store's folder."""

    async def read(store: Any) -> Any:
        [rollout] = await store.query_rollouts()
        return await store.query_spans(rollout.rollout_id)

    return read_store(str(folder / "store.db"), read)


def test_neither_has_it_what_the_gateway_refuses(tmp_path: Path) -> None:
    async def agent(task: Any, llm: agl.LLM) -> float:
        with pytest.raises(openai.APIStatusError):
            await ask(llm, "x", tool_choice={"type": "function", "function": {"name": SECRET}})
        await ask(llm, "y")
        return 1.0

    algorithm = ScriptedRollouts(["an answer"])
    trainer = agl.Trainer(algorithm, directory=tmp_path, progress=False, capture_content=False)
    trainer.fit(agl.rollout(agent), [{"n": 1}])
    [(refused, _)] = algorithm.calls
    assert refused.error
    assert SECRET not in refused.error


def test_an_outline_has_the_places_and_types_of_the_causes() -> None:
    with pytest.raises(RuntimeError) as caught:
        chains()
    text = outlined(caught.value)
    assert SECRET not in text
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == ["LookupError", "RuntimeError"]
    assert f'File "{__file__}"' in text


def test_a_tool_s_description_is_left_out_as_its_definition_is() -> None:
    described = {semconv.TOOL_DESCRIPTION: SECRET, semconv.AGENT_DESCRIPTION: SECRET, semconv.TOOL_NAME: "look_up"}
    for content in (True, False):
        rollout = tracing.RolloutContext("ro", 1, "nurse", select(None), capture_content=content)
        with tracing.running(rollout), tracing.span(semconv.EXECUTE_TOOL, "look_up", attributes=described):
            pass
        [tool] = [span for span in rollout.spans if span.operation == semconv.EXECUTE_TOOL]
        assert tool.attributes[semconv.TOOL_NAME] == "look_up"
        assert (SECRET in str(tool)) is content
