"""Coding agents as a user has them: how each is configured and started, and what a model must answer to solve it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl.messages import read
from agl.testing.provider import Provider, Reply, Script, Seen, last_said

FILE, BEFORE, AFTER = "greeting.txt", "hello world\n", "goodbye world\n"
TASK = f"Replace hello with goodbye in {FILE}."
KEY = "sk-harness-0123456789"
PROGRAMS = Path(os.environ.get("AGL_HARNESSES", "/nowhere")) / "bin"
"""Where `tests/harnesses/install.sh` puts them; otherwise they are looked for in the PATH."""
Turns = tuple[Reply | Callable[[str], Reply], ...]
"""A turn that depends on a tool's result is a function of it."""


REPORT = Reply("It says hello.")


@dataclass(frozen=True, kw_only=True)
class CodingAgent:
    """One of them.

    Attributes:
        name: of its calls' agent. program: its command.
        command: (task) -> the words. configure: (home, provider) -> writes its files there; its variables.
        turns: (work) -> what a model answers to solve the task in this directory, one reply for each call.
        config: its configuration, below the home. writes: what a plain run writes elsewhere below the home.
        random: what differs between two runs in a request's body: a pattern, and what stands for it.
        quiet: headers of its telemetry, which agl switches off. key: the header of a provider's key, and its value.
        side: the agents that ask something beside the task. delegates: the turns of an agent that starts another one,
            what the other gets to do, and its name.
        reports: how an agent that another one started gives its result.
        compacts: (home) -> sets its limit so low that it compacts its history, its further words; a phrase of the call
            that summarises; the agent of that call; what is answered next; why that request is a fork, None if the
            summary is in none.
        asides: further calls beside the task: (home) -> its setting for them, the first turn of the task, None for
            the usual one, a phrase, what is answered, the agent.
    """

    name: str
    program: str
    command: Callable[[str], list[str]]
    configure: Callable[[Path, Provider], dict[str, str]]
    turns: Callable[[Path], Turns]
    config: str
    writes: tuple[str, ...] = ()
    random: Mapping[str, str] = field(default_factory=dict)
    quiet: tuple[str, ...] = ()
    key: tuple[str, str] = ("authorization", f"Bearer {KEY}")
    side: tuple[str, ...] = ()
    delegates: tuple[Callable[[Path], Turns], str, str] | None = None
    reports: Reply = REPORT
    compacts: tuple[Callable[[Path], tuple[str, ...] | None], str, str, Reply, str | None] | None = None
    asides: tuple[tuple[Callable[[Path], None], Callable[[Path], Reply] | None, str, Reply, str], ...] = ()

    @property
    def path(self) -> str | None:
        """The program, if it is installed."""
        return shutil.which(self.program, path=os.pathsep.join([str(PROGRAMS), os.environ["PATH"]]))


def answers(turns: Turns, others: Mapping[str, Turns] | None = None) -> Script:
    """A model that answers by how many answers a conversation holds, so that conversations do not disturb each other.

    Args:
        others: a phrase of a system prompt or of a first message -> what conversations with it get.
    """

    def script(body: dict[str, Any]) -> Reply:
        messages = read.body(body)
        text = "\n".join(m.text for m in messages)
        chosen = next((replies for phrase, replies in (others or {}).items() if phrase in text), turns)
        done = sum(bool(m.tool_calls) for m in messages)
        turn = chosen[min(done, len(chosen) - 1)]
        return turn(last_said(body)[1]) if callable(turn) else turn

    return script


def call(name: str, **arguments: Any) -> Reply:
    return Reply(None, ((name, arguments),))


SIDE = {
    "You are a title generator": (Reply("A greeting"),),
    "managed memory extraction": (Reply("Nothing to keep."),),
    "one-line Git commit messages": (Reply("fix: say goodbye"),),
}
"""Calls beside the task."""


def mini(home: Path, provider: Provider) -> dict[str, str]:
    folder = home / ".config/mini-swe-agent"
    folder.mkdir(parents=True)
    lines = ["MSWEA_CONFIGURED=true", "MSWEA_COST_TRACKING=ignore_errors", f"OPENAI_API_KEY={KEY}"]
    (folder / ".env").write_text("\n".join([*lines, f"OPENAI_BASE_URL={provider.url}", "MSWEA_MODEL_NAME=openai/m"]))
    # Ten by default, over five minutes: an untrained policy has no room for its prompt.
    return {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}


def aider(home: Path, provider: Provider) -> dict[str, str]:
    # One home in ten is asked whether aider may count its use.
    lines = [f"openai-api-base: {provider.url}", "model: openai/m", "check-update: false", "analytics: false"]
    (home / ".aider.conf.yml").write_text("\n".join([*lines, ""]))
    (home / ".env").write_text(f"OPENAI_API_KEY={KEY}\n")
    (home / ".gitconfig").write_text("[user]\nname = a\nemail = a@b.c\n")
    return {}


def codex(home: Path, provider: Provider) -> dict[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(
        'model = "m"\nmodel_provider = "lab"\nsandbox_mode = "danger-full-access"\n'
        f'[model_providers.lab]\nname = "lab"\nbase_url = "{provider.url}"\nenv_key = "LAB_KEY"\n'
    )
    (home / ".codex/AGENTS.md").write_text("Be brief.\n")
    return {"LAB_KEY": KEY}


def opencode(home: Path, provider: Provider) -> dict[str, str]:
    options = {"baseURL": provider.url, "apiKey": "{env:LAB_KEY}"}
    lab = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"m": {"name": "m"}}}
    (home / ".config/opencode").mkdir(parents=True)
    # As it completes them itself when it first starts.
    settings = {"$schema": "https://opencode.ai/config.json", "model": "lab/m", "provider": {"lab": lab}}
    (home / ".config/opencode/opencode.json").write_text(json.dumps(settings))
    (home / ".config/opencode/.gitignore").write_text("node_modules\n")
    return {"LAB_KEY": KEY, "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def qwen(home: Path, provider: Provider) -> dict[str, str]:
    auth = {"selectedType": "openai", "baseUrl": provider.url, "apiKey": KEY}
    (home / ".qwen").mkdir()
    settings = {"security": {"auth": auth}, "model": {"name": "m"}, "$version": 3}
    (home / ".qwen/settings.json").write_text("// mine\n" + json.dumps(settings))
    return {}


def gemini(home: Path, provider: Provider) -> dict[str, str]:
    (home / ".gemini").mkdir()
    security = {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}}
    settings = {"model": {"name": "m"}, "security": security}
    (home / ".gemini/settings.json").write_text("// mine\n" + json.dumps(settings))
    (home / ".gemini/.env").write_text(f"GEMINI_API_KEY={KEY}\nGOOGLE_GEMINI_BASE_URL={provider.root}\n")
    return {}


def pi(home: Path, provider: Provider) -> dict[str, str]:
    lab = {"baseUrl": provider.url, "api": "openai-completions", "apiKey": "LAB_KEY", "models": [{"id": "m"}]}
    (home / ".pi/agent").mkdir(parents=True)
    (home / ".pi/agent/models.json").write_text(json.dumps({"providers": {"lab": lab}}))
    return {"LAB_KEY": KEY}


def changed(path: Path, change: Callable[[Any], None]) -> None:
    """Change what a file of JSON holds, which may begin with a comment."""
    settings = json.loads(re.sub("^//.*", "", path.read_text()))
    change(settings)
    path.write_text(json.dumps(settings))


def codex_compacts(home: Path) -> None:
    file = home / ".codex/config.toml"
    file.write_text(f"model_auto_compact_token_limit = 5\n{file.read_text()}")


def opencode_compacts(home: Path) -> None:
    limit = {"context": 12, "output": 4}
    changed(
        home / ".config/opencode/opencode.json", lambda s: s["provider"]["lab"]["models"]["m"].update({"limit": limit})
    )


def qwen_compacts(home: Path) -> None:
    compression = {"chatCompression": {"contextPercentageThreshold": 0.00001}}
    changed(home / ".qwen/settings.json", lambda s: s["model"].update(compression))


def gemini_compacts(home: Path) -> tuple[str, ...]:
    """It compacts whole answers only, and so needs a session that it goes on with."""
    gemini_set("model", compressionThreshold=0.000001)(home)
    at, user, model = {"timestamp": "2026-01-01T00:00:00Z"}, "Good morning. " * 30, "Good morning."
    messages = [
        {"id": "1", "type": "user", "content": [{"text": user}], **at},
        {"id": "2", "type": "gemini", "content": model, **at},
    ]
    about = {"sessionId": "00000000-0000-4000-8000-000000000000", "projectHash": "-", "startTime": at["timestamp"]}
    file = home / "session.json"
    file.write_text(json.dumps({**about, "lastUpdated": at["timestamp"], "kind": "main", "messages": messages}))
    return "--session-file", str(file)


def gemini_set(part: str, **values: Any) -> Callable[[Path], None]:
    return lambda home: changed(home / ".gemini/settings.json", lambda s: s.setdefault(part, {}).update(values))


def pi_compacts(home: Path) -> None:
    """The last of its answers is one too many; the session that it would go on with is compacted."""
    changed(
        home / ".pi/agent/models.json", lambda s: s["providers"]["lab"]["models"][0].update({"contextWindow": 16389})
    )
    compaction = {"enabled": True, "reserveTokens": 16384, "keepRecentTokens": 1}
    (home / ".pi/agent/settings.json").write_text(json.dumps({"compaction": compaction}))


def claude(home: Path, provider: Provider) -> dict[str, str]:
    (home / ".claude").mkdir()
    (home / ".claude/settings.json").write_text(json.dumps({"env": {"ANTHROPIC_BASE_URL": provider.root}}))
    return {"ANTHROPIC_API_KEY": KEY}


SED = f"sed -i s/hello/goodbye/ {FILE}"
ID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
AGENTS = (
    CodingAgent(
        name="mini",
        program="mini",
        command=lambda task: ["mini", "-y", "--exit-immediately", "-l", "0", "-t", task],
        configure=mini,
        turns=lambda work: (
            call("bash", command=f"cat {FILE}"),
            call("bash", command=SED),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
        config=".config/mini-swe-agent",
    ),
    CodingAgent(
        name="aider",
        program="aider",
        command=lambda task: ["aider", "--yes-always", "--no-pretty", "--message", task, FILE],
        configure=aider,
        turns=lambda work: (Reply(f"{FILE}\n```\n{AFTER}```"),),
        config=".aider.conf.yml",
        writes=(".aider",),
        side=("commit",),
        random={r"Commit \w{7}": "Commit"},
    ),
    CodingAgent(
        name="codex",
        program="codex",
        command=lambda task: ["codex", "exec", task],
        configure=codex,
        turns=lambda work: (call("exec_command", cmd=f"cat {FILE}"), call("exec_command", cmd=SED), Reply("Done.")),
        config=".codex",
        random={
            ID: "ID",
            r"Chunk ID: \w+": "Chunk ID",
            r"Wall time: [0-9.]+": "Wall time",
            r"_unix_ms\W+\d+": "TIME",
            # In another order each time; the header says the same.
            r'"client_metadata":\{("[^"]*":"([^"\\]|\\.)*",?)*\}': "METADATA",
            r"analytics_enabled\W+(true|false)": "TELEMETRY",
        },
        delegates=(
            lambda work: (
                call("multi_agent_v1/spawn_agent", message="Sub-agent: read it."),
                # Codex ends with its main agent, whatever its sub-agents are still doing.
                lambda result: call("multi_agent_v1/wait_agent", targets=re.findall(ID, result)),
                Reply("Done."),
            ),
            "Sub-agent: read it.",
            "codex-task",
        ),
        compacts=(codex_compacts, "CONTEXT CHECKPOINT COMPACTION", "codex-compaction", Reply("Done."), "summarised"),
    ),
    CodingAgent(
        name="opencode",
        program="opencode",
        command=lambda task: ["opencode", "run", task],
        configure=opencode,
        turns=lambda work: (
            call("read", filePath=str(work / FILE)),
            call("edit", filePath=str(work / FILE), oldString="hello", newString="goodbye"),
            Reply("Done."),
        ),
        config=".config/opencode",
        writes=(".local/share/opencode", ".local/state/opencode", ".cache/opencode"),
        random={r"ses_\w+": "SESSION"},
        side=("title",),
        delegates=(
            lambda work: (
                call("task", description="look", prompt="Sub-agent: read it.", subagent_type="general"),
                Reply("Done."),
            ),
            "Sub-agent: read it.",
            "opencode-task",
        ),
        # Each answer is above the limit, so that it would compact for ever.
        compacts=(
            opencode_compacts,
            "You are a context summarization",
            "opencode-compaction",
            Reply(status=400),
            # Three messages in the place of two.
            "history_rewritten",
        ),
    ),
    CodingAgent(
        name="gemini",
        program="gemini",
        command=lambda task: ["gemini", "-y", "-p", task],
        configure=gemini,
        turns=lambda work: (
            call("read_file", file_path=str(work / FILE)),
            call("replace", file_path=str(work / FILE), instruction="-", old_string="hello", new_string="goodbye"),
            Reply("Done."),
        ),
        # Its own folder is in the home that the configuration names.
        config="",
        writes=(".gemini",),
        quiet=("x-gemini-api-privileged-user-id",),
        key=("x-goog-api-key", KEY),
        delegates=(
            lambda work: (
                call("invoke_agent", agent_name="generalist", prompt="Sub-agent: read it."),
                Reply("Done."),
            ),
            "Sub-agent: read it.",
            "gemini-task",
        ),
        reports=call("complete_task", result={"response": "It says hello."}),
        compacts=(gemini_compacts, "distilling chat history", "gemini-compression", Reply("Done."), None),
        asides=(
            (
                gemini_set("model", skipNextSpeakerCheck=False),
                None,
                "Analyze *only* the content",
                Reply('{"reasoning": "-", "next_speaker": "user"}'),
                "gemini-speaker",
            ),
            (
                gemini_set("tools", disableLLMCorrection=False),
                lambda work: call(
                    "replace", file_path=str(work / FILE), instruction="-", old_string="helo", new_string="goodbye"
                ),
                "expert code-editing assistant",
                Reply('{"search": "hello", "replace": "goodbye", "noChangesRequired": false, "explanation": "-"}'),
                "gemini-edit",
            ),
            (
                gemini_set("model", name="auto"),
                None,
                "Task Routing AI",
                Reply('{"reasoning": "-", "model_choice": "flash"}'),
                "gemini-router",
            ),
        ),
    ),
    CodingAgent(
        name="qwen",
        program="qwen",
        command=lambda task: ["qwen", "-y", "-p", task],
        configure=qwen,
        turns=lambda work: (
            call("read_file", file_path=str(work / FILE)),
            call("edit", file_path=str(work / FILE), old_string="hello", new_string="goodbye"),
            Reply("Done."),
        ),
        config=".qwen",
        delegates=(
            lambda work: (
                call("agent", description="look", prompt="Sub-agent: read it.", subagent_type="general-purpose"),
                Reply("Done."),
            ),
            "Sub-agent: read it.",
            "qwen-task",
        ),
        # A summary that is longer than the history was, as it counts it, is thrown away.
        compacts=(qwen_compacts, "the component that summarizes", "qwen-compression", Reply("Done."), None),
    ),
    CodingAgent(
        name="pi",
        program="pi",
        command=lambda task: ["pi", "-p", "--provider", "lab", "--model", "m", task],
        configure=pi,
        turns=lambda work: (
            call("read", path=FILE),
            call("edit", path=FILE, edits=[{"oldText": "hello", "newText": "goodbye"}]),
            Reply("Done."),
        ),
        config=".pi",
        compacts=(pi_compacts, "You are a context summarization assistant", "pi-compaction", Reply("Done."), None),
    ),
    CodingAgent(
        name="claude",
        program="claude",
        command=lambda task: ["claude", "--dangerously-skip-permissions", "-p", task],
        configure=claude,
        turns=lambda work: (
            call("Read", file_path=str(work / FILE)),
            call("Edit", file_path=str(work / FILE), old_string="hello", new_string="goodbye"),
            Reply("Done."),
        ),
        config=".claude",
    ),
)
BY_NAME = {agent.name: agent for agent in AGENTS}


def files(folder: Path, without: tuple[str, ...]) -> dict[str, bytes]:
    """Every file below a folder, with what it holds; but what lies below some of its folders."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(without)}


def comparable(text: str, agent: CodingAgent, work: Path, *configs: Path) -> str:
    """A text without what differs between two runs: ids of tool calls, `random`, the configuration's place."""
    for config in configs:
        text = text.replace(str(config), "CONFIG").replace(os.path.relpath(config, work), "CONFIG")
    for pattern, word in agent.random.items():
        text = re.sub(pattern, word, text)
    known: dict[str, str] = {}
    return re.sub(r"(call|fc)_\d+", lambda m: known.setdefault(m[0], f"call-{len(known)}"), text)


PER_CONNECTION = ("host", "content-length", "connection", "accept-encoding")


def request(seen: Seen, agent: CodingAgent, work: Path, *configs: Path) -> tuple[str, str, dict[str, str]]:
    """Where a request went, below the provider's URL, its body, and its headers but those of the connection."""
    without = (*PER_CONNECTION, *agent.quiet)
    headers = {k: comparable(v, agent, work, *configs) for k, v in seen.headers.items() if k not in without}
    return seen.path, comparable(seen.raw.decode(), agent, work, *configs), headers
