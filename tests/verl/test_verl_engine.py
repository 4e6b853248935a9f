"""`VerlEngine` on verl's own vLLM servers: the engines' suite."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_suite import CONTEXT, EngineSuite, suite_model, write_suite_model
from jobs import algorithm
from tiny_engine import VOCABULARY, tiny_tokenizer

from agl.trainer.engines.base import Sampling
from agl_verl.engine import VerlEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(cluster, tmp_path_factory, runner):
    """Servers with GPUs of their own, as verl starts them for `separate_async`."""
    import ray
    from verl.workers.rollout.llm_server import LLMServerManager

    from agl_verl.cluster import placement_groups, release_placement_groups
    from agl_verl.config.compose import compose

    model = write_suite_model(tmp_path_factory.mktemp("suite-model"))
    plan = algorithm(model, steps=1, max_prompt_tokens=CONTEXT - 56, max_response_tokens=56).plan
    rollout = "actor_rollout_ref.rollout"
    own = {f"{rollout}.nnodes": 1, f"{rollout}.n_gpus_per_node": 1, f"{rollout}.load_format": "auto"}
    before = placement_groups()
    manager = LLMServerManager.create(config=compose(plan, own))
    yield VerlEngine(manager.get_client(), CONTEXT, vocabulary=VOCABULARY, seeds=True)
    for server in manager.server_handles:
        ray.kill(server)
    release_placement_groups(before)


class Masked(torch.nn.Module):
    """A model that gives the ids from `n` on no chance."""

    def __init__(self, model: torch.nn.Module, n: int) -> None:
        super().__init__()
        self.model, self.n = model, n

    def forward(self, ids):
        out = self.model(ids)
        out.logits[..., self.n :] = -torch.inf
        return out


@pytest.mark.night
class TestVerl(EngineSuite):
    """What verl's client has no way to pass on is not there; what that is, is refused."""

    @pytest.fixture(scope="class")
    def model(self):
        """verl's servers mask the ids that the tokenizer does not have, which the learner does not."""
        return Masked(suite_model(), len(tiny_tokenizer()))

    test_top_logprobs_are_of_the_same_distribution = None
    test_what_is_streamed_is_the_answer = None

    def test_cancelling_ends_a_call_and_no_other(self, runner, engine):
        """Not streamed: verl's client tells an answer's tokens when it is whole."""
        super().test_cancelling_ends_a_call_and_no_other(runner, engine, False)

    def test_alternatives_are_refused(self, ask):
        from agl.errors import EngineError

        with pytest.raises(EngineError, match="report no alternatives"):
            ask([1, 2], Sampling(1, top_logprobs=2))

    def test_an_answer_comes_whole(self, ask):
        told: list[int] = []
        answer = ask([1, 2, 3], Sampling(5, seed=1), on_tokens=lambda ids, logprobs: told.extend(ids))
        assert told == answer.token_ids.tolist()
