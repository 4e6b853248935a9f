"""Puts a trained policy on the Hugging Face hub, with a model card that says what was trained and how good it got.

Invariant: one commit, all or nothing; it holds the policy's files and the card alone, no rollouts and texts.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl._version import __version__
from agl.errors import ConfigError, HubError
from agl.trainer.report.statistics import reward_interval
from agl.trainer.run.checkpoints import latest_local
from agl.trainer.run.history import SavedHistory, read_history
from agl.trainer.store.base import Runs, Store
from agl.trainer.store.location import read_store
from agl.trainer.store.types import RolloutSummary

COMMAND_FILE = "command"
"""In a run's directory: how the program was called that trained."""
_PAGE = 256
_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")


@dataclass(frozen=True, slots=True)
class Measured:
    """A validation.

    Attributes:
        step: completed steps.
        reward: the mean.
        low, high: its 95 % interval, by Student's t over tasks; None where the
            rollouts are not here. tasks: how many.
    """

    step: int
    reward: float
    low: float | None = None
    high: float | None = None
    tasks: int | None = None


def push(
    directory: str | Path,
    repo: str,
    *,
    policy: str | None = None,
    adapter: bool = False,
    private: bool | None = None,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Upload a policy to the hub, to a repository that is made if it is not there.

    Args:
        directory: of a run, of one of its checkpoints, of a policy of either, or any Hugging Face model.
        repo: "name" or "organisation/name".
        policy: which one, where a run has several.
        adapter: upload only the LoRA adapter, for `peft`, instead of the merged model.
        private: whether a new repository is; None = as the account's or organisation's settings say.
        token: with the right to write; None = HF_TOKEN, or that of `hf auth login`.
        message: of the commit.

    Returns:
        The URL of the model.

    Raises:
        ConfigError: there is no such policy or adapter.
        HubError: the hub refuses, or cannot be reached.
    """
    files, run_directory = _policy_files(Path(directory).expanduser(), policy)
    if adapter:
        files = files if (files / "adapter_config.json").is_file() else files / "adapter"
        if not (files / "adapter_config.json").is_file():
            raise ConfigError(
                "there is no LoRA adapter here", hint="train one with lora=, or push the whole model", path=files
            )
    if (files / "adapter_config.json").is_file():
        _require_known_tokens(files)
    from huggingface_hub import CommitOperationAdd, HfApi

    paths = [path for path in sorted(files.rglob("*")) if path.is_file() and path.name not in ("README.md", ".agl")]
    with _refusals(repo):
        api = HfApi(token=token, library_name="agl", library_version=__version__)
        name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        card = model_card(name, files, run_directory)
        added = [CommitOperationAdd(str(path.relative_to(files)), path) for path in paths]
        added.append(CommitOperationAdd("README.md", card.encode()))
        api.create_commit(name, added, commit_message=message or f"Upload with agl {__version__}")
    return f"{api.endpoint}/{name}"


def model_card(repo: str, files: Path, run_directory: Path | None) -> str:
    """The README.md of a policy: metadata for the hub, what was trained, and how good it was before and after.

    Args:
        repo: its name on the hub.
        files: its directory.
        run_directory: of the run that trained it, if any.
    """
    saved = None if run_directory is None else read_history(run_directory)
    is_adapter = (files / "adapter_config.json").is_file()
    base = None if saved is None else str(saved.settings.get("model") or "") or None
    on_hub = base is not None and not Path(base).expanduser().exists() and base.count("/") == 1
    metadata = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["agl", "reinforcement-learning", *([saved.algorithm.lower()] if saved else [])],
        **({"base_model": base, "base_model_relation": "adapter" if is_adapter else "finetune"} if on_hub else {}),
    }
    import yaml

    lines = ["---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---", "", f"# {repo.rpartition('/')[2]}", ""]
    lines += ["A policy for LLM agents, trained with agl." if saved else "A policy for LLM agents.", ""]
    if saved is not None and run_directory is not None:
        lines += _facts(saved, base if on_hub else base and Path(base).name, files)
        lines += _results(_validations(saved, run_directory))
        with contextlib.suppress(OSError):
            text = (run_directory / COMMAND_FILE).read_text(encoding="utf-8", errors="replace").strip()
            lines += ["## Command", "", "```", text, "```", ""]
    return "\n".join([*lines, *_usage(repo, is_adapter, base if on_hub else "BASE_MODEL"), ""])


def save_command(directory: Path) -> None:
    """Keep how this program was called next to its run, without passwords in URLs; nothing in a notebook."""
    # A library may have imported IPython outside of a notebook, too.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None and sys.argv and sys.argv[0]:
        program = Path(sys.argv[0]).name
        words = [program] if program == "agl" else ["python", program]
        text = _PASSWORD.sub("...@", shlex.join([*words, *sys.argv[1:]]))
        (directory / COMMAND_FILE).write_text(f"{text}\n", encoding="utf-8", errors="surrogateescape")


# -- what a directory holds -------------------------------------------------------------------------------------------


def _policy_files(directory: Path, policy: str | None) -> tuple[Path, Path | None]:
    """The directory of a policy, and that of its run if it lies in one."""
    if not directory.is_dir():
        raise ConfigError("no such directory", hint="name a run, a checkpoint or a model", path=directory)
    for root in (directory, latest_local(directory)):
        if root is None:
            continue
        several = {path.name: path for path in sorted((root / "policies").glob("*")) if _is_model(path)}
        if several and policy not in several:
            raise ConfigError(
                f"the run has {len(several)} policies" if policy is None else f"there is no policy {policy!r}",
                hint=f"choose one with policy= or --policy: {', '.join(several)}",
                path=directory,
            )
        files = several[policy] if several and policy is not None else root / "policy"
        if _is_model(files):
            return files, _run_of(files)
    if _is_model(directory):
        return directory, _run_of(directory)
    raise ConfigError(
        "there is no policy here",
        hint="name a run that has a checkpoint, a checkpoint, or a directory with config.json and weights",
        path=directory,
    )


def _require_known_tokens(adapter: Path) -> None:
    """Refuse an adapter for a base that nobody else has: the merged model next to it says what was added."""
    config = adapter.parent / "config.json"
    # The key is `agl.trainer.local.embeddings.ADDED_TOKENS`, which loads torch.
    added = json.loads(config.read_text(encoding="utf-8")).get("agl_added_tokens") if config.is_file() else None
    if added:
        raise ConfigError(
            f"the adapter belongs to a model with {len(added)} more tokens than its base: its chat template added them",
            hint="push the whole model, without --adapter",
            path=adapter,
        )


def _is_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))


def _run_of(files: Path) -> Path | None:
    """The run's directory above a policy's."""
    return next((p for p in list(files.resolve().parents)[:4] if (p / "run-id").is_file()), None)


# -- the card ---------------------------------------------------------------------------------------------------------


def _facts(saved: SavedHistory, base: str | None, files: Path) -> Iterator[str]:
    shown = ("learning_rate", "group_size", "batch_size", "epochs", "kl_coef", "temperature", "lora")
    settings = {name: saved.settings.get(name) for name in shown}
    settings["learning_rate"] = _peak_rate(saved, files) or settings["learning_rate"]
    rows = {
        "base model": base,
        "algorithm": saved.algorithm,
        "steps": saved.step,
        **{name.replace("_", " "): value for name, value in settings.items() if value is not None},
        "weights": "LoRA adapter" if not (files / "config.json").is_file() else None,
        "trained with": f"agl {__version__}",
    }
    yield from ("| | |", "|---|---|")
    for name, value in rows.items():
        if value is not None:
            yield f"| {name} | {value} |"
    yield ""


def _peak_rate(saved: SavedHistory, files: Path) -> float | None:
    """The highest learning rate of this policy's updates: nobody may have set it, or set it for other policies."""
    policy = f"{files.name}/" if files.parent.name == "policies" else ""
    rates = [entry.get(f"{policy}learner/learning_rate") for entry in saved.entries]
    return max((rate for rate in rates if rate is not None), default=None)


def _validations(saved: SavedHistory, run_directory: Path) -> list[Measured]:
    """The first and the last validation; with intervals where the run's store is in its directory."""
    steps = [(int(e["step"]), float(e["val/reward"])) for e in saved.entries if e.get("val/reward") is not None]
    ends = dict.fromkeys((steps[0], steps[-1])) if steps else {}
    if not (run_directory / "run.db").is_file():
        return [Measured(step, reward) for step, reward in ends]

    async def read(store: Store) -> list[Measured]:
        return [_measured(step, reward, await _summaries(store, saved.run_id, step)) for step, reward in ends]

    return read_store(run_directory, read)


async def _summaries(store: Runs, run_id: str, step: int) -> list[RolloutSummary]:
    found: list[RolloutSummary] = []
    while True:
        after = found[-1].rollout.rollout_id if found else None
        page = await store.query_step(run_id, step, mode="val", after=after, limit=_PAGE)
        found += page
        if len(page) < _PAGE:
            return found


def _measured(step: int, reward: float, summaries: Sequence[RolloutSummary]) -> Measured:
    by_task: dict[str | None, list[float]] = defaultdict(list)
    for summary in summaries:
        if summary.reward is not None:
            by_task[summary.rollout.group].append(summary.reward)
    # Other rollouts than those that the history was made of, as after a crash, would give another mean.
    means_T = [math.fsum(rewards) / len(rewards) for rewards in by_task.values()]
    if len(means_T) < 2 or abs(math.fsum(means_T) / len(means_T) - reward) > 1e-6:
        return Measured(step, reward)
    return Measured(step, reward, *reward_interval([*by_task.values()]), len(means_T))


def _results(validations: Sequence[Measured]) -> Iterator[str]:
    if not validations:
        return
    yield from ("## Held-out tasks", "", "| after step | mean reward | 95 % interval | tasks |", "|---|---|---|---|")
    for v in validations:
        interval = "" if v.low is None else f"{v.low:.3f} to {v.high:.3f}"
        yield f"| {v.step} | {v.reward:.3f} | {interval} | {v.tasks or ''} |"
    yield ""


def _usage(repo: str, is_adapter: bool, base: str | None) -> Iterator[str]:
    yield from ("## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer")
    if is_adapter:
        yield "from peft import PeftModel"
        yield ""
        yield f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{repo}")'
        yield f'tokenizer = AutoTokenizer.from_pretrained("{base}")'
    else:
        yield ""
        yield f'model = AutoModelForCausalLM.from_pretrained("{repo}")'
        yield f'tokenizer = AutoTokenizer.from_pretrained("{repo}")'
    yield "```"
    if not is_adapter:
        yield from ("", f"In an agent of yours: `agl run --model {repo} -- python my_agent.py`.")
        yield from ("", f"In an application: `agl serve {repo}`.")


# -- the hub ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _refusals(repo: str) -> Iterator[None]:
    """What the hub refuses, as errors that say what to do."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(
            f"{repo!r} is not a valid name on the hub: {_line(error)}", hint='"organisation/name"'
        ) from error
    except HfHubHTTPError as error:
        hints: Mapping[int, str] = {
            401: "set HF_TOKEN to a token that may write, or run: hf auth login",
            403: "the token may not write there: make one with the right to write, or choose another repository",
            413: "the files are too large for the account",
        }
        status = error.response.status_code
        raise HubError(
            f"the hub refuses ({status}): {error.server_message or _line(error)}",
            hint=hints.get(status, "look at the message of the hub, or try again later"),
            repo=repo,
        ) from error
    except (httpx.TransportError, OSError, ValueError) as error:
        raise HubError(
            f"the upload failed: {_line(error)}",
            hint="check that the hub can be reached, and try again: large files that are there are not sent twice",
            repo=repo,
        ) from error


def _line(error: BaseException) -> Any:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
