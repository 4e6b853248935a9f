"""A run trained by verl: its trainer asks for rollouts, the run's runners execute them, and their rows go to verl."""

from __future__ import annotations

import asyncio
import contextlib
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
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.run.run import Run, require_some, require_tasks
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import Mode
from agl.trainer.verl import checkpoints, cluster
from agl.trainer.verl import metrics as record
from agl.trainer.verl.config.checks import PER_CALL
from agl.trainer.verl.config.plan import ROLLOUT, Plan
from agl.trainer.verl.engine import VerlEngine
from agl.trainer.verl.events import Asked, Begun, Message, Over, Saved, Serving, Stepped
from agl.trainer.verl.job import TrainerJob
from agl.trainer.verl.overrides import fixed, ray_init, runtime_env, total_gpus
from agl.trainer.verl.rows import Group, Prompt, Row, train_rows, val_rows

T = TypeVar("T")

_PROBE = "One fixed sentence tells whether the servers have the weights that were just trained: 0123456789."
_QUIET_SECONDS = 300.0
"""After how long without a word from verl, and without a rollout that runs, it is said where its logs are."""
_LOST_SECONDS = 4 * 3600.0
"""After how long it is given up: longer than any update should take."""


async def train(run: Run, plan: Plan) -> None:
    """Train a run to its end with verl, or until cancelled; leaves no actor behind either way.

    `wiring.environment` comes first: TransferQueue, which is imported with this module, reads it then.

    Raises:
        AglError: what went wrong, where, and what to do.
    """
    require_tasks(run.train, "the training dataset")
    await _on_ray(run, plan, _Bridge.train)


async def dev(run: Run, plan: Plan, n_tasks: int) -> list[RolloutResult]:
    """A dry run on verl's servers: a rollout of each of the first tasks, no update."""
    require_tasks(run.train, "the dataset")
    run.train = list(run.train[:n_tasks])
    run.val = run.train
    return await _on_ray(run, plan, _Bridge.dev)


async def _on_ray(run: Run, plan: Plan, what: Callable[[_Bridge], Awaitable[T]]) -> T:
    if len(run.selection.policies) > 1 or run.policies:
        raise ConfigError(
            "verl trains one model, and agents= names several policies",
            hint="train them one after another, or on one machine with agl.GRPO(...)",
        )
    try:
        async with cluster.joined(ray_init(plan), gpus=total_gpus(plan)):
            return await what(_Bridge(run, plan))
    finally:
        run.progress.stop()


class _Bridge:
    """One training. Lives on the run's event loop."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run, self.plan = run, plan
        self.policy = run.selection.policies[0]
        # By which `explain` finds the tokenizer later, from any directory.
        self._model = str(Path(plan.model).resolve()) if Path(plan.model).exists() else plan.model
        self._groups: dict[str, record.Seen] = {}
        self._places: Counter[tuple[str, int]] = Counter()
        self._validated: dict[int, list[RolloutResult]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._dry = False
        self._engine: VerlEngine | None = None
        self._lost: list[list[RolloutResult]] = []
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def dev(self) -> list[RolloutResult]:
        self._dry = True
        only = {"trainer.val_only": True, "trainer.val_before_train": True}
        await self._fit({**fixed(self.run, self.plan, first_step=0), **only})
        return self._validated[0]

    async def train(self) -> None:
        run, plan = self.run, self.plan
        state = checkpoints.restore(run, plan) if run.resume else None
        start = state.step if state else 0
        if run.resume:
            await run.resume_from(start, {self.policy: start})
        await self._fit(fixed(run, plan, first_step=start))
        run.policy_paths = {self.policy: checkpoints.publish(run)}

    async def _fit(self, settings: Mapping[str, Any]) -> None:
        """Have verl's trainer do what its config says, and do what it asks for meanwhile."""
        plan = self.plan
        tokens = await asyncio.to_thread(_tokens, plan.model)
        config = plan.compose(settings)
        before = await asyncio.to_thread(cluster.groups)
        queue = await asyncio.to_thread(ray.util.queue.Queue, actor_options={"num_cpus": 0})
        actor: Any = ray.remote(TrainerJob)
        job = actor.options(num_cpus=1, max_restarts=0, runtime_env=runtime_env(plan)).remote(queue)
        try:
            ended = asyncio.ensure_future(_result(job.run.remote(config, tokens.probe)))
            await self._follow(queue, ended, tokens)
        finally:
            await self._end(job, queue, before)

    async def _follow(self, queue: Any, ended: asyncio.Future[None], tokens: _Tokens) -> None:
        """Do what verl's trainer asks for until it is done."""
        coming: asyncio.Future[Message] = asyncio.ensure_future(queue.get_async())
        quiet = 0.0
        try:
            while True:
                watched = (coming, self._broken) if ended.done() else (coming, self._broken, ended)
                done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED, timeout=_QUIET_SECONDS)
                quiet = 0.0 if done or self._tasks else quiet + _QUIET_SECONDS
                if quiet:
                    self._say_quiet(quiet)
                if self._broken.done():
                    self._broken.result()
                if ended.done():
                    ended.result()
                if not coming.done():
                    continue
                message = coming.result()
                if isinstance(message, Over):
                    return
                coming = asyncio.ensure_future(queue.get_async())
                await self._take(message, tokens)
        finally:
            coming.cancel()
            if not ended.done():
                ended.cancel()

    def _say_quiet(self, seconds: float) -> None:
        """verl waits for ever for a worker or server of its own that has died."""
        said = f"no word from verl for {seconds / 60:.0f} minutes; its logs: {cluster.log_directory()}"
        if seconds >= _LOST_SECONDS:
            raise TrainingError(said, hint="one of its workers or servers may have died: go on with resume=True")
        self.run.progress.note(said)

    async def _take(self, message: Message, tokens: _Tokens) -> None:
        match message:
            case Serving(client):
                await self._serve(client, tokens)
            case Begun(step, steps):
                self._begin(step, steps)
            case Asked(prompts):
                self._ask(prompts)
            case Saved(step, path):
                checkpoints.saved(self.run, self.plan, step, path)
            case Stepped():
                await self._stepped(message)
            case Over():
                pass

    # -- rollouts -----------------------------------------------------------------------------------------------------

    async def _serve(self, client: Any, tokens: _Tokens) -> None:
        run, plan = self.run, self.plan
        await asyncio.to_thread(tq.init)
        seeds = bool(plan.given.get(f"{ROLLOUT}.full_determinism"))
        engine = self._engine = VerlEngine(client, plan.max_context, vocabulary=tokens.vocabulary, seeds=seeds)

        def register(gateway: Gateway) -> None:
            gateway.serve(self.policy, engine, tokens.rendering, tokens.stop_token_ids)

        await run.start(self._rules, self.policy, register=register)
        if run.runners != "remote" and run.n_workers < min(64, plan.batch_size * plan.group_size):
            run.progress.note(
                f"n_workers={run.n_workers}: so many of a step's {plan.batch_size * plan.group_size} rollouts run at "
                "once; verl's servers take more"
            )

    def _rules(self, mode: str) -> SamplingRules:
        plan = self.plan
        if mode == "train":
            top_p, top_k = plan.given.get(f"{ROLLOUT}.top_p", 1.0), plan.given.get(f"{ROLLOUT}.top_k", -1)
            return SamplingRules(plan.temperature, top_p, max(0, top_k), plan.max_response_tokens)
        return SamplingRules(temperature=plan.val_temperature, max_tokens=plan.max_response_tokens)

    def _begin(self, step: int, steps: int) -> None:
        self.run.progress.start(steps, step)
        if (results := self._validated.pop(step, None)) is not None and not self.run.history:
            self.run.history.append({"step": step, **record.validation(results)})

    def _ask(self, prompts: Seq[Prompt]) -> None:
        if prompts:
            self.run.progress.began(self._mode(prompts[0]), prompts[0].step, sum(p.n for p in prompts))
        for prompt in prompts:
            place = self._places[prompt.partition, prompt.step]
            self._places[prompt.partition, prompt.step] += 1
            task = asyncio.ensure_future(self._group(prompt, place))
            self._tasks.add(task)
            task.add_done_callback(self._group_over)

    def _group_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _group(self, prompt: Prompt, place: int) -> None:
        """Run a prompt's rollouts and put what they came to where verl's trainer looks for it."""
        await self._tag(prompt, "running")
        tasks = self.run.val if prompt.validate else self.run.train
        results = await self.run.rollouts(
            [(prompt.index, tasks[prompt.index])],
            mode=self._mode(prompt),
            # A step is counted from 0 in the store, and a validation has the number of the steps that are done.
            step=prompt.step if prompt.validate else prompt.step - 1,
            group_size=prompt.n,
            metadata={"model": self._model},
            first=place,
            announce=False,
        )
        group = await asyncio.to_thread(self._rows, prompt, results)
        if prompt.validate:
            self._validated[prompt.step] += results
        else:
            self._groups[prompt.uid] = record.Seen(prompt, results, group)
        if group.rows:
            await asyncio.to_thread(put, prompt.partition, group.rows)
        self._count_lost(prompt, results, group)
        await self._tag(prompt, "finished" if group.rows else "failure")

    def _mode(self, prompt: Prompt) -> Mode:
        if not prompt.validate:
            return "train"
        return "dev" if self._dry else "val"

    def _rows(self, prompt: Prompt, results: Seq[RolloutResult]) -> Group:
        if prompt.validate:
            return val_rows(prompt, results, policy=self.policy)
        assert self._engine is not None, "verl asks for rollouts after its servers are up"
        return train_rows(
            prompt, results, self.run.credit, policy=self.policy, estimator=self.plan.estimator,
            normalize_std=self.plan.normalize_std, own=self.plan.estimator in PER_CALL,
            newest=self._engine.newest,
        )  # fmt: skip

    async def _tag(self, prompt: Prompt, status: str) -> None:
        tag = {"status": status}
        await asyncio.to_thread(tq.kv_put, key=prompt.uid, partition_id=prompt.partition, tag=tag)

    def _count_lost(self, prompt: Prompt, results: list[RolloutResult], group: Group) -> None:
        """End the run when a whole batch came to nothing, rather than train on padding or ask for ever.

        Raises:
            AglError: that of the first rollout that failed; or what kept the others from being trained.
        """
        if group.rows:
            self._lost.clear()
            return
        self._lost.append(results)
        if len(self._lost) < (len(self.run.val) if prompt.validate else self.plan.batch_size):
            return
        what = f"the validation after step {prompt.step}" if prompt.validate else f"step {prompt.step}"
        require_some([r for results in self._lost for r in results], what)
        reasons = sorted({c.dropped for c in group.scored.calls if c.dropped} if group.scored else ())
        raise NoTrainableDataError(
            f"{what} has nothing to train on: {'; '.join(reasons) or 'no call of the trained agents'}",
            hint="see why with agl explain, or raise max_attempts",
            step=prompt.step,
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _stepped(self, done: Stepped) -> None:
        run = self.run
        rows = {row.key: row for seen in self._groups.values() for row in seen.group.rows}
        uids = list(dict.fromkeys(key.rsplit("_", 2)[0] for key in done.keys))
        trained = [self._groups.pop(uid) for uid in uids if uid in self._groups]
        # What a sync step had and did not train came to nothing, and verl has thrown it away.
        over = [uid for uid, s in self._groups.items() if not s.group.rows and s.prompt.step <= done.step]
        empty = [self._groups.pop(uid) for uid in over]
        seen, used = [*trained, *empty], [rows[k] for k in done.keys if k in rows]
        await run.store.add_trained_calls(run.run_id, record.trained_calls(done, seen, used, self.policy))
        await run.store.add_policy_version(run.run_id, self.policy, done.step, done.step)
        entry = record.facts(done, seen, used, self.policy)
        if (results := self._validated.pop(done.step, None)) is not None:
            entry |= record.validation(results)
        run.history.append(entry)
        run.progress.step(entry)
        checkpoints.note_history(run, self.plan)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, job: Any, queue: Any, before: set[str]) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.run.stop()
        finally:
            # Everything of verl's was started by the job's process, and Ray ends it with that.
            kill, close = partial(ray.kill, job), partial(queue.shutdown, force=True)
            for end in (kill, close, partial(cluster.release, before), tq.close):
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(end)


async def _result(reference: Awaitable[Any]) -> None:
    """Wait for the job. Raises what stopped it, as ours where it is."""
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
    """The error that began it, in one line: Ray, hydra and verl each wrap what they pass on."""
    while (under := error.__cause__ or getattr(error, "cause", None)) is not None and under is not error:
        error = under
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return told[-1] if told else f"{type(error).__name__}: {lines[0] if lines else ''}"


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
    """What is known of a model's tokens without its weights.

    Attributes:
        rendering: messages to tokens and back. stop_token_ids: what ends an answer beside the rendering's own.
        probe: the probe's tokens. vocabulary: how many ids the model knows, where it says so.
    """

    rendering: Rendering
    stop_token_ids: tuple[int, ...]
    probe: list[int]
    vocabulary: int | None


def _tokens(model: str) -> _Tokens:
    from transformers import AutoConfig

    from agl.trainer.local.model import load_tokenizer, stop_token_ids

    tokenizer = load_tokenizer(model)
    vocabulary = getattr(AutoConfig.from_pretrained(model).get_text_config(), "vocab_size", None)
    return _Tokens(Rendering(tokenizer), stop_token_ids(model, tokenizer), list(tokenizer.encode(_PROBE)), vocabulary)
