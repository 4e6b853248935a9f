"""`agl eval`: policies measured on held-out tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from agl.errors import ConfigError
from agl.texts import printable
from agl.trainer.cli.options import AgentFile, Command, Json, NWorkers, Quiet, RewardFile, write_json


class EvalCommand(Command):
    """`agl eval`."""

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "What is measured": (
            "tasks",
            "agent",
            "against",
            "reward",
            "agents",
            "samples",
            "success",
            "prompts",
            "fail_below",
        ),
        "Sampling and runs": (
            "temperature",
            "max_response_tokens",
            "seed",
            "n_workers",
            "timeout",
            "max_attempts",
            "resume",
        ),
        "Output": ("directory", "html", "markdown", "json_file", "quiet"),
    }


def evaluate(
    tasks: Annotated[Path, typer.Option(help="Held-out tasks, one JSON value per line.")],
    agent: Annotated[str, typer.Option(help=AgentFile)],
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            help="Policies to evaluate: directories of runs, checkpoints or models, or hub ids; NAME=MODEL names one "
            "(default: the agent's own models).",
            metavar="RUN_DIR|MODEL",
        ),
    ] = None,
    against: Annotated[str | None, typer.Option(help="Policy to compare with.", metavar="RUN_DIR|MODEL")] = None,
    reward: Annotated[str | None, typer.Option(help=RewardFile)] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option(help="Route only these agents to the policies (name or glob; repeatable)."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Rollouts per task.", min=1)] = 1,
    success: Annotated[float, typer.Option(help="Total reward from which on a rollout is a success.")] = 1.0,
    fail_below: Annotated[
        float | None,
        typer.Option(
            help="Exit with status 1 if an evaluated policy's success rate is below this. Failed rollouts count as "
            "no success; the estimate is compared, not its interval.",
            min=0,
            max=1,
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature (default: the agent's).")] = None,
    max_response_tokens: Annotated[
        int | None, typer.Option(help="Token limit of an answer (default: the agent's).", min=1)
    ] = None,
    n_workers: NWorkers = 8,
    prompts: Annotated[Path | None, typer.Option(help="Directory of prompts that the agents get.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of an attempt, in seconds.")] = 600.0,
    max_attempts: Annotated[int, typer.Option(help="Attempts per rollout, the first included.", min=1)] = 2,
    directory: Annotated[Path | None, typer.Option(help="Directory of the evaluation.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Run only what is missing in --directory.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report as one HTML file.", metavar="FILE")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.", metavar="FILE")] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Measure an agent on held-out tasks: success with its error, per policy, and whether two policies differ."""
    from agl.trainer.evaluation import views
    from agl.trainer.evaluation.evaluate import evaluate as evaluate_agent
    from agl.trainer.processes.environment import keep_secrets
    from agl.trainer.run.data import read_tasks
    from agl.trainer.runners.loading import load_agent, load_group_reward

    if against is not None and not policies:
        raise ConfigError("--against what?", hint="agl eval RUN_DIR --against OTHER_RUN_DIR")
    references = named([against] if against is not None else [])
    keep_secrets()  # The agent runs here.
    held_out = read_tasks(tasks)
    report = evaluate_agent(
        load_agent(agent, reward),
        held_out,
        [*references, *named(policies or [])] or None,
        reward=load_group_reward(reward),
        agents=agents or None,
        samples=samples,
        success=success,
        temperature=temperature,
        max_response_tokens=max_response_tokens,
        prompts=prompts,
        n_workers=n_workers,
        timeout=timeout,
        max_attempts=max_attempts,
        directory=directory,
        seed=seed,
        resume=resume,
        progress=not quiet,
    )
    report.table()
    for path, text in ((html, views.page), (markdown, views.markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(report), encoding="utf-8")
    write_json(json_file, report.to_json())
    judged = [p for p in report.policies.values() if p.name not in dict(references)]
    below = [p.name for p in judged if fail_below is not None and p.success_bounds[0] < fail_below]
    for name in below:
        typer.echo(printable(f"{name}: the success rate is below {fail_below:g}"), err=True)
    raise typer.Exit(1 if below else 0)


def named(words: Sequence[str]) -> list[tuple[str, str]]:
    """Policies of a command line by name: `NAME=MODEL`, or a model alone, which then is its own name."""
    pairs = []
    for word in words:
        name, equals, model = word.partition("=")
        is_named = equals and name and model and not Path(word).exists()
        pairs.append((name, model) if is_named else (word, word))
    return pairs
