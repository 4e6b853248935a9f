"""The SDKs for Node read a policy's answers, streams, refusals and models as those of their providers."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS
from scripted import ScriptedEngine, quick_tokenizer, serving

PACKAGES = ("openai@6", "@anthropic-ai/sdk@1", "@google/genai@2")
REFUSED = {
    "chat": "frequency_penalty", "responses": "background", "messages": "container", "google": "responseModalities"
}  # fmt: skip

pytestmark = pytest.mark.full


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, in a folder with the packages that it imports."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("sdks")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {PACKAGES}: {done.stderr.strip().splitlines()[-1:]}")
    return Path(shutil.copy(TESTS / "support" / "programs" / "four_apis.mjs", folder))


def test_the_sdks_for_node(program: Path) -> None:
    async def run() -> tuple[Any, list[str]]:
        async with serving(ScriptedEngine(quick_tokenizer(), ["12 apples"])) as rig:
            attempt = await rig.attempt()
            words = ["node", program.name, attempt.url().removesuffix("/v1"), attempt.key]
            done = await asyncio.to_thread(
                subprocess.run, words, cwd=program.parent, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr[-3000:]
            return json.loads(done.stdout), [call.id for call in await attempt.close()]

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
