"""0.3's command lines: `lightning_cli` for programs, and `python -m agl.compat store` for its `agl store`."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import types
import typing
from collections.abc import Sequence
from typing import Any

from agl.errors import ConfigError
from agl_agentlightning.missing import refuse

__all__ = ["COMMANDS", "lightning_cli", "main"]

COMMANDS = {
    "store": "serves a store",
    "vllm": "start vLLM itself: vllm serve MODEL; agl.VLLMEngine(URL) trains with it",
    "prometheus": "metrics are in the store: agl dashboard, or a tracker in Trainer(loggers=...)",
    "agentops": "AgentOps is not used: agl trace shows a rollout's spans",
}
"""0.3's subcommands: what each does here, or what to use."""


def lightning_cli(*classes: type[Any], args: Sequence[str] | None = None) -> Any:
    """Objects of these classes, made with the options of the command line: the first of them, or a tuple of several.

    Every argument of a constructor is an option: `--n-runners 4`; where several classes have it, all of them get it.
    Numbers, texts, flags (`--dev`, `--no-dev`) and JSON for everything else.

    Args:
        args: the command line; that of the process if None.

    Raises:
        ConfigError: no classes.
    """
    if not classes:
        raise ConfigError("lightning_cli() has no class", hint="trainer = lightning_cli(agl.Trainer)")
    parser = argparse.ArgumentParser()
    parameters: list[dict[str, inspect.Parameter]] = []
    added: set[str] = set()
    for cls in classes:
        named = {
            name: parameter
            for name, parameter in inspect.signature(cls, eval_str=False).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        parameters.append(named)
        hints = _hints(cls)
        group = parser.add_argument_group(cls.__name__)
        for name in named.keys() - added:
            _add_option(group, name, hints.get(name, Any))
        added |= named.keys()
    given = {name: value for name, value in vars(parser.parse_args(args)).items() if value is not _LEFT_OUT}
    made = tuple(
        cls(**{name: given[name] for name in named if name in given})
        for cls, named in zip(classes, parameters, strict=True)
    )
    return made[0] if len(made) == 1 else made


_LEFT_OUT: Any = object()


def _hints(cls: type[Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls.__init__)
    except (NameError, TypeError):
        return {}


def _add_option(group: Any, name: str, hint: Any) -> None:
    kinds = [k for k in typing.get_args(hint) if k is not type(None)] if _is_union(hint) else [hint]
    flags = {f"--{name}": None, f"--{name.replace('_', '-')}": None}
    if kinds == [bool]:
        group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, default=_LEFT_OUT)
    else:
        read = kinds[0] if len(kinds) == 1 and kinds[0] in (int, float, str) else _value
        group.add_argument(*flags, dest=name, type=read, default=_LEFT_OUT)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _value(text: str) -> Any:
    """A JSON value, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main(argv: Sequence[str] | None = None) -> int:
    """0.3's `agl SUBCOMMAND ...`. `store` serves a store in memory, as there; agl's own `agl store` one on disk.

    Raises:
        ConfigError: a subcommand that is not here; it says what to use.
    """
    parser = argparse.ArgumentParser(prog="agl")
    parser.add_argument("subcommand", choices=COMMANDS)
    parser.add_argument("args", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(argv)
    if parsed.subcommand != "store":
        raise refuse(f"agl {parsed.subcommand}", COMMANDS[parsed.subcommand])
    options = argparse.ArgumentParser(prog="agl store")
    options.add_argument("--host", default="127.0.0.1", help="others than this machine's own need AGL_OPERATOR_KEY")
    options.add_argument("--port", type=int, default=4747)
    options.add_argument("--log-level", default="INFO")
    options.add_argument("--backend", choices=["memory", "mongo"], default="memory")
    options.add_argument("--n-workers", type=int, default=1, choices=[1])
    store_options = options.parse_args(parsed.args)
    if store_options.backend == "mongo":
        raise refuse("agl store --backend mongo", "agl store --db postgresql://user:password@host/database")
    from agl_agentlightning.lightning_store import InMemoryLightningStore
    from agl_agentlightning.logs import setup_logging
    from agl_agentlightning.store_server import LightningStoreServer

    setup_logging(store_options.log_level)
    server = LightningStoreServer(InMemoryLightningStore(), store_options.host, store_options.port)

    async def serve() -> None:
        await server.start()
        print(f"listens {server.endpoint}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        pass
    return 0
