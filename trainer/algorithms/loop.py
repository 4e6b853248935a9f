"""The training loop. What a step does with its rollouts is the algorithm's; everything else stands here.

Invariant: a checkpoint holds the weights of a completed step, and what was served is what was trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agl.errors import AglError, CheckpointError, NoTrainableDataError, StalePolicyError
from agl.mdp.sequence import TrainingRow
from agl.trainer.algorithms import checkpoints
from agl.trainer.algorithms.ahead import Ahead
from agl.trainer.algorithms.source import Rows, Sample, Source
from agl.trainer.algorithms.trained_calls import (
    facts,
    note_rates,
    note_shortened,
    note_useless,
    record,
    recorded_baselines,
)
from agl.trainer.algorithms.training import StepFunctions, Training
from agl.trainer.http.aio import finish
from agl.trainer.local.agreement import TOLERANCE
from agl.trainer.objectives.advantages import StepAdvantages
from agl.trainer.policies.policies import Policies
from agl.trainer.run.failures import failures_line, require_sound
from agl.trainer.run.machine import Machine
from agl.trainer.run.results import measurement, require_some, require_tasks
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.runners.protocol import RolloutResult

SMALL_MODEL = 20_000_000
"""Parameters below which a checkpoint at every step costs next to nothing."""

PROBE_TOKENS = 64

AHEAD_SECONDS = 30.0
"""How long a run that is stopped waits at most for rollouts that run one step ahead."""


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
        policies, workplace = training.policies, training.workplace
        await algorithm.begin(training)
        checkpoint = await checkpoints.restore(run, policies, identity, algorithm) if run.resume else None
        note_rates(run, policies)
        done = checkpoint.step if checkpoint else 0
        begun = checkpoint.beyond.get("ahead", {}) if checkpoint else {}
        kept = Kept(unrecorded=checkpoint.beyond.get("unrecorded") if checkpoint else None)
        if checkpoint and source.batches.spreads is not None:
            kept.spreads = dict(checkpoint.beyond.get("spreads", ()))
            source.batches.spreads.update(kept.spreads)
        if run.resume:
            await workplace.resume_from(
                done,
                policies.versions,
                source.max_staleness or 0,
                sampled=source.sampled,
                first=Ahead.first_step(begun, source.batches.batch_size, done),
            )
        training.baselines = recorded_baselines([*run.history, kept.unrecorded] if kept.unrecorded else run.history)
        if run.train or run.val:
            await training.start()
        await run.begin(source.steps, done)
        for name, policy in policies:
            await run.store.add_policy_version(run.run_id, name, policy.version, done)
        if done == 0 and algorithm.val_before_train and run.val and not run.history:
            await run.record({"step": 0, **await validate(training, 0)})

        save_every = algorithm.checkpoint_every or (1 if source.sampled and policies.parameters < SMALL_MODEL else 10)
        in_flight = (source.max_staleness or 0) > 1
        if in_flight:
            training.ahead = Ahead(training, begun or {"next": done * source.batches.batch_size})
        ahead: asyncio.Task[tuple[Sample, StepAdvantages]] | None = None
        unserved: Rows = {}
        machine = Machine()

        def due_validation(step: int) -> bool:
            return bool(run.val) and (step == source.steps or step % algorithm.val_every == 0)

        async def save(step: int) -> None:
            beyond = training.beyond(step)
            if kept.unrecorded is not None:
                beyond["unrecorded"] = kept.unrecorded
            if kept.spreads is not None:
                beyond["spreads"] = sorted(kept.spreads.items())
            await finish(checkpoints.save(run, policies, step, identity, beyond))
            kept.unsaved = None

        try:
            if kept.unrecorded is not None:
                entry = dict(kept.unrecorded)
                if due_validation(done):
                    entry |= await validate(training, done)
                kept.unrecorded = None
                kept.unsaved = done
                await run.record(entry)
                await save(done)
            for step in range(done, source.steps):
                if run.stop_reason is not None:
                    break
                began, last = time.monotonic(), step + 1 == source.steps
                validated = due_validation(step + 1)
                sample, worth = await (ahead or sampled(training, step))
                ended = ((r.rollout, r.attempt_trajectory) for r in sample.results)
                source.batches.learn((r.metadata["task_index"], t.reward or 0.0) for r, t in ended if t is not None)
                overlaps = bool(source.max_staleness) and not last
                ahead = asyncio.create_task(sampled(training, step + 1)) if overlaps else None
                # Each policy learns from its own calls alone, and every sampled token is in one row.
                rows = await algorithm.rows(training, worth, step)
                due = {name: r for name, r in rows.items() if algorithm.learns(r)}
                if not due and source.sampled:
                    run.progress.note(f"step {step + 1}: no update: {algorithm.why_flat}")
                unserved = {**unserved, **due}
                phases = {"sampling": sample.seconds}
                async with contextlib.AsyncExitStack() as held:
                    # Requests are held, so that no answer is sampled from two versions of the weights.
                    if due and ahead is None:
                        await held.enter_async_context(workplace.hold())
                    entry = await finish(
                        learn(training, kept, sample, worth, rows, due, step, phases),
                        lambda: run.progress.note("stopping: the update of this step is finished and saved first"),
                    )
                    if due and ahead is not None and not in_flight:
                        # All of its calls are of the weights before this update, so that a resumed run, which finds
                        # these rollouts in the store, equals one that was never stopped.
                        await asyncio.wait([ahead])
                    if due and ahead is not None and not (in_flight and algorithm.engine == "torch"):
                        await held.enter_async_context(workplace.hold())
                    if source.sampled or validated or last:
                        with timed(phases, "publishing"):
                            await asyncio.gather(*(publish(policies, name, r, step) for name, r in unserved.items()))
                        unserved = {}
                entry["seconds"] = time.monotonic() - began
                entry |= machine.since()
                if validated:
                    with timed(phases, "validating"):
                        entry |= await validate(training, step + 1)
                entry |= {f"seconds/{phase}": seconds for phase, seconds in phases.items()}
                kept.unrecorded = None
                await run.record(entry)
                if last or (step + 1) % save_every == 0 or run.stop_reason is not None:
                    await save(step + 1)
        except asyncio.CancelledError:
            if kept.unsaved is not None:
                await save(kept.unsaved)
                if ahead is not None and not in_flight:
                    await finish(_end_of_ahead(run, ahead))
            raise
        except Exception as error:
            # Where these weights cannot be served or saved, the last checkpoint is what to go on from.
            if kept.unsaved is not None and not isinstance(error, StalePolicyError | CheckpointError):
                with contextlib.suppress(AglError):
                    await save(kept.unsaved)
            raise
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
            if training.ahead is not None:
                await training.ahead.stop()
        run.policy_paths = await policies.save_models(run.directory)
        _require_updates(run, policies)
        if run.stop_reason is None:
            workplace.require_agents()


async def _end_of_ahead(run: Run, ahead: asyncio.Task[Any]) -> None:
    """Wait for the rollouts that run ahead of an update that a checkpoint has: the weights that sample them, which are
    those before it, are nowhere else. A resumed run finds them in the store."""
    if not ahead.done():
        run.progress.note("stopping: the rollouts of the next step end first, as their weights are not saved")
    _, pending = await asyncio.wait([ahead], timeout=AHEAD_SECONDS)
    if pending:
        run.progress.note("those that have not ended are run again, by newer weights, when the run is resumed")


@dataclass(slots=True, eq=False)
class Kept:
    """What would be lost if the run ended now.

    Attributes:
        unsaved: the completed steps that made these weights; None where a checkpoint has them, and during an update.
        unrecorded: the entry of the last of these steps, where the history does not have it yet.
        spreads: of the tasks, from these steps' rollouts alone; None where tasks are not drawn by them. The batches'
            own already know a step whose update is not made yet, which a resumed run samples again.
    """

    unsaved: int | None = None
    unrecorded: dict[str, Any] | None = None
    spreads: dict[int, float] | None = None


async def learn(
    training: Training,
    kept: Kept,
    sample: Sample,
    worth: StepAdvantages,
    rows: Rows,
    due: Rows,
    step: int,
    phases: dict[str, float],
) -> dict[str, Any]:
    """The update on the rows that are `due`, and what the store keeps of it; returns the step's entry so far."""
    run, policies = training.run, training.policies
    kept.unsaved = None
    with timed(phases, "learning"):
        metrics = await update(policies, due, worth)
    note_shortened(run, metrics, step)
    await record(run, policies, worth.calls, rows, metrics, step)
    entry = {"step": step + 1, **facts(sample, worth, policies, rows, metrics, training.algorithm.learns)}
    entry["seconds"] = sum(phases.values())
    kept.unrecorded = entry
    kept.unsaved = step + 1
    if (spreads := training.source.batches.spreads) is not None:
        kept.spreads = dict(spreads)
    return entry


@contextlib.contextmanager
def timed(phases: dict[str, float], phase: str) -> Iterator[None]:
    """Keep the seconds that the block takes, by the name of its phase."""
    began = time.monotonic()
    try:
        yield
    finally:
        phases[phase] = time.monotonic() - began


async def sampled(training: Training, step: int) -> tuple[Sample, StepAdvantages]:
    """The step's rollouts, and what their calls are worth. Changes no weights, so it may run ahead.

    Raises:
        AglError: all rollouts failed. UserCodeError: one fault of the user's code ended too many attempts.
    """
    run, policies, algorithm = training.run, training.policies, training.algorithm
    began, earlier = time.monotonic(), policies.prompt_tokens
    sample = await algorithm.sample(training, step)
    tokens = policies.prompt_tokens - earlier
    seconds = time.monotonic() - began if training.ahead is None else training.ahead.seconds
    sample = replace(sample, seconds=seconds, prompt_tokens=tokens)
    if line := failures_line(sample.results):
        run.progress.note(f"step {step + 1}: {line}")
    require_some(sample.results, f"step {step + 1}")
    require_sound(sample.results, f"step {step + 1}")
    worth = await algorithm.worth(training, sample, step)
    training.baselines = worth.baselines
    if sample.results:
        note_useless(run, sample, worth, step)
    return sample, worth


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


async def publish(policies: Policies, name: str, rows: Seq[TrainingRow], step: int) -> None:
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
    run, metadata = training.run, training.algorithm.metadata(training.run)
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
