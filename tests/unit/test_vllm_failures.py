"""What `agl.VLLMEngine` makes of servers that fail, which a real one (tests/verl) does not do when asked."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl
from agl.errors import AglError, ConfigError, EngineError
from agl.trainer.engines.base import Completion, Request, Sampling
from agl.trainer.engines.vllm_answers import Part, logprob_kind

MODELS = {"data": [{"id": "m", "root": "org/m", "max_model_len": 64}, {"id": "lora", "root": "/l", "parent": "m"}]}
PROMPT = np.int32([5, 6, 7])


def choice(ids: list[int], values: list[float], top: list[dict[str, float]], **more: Any) -> dict[str, Any]:
    logs = {"token_logprobs": values, "top_logprobs": top, "tokens": [f"token_id:{i}" for i in ids]}
    return {"index": 0, "token_ids": ids, "logprobs": logs, "finish_reason": "length", **more}


def good(body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An answer of as many tokens as were asked for, of a server that reports log-probs of what it draws from."""
    two = 0.9 if body["temperature"] == 1 else 0.75
    top = {"token_id:1": math.log(two), "token_id:2": math.log(1 - two)}
    n = body["max_tokens"]
    return choice([1] * n, [math.log(two)] * n, [top] * n, **{"prompt_token_ids": body["prompt"], **more})


class Server:
    """Answers `/v1/completions` by a script: (request's body, how many came before) -> status, body or chunks."""

    def __init__(self, script: Callable[[dict[str, Any], int], tuple[int, Any]]) -> None:
        self.script, self.seen, self.headers = script, [], []
        self.url = ""


@contextmanager
def serving(script: Callable[[dict[str, Any], int], tuple[int, Any]]) -> Iterator[Server]:
    server = Server(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.whole(200, MODELS)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.seen.append(body)
            server.headers.append(dict(self.headers))
            status, answer = server.script(body, len(server.seen) - 1)
            if isinstance(answer, list):
                self.stream(answer)
            else:
                self.whole(status, answer)

        def whole(self, status: int, answer: Any) -> None:
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def stream(self, chunks: list[bytes]) -> None:
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            # Without the last chunk: the answer breaks off.
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()


def ask(
    server: Server,
    sampling: Sampling | None = None,
    *,
    model: str | None = None,
    session: str | None = None,
    **options: Any,
) -> Completion:
    async def scenario() -> Completion:
        async with agl.VLLMEngine(server.url, model, api_key="k") as engine:
            return await engine.generate(
                Request(PROMPT, sampling or Sampling(max_tokens=3), session=session), **options
            )

    return asyncio.run(scenario())


def answered(body: dict[str, Any], **more: Any) -> tuple[int, Any]:
    return 200, {"choices": [good(body, **more)]}


@pytest.mark.full
def test_a_server_that_is_not_ready_is_asked_again() -> None:
    with serving(lambda body, n: (503 if n % 2 == 0 else 429, {}) if n < 3 else answered(body)) as server:
        assert ask(server).token_ids.tolist() == [1, 1, 1]
    with serving(lambda body, n: (503, b"starting")) as server:
        with pytest.raises(EngineError, match=r"takes no requests now \(503\): 'starting'"):
            ask(server)
        assert len(server.seen) == 5


@pytest.mark.parametrize("streamed", [False, True])
def test_what_the_server_reused_of_a_prompt(streamed: bool) -> None:
    usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}

    def script(body: dict[str, Any], n: int) -> tuple[int, Any]:
        if not body.get("stream"):
            return 200, {"choices": [good(body)], "usage": usage}
        assert body["stream_options"] == {"include_usage": True}
        chunks = [{"choices": [good(body)]}, {"choices": [], "usage": usage}]
        return 200, [b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks] + [b"data: [DONE]\n\n", b""]

    with serving(script) as server:
        answer = ask(server, on_tokens=(lambda *tokens: None) if streamed else None)
    assert (answer.cached_tokens, answer.finish_reason, answer.token_ids.size) == (1, "length", 3)


def test_what_may_have_been_sampled_is_not_asked_again() -> None:
    with serving(lambda body, n: (500, {"error": {"message": "boom", "code": 500}})) as server:
        with pytest.raises(EngineError, match=r"refuses \(500\): boom") as raised:
            ask(server)
        assert len(server.seen) == 1
        assert server.url in str(raised.value)


def test_everything_that_a_server_would_add_is_switched_off() -> None:
    with serving(lambda body, n: answered(body)) as server:
        ask(server, Sampling(3, 0.8, 0.9, 4, ("x",), (7,), 2**63 + 5), model="lora", session="a/1")
    body = server.seen[-1]
    expected = {
        "model": "lora", "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0.8, "top_p": 0.9, "top_k": 4,
        "stop": ["x"], "stop_token_ids": [7], "seed": 5, "repetition_penalty": 1.0, "min_p": 0.0, "ignore_eos": True,
    }  # fmt: skip
    assert {k: body[k] for k in expected} == expected
    assert server.headers[-1]["Authorization"] == "Bearer k"
    assert server.headers[-1]["X-Session-ID"] == "a/1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": [5, 6]}, r"after another prompt \(2 tokens instead of 3\)"),
        ({"token_ids": None}, "no token ids or log-probs"),
        ({"logprobs": None}, "no token ids or log-probs"),
        ({"logprobs": {}}, "no token ids or log-probs"),
        ({"token_ids": [1]}, "1 tokens with 3 log-probs"),
        ({"logprobs": {"token_logprobs": [-1.0, None, -1.0]}}, "not finite"),
        ({"logprobs": {"token_logprobs": [-1.0, -9999.0, -1.0]}}, "not finite"),
        ({"finish_reason": "repetition"}, "'repetition'"),
        ({"finish_reason": None}, "without an end"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(changes: dict[str, Any], message: str) -> None:
    script = lambda body, n: answered(body, **changes if n >= 2 else {})  # noqa: E731
    with serving(script) as server, pytest.raises(EngineError, match=message):
        ask(server)


def test_an_answer_that_the_server_gave_up_is_cancelled() -> None:
    with serving(lambda body, n: answered(body, finish_reason="abort" if n >= 2 else "length")) as server:
        assert ask(server).finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ([], "broke off after 1 tokens"),
        ([b"data: [DONE]\n\n"], "broke off after 1 tokens"),
        ([b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'], r"refuses \(500\): out of memory"),
        ([b'data: {"choices": []}\n\n'], "not an answer of vLLM"),
    ],
)
def test_a_stream_that_ends_badly_is_an_error(after: list[bytes], message: str) -> None:
    def script(body: dict[str, Any], n: int) -> tuple[int, Any]:
        if not body.get("stream"):
            return answered(body)
        part = good({**body, "max_tokens": 1}, finish_reason=None)
        event = b"data: " + json.dumps({"choices": [part]}).encode() + b"\n\n"
        # In pieces that end anywhere.
        return 200, [event[:7], event[7:50], event[50:], *after]

    seen: list[int] = []
    with serving(script) as server, pytest.raises(EngineError, match=message):
        ask(server, on_tokens=lambda ids, logprobs: seen.extend(ids))
    assert seen == [1]


def test_a_server_of_another_kind() -> None:
    async def scenario(url: str) -> None:
        async with agl.VLLMEngine(url):
            pass

    with serving(lambda body, n: (200, {})) as server:
        MODELS["data"][0].pop("max_model_len")
        try:
            with pytest.raises(EngineError, match="not that of a vLLM server"):
                asyncio.run(scenario(server.url))
        finally:
            MODELS["data"][0]["max_model_len"] = 64


# -- which log-probs ---------------------------------------------------------------------------------------------------

logits = st.lists(st.floats(-25, 25), min_size=3, max_size=20)


def top(values: np.ndarray) -> Part:
    best = np.argsort(-values)[:5]
    found = {f"token_id:{i}": float(values[i]) for i in best}
    return Part(choice([int(best[0])], [-1.0], [found]), 5)


def log_softmax(values: np.ndarray) -> np.ndarray:
    return values - values.max() - math.log(np.exp(values - values.max()).sum())


@given(logits, st.sampled_from(["raw", "processed"]), st.floats(0, 0.03), st.randoms())
def test_the_kind_of_logprobs_is_told_apart(values: list[float], kind: str, noise: float, random: Any) -> None:
    x = np.asarray(values)
    plain, warped = log_softmax(x), log_softmax(x / 2)
    seen = plain if kind == "raw" else warped
    seen = seen + [random.uniform(-noise, noise) for _ in seen]
    # Where they are nearly the same it may not say, but must not say the other.
    if (found := logprob_kind(top(plain), top(seen))) is None:
        best = np.argsort(-x)[:5]
        assert np.abs(plain - warped)[best].max() < 0.2 + 0.04 * np.abs(plain[best]).max()
    else:
        assert found == kind


@given(logits)
def test_logits_are_noticed(values: list[float]) -> None:
    x = np.asarray(values) - max(values) + 3.0
    for plain, warped in ((x, x), (x, x / 2)):
        with pytest.raises(ConfigError, match="reports logits"):
            logprob_kind(top(plain), top(warped))


def test_errors_are_agls() -> None:
    for url in ("", "gpu:8000"):
        with pytest.raises(AglError, match="not the URL of a server"):
            agl.VLLMEngine(url)
    with pytest.raises(ConfigError, match="did you mean 'api_key'"):
        agl.VLLMEngine("http://gpu:8000", api_kee="k")  # type: ignore[call-arg]
    with pytest.raises(EngineError, match=r"await engine\.connect"):
        _ = agl.VLLMEngine("http://gpu:8000").max_context
