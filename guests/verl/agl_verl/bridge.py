"""A run trained by verl: its trainers ask for rollouts, the run's runners execute them once, and each trainer gets its
policy's rows."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.util.queue
import transfer_queue as tq

from agl.errors import ConfigError, NoTrainableDataError, TrainingError
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.local.grammar import Grammars
from agl.trainer.run.failures import failures_line, require_sound
from agl.trainer.run.results import measurement, require_some, require_tasks
from agl.trainer.run.run import Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.types import Mode
from agl_verl import checkpoints, cluster, metrics, schemas
from agl_verl.barrier import Barrier
from agl_verl.config.checks import PER_CALL
from agl_verl.config.compose import compose
from agl_verl.config.plan import ROLLOUT, Plan
from agl_verl.engine import VerlEngine
from agl_verl.events import (
    Checkpoint,
    Event,
    RolloutRequest,
    ServerStart,
    StepResult,
    TrainingEnd,
    TrainingFailure,
    TrainingStart,
    WeightUpdate,
)
from agl_verl.overrides import bridge_overrides, ray_init, total_gpus
from agl_verl.rows import GroupRows, Prompt, train_rows, val_rows
from agl_verl.tokens import Tokens, tokens_of
from agl_verl.trainers import Job, Trainers
from agl_verl.transfer import put

T = TypeVar("T")

RUNNERS_PER_GATEWAY = 300
"""Rollouts at once for which one gateway process is enough."""
_QUIET_SECONDS = 300.0
"""How long verl may send no event, with no rollout running, before a note says where its logs are."""
_LOST_SECONDS = 4 * 3600.0
"""How long until the run ends with an error: longer than any update should take."""


async def train(run: Run, plans: Mapping[str, Plan], update_timeout: float) -> None:
    """Train a run to its end with verl, or until cancelled; leaves no actor behind either way.

    Call `overrides.environment` before importing this module: TransferQueue, imported with it, reads it then.

    Args:
        run: the run.
        plans: what the config asks for, by policy.
        update_timeout: how long giving the servers new weights may take, seconds.

    Raises:
        AglError: what went wrong, where, and what to do.
    """
    require_tasks(run.train, "the training dataset")
    await _on_ray(run, plans, update_timeout, _Bridge.train)


async def dev(run: Run, plans: Mapping[str, Plan], update_timeout: float, n_tasks: int) -> list[RolloutResult]:
    """A dry run on verl's servers: a rollout of each of the first tasks, no update."""
    require_tasks(run.train, "the dataset")
    run.train = list(run.train[:n_tasks])
    run.val = run.train
    return await _on_ray(run, plans, update_timeout, _Bridge.dev)


async def _on_ray(
    run: Run, plans: Mapping[str, Plan], update_timeout: float, work: Callable[[_Bridge], Awaitable[T]]
) -> T:
    if run.agent.memory is not None:
        raise ConfigError(
            "agl.VERL trains no agent with memory=: verl requests the rollouts of a step one by one, so there is "
            "no order in which they could write",
            hint="train on this machine (agl.GRPO), or give the agent no memory",
        )
    try:
        async with cluster.connection(ray_init(plans), gpus=[total_gpus(plan) for plan in plans.values()]):
            return await work(_Bridge(run, plans, update_timeout))
    finally:
        run.progress.stop()


@dataclass(slots=True, eq=False)
class _Policy:
    """A policy in training.

    Attributes:
        plan: its settings.
        model: by which `explain` finds the tokenizer later, from any directory.
        tokens: of its model.
        answers: takes whether training goes on; None if it always does.
        engine: once its servers are up.
        update_timer: of a weight update that runs.
        groups: by verl's uid, those not yet trained.
        empty_groups: the latest ones without a row.
    """

    plan: Plan
    model: str
    tokens: Tokens | None = None
    answers: Any = None
    engine: VerlEngine | None = None
    update_timer: asyncio.TimerHandle | None = None
    groups: dict[str, metrics.GroupRecord] = field(default_factory=dict)
    empty_groups: list[tuple[Prompt, list[RolloutResult]]] = field(default_factory=list)


class _Bridge:
    """One training, on the run's event loop."""

    def __init__(self, run: Run, plans: Mapping[str, Plan], update_timeout: float) -> None:
        self.run = run
        self.plans = plans
        # Policies differ in their models and how these are trained; the rollouts are the same for all.
        self.plan = next(iter(plans.values()))
        self._update_timeout = update_timeout
        self.workplace = Workplace(run)
        self._policies = {name: _Policy(plan, _whole_path(plan.model)) for name, plan in plans.items()}
        self._barrier = Barrier([*plans])
        self._positions: Counter[tuple[str, int]] = Counter()
        self._val_results: dict[int, list[RolloutResult]] = defaultdict(list)
        self._train_results: dict[int, list[RolloutResult]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._dry_run = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def dev(self) -> list[RolloutResult]:
        self._dry_run = True
        no_update = {"trainer.val_only": True, "trainer.val_before_train": True}
        await self._fit(0, no_update)
        return self._val_results[0]

    async def train(self) -> None:
        run = self.run
        state = checkpoints.restore(run, self.plans) if run.resume else None
        start = state.step if state else 0
        if run.resume:
            await self.workplace.resume_from(start, dict.fromkeys(self._policies, start))
        await self._fit(start, {})
        if run.checkpoint is not None or run.stop_reason is None:  # else it was stopped before it had begun
            run.policy_paths = checkpoints.publish(run, [*self._policies])

    async def _fit(self, start: int, overrides: Mapping[str, Any]) -> None:
        """Start verl's trainers with their plans' configs, and handle their events until they are done.

        Args:
            start: how many steps are done already.
            overrides: dotted keys, which take precedence.
        """
        run = self.run
        several = len(self._policies) > 1
        existing = await asyncio.to_thread(cluster.placement_groups)
        queue = await asyncio.to_thread(ray.util.queue.Queue, actor_options={"num_cpus": 0})
        jobs = []
        for name, policy in self._policies.items():
            tokens = policy.tokens = await asyncio.to_thread(tokens_of, policy.plan.model)
            ours = bridge_overrides(run, policy.plan, first_step=start, policy=name if several else None)
            config = compose(policy.plan, {**ours, **overrides})
            # Only a run with callbacks has verl wait for the answer whether it goes on.
            if run.callbacks:
                policy.answers = await asyncio.to_thread(ray.util.queue.Queue, actor_options={"num_cpus": 0})
            jobs.append(Job(name, policy.plan, config, tokens.check_ids, queue, policy.answers))
        trainers = Trainers(jobs, run.directory)
        try:
            await trainers.start()
            await self._handle_events(queue, trainers.ended)
        finally:
            await self._end(trainers, queue, existing)

    async def _handle_events(self, queue: Any, ended: Mapping[str, asyncio.Future[None]]) -> None:
        """Handle the events of verl's trainers until the last one."""
        next_event: asyncio.Future[tuple[str, Event]] = asyncio.ensure_future(queue.get_async())
        quiet = 0.0
        try:
            while True:
                running = [future for future in ended.values() if not future.done()]
                done, _ = await asyncio.wait(
                    (next_event, self._failure, *running),
                    return_when=asyncio.FIRST_COMPLETED,
                    timeout=_QUIET_SECONDS,
                )
                quiet = 0.0 if done or self._tasks else quiet + _QUIET_SECONDS
                if quiet:
                    # verl waits for ever for a worker or server that has died.
                    message = f"no word from verl for {quiet / 60:.0f} minutes; its logs: {cluster.log_directory()}"
                    if quiet >= _LOST_SECONDS:
                        hint = "one of its workers or servers may have died: continue with resume=True"
                        raise TrainingError(message, hint=hint)
                    self.run.progress.note(message)
                for future in (self._failure, *ended.values()):
                    if future.done():
                        future.result()
                if not next_event.done():
                    continue
                policy, event = next_event.result()
                if isinstance(event, TrainingEnd) and self._barrier.arrive(policy, event):
                    return
                next_event = asyncio.ensure_future(queue.get_async())
                await self._handle(policy, event)
        finally:
            next_event.cancel()

    async def _handle(self, policy: str, event: Event) -> None:
        match event:
            case WeightUpdate(step, done):
                self._watch_update(policy, step, done)
            case TrainingFailure(error):
                raise type(error)(error.message, hint=error.hint, **{**error.where, "policy": policy})
            case TrainingEnd():
                pass
            case _:
                if (events := self._barrier.arrive(policy, event)) is not None:
                    await self._handle_all(events)

    async def _handle_all(self, events: Mapping[str, Any]) -> None:
        """Handle the same event of every policy."""
        match next(iter(events.values())):
            case ServerStart():
                await self._serve({name: start.client for name, start in events.items()})
            case TrainingStart(step, steps):
                await self.run.begin(steps, step)
                if (results := self._val_results.pop(step, None)) is not None and not self.run.history:
                    validation = measurement(results, "val", f"the validation after step {step}")
                    await self.run.record({"step": step, **validation})
                await self._answer()
            case RolloutRequest():
                requested = zip(*(request.prompts for request in events.values()), strict=True)
                self._start_groups([dict(zip(events, prompts, strict=True)) for prompts in requested])
            case Checkpoint(step):
                paths = {name: checkpoint.path for name, checkpoint in events.items()}
                await checkpoints.record_checkpoint(self.run, self.plans, step, paths)
            case StepResult():
                await self._record_step(events)
                await self._answer()

    def _watch_update(self, name: str, step: int, done: bool) -> None:
        """Have the run fail if a weight update that begins does not end in time."""
        policy = self._policies[name]
        if policy.update_timer is not None:
            policy.update_timer.cancel()
        if done:
            return
        which = f"after step {step}" if step else "before the first step"
        if named := self._named(name):
            which = f"of {named} {which}"
        error = TrainingError(
            f"the weight update {which} was not over after {self._update_timeout:g} s: verl's "
            "servers did not take the actor's weights",
            hint=f"a worker or server of verl's hangs or has died: {cluster.log_directory()} has their logs. Resume "
            "with resume=True; if it was only slow, raise agl.VERL(update_timeout=)",
            step=step,
        )
        policy.update_timer = asyncio.get_running_loop().call_later(self._update_timeout, self._fail, error)

    def _named(self, name: str) -> str:
        """The policy in a message; empty for the only one."""
        return f"policy {name!r}" if len(self._policies) > 1 else ""

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # -- rollouts -----------------------------------------------------------------------------------------------------

    async def _serve(self, clients: Mapping[str, Any]) -> None:
        run = self.run
        plan = self.plan
        await asyncio.to_thread(tq.init)
        seeds = bool(plan.settings.get(f"{ROLLOUT}.full_determinism"))
        for name, client in clients.items():
            policy = self._policies[name]
            tokens = policy.tokens
            assert tokens is not None
            grammars = Grammars(tokens.tokenizer, tokens.vocabulary or len(tokens.tokenizer))
            policy.engine = VerlEngine(
                client,
                plan.max_context,
                vocabulary=tokens.vocabulary,
                seeds=seeds,
                grammars=schemas.refusal(policy.plan) or grammars,
            )

        def register(gateway: Gateway) -> None:
            for name, policy in self._policies.items():
                assert policy.tokens is not None
                assert policy.engine is not None
                gateway.serve(name, policy.engine, policy.tokens.rendering, policy.tokens.stop_token_ids)

        gateways = math.ceil(run.config.n_workers / RUNNERS_PER_GATEWAY)
        await self.workplace.start(self._rules, next(iter(clients)), register=register, gateways=gateways)
        if run.config.runners != "remote" and run.config.n_workers < min(64, plan.batch_size * plan.group_size):
            run.progress.note(
                f"n_workers={run.config.n_workers}: so many of a step's {plan.batch_size * plan.group_size} rollouts "
                "run at once; verl's servers take more"
            )

    def _rules(self, mode: str) -> SamplingRules:
        plan = self.plan
        if mode == "train":
            top_p = plan.settings.get(f"{ROLLOUT}.top_p", 1.0)
            top_k = plan.settings.get(f"{ROLLOUT}.top_k", -1)
            return SamplingRules(plan.temperature, top_p, max(0, top_k), plan.max_response_tokens)
        return SamplingRules(temperature=plan.val_temperature, max_tokens=plan.max_response_tokens)

    async def _answer(self) -> None:
        """Tell verl's trainers whether training goes on."""
        for policy in self._policies.values():
            if policy.answers is not None:
                await policy.answers.put_async(self.run.stop_reason is None)

    def _start_groups(self, groups: Seq[Mapping[str, Prompt]]) -> None:
        """Start the rollouts of prompts, each as every policy's trainer knows it."""
        firsts = [next(iter(prompts.values())) for prompts in groups]
        if firsts:
            self.run.progress.began(self._mode(firsts[0]), firsts[0].step, sum(p.n for p in firsts))
        for prompt, prompts in zip(firsts, groups, strict=True):
            position = self._positions[prompt.partition, prompt.step]
            self._positions[prompt.partition, prompt.step] += 1
            task = asyncio.ensure_future(self._run_group(prompts, position))
            self._tasks.add(task)
            task.add_done_callback(self._end_group)

    def _end_group(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _run_group(self, prompts: Mapping[str, Prompt], position: int) -> None:
        """Run a prompt's rollouts once, and put each policy's rows where its trainer looks for them.

        Args:
            prompts: by policy.
            position: of the prompt among those of its step.
        """
        prompt = next(iter(prompts.values()))
        for own in prompts.values():
            await self._set_status(own, "running")
        tasks = self.run.val if prompt.validate else self.run.train
        results = await self.workplace.rollouts(
            [(prompt.index, tasks[prompt.index])],
            mode=self._mode(prompt),
            # The store counts steps from 0; a validation has the number of the steps that are done.
            step=prompt.step if prompt.validate else prompt.step - 1,
            group_size=prompt.n,
            metadata=self._metadata(),
            first=position,
            announce=False,
        )
        if prompt.validate:
            self._val_results[prompt.step] += results
        else:
            self._train_results[prompt.step] += results
            expected = self.plan.batch_size * prompt.n
            require_sound(self._train_results[prompt.step], f"step {prompt.step}", expected=expected)
        for name, own in prompts.items():
            group = await asyncio.to_thread(self._rows, name, own, results)
            if not own.validate:
                self._policies[name].groups[own.uid] = metrics.GroupRecord(own, results, group)
            if group.rows:
                await asyncio.to_thread(put, own.partition, group.rows)
            self._check_empty(name, own, results, group)
            await self._set_status(own, "finished" if group.rows else "failure")

    def _mode(self, prompt: Prompt) -> Mode:
        if not prompt.validate:
            return "train"
        return "dev" if self._dry_run else "val"

    def _metadata(self) -> dict[str, Any]:
        models = {name: policy.model for name, policy in self._policies.items()}
        return {"model": next(iter(models.values())), **({"models": models} if len(models) > 1 else {})}

    def _rows(self, name: str, prompt: Prompt, results: Seq[RolloutResult]) -> GroupRows:
        """The rows of one policy."""
        if prompt.validate:
            return val_rows(prompt, results, policy=name)
        policy = self._policies[name]
        assert policy.engine is not None, "verl asks for rollouts after its servers are up"
        return train_rows(
            prompt,
            results,
            self.run.config.credit,
            policy=name,
            estimator=policy.plan.adv_estimator,
            normalize_std=policy.plan.normalize_std,
            own=policy.plan.adv_estimator in PER_CALL,
            newest=policy.engine.newest,
        )

    async def _set_status(self, prompt: Prompt, status: str) -> None:
        tag = {"status": status}
        await asyncio.to_thread(tq.kv_put, key=prompt.uid, partition_id=prompt.partition, tag=tag)

    def _check_empty(self, name: str, prompt: Prompt, results: list[RolloutResult], group: GroupRows) -> None:
        """End the run when a whole batch of groups has no row, instead of training on padding or sampling for ever.

        Raises:
            AglError: the error of the first rollout that failed, or the reason why the others cannot be trained.
        """
        empty_groups = self._policies[name].empty_groups
        if group.rows:
            empty_groups.clear()
            return
        if self.plan.mode == "sync":  # elsewhere groups of several steps are sampled at once
            place = (prompt.partition, prompt.step)
            empty_groups[:] = [(p, r) for p, r in empty_groups if (p.partition, p.step) == place]
        empty_groups.append((prompt, results))
        if len(empty_groups) < (len(self.run.val) if prompt.validate else self.plan.batch_size):
            return
        what = f"the validation after step {prompt.step}" if prompt.validate else f"step {prompt.step}"
        require_some([r for _, of_group in empty_groups for r in of_group], what)
        calls = [c for c in (group.scored.calls if group.scored else ()) if c.policy in (name, None)]
        reasons = sorted({c.dropped for c in calls if c.dropped})
        subject = f"{what} has nothing to train {self._named(name)}".rstrip()
        raise NoTrainableDataError(
            f"{subject} on: {'; '.join(reasons) or 'no call of the trained agents'}",
            hint="see why with agl explain, or raise max_attempts",
            step=prompt.step,
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _record_step(self, results: Mapping[str, StepResult]) -> None:
        run = self.run
        step = next(iter(results.values())).step
        trained = {}
        for name, result in results.items():
            records = self._policies[name].groups
            rows_by_key = {row.key: row for record in records.values() for row in record.rows.rows}
            uids = list(dict.fromkeys(key.rsplit("_", 2)[0] for key in result.keys))
            groups = [records.pop(uid) for uid in uids if uid in records]
            # verl has thrown away the groups of a sync step that have no row.
            empty_uids = [uid for uid, g in records.items() if not g.rows.rows and g.prompt.step <= step]
            groups += [records.pop(uid) for uid in empty_uids]
            rows = [rows_by_key[key] for key in result.keys if key in rows_by_key]
            if len(results) > 1 and len(rows) < len(result.keys):
                # An only policy may train rows of a run that it resumes.
                raise TrainingError(
                    f"verl's trainer of policy {name!r} trained {len(result.keys) - len(rows)} rows that are not the "
                    "policy's",
                    hint="the policies cannot be used; resume from the checkpoint before, and please report this",
                    step=step,
                    policy=name,
                )
            trained[name] = metrics.TrainedPolicy(result, groups, rows)
            await run.store.add_trained_calls(run.run_id, metrics.trained_calls(trained[name], name))
            await run.store.add_policy_version(run.run_id, name, step, step)
        entry = metrics.facts(step, trained)
        if line := failures_line(self._train_results.pop(step, ())):
            run.progress.note(f"step {step}: {line}")
        if (val_results := self._val_results.pop(step, None)) is not None:
            entry |= measurement(val_results, "val", f"the validation after step {step}")
        await run.record(entry)
        checkpoints.write_record(run, self.plans)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, trainers: Trainers, queue: Any, existing: set[str]) -> None:
        """Stop all rollouts and everything of verl's.

        Args:
            existing: placement groups from before the training; they stay.
        """
        for policy in self._policies.values():
            if policy.update_timer is not None:
                policy.update_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.workplace.stop()
        finally:
            # A trainer's process started everything of its own, and Ray ends it with that process.
            with contextlib.suppress(Exception):
                await trainers.stop()
            queues = [queue, *(policy.answers for policy in self._policies.values())]
            close = [partial(q.shutdown, force=True) for q in queues if q is not None]
            for end in (*close, partial(cluster.release_placement_groups, existing), tq.close):
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(end)


def _whole_path(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).exists() else model
