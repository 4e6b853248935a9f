"""Every `pip install` line of the documents: its extras exist, what it asks for resolves, and it trains."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from paths import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]


def lines() -> list[tuple[str, ...]]:
    """The extras of each line, once each."""
    found = set()
    for page in PAGES:
        for line in re.findall(r"pip install [^|`\n]*", page.read_text()):
            for extras in re.findall(r"(?:\bagl|[\"']\.)\[([\w,-]+)\]", line):
                found.add(tuple(sorted(extras.split(","))))
    return sorted(found)


def requirements(*extras: str) -> list[str]:
    """What extras ask for, those of agl's own that they name included."""
    expanded = []
    for text in (text for extra in extras for text in EXTRAS[extra]):
        requirement = Requirement(text)
        expanded += requirements(*requirement.extras) if requirement.name == "agl" else [text]
    return expanded


FRAMEWORKS = (
    "langchain", "langgraph", "openai", "anthropic", "google-genai", "openai-agents", "agent-framework", "strands",
    "autogen",
)  # fmt: skip
ALWAYS = (("langchain", "local"),)
"""What a line resolves to changes with new releases more than with agl: the others are resolved at night, and .ci/run
installs those of "dev" and "verl"."""
TRAINS = [line for line in lines() if "local" in line and not {"dev", "ray"} & set(line)]


def test_the_lines_were_found() -> None:
    assert set(ALWAYS) <= set(lines())
    assert {extra for line in lines() for extra in line} <= EXTRAS.keys()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_line_of_a_framework_trains(framework: str) -> None:
    assert (framework,) not in lines(), "nothing trains without agl[local]"
    assert tuple(sorted((framework, "local"))) in lines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "extras",
    [line if line in ALWAYS else pytest.param(line, marks=pytest.mark.night) for line in lines()],
    ids="+".join,
)
def test_a_line_resolves(extras: tuple[str, ...], tmp_path: Path) -> None:
    resolve(extras, "3.12", tmp_path)


@pytest.mark.slow
def test_the_pinned_versions_suit_every_python_311(tmp_path: Path) -> None:
    """Debian 12 has 3.11.2, which some releases refuse."""
    resolve(("dev",), "3.11.0", tmp_path, "--constraints", str(ROOT / "constraints.txt"))


def resolve(extras: tuple[str, ...], python: str, folder: Path, *options: str) -> None:
    (folder / "wanted.in").write_text("\n".join(requirements(*extras)))
    compiling = ["uv", "pip", "compile", "--quiet", "--python-version", python, *options, "wanted.in"]
    command = [sys.executable, "-m", *compiling]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if re.search("dns error|error sending request|Failed to fetch", done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extras", TRAINS, ids="+".join)
def test_a_line_trains_in_a_fresh_environment(extras: tuple[str, ...], untrained_model: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", tmp_path, ROOT], check=True)
    [wheel] = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, f"agl[{','.join(extras)}] @ {wheel.as_uri()}"], check=True)
    program = f"""
import agl, httpx

@agl.rollout
def agent(task: dict, llm: agl.LLM) -> float:
    body = {{"model": llm.model, "messages": [{{"role": "user", "content": task["question"]}}]}}
    key = {{"Authorization": f"Bearer {{llm.api_key}}"}}
    answer = httpx.post(f"{{llm.endpoint}}/chat/completions", json=body, headers=key, timeout=60)
    return len(answer.json()["choices"][0]["message"]["content"]) % 5 / 4

algorithm = agl.GRPO(model={str(untrained_model)!r}, steps=1, group_size=4, batch_size=2, max_response_tokens=6)
result = agl.Trainer(algorithm, directory="run").fit(agent, [{{"question": str(i)}} for i in range(2)])
assert result.policy.is_dir()
"""
    subprocess.run([python, "-c", program], cwd=tmp_path, check=True)
