"""An agent of each framework whose tool fills the context: whatever its framework raises, it is the policy's fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from learning_agents import LEARNERS, NAME, Learner
from scripted import Asked, ScriptedEngine, ScriptedRollouts, quick_tokenizer, tool_call

import agl
from agl.mdp.faults import Fault
from agl.mdp.types import Call

pytestmark = pytest.mark.full
CALL = tool_call("1 + 1 + 1")
COPES = "smolagents"
"""Where the prompt for its last answer is refused, it answers with the error's text."""


def run(agent: agl.Agent, directory: Path) -> tuple[Call, Fault | None, float | None]:
    """Run an agent until its second prompt is refused: its first call, what the policy caused, the reward."""

    def script(asked: Asked) -> str:
        # The first answer fits; with what its tool returns the next prompt does not.
        engine.max_context = asked.prompt_ids.size + len(engine.encode(CALL)) + 3
        return CALL

    algorithm = ScriptedRollouts([])
    engine = algorithm.engine = ScriptedEngine(quick_tokenizer(), script)
    trainer = agl.Trainer(algorithm, agents=NAME, directory=directory, progress=False)  # type: ignore[arg-type]
    trainer.fit(agent, [{"question": "What is 2 + 2?"}])
    [[answered, *refused]], [spans], [reward] = algorithm.calls, algorithm.spans, algorithm.rewards
    assert refused  # crewai's summary of the conversation is, too
    assert all((call.error or "").startswith("context_length_exceeded: the prompt has") for call in refused)
    return answered, Fault.of_spans(spans), reward


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.name)
def test_a_full_context_is_the_policys_fault(learner: Learner, tmp_path: Path) -> None:
    if not learner.installed:
        pytest.skip(f"{learner.name} is not installed")
    answered, fault, reward = run(agl.wrap(learner.build(), reward=lambda task, output: 1.0), tmp_path)
    if learner.name == COPES:
        assert (fault, reward) == (None, 1.0)
        return
    assert fault is not None
    assert (fault.cause, fault.call_id, fault.agent, reward) == ("context", answered.id, answered.agent, 0.0)


TALKS_ON = """
import json, sys, openai
client = openai.OpenAI(max_retries=0)
messages = [{"role": "user", "content": json.load(sys.stdin)["question"]}]
while True:
    said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
"""


def test_and_of_a_program_in_any_language(tmp_path: Path) -> None:
    agent = agl.CommandAgent([sys.executable, "-c", TALKS_ON], reward=lambda task, output: 1.0, name=NAME)
    answered, fault, reward = run(agent, tmp_path)
    assert fault is not None
    assert (fault.cause, fault.call_id, reward) == ("context", answered.id, 0.0)
