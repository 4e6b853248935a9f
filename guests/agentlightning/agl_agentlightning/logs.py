"""0.3's `setup_logging`, for the logger "agl"."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from agl.options import reject_unknown

__all__ = ["configure_logger", "setup", "setup_logging", "setup_module", "setup_module_logging"]

_FORMAT = "%(asctime)s [%(levelname)s] (%(name)s) %(message)s"


def setup_logging(
    level: int | str = "INFO",
    *,
    submodule_levels: Mapping[str, int | str] | None = None,
    apply_to: Iterable[str] = (),
    files: str | Mapping[str, str] | None = None,
    **options: Any,
) -> None:
    """Show the log of "agl", and of the loggers in `apply_to`.

    Args:
        level: of all of them; `submodule_levels` of single loggers, for example {"agl.runner": "DEBUG"}.
        files: to a file; or logger -> file.
        **options: as for `setup_module_logging`.
    """
    for name in ("agl", *apply_to):
        path = files if isinstance(files, str) else (files or {}).get(name)
        setup_module_logging(level, name=name, files=path, **options)
    for name, module_level in (submodule_levels or {}).items():
        logging.getLogger(name.replace("agentlightning", "agl", 1)).setLevel(module_level)


def setup_module_logging(
    level: int | str = "INFO",
    *,
    name: str = "agentlightning",
    console: bool = True,
    propagate: bool = False,
    extra_handlers: Iterable[logging.Handler] = (),
    formatter: logging.Formatter | None = None,
    files: str | None = None,
    **appearance: object,
) -> logging.Logger:
    """Show the log of one logger, which is returned.

    Args:
        name: the logger; 0.3's own is agl's.
        console: to stderr.
        files: to a file.
        extra_handlers: to these too.
        formatter: of console and file.
        **appearance: 0.3's color, capture_warnings and disable_existing_loggers, which change nothing here.
    """
    reject_unknown(appearance, ("color", "capture_warnings", "disable_existing_loggers"), "setup_logging")
    logger = logging.getLogger("agl" if name == "agentlightning" else name)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handlers = [*([logging.StreamHandler()] if console else []), *extra_handlers]
    if files is not None:
        handlers.append(logging.FileHandler(files))
    for handler in handlers:
        if handler.formatter is None:
            handler.setFormatter(formatter or logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate
    return logger


def configure_logger(level: int | str = "INFO", name: str = "agentlightning") -> logging.Logger:
    """`setup_module_logging`, under its name of 0.2."""
    return setup_module_logging(level, name=name)


setup = setup_logging
setup_module = setup_module_logging
