"""APO: beam search over one text with textual gradients (ProTeGi, Pryzant et al., arXiv 2305.03495), under the names of
Agent Lightning 0.3's algorithm."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from agl.agents.resources import Dataset, PromptTemplate, SystemPrompt
from agl.errors import ConfigError, RolloutTimeoutError
from agl.trainer.run.config import require_positive
from agl_prompts.components import Component
from agl_prompts.reflection import Ask, chat, field_rule
from agl_prompts.search import Candidate, IndexedTask, PromptSearch, Scored, Search, Split

T_task = TypeVar("T_task")

CRITIQUE = """An assistant works with this text, called {name}:
```
{text}
```

Below is what happened when it worked on some tasks, and how each was scored.

{records}

What in the text, or missing from it, led to low scores? Name the causes, most important first, each with what the text
should say instead so that it holds for other tasks of this kind as well. Do not write the new text."""

EDIT = """An assistant works with this text, called {name}:
```
{text}
```

A critic has read what happened when it was used:
```
{critique}
```

Rewrite the text so that it answers the criticism. Keep what the critic does not question. Reply with the whole new text
within ``` lines."""


@dataclass(eq=False, repr=False)
class APO(PromptSearch, Generic[T_task]):
    """Better prompts by beam search; no model is trained.

    In each round every text in the beam is run on a few training tasks, one model criticises it for what happened, and
    another one rewrites it by the critique. Beam and new texts are compared on validation tasks, and the best one on
    all of these. Several texts are rewritten in turn.

    Attributes:
        async_openai_client: `openai.AsyncOpenAI`; asks both models.
        gradient_model: writes the critique.
        apply_edit_model: rewrites the text.
        diversity_temperature: of both.
        gradient_batch_size: training tasks per critique.
        val_batch_size: validation tasks per comparison.
        beam_width: texts that are kept after each round.
        branch_factor: new texts of each.
        beam_rounds: rounds.
        rollout_batch_timeout: seconds for the rollouts of a batch.
        run_initial_validation: whether the start is run on all validation tasks first. Without, the start is compared
            in the first round.
        held_out: as in `agl.GEPA`; None if there are none, then the result's score is of the tasks that chose it.

    Raises:
        ConfigError: a number below 1.
    """

    needs_held_out: ClassVar[bool] = False

    async_openai_client: Any = field(metadata={"recorded": False})
    _: KW_ONLY
    gradient_model: str = "gpt-5-mini"
    apply_edit_model: str = "gpt-4.1-mini"
    diversity_temperature: float = 1.0
    gradient_batch_size: int = 4
    val_batch_size: int = 16
    beam_width: int = 4
    branch_factor: int = 4
    beam_rounds: int = 3
    rollout_batch_timeout: float = 3600.0
    run_initial_validation: bool = True
    held_out: Dataset[Any] | Iterable[Any] | float | None = field(default=None, metadata={"recorded": False})
    _best: dict[str, PromptTemplate | SystemPrompt] = field(
        default_factory=dict, init=False, metadata={"recorded": False}
    )

    def __post_init__(self) -> None:
        names = ("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds")
        require_positive(**{name: getattr(self, name) for name in (*names, "rollout_batch_timeout")})
        if not hasattr(self.async_openai_client, "chat"):
            raise ConfigError(f"APO({self.async_openai_client!r})", hint="give it an openai.AsyncOpenAI()")

    def get_best_prompt(self) -> PromptTemplate | SystemPrompt:
        """The best text so far, also while the search runs; the first of several, of which `Result.prompts` has all.

        Raises:
            ConfigError: there is none yet.
        """
        if not self._best:
            raise ConfigError("there is no best prompt yet", hint="call it after fit()")
        return next(iter(self._best.values()))

    def planned(self, train: int, val: int, components: int) -> int:
        parents = 1
        children = 0
        total = val if self.run_initial_validation else 0
        for _ in range(self.beam_rounds):
            children = parents * self.branch_factor
            total += children * min(self.gradient_batch_size, train)
            total += (parents + children) * min(self.val_batch_size, val) + val
            parents = min(self.beam_width, parents + children)
        return total

    def settings(self) -> dict[str, Any]:
        names = ("gradient_model", "apply_edit_model", "diversity_temperature", "gradient_batch_size", "val_batch_size")
        names += ("beam_width", "branch_factor", "run_initial_validation")
        return {"algorithm": "APO", **{name: getattr(self, name) for name in names}}

    async def search(self, work: Search) -> Candidate:
        run = work.run
        rng = random.Random(work.run.seed)
        train = list(enumerate(run.train))
        val = list(enumerate(run.val))
        best = work.start
        best_score = float("-inf")
        self._found(work, best)
        if self.run_initial_validation:
            best_score = _means(await self._evaluate(work, [(best, val)], "val"))[0]
        beam: list[Candidate] = [best]
        for round_ in range(self.beam_rounds):
            if run.stop_reason is not None:
                break
            children = await self._children(work, round_, beam, train, rng)
            pool = [dict(texts) for texts in dict.fromkeys(tuple(c.items()) for c in (*beam, *children))]
            tasks = rng.sample(val, min(self.val_batch_size, len(val)))
            scores = _means(await self._evaluate(work, [(candidate, tasks) for candidate in pool], "val"))
            # Of equals the older one comes first.
            order = sorted(range(len(pool)), key=lambda i: -scores[i])
            beam = [pool[i] for i in order[: self.beam_width]]
            leader_score = scores[order[0]]
            if len(tasks) < len(val) and (beam[0] != best or best_score == float("-inf")):
                leader_score = _means(await self._evaluate(work, [(beam[0], val)], "val"))[0]
            if (beam[0] != best and leader_score > best_score) or best_score == float("-inf"):
                best = beam[0]
                best_score = leader_score
                self._found(work, best)
        return best

    async def _children(
        self, work: Search, round_: int, beam: Sequence[Candidate], train: Sequence[IndexedTask], rng: random.Random
    ) -> list[Candidate]:
        """New texts of each candidate in the beam, `branch_factor` of each, where the models wrote an allowed one."""
        n = min(self.gradient_batch_size, len(train))
        names = list(work.components)
        pairs = [(parent, rng.sample(train, n)) for parent in beam for _ in range(self.branch_factor)]
        scored = await self._evaluate(work, pairs, "train")
        written = await asyncio.gather(
            *(
                self._rewrite(work, f"{round_}/{i}", parent, rollouts, work.components[names[i % len(names)]])
                for i, ((parent, _), rollouts) in enumerate(zip(pairs, scored, strict=True))
            )
        )
        return [candidate for candidate in written if candidate is not None]

    async def _rewrite(
        self, work: Search, key: str, parent: Candidate, rollouts: Sequence[Scored], component: Component
    ) -> Candidate | None:
        reflections = work.reflections
        name = component.name
        assert reflections is not None
        shown = [
            f"# Task {i}\n" + "\n\n".join(f"## {heading}\n{text}" for heading, text in record.items())
            for i, record in enumerate(await work.feedback(rollouts, parent), 1)
        ]
        facts = {"name": name, "text": parent[name]}
        question = CRITIQUE.format(**facts, records="\n\n".join(shown))
        critique = await reflections.reply(f"{key}/critique", question, self._asks(self.gradient_model))
        prompt = EDIT.format(**facts, critique=critique or "") + field_rule(component)
        edit = self._asks(self.apply_edit_model)
        text = await reflections.text(f"{key}/edit", prompt, edit, component, parent[name])
        if text is None:
            return None
        child = {**parent, name: text}
        work.derive(child, parent)
        return child

    def _asks(self, model: str) -> Ask:
        return partial(chat, self.async_openai_client, model, temperature=self.diversity_temperature)

    async def _evaluate(
        self, work: Search, pairs: Sequence[tuple[Candidate, Sequence[IndexedTask]]], split: Split
    ) -> list[list[Scored]]:
        try:
            return await asyncio.wait_for(work.evaluate(pairs, split), self.rollout_batch_timeout)
        except TimeoutError as error:
            raise RolloutTimeoutError(
                f"the rollouts of a batch took longer than {self.rollout_batch_timeout:g} s",
                hint="raise rollout_batch_timeout, or lower Trainer(timeout=), the limit of one attempt",
            ) from error

    def _found(self, work: Search, best: Candidate) -> None:
        self._best = {name: component.with_text(best[name]) for name, component in work.components.items()}


def _means(scored: Sequence[Sequence[Scored]]) -> list[float]:
    return [sum(s.score for s in rollouts) / len(rollouts) for rollouts in scored]
