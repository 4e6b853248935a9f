"""What an agent is called that is a command."""

from __future__ import annotations

import shlex

import pytest

from agl.trainer.runners.command import CommandAgent, program_name


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("node agent.mjs", "agent"),
        ("./my-agent --fast", "my-agent"),
        ("python agents/writer.py data.json", "writer"),
        ("python -m pkg.a", "pkg.a"),
        ("python3.12 -m pkg.b --file x.json", "pkg.b"),
        ("python -mpkg.a", "pkg.a"),
        ("python -u -W ignore -m crew", "crew"),
        ("python -Im pkg.a", "pkg.a"),
        ("python -bBmpkg.a", "pkg.a"),
        ("uv run -m pkg.a", "pkg.a"),
        ("uvx my-agent --fast", "my-agent"),
        ("uv tool run my-agent", "my-agent"),
        ("poetry run my-agent", "my-agent"),
        ("npm run agent:a", "agent:a"),
        ("npx @team/writer", "writer"),
        ("uv run python -c 'import crew.main'", "python"),
        ("uv run --with rich my-agent", "uv"),
        ("npm run", "npm"),
        ("tsx --tsconfig tsconfig.json agent.ts", "agent"),
        ("python -W error::a.b agent.py", "agent"),
        ("uv run --with rich agent.py", "agent"),
        ("/usr/bin/env python -m pkg.a", "pkg.a"),
        ("python -m coverage run agent.py", "agent"),
        ("python -c 'from crew.main import run'", "python"),
        ("python -Ic 'import crew.main'", "python"),
        ("bash -lc 'cd x && python agent.py'", "bash"),
        ("node -e 'require(\"./a.js\")'", "node"),
        ("node --import ./hooks.mjs agent.mjs", "agent"),
        ("node -r ./hooks.cjs agent.cjs", "agent"),
        ("env FOO=1.5 SITE=a.example python agent.py", "agent"),
        ("timeout 2.5 python agent.py", "agent"),
        ("npx tsx src/agent.ts", "agent"),
        ("my-agent https://api.example.com/v1", "my-agent"),
        ("my-agent -m gpt-4.1", "my-agent"),
        ("my-agent -c config.yaml", "my-agent"),
    ],
)
def test_a_command_is_called_after_its_program(command: str, name: str) -> None:
    words = shlex.split(command)
    assert program_name(words) == name
    assert CommandAgent(words, reward=lambda task, output: 1.0).name == name


def test_two_modules_of_a_package_are_two_agents() -> None:
    names = {program_name(["python", "-m", f"pkg.{module}"]) for module in ("a", "b")}
    assert names == {"pkg.a", "pkg.b"}
