"""Resource servers of NeMo Gym, started here: two that its package brings, with their tasks, and one that breaks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app_server import served_app
from nemo_gym.server_utils import ServerClient

COUNTER = ("resources_servers.example_session_state_mgmt.app", "StatefulCounterResourcesServer")
QUESTIONS = ("resources_servers.mcqa.app", "MCQAResourcesServer")


def examples(server: tuple[str, str]) -> Path:
    """The tasks that the package has for it."""
    return Path(str(importlib.import_module(server[0]).__file__)).parent / "data" / "example.jsonl"


@contextlib.contextmanager
def running(server: tuple[str, str], *, broken: bool = False) -> Iterator[str]:
    """A running server's URL."""
    module = importlib.import_module(server[0])
    config = getattr(module, f"{server[1]}Config")(host="127.0.0.1", port=1, entrypoint="app.py", name="test")
    app: Any = getattr(module, server[1])(config=config, server_client=ServerClient.model_construct()).setup_webserver()
    if broken:

        @app.middleware("http")
        async def gone(request: Any, call: Any) -> Any:
            if request.url.path == "/verify":
                raise OSError("the grader's disk is gone")
            return await call(request)

    with served_app(app) as url:
        yield url
