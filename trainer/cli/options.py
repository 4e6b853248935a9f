"""The options that commands share, and those of `agl train` and `agl serve`, which are made from the settings."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
import typer.main
from typer.core import TyperCommand

if TYPE_CHECKING:
    from agl.trainer.algorithms.options import Option

CONTEXT = {"help_option_names": ["-h", "--help"]}

Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[FILE.json]",
        help="Print the results as JSON alone (lists: a line for each), or write a file.",
    ),
]
_JSON_FILE = re.compile(r"-|.*[/\\].*|.*\.jsonl?")
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
AgentFile = "The agent: file.py:name or package.module:name."
RewardFile = "Reward function (task, output) -> float: file.py:name or package.module:name."
Places = Annotated[
    list[str] | None,
    typer.Argument(
        help="Run directories, directories of runs, or stores' files or URLs (default: those found here).",
        metavar="[RUN_DIR|URL]...",
    ),
]
NWorkers = Annotated[int, typer.Option("--n-workers", help="Rollouts that run at once.", min=1)]
StoreOption = Annotated[
    str | None, typer.Option(help="Run directory, or a store's path or URL (default: the newest one here).")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the operator's key, and a runner's on a second line (default: AGL_OPERATOR_KEY)."),
]
Host = Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a key.")]
Port = Annotated[int, typer.Option(help="Port to listen on (0 picks a free port).", min=0, max=65535)]


def duration(text: str) -> float | None:
    """The seconds of a text such as "90m", "12h", "30d" or "2w"; None for any other."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    return match and float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}[match[2]]


def with_json(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """(a command's arguments with "-" after a `--json` that no file follows, whether JSON goes to stdout)."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if arguments[:1] == ["run"] and ours == arguments:
        ours = arguments[:2]  # what follows may be the command's
    if "--json" not in ours:
        return [*arguments], False
    at = ours.index("--json") + 1
    if at < len(ours) and _JSON_FILE.fullmatch(ours[at]):
        return [*arguments], ours[at] == "-"
    return [*arguments[:at], "-", *arguments[at:]], True


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """What is printed goes to stderr, also by child processes; `write_json` alone writes to stdout."""
    global _stdout
    sys.stdout.flush()
    _stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(_stdout, 1)
        os.close(_stdout)
        _stdout = None


_stdout: int | None = None


def write_json(path: Path | None, facts: Any) -> None:
    """Write the results of a command to a file, or to stdout if that is "-". To stdout or a .jsonl file, a list is
    written as JSON Lines."""
    if path is None:
        return
    if isinstance(facts, list) and (str(path) == "-" or path.suffix == ".jsonl"):
        text = "".join(json.dumps(fact, default=str) + "\n" for fact in facts)
    else:
        text = json.dumps(facts, indent=2, default=str) + "\n"
    if str(path) == "-":
        if _stdout is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            with os.fdopen(os.dup(_stdout), "w") as out:
                out.write(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Command(TyperCommand):
    """A command whose options are in groups, and whose help ends with an example."""

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Panel of the help -> its options; those in no panel are in "Options"."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for panel, names in self.panels.items():
            for param in params:
                if param.name in names:
                    setattr(param, "rich_help_panel", panel)  # noqa: B010 - Typer's options have it, Click's have not
        return params


class SettingsCommand(TyperCommand):
    """A command with flags for settings, which are in `context.obj` as option -> value, None where one is left out.

    The settings are imported when the flags are needed, so that other commands start at once.
    """

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Panel of the help -> its settings; those of a run that are in no panel are in "Run"."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults that are not those of the settings."""
    _flags: list[Any] | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        return [*params[:-1], *self.flags(), params[-1]]

    def flags(self) -> list[Any]:
        """The flags, in the order of the help."""
        if self._flags is None:
            from agl.trainer.algorithms.options import OPTIONS, SECTIONS

            named = {name: panel for panel, names in self.panels.items() for name in names}
            named |= {name: "Run" for name in SECTIONS["runtime"] if name not in named}

            def settings(**_: Any) -> None: ...

            # Typer reads the signature, as of any command.
            settings.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
                [
                    _flag(name, OPTIONS[name], panel, self.defaults.get(name, OPTIONS[name].default))
                    for name, panel in named.items()
                ]
            )
            flags = typer.Typer(add_completion=False)
            flags.command()(settings)
            self._flags = typer.main.get_command(flags).params
        return self._flags

    def invoke(self, ctx: Any) -> Any:
        values = {str(flag.name): ctx.params.pop(str(flag.name)) for flag in self.flags()}
        ctx.obj = {name: None if value == () else value for name, value in values.items()}
        return super().invoke(ctx)


def _flag(name: str, option: Option, panel: str, default: Any) -> inspect.Parameter:
    """A setting's flag; the value is checked where all options are."""
    kinds = set(typing.get_args(option.kind)) if isinstance(option.kind, types.UnionType) else {option.kind}
    several = list[str] in kinds
    kind = next((k for k in (list[str], bool, int, float) if k in kinds), str)
    flag = f"--{name.replace('_', '-')}"
    choices = [choice for k in kinds if typing.get_origin(k) is typing.Literal for choice in typing.get_args(k)]
    about = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        metavar="|".join(choices) or None,
        # A shell cannot write None: it leaves the option out.
        help=re.sub(r"\bNone (=|for) ", "default: ", f"{option.help[:1].upper()}{option.help[1:]}")
        + (" (repeatable)." if several else "."),
        show_default=str(default) if isinstance(default, str | int | float) else False,
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, about]
    )
