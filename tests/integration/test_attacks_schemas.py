"""Schemas that take minutes and gigabytes are refused, and delay nobody but who sends them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from scripted import TOOLS, ScriptedEngine, serving
from tiny_engine import VOCABULARY, engine_for, prompts, tiny_model, tiny_tokenizer
from tiny_tokenizers import template_tokenizer

pytest.importorskip("llguidance")

from agl.errors import ConfigError
from agl.mdp.sequence import TrainingRow, merge
from agl.mdp.types import Call, Trajectory, Transition
from agl.trainer.engines.base import Completion, Request, Sampling, json_grammar
from agl.trainer.local import schema_check
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.grammar import Grammars, HeldAnswer
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.local.protocol import Failed, Finished
from agl.trainer.local.tokenizer import load_tokenizer

STOP = 0
COMBINED = {"allOf": [{"type": "string", "pattern": f".*[ab]{{{i}}}c.*"} for i in range(1, 30)]}
MULTIPLE = {"type": "integer", "multipleOf": 999983}
NESTED = {"type": "string", "pattern": "^((.{1,40}){1,40}[^a]{1,40}){1,40}$"}
"""Compiles at once; answers within it reach a limit."""
FINE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def within(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"fine": {"type": "string"}, "bad": schema}, "required": ["fine", "bad"]}


def grammar(schema: dict[str, Any]) -> str:
    return json_grammar([("", schema, "")], [STOP])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "why"),
    [(COMBINED, "takes more than"), (MULTIPLE, "takes more than"), (NESTED, "cannot be held to this schema: .*lexer")],
)
def test_a_schema_that_takes_too_much_is_refused_with_its_place(
    schema: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(schema_check, "SECONDS", 0.3)
    grammars = Grammars(tiny_tokenizer(), VOCABULARY)
    with pytest.raises(ConfigError, match=why) as refused:
        asyncio.run(grammars.admitted(grammar(within(schema)), "attacker"))
    assert refused.value.where["form"] == 0
    assert refused.value.where["schema"].startswith("$.properties.bad")
    # It is remembered: no process compiles it again.
    grammars._check._try = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=why):
        asyncio.run(grammars.admitted(grammar(within(schema)), "another"))


@pytest.mark.slow
def test_a_row_with_a_schema_that_no_gateway_has_admitted_is_refused_before_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
):
    """Rows may come from any store."""
    monkeypatch.setattr(schema_check, "SECONDS", 0.3)
    ids = np.arange(1, 9, dtype=np.int32)
    logprobs = np.zeros(4, np.float32)

    def row(schema: dict[str, Any]) -> TrainingRow:
        call = Call(
            "c",
            "ro",
            1,
            0,
            "a",
            "policy",
            0,
            ids[:4],
            ids[4:],
            logprobs,
            request={"used": {"grammar": grammar(schema)}},
        )
        trajectory = Trajectory("ro", 1, "policy", "g", (Transition(call),))
        [made] = merge(trajectory, {"c": 1.0})
        return made

    grammars = Grammars(tiny_tokenizer(), VOCABULARY)
    compiled: list[str] = []
    monkeypatch.setattr(grammars, "_compile", lambda text: compiled.append(text) or Grammars._compile(grammars, text))
    # One that compiles at once: without the try, nothing would be refused.
    with pytest.raises(ConfigError, match="cannot be held to this schema"):
        grammars.of_rows([row(within(NESTED))], [np.arange(8)])
    assert not compiled
    grammars.of_rows([row({"type": "string"})], [np.arange(8)])
    grammars.of_rows([row({"type": "string"})], [np.arange(8)])
    assert len(compiled) == 1, "and what is fine is compiled once"


def test_what_is_admitted_is_compiled_once_for_all_that_request_it():
    grammars = Grammars(tiny_tokenizer(), VOCABULARY)

    async def admitted() -> list[Any]:
        return await asyncio.gather(*(grammars.admitted(grammar(FINE), f"attempt-{i % 3}") for i in range(9)))

    assert len({id(one) for one in asyncio.run(admitted())}) <= 3
    again = asyncio.run(grammars.admitted(grammar(FINE), "attempt-9"))
    assert again is asyncio.run(grammars.admitted(grammar(FINE), "attempt-10"))
    with pytest.raises(ConfigError, match="cannot be held to this schema"):
        asyncio.run(grammars.admitted(grammar({"type": "nothing"}), "attempt-1"))


class _Stuck(HeldAnswer):
    """An answer of which it takes until `free` to know what may come after some tokens."""

    free = threading.Event()
    computed = 0

    def compute(self, bits_NW: Any, row: int) -> None:
        _Stuck.computed += 1
        if _Stuck.computed > 2:
            assert _Stuck.free.wait(60)
        super().compute(bits_NW, row)
        self.seconds = 60.0  # the next one is computed on another thread


@pytest.mark.parametrize("beside", [3, 0])
def test_a_row_whose_mask_takes_long_waits_and_the_others_do_not(beside: int, monkeypatch: pytest.MonkeyPatch):
    held = Sampling(24, seed=5, grammar=grammar(FINE), stop_token_ids=(STOP,), temperature=1.0)
    requested = prompts(beside + 1)
    alone = engine_for(tiny_model())
    alone.submit(0, requested[0], held)
    wanted: Any = None
    while wanted is None:
        wanted = next((e.completion for e in alone.step() if isinstance(e, Finished)), None)
    assert wanted.token_ids.size > 6

    engine = engine_for(tiny_model())
    compiled = engine.grammars.compiled(held.grammar)
    monkeypatch.setattr(_Stuck, "free", threading.Event())
    monkeypatch.setattr(_Stuck, "computed", 0)
    engine.submit(0, requested[0], held, grammar=compiled)
    row = engine._waiting[0]
    row.answer = _Stuck(row.answer.matcher, compiled, row.answer.bits_W)
    for i in range(1, beside + 1):
        sampling = replace(held, seed=i) if i == 1 else Sampling(30, seed=i)
        engine.submit(i, requested[i], sampling)
    done: dict[int, Any] = {}
    for _ in range(80):
        for event in engine.step():
            assert not isinstance(event, Failed), event.error
            done[event.request_id] = event.completion
    assert {*done} == {*range(1, beside + 1)}, "the others were answered, all of them"
    assert engine.has_work
    _Stuck.free.set()
    while 0 not in done:
        done |= {event.request_id: event.completion for event in engine.step() if isinstance(event, Finished)}
    assert done[0].token_ids.tolist() == wanted.token_ids.tolist()
    assert abs(done[0].logprobs - wanted.logprobs).max() < 1e-4


def test_a_limit_in_mid_answer_is_the_schemas_fault():
    engine = engine_for(tiny_model())
    engine.submit(0, prompts(1)[0], Sampling(400, seed=1, grammar=grammar(NESTED), stop_token_ids=(STOP,)))
    ended: list[Any] = []
    while engine.has_work:
        ended += engine.step()
    assert isinstance(ended[0], Failed)
    assert isinstance(ended[0].error, ConfigError), "400: asking again does not help"


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "t"}}])
def test_a_tool_whose_schema_takes_too_much_is_named(choice: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schema_check, "SECONDS", 0.1)
    tokenizer = template_tokenizer("qwen3")

    class Engine(ScriptedEngine):
        grammars = True

        async def generate(self, request: Request, *, on_tokens: Any = None) -> Completion:
            await held.admitted(request.sampling.grammar, request.owner)
            return await super().generate(request, on_tokens=on_tokens)

    async def attack() -> None:
        tool: Any = {"type": "function", "function": {"name": "t", "strict": True, "parameters": within(MULTIPLE)}}
        async with serving(Engine(tokenizer, ["x"]), tokenizer) as rig:
            attempt = await rig.attempt()
            with pytest.raises(openai.BadRequestError, match=r"tool 't', at \$\.properties\.bad") as refused:
                await attempt.chat(tools=[*TOOLS, tool], tool_choice=choice)
            assert refused.value.param == "tools"

    held = Grammars(tokenizer, len(tokenizer))
    asyncio.run(attack())


@pytest.mark.slow
def test_others_are_answered_while_a_schema_is_tried(untrained_model: Path):
    """Through the gateway and the policy's process."""

    async def attack() -> None:
        spec = PolicySpec(str(untrained_model), device="cpu", threads=1, learner=LearnerConfig(learning_rate=1e-2))
        policy = await LocalPolicy.start(spec)
        try:
            async with serving(policy, load_tokenizer(str(untrained_model))) as rig:
                attacker, other = await rig.attempt(), await rig.attempt()
                form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": within(MULTIPLE)}}
                fine: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": FINE}}
                await other.chat(max_tokens=4, response_format=fine)
                attacks = asyncio.gather(
                    *(attacker.chat(max_tokens=4, response_format=form) for _ in range(3)), return_exceptions=True
                )
                answered = 0
                while not attacks.done():
                    await other.chat(max_tokens=4, response_format=fine)
                    answered += 1
                assert answered > 3
                for refused in await attacks:
                    assert isinstance(refused, openai.BadRequestError)
                    assert "response_format, at $.properties.bad" in str(refused)
                assert (await attacker.chat(max_tokens=4)).choices, "the policy lives"
        finally:
            await policy.close()

    asyncio.run(asyncio.wait_for(attack(), 300))
