"""A run trained by verl: its trainer asks for rollouts, the run's runners execute them, and their rows go to verl."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import ray.exceptions
import ray.util.queue
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

from agl.errors import AglError, ConfigError, NoTrainableDataError, TrainingError
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.local.grammar import Grammars
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.run.results import measurement, require_some, require_tasks
from agl.trainer.run.run import Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.types import Mode
from agl_verl import checkpoints, cluster, metrics, schemas
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
    TrainingStart,
    WeightUpdate,
)
from agl_verl.job import TrainerJob
from agl_verl.overrides import bridge_overrides, ray_init, runtime_env, total_gpus
from agl_verl.rows import GroupRows, Prompt, Row, train_rows, val_rows

T = TypeVar("T")

_CHECK_TEXT = "One fixed sentence tells whether the servers have the weights that were just trained: 0123456789."
"""Text of the weight check; its tokens are compared after every update."""
RUNNERS_PER_GATEWAY = 300
"""Rollouts at once for which one gateway process is enough."""
_QUIET_SECONDS = 300.0
"""How long verl may send no event, with no rollout running, before a note says where its logs are."""
_LOST_SECONDS = 4 * 3600.0
"""How long until the run ends with an error: longer than any update should take."""


async def train(run: Run, plan: Plan, update_timeout: float) -> None:
    """Train a run to its end with verl, or until cancelled; leaves no actor behind either way.

    Call `overrides.environment` before importing this module: TransferQueue, imported with it, reads it then.

    Args:
        run: the run. plan: what the config asks for.
        update_timeout: how long giving the servers new weights may take, seconds.

    Raises:
        AglError: what went wrong, where, and what to do.
    """
    require_tasks(run.train, "the training dataset")
    await _on_ray(run, plan, update_timeout, _Bridge.train)


async def dev(run: Run, plan: Plan, update_timeout: float, n_tasks: int) -> list[RolloutResult]:
    """A dry run on verl's servers: a rollout of each of the first tasks, no update."""
    require_tasks(run.train, "the dataset")
    run.train = list(run.train[:n_tasks])
    run.val = run.train
    return await _on_ray(run, plan, update_timeout, _Bridge.dev)


async def _on_ray(run: Run, plan: Plan, update_timeout: float, work: Callable[[_Bridge], Awaitable[T]]) -> T:
    if len(run.config.selection.policies) > 1 or run.config.policies:
        raise ConfigError(
            "verl trains one model, and agents= names several policies",
            hint="train them one after another, or on one machine with agl.GRPO(...)",
        )
    try:
        async with cluster.connection(ray_init(plan), gpus=total_gpus(plan)):
            return await work(_Bridge(run, plan, update_timeout))
    finally:
        run.progress.stop()


class _Bridge:
    """One training, on the run's event loop."""

    def __init__(self, run: Run, plan: Plan, update_timeout: float) -> None:
        self.run, self.plan = run, plan
        self._update_timeout = update_timeout
        self._update_timer: asyncio.TimerHandle | None = None
        self.workplace = Workplace(run)
        self.policy = run.config.selection.policies[0]
        # `explain` finds the tokenizer by it later, from any directory.
        self._model = str(Path(plan.model).resolve()) if Path(plan.model).exists() else plan.model
        self._groups: dict[str, metrics.GroupRecord] = {}
        self._positions: Counter[tuple[str, int]] = Counter()
        self._val_results: dict[int, list[RolloutResult]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._dry_run = False
        self._answers: Any = None
        self._engine: VerlEngine | None = None
        self._empty_groups: list[list[RolloutResult]] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        if run.agent.memory is not None:
            raise ConfigError(
                "agl.VERL trains no agent with memory=: verl requests the rollouts of a step one by one, so there is "
                "no order in which they could write",
                hint="train on this machine (agl.GRPO), or give the agent no memory",
            )

    async def dev(self) -> list[RolloutResult]:
        self._dry_run = True
        no_update = {"trainer.val_only": True, "trainer.val_before_train": True}
        await self._fit({**bridge_overrides(self.run, self.plan, first_step=0), **no_update})
        return self._val_results[0]

    async def train(self) -> None:
        run, plan = self.run, self.plan
        state = checkpoints.restore(run, plan) if run.resume else None
        start = state.step if state else 0
        if run.resume:
            await self.workplace.resume_from(start, {self.policy: start})
        await self._fit(bridge_overrides(run, plan, first_step=start))
        if run.checkpoint is not None or run.stop_reason is None:  # else it was stopped before it had begun
            run.policy_paths = {self.policy: checkpoints.publish(run)}

    async def _fit(self, overrides: Mapping[str, Any]) -> None:
        """Start verl's trainer with the plan's config, and handle its events until it is done."""
        plan = self.plan
        tokens = await asyncio.to_thread(_tokens, plan.model)
        config = compose(plan, overrides)
        existing = await asyncio.to_thread(cluster.placement_groups)
        queue = await asyncio.to_thread(ray.util.queue.Queue, actor_options={"num_cpus": 0})
        # Only a run with callbacks has verl wait for the answer whether it goes on.
        if self.run.callbacks:
            self._answers = await asyncio.to_thread(ray.util.queue.Queue, actor_options={"num_cpus": 0})
        actor: Any = ray.remote(TrainerJob)
        job = actor.options(num_cpus=1, max_restarts=0, runtime_env=runtime_env(plan)).remote(queue, self._answers)
        try:
            job_end = asyncio.ensure_future(_result(job.run.remote(config, tokens.check_ids)))
            await self._handle_events(queue, job_end, tokens)
        finally:
            await self._end(job, queue, existing)

    async def _handle_events(self, queue: Any, job_end: asyncio.Future[None], tokens: _Tokens) -> None:
        """Handle the events of verl's trainer until the last one."""
        next_event: asyncio.Future[Event] = asyncio.ensure_future(queue.get_async())
        quiet = 0.0
        try:
            while True:
                futures = (next_event, self._failure) if job_end.done() else (next_event, self._failure, job_end)
                done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED, timeout=_QUIET_SECONDS)
                quiet = 0.0 if done or self._tasks else quiet + _QUIET_SECONDS
                if quiet:
                    # verl waits for ever for a worker or server that has died.
                    message = f"no word from verl for {quiet / 60:.0f} minutes; its logs: {cluster.log_directory()}"
                    if quiet >= _LOST_SECONDS:
                        hint = "one of its workers or servers may have died: continue with resume=True"
                        raise TrainingError(message, hint=hint)
                    self.run.progress.note(message)
                if self._failure.done():
                    self._failure.result()
                if job_end.done():
                    job_end.result()
                if not next_event.done():
                    continue
                event = next_event.result()
                if isinstance(event, TrainingEnd):
                    return
                next_event = asyncio.ensure_future(queue.get_async())
                await self._handle(event, tokens)
        finally:
            next_event.cancel()
            if not job_end.done():
                job_end.cancel()

    async def _handle(self, event: Event, tokens: _Tokens) -> None:
        match event:
            case ServerStart(client):
                await self._serve(client, tokens)
            case TrainingStart(step, steps):
                await self.run.begin(steps, step)
                if (results := self._val_results.pop(step, None)) is not None and not self.run.history:
                    validation = measurement(results, "val", f"the validation after step {step}")
                    await self.run.record({"step": step, **validation})
                await self._answer()
            case RolloutRequest(prompts):
                self._start_groups(prompts)
            case Checkpoint(step, path):
                await checkpoints.record_checkpoint(self.run, self.plan, step, path)
            case StepResult():
                await self._record_step(event)
                await self._answer()
            case WeightUpdate(step, done):
                self._watch_update(step, done)
            case TrainingEnd():
                pass

    def _watch_update(self, step: int, done: bool) -> None:
        """Have the run fail if a weight update that begins does not end in time."""
        if self._update_timer is not None:
            self._update_timer.cancel()
        if done:
            return
        which = f"after step {step}" if step else "before the first step"
        error = TrainingError(
            f"the weight update {which} was not over after {self._update_timeout:g} s: verl's servers did not take "
            "the actor's weights",
            hint=f"a worker or server of verl's hangs or has died: {cluster.log_directory()} has their logs. Resume "
            "with resume=True; if it was only slow, raise agl.VERL(update_timeout=)",
            step=step,
        )
        self._update_timer = asyncio.get_running_loop().call_later(self._update_timeout, self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # -- rollouts -----------------------------------------------------------------------------------------------------

    async def _serve(self, client: Any, tokens: _Tokens) -> None:
        run, plan = self.run, self.plan
        await asyncio.to_thread(tq.init)
        seeds = bool(plan.settings.get(f"{ROLLOUT}.full_determinism"))
        engine = self._engine = VerlEngine(
            client, plan.max_context, vocabulary=tokens.vocabulary, seeds=seeds,
            grammars=schemas.refusal(plan) or Grammars(tokens.tokenizer, tokens.vocabulary or len(tokens.tokenizer)),
        )  # fmt: skip

        def register(gateway: Gateway) -> None:
            gateway.serve(self.policy, engine, tokens.rendering, tokens.stop_token_ids)

        gateways = math.ceil(run.config.n_workers / RUNNERS_PER_GATEWAY)
        await self.workplace.start(self._rules, self.policy, register=register, gateways=gateways)
        if run.config.runners != "remote" and run.config.n_workers < min(64, plan.batch_size * plan.group_size):
            run.progress.note(
                f"n_workers={run.config.n_workers}: so many of a step's {plan.batch_size * plan.group_size} rollouts "
                "run at once; verl's servers take more"
            )

    def _rules(self, mode: str) -> SamplingRules:
        plan = self.plan
        if mode == "train":
            top_p, top_k = plan.settings.get(f"{ROLLOUT}.top_p", 1.0), plan.settings.get(f"{ROLLOUT}.top_k", -1)
            return SamplingRules(plan.temperature, top_p, max(0, top_k), plan.max_response_tokens)
        return SamplingRules(temperature=plan.val_temperature, max_tokens=plan.max_response_tokens)

    async def _answer(self) -> None:
        """Tell verl whether training goes on."""
        if self._answers is not None:
            await self._answers.put_async(self.run.stop_reason is None)

    def _start_groups(self, prompts: Seq[Prompt]) -> None:
        if prompts:
            self.run.progress.began(self._mode(prompts[0]), prompts[0].step, sum(p.n for p in prompts))
        for prompt in prompts:
            position = self._positions[prompt.partition, prompt.step]
            self._positions[prompt.partition, prompt.step] += 1
            task = asyncio.ensure_future(self._run_group(prompt, position))
            self._tasks.add(task)
            task.add_done_callback(self._end_group)

    def _end_group(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _run_group(self, prompt: Prompt, position: int) -> None:
        """Run a prompt's rollouts, and put their rows where verl's trainer looks for them.

        Args:
            position: of the prompt among those of its step.
        """
        await self._set_status(prompt, "running")
        tasks = self.run.val if prompt.validate else self.run.train
        results = await self.workplace.rollouts(
            [(prompt.index, tasks[prompt.index])],
            mode=self._mode(prompt),
            # The store counts steps from 0; a validation has the number of the steps that are done.
            step=prompt.step if prompt.validate else prompt.step - 1,
            group_size=prompt.n,
            metadata={"model": self._model},
            first=position,
            announce=False,
        )
        group = await asyncio.to_thread(self._rows, prompt, results)
        if prompt.validate:
            self._val_results[prompt.step] += results
        else:
            self._groups[prompt.uid] = metrics.GroupRecord(prompt, results, group)
        if group.rows:
            await asyncio.to_thread(put, prompt.partition, group.rows)
        self._check_empty(prompt, results, group)
        await self._set_status(prompt, "finished" if group.rows else "failure")

    def _mode(self, prompt: Prompt) -> Mode:
        if not prompt.validate:
            return "train"
        return "dev" if self._dry_run else "val"

    def _rows(self, prompt: Prompt, results: Seq[RolloutResult]) -> GroupRows:
        if prompt.validate:
            return val_rows(prompt, results, policy=self.policy)
        assert self._engine is not None, "verl asks for rollouts after its servers are up"
        return train_rows(
            prompt, results, self.run.config.credit, policy=self.policy, estimator=self.plan.adv_estimator,
            normalize_std=self.plan.normalize_std, own=self.plan.adv_estimator in PER_CALL,
            newest=self._engine.newest,
        )  # fmt: skip

    async def _set_status(self, prompt: Prompt, status: str) -> None:
        tag = {"status": status}
        await asyncio.to_thread(tq.kv_put, key=prompt.uid, partition_id=prompt.partition, tag=tag)

    def _check_empty(self, prompt: Prompt, results: list[RolloutResult], group: GroupRows) -> None:
        """End the run when a whole batch of groups has no row, instead of training on padding or sampling for ever.

        Raises:
            AglError: the error of the first rollout that failed, or the reason why the others cannot be trained.
        """
        if group.rows:
            self._empty_groups.clear()
            return
        self._empty_groups.append(results)
        if len(self._empty_groups) < (len(self.run.val) if prompt.validate else self.plan.batch_size):
            return
        what = f"the validation after step {prompt.step}" if prompt.validate else f"step {prompt.step}"
        require_some([r for results in self._empty_groups for r in results], what)
        reasons = sorted({c.dropped for c in group.scored.calls if c.dropped} if group.scored else ())
        raise NoTrainableDataError(
            f"{what} has nothing to train on: {'; '.join(reasons) or 'no call of the trained agents'}",
            hint="see why with agl explain, or raise max_attempts",
            step=prompt.step,
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _record_step(self, result: StepResult) -> None:
        run, step = self.run, result.step
        rows_by_key = {row.key: row for group in self._groups.values() for row in group.rows.rows}
        uids = list(dict.fromkeys(key.rsplit("_", 2)[0] for key in result.keys))
        trained = [self._groups.pop(uid) for uid in uids if uid in self._groups]
        # verl has thrown away the groups of a sync step that have no row.
        empty_uids = [uid for uid, g in self._groups.items() if not g.rows.rows and g.prompt.step <= step]
        groups = [*trained, *(self._groups.pop(uid) for uid in empty_uids)]
        rows = [rows_by_key[key] for key in result.keys if key in rows_by_key]
        await run.store.add_trained_calls(run.run_id, metrics.trained_calls(result, groups, rows, self.policy))
        await run.store.add_policy_version(run.run_id, self.policy, step, step)
        entry = metrics.facts(result, groups, rows, self.policy)
        if (results := self._val_results.pop(step, None)) is not None:
            entry |= measurement(results, "val", f"the validation after step {step}")
        await run.record(entry)
        checkpoints.write_record(run, self.plan)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, job: Any, queue: Any, existing: set[str]) -> None:
        """Stop all rollouts and everything of verl's.

        Args:
            existing: placement groups from before the training; they stay.
        """
        if self._update_timer is not None:
            self._update_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.workplace.stop()
        finally:
            # The job's process started everything of verl's, and Ray ends it with that process.
            kill = partial(ray.kill, job)
            close = [partial(q.shutdown, force=True) for q in (queue, self._answers) if q is not None]
            for end in (kill, *close, partial(cluster.release_placement_groups, existing), tq.close):
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(end)


async def _result(reference: Awaitable[Any]) -> None:
    """Wait for the job. Raises the error that stopped it: the original one if it is ours, else a `TrainingError`."""
    try:
        await reference
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else None
        if isinstance(cause, AglError):
            raise cause from None
        raise TrainingError(
            f"verl stopped: {_innermost(cause or error)}",
            hint=f"the trainer's own log has the rest: {cluster.log_directory()}",
        ) from error
    except ray.exceptions.RayError as error:
        raise TrainingError(
            f"verl's trainer died: {error}", hint=f"see the logs of Ray in {cluster.log_directory()}"
        ) from error


def _innermost(error: BaseException) -> str:
    """The first cause in one line: Ray, hydra and verl each wrap the errors that they pass on."""
    while (cause := error.__cause__ or getattr(error, "cause", None)) is not None and cause is not error:
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    messages = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return messages[-1] if messages else f"{type(error).__name__}: {lines[0] if lines else ''}"


def put(partition: str, rows: Seq[Row]) -> None:
    """Write rows to TransferQueue, ragged columns as nested tensors."""
    columns = {name: _column([row.fields[name] for row in rows]) for name in rows[0].fields}
    tq.kv_batch_put(
        keys=[row.key for row in rows], partition_id=partition, fields=TensorDict(columns, batch_size=[len(rows)]),
        tags=[row.tag for row in rows],
    )  # fmt: skip


def _column(values: Seq[Any]) -> Any:
    if not isinstance(values[0], np.ndarray):
        stack: Any = NonTensorStack
        return stack(*values)
    return torch.nested.as_nested_tensor([torch.from_numpy(v) for v in values], layout=torch.jagged)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """What a model's directory says about its tokens, without its weights.

    Attributes:
        tokenizer: as loaded. rendering: messages to tokens and back.
        stop_token_ids: end an answer, in addition to the rendering's own.
        check_ids: tokens of the weight check. vocabulary: how many ids the model knows; None if it does not say.
    """

    tokenizer: Any
    rendering: Rendering
    stop_token_ids: tuple[int, ...]
    check_ids: list[int]
    vocabulary: int | None


def _tokens(model: str) -> _Tokens:
    from transformers import AutoConfig

    from agl.trainer.local.tokenizer import load_tokenizer, stop_token_ids

    tokenizer = load_tokenizer(model)
    vocabulary = getattr(AutoConfig.from_pretrained(model).get_text_config(), "vocab_size", None)
    return _Tokens(
        tokenizer,
        Rendering(tokenizer),
        stop_token_ids(model, tokenizer),
        list(tokenizer.encode(_CHECK_TEXT)),
        vocabulary,
    )
