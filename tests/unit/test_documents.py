"""The documents: every block is run or says why not, every command parses, every metric and test named exists."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import re
import shutil
import tomllib
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import documents
import pytest
import typer
from documents import SHELLS, Block, blocks, commands, inline_commands
from packaging.requirements import Requirement
from paths import ROOT

ELSEWHERE = {
    "cd": "shell", "cp": "shell", "source": "shell", "git": "needs a remote",
    "docker": "needs Docker (tests/integration/test_deploy.py reads its files)", "vllm": "needs vLLM",
    "llama-server": "needs llama.cpp",
    "benchmarks/gpu.sh": "needs a GPU", "benchmarks/gpu_bundle.sh": "downloads 200 MB",
    "curl": "the routes are tested with a client of their own",
}  # fmt: skip
"""Programs that are not agl's, and why their command lines are not checked."""
YOURS = {"my_agent.py", "train.py", "test_tinyagents_conformance.py"}
"""Programs that stand for the reader's own."""
ALL = list(blocks())
INLINE = list(inline_commands())


def test_every_block_is_run_or_says_why_not() -> None:
    """What no test runs by itself has a comment; text and output need none."""
    assert [str(b) for b in ALL if b.language not in ("python", "", "text", *SHELLS) and not b.kind] == []
    assert sum(b.language == "python" for b in ALL) > 30, "the blocks are not found any more"


@pytest.mark.parametrize("block", [b for b in ALL if b.kind == "run by"], ids=str)
def test_a_test_that_is_named_exists(block: Block) -> None:
    file, _, name = block.what.partition("::")
    assert (ROOT / file).is_file()
    if name:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "python" and b.kind == "not run"], ids=str)
def test_what_nobody_runs_names_options_that_there_are(block: Block) -> None:
    import agl
    from agl_verl.config.shorthand import Common

    called = [n for n in ast.walk(ast.parse(block.text.replace(", ...,", ","))) if isinstance(n, ast.Call)]
    for call in called:
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "agl":
            kind = getattr(agl, call.func.attr)
            known = {*inspect.signature(kind).parameters, *getattr(kind, "__dataclass_fields__", ())}
            known |= {*Common.__annotations__} if call.func.attr == "VERL" else set()
            assert {k.arg for k in call.keywords} <= known, ast.unparse(call)


TRAINED_BY = (
    "APO", "Baseline", "DAPO", "DPO", "Distill", "DrGRPO", "GEPA", "GRPO", "GSPO", "PPO", "REINFORCE",
    "REINFORCEPlusPlus", "RFT", "RLOO", "SFT", "Trainer", "VERL",
)  # fmt: skip


@pytest.mark.parametrize("name", TRAINED_BY)
def test_a_page_tells_when_to_use_an_argument(name: str) -> None:
    import agl

    kind = getattr(agl, name)
    arguments = {p.name for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD}
    settings = fields(kind) if is_dataclass(kind) else ()
    arguments |= {f.name for f in settings if f.init}
    arguments -= {f.name for f in settings if not f.repr}  # what agl passes to itself
    texts = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    written = {
        word for code in re.findall(r"```.*?```|`[^`\n]+`", texts, re.DOTALL) for word in re.findall(r"\w+", code)
    }
    assert arguments - written == set()
    assert f"::: agl.{name}\n" in (ROOT / "docs/api/training.md").read_text()


@pytest.mark.parametrize("block", [b for b in ALL if b.language in SHELLS and b.kind != "not run"], ids=str)
def test_a_command_is_one_that_there_is(block: Block, pytestconfig: pytest.Config) -> None:
    for words in commands(block.text):
        check(words, ROOT / block.page, pytestconfig)


@pytest.mark.parametrize("page", sorted({page for page, _ in INLINE}))
def test_a_command_within_a_text_has_the_options_that_it_names(page: str, pytestconfig: pytest.Config) -> None:
    for text in [text for where, text in INLINE if where == page]:
        for words in commands(text):
            if words[0] == "agl":
                check_agl(words[1:], whole=False)
            else:
                check(words, ROOT / page, pytestconfig)


def check(words: list[str], page: Path, config: pytest.Config) -> None:
    program, *arguments = words
    if program == "opentelemetry-instrument":
        program, *arguments = arguments
    match program:
        case "agl":
            check_agl(arguments)
        case "pip":
            check_install(arguments)
        case "pytest":
            check_pytest(arguments, config)
        case "python":
            check_python(arguments, page, config)
        case _ if program.startswith(".ci/") or program.startswith("deploy/"):
            assert (ROOT / program).is_file(), words
        case "ruff" | "pyright" | "lint-imports":
            assert shutil.which(program), f"{program} is not in the extra dev"
        case _:
            assert program in ELSEWHERE, (
                f"{words}: is that a program of agl? If not, ELSEWHERE says why it is not checked"
            )


@cache
def agl_command() -> Any:
    from agl.trainer.cli.app import app

    return typer.main.get_command(app)


def check_agl(arguments: list[str], *, whole: bool = True) -> None:
    """Its parser takes the words. One that is not whole (within a text, or with "...") has options that there are."""
    command = agl_command()
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
    if whole and arguments and "..." not in arguments and command.name != "agl":
        command.make_context(command.name, list(arguments))
        return
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options = {
        name
        for parameter in command.get_params(typer.Context(command))
        for name in [*parameter.opts, *parameter.secondary_opts]
    }
    wrong = [a for a in own if a.startswith("--") and a.partition("=")[0] not in options | {"--help"}]
    assert not wrong, f"agl {command.name} has no {wrong}"
    assert command.name != "agl" or not own or own[0].startswith("-"), f"there is no command {own[0]}"


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def check_install(arguments: list[str]) -> None:
    asked = [a for a in arguments[1:] if not a.startswith("-") and a not in ("constraints.txt", "uninstall")]
    for word in asked:
        if word.startswith("./guests/"):
            folder, _, extras = word.rstrip("]").partition("[")
            project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
            assert {e for e in extras.split(",") if e} <= project.get("optional-dependencies", {}).keys(), word
        elif word.startswith((".", "agl")):
            extras = re.fullmatch(r"(?:\.|agl)(?:\[(.*)\])?", word)
            assert extras, word
            assert {e for e in (extras[1] or "").split(",") if e} <= set(EXTRAS), word
        else:
            Requirement(word)


def check_pytest(arguments: list[str], config: pytest.Config) -> None:
    known = {name for action in config._parser.optparser._actions for name in action.option_strings}
    for i, word in enumerate(arguments):
        if word.startswith("-"):
            assert word.partition("=")[0] in known or re.fullmatch(r"-[a-z]\S+", word), word
        elif word.endswith(".py") and not arguments[i - 1].startswith("-"):
            # "agl/" is where the guide has the reader clone this repository.
            assert word in YOURS or (ROOT / word.removeprefix("agl/")).is_file(), word


def check_python(arguments: list[str], page: Path, config: pytest.Config) -> None:
    """Options stand in the program's source: it need not be started to know them."""
    if arguments[0] == "-m":
        if arguments[1] == "pytest":
            check_pytest(arguments[2:], config)
        elif arguments[1].startswith("examples.") and arguments[1] != "examples.NAME":
            place = ROOT / arguments[1].replace(".", "/")
            files = (
                [place / "__main__.py", ROOT / "examples" / "common.py"]
                if place.is_dir()
                else [place.with_suffix(".py")]
            )
            check_options(arguments[2:], files)
        else:
            assert arguments[1] in ("agl.compat", "venv", "mkdocs", "examples.NAME"), arguments
        return
    file = next((f for f in (ROOT / arguments[0], page.parent / arguments[0]) if f.is_file()), None)
    if file is None:
        assert arguments[0] in YOURS, f"{arguments[0]} is neither here nor one that stands for the reader's"
        return
    check_options(arguments[1:], [file])


def check_options(arguments: list[str], files: list[Path]) -> None:
    source = {n.value for file in files for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)}
    missing = [a for a in arguments if a.startswith("--") and a.partition("=")[0] not in source | {"--help"}]
    assert not missing, f"{files[0]} has no {missing}"


METRIC = re.compile(r"`((?:train|val|learner|engine)/[a-z_]+)`")


def test_a_metric_that_is_named_is_recorded_somewhere() -> None:
    """In the code that makes it, as a whole or as the last part of its name; docs/tracking.md lists them all."""
    literals: set[str] = set()
    for file in (ROOT / "trainer").rglob("*.py"):
        literals |= {n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)
                     and isinstance(n.value, str)}  # fmt: skip
    unknown = {
        (page.name, metric)
        for page in documents.pages()
        for metric in METRIC.findall(page.read_text())
        if metric not in literals
        and metric.partition("/")[2] not in literals
        and f"/{metric.partition('/')[2]}" not in literals
    }
    assert unknown == set()


OTHERS = {
    "AgentGenerationError",
    "BadRequestError",
    "UserError",
    "GraphRecursionError",
    "ModelBehaviorError",
    "ValidationError",
}
"""Errors of frameworks."""
ERROR = re.compile(r"`(?:agl\.errors\.)?([A-Z]\w+Error)`")


def test_an_error_that_is_named_exists() -> None:
    from agl import errors

    for page in documents.pages():
        names = set(ERROR.findall(page.read_text()))
        unknown = {n for n in names if not hasattr(errors, n) and not hasattr(builtins, n)} - OTHERS
        assert not unknown, page.name


def test_the_notebook_trains_as_the_quickstart_does() -> None:
    from agl.trainer.quickstart.run import BATCH_SIZE, GROUP_SIZE, STEPS

    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    for line in (f"steps = {STEPS}  #", f"group_size={GROUP_SIZE},", f"batch_size = {BATCH_SIZE}  #"):
        assert line in source
    quickstart = (ROOT / "trainer" / "quickstart" / "run.py").read_text()
    for setting in re.findall(
        r"^        ((?:learning_rate|betas|minibatches|max_\w+|schedule)=.*)$", source, re.MULTILINE
    ):
        assert setting in quickstart
