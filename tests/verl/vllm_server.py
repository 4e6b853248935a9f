"""A real `vllm serve` on a free port of this machine, on its CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
START_SECONDS = 240.0
BATCHED_TOKENS = 32768
"""All prompts at once: vLLM 0.30 on CPU dies ("CPU Generator does not use offset") where the prompt of a request with a
seed is computed in pieces."""


class VLLMServer:
    """Started at once; `wait` until it serves, `stop` at the end, whatever became of it.

    Args:
        model: a Hugging Face directory. log: where its output goes. options: of `vllm serve`.
    """

    def __init__(self, model: Path, log: Path, *options: object, api_key: str | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", port,
            "--dtype", "float32", "--enforce-eager", "--max-num-seqs", 64, "--max-num-batched-tokens", BATCHED_TOKENS,
            *options,
        ]  # fmt: skip
        key = {} if api_key is None else {"VLLM_API_KEY": api_key}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                list(map(str, command)), env={**os.environ, **ENVIRONMENT, **key}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Return when it serves."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                assert time.monotonic() < deadline, self.log.read_text()[-4000:]
                time.sleep(0.2)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of one of its Prometheus metrics, over the lines that have this label."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((name + "{", name + " ")) and label in line
        )

    def stop(self) -> None:
        """End it with all its processes."""
        for what, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            try:
                os.killpg(self.process.pid, what)
                self.process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
