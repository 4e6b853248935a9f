"""An agent of each framework whose tool fills the context: whatever its framework raises, it is the policy's fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_agents import LEARNERS, NAME, Learner
from scripted import Asked, ScriptedEngine, ScriptedRollouts, quick_tokenizer, tool_call

import agl
from agl.mdp.faults import Fault

pytestmark = pytest.mark.full
CALL = tool_call("1 + 1 + 1")
COPES = "smolagents"
"""Where the prompt for its last answer is refused, it answers with the error's text."""


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.name)
def test_a_full_context_is_the_policys_fault(learner: Learner, tmp_path: Path) -> None:
    if not learner.installed:
        pytest.skip(f"{learner.name} is not installed")

    def script(asked: Asked) -> str:
        # The first answer fits; with what its tool returns the next prompt does not.
        engine.max_context = asked.prompt_ids.size + len(engine.encode(CALL)) + 3
        return CALL

    algorithm = ScriptedRollouts([])
    engine = algorithm.engine = ScriptedEngine(quick_tokenizer(), script)
    trainer = agl.Trainer(algorithm, agents=NAME, directory=tmp_path, progress=False)  # type: ignore[arg-type]
    trainer.fit(agl.wrap(learner.build(), reward=lambda task, output: 1.0), [{"question": "What is 2 + 2?"}])
    [[answered, refused]], [spans] = algorithm.calls, algorithm.spans
    assert (refused.error or "").startswith("context_length_exceeded: the prompt has")
    fault = Fault.of_spans(spans)
    if learner.name == COPES:
        assert (fault, algorithm.rewards) == (None, [1.0])
        return
    assert fault is not None
    assert (fault.cause, fault.call_id, fault.agent) == ("context", answered.id, answered.agent)
    assert algorithm.rewards == [0.0]
