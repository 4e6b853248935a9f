"""The commands and their options; the modules that they call do the work."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from agl._version import __version__
from agl.texts import printable
from agl.trainer.cli.store import app as store_app

app = typer.Typer(
    name="agl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[Path | None, typer.Option("--json", help="Write the same facts to this file.", metavar="FILE")]
Seed = Annotated[int, typer.Option(help="Fixes tasks, model start and every request's sampling.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last completed step in --out.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


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


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("agl-quickstart"),
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(help="Updates.", min=1)] = 16,
    workers: Annotated[int, typer.Option(help="Rollouts at once.", min=1)] = 32,
    resume: Resume = False,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Watch a LangChain agent with a calculator learn, on this machine's CPU, in minutes."""
    from agl.trainer.quickstart.run import run

    facts = run(out, seed=seed, steps=steps, n_workers=workers, resume=resume, progress=not quiet)
    _write(json_file, facts)


@app.command()
def train(
    tasks: Annotated[
        Path | None, typer.Option(help="Training tasks, one JSON value per line; needed where rollouts are sampled.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face directory (or hub id) to train.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="grpo, ppo, rloo, ..., sft, rft, distill or dpo.", show_default="grpo")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="The agent: file.py:name or package.module:name.")] = None,
    agent_command: Annotated[
        str | None, typer.Option(help="Or a command, in any language: the task on stdin, its answer on stdout.")
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
        typer.Option(help="A variable that the agent's command gets from here (repeatable): a provider's key, ..."),
    ] = None,
    val: Annotated[Path | None, typer.Option(help="Validation tasks.")] = None,
    agents: Annotated[
        list[str] | None, typer.Option(help="Train only these agents (name or glob; repeatable).")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="sft, dpo: learn from the rollouts of this run, recording or store (repeatable).", metavar="STORE"
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help='Only rollouts whose rewards are so: "reward>=1" (sft, dpo, rft).', metavar="CONDITION"),
    ] = None,
    per_task: Annotated[
        int | None, typer.Option(help="At most so many rollouts of a task (sft, dpo, rft).", min=1)
    ] = None,
    air: Annotated[bool, typer.Option("--air", help="Reward tool outcomes by the rules of agl.air.")] = False,
    credit: Annotated[
        str | None,
        typer.Option(help='How rewards become returns: "discounted(0.9)", per_call, ...', show_default="uniform"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates.", min=1)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the tasks, instead of --steps.", min=1)] = None,
    group_size: Annotated[int | None, typer.Option(help="Rollouts per task.", show_default="8", min=2)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Tasks per step.", show_default="16", min=1)] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default="1e-6; 1e-5 for sft, rft")
    ] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of warm-up.", show_default="0", min=0)] = None,
    schedule: Annotated[str | None, typer.Option(help="constant or linear.", show_default="constant")] = None,
    kl_coef: Annotated[
        float | None, typer.Option(help="Penalty for leaving the initial policy.", show_default="0.0")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of training's sampling.", show_default="1.0")] = None,
    max_response_tokens: Annotated[int | None, typer.Option(help="Longest answer.", show_default="1024", min=1)] = None,
    val_every: Annotated[int | None, typer.Option(help="Steps between validations.", show_default="10", min=1)] = None,
    prompts: Annotated[Path | None, typer.Option(help="A directory of prompts that the agents get.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Train a LoRA adapter of this rank.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.", show_default="auto")] = None,
    workers: Annotated[int | None, typer.Option(help="Rollouts at once.", show_default="8", min=1)] = None,
    runners: Annotated[str, typer.Option(help="local, or remote: rollouts run where `agl runner` does.")] = "local",
    host: Annotated[str | None, typer.Option(help="Where remote runners reach this.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(help="Likewise; 0 takes a free one.", show_default="0", min=0, max=65535)
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(help="Processes that answer the agents' requests.", show_default="1", min=1)
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="A file, postgresql:// or http:// of `agl store`; else --out.")
    ] = None,
    silent_seconds: Annotated[
        float | None, typer.Option(help="How long a remote runner may be silent.", show_default="30.0")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds per rollout.", show_default="600.0")] = None,
    max_attempts: Annotated[int | None, typer.Option(help="Tries per rollout.", show_default="2", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory.")] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(help="A tracker: wandb, mlflow, tensorboard or trackio (repeatable).", metavar="TRACKER"),
    ] = None,
    project: Annotated[str | None, typer.Option(help="The trackers' project.")] = None,
    name: Annotated[str | None, typer.Option(help="What you call the run.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Fixes tasks and every request's sampling.", show_default="0")
    ] = None,
    resume: Resume = False,
    dev: Annotated[bool, typer.Option("--dev", help="A dry run: three tasks, no update.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Show the run in the browser meanwhile.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other option, as NAME=VALUE; repeatable.", metavar="N=V")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with the sections model, training, runtime.")] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Train an agent of your own on your tasks with your reward, or a policy on recorded rollouts."""
    options = dict(locals())
    from agl.child_environment import keep_secrets
    from agl.errors import ConfigError
    from agl.trainer.cli.training import configured
    from agl.trainer.evaluation.views import sentences
    from agl.trainer.run.data import read_tasks
    from agl.trainer.run.trainer import Trainer
    from agl.trainer.runners.loading import load_agent, load_command, load_group_reward

    built, trainer_options = configured(options)
    samples = tasks is not None or val is not None or getattr(built, "needs_tasks", True)
    remote_agent = runners == "remote" and agent is None and agent_command is None
    runnable: Any = None
    if samples and not remote_agent:
        if (agent is None) == (agent_command is None):
            raise ConfigError("which agent?", hint="name it with --agent file.py:name, or with --agent-command COMMAND")
        command = partial(load_command, str(agent_command), reward, env or ())
        runnable = load_agent(agent, reward) if agent is not None else command()
    if tasks is None and getattr(built, "needs_tasks", True):
        raise ConfigError("which tasks?", hint="--tasks FILE, one JSON value per line")
    train_tasks = read_tasks(tasks) if tasks else []
    val_tasks = read_tasks(val) if val else None
    beside: Any = nullcontext()
    if dashboard:
        from agl.trainer.cli.dashboard import dashboard_beside

        place = trainer_options["directory"] or Path("agl-runs") / f"run-{uuid.uuid4().hex[:8]}"
        trainer_options["directory"] = place
        beside = dashboard_beside(trainer_options["store"] or f"sqlite:///{place / 'run.db'}", place)
    trainer = Trainer(built, **trainer_options, group_reward=load_group_reward(reward), progress=not quiet)
    # The trainer has read what it needs; the agent runs here.
    keep_secrets()
    fit = trainer.dev if dev else partial(trainer.fit, val_dataset=val_tasks, resume=resume)
    with beside:
        result = fit(runnable, train_tasks)
    val_rewards = [h["val/reward"] for h in result.history if "val/reward" in h]
    facts = {
        "run_id": result.run_id,
        "directory": str(result.directory),
        "store": result.store,
        "policy": None if result.policy is None else str(result.policy),
        "policies": {name: str(path) for name, path in result.policies.items()},
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "before": val_rewards[0] if val_rewards else None,
        "after": val_rewards[-1] if val_rewards else None,
        "steps": result.history[-1]["step"] if result.history else 0,
        "history": result.history,
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
    _write(json_file, facts)


def _validations(result: Any) -> Any:
    """The evaluation of the first and the last validation, if there is one."""
    from agl.errors import AglError
    from agl.trainer.evaluation.evaluation import Evaluation

    try:
        return Evaluation.of_result(result)
    except AglError:
        return None  # Without a validation; or the store is a server's, whose key is not kept where agents run.


@app.command("eval")
def evaluate(
    tasks: Annotated[Path, typer.Option(help="Held-out tasks, one JSON value per line.")],
    agent: Annotated[str, typer.Option(help="The agent: file.py:name or package.module:name.")],
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            help="What answers: directories of runs, checkpoints or models, hub ids; NAME=MODEL names one. "
            "The agent's own models if left out.",
            metavar="RUN_DIR|MODEL",
        ),
    ] = None,
    against: Annotated[str | None, typer.Option(help="Compare each with this one.", metavar="RUN_DIR|MODEL")] = None,
    reward: Annotated[
        str | None, typer.Option(help="Reward function (task, output) -> float: file.py:name or package.module:name.")
    ] = None,
    agents: Annotated[
        list[str] | None, typer.Option(help="They answer these agents only (name or glob; repeatable).")
    ] = None,
    samples: Annotated[int, typer.Option(help="Rollouts per task.", min=1)] = 1,
    success: Annotated[float, typer.Option(help="The total reward from which on a rollout is a success.")] = 1.0,
    fail_below: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 where the share of successes is below this, failed rollouts counted as none; the "
            "estimate itself, not the end of its interval. The policy of --against may be below.",
            min=0,
            max=1,
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the sampling; as the agent asks if left out.")] = None,
    max_response_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; as the agent asks if left out.", min=1)
    ] = None,
    workers: Annotated[int, typer.Option(help="Rollouts at once.", min=1)] = 8,
    prompts: Annotated[Path | None, typer.Option(help="A directory of prompts that the agents get.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds per rollout.")] = 600.0,
    max_attempts: Annotated[int, typer.Option(help="Tries per rollout.", min=1)] = 2,
    out: Annotated[Path | None, typer.Option(help="The evaluation's directory.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Run only what is missing in --out.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report, one file.", metavar="FILE")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table.", metavar="FILE")] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Measure an agent on held-out tasks: success with its error, per policy, and whether two policies differ."""
    from agl.child_environment import keep_secrets
    from agl.trainer.cli.evaluation import run_evaluation

    # The agent runs here.
    keep_secrets()
    report, below = run_evaluation(
        policies or [],
        against,
        tasks,
        agent,
        reward,
        fail_below=fail_below,
        html=html,
        markdown=markdown,
        agents=agents or None,
        samples=samples,
        success=success,
        temperature=temperature,
        max_response_tokens=max_response_tokens,
        prompts=prompts,
        n_workers=workers,
        timeout=timeout,
        max_attempts=max_attempts,
        directory=out,
        seed=seed,
        resume=resume,
        progress=not quiet,
    )
    _write(json_file, report.to_json())
    for name in below:
        typer.echo(printable(f"{name}: success is below {fail_below:g}"), err=True)
    raise typer.Exit(1 if below else 0)


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="A run, a checkpoint, a policy of one, or any model.")],
    repo: Annotated[str, typer.Argument(help="On the hub: NAME or ORGANISATION/NAME; made if it is not there.")],
    policy: Annotated[str | None, typer.Option(help="Which one, where the run has several.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, in place of the model that it is merged into.")
    ] = False,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; else as the account's settings say.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    json_file: Json = None,
) -> None:
    """Upload a policy to the Hugging Face hub, with a model card; the token is HF_TOKEN or `hf auth login`'s."""
    from agl.trainer.run.hub import push as push_to_hub

    url = push_to_hub(directory, repo, policy=policy, adapter=adapter, private=private, message=message)
    typer.echo(url)
    _write(json_file, {"url": url})


@app.command()
def explain(
    rollout: Annotated[str | None, typer.Argument(help="A rollout's id, or its beginning.")] = None,
    store: Annotated[
        str | None, typer.Option(help="A run's directory or store; the newest one here if left out.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(help="Which attempt; the last if left out.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the store's rollouts instead.")] = False,
    json_file: Json = None,
) -> None:
    """See what was trained in a rollout: calls, tokens, rewards, advantages, rows, forks."""
    from agl.errors import ConfigError
    from agl.trainer.report.explain import explain as explain_rollout
    from agl.trainer.report.explain import list_rollouts

    if listing:
        _write(json_file, list_rollouts(store))
        return
    if rollout is None:
        raise ConfigError("which rollout?", hint="agl explain ROLLOUT, or agl explain --list to see them")
    _write(json_file, explain_rollout(rollout, store, attempt=attempt).to_json())


@app.command("make-policy")
def make_policy(
    directory: Annotated[Path, typer.Argument(help="Where the model goes.")],
    seed: Seed = 0,
    json_file: Json = None,
) -> None:
    """Make the quickstart's tiny policy: from scratch, warm-started on mixed-quality demonstrations."""
    from agl.trainer.quickstart.run import make

    _write(json_file, make(directory, seed=seed))


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command, after `--`.", metavar="-- COMMAND...")],
    agent: Annotated[str | None, typer.Option(help="Its name, for calls that no framework names.")] = None,
    store: Annotated[str | None, typer.Option(help="Where it is kept: a path; else AGL_STORE.")] = None,
    task: Annotated[str | None, typer.Option(help="The task as JSON; the command finds it in AGL_TASK.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Let this policy answer: a Hugging Face directory or a checkpoint.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Let the policy of this `vllm serve` answer; its key is VLLM_API_KEY.", metavar="URL"),
    ] = None,
    agents: Annotated[
        list[str] | None, typer.Option(help="It answers these agents only (name or glob; repeatable).")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Put this directory's system prompts in the place of the agents'.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of its sampling.")] = 0,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run any program and record its model calls and tools, without a line of code; or try a policy in it."""
    from agl.errors import ConfigError
    from agl.trainer.launch import child
    from agl.trainer.launch.run import LaunchOptions, run_command, show

    if shutil.which(command[0]) is None and not os.path.exists(command[0]):
        typer.echo(printable(f"agl: command not found: {command[0]}"), err=True)
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
    _write(json_file, facts)
    if not quiet:
        show(facts, launch)
    raise typer.Exit(status)


@app.command()
def runner(
    agent: Annotated[str, typer.Option(help="The agent: file.py:name or package.module:name.")],
    store: Annotated[
        str | None, typer.Option(help="The server that hands out rollouts; else AGL_STORE.", metavar="URL")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Reward function (task, output) -> float: file.py:name or package.module:name.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Rollouts at once.", min=1)] = 1,
    key_file: Annotated[
        Path | None, typer.Option(help="Holds the runner's key (/dev/stdin, too); else AGL_RUNNER_KEY.")
    ] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Execute rollouts here for a trainer or a store elsewhere, until Ctrl-C."""
    from agl.child_environment import keep_secrets
    from agl.trainer.cli.runner import find_server, run_runner
    from agl.trainer.runners.loading import load_agent

    server, key = find_server(store, key_file)
    keep_secrets()
    _write(json_file, run_runner(load_agent(agent, reward), server, key, workers, quiet=quiet))


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face directory or hub id; else LIGHTNING_MODEL_PATH.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="grpo, ppo, rloo, ...; else LIGHTNING_RL_ALGORITHM. Without one, the policy is served only."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Serve the policy of this `vllm serve`, untrained.", metavar="URL")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="0 = CPU, 1 = a GPU; whatever there is if left out.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 if left out; 0 = any free one.")] = None,
    host: Annotated[str | None, typer.Option(help="127.0.0.1 if left out; others need an operator key.")] = None,
    store: Annotated[str | None, typer.Option(help="The store's URL; a file in --out if left out.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with the sections model, training, runtime.")] = None,
    out: Annotated[Path | None, typer.Option(help="For data, runs and policies; agl-serve if left out.")] = None,
    data: Annotated[Path | None, typer.Option(help="Training tasks, one JSON value per line.")] = None,
    test: Annotated[Path | None, typer.Option(help="Validation tasks.")] = None,
    workers: Annotated[int | None, typer.Option(help="Rollouts that each client runs at once.", min=1)] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other option, as NAME=VALUE; repeatable.", metavar="N=V")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="Operator's key, runner's on a second line; else AGL_OPERATOR_KEY.")
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Begin a run at once instead of when a client asks.")] = False,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Train and serve a policy for agents elsewhere: agl.Client, agl runner, or any HTTP client."""
    options = dict(locals())
    from agl.trainer.cli.serve import run_serve

    files: dict[Any, Path] = {k: v for k, v in (("train", data), ("test", test)) if v is not None}
    names = ("model", "algorithm", "engine", "gpus", "port", "host", "store")
    run_serve(
        {name: options[name] for name in names} | {"out": None if out is None else str(out), "nworkers": workers},
        settings or [],
        config=config,
        data=files,
        key_file=key_file,
        start=start,
        quiet=quiet,
        write=lambda facts: _write(json_file, facts),
    )


app.add_typer(store_app, name="store")


@app.command()
def dashboard(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run directories, stores' files or URLs; what is here if left out.", metavar="[RUN_DIR|URL]..."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8001,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's own need a key.")
    ] = "127.0.0.1",
    key_file: Annotated[Path | None, typer.Option(help="Holds the operator's key; else AGL_OPERATOR_KEY.")] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """See runs in the browser: curves, steps, groups, rollouts, and every trained token."""
    from agl.trainer.cli.dashboard import run_dashboard

    run_dashboard(
        places or [],
        host=host,
        port=port,
        key_file=key_file,
        open_browser=open_browser,
        quiet=quiet,
        write=lambda facts: _write(json_file, facts),
    )


@app.command()
def doctor(json_file: Json = None) -> None:
    """Show what is installed, and what of it does not fit together; the exit status is 1 if anything does not."""
    from agl.trainer.cli.doctor import show
    from agl.trainer.cli.doctor_checks import examine

    report = examine()
    _write(json_file, report.to_json())
    show(report)
    raise typer.Exit(1 if report.problems else 0)


StoreOption = Annotated[
    str | None, typer.Option(help="A run's directory, a store's path or URL; the newest one here if left out.")
]


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="The folder that the files go to.")],
    what: Annotated[
        str,
        typer.Argument(
            help="rollouts: everything. For other trainers, one file: sft (calls to imitate), pairs (preferences), "
            "rewards (rollouts with theirs)."
        ),
    ] = "rollouts",
    store: StoreOption = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="rollouts: jsonl, parquet (three tables), json (a file per rollout, by date and agent), or massgen (a "
            "trace per agent's run, by date and agent). "
            "sft: tokens (for TRL, with --model) or messages (OpenAI's)."
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Of this training run alone.", metavar="ID")] = None,
    mode: Annotated[str | None, typer.Option(help="train, val, dev or collect alone.")] = None,
    since: Annotated[str | None, typer.Option(help="Not before this date or time (UTC), or age: 12h, 7d.")] = None,
    tokens: Annotated[bool, typer.Option(help="Token ids and log-probs of calls, or their numbers alone.")] = True,
    where: Annotated[
        str | None, typer.Option(help='Rollouts with these rewards: "reward>=1", "correct>=1 & length<0.2".')
    ] = None,
    agents: Annotated[str | None, typer.Option(help="Calls of these agents: names or globs, comma separated.")] = None,
    per_task: Annotated[int | None, typer.Option(help="At most so many rollouts (pairs) of a task.", min=1)] = None,
    margin: Annotated[float, typer.Option(help="Pairs: the smallest difference of two rewards.", min=0.0)] = 0.0,
    model: Annotated[
        str | None, typer.Option(help="sft as tokens: the model to be trained, for its tokenizer.", metavar="DIR")
    ] = None,
    renderer: Annotated[str | None, typer.Option(help="Its renderer, if not chosen by the model.")] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Write rollouts, spans and model calls into files for other programs."""
    from agl.errors import ConfigError
    from agl.trainer.cli import export as exporting
    from agl.trainer.report.export.rows import RolloutFilter

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
    _write(json_file, facts)
    if not quiet:
        typer.echo(printable(said))


trace = typer.Typer(help="Read traces: which agent spoke, which tool ran.", no_args_is_help=True)
app.add_typer(trace, name="trace")


@trace.command("ls")
def trace_ls(
    store: Annotated[str | None, typer.Option(help="A run's directory or store; the newest one if left out.")] = None,
    json_file: Json = None,
) -> None:
    """List a store's rollouts."""
    from agl.trainer.report.explain import list_rollouts

    _write(json_file, list_rollouts(store))


@trace.command("show")
def trace_show(
    rollout: Annotated[str, typer.Argument(help="A rollout's id, or its beginning.")],
    store: Annotated[str | None, typer.Option(help="A run's directory or store; the newest one if left out.")] = None,
    attempt: Annotated[int | None, typer.Option(help="One attempt alone.")] = None,
    json_file: Json = None,
) -> None:
    """Show a rollout's spans as a tree."""
    from agl.trainer.report.trace_tree import show_trace

    _write(json_file, show_trace(rollout, store, attempt=attempt))


@trace.command("export")
def trace_export(
    otlp: Annotated[str, typer.Option(help="The receiver: http://localhost:4318, or the whole URL.", metavar="URL")],
    rollouts: Annotated[list[str] | None, typer.Argument(help="Their ids, or the beginnings.")] = None,
    store: StoreOption = None,
    run_id: Annotated[str | None, typer.Option("--run", help="All of this training run.", metavar="ID")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of the store.")] = False,
    header: Annotated[
        list[str] | None, typer.Option(help="Sent with each request (repeatable).", metavar="NAME=VALUE")
    ] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Send traces to Jaeger, Phoenix or any other receiver of OTLP over HTTP."""
    from agl.trainer.cli.export import export_traces
    from agl.trainer.report.export.rows import RolloutFilter

    which = RolloutFilter(run_id) if everything or run_id is not None else None
    facts = export_traces(store, rollouts or (), which, otlp, header or (), quiet=quiet)
    _write(json_file, facts)
    if not quiet:
        typer.echo(printable(f"{facts['spans']} spans of {facts['rollouts']} rollouts sent to {facts['url']}"))


def _write(path: Path | None, facts: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=2, default=str) + "\n")
