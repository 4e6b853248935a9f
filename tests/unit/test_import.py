"""`import agl` is light, and everything that it promises is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import agl

HEAVY = (
    "torch", "transformers", "opentelemetry.sdk", "openai", "anthropic", "httpx", "httpx2", "pydantic",
    "langchain_core", "langchain", "langgraph", "autogen", "agents", "agent_framework", "strands", "sqlalchemy",
    "starlette", "uvicorn", "typer", "rich", "matplotlib", "renderers", "verl", "ray", "math_verify",
    "sympy", "rapidfuzz", "jsonschema", "markdown_it",
)  # fmt: skip


def loaded_after(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {*done.stdout.split()} & {*HEAVY}


def test_importing_agl_loads_nothing_heavy() -> None:
    assert loaded_after("import agl") == set()


def test_nor_does_what_an_agents_own_code_uses() -> None:
    light = (
        "import agl; agl.rollout, agl.emit_reward, agl.LLM, agl.LitAgent, agl.Selection, agl.Trajectory, agl.credit;"
        "agl.emit_reward(1.0); agl.rewards.emit_reward; 0.5 * agl.rewards.ExactMatch() + agl.rewards.TokenF1()"
    )
    assert loaded_after(light) == set()


def test_a_trainer_loads_no_database_before_it_has_one() -> None:
    assert loaded_after("import agl; agl.Trainer, agl.Client") & {"sqlalchemy", "torch", "ray"} == set()


def test_graders_load_their_packages_when_they_grade() -> None:
    every = "import agl.rewards as r; [getattr(r, name) for name in r.__all__]; r.LLMJudge('m'); r.MathAnswer()"
    assert loaded_after(every) == set()


@pytest.mark.parametrize("name", agl.rewards.__all__)
def test_every_name_of_rewards_is_there(name: str) -> None:
    assert getattr(agl.rewards, name) is not None
    assert name in dir(agl.rewards)


@pytest.mark.parametrize("name", agl.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(agl, name) is not None
    assert name in dir(agl)


@pytest.mark.parametrize("package", [agl, agl.loggers, agl.rewards])
def test_editors_are_told_the_same_names(package: ModuleType) -> None:
    stub = ast.parse(Path(str(package.__file__)).with_suffix(".pyi").read_text())
    imported = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(a.asname or a.name for a in imported if a.name != "__version__") == package.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'agl' has no attribute 'Trainr'"):
        _ = agl.Trainr  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "module",
    [
        "cli.app",
        "cli.store",
        "cli.runner",
        "cli.export",
        "store.http.server",
        "runners.remote.runner",
        "report.trace_tree",
    ],
)
def test_what_serves_stores_and_runs_agents_needs_no_model(module: str) -> None:
    """`agl[server]`, which has none of these: `agl store`, `agl runner`, `agl trace`, `agl export`."""
    absent = ("torch", "transformers", "tokenizers", "renderers", "peft", "safetensors", "matplotlib", "openai", "yaml",
              "jinja2", "cloudpickle", "psycopg", "ray")  # fmt: skip
    hidden = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}import agl.trainer.{module}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_command_that_needs_more_says_what_to_install() -> None:
    hidden = (
        "import sys\nfor name in ('torch', 'yaml'): sys.modules[name] = None\nsys.argv = ['agl', 'serve', '--help']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}sys.argv[2:] = ['--model', 'x']\nfrom agl.trainer.cli import main; main()"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    line = 'in the root of the agl clone: pip install ".[local]"'
    assert done.stderr.strip() == f"error: this command needs yaml, which is not installed\n  -> {line}"


@pytest.mark.parametrize(
    ("guest", "statement"),
    [
        ("agentlightning", "import agl.compat"),
        ("agentlightning", "from agl import LightningStore"),
        ("massgen", "from agl.massgen import RLAgentMixin"),
        ("environments", "import agl; agl.environments"),
        ("prompts", "import agl; agl.GEPA"),
        ("prompts", "from agl.compat import APO"),
        ("massgen", "import agl; agl.memory.MemoryManager"),
        ("service", "import agl; agl.Client"),
        ("plan", "from agl.trainer.cli.app import app; app(['plan', '--model', '7B'])"),
        ("massgen", "from agl.trainer.report.export.to_files import FORMATS; FORMATS['massgen']('out', tokens=True)"),
    ],
)
def test_without_its_distribution_a_guest_says_what_to_install(guest: str, statement: str) -> None:
    code = f"import sys\nsys.modules['agl_{guest}'] = None\ntry:\n    {statement}\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"in the root of the agl clone: pip install ./guests/{guest}" in done.stdout, done.stderr
