"""The engines' conformance suite on the local engine, in this process and behind its own; on vLLM in tests/verl."""

from __future__ import annotations

import asyncio

import pytest
from device import DEVICE
from engine_suite import CONTEXT, EngineSuite, suite_model, write_suite_model
from tiny_engine import engine_for

from agl.trainer.engines.base import Completion
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.engine.engine import LocalEngine
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.local.protocol import Failed, Finished, Tokens


class Stepped:
    """A `LocalEngine`, stepped on this event loop for as long as it has work."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.max_context = engine, engine.max_context
        self._calls: dict = {}
        self._stepping: asyncio.Task | None = None

    async def generate(self, request, *, on_tokens=None) -> Completion:
        request_id = max(self._calls, default=0) + 1
        stream = on_tokens is not None
        self.engine.submit(request_id, request.prompt_ids, request.sampling, stream, request.policy or "policy")
        done = asyncio.get_running_loop().create_future()
        self._calls[request_id] = (done, on_tokens)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.ensure_future(self._step())
        try:
            return await done
        except asyncio.CancelledError:
            self.engine.abort(request_id)
            raise

    async def _step(self) -> None:
        while self.engine.has_work:
            for event in self.engine.step():
                done, on_tokens = self._calls[event.request_id]
                if isinstance(event, Tokens):
                    on_tokens(event.token_ids, event.logprobs, *([event.top] if event.top else ()))
                elif not done.done():
                    if isinstance(event, Failed):
                        done.set_exception(event.error)
                    elif isinstance(event, Finished):
                        done.set_result(event.completion)
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


class TestLocalEngine(EngineSuite):
    @pytest.fixture(scope="class")
    def engine(self):
        return Stepped(engine_for(suite_model(), max_context=CONTEXT))


class TestPolicyProcess(EngineSuite):
    @pytest.fixture(scope="class")
    def engine(self, runner, tmp_path_factory):
        directory = write_suite_model(tmp_path_factory.mktemp("suite-model"))
        spec = PolicySpec(
            str(directory),
            device=str(DEVICE),
            threads=1,
            max_context=CONTEXT,
            learner=LearnerConfig(autocast="float32"),
        )
        policy = runner.run(LocalPolicy.start(spec))
        yield policy
        runner.run(policy.close())
