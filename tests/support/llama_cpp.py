"""llama.cpp itself, in a process of its own, by the package xllamacpp: the C++ server from a prebuilt wheel.

`pip install xllamacpp`, or AGL_LLAMA_PYTHON names a Python that has it. Tests that need it are skipped otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import pytest

PROGRAM = """
import sys
import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx = int(sys.argv[2])
parameters.n_parallel = 1
parameters.warmup = False
parameters.fit_params = False
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


class LlamaCpp:
    """A GGUF file that llama.cpp has loaded, with keys and values in float32."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300)

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text; `special`: with those that begin and end every text."""
        body = {"content": text, "add_special": special, "parse_special": True}
        return self._post("/tokenize", body)["tokens"]

    def greedy(self, prompt: list[int], length: int, top: int = 0) -> tuple[list[int], list[dict[int, float]]]:
        """The likeliest tokens after a prompt, up to the one that ends the answer, and the log-probs of the `top` most
        likely ones in each place."""
        body = {
            "prompt": prompt, "n_predict": length, "temperature": 0, "n_probs": top, "return_tokens": True,
            "cache_prompt": False,
        }  # fmt: skip
        answer = self._post("/completion", body)
        places = answer.get("completion_probabilities", [])
        return answer["tokens"], [{t["id"]: t["logprob"] for t in place["top_logprobs"]} for place in places]

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt of a conversation, by the file's chat template."""
        return self._post("/apply-template", {"messages": messages, "tools": tools or []})["prompt"]

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """The first choice of a chat completion."""
        body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 128}
        return self._post("/v1/chat/completions", body)["choices"][0]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = self._http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def llama_cpp(file: Path, context: int = 2048) -> Iterator[LlamaCpp]:
    """The file, loaded with a context of so many tokens."""
    python = os.environ.get("AGL_LLAMA_PYTHON") or (sys.executable if find_spec("xllamacpp") else None)
    if python is None:
        pytest.skip("no xllamacpp here; AGL_LLAMA_PYTHON names a Python that has it")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", PROGRAM, str(file), str(context)]
    with (
        TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            log.seek(0)
            raise AssertionError(f"llama.cpp does not load the file: {log.read()[-2000:]}")
        try:
            yield LlamaCpp(url)
        finally:
            process.stdin.close()
            process.kill()
