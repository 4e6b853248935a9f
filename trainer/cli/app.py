"""The commands and their options; the modules that they call do the work."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from agl._version import __version__
from agl.texts import printable
from agl.trainer.cli.dashboard import dashboard
from agl.trainer.cli.evaluation import EvalCommand, evaluate
from agl.trainer.cli.options import (
    CONTEXT,
    AgentFile,
    Command,
    Json,
    Places,
    Quiet,
    SettingsCommand,
    StoreOption,
    write_json,
)
from agl.trainer.cli.runner import runner
from agl.trainer.cli.store import app as store_app

app = typer.Typer(name="agl", no_args_is_help=True, pretty_exceptions_enable=False, context_settings=CONTEXT)

Seed = Annotated[int, typer.Option(help="Seed of tasks, initial weights and sampling.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the last completed step in --directory.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any other setting (repeatable).", metavar="NAME=VALUE")]
APPLICATIONS = "For applications"
PLAN = "Example: agl plan --model Qwen/Qwen3-8B --machine h100 --set gpus=8 --tool 0.5,30:0.02"
Config = Annotated[Path | None, typer.Option(help="YAML file with the sections model, training and runtime.")]


class TrainCommand(SettingsCommand):
    """`agl train`."""

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Training": (
            "model",
            "algorithm",
            "agents",
            "credit",
            "air",
            "steps",
            "epochs",
            "group_size",
            "batch_size",
            "learning_rate",
            "temperature",
            "max_response_tokens",
            "val_every",
            "lora",
            "device",
            "directory",
            "seed",
        ),
        "Rarely needed": ("warmup_steps", "schedule", "kl_coef", "where", "per_task", "prompts"),
    }
    defaults: ClassVar[Mapping[str, Any]] = {"directory": "agl-runs/RUN_ID"}


class ExportCommand(Command):
    """`agl export`."""

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Which rollouts": ("store", "run_id", "mode", "since"),
        "For other trainers": ("where", "agents", "per_task", "margin", "model", "renderer"),
        "Policy as GGUF": ("precision",),
        "Output": ("out", "format", "tokens", "json_file", "quiet"),
    }


class ServeCommand(SettingsCommand):
    """`agl serve`."""

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {"Training": ("model", "algorithm", "engine", "device")}
    defaults: ClassVar[Mapping[str, Any]] = {
        "port": 8000,
        "directory": "agl-serve",
        "algorithm": "none: the policy is served only",
        "engine": None,
    }


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"agl {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train the LLM agents you already have, with reinforcement learning and without changing them."""


@app.command(epilog="Example: agl quickstart --seed 1")
def quickstart(
    directory: Annotated[Path, typer.Option(help="Directory for the model, the store and the policy.")] = Path(
        "agl-quickstart"
    ),
    pretrained: Annotated[
        bool, typer.Option("--real", help="Train a pretrained model, SmolLM2-135M-Instruct, instead (6 GB of memory).")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --real, another model: a directory, hub id or GGUF file.")
    ] = None,
    seed: Seed = 0,
    steps: Annotated[int | None, typer.Option(help="Updates of the policy (16; with --real 6).", min=1)] = None,
    n_workers: Annotated[
        int | None, typer.Option(help="Rollouts that run at once (32; with --real 64).", min=1)
    ] = None,
    resume: Resume = False,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Watch a LangChain agent with a calculator learn, on this machine's CPU, in minutes."""
    from agl.errors import ConfigError
    from agl.extras import require

    require("agl quickstart", "local,langchain", ("torch", "langchain", "langchain_openai"))
    options: dict[str, Any] = {"seed": seed, "progress": not quiet}
    options |= {name: value for name, value in (("steps", steps), ("n_workers", n_workers)) if value is not None}
    if pretrained:
        if resume:
            raise ConfigError("--real with --resume", hint="leave out --resume: it begins with the pretrained model")
        from agl.trainer.quickstart import real

        facts = real.run(directory, model=model, **options)
    else:
        if model is not None:
            raise ConfigError("--model without --real", hint="the quickstart makes its own policy; add --real")
        from agl.trainer.quickstart import run

        facts = run.run(directory, resume=resume, **options)
    write_json(json_file, facts)


@app.command(
    cls=TrainCommand,
    epilog="Example: agl train --model Qwen/Qwen3-0.6B --tasks tasks.jsonl --agent agent.py:agent "
    "--reward reward.py:score --steps 50",
)
def train(
    context: typer.Context,
    tasks: Annotated[
        Path | None, typer.Option(help="Training tasks, one JSON value per line; needed where rollouts are sampled.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help=AgentFile)] = None,
    agent_command: Annotated[
        str | None, typer.Option(help="Command to run instead, in any language: task on stdin, answer on stdout.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="Reward function (task, output) -> float, or an agl.rewards.RankJudge: file.py:name or "
            "package.module:name."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Environment variable that the agent's command gets, such as an API key (repeatable)."),
    ] = None,
    val: Annotated[Path | None, typer.Option(help="Validation tasks.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Learn from the rollouts of this run, recording or store (sft, dpo; repeatable).", metavar="STORE"
        ),
    ] = None,
    runners: Annotated[str, typer.Option(help="Where rollouts run: local, or remote (wherever `agl runner` is).")] = (
        "local"
    ),
    resume: Resume = False,
    dev: Annotated[bool, typer.Option("--dev", help="Dry run: three tasks, no update.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Show the run in the browser while it trains.")] = (
        False
    ),
    webhook: Annotated[
        str | None, typer.Option(help="Post alerts and the run's end to this URL, as JSON.", metavar="URL")
    ] = None,
    settings: Set = None,
    config: Config = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Train your agent on your tasks with your reward, or a policy on recorded rollouts."""
    from agl.errors import ConfigError
    from agl.trainer.cli.training import configured
    from agl.trainer.evaluation.views import sentences
    from agl.trainer.processes.environment import keep_secrets
    from agl.trainer.run.callbacks import Webhook
    from agl.trainer.run.data import read_tasks
    from agl.trainer.run.trainer import Trainer
    from agl.trainer.runners.loading import load_agent, load_command, load_group_reward

    built, trainer_options = configured(context.obj, settings or (), config, data)
    if webhook is not None:
        trainer_options["callbacks"] = Webhook(webhook)
    trainer_options["runners"] = runners
    samples = tasks is not None or val is not None or built.needs_tasks
    remote_agent = runners == "remote" and agent is None and agent_command is None
    runnable: Any = None
    if samples and not remote_agent:
        if (agent is None) == (agent_command is None):
            raise ConfigError(
                "no agent given", hint="name it with --agent file.py:name, or with --agent-command COMMAND"
            )
        command = partial(load_command, str(agent_command), reward, env or ())
        runnable = load_agent(agent, reward) if agent is not None else command()
    if tasks is None and built.needs_tasks:
        raise ConfigError("no tasks given", hint="--tasks FILE, one JSON value per line")
    train_tasks = read_tasks(tasks) if tasks else []
    val_tasks = read_tasks(val) if val else None
    beside: Any = nullcontext()
    if dashboard:
        from agl.trainer.cli.dashboard import dashboard_beside

        place = Path(trainer_options["directory"] or f"agl-runs/run-{uuid.uuid4().hex[:8]}")
        trainer_options["directory"] = place
        beside = dashboard_beside(trainer_options["store"] or f"sqlite:///{place / 'run.db'}", place)
    trainer = Trainer(built, **trainer_options, group_reward=load_group_reward(reward), progress=not quiet)
    # The trainer has read what it needs; the agent runs here.
    keep_secrets()
    fit = trainer.dev if dev else partial(trainer.fit, val_dataset=val_tasks, resume=resume)
    with beside:
        result = fit(runnable, train_tasks)
    val_rewards = [h["val/reward"] for h in result.history if "val/reward" in h]
    facts = dataclasses.asdict(result) | {
        "policy": result.policy,
        "before": val_rewards[0] if val_rewards else None,
        "after": val_rewards[-1] if val_rewards else None,
        "steps": result.history[-1]["step"] if result.history else 0,
    }
    if val_rewards:
        typer.echo(printable(f"validation reward {val_rewards[0]:.3f} -> {val_rewards[-1]:.3f}"))
    if (evaluation := _validations(result)) is not None:
        facts["evaluation"] = evaluation.to_json(rollouts=False)
        for sentence in (s for comparison in evaluation.comparisons() for s in sentences(comparison)):
            typer.echo(printable(sentence))
    for path in result.policies.values():
        typer.echo(printable(f"policy     {path}"))
        typer.echo(printable(f"look at it agl explain --list --store {result.directory}"))
        typer.echo(printable(f"use it     agl serve {path}"))
    write_json(json_file, facts)


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: agl sweep --over learning_rate=1e-5,1e-4 --seeds 3 -- --model tiny --tasks tasks.jsonl "
    "--val val.jsonl --agent agent.py:agent --reward agent.py:reward",
)
def sweep(
    arguments: Annotated[
        list[str], typer.Argument(help="Options of `agl train`, after `--`.", metavar="-- OPTIONS...")
    ],
    over: Annotated[
        list[str],
        typer.Option(help="A setting of `agl train` and its values (repeatable).", metavar="NAME=VALUE,..."),
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each combination, with seeds from 0.", min=1)] = 3,
    directory: Annotated[Path, typer.Option(help="Directory of all runs.")] = Path("agl-runs/sweep"),
    json_file: Json = None,
) -> None:
    """Train with every combination of some settings, and compare what each comes to over several seeds."""
    from agl.trainer.cli.sweep import sweep as run_all

    rows = run_all(arguments, over, range(seeds), directory)
    write_json(json_file, rows)
    if failed := sum(seeds - len(row["directories"]) for row in rows):
        typer.echo(f"{failed} runs failed; the same line tries them again", err=True)
        raise typer.Exit(1)


def _validations(result: Any) -> Any:
    """The evaluation of the first and the last validation, if there is one."""
    from agl.errors import AglError
    from agl.trainer.evaluation.evaluation import Evaluation

    try:
        return Evaluation.of_result(result)
    except AglError:
        return None  # There was no validation, or the store is a server's, and its key is not kept where agents run.


app.command(
    "eval",
    cls=EvalCommand,
    epilog="Example: agl eval trained=agl-runs/a --against start=Qwen/Qwen3-0.6B --tasks held_out.jsonl "
    "--agent agent.py:agent --reward reward.py:score --samples 4",
)(evaluate)


@app.command(epilog="Example: agl push agl-runs/a my-agent --private")
def push(
    directory: Annotated[Path, typer.Argument(help="Directory of a run, a checkpoint, a policy or any model.")],
    repo: Annotated[str, typer.Argument(help="Repository on the hub, NAME or ORGANISATION/NAME; created if missing.")],
    policy: Annotated[str | None, typer.Option(help="Policy to upload, if the run has several.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Upload the LoRA adapter alone instead of the merged model.")
    ] = False,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Visibility of a new repository (default: your account's)."),
    ] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    json_file: Json = None,
) -> None:
    """Upload a policy to the Hugging Face hub, with a model card; the token is HF_TOKEN or `hf auth login`'s."""
    from agl.trainer.run.hub import push as push_to_hub

    url = push_to_hub(directory, repo, policy=policy, adapter=adapter, private=private, message=message)
    typer.echo(url)
    write_json(json_file, {"url": url})


@app.command(epilog="Example: agl explain ro-1f3 --calls 3-5")
def explain(
    rollout: Annotated[str | None, typer.Argument(help="Id of a rollout, or its beginning.")] = None,
    store: StoreOption = None,
    attempt: Annotated[int | None, typer.Option(help="Attempt to show (default: the last).")] = None,
    calls: Annotated[
        str | None,
        typer.Option(help="Calls to show whole: 3-5,8 or all (default: all of at most 8).", metavar="NUMBERS"),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the store's rollouts instead.")] = False,
    json_file: Json = None,
) -> None:
    """See what was trained in a rollout: calls, tokens, rewards, advantages, rows, forks."""
    from agl.errors import ConfigError
    from agl.trainer.report.explain import explain as explain_rollout
    from agl.trainer.report.explain import list_rollouts

    if listing:
        write_json(json_file, list_rollouts(store))
        return
    if rollout is None:
        raise ConfigError("no rollout given", hint="agl explain ROLLOUT, or agl explain --list to see them")
    write_json(json_file, explain_rollout(rollout, store, attempt=attempt, calls=calls).to_json())


@app.command(epilog="Example: agl replay ro-1f3 --model agl-runs/a/policy")
def replay(
    rollout: Annotated[str, typer.Argument(help="Id of a rollout, or its beginning.")],
    model: Annotated[str, typer.Option(help="Policy to ask: directory of a run, checkpoint or model, or hub id.")],
    store: StoreOption = None,
    attempt: Annotated[int | None, typer.Option(help="Attempt to replay (default: the last).")] = None,
    agents: Annotated[list[str] | None, typer.Option(help="Only calls of these agents (repeatable).")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the most likely tokens.")] = 0.0,
    max_response_tokens: Annotated[int, typer.Option(help="Token limit of an answer.", min=1)] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Put the calls of a recorded rollout to another policy, and see its answers beside the recorded ones."""
    from agl.trainer.evaluation.replay import replay as replay_rollout
    from agl.trainer.evaluation.replay import show
    from agl.trainer.store.location import read_store

    replayed = read_store(
        store,
        lambda opened: replay_rollout(
            opened,
            rollout,
            model,
            attempt=attempt,
            agents=agents or None,
            temperature=temperature,
            max_response_tokens=max_response_tokens,
            seed=seed,
            progress=not quiet,
        ),
    )
    write_json(json_file, replayed.to_json())
    show(replayed)


@app.command("make-policy", epilog="Example: agl make-policy tiny --seed 1")
def make_policy(
    directory: Annotated[Path, typer.Argument(help="Directory to write the model to.")],
    corpus: Annotated[
        Path | None,
        typer.Option(help="Text file of another task: a tokenizer is made of it, and the weights stay random."),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 64.", min=64)] = 128,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 2,
    seed: Seed = 0,
    json_file: Json = None,
) -> None:
    """Make the quickstart's tiny policy, warm-started on mixed-quality demonstrations; or an untrained one for another
    task."""
    from agl.trainer.quickstart.run import make

    write_json(json_file, make(directory, seed=seed, corpus=corpus, hidden=hidden, layers=layers))


@app.command(
    context_settings={"allow_interspersed_args": False}, epilog="Example: agl run --store run.db -- python my_agent.py"
)
def run(
    command: Annotated[list[str], typer.Argument(help="Command to run, after `--`.", metavar="-- COMMAND...")],
    agent: Annotated[str | None, typer.Option(help="Agent name for calls that no framework names.")] = None,
    store: Annotated[str | None, typer.Option(help="Path of the store (default: AGL_STORE).")] = None,
    task: Annotated[str | None, typer.Option(help="Task as JSON; the command finds it in AGL_TASK.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Policy that answers: a Hugging Face directory or a checkpoint.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Server of a policy that answers (`vllm serve`); its key is VLLM_API_KEY.", metavar="URL"),
    ] = None,
    agents: Annotated[
        list[str] | None, typer.Option(help="Route only these agents to the policy (name or glob; repeatable).")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Directory of system prompts that replace the agents' own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run any program and record its model calls and tools, without a line of code; or try a policy in it."""
    from agl.errors import ConfigError
    from agl.trainer.launch import child, harnesses
    from agl.trainer.launch.run import LaunchOptions, run_command, show

    if shutil.which(command[0]) is None and not os.path.exists(command[0]):
        hint = harnesses.installation(command[0])
        typer.echo(printable(f"agl: command not found: {command[0]}{hint}"), err=True)
        raise typer.Exit(child.NOT_FOUND)
    try:
        value = None if task is None else json.loads(task)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--task is not JSON: {error}", hint="""--task '{"question": "..."}'""") from None
    launch = LaunchOptions(
        command=command,
        agent=agent,
        store=store,
        task=value,
        model=model,
        engine=engine,
        agents=agents or (),
        prompts=prompts,
        seed=seed,
        capture_content=os.environ.get("AGL_CAPTURE_CONTENT", "1") != "0",
        quiet=quiet,
    )
    facts, status = run_command(launch)
    write_json(json_file, facts)
    if not quiet:
        show(facts, launch)
    raise typer.Exit(status)


app.command(epilog="Example: agl runner --store http://trainer:4747 --agent agent.py:agent --n-workers 8")(runner)


@app.command(
    cls=ServeCommand,
    epilog="Example: agl serve runs/a/policy --record seen.db",
)
def serve(
    context: typer.Context,
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            help="Policies to serve to applications: directories of runs, checkpoints or models, or hub ids; "
            "NAME=MODEL names one.",
            metavar="RUN_DIR|MODEL",
        ),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            help="Keep what applications send in this store, for agl.traces.",
            metavar="STORE",
            rich_help_panel=APPLICATIONS,
        ),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of one application at once; further ones get 429 (default: 128).",
            min=1,
            rich_help_panel=APPLICATIONS,
        ),
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Need no key; on loopback only.", rich_help_panel=APPLICATIONS)
    ] = False,
    gpus: Annotated[int | None, typer.Option(hidden=True)] = None,
    data: Annotated[Path | None, typer.Option(help="Training tasks, one JSON value per line.")] = None,
    test: Annotated[Path | None, typer.Option(help="Validation tasks.")] = None,
    start: Annotated[bool, typer.Option("--start", help="Start a run at once instead of when a client asks.")] = False,
    settings: Set = None,
    config: Config = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of keys. For applications a line each, NAME KEY (default: AGL_KEY); with --model, the "
            "operator's and a runner's (default: AGL_OPERATOR_KEY)."
        ),
    ] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Serve policies to applications by the APIs of OpenAI, Anthropic and Google; or, with --model, train and serve one
    for agents elsewhere: agl.Client, agl runner."""
    from agl.errors import ConfigError

    if policies:
        from agl.trainer.cli.serve import serve_policies
        from agl.trainer.http.application_keys import ApplicationKeys

        if data is not None or test is not None or start or gpus is not None:
            raise ConfigError("--data, --test, --start and --gpus are for training", hint="name the model by --model")
        serve_policies(
            policies,
            context.obj,
            settings or [],
            config=config,
            keys=ApplicationKeys.find(key_file, needed=not no_key),
            record=record,
            most_requests=max_requests,
            quiet=quiet,
            write=partial(write_json, json_file),
        )
        return
    if record is not None or max_requests is not None or no_key:
        raise ConfigError(
            "--record, --max-requests and --no-key are for policies that applications ask",
            hint="name them without --model: agl serve DIR",
        )
    from agl_service.command import run_serve

    files: dict[Any, Path] = {k: v for k, v in (("train", data), ("test", test)) if v is not None}
    run_serve(
        {**context.obj, "gpus": gpus},
        settings or [],
        config=config,
        data=files,
        key_file=key_file,
        start=start,
        quiet=quiet,
        write=partial(write_json, json_file),
    )


app.add_typer(store_app, name="store")


@app.command(epilog="Example: agl runs agl-runs")
def runs(
    places: Places = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="List deleted runs instead.")] = False,
    json_file: Json = None,
) -> None:
    """List training runs: how far they are, and their first and last rewards."""
    from agl.trainer.cli.runs import list_runs

    write_json(json_file, list_runs(places or [], deleted=deleted))


Run = Annotated[str, typer.Argument(help="Id of a run, or its beginning.")]


@app.command(epilog='Example: agl note run-3f2 --tag baseline --text "before the new tool"')
def note(
    run: Run,
    name: Annotated[str | None, typer.Option(help="Name to show for the run.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag to add (repeatable).")] = None,
    untag: Annotated[list[str] | None, typer.Option(help="Tag to remove (repeatable).")] = None,
    text: Annotated[str | None, typer.Option(help="Text, in place of the one before.")] = None,
    delete: Annotated[
        bool | None,
        typer.Option("--delete/--restore", help="Hide the run from lists, or show it again; nothing is lost."),
    ] = None,
    store: StoreOption = None,
    json_file: Json = None,
) -> None:
    """Name, tag, annotate, delete or restore a run."""
    from agl.trainer.cli.runs import note_run

    changes = {"name": name, "note": text, "deleted": delete}
    facts = note_run(store, run, {k: v for k, v in changes.items() if v is not None}, tag or (), untag or ())
    write_json(json_file, facts)
    noted = (f"name {facts['name']!r}" if facts["name"] else "", *facts["tags"], facts["note"])
    deleted = "deleted" if facts["deleted_at"] else ""
    typer.echo(printable(" · ".join((facts["run_id"], *filter(None, (*noted, deleted))))))


@app.command(epilog="Example: agl stop run-3f2")
def stop(
    run: Run,
    store: StoreOption = None,
    json_file: Json = None,
) -> None:
    """Have a run end after its current step, with a checkpoint; it can be resumed."""
    from agl.trainer.cli.runs import stop_run

    facts = stop_run(store, run)
    write_json(json_file, facts)
    typer.echo(printable(f"{facts['run_id']} ends after its current step, {facts['step'] + 1}"))


@app.command(epilog='Example: agl label ro-1f3 0 --note "right number, wrong reason"')
def label(
    rollout: Annotated[str, typer.Argument(help="Id of a rollout, or its beginning.")],
    value: Annotated[float | None, typer.Argument(help="A number, such as 1 for good and 0 for bad.")] = None,
    name: Annotated[str, typer.Option(help="What is judged.")] = "label",
    note: Annotated[str | None, typer.Option(help="Why.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Withdraw the label.")] = False,
    store: StoreOption = None,
    json_file: Json = None,
) -> None:
    """Label a rollout yourself: a reward beside its own, for agl.traces(where=agl.reward("label") >= 1)."""
    from agl.errors import ConfigError
    from agl.trainer.report.labels import label as put
    from agl.trainer.store.location import read_store

    if remove == (value is not None):
        raise ConfigError("a value with --remove" if remove else "no value", hint="agl label ROLLOUT 1, or --remove")
    rollout_id = read_store(store, lambda opened: put(opened, rollout, value, name=name, note=note))
    write_json(json_file, {"rollout_id": rollout_id, "name": name, "value": value, "note": note})
    typer.echo(printable(f"{rollout_id}  {name} {'withdrawn' if value is None else f'{value:g}'}"))


app.command(epilog="Example: agl dashboard agl-runs/a --open")(dashboard)


@app.command(epilog="Example: agl doctor --model Qwen/Qwen3-0.6B")
def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="Show what a model can do instead: a directory, hub id or GGUF file; nothing is loaded."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="With --model: the chat template that training would give it.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Show what is installed and any version conflicts; the exit status is 1 if there is one."""
    if model is not None:
        from agl.trainer.cli import doctor_model

        found = doctor_model.examine_model(model, chat_template)
        write_json(json_file, found.to_json())
        doctor_model.show(found)
        return
    from agl.trainer.cli.doctor_checks import examine, show

    report = examine()
    write_json(json_file, report.to_json())
    show(report)
    raise typer.Exit(1 if report.problems else 0)


if find_spec("agl_plan") is None:

    @app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, epilog=PLAN)
    def plan() -> None:
        """Estimate memory, seconds per step, idle share and cost of a run before you rent the machines."""
        from agl.extras import require

        require("agl plan", "plan")

else:
    app.command(epilog=PLAN)(import_module("agl_plan.command").plan)


@app.command(
    cls=ExportCommand,
    epilog="Example: agl export gguf agl-runs/a --type q8_0",
)
def export(
    what: Annotated[
        str,
        typer.Argument(
            help="rollouts: everything. For other trainers, one file: sft (calls to imitate), pairs (preferences), "
            "rewards (rollouts with theirs). gguf: a policy as one file for llama.cpp and Ollama."
        ),
    ] = "rollouts",
    policy: Annotated[
        str | None,
        typer.Argument(help="gguf: directory of a run, checkpoint, adapter or model, or hub id.", metavar="DIR"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write the files to. gguf: the file (default: NAME-TYPE.gguf, here)."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--type", help="f32, f16 (default), bf16 or q8_0 (8 bits).", metavar="TYPE")
    ] = None,
    store: StoreOption = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="rollouts: jsonl, parquet (three tables), json (a file per rollout, by date and agent), or massgen (a "
            "trace per agent's run, by date and agent). "
            "sft: tokens (for TRL, with --model) or messages (OpenAI's)."
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Limit to this training run.", metavar="ID")] = None,
    mode: Annotated[str | None, typer.Option(help="Limit to train, val, dev or collect.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Limit to rollouts since a date or time (UTC), or an age: 12h.")
    ] = None,
    tokens: Annotated[bool, typer.Option(help="Write token ids and log-probs of calls, or only their counts.")] = True,
    where: Annotated[
        str | None, typer.Option(help='Limit to rollouts with these rewards: "reward>=1", "correct>=1 & length<0.2".')
    ] = None,
    agents: Annotated[str | None, typer.Option(help="Limit to these agents: names or globs, comma separated.")] = None,
    per_task: Annotated[int | None, typer.Option(help="Largest number of rollouts (pairs) per task.", min=1)] = None,
    margin: Annotated[float, typer.Option(help="Smallest difference of rewards in a pair.", min=0.0)] = 0.0,
    model: Annotated[
        str | None, typer.Option(help="Model to train, for its tokenizer (sft as tokens).", metavar="DIR")
    ] = None,
    renderer: Annotated[str | None, typer.Option(help="Renderer of the model (default: chosen by the model).")] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Write rollouts, spans and model calls, or a policy, into files for other programs."""
    from agl.errors import ConfigError
    from agl.trainer.cli import export as exporting
    from agl.trainer.report.export.rows import RolloutFilter

    if what == "gguf":
        if policy is None:
            raise ConfigError("no policy given", hint="agl export gguf DIR, such as that of a run")
        facts = exporting.export_policy(policy, out, precision or "f16", quiet=quiet)
        write_json(json_file, facts)
        if not quiet:
            typer.echo(printable(exporting.described(facts)))
        return
    for name, given in {"--type": precision, "DIR": policy}.items():
        if given is not None:
            raise ConfigError(f"{name} is for gguf", hint="agl export gguf DIR --type f16")
    if out is None:
        raise ConfigError("no directory given", hint=f"agl export {what} --out DIR")
    if what == "rollouts":
        for name, value in {"--where": where, "--agents": agents, "--per-task": per_task, "--model": model}.items():
            if value is not None:
                raise ConfigError(f"{name} is for sft, pairs and rewards", hint="agl export sft --out DIR ...")
        which = RolloutFilter(run_id, mode, exporting.since(since))  # type: ignore[arg-type]
        facts = exporting.export_files(store, out, format or "jsonl", which, tokens=tokens, quiet=quiet)
        said = f"{facts['rollouts']} rollouts, {facts['spans']} spans, {facts['calls']} calls in {facts['out']}"
    else:
        options = {
            "stores": store,
            "where": where,
            "agents": agents.split(",") if agents else None,
            "per_task": per_task,
            "run": run_id,
            "mode": mode,
            "since": exporting.since(since),
        }
        facts = exporting.export_examples(
            what, out, options, format=format, model=model, renderer=renderer, margin=margin
        )
        said = f"{facts['rows']} rows in {facts['file']}\n{facts['chosen']}"
    write_json(json_file, facts)
    if not quiet:
        typer.echo(printable(said))


trace = typer.Typer(help="Read traces: model calls and tools by agent.", no_args_is_help=True)
app.add_typer(trace, name="trace")


@trace.command("ls", epilog="Example: agl trace ls --store agl-runs/a")
def trace_ls(
    store: StoreOption = None,
    json_file: Json = None,
) -> None:
    """List a store's rollouts."""
    from agl.trainer.report.explain import list_rollouts

    write_json(json_file, list_rollouts(store))


@trace.command("show", epilog="Example: agl trace show ro-1f3")
def trace_show(
    rollout: Annotated[str, typer.Argument(help="Id of a rollout, or its beginning.")],
    store: StoreOption = None,
    attempt: Annotated[int | None, typer.Option(help="Attempt to show (default: all).")] = None,
    json_file: Json = None,
) -> None:
    """Show a rollout's spans as a tree."""
    from agl.trainer.report.trace_tree import show_trace

    write_json(json_file, show_trace(rollout, store, attempt=attempt))


@trace.command("export", epilog="Example: agl trace export --otlp http://localhost:4318 --all")
def trace_export(
    otlp: Annotated[str, typer.Option(help="Receiver: http://localhost:4318, or the whole URL.", metavar="URL")],
    rollouts: Annotated[list[str] | None, typer.Argument(help="Ids of rollouts, or their beginnings.")] = None,
    store: StoreOption = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Export this training run.", metavar="ID")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Export the whole store.")] = False,
    header: Annotated[
        list[str] | None, typer.Option(help="Header to send with each request (repeatable).", metavar="NAME=VALUE")
    ] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Send traces to Jaeger, Phoenix or any other receiver of OTLP over HTTP."""
    from agl.trainer.cli.export import export_traces
    from agl.trainer.report.export.rows import RolloutFilter

    which = RolloutFilter(run_id) if everything or run_id is not None else None
    facts = export_traces(store, rollouts or (), which, otlp, header or (), quiet=quiet)
    write_json(json_file, facts)
    if not quiet:
        typer.echo(printable(f"{facts['spans']} spans of {facts['rollouts']} rollouts sent to {facts['url']}"))
