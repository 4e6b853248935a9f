"""The SDKs for Node, and Vercel's AI SDK with its providers, read a policy's answers as those of the real ones."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS
from scripted import Asked, Attempt, ScriptedEngine, quick_tokenizer, serving

PACKAGES = ("openai@6", "@anthropic-ai/sdk@1", "@google/genai@2")
VERCEL = ("ai@6", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2", "@ai-sdk/anthropic@3", "@ai-sdk/google@3")
REFUSED = {
    "chat": "frequency_penalty", "responses": "background", "messages": "container", "google": "responseModalities"
}  # fmt: skip

pytestmark = pytest.mark.full


def installed(folder: Path, name: str, packages: tuple[str, ...]) -> Path:
    """A program of Node, in a folder with the packages that it imports."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *packages]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {packages}: {done.stderr.strip().splitlines()[-1:]}")
    return Path(shutil.copy(TESTS / "support" / "programs" / name, folder))


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("sdks"), "four_apis.mjs", PACKAGES)


@pytest.fixture(scope="session")
def vercel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("vercel"), "vercel_ai.mjs", VERCEL)


async def printed(program: Path, attempt: Attempt) -> Any:
    """The JSON that a program prints when it is given the attempt's address and key."""
    words = ["node", program.name, attempt.url().removesuffix("/v1"), attempt.key]
    done = await asyncio.to_thread(
        subprocess.run, words, cwd=program.parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_sdks_for_node(program: Path) -> None:
    async def run() -> tuple[Any, list[str]]:
        async with serving(ScriptedEngine(quick_tokenizer(), ["12 apples"])) as rig:
            attempt = await rig.attempt()
            return await printed(program, attempt), [call.id for call in await attempt.close()]

    found, calls = asyncio.run(run())
    assert found.keys() == REFUSED.keys()
    for api, seen in found.items():
        assert (seen["text"], seen["streamed"]) == ("12 apples", "12 apples"), api
        assert seen["id"][0] == seen["id"][1]
        assert seen["id"][0] in calls
        assert seen["refused"]["status"] == 400
        assert REFUSED[api] in seen["refused"]["message"]
        if api != "google":
            assert seen["refused"]["id"] in calls
        assert seen["models"] == ["models/policy" if api == "google" else "policy"]


def counting(asked: Asked) -> str:
    """A policy that calls the tool that it sees and then answers; a schema gets its JSON."""
    prompt = quick_tokenizer().decode(asked.prompt_ids.tolist())
    if prompt.rstrip().endswith('"arguments":'):  # A tool that must be called: the policy writes the rest of the call.
        return '{"n": 12}}\n</tool_call>'
    if "a dozen" in prompt:
        return "12 apples"
    if "count" in prompt:
        return '<tool_call>\n{"name": "count", "arguments": {"n": 12}}\n</tool_call>'
    return '{"n": 12}' if asked.sampling.grammar or "JSON" in prompt else "12 apples"


def test_vercels_ai_sdk(vercel: Path) -> None:
    async def run() -> tuple[Any, list[Any]]:
        engine = ScriptedEngine(quick_tokenizer(), counting)
        # What a schema asks for, a scripted engine is asked for as the real one is.
        engine.grammars = True  # type: ignore[attr-defined]
        async with serving(engine) as rig:
            attempt = await rig.attempt()
            return await printed(vercel, attempt), await attempt.close()

    found, calls = asyncio.run(run())
    assert found.keys() == {"chat", "responses", "compatible", "messages", "google"}
    for provider, seen in found.items():
        assert (seen["text"], seen["agent"], seen["streamed"]) == ("12 apples",) * 3, provider
        assert seen["counted"] == [12, 12]
        assert (seen["steps"], seen["finish"]) == (2, "stop")
        assert seen["tokens"] > 0
        assert (seen["object"], seen["streamedObject"]) == ({"n": 12}, {"n": 12})
    # Each provider: a text, an agent's two calls, whole and streamed, and two objects.
    assert len(calls) == 5 * 7
    assert {call.error for call in calls} == {None}
