"""`agl.evaluate`: run an agent on held-out tasks, on several policies or on its own models, and measure each.

Every policy is one recorded run of `agl.Baseline`, and all runs of an evaluation are in one store. The tasks and their
seeds are the same for each, so the differences are paired.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agl._version import __version__
from agl.agents.agent import as_agent
from agl.agents.memory import MEMORY_MODES, MemoryMode
from agl.agents.resources import Dataset, as_tasks
from agl.agents.wrapping import wrap
from agl.errors import CheckpointError, ConfigError
from agl.rewards.function import is_group_reward
from agl.trainer.algorithms.baseline import Baseline
from agl.trainer.engines.base import ServedModel
from agl.trainer.evaluation.evaluation import Evaluation, Success
from agl.trainer.evaluation.policy_report import RolloutQuery
from agl.trainer.http.aio import blocking
from agl.trainer.local.prepared import model_directory
from agl.trainer.policies.frozen import FrozenPolicy
from agl.trainer.report.progress import Progress
from agl.trainer.run.checkpoints import latest_checkpoint, read_facts, require_same, write_atomically
from agl.trainer.run.config import require_positive
from agl.trainer.run.results import require_tasks
from agl.trainer.run.trainer import Trainer
from agl.trainer.store import open_store

Evaluated = str | Path | Mapping[str, str | Path] | ServedModel | None
OWN_MODEL = "own model"
"""The policy's name where an agent is evaluated on its own models alone."""
_FACTS = "evaluation.json"
_BLOCKS = 64
_BLOCK = 4096


async def evaluate_async(
    agent: Any,
    tasks: Dataset[Any] | Iterable[Any],
    policies: Policies | None = None,
    *,
    samples: int = 1,
    success: Success = 1.0,
    reward: Any = None,
    seed: int = 0,
    temperature: float | None = None,
    max_response_tokens: int | None = None,
    memory: Sequence[MemoryMode] = MEMORY_MODES,
    n_workers: int = 8,
    directory: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **options: Any,
) -> Evaluation:
    """Measure an agent on tasks that no policy was trained on.

    Args:
        agent: as `Trainer.fit` takes it.
        tasks: any JSON values; the same for each policy.
        policies: name -> a Hugging Face directory or hub id, the directory of a run or checkpoint, an engine such as
            `agl.VLLMEngine(url)`, or None for the agent's own models; pairs do as well. Where `agents=` sends agents
            to several policies, each is a mapping of these policies' names to directories, so that a trained one can
            play against a frozen one.
            None: the agent's own models alone. The others are compared with the first one.
        samples: rollouts per task.
        success: the total reward that makes a rollout a success, or a function of `RolloutSummary`.
        reward: (task, output) -> float or dict of floats, for an agent that is not wrapped. Or what compares the
            rollouts of one task and policy, as `Trainer(group_reward=)` takes it, for any agent.
        seed: fixes every request's sampling; the same for each policy.
        temperature, max_response_tokens: where a policy answers, they replace the agent's temperature and bound its
            answers; None leaves that to the agent. A training's validations have the training's own.
        memory: how agents that have a memory are evaluated: with it "on", "off", and "shuffled", which finds as many
            entries, but others. What is better on than shuffled was remembered. Other agents are evaluated once.
        n_workers: rollouts at once.
        directory: where the store goes; `agl-runs/eval-<id>` if None.
        resume: continue the interrupted evaluation in `directory`: run only what is missing.
        progress: show progress.
        **options: others of `agl.Trainer`: `agents`, `timeout`, `runners`, `max_attempts`, ...

    Raises:
        AglError: what went wrong, where, and what to do; also where all rollouts of a policy failed.
        asyncio.CancelledError: it was cancelled; what had ended is kept for `resume`.
    """
    require_positive(samples=samples)
    dataset = as_tasks(tasks)
    require_tasks(dataset, "the set of held-out tasks")
    named = [_Policy.of(name, policy) for name, policy in _named(policies)]
    if is_group_reward(reward):
        options["group_reward"] = reward
    elif reward is not None:
        agent = wrap(agent, reward)
    evaluated = list(_with_memory(agent, named, memory))
    place = Path(directory) if directory is not None else Path("agl-runs") / f"eval-{secrets.token_hex(4)}"
    sampling = {"temperature": temperature, "max_response_tokens": max_response_tokens}
    facts = {
        "seed": seed,
        "samples": samples,
        **sampling,
        "tasks": hashlib.sha256(json.dumps(list(dataset), sort_keys=True, default=str).encode()).hexdigest(),
        "policies": {policy.name: dict(policy.ran) for policy, _ in evaluated},
    }
    url = str(options.pop("store", None) or f"sqlite:///{place / 'run.db'}")
    # The modes of a memory follow one another, on a policy that is loaded once.
    loaded: dict[str, FrozenPolicy] = {}
    trainers = [
        Trainer(
            Baseline(repeats=samples, engine=policy.engine, model=policy.model, loaded=loaded, **sampling),
            n_workers=n_workers,
            directory=place / f"policy-{i}",
            seed=seed,
            name=policy.name,
            **options,
        )
        for i, (policy, _) in enumerate(evaluated)
    ]
    evaluation_id = _begin(place, facts, resume)
    store = await open_store(url)
    try:
        queries = {}
        for i, ((policy, remembering), trainer) in enumerate(zip(evaluated, trainers, strict=True)):
            run_id = f"{evaluation_id}-{i}"
            ran = {**policy.ran, **sampling, "seed": seed, "agl": __version__}
            queries[policy.name] = RolloutQuery(run_id, ran=ran)
            known = await store.query_runs(run_ids=[run_id])
            if known and known[0].status == "succeeded":
                continue
            for other in loaded.keys() - policy.models:
                await loaded.pop(other).close()
            trainer.store = store
            shown = Progress(progress, label=policy.name)
            await trainer.fit_async(remembering, [], dataset, resume=bool(known), run_id=run_id, progress=shown)
        return await Evaluation.of_runs(store, url, queries, success=success)
    except asyncio.CancelledError:
        Progress(progress).note(f"stopped; the rollouts so far are in {place}. Continue with resume=True / --resume")
        raise
    finally:
        await asyncio.gather(*(policy.close() for policy in loaded.values()))
        await store.close()


evaluate = blocking(evaluate_async)
"""`evaluate_async` for callers outside an event loop; Ctrl-C cancels it."""


@dataclass(frozen=True, slots=True)
class _Policy:
    """One of the policies to evaluate; the agent's own models where it has neither `model` nor `engine`."""

    name: str
    model: str | Mapping[str, str] | None
    engine: ServedModel | None
    ran: Mapping[str, Any]

    @property
    def models(self) -> set[str]:
        """The directories of what it loads."""
        return set(self.model.values()) if isinstance(self.model, Mapping) else {self.model} if self.model else set()

    @classmethod
    def of(cls, name: str, policy: Any) -> _Policy:
        if policy is None:
            return cls(name, None, None, {"model": None})
        if isinstance(policy, Mapping):
            parts = {part: cls.of(f"{name}: {part}", model) for part, model in policy.items()}
            models = {part: of.model for part, of in parts.items() if isinstance(of.model, str)}
            if models.keys() != parts.keys():
                raise ConfigError(f"{name!r} is {dict(policy)!r}", hint="give each of its policies a directory")
            ran = {key: {part: of.ran[key] for part, of in parts.items()} for key in ("model", "fingerprint")}
            return cls(name, models, None, ran)
        if not isinstance(policy, str | Path):
            # Baseline refuses what is no engine.
            return cls(name, None, policy, {"model": getattr(policy, "url", None)})
        path = Path(policy)
        directory = model_directory(str(policy))
        if path.is_dir() and not (Path(directory) / "config.json").is_file():
            last = latest_checkpoint(path)
            raise ConfigError(
                f"{name!r} is {path}, which has no policy",
                hint="a run writes its policy at its end"
                + (f"; its last checkpoint is {last}" if last is not None else ", and this one has no checkpoint"),
            )
        return cls(name, directory, None, {"model": directory, "fingerprint": fingerprint(directory)})


def _with_memory(agent: Any, policies: Sequence[_Policy], modes: Sequence[MemoryMode]) -> Iterator[tuple[_Policy, Any]]:
    """Each policy with the agent as it is evaluated: once for each mode of the agent's memory, if it has one."""
    use = None if agent is None or isinstance(agent, str) else as_agent(agent).memory
    if use is None:
        yield from ((policy, agent) for policy in policies)
        return
    if not modes or set(modes) - set(MEMORY_MODES):
        raise ConfigError(f"memory= is {modes!r}", hint=f"some of {', '.join(MEMORY_MODES)}")
    for policy in policies:
        for mode in modes:
            name = policy.name if mode == "on" else f"{policy.name}, memory {mode}"
            variant = replace(policy, name=name, ran={**policy.ran, "memory": mode})
            yield variant, replace(as_agent(agent), memory=replace(use, mode=mode))


Policies = Mapping[str, Evaluated] | Iterable[tuple[str, Evaluated]]


def _named(policies: Policies | None) -> list[tuple[str, Any]]:
    if policies is None:
        return [(OWN_MODEL, None)]
    if isinstance(policies, str | Path):
        raise ConfigError(f"policies= is {policies!r}", hint="give it a name: policies={'now': ...}")
    pairs: list[Any] = list(policies.items() if isinstance(policies, Mapping) else policies)
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two policies are called {name!r}", hint="give each a different name")
    if not pairs:
        raise ConfigError("policies= is empty", hint="leave it out to evaluate the agent on its own models")
    return pairs


def _begin(place: Path, facts: Mapping[str, Any], resume: bool) -> str:
    """Make the directory, or check that it holds the interrupted evaluation with these facts; returns its id."""
    path = place / _FACTS
    if resume:
        if not path.is_file():
            raise CheckpointError("there is no evaluation to resume", hint="name its directory", path=place)
        then = read_facts(path, {"id": str}, hint="start a new evaluation in another directory")
        require_same(then, facts, place)
        return then["id"]
    if path.exists():
        raise ConfigError(
            f"{place} already has an evaluation",
            hint="resume it (resume=True, --resume), or choose another directory",
        )
    evaluation_id = f"eval-{secrets.token_hex(4)}"
    try:
        write_atomically(path, json.dumps({"id": evaluation_id, **facts}, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the evaluation's directory cannot be written: {error}",
            hint="check its permissions and the space on its disk, or choose another directory",
            path=place,
        ) from error
    return evaluation_id


def fingerprint(model: str) -> str | None:
    """16 hex digits that differ between two models with high probability, without reading them whole: SHA-256 of the
    config, and of each safetensors file's size and 64 evenly spaced blocks of 4 KiB, its header among them.

    Args:
        model: a directory, or the id of a hub model, which is looked up in the local cache; None if it is not there.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            config = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return None
        if not isinstance(config, str):
            return None
        directory = Path(config).parent
    digest = hashlib.sha256()
    for path in (directory / "config.json", *sorted(directory.glob("*.safetensors"))):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(_BLOCKS):
                file.seek(i * max(_BLOCK, (size - _BLOCK) // (_BLOCKS - 1)))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]
