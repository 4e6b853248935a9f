"""The training loop. What a step does with its rollouts is the algorithm's; everything else stands here.

Invariant: a checkpoint holds the weights of a completed step, and what was served is what was trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agl.errors import NoTrainableDataError, StalePolicyError
from agl.mdp.sequence import TrainingRow
from agl.trainer.algorithms.ledger import Ledger
from agl.trainer.algorithms.overlap import overlap_of
from agl.trainer.algorithms.source import Rows, Sample, Source
from agl.trainer.algorithms.trained_calls import facts, note_rates, note_shortened, record
from agl.trainer.algorithms.training import StepFunctions, Training
from agl.trainer.http.aio import finish
from agl.trainer.local.agreement import TOLERANCE
from agl.trainer.objectives.advantages import StepAdvantages
from agl.trainer.policies.policies import Policies
from agl.trainer.run.machine import Machine
from agl.trainer.run.results import measurement, require_tasks
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.runners.protocol import RolloutResult

PROBE_TOKENS = 64


async def train(run: Run, algorithm: StepFunctions) -> None:
    """Load, restore, then for each step: rollouts, worth, rows, update, publish, record, validate, save.

    However it ends, the last step whose update was completed is saved; a cancellation waits for the update. Where that
    came before the step was recorded, the resumed run does what is left of the step: its validation and its record. A
    callback may end the run after a step, which is saved.

    Raises:
        AglError: what went wrong, where, and what to do.
    """
    source = await algorithm.source(run)
    identity = algorithm.identity(run, source.steps)
    async with algorithm.loaded(run, source) as training:
        await algorithm.begin(training)
        ledger = await Ledger.opened(training, identity)
        await begin(training, ledger.done)
        overlap = overlap_of(training, ledger.groups, ledger.done)
        machine = Machine()
        unserved: Rows = {}
        try:
            await complete_recorded(training, ledger)
            for step in range(ledger.done, source.steps):
                if run.stop_reason is not None:
                    break
                began = time.monotonic()
                sample, worth = await overlap.rollouts(step)
                learn_spreads(training, sample)
                overlap.begin_next(step + 1)
                # Each policy learns from its own calls alone, and every sampled token is in one row.
                rows = await algorithm.rows(training, worth, step)
                due = worth_an_update(training, rows, step)
                unserved = {**unserved, **due}
                phases = {"sampling": sample.seconds}
                async with contextlib.AsyncExitStack() as held:
                    if due:
                        await overlap.before_update(held)
                    entry = await finish(
                        learn(training, ledger, sample, worth, rows, due, step, phases),
                        lambda: run.progress.note("stopping: the update of this step is finished and saved first"),
                    )
                    if due:
                        await overlap.before_publishing(held)
                    if source.sampled or validates_after(training, step + 1) or step + 1 == source.steps:
                        with timed(phases, "publishing"):
                            await publish(training.policies, unserved, step)
                        unserved = {}
                entry["seconds"] = time.monotonic() - began
                entry |= machine.since()
                if validates_after(training, step + 1):
                    with timed(phases, "validating"):
                        entry |= await validate(training, step + 1)
                entry |= {f"seconds/{phase}": seconds for phase, seconds in phases.items()}
                await ledger.record(entry)
                if ledger.saves_after(step + 1):
                    await ledger.save(step + 1)
        except asyncio.CancelledError:
            if await ledger.save_completed():
                await overlap.settle()
            raise
        except Exception as error:
            await ledger.save_despite(error)
            raise
        finally:
            await overlap.stop()
        await end(training)


async def begin(training: Training, done: int) -> None:
    """Start the workers, record with which versions the run begins, and validate these where nothing is trained yet."""
    run = training.run
    policies = training.policies
    note_rates(run, policies)
    if run.train or run.val:
        await training.start()
    await run.begin(training.source.steps, done)
    for name, policy in policies:
        await run.store.add_policy_version(run.run_id, name, policy.version, done)
    if done == 0 and training.algorithm.val_before_train and run.val and not run.history:
        await run.record({"step": 0, **await validate(training, 0)})


async def end(training: Training) -> None:
    """Save the policies of a run that has made its steps, and check that all that was to be trained was.

    Raises:
        NoTrainableDataError: a policy was never updated.
        NoAgentMatchedError: a name of `agents=` is nobody's.
    """
    run = training.run
    run.policy_paths = await training.policies.save_models(run.directory)
    _require_updates(run, training.policies)
    if run.stop_reason is None:
        training.workplace.require_agents()


async def complete_recorded(training: Training, ledger: Ledger) -> None:
    """Do what is left of a step that was saved before it was recorded: its validation and its record."""
    if ledger.unrecorded is None:
        return
    entry = dict(ledger.unrecorded)
    if validates_after(training, ledger.done):
        entry |= await validate(training, ledger.done)
    ledger.unsaved = ledger.done
    await ledger.record(entry)
    await ledger.save(ledger.done)


def validates_after(training: Training, step: int) -> bool:
    """Whether there is a validation after `step` steps."""
    last = step == training.source.steps
    return bool(training.run.val) and (last or step % training.algorithm.val_every == 0)


def learn_spreads(training: Training, sample: Sample) -> None:
    """Tell the batches the returns of the sample's tasks, by which the next ones are drawn."""
    ended = ((r.rollout, r.attempt_trajectory) for r in sample.results)
    training.source.batches.learn((r.metadata["task_index"], t.reward or 0.0) for r, t in ended if t is not None)


def worth_an_update(training: Training, rows: Rows, step: int) -> Rows:
    """The rows of the policies that would change by them; says so where there are none."""
    due = {name: r for name, r in rows.items() if training.algorithm.learns(r)}
    if not due and training.source.sampled:
        training.run.progress.note(f"step {step + 1}: no update: {training.algorithm.why_flat}")
    return due


async def learn(
    training: Training,
    ledger: Ledger,
    sample: Sample,
    worth: StepAdvantages,
    rows: Rows,
    due: Rows,
    step: int,
    phases: dict[str, float],
) -> dict[str, Any]:
    """The update on the rows that are `due`, and what the store keeps of it; returns the step's entry so far."""
    run = training.run
    policies = training.policies
    ledger.updating()
    with timed(phases, "learning"):
        metrics = await update(policies, due, worth)
    note_shortened(run, metrics, step)
    await record(run, policies, worth.calls, rows, metrics, step)
    entry = {"step": step + 1, **facts(sample, worth, policies, rows, metrics, training.algorithm.learns)}
    entry["seconds"] = sum(phases.values())
    ledger.completed(step + 1, entry)
    return entry


@contextlib.contextmanager
def timed(phases: dict[str, float], phase: str) -> Iterator[None]:
    """Keep the seconds that the block takes, by the name of its phase."""
    began = time.monotonic()
    try:
        yield
    finally:
        phases[phase] = time.monotonic() - began


async def update(policies: Policies, rows: Rows, worth: StepAdvantages) -> dict[str, Mapping[str, float]]:
    """Train each policy on its rows; the learner's metrics by policy.

    Raises:
        TrainingError: an update that is not finite.
    """

    def pairs(rows: Seq[TrainingRow]) -> list[tuple[str, str]]:
        trained = {row.rollout_id for row in rows if row.n_actions}
        return [pair for pair in worth.pairs.items() if trained.issuperset(pair)]

    metrics = await asyncio.gather(*(policies[name].train(r, pairs=pairs(r)) for name, r in rows.items()))
    return dict(zip(rows, metrics, strict=True))


async def publish(policies: Policies, trained: Rows, step: int) -> None:
    """Serve the weights of the policies that were trained on these rows. Raises as `serve`."""
    await asyncio.gather(*(serve(policies, name, rows, step) for name, rows in trained.items()))


async def serve(policies: Policies, name: str, rows: Seq[TrainingRow], step: int) -> None:
    """Serve the weights that were trained on these rows, and prove it: learner and engine agree on the log-probs of one
    fixed sequence.

    Raises:
        StalePolicyError: they do not.
    """
    policy = policies[name]
    await policy.publish()
    row = next(r for r in rows if len(r) > 1)
    path = row.token_ids if row.is_chain else row.token_ids[row.positions == np.arange(len(row))]
    ids = path[:PROBE_TOKENS]
    trained = await policy.logprobs(ids)
    served = await policy.engine_logprobs(ids)
    difference = float(np.max(np.abs(trained - served))) if ids.size > 1 else 0.0
    if not difference <= TOLERANCE[policy.info.dtype]:
        raise StalePolicyError(
            f"after the update of step {step + 1} the engine's log-probs differ from the learner's by {difference:.3g}",
            hint="the engine does not serve the policy just trained; please report this with your model's config",
            step=step + 1,
            policy=name,
            policy_version=policy.version,
        )


async def validate(training: Training, step: int) -> dict[str, Any]:
    """The rewards on the validation tasks, after `step` steps."""
    run = training.run
    metadata = training.algorithm.metadata(training.run)
    results = await training.workplace.rollouts(list(enumerate(run.val)), mode="val", step=step, metadata=metadata)
    return measurement(results, "val", f"the validation after step {step}")


def _require_updates(run: Run, policies: Policies) -> None:
    never = [name for name, version in policies.versions.items() if version == 0]
    if never and len(policies) > 1 and run.stop_reason is None:
        raise NoTrainableDataError(
            f"training ended, and policy {', '.join(map(repr, never))} was never updated",
            hint=f"agents={run.config.selection} gave it no call with anything to learn from; the other policies are "
            "saved",
            directory=run.directory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining(StepFunctions, Algorithm):
    """An algorithm with the embedded engine and learner."""

    async def run(self, run: Run) -> None:
        """See `agl.trainer.run.run.Algorithm`."""
        await train(run, self)

    def prompts_directory(self) -> str | Path | None:
        return self.prompts

    def local_model(self) -> str:
        return self.model

    async def dev(self, run: Run, n_tasks: int) -> list[RolloutResult]:
        """See `agl.trainer.run.run.Algorithm`."""
        require_tasks(run.train, "the dataset")
        async with self.loaded(run, Source.of_tasks(run, self, None, 1, steps=1)) as training:
            await training.start()
            tasks = list(enumerate(run.train))[:n_tasks]
            return await training.workplace.rollouts(tasks, mode="dev", step=0, metadata=self.metadata(run))
