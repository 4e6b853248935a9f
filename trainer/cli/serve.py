"""`agl serve DIR`: the command line of a server for applications."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agl.errors import ConfigError
from agl.mdp.selection import DEFAULT_POLICY
from agl.trainer.algorithms.options import Settings
from agl.trainer.cli.evaluation import named
from agl.trainer.gateway.application import MOST_REQUESTS
from agl.trainer.http.aio import run_in_thread
from agl.trainer.http.application_keys import ApplicationKeys
from agl.trainer.launch.serve import ApplicationServer, ServeOptions, serve
from agl.trainer.processes.environment import keep_secrets
from agl.trainer.report import terminal

_LOADING = ("device", "dtype", "max_context", "threads")
_ALLOWED = frozenset({*_LOADING, "engine", "renderer", "chat_template", "host", "port", "capture_content"})


def serve_policies(
    words: Sequence[str],
    options: Mapping[str, Any],
    assignments: Sequence[str],
    *,
    config: Path | None,
    keys: ApplicationKeys,
    record: str | None,
    most_requests: int | None,
    quiet: bool,
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Serve policies to applications until Ctrl-C.

    Args:
        words: the policies: a directory, or NAME=DIR each.
        options: of the command line; None where one was left out.
        assignments: further ones, as `option=value`.
        config: a YAML file, which both take precedence over.
        keys: of the applications.
        record: a store; None keeps nothing.
        most_requests: of one application at once; None = 128.
        write: called with the address and other facts.

    Raises:
        AglError: it cannot serve.
    """
    base = Settings.of({"port": 8000}, "agl serve")
    settings = Settings.of_command_line(options, assignments, config, base)
    if wrong := sorted(settings.values.keys() - _ALLOWED):
        raise ConfigError(
            f"{settings.origins[wrong[0]]}: not for serving policies to applications",
            hint="leave it out; or name the model with --model, for a server that trains or runs rollouts",
        )
    policies = _policies(words)
    if settings.get("engine") is not None and len(policies) > 1:
        raise ConfigError("--engine serves one model", hint="name one policy, whose tokenizer it has")
    serve_options = ServeOptions(
        policies=policies,
        keys=keys,
        host=settings.get("host"),
        port=settings.get("port"),
        engine=settings.get("engine"),
        record=record,
        most_requests=most_requests or MOST_REQUESTS,
        loading={name: value for name in _LOADING if (value := settings.get(name)) is not None},
        renderer=settings.get("renderer"),
        chat_template=settings.get("chat_template"),
        capture_content=settings.get("capture_content") and os.environ.get("AGL_CAPTURE_CONTENT", "1") != "0",
        quiet=quiet,
    )
    console = terminal.console(stderr=True)

    def on_start(server: ApplicationServer) -> None:
        facts = {
            "url": server.url,
            "policies": dict(policies),
            "store": server.store,
            "applications": list(keys.hashes),
            "process": os.getpid(),
        }
        write(facts)
        if not quiet:
            for label, text in _lines(server, policies, keys):
                console.print(f"{label:<9}{text}", soft_wrap=True)

    keep_secrets()
    try:
        run_in_thread(serve(serve_options, on_start))
    except KeyboardInterrupt:
        if not quiet:
            console.print("stopped")


def _policies(words: Sequence[str]) -> dict[str, str]:
    """Name -> model; a single one without a name is called "policy"."""
    pairs = named(words)
    if len(pairs) == 1 and pairs[0][0] == pairs[0][1]:
        pairs = [(DEFAULT_POLICY, pairs[0][1])]
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"there are two policies called {twice!r}", hint="name them: agl serve a=DIR b=DIR")
    return dict(pairs)


def _lines(server: ApplicationServer, policies: Mapping[str, str], keys: ApplicationKeys) -> list[tuple[str, str]]:
    """(label, text) of what a person needs to use the server."""
    rows = [("serves", f"{name} ({model})" if name != model else name) for name, model in policies.items()]
    rows.append(("OpenAI", f"{server.url}/v1"))
    rows.append(("others", f"{server.url} (Anthropic, Google)"))
    if keys.minted is not None:
        rows.append(("key", keys.minted))
        rows.append(("", "new at each start; AGL_KEY or --key-file sets one"))
    elif not keys.hashes:
        rows.append(("key", "none is needed"))
    else:
        rows.append(("keys", f"of {', '.join(keys.hashes)}"))
    if server.store is not None:
        rows.append(("records", server.store))
    return [*rows, ("", "Ctrl-C ends it when open answers have ended")]
