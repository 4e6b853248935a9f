"""The acceptance tests of Open Responses, by their ids and in our own words: each is answered as the published schema
wants, or refused by an error that says why. Source: openresponses.org, "Acceptance tests"."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from api_features import UPGRADE
from scripted import Asked, ScriptedEngine, in_loop, quick_tokenizer, serving

USER = {"type": "message", "role": "user", "content": "how many?"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
TOOL = {
    "type": "function", "name": "count", "description": "Counts.",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "count", "arguments": {"what": "apples"}}\n</tool_call>'


@dataclass(frozen=True)
class Row:
    """What is sent for an acceptance test, and what comes back.

    Attributes:
        body: of the request. line: what the policy samples. item: the type of an output item that there must be.
        sees: texts that the prompt has. status: of the answer. error: words of a refusal.
        path: below `/v1`. method: of HTTP.
    """

    body: dict[str, Any] = field(default_factory=dict)
    line: str = "12 apples"
    item: str = "message"
    sees: tuple[str, ...] = ()
    status: int = 200
    error: str = ""
    path: str = "responses"
    method: str = "POST"


def history(*items: Any) -> dict[str, Any]:
    return {"model": "m", "input": [*items]}


COMPACTED = Row(
    history(USER), status=404, error="Only OpenAI's models write and read compactions", path="responses/compact"
)
WEBSOCKET = Row(status=405, error="over HTTP, not over a WebSocket", method="WEBSOCKET")
ROWS = {
    "basic-response": Row(history(USER), sees=("how many?",)),
    "assistant-phase": Row(
        history(USER, {"type": "message", "role": "assistant", "phase": "commentary", "content": "I count."}, USER),
        sees=("I count.",),
    ),
    # Of the suite's own schema, which answers must fit with and without a phase: ours have none.
    "response-output-phase-schema": Row(history(USER)),
    "streaming-response": Row({**history(USER), "stream": True}),
    "system-prompt": Row(history({**USER, "role": "system", "content": "be brief"}, USER), sees=("be brief",)),
    "tool-calling": Row({**history(USER), "tools": [TOOL]}, CALL, "function_call", sees=("count",)),
    "image-input": Row(
        history({**USER, "content": [{"type": "input_text", "text": "what is it?"}, PICTURE]}),
        status=400, error="input.0.content.1 has the type 'input_image'",
    ),
    "multi-turn": Row(
        history({**USER, "content": "I am Ada."}, {**USER, "role": "assistant", "content": "Hello Ada."}, USER),
        sees=("I am Ada.", "Hello Ada.", "how many?"),
    ),
    "compact-response": COMPACTED,
    "compact-missing-model": Row({"input": [USER]}, status=404, error=COMPACTED.error, path=COMPACTED.path),
    "websocket-response": WEBSOCKET,
    "websocket-sequential-responses": WEBSOCKET,
    "websocket-continuation": WEBSOCKET,
    "websocket-reconnect-store-false-recovery": WEBSOCKET,
    "websocket-previous-response-not-found": WEBSOCKET,
    "websocket-failed-continuation-evicts-cache": WEBSOCKET,
    "websocket-compact-new-chain": WEBSOCKET,
}  # fmt: skip
"""The suite's id of a test -> what is shown of it."""


@pytest.mark.parametrize("test", ROWS)
@in_loop
async def test_an_acceptance_test_of_open_responses(test: str) -> None:
    row, prompts = ROWS[test], []

    def policy(asked: Asked) -> str:
        prompts.append(quick_tokenizer().decode(asked.prompt_ids.tolist()))
        return row.line

    async with serving(ScriptedEngine(quick_tokenizer(), policy)) as rig:
        attempt = await rig.attempt()
        headers = {"authorization": f"Bearer {attempt.key}"}
        url = f"{attempt.url()}/{row.path}"
        async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
            if row.method == "WEBSOCKET":
                answer = await http.get(url, headers=UPGRADE)
            else:
                answer = await http.request(row.method, url, json=row.body)
    assert answer.status_code == row.status, answer.text
    if row.error:
        assert row.error in answer.json()["error"]["message"]
        assert prompts == []
        return
    response = final_response(answer) if row.body.get("stream") else answer.json()
    assert response["status"] == "completed"
    assert row.item in [item["type"] for item in response["output"]]
    assert all(text in prompts[0] for text in row.sees)
    types = pytest.importorskip("openresponses_types")
    types.ResponseResource.model_validate(response)


def final_response(answer: httpx.Response) -> dict[str, Any]:
    """The response that ends a stream, whose events are numbered and have the names of their types."""
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in answer.text.strip().split("\n\n")]
    found = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    assert found[0]["type"] == "response.created"
    return found[-1]["response"]


def test_all_seventeen_are_there() -> None:
    assert len(ROWS) == 17
