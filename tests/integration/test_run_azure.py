"""Azure's OpenAI clients in programs without agl: recorded by their own endpoint, and never pointed at OpenAI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import chats, facts, holds, launch, trace

from agl import semconv
from agl.testing.provider import Provider, says, serve
from agl.tracing.propagation import gateway_variables
from agl.trainer.runners.dotenv import dotenv_names
from agl.trainer.runners.recording_proxy import AZURE, OLD_OPENAI, client_variables, left_alone, provider_bases

KEY, PACKAGE = "azure-key-0123456789", "openai@6.49.0"
WITHOUT_AGL = ("env", "-u", "PYTHONPATH", "-u", "AGL_HANDOVER")
PYTHON = """
import sys, openai
client = openai.AzureOpenAI(api_version="2024-10-21", max_retries=0, **dict(w.split("=") for w in sys.argv[1:]))
messages = [{"role": "user", "content": "hi"}]
print(client.chat.completions.create(model="azure-endpoint", messages=messages).choices[0].message.content)
"""
JAVASCRIPT = """
import { AzureOpenAI, OpenAI } from "openai";
const options = { apiVersion: "2024-10-21", maxRetries: 0 };
const clients = {
  environment: () => new AzureOpenAI(options),
  endpoint: () => new AzureOpenAI({ ...options, endpoint: process.env.THEIRS }),
  both: () => new AzureOpenAI({ ...options, endpoint: process.env.AZURE_OPENAI_ENDPOINT }),
  plain: () => new OpenAI({ maxRetries: 0 }),
};
const messages = [{ role: "user", content: "hi" }];
const answer = await clients[process.argv[2]]().chat.completions.create({ model: "m", messages });
console.log(answer.choices[0].message.content);
"""


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("ok")) as running:
        yield running


def users(**variables: str) -> dict[str, str]:
    """The environment of a user with no variables of a provider but these."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("AGL_", "OTEL_", "OPENAI", "AZURE"))} | variables


def test_an_azure_client_is_recorded_by_its_own_endpoint(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PYTHON)
    env = users(AZURE_OPENAI_ENDPOINT=provider.root, AZURE_OPENAI_API_KEY=KEY)
    done = launch(tmp_path, env, "--agent", "azure", "--", *WITHOUT_AGL, sys.executable, "program.py")
    assert (done.returncode, done.stdout.split()) == (0, ["ok"]), done.stderr
    [seen] = provider.seen
    assert seen.path == "/openai/deployments/azure-endpoint/chat/completions?api-version=2024-10-21"
    assert seen.headers["api-key"] == KEY
    [chat] = chats(trace(tmp_path))
    assert chat["attributes"][semconv.PROVIDER_NAME] == "azure.ai.openai"
    assert (chat["attributes"][semconv.AGENT_NAME], chat["attributes"][semconv.REQUEST_MODEL]) == (
        "azure",
        "azure-endpoint",
    )
    assert not holds(tmp_path / "agl-runs", KEY)


def test_what_is_left_alone_is_said(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PYTHON)
    program = ("program.py", f"azure_endpoint={provider.root}")
    done = launch(tmp_path, users(AZURE_OPENAI_API_KEY=KEY), "--", *WITHOUT_AGL, sys.executable, *program)
    assert (done.returncode, done.stdout.split()) == (0, ["ok"]), done.stderr
    assert facts(tmp_path)["calls"] == 0
    assert "agl: clients of OpenAI itself and, without AZURE_OPENAI_ENDPOINT, of Azure are not recorded" in done.stderr


def test_a_program_that_agl_traces_itself_needs_no_such_word(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PYTHON)
    env = users(AZURE_OPENAI_ENDPOINT=provider.root, AZURE_OPENAI_API_KEY=KEY)
    done = launch(tmp_path, env, "--", sys.executable, "program.py")
    assert done.returncode == 0
    assert "recorded" not in done.stderr
    assert facts(tmp_path)["calls"] == 1
    assert provider.seen[0].path.startswith("/openai/deployments/azure-endpoint/")


def test_azures_key_is_not_sent_to_openai(tmp_path: Path) -> None:
    """It would, from a program that reads its variables from a file."""
    text = f"""
import os, urllib.error, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/deployments/m/chat/completions?api-version=2024-10-21"
request = urllib.request.Request(url, b"{{}}", {{"content-type": "application/json", "api-key": "{KEY}"}})
try:
    urllib.request.urlopen(request)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    (tmp_path / "program.py").write_text(text)
    done = launch(tmp_path, users(), "--", sys.executable, "-S", "program.py")
    assert done.stdout.startswith("400 ")
    assert "It was not forwarded: set AZURE_OPENAI_ENDPOINT" in done.stdout
    assert facts(tmp_path)["calls"] == 0


def test_each_provider_has_its_own_variable_and_no_other() -> None:
    urls = {"openai": "o", "anthropic": "a", "google": "g"}
    plain = {"OPENAI_BASE_URL": "o", "ANTHROPIC_BASE_URL": "a", "GOOGLE_GEMINI_BASE_URL": "g"}
    own = {"OPENAI_BASE_URL": "http://mine/v1"}
    azure = {"AZURE_OPENAI_ENDPOINT": "https://x.azure.com"}
    assert AZURE not in provider_bases({})
    assert provider_bases(azure | own)["openai"] == "http://mine/v1"
    assert provider_bases(azure)[AZURE] == "https://x.azure.com"
    assert client_variables({"OPENAI_API_KEY": "k"}, urls) == plain
    assert client_variables(azure | own, urls | {AZURE: "z"}) == plain | {"AZURE_OPENAI_ENDPOINT": "z"}
    for indication in ("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "OPENAI_API_VERSION"):
        others = {k: v for k, v in plain.items() if k != "OPENAI_BASE_URL"}
        assert client_variables({indication: "x"}, urls) == others
        assert indication in str(left_alone({indication: "x"}))
    assert left_alone({}) is None


def test_an_address_in_a_file_of_the_program_s_is_left_alone() -> None:
    urls = {"openai": "o", "anthropic": "a", "google": "g"}
    assert client_variables({}, urls, {"OPENAI_BASE_URL"}) == {
        "ANTHROPIC_BASE_URL": "a",
        "GOOGLE_GEMINI_BASE_URL": "g",
    }
    assert "OPENAI_BASE_URL from a .env file" in str(left_alone({}, {"OPENAI_BASE_URL"}))
    # What the environment has, such a file does not change.
    own = {"OPENAI_BASE_URL": "http://mine/v1"}
    assert client_variables(own, urls, {"OPENAI_BASE_URL"})["OPENAI_BASE_URL"] == "o"
    assert left_alone(own, {"OPENAI_BASE_URL", "OPENAI_API_KEY"}) is None
    # An Azure client has its variables there as well.
    assert "OPENAI_BASE_URL" not in client_variables({}, urls, {"AZURE_OPENAI_API_KEY"})
    assert "AZURE_OPENAI_API_KEY" in str(left_alone({}, {"AZURE_OPENAI_API_KEY"}))
    assert left_alone({}, {"OPENAI_API_KEY"}) is None
    assert "OPENAI_BASE_URL" not in client_variables({}, urls, {"OPENAI_API_BASE"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("OPENAI_BASE_URL=http://x/v1\n# ANTHROPIC_BASE_URL=y\n", {"OPENAI_BASE_URL"}),
        ("export A = 'b'\n\n  C: d\nno assignment\n", {"A", "C"}),
        ("", set()),
    ],
)
def test_the_names_in_a_dotenv_file(text: str, names: set[str], tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(text)
    (tmp_path / "other.env").write_text("OTHER=1")
    assert dotenv_names(["node", "a.mjs"], tmp_path) == names
    for command in (["node", "--env-file=other.env", "a.mjs"], ["uv", "run", "--env-file", "other.env", "a.py"]):
        assert dotenv_names(command, tmp_path) == names | {"OTHER"}
    assert dotenv_names(["node", "--env-file"], tmp_path / "nowhere") == frozenset()


READS_DOTENV = """
import os, re
# As dotenv does: what the environment has stays.
for line in open(".env"):
    name, _, value = line.strip().partition("=")
    os.environ.setdefault(name, value)
from openai import OpenAI
answer = OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
print(answer.choices[0].message.content)
"""


def test_a_key_in_a_dotenv_file_goes_where_that_file_says(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(READS_DOTENV)
    (tmp_path / ".env").write_text(f"OPENAI_BASE_URL={provider.url}\nOPENAI_API_KEY={KEY}\n")
    done = launch(tmp_path, users(), "--", *WITHOUT_AGL, sys.executable, "program.py")
    assert (done.returncode, done.stdout.split()) == (0, ["ok"]), done.stderr
    assert [seen.headers["authorization"] for seen in provider.seen] == [f"Bearer {KEY}"]
    assert "agl: clients that read OPENAI_BASE_URL from a .env file are not recorded" in done.stderr
    # In a program that agl traces itself, nothing is redirected.
    done = launch(tmp_path, users(), "--", sys.executable, "program.py")
    assert (done.returncode, done.stdout.split(), facts(tmp_path)["calls"]) == (0, ["ok"], 1), done.stderr
    assert ".env" not in done.stderr


OLD_NAME = """
import os
from langchain_openai import ChatOpenAI
from openai import OpenAI
# Where LiteLLM sends a call of OpenAI's.
base = os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
client = OpenAI(base_url=base, max_retries=0)
answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
print(answer.choices[0].message.content)
print(ChatOpenAI(model="m", max_retries=0).invoke("hi").content)
"""


def test_clients_that_read_openai_api_base_keep_their_own_server(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OLD_NAME)
    env = users(OPENAI_API_BASE=provider.url, OPENAI_API_KEY=KEY)
    done = launch(tmp_path, env, "--", *WITHOUT_AGL, sys.executable, "program.py")
    assert (done.returncode, done.stdout.split()) == (0, ["ok", "ok"]), done.stderr
    assert [(seen.path, seen.headers["authorization"]) for seen in provider.seen] == [
        ("/v1/chat/completions", f"Bearer {KEY}")
    ] * 2
    assert [chat["attributes"][semconv.PROVIDER_NAME] for chat in chats(trace(tmp_path))] == ["openai"] * 2
    assert "agl: clients of OpenAI that do not read OPENAI_API_BASE are not recorded" in done.stderr


def test_openai_api_base_is_set_only_where_it_was() -> None:
    old = {"OPENAI_API_BASE": "http://old/v1"}
    bases = provider_bases(old | {"OPENAI_BASE_URL": "http://mine/v1"})
    assert (bases["openai"], bases[OLD_OPENAI]) == ("http://mine/v1", "http://old/v1")
    assert OLD_OPENAI not in provider_bases({})
    urls = {"openai": "o", OLD_OPENAI: "z"}
    assert client_variables(old, urls) == {"OPENAI_API_BASE": "z"}
    both = old | {"OPENAI_BASE_URL": "http://mine/v1"}
    assert client_variables(both, urls) == {"OPENAI_API_BASE": "z", "OPENAI_BASE_URL": "o"}
    assert left_alone(both) is None
    policy = gateway_variables("http://gateway", "worker", "k", old)
    assert policy["OPENAI_API_BASE"] == policy["OPENAI_BASE_URL"]
    assert "OPENAI_API_BASE" not in gateway_variables("http://gateway", "worker", "k", {})


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program and OpenAI's SDK, installed by npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("javascript")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    (folder / "program.mjs").write_text(JAVASCRIPT)
    return folder


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize(
    ("client", "variables", "calls"),
    [
        ("environment", ["AZURE_OPENAI_ENDPOINT"], 1),
        ("both", ["AZURE_OPENAI_ENDPOINT"], 1),
        ("endpoint", [], 0),
        ("plain", ["AZURE_OPENAI_ENDPOINT", "OPENAI_BASE_URL"], 1),
    ],
)
def test_the_clients_for_javascript_work_as_without_agl(
    client: str, variables: list[str], calls: int, javascript: Path, provider: Provider, tmp_path: Path
) -> None:
    urls = {"OPENAI_BASE_URL": provider.url, "AZURE_OPENAI_ENDPOINT": provider.root}
    own = {name: urls[name] for name in variables} | {"THEIRS": provider.root, "AGL_STORE": str(tmp_path / "run.db")}
    env = users(AZURE_OPENAI_API_KEY=KEY, OPENAI_API_KEY="sk-of-openai", **own)
    done = launch(javascript, env, "--", "node", "program.mjs", client)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert facts(javascript)["calls"] == calls
    [seen] = provider.seen
    assert seen.headers.get("api-key") == (None if client == "plain" else KEY)
