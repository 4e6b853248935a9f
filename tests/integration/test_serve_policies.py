"""`agl serve DIR` as a person starts it: the SDKs of three providers, keys, several policies, signals, a record."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import AGL, Programs, family, fetch, programs

import agl
from agl.trainer.http import local_key

SECONDS = 150
USER: Any = {"role": "user", "content": "What is 3 + 4?"}
SHOP, DESK = "shop-key-0123456789", "desk-key-0123456789"


def _start(at: Programs, *words: object) -> dict[str, Any]:
    """Start a server and wait until it listens; its facts."""
    program = at.start(*AGL, "serve", *words, "--port", 0, "--json", "facts.json", log="server.log")
    facts = at.directory / "facts.json"
    at.until(lambda: program.poll() is not None or (facts.exists() and facts.read_text()), SECONDS, "the server")
    assert program.poll() is None, at.text("server.log")
    return json.loads(facts.read_text())


def _openai(url: str, key: str | None) -> Any:
    from openai import DefaultHttpxClient, OpenAI

    http = DefaultHttpxClient(trust_env=False)
    return OpenAI(base_url=f"{url}/v1", api_key=key or "none", http_client=http, max_retries=0)


def test_two_policies_for_two_applications_whose_calls_are_trained_on(tiny_policy: Path, tmp_path: Path) -> None:
    import openai
    from anthropic import Anthropic
    from anthropic import DefaultHttpxClient as AnthropicHttp
    from google import genai

    keys = tmp_path / "keys"
    keys.write_text(f"# who asks\nshop {SHOP}\ndesk {DESK}\n")
    with programs(tmp_path) as at:
        facts = _start(at, f"solver={tiny_policy}", f"other={tiny_policy}", "--key-file", keys, "--record", "seen.db")
        url = facts["url"]
        assert fetch(f"{url}/health") == (200, {"status": "ok", "models": ["solver", "other"]})
        with pytest.raises(openai.AuthenticationError):
            _openai(url, "wrong-key-0123456789").models.list()
        client = _openai(url, SHOP)
        assert [model.id for model in client.models.list()] == ["solver", "other"]
        chat = client.chat.completions.create(model="solver", messages=[USER], max_tokens=30)
        assert chat.model == "solver"
        with pytest.raises(openai.NotFoundError, match="'solver', 'other'"):
            client.chat.completions.create(model="nobody", messages=[USER])
        schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        held = client.chat.completions.create(model="solver", messages=[USER], response_format=form)
        assert json.loads(held.choices[0].message.content) == {"n": 7}
        anthropic = Anthropic(base_url=url, api_key=DESK, http_client=AnthropicHttp(trust_env=False), max_retries=0)
        with anthropic.messages.stream(model="other", max_tokens=30, messages=[USER]) as stream:
            assert stream.get_final_message().model == "other"
        google = genai.Client(api_key=SHOP, http_options={"base_url": url})
        assert google.models.generate_content(model="other", contents="What is 3 + 4?").model_version == "other"
        # A program of a framework, in another process than the server's.
        from langchain_openai import ChatOpenAI

        http = client.with_options()._client
        model = ChatOpenAI(model="solver", base_url=f"{url}/v1", api_key=DESK, http_client=http, max_tokens=30)  # type: ignore[arg-type, call-arg]
        assert model.invoke("What is 3 + 4?").response_metadata["model_name"] == "solver"
        # Answers that are under way when the server is stopped are completed.
        finished: set[int] = set()
        asked = client.chat.completions.create(model="solver", messages=[USER], n=32, stream=True, max_tokens=60)
        for number, chunk in enumerate(asked):
            if number == 0:
                os.kill(facts["process"], signal.SIGTERM)
            finished |= {choice.index for choice in chunk.choices if choice.finish_reason}
        assert finished == set(range(32))
        (server,) = at.running
        assert server.wait(60) == 0
        assert "Traceback" not in at.text("server.log")
        trained = at.start(
            *AGL, "train", "--algorithm", "sft", "--data", "seen.db", "--model", tiny_policy, "--steps", 1,
            "--device", "cpu", "--directory", "trained", log="train.log",
        )  # fmt: skip
        assert trained.wait(SECONDS) == 0, at.text("train.log")
    # Three conversations of the shop's that had one answer, one that had 32, and two of the desk's.
    chosen = agl.traces(tmp_path / "seen.db", agents=["shop"]).load(str(tiny_policy))
    assert (chosen.counts["rollouts"], chosen.counts["calls"]) == (6, 37)
    assert chosen.counts["rollouts_kept"] == 4
    assert chosen.counts["calls_left_out/other agent"] == 2
    assert chosen.counts["calls_retokenised"] == 0


def test_without_a_key_file_a_server_makes_its_key_and_ends_with_its_policy(tiny_policy: Path, tmp_path: Path) -> None:
    with programs(tmp_path, AGL_LIMIT_MESSAGES="3") as at:
        facts = _start(at, tiny_policy)
        url, key = facts["url"], local_key.find(facts["url"])
        assert key is not None
        assert key in at.text("server.log")
        assert fetch(f"{url}/v1/chat/completions", {"messages": [USER], "max_tokens": 5})[0] == 200
        assert fetch(f"{url}/v1/chat/completions", {"messages": [USER] * 4})[0] == 413
        (policy,) = (pid for pid, depth in family(facts["process"]) if depth == 1)
        os.kill(policy, signal.SIGKILL)
        (server,) = at.running
        assert server.wait(60) == 1
        assert "the policy process died" in at.text("server.log")
    assert local_key.find(url) is None


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("DIR", "--algorithm", "grpo"), "not for serving policies to applications"),
        (("DIR", "--host", "0.0.0.0"), "without a key"),
        (("DIR", "--no-key", "--host", "0.0.0.0"), "without a key"),
        (("a=DIR", "a=DIR"), "two policies called 'a'"),
        (("no/such/dir",), "no such directory"),
        (("DIR", "--data", "x.jsonl"), "for training"),
        (("--model", "DIR", "--record", "x.db"), "for policies that applications ask"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    words: tuple[str, ...], error: str, tmp_path: Path, untrained_model: Path
) -> None:
    with programs(tmp_path) as at:
        program = at.start(
            *AGL, "serve", *(word.replace("DIR", str(untrained_model)) for word in words), log="server.log"
        )
        assert program.wait(SECONDS) == 1
        assert error in " ".join(at.text("server.log").split())
