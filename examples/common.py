"""What the examples share: their options, a policy from scratch for `--tiny`, and their results."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import agl
from agl.testing.provider import Reply, Script, serve
from agl.trainer.quickstart.policy import make_policy
from agl.trainer.quickstart.tokenizer import WORDS

EXAMPLES = Path(__file__).parent


def arguments(
    example: str,
    doc: str | None,
    argv: Sequence[str] | None = None,
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> argparse.Namespace:
    """The options of an example.

    Args:
        example: its name. doc: what `--help` says. argv: None for the command's. add: adds the example's own.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    policy = parser.add_mutually_exclusive_group(required=True)
    policy.add_argument("--model", help="the model to train: a Hugging Face directory or hub id")
    policy.add_argument("--tiny", action="store_true", help="a policy from scratch, on a small form of the task")
    parser.add_argument("--debug", action="store_true", help="three tasks, told in full; nothing is trained")
    parser.add_argument("--short", action="store_true", help="with --tiny: a minute's worth of it, to see that it runs")
    parser.add_argument("--steps", type=int, help="updates; else as the example says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help=f"directory of what is written, new; runs/{example}-SEED if left out")
    parser.add_argument("--endpoint", default="http://127.0.0.1:8000/v1", help="server of agents that are not trained")
    parser.add_argument("--endpoint-model", default="default", help="its model")
    parser.add_argument("--save", action="store_true", help="keep the result for the tables of the READMEs")
    add(parser)
    options = parser.parse_args(argv)
    if options.short and not options.tiny:
        parser.error("--short is a shorter --tiny")
    # With one thread the same seed gives the same policy wherever it is trained.
    options.threads = 1 if options.tiny else None
    if options.tiny:
        os.environ["OMP_NUM_THREADS"] = "1"  # evaluation's policies, too
    options.out = options.out or Path("runs") / f"{example}-{options.seed}"
    return options


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A provider's server: base URL with /v1, model, key."""

    url: str
    model: str
    key: str


@contextmanager
def provider(options: argparse.Namespace, script: Script) -> Iterator[Endpoint]:
    """Where agents that no policy answers go: a scripted model with `--tiny`, else the server of `--endpoint`."""
    if not options.tiny:
        yield Endpoint(options.endpoint, options.endpoint_model, os.environ.get("OPENAI_API_KEY", "none"))
        return
    with serve(script) as server:
        yield Endpoint(server.url, "scripted", "none")


def debug(agent: Any, tasks: Sequence[Any], options: argparse.Namespace, **trainer: Any) -> None:
    """Run three tasks, by `--model` or with `--tiny` by the script, and tell what was said, called and earned."""
    report = agl.evaluate(
        agent, tasks[:3], {options.model or "scripted": options.model}, directory=options.out / "debug", **trainer
    )
    for policy in report.policies.values():
        for rollout in policy.rollouts:
            print(f"\n== task {rollout.task}: {json.dumps(tasks[rollout.task])}\n{rollout.transcript}")
            print(f"reward {rollout.reward}" if rollout.error is None else f"failed: {rollout.error}")


def tiny_policy(
    build: Callable[[Endpoint], Any],
    tasks: Sequence[Any],
    beginner: Script,
    place: Path,
    *,
    agents: Any = None,
    seed: int = 0,
    epochs: int = 10,
    batch_size: int = 16,
    learning_rate: float = 2e-3,
    max_context: int = 256,
    max_response_tokens: int = 48,
    vocabulary: int = 768,
    words: str = WORDS,
    hidden: int = 128,
    layers: int = 2,
    induction: bool = False,
    n_workers: int = 16,
) -> str:
    """A policy that knows the form of the task and mostly errs: from random weights, by imitation of a script.

    The agent itself is run on the script, so that the policy sees the very prompts that it is trained on later. Its
    tokenizer is made from the texts that were sent and said.

    Args:
        build: the wrapped agent on a provider. tasks: recorded once each. beginner: what is imitated.
        place: a directory; a policy that is there already is taken.
        agents: whose calls are imitated, as `Trainer(agents=)`; None for all.
        epochs, batch_size, learning_rate, max_context, max_response_tokens: of `agl.SFT`.
        vocabulary, words, hidden, layers, induction: of `make_policy`.

    Returns:
        The model's directory.
    """
    if (place / "done").exists():
        return (place / "done").read_text()
    shutil.rmtree(place, ignore_errors=True)
    said: list[str] = []

    def script(body: dict[str, Any]) -> Reply:
        reply = beginner(body)
        said.append(reply.content or "")
        said.extend(f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}' for name, arguments in reply.tools)
        return reply

    with serve(script) as server:
        agl.Trainer(agl.Baseline(), n_workers=n_workers, directory=place / "recorded", seed=seed, agents=agents).fit(
            build(Endpoint(server.url, "scripted", "none")), tasks
        )
        corpus = said + [text for request in server.seen for text in _texts(request.body)]
    tokenizer: Any = {"corpus": corpus, "vocabulary": vocabulary, "words": words}
    shape: Any = {"hidden": hidden, "layers": layers, "induction": induction}
    blank = make_policy(place / "blank", seed=seed, stages=(), **tokenizer, **shape)
    imitated = agl.Trainer(
        agl.SFT(
            model=str(blank.directory),
            data=agl.traces(place / "recorded"),
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            betas=(0.9, 0.98),
            warmup_steps=20,
            schedule="linear",
            max_context=max_context,
            max_response_tokens=max_response_tokens,
            threads=1,
        ),
        directory=place / "imitated",
        seed=seed,
        agents=agents,
    ).fit(None)
    (place / "done").write_text(str(imitated.policy))
    return str(imitated.policy)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a request."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def save(
    example: str, reports: agl.Evaluation | Sequence[agl.Evaluation], options: argparse.Namespace, **more: Any
) -> dict[str, Any]:
    """Print the tables of an example's evaluations, and write them: `report.html` and `result.json` in its directory.

    Args:
        more: further facts of the result, as JSON values; `summary` replaces before -> after in the table of all,
            `columns` (policy -> name -> text) are the example's own in its table.

    Returns:
        The result: for each policy success and reward (value, low, high), tasks and samples; minutes of processor time.
    """
    reports = [reports] if isinstance(reports, agl.Evaluation) else reports
    policies = {}
    for i, report in enumerate(reports):
        report.table()
        report.save(options.out / f"report{i or ''}.html")
        for name, policy in report.policies.items():
            policies[name] = {
                "success": asdict(policy.success),
                "reward": asdict(policy.reward),
                "tasks": policy.tasks,
                "samples": policy.samples,
                "failed": policy.failed,
            }
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result = {"example": example, "seed": options.seed, "policies": policies, "minutes": round(used / 60, 1), **more}
    text = json.dumps(result, indent=1) + "\n"
    (options.out / "result.json").write_text(text)
    if options.save:
        kept = EXAMPLES / example / "results"
        kept.mkdir(exist_ok=True)
        (kept / f"{options.seed}.json").write_text(text)
    return result
