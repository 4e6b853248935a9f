"""GEPA: evolution of prompts on a Pareto front over tasks, by reflection on what happened (Agrawal et al., arXiv
2507.19457). The search itself is the `gepa` package's; it is synchronous and runs in a separate thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agl.agents.resources import LLM, Dataset
from agl.errors import ConfigError
from agl.extras import require
from agl.options import checked_options
from agl.trainer.run.config import require_positive
from agl_prompts.reflection import Ask, asker, field_rule
from agl_prompts.search import Candidate, IndexedTask, PromptSearch, Scored, Search, Split

T = TypeVar("T")

_Item = tuple[Split, IndexedTask]
"""What the `gepa` package takes for a task."""


@checked_options
@dataclass(frozen=True, slots=True, kw_only=True)
class GEPA(PromptSearch):
    """Better prompts by reflection on rollouts; no model is trained.

    A few training tasks are run with a candidate, another model reads what happened and rewrites one of its texts, and
    what got better on these tasks is measured on all validation tasks. `Result.prompts` has the best texts.

    Attributes:
        reflection: the model that rewrites, `agl.LLM(endpoint, model)`, or a function (sync or async) of a prompt that
            returns a text; the text may be within ``` lines.
        budget: rollouts to spend on training and validation tasks; it is checked before each new candidate, so the last
            one may exceed it. At least 15 times the validation tasks is reasonable.
        held_out: tasks that are touched at the end alone, on which start and result are compared (two rollouts each,
            which are not in the budget); or a share of the training tasks to put aside for that.
        batch_size: training tasks per reflection.
        perfect_score: the reward with which nothing is left to improve; None if there is none.
        merge: whether candidates are also combined, each text from the better one.
    """

    reflection: LLM | Callable[[str], Any]
    budget: int
    held_out: Dataset[Any] | Iterable[Any] | float | None = field(default=None, metadata={"recorded": False})
    batch_size: int = 3
    perfect_score: float | None = 1.0
    merge: bool = False

    def __post_init__(self) -> None:
        require_positive(budget=self.budget, batch_size=self.batch_size)
        asker(self.reflection)
        require("agl.GEPA", "prompts")

    def planned(self, train: int, val: int, components: int) -> int:
        if self.budget < val + 2 * self.batch_size:
            raise ConfigError(
                f"budget={self.budget} does not suffice for one new candidate: {val} validation tasks, and twice "
                f"{self.batch_size} training tasks",
                hint=f"about {15 * val} is reasonable: 15 times the validation tasks",
            )
        return self.budget

    def settings(self) -> dict[str, Any]:
        return {"algorithm": "GEPA", "batch_size": self.batch_size, "merge": self.merge}

    async def search(self, work: Search) -> Candidate:
        from gepa.api import optimize

        run, bridge = work.run, _Bridge(asyncio.get_running_loop())
        train: list[_Item] = [("train", task) for task in enumerate(run.train)]
        val: list[_Item] = [("val", task) for task in enumerate(run.val)]

        def is_done(gepa_state: Any) -> bool:
            best = max(gepa_state.program_full_scores_val_set)
            return run.stop_reason is not None or (self.perfect_score is not None and best >= self.perfect_score)

        adapter = _Adapter(work, bridge, asker(self.reflection))

        def evolve() -> Candidate:
            result = optimize(
                seed_candidate=dict(work.start),
                trainset=train,
                valset=val,
                adapter=adapter,  # type: ignore[arg-type]
                custom_candidate_proposer=adapter.propose,
                reflection_minibatch_size=min(self.batch_size, len(train)),
                skip_perfect_score=self.perfect_score is not None,
                perfect_score=self.perfect_score if self.perfect_score is not None else 1.0,
                use_merge=self.merge,
                max_metric_calls=self.budget,
                stop_callbacks=is_done,
                logger=_Silent(),
                track_best_outputs=False,
                seed=run.seed,
            )
            best = result.best_candidate
            assert isinstance(best, Mapping)
            return best

        return await bridge.run(evolve)


class _Adapter:
    """agl's rollouts for the `gepa` package, whose `GEPAAdapter` this is."""

    propose_new_texts = None

    def __init__(self, work: Search, bridge: _Bridge, ask: Ask) -> None:
        self._work = work
        self._bridge = bridge
        self._ask = ask
        self._proposals = 0

    def evaluate(self, batch: Sequence[_Item], candidate: Candidate, capture_traces: bool = False) -> Any:
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: Sequence[tuple[Candidate, Sequence[_Item]]]) -> list[Any]:
        from gepa.core.adapter import EvaluationBatch

        pairs = [(candidate, [task for _, task in batch]) for candidate, batch in items]
        evaluated = self._bridge.call(self._work.evaluate(pairs, items[0][1][0][0]))
        return [
            EvaluationBatch(
                outputs=[None] * len(scored),
                scores=[s.score for s in scored],
                trajectories=scored,
                objective_scores=[dict(s.rewards) for s in scored],
            )
            for scored in evaluated
        ]

    def make_reflective_dataset(
        self, candidate: Candidate, eval_batch: Any, components_to_update: Sequence[str]
    ) -> dict[str, list[dict[str, str]]]:
        scored: Sequence[Scored] = eval_batch.trajectories
        records = self._bridge.call(self._work.feedback(scored, candidate))
        return dict.fromkeys(components_to_update, records)

    def propose(
        self, candidate: Candidate, reflective_dataset: Mapping[str, Sequence[Any]], components_to_update: Sequence[str]
    ) -> dict[str, str]:
        """New texts for some components; without those for which reflection gave none that is allowed."""
        from gepa.strategies.instruction_proposal import InstructionProposalSignature as Proposal

        texts = {}
        reflections = self._work.reflections
        assert reflections is not None
        self._proposals += 1
        for name in components_to_update:
            component = self._work.components[name]
            prompt = Proposal.prompt_renderer(
                {
                    "current_instruction_doc": candidate[name],
                    "dataset_with_feedback": reflective_dataset[name],
                    "prompt_template": Proposal.default_prompt_template + field_rule(component),
                }
            )
            key = f"{self._proposals}/{name}"
            text = self._bridge.call(reflections.text(key, str(prompt), self._ask, component, candidate[name]))
            if text is not None:
                texts[name] = text
        self._work.derive({**candidate, **texts}, candidate)
        return texts


class _Silent:
    """Takes what the `gepa` package would print."""

    def log(self, message: str) -> None:
        pass


class _Ended(BaseException):
    """Carries an error, or the end of the run, through code that catches every `Exception`."""


class _Bridge:
    """Lets code in a thread wait for coroutines on the run's loop, and ends with the run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: Any = None
        self._stopped = False

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in a thread; cancelled, the thread ends before this does."""

        def work() -> tuple[T | None, BaseException | None]:
            try:
                return function(), None
            except _Ended as ended:
                return None, ended.__cause__
            except BaseException as error:
                return None, error

        thread = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            result, error = await asyncio.shield(thread)
        except asyncio.CancelledError:
            self._stopped = True
            if self._waiting is not None:
                self._waiting.cancel()
            await asyncio.wait([thread])
            raise
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, in the thread."""
        waiting = self._waiting = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if self._stopped:
            waiting.cancel()
        try:
            return waiting.result()
        except BaseException as error:
            raise _Ended from error
