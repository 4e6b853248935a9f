"""Coding agents: what their configurations say of their provider, what is refused, and how their calls are named."""

from __future__ import annotations

import json
import os
import stat
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import launch

from agl.errors import ConfigError
from agl_harnesses import Attempt, Harness, find, session
from agl_harnesses.aider import Aider
from agl_harnesses.claude import Claude
from agl_harnesses.codex import Codex, _provider
from agl_harnesses.gemini import Gemini
from agl_harnesses.mini import Mini
from agl_harnesses.opencode import OpenCode
from agl_harnesses.pi import Pi
from agl_harnesses.qwen import Qwen

URL = "http://models.local:1/v1"
DEFAULT = "https://generativelanguage.googleapis.com"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's empty home, who works in another empty directory."""
    for name in ("home", "work", "attempt"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def attempt(home: Path, *words: str, **variables: str) -> Attempt:
    urls = {api: f"http://127.0.0.1:2/{api}" for api in ("openai", "anthropic", "google")}
    made = Attempt(list(words), {"HOME": str(home), "PATH": os.environ["PATH"], **variables}, home.parent / "attempt")
    made.urls = urls
    return made


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def program(folder: Path, name: str, *lines: str) -> str:
    """A program that prints these lines."""
    path = folder / name
    write(path, "#!/bin/sh\n" + "\n".join(f"echo '{line}'" for line in lines) + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


LAB = f'model_provider = "lab"\n[model_providers.lab]\nbase_url = "{URL}"\nenv_key = "LAB_KEY"\n'


@pytest.mark.parametrize(
    ("harness", "files", "words", "variables", "found"),
    [
        (Codex, {}, (), {"OPENAI_BASE_URL": URL}, "https://api.openai.com/v1"),
        (Codex, {".codex/config.toml": f'openai_base_url = "{URL}"'}, (), {}, URL),
        (Codex, {".codex/config.toml": LAB}, (), {}, URL),
        (Codex, {".codex/config.toml": LAB}, ("-c", 'model_providers.lab.base_url="http://a/v1"'), {}, "http://a/v1"),
        (Codex, {".codex/config.toml": LAB}, ("--config=model_provider=openai",), {}, "https://api.openai.com/v1"),
        (Codex, {".codex/config.toml": "", ".codex/mine.config.toml": LAB}, ("-p", "mine"), {}, URL),
        (Mini, {".config/mini-swe-agent/.env": f"OPENAI_API_BASE='{URL}'"}, (), {}, URL),
        (Mini, {".config/mini-swe-agent/.env": "OPENAI_BASE_URL=http://a"}, (), {"OPENAI_BASE_URL": URL}, URL),
        (Mini, {}, ("-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={URL}"), {}, URL),
        (Aider, {".aider.conf.yml": f"openai-api-base: {URL}"}, (), {}, URL),
        (Aider, {".aider.conf.yml": "openai-api-base: http://a"}, ("--openai-api-base", URL), {}, URL),
        (Aider, {".env": f"OPENAI_API_BASE={URL}"}, (), {"OPENAI_API_BASE": "http://a"}, URL),
        (Aider, {}, (), {"AIDER_OPENAI_API_BASE": URL}, URL),
        (Gemini, {}, (), {}, DEFAULT),
        (Gemini, {}, (), {"GOOGLE_GEMINI_BASE_URL": URL}, URL),
        (Gemini, {".gemini/.env": f"GOOGLE_GEMINI_BASE_URL={URL}"}, (), {}, URL),
        (Gemini, {".gemini/.env": "GEMINI_API_KEY=k", ".env": f"GOOGLE_GEMINI_BASE_URL={URL}"}, (), {}, DEFAULT),
        (Gemini, {".env": f"GOOGLE_GEMINI_BASE_URL={URL}"}, (), {"GEMINI_CLI_HOME": "/nowhere"}, DEFAULT),
        (Qwen, {}, (), {"OPENAI_BASE_URL": URL}, URL),
        (Qwen, {".qwen/settings.json": json.dumps({"security": {"auth": {"baseUrl": URL}}}) + "// ,}"}, (), {}, URL),
        (Qwen, {".qwen/.env": f"export OPENAI_BASE_URL={URL} # mine"}, (), {}, URL),
        (Qwen, {}, ("--openai-base-url", URL), {"OPENAI_BASE_URL": "http://a"}, URL),
        (
            Qwen,
            {".qwen/settings.json": json.dumps({"modelProviders": {"openai": [{"id": "m", "baseUrl": URL}]}})},
            ("-m", "m"),
            {"OPENAI_BASE_URL": "http://a"},
            URL,
        ),
        (
            Pi,
            {".pi/agent/models.json": json.dumps({"providers": {"openai": {"baseUrl": URL}}})},
            (),
            {},
            URL,
        ),
    ],
)  # fmt: skip
def test_where_its_calls_go(
    home: Path,
    harness: type[Harness],
    files: dict[str, str],
    words: tuple[str, ...],
    variables: dict[str, str],
    found: str,
) -> None:
    for name, text in files.items():
        write(home / name, text)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    made = attempt(home, harness.programs[0], *words, **variables)
    kind = harness()
    api = "google" if harness is Gemini else "openai"
    assert kind.providers(made)[api] == found
    kind.point(made)
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    pointed = json.dumps([made.words, made.environment]) + "".join(
        path.read_text() for path in made.home.rglob("*.json")
    )
    assert made.urls[api] in pointed


@pytest.mark.parametrize(("config", "name"), [("", "agl"), (LAB, "lab")])
def test_codex_of_a_policy_has_a_provider_that_compacts_nothing_itself(home: Path, config: str, name: str) -> None:
    write(home / ".codex/config.toml", config)
    made, recorded = attempt(home, "codex", "exec"), attempt(home, "codex", "exec")
    made.routed = True
    for each in (made, recorded):
        Codex().providers(each)
        Codex().point(each)
    settings = _provider(made)
    assert settings[0] == name
    assert {"name": "agl", "base_url": made.urls["openai"]}.items() <= (settings[1] or {}).items()
    assert "name=agl" not in str(recorded.words)
    assert _provider(recorded)[0] == ("openai" if name == "agl" else "lab")


def test_claude_is_pointed_by_its_settings_too(home: Path) -> None:
    write(home / ".claude/settings.json", json.dumps({"env": {"ANTHROPIC_BASE_URL": "http://a"}, "model": "x"}))
    made = attempt(home, "claude", "-p", "hi")
    kind = Claude()
    assert kind.providers(made) == {"anthropic": "http://a"}
    kind.point(made)
    assert json.loads(made.words[2])["env"]["ANTHROPIC_BASE_URL"] == made.urls["anthropic"]
    assert made.environment["DISABLE_AUTOUPDATER"] == "1"
    assert json.loads((made.home / "settings.json").read_text())["model"] == "x"


def test_gemini_keeps_its_settings_and_counts_nothing(home: Path) -> None:
    write(
        home / ".gemini/settings.json",
        '{"ui": {"theme": "x"}, "telemetry": {"enabled": true, "target": "local"}} // mine',
    )
    write(home / ".gemini/tmp/work/logs.json", "")
    write(home / ".gemini/GEMINI.md", "Be brief.")
    write(home / ".agents/skills/a/SKILL.md", "-")
    write(home / ".env", "GEMINI_API_KEY=k")
    made, kind = attempt(home, "gemini"), Gemini()
    made.routed = True
    kind.providers(made)
    kind.point(made)
    assert made.environment["GEMINI_CLI_HOME"] == str(made.home)
    assert "GEMINI_API_KEY" not in made.environment, "that of the file counts"
    assert json.loads((made.home / ".gemini/settings.json").read_text()) == {
        "ui": {"theme": "x"},
        "telemetry": {"enabled": False, "target": "local"},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
    }
    copied = {str(path.relative_to(made.home)) for path in made.home.rglob("*") if path.is_file()}
    assert copied == {".env", ".gemini/settings.json", ".gemini/GEMINI.md", ".agents/skills/a/SKILL.md"}


def test_opencode_leaves_a_provider_with_a_second_address_alone(home: Path) -> None:
    package = {"npm": "@ai-sdk/openai-compatible"}
    providers = {
        "one": {**package, "options": {"baseURL": URL}},
        "two": {**package, "options": {"baseURL": "http://b"}},
    }
    fake = program(home, "opencode", json.dumps({"provider": providers}))
    made = attempt(home, fake)
    kind = OpenCode()
    assert kind.providers(made) == {"openai": URL, "anthropic": "https://api.anthropic.com"}
    kind.point(made)
    pointed = json.loads(made.environment["OPENCODE_CONFIG_CONTENT"])["provider"]
    assert {name: entry["options"]["baseURL"] for name, entry in pointed.items()} == {
        "one": made.urls["openai"],
        "anthropic": f"{made.urls['anthropic']}/v1",
    }


LOGIN = json.dumps({"OPENAI_API_KEY": None, "tokens": {"access_token": "t"}})


@pytest.mark.parametrize(
    ("harness", "files", "words", "message"),
    [
        (Codex, {".codex/auth.json": LOGIN}, (), "logged in with ChatGPT"),
        (Codex, {".codex/config.toml": 'model_provider = "gone"'}, (), r"no \[model_providers.gone\]"),
        (Codex, {".codex/config.toml": "model = "}, (), "is no TOML"),
        (
            Qwen,
            {".qwen/settings.json": '{"security": {"auth": {"selectedType": "qwen-oauth"}}}'},
            (),
            "login 'qwen-oauth'",
        ),
        (
            Gemini,
            {".gemini/settings.json": '{"security": {"auth": {"selectedType": "oauth-personal"}}}'},
            (),
            "login 'oauth-personal'",
        ),
        (Gemini, {".gemini/.env": "GOOGLE_GENAI_USE_VERTEXAI=true"}, (), "login 'vertex-ai'"),
        (Qwen, {".qwen/settings.json": "[]"}, (), "is no JSON object"),
        (Pi, {}, ("--provider", "google"), "provider 'google'"),
        (Aider, {".aider.conf.yml": "a: [b"}, (), "is no YAML"),
    ],
)
def test_what_cannot_be_pointed_is_refused_before_it_starts(
    home: Path, harness: type[Harness], files: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    for name, text in files.items():
        write(home / name, text)
    with pytest.raises(ConfigError, match=message) as raised:
        harness().providers(attempt(home, harness.programs[0], *words))
    assert raised.value.hint


def test_opencodes_broken_settings_are_its_own_words(home: Path) -> None:
    with pytest.raises(ConfigError, match="opencode cannot read its settings: Config file is broken"):
        OpenCode().providers(attempt(home, program(home, "opencode", "Config file is broken")))


def chat(system: str, *tools: str) -> dict[str, Any]:
    offered = [{"type": "function", "function": {"name": name}} for name in tools]
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}], "tools": offered}


def contents(text: str, *tools: str, system: str | None = None) -> dict[str, Any]:
    """The same in Google's form."""
    prompt = {} if system is None else {"systemInstruction": {"parts": [{"text": system}]}}
    declared = [{"functionDeclarations": [{"name": name} for name in tools]}] if tools else []
    return {"contents": [{"role": "user", "parts": [{"text": text}]}], "tools": declared, **prompt}


CHECK = "Analyze *only* the content and structure of your immediately preceding response."


def turn(**facts: str) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps(facts)}


@pytest.mark.parametrize(
    ("harness", "headers", "body", "name"),
    [
        (Codex, {}, {"input": "hi"}, None),
        (Codex, turn(request_kind="turn"), {"input": "hi"}, None),
        (Codex, turn(request_kind="compaction"), {"input": "hi"}, "compaction"),
        (Codex, {**turn(request_kind="turn"), "x-openai-subagent": "review"}, {"input": "hi"}, "review"),
        (OpenCode, {}, chat("You are opencode, ..."), None),
        (OpenCode, {"x-parent-session-id": "s"}, chat("You are opencode, ..."), "task"),
        (OpenCode, {}, chat("You are a context summarization agent"), "compaction"),
        (Qwen, {}, chat("You are Qwen Code", "agent", "task_stop"), None),
        (Qwen, {}, chat("Look for files", "read_file"), "task"),
        (Qwen, {}, chat("You are the component that summarizes internal chat history"), "compression"),
        (Gemini, {}, contents(CHECK, "read_file", "invoke_agent", system="You are Gemini CLI"), None),
        (Gemini, {}, contents("hi", "read_file", system="Mine"), None),
        (Gemini, {}, contents("hi", "read_file", "complete_task", system="You are Gemini CLI"), "task"),
        (Gemini, {}, contents("hi", system="You are a diagnostic agent that determines whether an assistant"), "loop"),
        (Gemini, {}, contents(CHECK), "speaker"),
        (Gemini, {}, contents("Summarize the user's primary intent or goal in this conversation in ..."), "title"),
        (Pi, {}, chat("You are a context summarization assistant."), "compaction"),
        (Aider, {}, chat("*Briefly* summarize this partial conversation about programming."), "summary"),
        (Mini, {}, {"messages": "broken"}, None),
        (Claude, {}, chat("You are a helpful AI assistant tasked with summarizing conversations."), "compaction"),
    ],
)
def test_which_agent_made_a_call(
    harness: type[Harness], headers: dict[str, str], body: dict[str, Any], name: str | None
) -> None:
    assert harness().sub_agent(headers, body) == name


def test_a_version_that_nobody_has_seen_is_named_and_tried(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AGL_CACHE", str(home / "cache"))
    found = find([program(home, "codex", "codex-cli 99.1.0"), "exec"])
    assert found is not None
    found.close()
    assert "codex 99.1.0 is tried as 0.171.0, which agl has seen" in capsys.readouterr().err
    seen = find([program(home, "codex", "codex-cli 0.171.9"), "exec"])
    assert seen is not None
    seen.close()
    assert capsys.readouterr().err == ""
    assert not list((home / "cache/harnesses").iterdir())
    assert find(["python", "codex.py"]) is None


def test_a_version_is_read_of_the_package_where_there_is_one(home: Path) -> None:
    write(home / "lib/node_modules/@openai/codex/package.json", '{"name": "@openai/codex", "version": "1.2.3"}')
    assert Codex().version(program(home, "lib/node_modules/@openai/codex/bin/codex", "9")) == "1.2.3"
    info = home / "venv/lib/python3.12/site-packages/mini_swe_agent-4.5.6.dist-info/METADATA"
    write(info, "Metadata-Version: 2.1\nName: mini-swe-agent\nVersion: 4.5.6\n")
    assert Mini().version(program(home, "venv/bin/mini", "9")) == "4.5.6"
    assert Codex().version("/nowhere/codex") is None


def test_other_packages_bring_harnesses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Mini):
        name, programs = "mine", ("mine",)

    entry = metadata.EntryPoint("mine", "nowhere:Mine", session.GROUP)
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: Mine)
    monkeypatch.setattr(session, "entry_points", lambda group: [entry] if group == session.GROUP else [])
    monkeypatch.setattr(Mine, "version", lambda self, program: "2.4.6")
    found = find(["mine"])
    assert found is not None
    assert found.name == "mine"
    found.close()


def test_one_that_is_not_installed_is_named_with_the_line_that_installs_it(home: Path) -> None:
    done = launch(home, {**os.environ, "PATH": "/nowhere"}, "--", "codex", "exec", "hi")
    assert done.returncode == 127
    assert "command not found: codex; to install it: npm install -g @openai/codex" in done.stderr


def test_without_the_package_a_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from agl.trainer.launch import harnesses

    monkeypatch.setattr(harnesses, "find_spec", lambda name: None)
    assert harnesses.find(["codex", "exec"]) is None
    assert "to record codex by its own settings, in the root of the agl clone: pip install ./guests/harnesses" in (
        capsys.readouterr().err
    )
    assert harnesses.find(["python", "x.py"]) is None
    assert harnesses.installation("codex") == ""
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    assert {program for kind in session.OWN for program in kind.programs} >= set(harnesses.PROGRAMS)


def test_a_call_of_a_command_that_has_not_started_goes_nowhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    from agl.trainer.gateway.errors import RequestError
    from agl.trainer.http.errors import error_handlers

    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AGL_CACHE", str(home / "cache"))
    found = find([program(home, "mini", "mini 2.4.6"), "-t", "hi"])
    assert found is not None

    def described(_: object, error: Exception) -> tuple[object, int]:
        return {"error": str(error)}, getattr(error, "status", 500)

    app = Starlette(routes=found.routes, exception_handlers=error_handlers(described, RequestError))
    app.state.limits = SimpleNamespace(request_bytes=1 << 20)
    client = TestClient(app)
    (route,) = found.routes
    secret = route.path.split("/")[2]
    assert "is not served" in client.post(f"/harness/{secret}/openai/x/chat/completions", json={}).json()["error"]
    assert client.get(f"/harness/{secret}/openai/x", headers={"upgrade": "websocket"}).status_code == 426
    assert client.post("/harness/guess/openai/x/chat/completions", json={}).status_code == 404
    found.close()


def test_one_that_makes_no_call_is_named_with_the_page_that_says_where_to_look(home: Path) -> None:
    silent = program(home, "mini", "mini 2.4.6")
    environment = {**os.environ, "HOME": str(home), "AGL_CACHE": str(home / "cache")}
    done = launch(home, environment, "--store", home / "traces.db", "--", silent)
    assert (done.returncode, done.stdout) == (0, "mini 2.4.6\n")
    assert "no call of mini came by: docs/harnesses.md says where agl looks for its provider" in done.stderr
